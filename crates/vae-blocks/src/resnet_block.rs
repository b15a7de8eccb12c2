use burn::{
    module::Module,
    nn::conv::Conv2d,
    tensor::{Device, Tensor},
};

use crate::{GroupNorm, conv1x1, conv3x3, convolve};

/// Two 3x3 convolutions with a residual connection
/// ([diffusers' ResnetBlock2D](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/resnet.py)).
#[derive(Module, Debug)]
pub struct ResnetBlock {
    /// Followed by SiLU.
    pub norm1: GroupNorm,
    /// 3x3, from `channels_in` to `channels_out`.
    pub conv1: Conv2d,
    /// Followed by SiLU.
    pub norm2: GroupNorm,
    /// 3x3.
    pub conv2: Conv2d,
    /// 1x1 convolution of the residual where the number of channels changes.
    pub conv_shortcut: Option<Conv2d>,
}

impl ResnetBlock {
    /// A block from `channels_in` to `channels_out`, both multiples of `num_groups`.
    pub fn new(channels_in: usize, channels_out: usize, num_groups: usize, device: &Device) -> Self {
        Self {
            norm1: GroupNorm::new(num_groups, channels_in, device),
            conv1: conv3x3(channels_in, channels_out, device),
            norm2: GroupNorm::new(num_groups, channels_out, device),
            conv2: conv3x3(channels_out, channels_out, device),
            conv_shortcut: (channels_in != channels_out).then(|| conv1x1(channels_in, channels_out, device)),
        }
    }

    /// `[batch, channels_in, height, width]` to `[batch, channels_out, height, width]`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let h = convolve(&self.conv1, self.norm1.forward_silu(x.clone()));
        let h = convolve(&self.conv2, self.norm2.forward_silu(h));
        let x = match &self.conv_shortcut {
            Some(shortcut) => convolve(shortcut, x),
            None => x,
        };
        h + x
    }
}
