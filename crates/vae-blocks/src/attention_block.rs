use burn::{
    module::Module,
    nn::{Linear, LinearConfig},
    tensor::{Device, Tensor},
};

use crate::GroupNorm;

/// Self-attention over all pixels with one head as wide as the channels, pre-norm, with a residual connection
/// ([diffusers' Attention](https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/models/attention_processor.py)).
#[derive(Module, Debug)]
pub struct AttentionBlock {
    /// Before the projections.
    pub group_norm: GroupNorm,
    /// Projection to queries.
    pub to_q: Linear,
    /// Projection to keys.
    pub to_k: Linear,
    /// Projection to values.
    pub to_v: Linear,
    /// One projection; a list because checkpoints call it `to_out.0`.
    pub to_out: Vec<Linear>,
}

impl AttentionBlock {
    /// A block over `channels`, a multiple of `num_groups`.
    pub fn new(channels: usize, num_groups: usize, device: &Device) -> Self {
        let linear = || LinearConfig::new(channels, channels).init(device);
        Self {
            group_norm: GroupNorm::new(num_groups, channels, device),
            to_q: linear(),
            to_k: linear(),
            to_v: linear(),
            to_out: vec![linear()],
        }
    }

    /// `[batch, channels, height, width]` to the same shape; pixels become tokens in raster order.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, channels, height, width] = x.dims();
        let tokens = self
            .group_norm
            .forward(x.clone())
            .reshape([batch, channels, height * width])
            .swap_dims(1, 2);
        let attended = vae_ops::attention(
            self.to_q.forward(tokens.clone()),
            self.to_k.forward(tokens.clone()),
            self.to_v.forward(tokens),
        );
        let out = self
            .to_out
            .iter()
            .fold(attended, |tokens, linear| linear.forward(tokens));
        out.swap_dims(1, 2).reshape([batch, channels, height, width]) + x
    }
}
