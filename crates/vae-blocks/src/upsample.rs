use burn::{
    module::Module,
    nn::conv::Conv2d,
    tensor::{Device, Tensor},
};

use crate::{conv3x3, convolve};

/// Nearest-neighbour doubling followed by a 3x3 convolution
/// ([diffusers' Upsample2D](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/upsampling.py)).
#[derive(Module, Debug)]
pub struct Upsample {
    /// 3x3, after the doubling.
    pub conv: Conv2d,
}

impl Upsample {
    /// An upsampler that keeps the number of channels.
    pub fn new(channels: usize, device: &Device) -> Self {
        Self {
            conv: conv3x3(channels, channels, device),
        }
    }

    /// `[batch, channels, height, width]` to `[batch, channels, 2 * height, 2 * width]`.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        convolve(&self.conv, vae_ops::upsample_nearest2x(x))
    }
}
