//! Operations of a VAE decoder on Burn tensors; this crate knows nothing of models or files.
//!
//! Those at the top are Burn's own operations in the order of the original model: what `Quality::Lossless` runs, and what
//! the [`fused`] ones, which `Quality::High` runs, are measured against. [`support`] tells what a device can run.

mod attention;
#[cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "no backend takes what is dispatched")
)]
mod conv;
#[cfg(feature = "flex")]
mod cpu;
#[cfg_attr(
    not(feature = "gpu"),
    allow(unused_variables, reason = "no backend takes what is dispatched")
)]
pub mod fused;
#[cfg(feature = "gpu")]
mod gpu;
mod group_norm;
mod patchify;
pub mod support;
mod upsample;

pub use attention::attention;
pub use conv::{conv2d, conv2d_padded};
pub use fused::{AttentionWeight, ConvKind, ConvWeight, Measured, Moments, NormWeight};
pub use group_norm::{group_norm, group_norm_silu, group_norm_silu_of, moments};
pub use patchify::unpatchify2x2;
pub use upsample::upsample_nearest2x;
