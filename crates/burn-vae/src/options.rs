use std::{num::NonZeroUsize, ops::ControlFlow};

use vae_blocks::{Progress, Quality, Storage};

/// What a decode does besides its latents: [`VaeDecoder::decode_with`](crate::VaeDecoder::decode_with).
#[derive(Default)]
pub struct DecodeOptions<'a> {
    /// How it computes.
    pub quality: Quality,
    /// How it is cut into bands.
    pub tiling: Tiling,
    /// Where bands are while nothing computes with them.
    pub storage: Storage,
    /// Is told after each band or, of an untiled decode, each layer or stage; [`ControlFlow::Break`] ends the decode with
    /// [`Error::Cancelled`](crate::Error::Cancelled). On a GPU it runs ahead of the device.
    pub progress: Option<&'a mut dyn FnMut(&Progress<'_>) -> ControlFlow<()>>,
}

impl DecodeOptions<'_> {
    /// The defaults of a quality.
    pub fn new(quality: Quality) -> Self {
        Self {
            quality,
            ..Self::default()
        }
    }
}

/// Whether a decode runs in bands of rows. The image is the same up to rounding: bands see their neighbours, and group norms
/// and attention see the whole image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tiling {
    /// All rows at once.
    #[default]
    Off,
    /// Bands of so many rows of latents (in VAE space), at the image's resolution.
    Rows(NonZeroUsize),
}
