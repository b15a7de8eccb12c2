use std::path::PathBuf;

use burn_vae::{DType, DeviceName, Family, Quality};
use clap::{Parser, ValueEnum};
use vae_io::{LatentSpace, LatentsOptions};

/// Decode saved diffusion latents to images.
#[derive(Debug, Parser)]
#[command(name = "decode", version, about)]
pub struct Args {
    /// Files of latents: .safetensors, .npy or ComfyUI's .latent
    #[arg(required = true, value_name = "LATENTS")]
    pub latents: Vec<PathBuf>,

    /// Weights: a folder in diffusers' layout, or a .safetensors file (VAE or full checkpoint)
    #[arg(long, value_name = "PATH")]
    pub vae: PathBuf,

    /// A diffusers config.json, in place of the one beside the weights
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Output file (.png, .jpg, .webp; .safetensors or .npy for the raw f32 image), or a folder;
    /// by default STEM.png in the current folder
    #[arg(short, long, value_name = "OUT")]
    pub output: Option<PathBuf>,

    /// lossless: stock operations; high: re-associated and fused (not available in this version)
    #[arg(long, value_name = "lossless|high", default_value_t)]
    pub quality: Quality,

    /// auto, cpu, cuda, cuda:N, wgpu or wgpu:N; auto takes a GPU if one is built in and present
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Auto)]
    pub device: DeviceName,

    /// Type of weights and activations; auto is bf16 on CUDA, else f32
    #[arg(long, value_enum, default_value_t)]
    pub dtype: DTypeArg,

    /// Model family, for weights without a config: sd, sdxl, sd3, flux1 or flux2
    #[arg(long, value_name = "FAMILY")]
    pub family: Option<Family>,

    /// The space the latents are in, where the default (diffusion) or the file's own word is wrong
    #[arg(long, value_enum, default_value_t)]
    pub latent_space: LatentSpaceArg,

    /// Height of the image in pixels, for latents that are tokens
    #[arg(long, value_name = "H")]
    pub height: Option<usize>,

    /// Width of the image in pixels, for latents that are tokens
    #[arg(long, value_name = "W")]
    pub width: Option<usize>,

    /// Print what will run at every site of the model, then decode
    #[arg(long)]
    pub explain: bool,

    /// Print one line of JSON an image on standard output
    #[arg(long)]
    pub json: bool,

    /// Overwrite outputs that exist
    #[arg(long)]
    pub force: bool,

    /// Print errors only
    #[arg(short, long)]
    pub quiet: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum DTypeArg {
    #[default]
    Auto,
    F32,
    F16,
    Bf16,
}

impl DTypeArg {
    /// The type asked for, or what `auto` means on a device.
    pub fn on(self, device: DeviceName) -> DType {
        match self {
            Self::Auto => device.default_dtype(),
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub enum LatentSpaceArg {
    #[default]
    Auto,
    Diffusion,
    Vae,
}

impl Args {
    /// What the user says about the latents.
    pub fn latents_options(&self) -> LatentsOptions {
        LatentsOptions {
            space: match self.latent_space {
                LatentSpaceArg::Auto => None,
                LatentSpaceArg::Diffusion => Some(LatentSpace::Diffusion),
                LatentSpaceArg::Vae => Some(LatentSpace::Vae),
            },
            height: self.height,
            width: self.width,
        }
    }
}
