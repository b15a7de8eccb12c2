//! A small rectified-flow pipeline for the examples: a denoiser that knows three pictures by heart, and an Euler sampler.
//!
//! The denoiser is trained by `train.py`, in PyTorch: with Burn's autodiff and optimisers, which nothing else here needs,
//! the whole workspace would be built a second time. Its weights, in `weights/`, are compiled in.

mod denoiser;
mod sampler;

pub use denoiser::{Denoiser, Picture, PositionFeatures};
pub use sampler::{Step, sample};

/// Any error with its message; an example only prints it.
pub type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// A model with previews and latents of three pictures, small enough for a repository.
pub const VAE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/flux2-tiny");
