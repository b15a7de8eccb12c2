use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

use crate::{ResnetBlock, Upsample};

/// Resnets at one resolution, then an upsampler on all blocks but the last
/// ([diffusers' UpDecoderBlock2D](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/unets/unet_2d_blocks.py)).
#[derive(Module, Debug)]
pub struct UpBlock {
    /// One more than the config's `layers_per_block`.
    pub resnets: Vec<ResnetBlock>,
    /// One upsampler or none.
    pub upsamplers: Vec<Upsample>,
}

impl UpBlock {
    /// A block of `num_resnets` resnets, the first of which changes the number of channels.
    pub fn new(
        channels_in: usize,
        channels_out: usize,
        num_resnets: usize,
        num_groups: usize,
        add_upsample: bool,
        device: &Device,
    ) -> Self {
        Self {
            resnets: (0..num_resnets)
                .map(|i| {
                    ResnetBlock::new(
                        if i == 0 { channels_in } else { channels_out },
                        channels_out,
                        num_groups,
                        device,
                    )
                })
                .collect(),
            upsamplers: (0..usize::from(add_upsample))
                .map(|_| Upsample::new(channels_out, device))
                .collect(),
        }
    }

    /// `[batch, channels_in, height, width]` to `[batch, channels_out, s * height, s * width]`, `s` 2 with an
    /// upsampler and 1 without.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let x = self.resnets.iter().fold(x, |x, resnet| resnet.forward(x));
        self.upsamplers.iter().fold(x, |x, upsample| upsample.forward(x))
    }
}
