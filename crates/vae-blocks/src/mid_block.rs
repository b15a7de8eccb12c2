use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

use crate::{AttentionBlock, ResnetBlock};

/// The block at the latents' resolution: resnet, attention, resnet
/// ([diffusers' UNetMidBlock2D](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/unets/unet_2d_blocks.py)).
#[derive(Module, Debug)]
pub struct MidBlock {
    /// Two resnets.
    pub resnets: Vec<ResnetBlock>,
    /// One attention block, or none where the config says `mid_block_add_attention: false`.
    pub attentions: Vec<AttentionBlock>,
}

impl MidBlock {
    /// A block over `channels`, a multiple of `num_groups`.
    pub fn new(channels: usize, num_groups: usize, add_attention: bool, device: &Device) -> Self {
        Self {
            resnets: (0..2)
                .map(|_| ResnetBlock::new(channels, channels, num_groups, device))
                .collect(),
            attentions: (0..usize::from(add_attention))
                .map(|_| AttentionBlock::new(channels, num_groups, device))
                .collect(),
        }
    }

    /// `[batch, channels, height, width]` to the same shape.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let mut attentions = self.attentions.iter();
        self.resnets.iter().fold(x, |x, resnet| {
            let x = resnet.forward(x);
            match attentions.next() {
                Some(attention) => attention.forward(x),
                None => x,
            }
        })
    }
}
