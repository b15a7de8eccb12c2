use burn::tensor::Tensor;
use vae_ops::unpatchify2x2;

use crate::{Error, LatentSpace, Result};

/// Latents with the space and layout they are in, so that scaling can be neither forgotten nor done twice.
///
/// Any float type and any strides; a decoder converts to its own type.
#[derive(Debug, Clone)]
pub struct Latents {
    values: Values,
    space: LatentSpace,
}

#[derive(Debug, Clone)]
enum Values {
    Map(Tensor<4>),
    Tokens {
        tokens: Tensor<3>,
        height: usize,
        width: usize,
    },
}

impl Latents {
    /// What a pipeline's loop ends with: scaled (AutoencoderKL, `[batch, C, height, width]`) or batch-norm normalised
    /// and patchified (FLUX.2, `[batch, 4 C, height, width]`).
    pub fn diffusion(map: Tensor<4>) -> Self {
        Self {
            values: Values::Map(map),
            space: LatentSpace::Diffusion,
        }
    }

    /// What the encoder produced, `[batch, C, height, width]`: straight into `post_quant_conv`, without scaling.
    pub fn vae(map: Tensor<4>) -> Self {
        Self::diffusion(map).in_space(LatentSpace::Vae)
    }

    /// 2x2-patchified tokens in diffusion space as FLUX pipelines hold them, `[batch, height * width, 4 C]`: raster
    /// order, channels `(channel, row, column)`. `height` and `width` count tokens: image pixels / 16 for full-size
    /// models.
    pub fn tokens(tokens: Tensor<3>, height: usize, width: usize) -> Self {
        Self {
            values: Values::Tokens { tokens, height, width },
            space: LatentSpace::Diffusion,
        }
    }

    /// The same values taken to be in another space.
    pub fn in_space(self, space: LatentSpace) -> Self {
        Self { space, ..self }
    }

    /// The space the values are in.
    pub fn space(&self) -> LatentSpace {
        self.space
    }

    /// `[batch, C, height, width]`, or `[batch, tokens, channels]`.
    pub fn dims(&self) -> Vec<usize> {
        match &self.values {
            Values::Map(map) => map.dims().to_vec(),
            Values::Tokens { tokens, .. } => tokens.dims().to_vec(),
        }
    }

    /// The device the values are on.
    pub fn device(&self) -> burn::tensor::Device {
        match &self.values {
            Values::Map(map) => map.device(),
            Values::Tokens { tokens, .. } => tokens.device(),
        }
    }

    /// The values as a map, tokens laid out in rows, for a model of `latent_channels` C.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when a dimension is zero, the channels are neither C nor 4 C, or there are not
    /// `height * width` tokens.
    pub fn into_map(self, latent_channels: usize) -> Result<LatentMap> {
        let dims = self.dims();
        let invalid = |reason: String| Err(Error::invalid_latents(&dims, reason));
        if dims.contains(&0) {
            return invalid("a dimension is zero".into());
        }
        let patch_channels = 4 * latent_channels;
        match self.values {
            Values::Map(map) => match map.dims()[1] {
                channels if channels == latent_channels => Ok(LatentMap::Pixels(map)),
                channels if channels == patch_channels => Ok(LatentMap::Patches(map)),
                channels => invalid(format!(
                    "they have {channels} channels and the VAE takes {latent_channels}"
                )),
            },
            Values::Tokens { tokens, height, width } => {
                let [batch, count, channels] = tokens.dims();
                if channels != patch_channels {
                    return invalid(format!(
                        "tokens of {channels} channels, the VAE's have {patch_channels}"
                    ));
                }
                if height.checked_mul(width) != Some(count) {
                    return invalid(format!("{count} tokens are not {height} x {width}"));
                }
                let patches = tokens.swap_dims(1, 2).reshape([batch, channels, height, width]);
                Ok(LatentMap::Patches(patches))
            }
        }
    }

    /// Whether the values are tokens.
    pub fn are_tokens(&self) -> bool {
        matches!(self.values, Values::Tokens { .. })
    }
}

/// Latents as a map.
#[derive(Debug, Clone)]
pub enum LatentMap {
    /// `[batch, C, height, width]`.
    Pixels(Tensor<4>),
    /// `[batch, 4 C, height, width]`: 2x2 patches, channels `(channel, row, column)`.
    Patches(Tensor<4>),
}

impl LatentMap {
    /// `[batch, C, height, width]`.
    pub fn into_pixels(self) -> Tensor<4> {
        match self {
            Self::Pixels(map) => map,
            Self::Patches(map) => unpatchify2x2(map),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn tokens_are_read_row_by_row_on_wide_maps() {
        let device = Device::flex();
        // Two rows of three tokens, numbered in raster order, four equal channels.
        let tokens = Tensor::<1>::from_floats([0., 1., 2., 3., 4., 5.], &device)
            .reshape([1, 6, 1])
            .repeat_dim(2, 4);
        let map = Latents::tokens(tokens, 2, 3).into_map(1).unwrap();
        let image: Vec<f32> = map.into_pixels().into_data().try_into_vec().unwrap();
        let rows = [[0., 0., 1., 1., 2., 2.], [3., 3., 4., 4., 5., 5.0f32]];
        assert_eq!(image, [rows[0], rows[0], rows[1], rows[1]].concat());
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let device = Device::flex();
        let map = |shape| Latents::diffusion(Tensor::<4>::zeros(shape, &device));
        let text = |latents: Latents| latents.into_map(16).unwrap_err().to_string();
        assert!(text(map([1, 4, 8, 8])).contains("4 channels and the VAE takes 16"));
        assert!(text(map([1, 16, 0, 8])).contains("a dimension is zero"));
        let tokens = |shape| Latents::tokens(Tensor::<3>::zeros(shape, &device), 2, 3);
        assert!(text(tokens([1, 5, 64])).contains("5 tokens are not 2 x 3"));
        assert!(text(tokens([1, 6, 16])).contains("16 channels"));
    }
}
