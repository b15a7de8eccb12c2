//! Decode diffusion latents to images on [Burn](https://burn.dev): the VAE decoders of SD 1 and 2, SDXL, SD3,
//! FLUX.1, Z-Image (AutoencoderKL) and FLUX.2 (AutoencoderKLFlux2).
//!
//! Load a checkpoint onto a device, wrap the latents with the space they are in, decode with a [`Quality`]:
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_vae::{Latents, LoadOptions, Quality, VaeDecoder};
//!
//! # fn main() -> burn_vae::Result<()> {
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/micro-sd");
//! let device = Device::flex();
//! let vae = VaeDecoder::load(folder, &device, &LoadOptions::default())?.decoder;
//!
//! // What the sampler's loop ends with: [batch, channels, height / 8, width / 8] for a full-size model.
//! let latents = Tensor::<4>::zeros([1, 4, 8, 8], &device);
//! let image = vae.decode(Latents::diffusion(latents), Quality::Lossless)?;
//! assert_eq!(image.dims(), [1, 3, 16, 16]); // in -1..1; this small model doubles the size once
//! # Ok(())
//! # }
//! ```
//!
//! A module that is built or loaded elsewhere decodes just as well:
//!
//! ```
//! use burn::tensor::Device;
//! use burn_vae::{AutoencoderKl, AutoencoderKlConfig, VaeDecoder};
//!
//! let module = AutoencoderKl::new(&AutoencoderKlConfig::sdxl(), &Device::flex());
//! let vae = VaeDecoder::from_module(module);
//! ```
//!
//! # Qualities
//! [`Quality::Lossless`] runs stock Burn operations in the order of the original model, with GroupNorm statistics in
//! f32. [`Quality::High`] runs the same mathematics re-associated and fused, several times faster, and is refused with
//! [`Error::QualityUnavailable`] where a device cannot: [`VaeDecoder::plan`] tells before. Its first decode folds the weights
//! and compiles kernels; [`VaeDecoder::warm_up`] does so ahead of time.
//!
//! # Memory
//! [`VaeDecoder::preflight`] tells what a decode will take; [`DecodeOptions`] cuts it into bands of rows, says where they wait,
//! limits the memory, and takes a callback for progress and cancellation:
//!
//! ```
//! use std::ops::ControlFlow;
//! # use burn::tensor::{Device, Tensor};
//! # use burn_vae::{DecodeOptions, Latents, LoadOptions, Progress, Quality, Tiling, VaeDecoder};
//! # fn main() -> burn_vae::Result<()> {
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/micro-sd");
//! # let device = Device::flex();
//! # let vae = VaeDecoder::load(folder, &device, &LoadOptions::default())?.decoder;
//! # let latents = Tensor::<4>::zeros([1, 4, 8, 8], &device);
//! let mut progress = |progress: &Progress<'_>| {
//!     println!("{}: {:.0}%", progress.stage, 100.0 * progress.done);
//!     ControlFlow::Continue(())
//! };
//! let options = DecodeOptions {
//!     tiling: Some(Tiling::Auto),
//!     max_memory: Some(6 << 30),
//!     progress: Some(&mut progress),
//!     ..DecodeOptions::new(Quality::High)
//! };
//! let decoded = vae.decode_with(Latents::diffusion(latents), options)?;
//! println!("{}", decoded.preflight);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//! `flex` (default, pure-Rust CPU), `wgpu`, `vulkan`, `metal`, `cuda`, `hopper` (CUDA through NVRTC, for the whole
//! application). Devices are chosen at run time, see [`DeviceName`].

mod decoder;
mod device;
mod latents;
mod options;
mod preflight;
mod preview;
mod weights;

pub use autoencoder_kl::{AutoencoderKl, AutoencoderKlConfig};
pub use decoder::{LoadOptions, Loaded, VaeDecoder, VaeModule, float_dtype};
pub(crate) use device::host_memory;
pub use device::{DeviceName, peak_memory};
pub use flux2::{AutoencoderKlFlux2, Flux2Config};
pub use latents::latents_from_file;
pub use options::{DecodeOptions, Decoded, OnProgress, Preflight, Tiling};
pub use preview::{Preview, preview_sample};
pub use vae_blocks::{Latents, MemoryEstimate, Observer, Plan, Progress, Quality, Storage, TilePlan, VaeModel};
pub use vae_io as io;
pub use vae_io::{
    DType, DecoderConfig, Error, Family, LatentSpace, PreviewProjection, PreviewSample, Result, VaeConfig,
};
pub use weights::{LoadReport, apply_checkpoint};
