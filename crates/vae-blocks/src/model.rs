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
    /// [`Error::InvalidLatents`] when the latents do not fit the model, are on another device, or are so large that
    /// the device could not index an activation.
    fn prepare(&self, latents: Latents) -> Result<Tensor<4>> {
        if latents.device() != self.device() {
            let reason = format!(
                "they are on {} and the model is on {}",
                device_name(&latents.device()),
                device_name(&self.device())
            );
            return Err(Error::invalid_latents(&latents.dims(), reason));
        }
        let dims = latents.dims();
        let z = self.to_vae_space(latents)?.cast(self.dtype());
        let elements = largest_activation(self.decoder_config(), z.dims());
        if is_indexed_in_32_bits(&self.device()) && elements.is_none_or(|elements| elements > i32::MAX as usize) {
            let reason = "an activation would have over 2^31 elements, more than this device indexes; use the CPU";
            return Err(Error::invalid_latents(&dims, reason));
        }
        Ok(z)
    }
}

/// Elements of the largest tensor between two operations of a decode of `[batch, channels, height, width]` latents;
/// `None` if they cannot be counted.
fn largest_activation(config: &DecoderConfig, z: [usize; 4]) -> Option<usize> {
    let [batch, _, height, width] = z;
    let pixels = batch.checked_mul(height)?.checked_mul(width)?;
    let widths: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
    let mut largest = 0;
    for (i, &channels) in widths.iter().enumerate() {
        // The first resnet of a block has the width of the block before it, already upsampled.
        let channels = channels.max(widths[i.saturating_sub(1)]);
        let scale = 1usize.checked_shl(2 * i as u32)?;
        largest = largest.max(pixels.checked_mul(scale)?.checked_mul(channels)?);
    }
    Some(largest)
}

/// Whether kernels of the device count elements in 32 bits: all but those of the CPU backend.
fn is_indexed_in_32_bits(device: &Device) -> bool {
    device_name(device) != "cpu"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_activation_is_counted_with_upsampled_widths() {
        let config = DecoderConfig {
            latent_channels: 16,
            out_channels: 3,
            block_out_channels: vec![128, 256, 512, 512],
            layers_per_block: 2,
            norm_num_groups: 32,
            mid_block_add_attention: true,
        };
        // 512x512: the last block starts with 256 channels of 512x512 pixels.
        assert_eq!(largest_activation(&config, [1, 16, 64, 64]), Some(256 * 512 * 512));
        assert_eq!(largest_activation(&config, [2, 16, 1, 3]), Some(2 * 256 * 8 * 24));
        assert_eq!(largest_activation(&config, [usize::MAX, 16, 64, 64]), None);
    }
}
