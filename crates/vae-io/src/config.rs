//! Configs of the decoders: diffusers' `config.json`, presets of the known families, and what the tensors tell.

mod family;
mod infer;
mod json;

pub use family::Family;
pub(crate) use json::{is_autoencoder_kl, read_json};

use crate::{Error, Result};

/// Limits far above any published decoder; beyond them a config is broken, not large.
const MAX_BLOCKS: usize = 8;
const MAX_LAYERS: usize = 64;
const MAX_CHANNELS: usize = 65_536;

/// Groups of every published decoder; tensors do not tell.
const NORM_NUM_GROUPS: usize = 32;

/// The layout of the decoder network, shared by both model classes.
///
/// Source: diffusers' [`Decoder`][source].
///
/// [source]: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/vae.py
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecoderConfig {
    /// Channels of the latents in VAE space.
    pub latent_channels: usize,
    /// Channels of the image; only 3 is supported.
    pub out_channels: usize,
    /// Widths of the decoder's blocks in the encoder's order, as diffusers stores them: the decoder runs them reversed.
    pub block_out_channels: Vec<usize>,
    /// Resnets per encoder block; each up block of the decoder has one more.
    pub layers_per_block: usize,
    /// Groups of every GroupNorm; divides all widths.
    pub norm_num_groups: usize,
    /// Whether the middle block has its attention layer.
    pub mid_block_add_attention: bool,
}

impl DecoderConfig {
    /// Image pixels per latent in VAE space, along each side: 2 for each block but the last.
    ///
    /// FLUX.2's 128-channel latents are patches of 2x2 of these, so there an image is twice as large again.
    pub fn upscale(&self) -> usize {
        let doublings = self.block_out_channels.len().saturating_sub(1);
        2usize.saturating_pow(doublings.try_into().unwrap_or(u32::MAX))
    }

    /// The layout of every full-size family.
    fn full_size(latent_channels: usize) -> Self {
        Self {
            latent_channels,
            out_channels: 3,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            norm_num_groups: NORM_NUM_GROUPS,
            mid_block_add_attention: true,
        }
    }

    fn validate(&self) -> Result<()> {
        let in_range =
            |field, value: usize, max: usize| ensure((1..=max).contains(&value), field, value, format!("1 to {max}"));
        ensure(self.out_channels == 3, "out_channels", self.out_channels, "3")?;
        let blocks = self.block_out_channels.len();
        let few = format!("1 to {MAX_BLOCKS} blocks");
        ensure(
            (1..=MAX_BLOCKS).contains(&blocks),
            "block_out_channels",
            format!("a list of {blocks}"),
            few,
        )?;
        in_range("latent_channels", self.latent_channels, MAX_CHANNELS)?;
        in_range("layers_per_block", self.layers_per_block, MAX_LAYERS)?;
        in_range("norm_num_groups", self.norm_num_groups, MAX_CHANNELS)?;
        self.block_out_channels
            .iter()
            .try_for_each(|&width| in_range("block_out_channels", width, MAX_CHANNELS))?;
        ensure(
            self.block_out_channels
                .iter()
                .all(|width| width % self.norm_num_groups == 0),
            "block_out_channels",
            format!("{:?}", self.block_out_channels),
            format!("multiples of norm_num_groups, which is {}", self.norm_num_groups),
        )
    }
}

/// Config of diffusers' [`AutoencoderKL`][1]: SD, SDXL, SD3, FLUX.1, Z-Image, Playground.
///
/// [`Default`] is what its constructor defaults to, which is no published model.
///
/// [1]: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl.py
#[derive(Debug, Clone, PartialEq)]
pub struct AutoencoderKlConfig {
    /// The decoder network.
    pub decoder: DecoderConfig,
    /// Whether a 1x1 convolution comes before the decoder.
    pub use_post_quant_conv: bool,
    /// Latents in diffusion space are those in VAE space times this.
    pub scaling_factor: f64,
    /// Subtracted in VAE space before scaling; absent is 0.
    pub shift_factor: Option<f64>,
    /// Per-channel mean in VAE space; given together with `latents_std`, never with `shift_factor`.
    pub latents_mean: Option<Vec<f64>>,
    /// Per-channel standard deviation: VAE space is `z * latents_std / scaling_factor + latents_mean`.
    pub latents_std: Option<Vec<f64>>,
    /// Whether f16 overflows, so that pipelines decode in f32.
    pub force_upcast: bool,
}

impl Default for AutoencoderKlConfig {
    fn default() -> Self {
        let decoder = DecoderConfig {
            block_out_channels: vec![64],
            layers_per_block: 1,
            ..DecoderConfig::full_size(4)
        };
        Self { decoder, ..Self::sd() }
    }
}

impl AutoencoderKlConfig {
    /// SD 1.x and 2.x.
    pub fn sd() -> Self {
        Self {
            decoder: DecoderConfig::full_size(Family::Sd.latent_channels()),
            use_post_quant_conv: true,
            scaling_factor: 0.18215,
            shift_factor: None,
            latents_mean: None,
            latents_std: None,
            force_upcast: true,
        }
    }

    /// SDXL. The fp16-fix weights differ only in `force_upcast`, which is false there.
    pub fn sdxl() -> Self {
        Self {
            scaling_factor: 0.13025,
            ..Self::sd()
        }
    }

    /// SD3 and SD3.5.
    pub fn sd3() -> Self {
        Self {
            decoder: DecoderConfig::full_size(Family::Sd3.latent_channels()),
            use_post_quant_conv: false,
            scaling_factor: 1.5305,
            shift_factor: Some(0.0609),
            ..Self::sd()
        }
    }

    /// FLUX.1 and Z-Image.
    pub fn flux1() -> Self {
        Self {
            scaling_factor: 0.3611,
            shift_factor: Some(0.1159),
            ..Self::sd3()
        }
    }

    /// Playground 2.5: SDXL's layout with statistics for each latent channel.
    pub fn playground() -> Self {
        Self {
            scaling_factor: 0.5,
            latents_mean: Some(vec![-1.6574, 1.886, -1.383, 2.5155]),
            latents_std: Some(vec![8.4927, 5.9022, 6.5498, 5.2299]),
            ..Self::sd()
        }
    }

    /// Checks that every value is one this project decodes; [`VaeConfig`]'s readers have done so already.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedConfig`] with the field's name.
    pub fn validate(&self) -> Result<()> {
        self.decoder.validate()?;
        non_zero("scaling_factor", self.scaling_factor)?;
        if let Some(shift) = self.shift_factor {
            finite("shift_factor", shift)?;
        }
        // diffusers' pipelines use either both statistics or neither, and never with a shift.
        let (mean, std) = match (&self.latents_mean, &self.latents_std) {
            (None, None) => return Ok(()),
            (Some(mean), Some(std)) => (mean, std),
            (None, Some(_)) => return Err(unsupported("latents_mean", "absent", "a list beside latents_std")),
            (Some(_), None) => return Err(unsupported("latents_std", "absent", "a list beside latents_mean")),
        };
        if let Some(shift) = self.shift_factor {
            return Err(unsupported("shift_factor", shift, "none beside latents_mean"));
        }
        let channels = self.decoder.latent_channels;
        for (field, list) in [("latents_mean", mean), ("latents_std", std)] {
            let one_each = format!("one number for each of the {channels} latent_channels");
            ensure(
                list.len() == channels,
                field,
                format!("a list of {}", list.len()),
                one_each,
            )?;
        }
        mean.iter().try_for_each(|&value| finite("latents_mean", value))?;
        std.iter().try_for_each(|&value| non_zero("latents_std", value))
    }
}

/// Config of diffusers' [`AutoencoderKLFlux2`][1]: FLUX.2 and its small decoder.
///
/// [`Default`] is what its constructor defaults to, which is FLUX.2 itself.
///
/// [1]: https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_flux2.py
#[derive(Debug, Clone, PartialEq)]
pub struct Flux2Config {
    /// The decoder network.
    pub decoder: DecoderConfig,
    /// Whether a 1x1 convolution comes before the decoder.
    pub use_post_quant_conv: bool,
    /// Added to the running variance before its square root.
    pub batch_norm_eps: f64,
    /// Latents in VAE space per latent in diffusion space, `[height, width]`; only `[2, 2]` is supported.
    pub patch_size: [usize; 2],
    /// Whether f16 overflows, so that pipelines decode in f32.
    pub force_upcast: bool,
}

impl Default for Flux2Config {
    fn default() -> Self {
        Self {
            decoder: DecoderConfig::full_size(Family::Flux2.latent_channels()),
            use_post_quant_conv: true,
            batch_norm_eps: 1e-4,
            patch_size: [2, 2],
            force_upcast: true,
        }
    }
}

impl Flux2Config {
    /// FLUX.2 with its full-size decoder.
    pub fn flux2() -> Self {
        Self::default()
    }

    /// FLUX.2's small decoder.
    pub fn small() -> Self {
        let mut config = Self::flux2();
        config.decoder.block_out_channels = vec![96, 192, 384, 384];
        config
    }

    /// Checks that every value is one this project decodes; [`VaeConfig`]'s readers have done so already.
    ///
    /// # Errors
    ///
    /// [`Error::UnsupportedConfig`] with the field's name.
    pub fn validate(&self) -> Result<()> {
        self.decoder.validate()?;
        ensure(
            self.patch_size == [2, 2],
            "patch_size",
            format!("{:?}", self.patch_size),
            "[2, 2]",
        )?;
        finite("batch_norm_eps", self.batch_norm_eps)?;
        ensure(
            self.batch_norm_eps >= 0.0,
            "batch_norm_eps",
            self.batch_norm_eps,
            "a small positive number",
        )
    }
}

/// The config of a VAE, whichever class it is of.
#[derive(Debug, Clone, PartialEq)]
pub enum VaeConfig {
    /// AutoencoderKL.
    AutoencoderKl(AutoencoderKlConfig),
    /// AutoencoderKLFlux2.
    Flux2(Flux2Config),
}

impl VaeConfig {
    /// The layout of the decoder network.
    pub fn decoder(&self) -> &DecoderConfig {
        match self {
            Self::AutoencoderKl(config) => &config.decoder,
            Self::Flux2(config) => &config.decoder,
        }
    }

    /// Whether a 1x1 convolution comes before the decoder.
    pub fn use_post_quant_conv(&self) -> bool {
        match self {
            Self::AutoencoderKl(config) => config.use_post_quant_conv,
            Self::Flux2(config) => config.use_post_quant_conv,
        }
    }

    /// Whether f16 overflows, so that pipelines decode in f32.
    pub fn force_upcast(&self) -> bool {
        match self {
            Self::AutoencoderKl(config) => config.force_upcast,
            Self::Flux2(config) => config.force_upcast,
        }
    }

    /// Checks that every value is one this project decodes; the readers have done so already.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::AutoencoderKl(config) => config.validate(),
            Self::Flux2(config) => config.validate(),
        }
    }
}

fn unsupported(field: &'static str, value: impl ToString, supported: impl Into<String>) -> Error {
    Error::UnsupportedConfig {
        field,
        value: value.to_string(),
        supported: supported.into(),
    }
}

fn ensure(holds: bool, field: &'static str, value: impl ToString, supported: impl Into<String>) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(unsupported(field, value, supported))
    }
}

/// In f32, which the decoders compute in.
fn finite(field: &'static str, value: f64) -> Result<()> {
    ensure((value as f32).is_finite(), field, value, "finite numbers")
}

/// In f32, where a subnormal divisor overflows.
fn non_zero(field: &'static str, value: f64) -> Result<()> {
    ensure((value as f32).is_normal(), field, value, "finite numbers other than 0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upscale_doubles_for_each_block_but_the_last() {
        let upscale = |blocks| {
            let block_out_channels = vec![32; blocks];
            DecoderConfig {
                block_out_channels,
                ..DecoderConfig::full_size(4)
            }
            .upscale()
        };
        assert_eq!([1, 2, 3, 4].map(upscale), [1, 2, 4, 8]);
        // Not valid, but public fields let anyone build it.
        assert_eq!([0, 100].map(upscale), [1, usize::MAX]);
    }
}
