use std::{num::NonZeroUsize, path::PathBuf, str::FromStr};

use burn_vae::{DType, DeviceName, Family, Quality, Storage, Tiling};
use clap::{Parser, ValueEnum};
use vae_io::{LatentSpace, LatentsOptions};

const EXAMPLES: &str = "\
Examples:
  Latents of a pipeline, with its VAE, to latents.png:
    decode latents.safetensors --vae FLUX.1-dev/vae
  FLUX.1 tokens, which do not say how large their image is:
    decode tokens.pt --vae ae.safetensors --family flux1 --height 1024 --width 768
  One of several arrays, to a JPEG:
    decode run.npz --tensor step_28 --vae sdxl-vae -o step28.jpg
  ComfyUI's files, to pictures in a folder:
    decode ComfyUI/output/latents/*.latent --vae flux2-vae.safetensors -o pictures/
  Folders and patterns, going on where an interrupted run stopped:
    decode monday/ 'week/day-*/*.npy' --vae FLUX.1-dev/vae -o pictures/ --quality high --resume
  From another program, as raw f32 values in -1..1:
    generate | decode - --vae stable-diffusion-3.5/vae -o image.npy";

/// Headings of the help.
mod heading {
    pub const LATENTS: &str = "Latents";
    pub const MODEL: &str = "Model";
    pub const OUTPUT: &str = "Output";
    pub const COMPUTATION: &str = "Computation";
    pub const MEMORY: &str = "Memory";
    pub const MESSAGES: &str = "Messages";
}

/// Decode saved diffusion latents to images.
#[derive(Debug, Parser)]
#[command(name = "decode", version, about, after_help = EXAMPLES)]
pub struct Args {
    /// Files of latents: .safetensors, ComfyUI's .latent, .npy, .npz or PyTorch's .pt, told apart by their content;
    /// folders with such files (those in folders below are left alone); quoted patterns with *, ?, [a-z] and **;
    /// - is standard input
    #[arg(required = true, value_name = "LATENTS")]
    pub latents: Vec<PathBuf>,

    /// The tensor to read from files with several; by default the only one, `latents` or `latent_tensor`
    #[arg(long, value_name = "NAME", help_heading = heading::LATENTS)]
    pub tensor: Option<String>,

    /// The space the latents are in, where the default (diffusion) or the file's own word is wrong
    #[arg(long, value_enum, default_value_t, help_heading = heading::LATENTS)]
    pub latent_space: LatentSpaceArg,

    /// Height of the image in pixels, for latents that are tokens
    #[arg(long, value_name = "H", help_heading = heading::LATENTS)]
    pub height: Option<usize>,

    /// Width of the image in pixels, for latents that are tokens
    #[arg(long, value_name = "W", help_heading = heading::LATENTS)]
    pub width: Option<usize>,

    /// Weights: a folder in diffusers' layout, or a .safetensors file (VAE or full checkpoint)
    #[arg(long, value_name = "PATH", help_heading = heading::MODEL)]
    pub vae: PathBuf,

    /// A diffusers config.json, in place of the one beside the weights
    #[arg(long, value_name = "FILE", help_heading = heading::MODEL)]
    pub config: Option<PathBuf>,

    /// Model family, for weights without a config: sd, sdxl, sd3, flux1 or flux2
    #[arg(long, value_name = "FAMILY", help_heading = heading::MODEL)]
    pub family: Option<Family>,

    /// Output file (.png, .jpg, .webp; .safetensors or .npy for the raw f32 image), or a folder;
    /// by default STEM.png in the current folder, latents.png for standard input
    #[arg(short, long, value_name = "OUT", help_heading = heading::OUTPUT)]
    pub output: Option<PathBuf>,

    /// Overwrite outputs that exist
    #[arg(long, help_heading = heading::OUTPUT)]
    pub force: bool,

    /// Skip outputs that exist: what an interrupted run finished is not decoded again
    #[arg(long, conflicts_with = "force", help_heading = heading::OUTPUT)]
    pub resume: bool,

    /// lossless: Burn's own operations; high: re-associated and fused, several times faster
    #[arg(long, value_name = "lossless|high", default_value_t, help_heading = heading::COMPUTATION)]
    pub quality: Quality,

    /// auto, cpu, cuda, cuda:N, wgpu or wgpu:N; auto takes a GPU if one is built in and present
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Auto, help_heading = heading::COMPUTATION)]
    pub device: DeviceName,

    /// Type of weights and activations; auto is bf16 on CUDA, else f32
    #[arg(long, value_enum, default_value_t, help_heading = heading::COMPUTATION)]
    pub dtype: DTypeArg,

    /// Images of one size to decode together, of whichever files: auto is 1 on the CPU, and on a GPU up to 16, as many as
    /// have the pixels of 1024x1024; auto by default for high, 1 for lossless
    #[arg(long, value_name = "N|auto", help_heading = heading::COMPUTATION)]
    pub batch: Option<BatchSize>,

    /// Bands of rows that a decode is cut into, without seams: off, the rows of latents in a band, or auto for the highest
    /// bands that fit into memory; auto by default for high, off for lossless
    #[arg(long, value_name = "off|ROWS|auto", help_heading = heading::MEMORY)]
    pub tile: Option<Tiling>,

    /// Memory that may be taken of the GPU, or on the CPU by this program, as 6GiB or 800MiB; by default what there is
    #[arg(long, value_name = "SIZE", value_parser = parse_memory, help_heading = heading::MEMORY)]
    pub max_memory: Option<u64>,

    /// Where bands are while others are computed: device; host, for GPUs; half, the host with 16 bits; disk, a temporary file
    #[arg(long, value_name = "device|host|half|disk", help_heading = heading::MEMORY)]
    pub storage: Option<Storage>,

    /// Print what will run at every site of the model and how much memory it will take, then decode
    #[arg(long, help_heading = heading::MESSAGES)]
    pub explain: bool,

    /// Print one line of JSON on standard output for every image, and for every file that is skipped or fails
    #[arg(long, help_heading = heading::MESSAGES)]
    pub json: bool,

    /// Print errors only
    #[arg(short, long, help_heading = heading::MESSAGES)]
    pub quiet: bool,
}

/// What `--batch` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchSize {
    Auto,
    Images(NonZeroUsize),
}

impl FromStr for BatchSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            text => text
                .parse()
                .map(Self::Images)
                .map_err(|_| "it is auto or a number of images from 1".to_string()),
        }
    }
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

/// Bytes, from `6GiB`, `800MiB`, `6g`, or a number of them.
fn parse_memory(text: &str) -> Result<u64, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let power = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err("it is a size as 6GiB, 800MiB or a number of bytes".to_string()),
    };
    let bytes = number.parse::<f64>().map(|number| number * (1u64 << power) as f64);
    match bytes {
        Ok(bytes) if bytes >= 1.0 && bytes < (1u64 << 60) as f64 => Ok(bytes as u64),
        _ => Err("it is a size as 6GiB, 800MiB or a number of bytes".to_string()),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory_are_read_in_binary_units() {
        let sizes = ["6GiB", "800MiB", "1.5g", "2048", "3 kib"].map(parse_memory);
        assert_eq!(sizes, [6 << 30, 800 << 20, 3 << 29, 2048, 3 << 10].map(Ok));
        for text in ["", "GiB", "6GB", "-1", "0", "1e9", "99999999999TiB", "1.2.3g"] {
            assert!(parse_memory(text).is_err(), "{text}");
        }
    }
}
