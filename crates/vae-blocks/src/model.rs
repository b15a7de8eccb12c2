use burn::{
    nn::conv::Conv2d,
    tensor::{Device, FloatDType, Tensor},
};

use vae_ops::support::{DeviceProfile, device_name};

use crate::{Decoder, DecoderConfig, Error, Latents, Plan, Quality, Result};

/// A family of VAEs: how its latents are normalised, around the [`Decoder`] that all share.
pub trait VaeModel {
    /// Undoes the scaling or normalisation and the patches of latents, in f32: `[batch, latent_channels, h, w]`.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the shape or the space is not one this family has.
    fn to_vae_space(&self, latents: Latents) -> Result<Tensor<4>>;

    /// The 1x1 convolution before the decoder, if the model has one.
    fn post_quant_conv(&self) -> Option<&Conv2d>;

    /// The decoder.
    fn decoder(&self) -> &Decoder;

    /// The config the decoder was made from.
    fn decoder_config(&self) -> &DecoderConfig;

    /// Stages that an observer is told of in one decode: the latents, `post_quant_conv`, and those of the decoder.
    fn num_stages(&self) -> usize {
        // conv_in, mid_block and conv_out around the up blocks.
        1 + usize::from(self.post_quant_conv().is_some()) + self.decoder().up_blocks.len() + 3
    }

    /// The device that the weights are on.
    fn device(&self) -> Device {
        self.decoder().conv_in.weight.device()
    }

    /// The type of the weights, of the arithmetic between operations and of the image.
    fn dtype(&self) -> FloatDType {
        self.decoder().conv_in.weight.dtype().into()
    }

    /// What would run for `quality` on the module's device and type.
    ///
    /// # Errors
    /// [`Error::QualityUnavailable`] with its reasons.
    fn plan(&self, quality: Quality) -> Result<Plan> {
        let device = DeviceProfile::of(&self.device());
        let has_post_quant_conv = self.post_quant_conv().is_some();
        Plan::new(
            self.decoder_config(),
            has_post_quant_conv,
            &device,
            self.dtype().into(),
            quality,
        )
    }

    /// Latents as the decoder takes them: checked, in VAE space, in the model's type.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the latents do not fit the model or are on another device.
    fn prepare(&self, latents: Latents) -> Result<Tensor<4>> {
        if latents.device() != self.device() {
            let reason = format!(
                "they are on {} and the model is on {}",
                device_name(&latents.device()),
                device_name(&self.device())
            );
            return Err(Error::invalid_latents(&latents.dims(), reason));
        }
        Ok(self.to_vae_space(latents)?.cast(self.dtype()))
    }
}
