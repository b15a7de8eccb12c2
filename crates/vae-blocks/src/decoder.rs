use burn::{
    module::Module,
    nn::conv::Conv2d,
    tensor::{Device, Tensor},
};

use crate::{DecoderConfig, GroupNorm, MidBlock, Result, UpBlock, conv3x3, convolve};

/// The decoder of AutoencoderKL and AutoencoderKLFlux2
/// ([diffusers' Decoder](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/autoencoders/vae.py)).
#[derive(Module, Debug)]
pub struct Decoder {
    /// 3x3, from latent channels to the widest block's.
    pub conv_in: Conv2d,
    /// At the latents' resolution.
    pub mid_block: MidBlock,
    /// From the latents' resolution to the image's.
    pub up_blocks: Vec<UpBlock>,
    /// Followed by SiLU.
    pub conv_norm_out: GroupNorm,
    /// 3x3, to red, green and blue.
    pub conv_out: Conv2d,
}

/// Sees the activation after each stage of a decode, named by its module path ("decoder.mid_block").
///
/// Called as soon as the stage's work is enqueued, so on a GPU it may run long before the values exist.
pub type Observer<'a> = dyn FnMut(&str, &Tensor<4>) + 'a;

/// An [`Observer`] that can end the decode with an error.
pub type StageObserver<'a> = dyn FnMut(&str, &Tensor<4>) -> Result<()> + 'a;

impl Decoder {
    /// A decoder with Burn's default random weights, for loading into or for benchmarks.
    ///
    /// Parameters are created lazily: loading weights first costs no memory for the random ones. The config must be
    /// valid, as every [`vae_io::VaeConfig`] that was parsed is.
    pub fn new(config: &DecoderConfig, device: &Device) -> Self {
        let groups = config.norm_num_groups;
        // Widths are listed from the image inwards, as the encoder meets them.
        let widths: Vec<usize> = config.block_out_channels.iter().rev().copied().collect();
        let (widest, narrowest) = (widths[0], widths[widths.len() - 1]);
        let up_blocks = widths.iter().enumerate().map(|(i, &width)| {
            let previous = widths[i.saturating_sub(1)];
            let is_last = i + 1 == widths.len();
            UpBlock::new(previous, width, config.layers_per_block + 1, groups, !is_last, device)
        });
        Self {
            conv_in: conv3x3(config.latent_channels, widest, device),
            mid_block: MidBlock::new(widest, groups, config.mid_block_add_attention, device),
            up_blocks: up_blocks.collect(),
            conv_norm_out: GroupNorm::new(groups, narrowest, device),
            conv_out: conv3x3(narrowest, config.out_channels, device),
        }
    }

    /// Decodes VAE-space latents (after `post_quant_conv`) with stock operations.
    ///
    /// # Shapes
    /// - `z`: `[batch, latent_channels, height, width]`
    /// - returns `[batch, out_channels, s * height, s * width]` in -1..1, `s` = 2^(up blocks - 1)
    ///
    /// # Errors
    /// What `observer` returns.
    pub fn forward(&self, z: Tensor<4>, observer: &mut StageObserver<'_>) -> Result<Tensor<4>> {
        let x = convolve(&self.conv_in, z);
        observer("decoder.conv_in", &x)?;
        let mut x = self.mid_block.forward(x);
        observer("decoder.mid_block", &x)?;
        for (i, up_block) in self.up_blocks.iter().enumerate() {
            x = up_block.forward(x);
            observer(&format!("decoder.up_blocks.{i}"), &x)?;
        }
        let x = convolve(&self.conv_out, self.conv_norm_out.forward_silu(x));
        observer("decoder.conv_out", &x)?;
        Ok(x)
    }
}
