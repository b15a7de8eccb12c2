//! Files around a diffusion VAE decode, without any tensor library: latents, configs, checkpoints, images.
//!
//! Everything read here comes from outside, so every reader validates headers before it allocates, returns
//! [`Error`] instead of panicking, and never allocates more than a small multiple of the file's own size.

mod archive;
mod checkpoint;
mod config;
mod dtype;
mod error;
mod image;
mod latents;
mod mapped;
mod metrics;
mod npy;
mod output;
mod preview;
mod strided;
mod torch;

pub use checkpoint::{Checkpoint, CheckpointTensor};
pub use config::{AutoencoderKlConfig, DecoderConfig, Family, Flux2Config, VaeConfig};
pub use dtype::DType;
pub use error::{Error, ShapeMismatch};
pub use image::{Image, Rgb8};
pub use latents::{LatentFile, LatentHeader, LatentLayout, LatentSpace, LatentsHint, LatentsOptions, LatentsReading};
pub use metrics::Metrics;
pub use output::{OutputFormat, remove_unfinished};
pub use preview::{PreviewProjection, PreviewSample};

/// Result of everything in this project that can fail.
pub type Result<T, E = Error> = core::result::Result<T, E>;
