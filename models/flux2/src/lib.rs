//! The decoder of FLUX.2, [diffusers' AutoencoderKLFlux2](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/autoencoder_kl_flux2.py),
//! and its small decoder.

use burn::{
    module::{Module, Param},
    nn::{Initializer, conv::Conv2d},
    tensor::{Device, FloatDType, Tensor},
};
use vae_blocks::{
    Decoder, DecoderConfig, Error, LatentMap, LatentSpace, Latents, Result, VaeModel, conv1x1, unpatchify2x2,
};
pub use vae_io::Flux2Config;

/// The decoding half of an AutoencoderKLFlux2. Its parameter paths are diffusers' checkpoint keys.
#[derive(Module, Debug)]
pub struct AutoencoderKlFlux2 {
    /// Statistics that diffusion latents are normalised with.
    pub bn: LatentBatchNorm,
    /// 1x1, before the decoder.
    pub post_quant_conv: Option<Conv2d>,
    /// The network that all families share.
    pub decoder: Decoder,
    #[module(skip)]
    config: Flux2Config,
}

/// Running statistics of the patchified latents. Diffusion latents are normalised with them.
#[derive(Module, Debug)]
pub struct LatentBatchNorm {
    /// `[4 * latent_channels]`
    pub running_mean: Param<Tensor<1>>,
    /// `[4 * latent_channels]`
    pub running_var: Param<Tensor<1>>,
}

impl LatentBatchNorm {
    fn new(channels: usize, device: &Device) -> Self {
        Self {
            running_mean: Initializer::Zeros.init([channels], device),
            running_var: Initializer::Ones.init([channels], device),
        }
    }

    /// `z * sqrt(running_var + epsilon) + running_mean` per channel, in f32.
    fn denormalize(&self, z: Tensor<4>, epsilon: f64) -> Tensor<4> {
        let per_channel = |values: Tensor<1>| values.cast(FloatDType::F32).reshape([1, -1, 1, 1]);
        let deviation = per_channel(self.running_var.val()).add_scalar(epsilon).sqrt();
        z * deviation + per_channel(self.running_mean.val())
    }
}

impl AutoencoderKlFlux2 {
    /// A model with Burn's default random weights, created lazily.
    pub fn new(config: &Flux2Config, device: &Device) -> Self {
        let channels = config.decoder.latent_channels;
        Self {
            bn: LatentBatchNorm::new(4 * channels, device),
            post_quant_conv: config.use_post_quant_conv.then(|| conv1x1(channels, channels, device)),
            decoder: Decoder::new(&config.decoder, device),
            config: config.clone(),
        }
    }

    /// The config it was made from.
    pub fn config(&self) -> &Flux2Config {
        &self.config
    }
}

impl VaeModel for AutoencoderKlFlux2 {
    /// Diffusion-space latents are patchified: they are de-normalised, then unpatchified. VAE-space latents are taken
    /// as they are, unpatchified if they have four times the channels.
    fn to_vae_space(&self, latents: Latents) -> Result<Tensor<4>> {
        let (dims, space) = (latents.dims(), latents.space());
        let channels = self.config.decoder.latent_channels;
        let map = latents.into_map(channels)?;
        match (space, map) {
            (LatentSpace::Vae, map) => Ok(map.into_pixels().cast(FloatDType::F32)),
            (LatentSpace::Diffusion, LatentMap::Patches(map)) => {
                let map = map.cast(FloatDType::F32);
                Ok(unpatchify2x2(self.bn.denormalize(map, self.config.batch_norm_eps)))
            }
            (LatentSpace::Diffusion, LatentMap::Pixels(_)) => {
                let reason = format!(
                    "FLUX.2 diffusion latents have {} channels (2x2 patches), {channels} channels are VAE space",
                    4 * channels
                );
                Err(Error::invalid_latents(&dims, reason))
            }
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

    fn model() -> AutoencoderKlFlux2 {
        let device = Device::flex();
        let mut model = AutoencoderKlFlux2::new(&Flux2Config::flux2(), &device);
        model.bn.running_mean = model.bn.running_mean.map(|mean| mean.add_scalar(0.5));
        model.bn.running_var = model.bn.running_var.map(|var| var.mul_scalar(4.0));
        model
    }

    fn map(channels: usize) -> Tensor<4> {
        Tensor::full([1, channels, 1, 1], 1.0, &Device::flex())
    }

    #[test]
    fn diffusion_latents_are_denormalised_with_the_config_s_epsilon() {
        let z = model().to_vae_space(Latents::diffusion(map(128))).unwrap();
        assert_eq!(z.dims(), [1, 32, 2, 2]);
        // sqrt(4 + 1e-4) + 0.5
        let values: Vec<f32> = z.into_data().try_into_vec().unwrap();
        assert!(
            values.iter().all(|value| (value - 2.500_025).abs() <= 1e-6),
            "{values:?}"
        );
    }

    #[test]
    fn vae_space_latents_do_not_pass_the_batch_norm() {
        for channels in [32, 128] {
            let z = model().to_vae_space(Latents::vae(map(channels))).unwrap();
            assert_eq!(z.dims()[1], 32);
            assert!(
                z.into_data()
                    .try_into_vec::<f32>()
                    .unwrap()
                    .iter()
                    .all(|&value| value == 1.0)
            );
        }
        let error = model().to_vae_space(Latents::diffusion(map(32))).unwrap_err();
        assert!(error.to_string().contains("32 channels are VAE space"), "{error}");
    }
}
