use burn::{
    nn::conv::Conv2d,
    tensor::{Device, FloatDType, Tensor},
};

use crate::{Decoder, DecoderConfig, Error, Latents, Observer, Plan, Quality, Result};

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
        let device = format!("{:?}", self.device());
        let has_post_quant_conv = self.post_quant_conv().is_some();
        Plan::new(
            self.decoder_config(),
            has_post_quant_conv,
            device,
            self.dtype().into(),
            quality,
        )
    }

    /// Decodes latents to images of `[batch, 3, height, width]` in -1..1, in the model's type, on its device.
    ///
    /// Enqueues the work and returns; nothing is synchronised or read back. `observer` is told of every stage.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the latents do not fit the model, [`Error::QualityUnavailable`] when the plan
    /// for `quality` is refused.
    fn decode(&self, latents: Latents, quality: Quality, observer: &mut Observer<'_>) -> Result<Tensor<4>> {
        self.plan(quality)?;
        if latents.device() != self.device() {
            let reason = format!(
                "they are on {:?} and the model is on {:?}",
                latents.device(),
                self.device()
            );
            return Err(Error::invalid_latents(&latents.dims(), reason));
        }
        let z = self.to_vae_space(latents)?.cast(self.dtype());
        let z = match self.post_quant_conv() {
            Some(conv) => conv.forward(z),
            None => z,
        };
        Ok(self.decoder().forward(z, observer))
    }
}
