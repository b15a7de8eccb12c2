//! Latents: reading them from files, and telling what they are to a model.
//!
//! A file says little: a shape, a type, perhaps the image's size. [`LatentFile`] is what it says, [`LatentHeader`] the same
//! without the values; [`LatentsReading`] is what that means to a model, after the user's [`LatentsOptions`] and the file's
//! [`LatentsHint`] are taken into account.

mod file;
mod reading;

use std::fmt;

pub use file::{LatentFile, LatentHeader};
pub use reading::LatentsReading;

/// The space that the values of latents are in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LatentSpace {
    /// What a diffusion pipeline's loop ends with: scaled (and shifted), or batch-norm normalised for FLUX.2.
    Diffusion,
    /// What the VAE's encoder gives and its decoder takes.
    Vae,
}

impl fmt::Display for LatentSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Diffusion => "diffusion",
            Self::Vae => "vae",
        })
    }
}

/// How the dimensions of latents are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LatentLayout {
    /// `[B, C, h, w]`, or `[C, h, w]` without a batch.
    Map,
    /// `[B, L, 4C]`: each token is a 2x2 patch with its channels in the order (c, pi, pj), tokens in raster order.
    Tokens,
}

/// What a file says about its latents besides their shape.
///
/// Hints decide where nothing else does; the [`LatentsOptions`] override them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LatentsHint {
    /// Height of the image in pixels, from the metadata of a safetensors file.
    pub height: Option<usize>,
    /// Width of the image in pixels, from the metadata of a safetensors file.
    pub width: Option<usize>,
    /// The space, where the format of the file fixes it (ComfyUI's `.latent`).
    pub space: Option<LatentSpace>,
}

/// What the user says about latents; it must agree with their shape.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LatentsOptions {
    /// `--latent-space`
    pub space: Option<LatentSpace>,
    /// `--height`, of the image in pixels.
    pub height: Option<usize>,
    /// `--width`, of the image in pixels.
    pub width: Option<usize>,
}
