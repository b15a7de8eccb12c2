//! The decoder of [diffusers' AutoencoderKL](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl.py):
//! SD 1 and 2, SDXL, SD3 and 3.5, FLUX.1, Z-Image, Playground 2.5.

use burn::{
    module::Module,
    nn::conv::Conv2d,
    tensor::{Device, FloatDType, Tensor},
};
use vae_blocks::{Decoder, DecoderConfig, Error, LatentMap, LatentSpace, Latents, Result, VaeModel, conv1x1};
pub use vae_io::AutoencoderKlConfig;

/// The decoding half of an AutoencoderKL. Its parameter paths are diffusers' checkpoint keys.
#[derive(Module, Debug)]
pub struct AutoencoderKl {
    /// Absent in SD3 and FLUX.1.
    pub post_quant_conv: Option<Conv2d>,
    /// The network that all families share.
    pub decoder: Decoder,
    #[module(skip)]
    config: AutoencoderKlConfig,
}

impl AutoencoderKl {
    /// A model with Burn's default random weights, created lazily.
    pub fn new(config: &AutoencoderKlConfig, device: &Device) -> Self {
        let channels = config.decoder.latent_channels;
        Self {
            post_quant_conv: config.use_post_quant_conv.then(|| conv1x1(channels, channels, device)),
            decoder: Decoder::new(&config.decoder, device),
            config: config.clone(),
        }
    }

    /// The config it was made from.
    pub fn config(&self) -> &AutoencoderKlConfig {
        &self.config
    }
}

impl VaeModel for AutoencoderKl {
    /// `z / scaling_factor + shift_factor`; with `latents_mean` and `latents_std`,
    /// `z / scaling_factor * latents_std + latents_mean`.
    fn to_vae_space(&self, latents: Latents) -> Result<Tensor<4>> {
        let (dims, space, are_tokens) = (latents.dims(), latents.space(), latents.are_tokens());
        let channels = self.config.decoder.latent_channels;
        let map = latents.into_map(channels)?;
        // Only tokens are packed in this family: sixteen channels of a map are not four channels of patches.
        if let (LatentMap::Patches(_), false) = (&map, are_tokens) {
            let reason = format!("they have {} channels and the VAE takes {channels}", dims[1]);
            return Err(Error::invalid_latents(&dims, reason));
        }
        let z = map.into_pixels().cast(FloatDType::F32);
        if space == LatentSpace::Vae {
            return Ok(z);
        }
        let z = z.div_scalar(self.config.scaling_factor);
        let per_channel = |values: &[f64], device: &Device| {
            let values: Vec<f32> = values.iter().map(|&value| value as f32).collect();
            Tensor::<1>::from_floats(values.as_slice(), device).reshape([1, values.len(), 1, 1])
        };
        match (&self.config.latents_mean, &self.config.latents_std) {
            (Some(mean), Some(std)) => {
                let device = z.device();
                Ok(z * per_channel(std, &device) + per_channel(mean, &device))
            }
            _ => Ok(match self.config.shift_factor {
                Some(shift) => z.add_scalar(shift),
                None => z,
            }),
        }
    }

    fn post_quant_conv(&self) -> Option<&Conv2d> {
        self.post_quant_conv.as_ref()
    }

    fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    fn decoder_config(&self) -> &DecoderConfig {
        &self.config.decoder
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_vae(config: &AutoencoderKlConfig, value: f32) -> Vec<f32> {
        let device = Device::flex();
        let latents = Tensor::<4>::full([1, config.decoder.latent_channels, 1, 1], value, &device);
        let model = AutoencoderKl::new(config, &device);
        let z = model.to_vae_space(Latents::diffusion(latents)).unwrap();
        z.into_data().try_into_vec().unwrap()
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert!(
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1e-5),
            "{found:?} is not {expected:?}"
        );
    }

    #[test]
    fn each_family_has_its_own_scale_and_shift() {
        assert_close(&to_vae(&AutoencoderKlConfig::sd(), 1.0), &[5.489_981; 4]);
        assert_close(&to_vae(&AutoencoderKlConfig::sdxl(), 1.0), &[7.677_543; 4]);
        assert_close(&to_vae(&AutoencoderKlConfig::sd3(), 1.0), &[0.714_281; 16]);
        assert_close(&to_vae(&AutoencoderKlConfig::flux1(), 1.0), &[2.885_216; 16]);
    }

    #[test]
    fn playground_latents_have_a_mean_and_deviation_per_channel() {
        // 1 * std / 0.5 + mean
        let expected = [15.328, 13.6904, 11.7166, 12.9753];
        assert_close(&to_vae(&AutoencoderKlConfig::playground(), 1.0), &expected);
    }

    #[test]
    fn latents_of_sixteen_channels_are_not_patches_of_four() {
        let device = Device::flex();
        let model = AutoencoderKl::new(&AutoencoderKlConfig::sd(), &device);
        let map = Tensor::<4>::zeros([1, 16, 2, 2], &device);
        for latents in [Latents::diffusion(map.clone()), Latents::vae(map)] {
            let error = model.to_vae_space(latents).unwrap_err().to_string();
            assert!(error.contains("16 channels and the VAE takes 4"), "{error}");
        }
        let tokens = Tensor::<3>::zeros([1, 4, 16], &device);
        let z = model.to_vae_space(Latents::tokens(tokens, 2, 2)).unwrap();
        assert_eq!(z.dims(), [1, 4, 4, 4]);
    }

    #[test]
    fn vae_space_latents_are_not_scaled_again() {
        let device = Device::flex();
        let model = AutoencoderKl::new(&AutoencoderKlConfig::flux1(), &device);
        let latents = Tensor::<4>::full([1, 16, 1, 1], 0.25, &device);
        let z = model.to_vae_space(Latents::vae(latents)).unwrap();
        assert_eq!(z.into_data().try_into_vec::<f32>().unwrap(), [0.25; 16]);
    }
}
