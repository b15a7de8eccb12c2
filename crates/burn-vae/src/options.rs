use std::{fmt, num::NonZeroUsize, ops::ControlFlow, str::FromStr};

use burn::tensor::Tensor;
use vae_blocks::{MemoryEstimate, Progress, Quality, Storage, TilePlan};

/// What a decode does besides its latents: [`VaeDecoder::decode_with`](crate::VaeDecoder::decode_with).
#[derive(Default)]
pub struct DecodeOptions<'a> {
    /// How it computes.
    pub quality: Quality,
    /// How it is cut into bands. `None`: [`Tiling::Auto`] for [`Quality::High`], [`Tiling::Off`] for [`Quality::Lossless`].
    pub tiling: Option<Tiling>,
    /// Where bands are while nothing computes with them. `None`: on the device; where that has no room, [`Tiling::Auto`] takes
    /// the host's memory for a GPU.
    pub storage: Option<Storage>,
    /// Bytes that may be taken of the device, weights included, on the CPU by this process. `None`: all of a GPU's memory where it
    /// tells, on the CPU what the system has left.
    pub max_memory: Option<u64>,
    /// Is told after each band or, of an untiled decode, each layer or stage; [`ControlFlow::Break`] ends the decode with
    /// [`Error::Cancelled`](crate::Error::Cancelled). On a GPU it runs ahead of the device.
    pub progress: Option<&'a mut OnProgress<'a>>,
}

/// Is told of a decode's progress, and may end it.
pub type OnProgress<'a> = dyn FnMut(&Progress<'_>) -> ControlFlow<()> + 'a;

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tiling {
    /// All rows at once.
    Off,
    /// Bands of so many rows of latents (in VAE space), at the image's resolution.
    Rows(NonZeroUsize),
    /// All rows at once where that fits into the memory, else the highest bands that do.
    Auto,
}

impl fmt::Display for Tiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Rows(rows) => write!(f, "{rows}"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl FromStr for Tiling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "auto" => Ok(Self::Auto),
            rows => rows
                .parse()
                .map(Self::Rows)
                .map_err(|_| format!("`{text}` is not a tiling, use off, auto or the rows of latents in a band")),
        }
    }
}

/// An image and how it came about.
#[derive(Debug)]
pub struct Decoded {
    /// `[batch, 3, height, width]` in -1..1, in the model's type, on its device.
    pub image: Tensor<4>,
    /// What was predicted and chosen before.
    pub preflight: Preflight,
}

/// What a decode will run as: [`VaeDecoder::preflight`](crate::VaeDecoder::preflight).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preflight {
    /// How it is cut.
    pub tile: TilePlan,
    /// Its memory.
    pub memory: MemoryEstimate,
    /// The memory that it had to fit into, if any is known.
    pub budget: Option<u64>,
}

impl fmt::Display for Preflight {
    /// "bands of 8 rows of latents, 1697 MiB of the host predicted of 6144".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} predicted", self.tile, self.memory)?;
        match self.budget {
            Some(budget) => write!(f, " of {}", budget >> 20),
            None => Ok(()),
        }
    }
}
