use burn::{
    module::{Module, Param},
    nn::Initializer,
    tensor::{Device, Tensor},
};

/// Group normalisation with f32 statistics, named as in checkpoints (Burn's own calls its weights gamma and beta).
#[derive(Module, Debug)]
pub struct GroupNorm {
    /// Per-channel scale, `[channels]`.
    pub weight: Param<Tensor<1>>,
    /// Per-channel shift, `[channels]`.
    pub bias: Param<Tensor<1>>,
    /// Groups the channels are split into.
    pub num_groups: usize,
}

impl GroupNorm {
    /// Added to the variance; the same in every supported model.
    pub const EPSILON: f64 = 1e-6;

    /// A norm that scales by one and shifts by zero; `channels` must be a multiple of `num_groups`.
    pub fn new(num_groups: usize, channels: usize, device: &Device) -> Self {
        Self {
            weight: Initializer::Ones.init([channels], device),
            bias: Initializer::Zeros.init([channels], device),
            num_groups,
        }
    }

    /// Normalises `[batch, channels, height, width]`; see [`vae_ops::group_norm`].
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        vae_ops::group_norm(x, self.weight.val(), self.bias.val(), self.num_groups, Self::EPSILON)
    }

    /// [`forward`](Self::forward) followed by SiLU, as it stands before every 3x3 convolution but the first.
    pub fn forward_silu(&self, x: Tensor<4>) -> Tensor<4> {
        vae_ops::group_norm_silu(x, self.weight.val(), self.bias.val(), self.num_groups, Self::EPSILON)
    }

    /// [`forward_silu`](Self::forward_silu) of a band of images with the moments of all bands.
    pub(crate) fn forward_silu_of(&self, x: Tensor<4>, moments: &vae_ops::Moments) -> Tensor<4> {
        let (weight, bias) = (self.weight.val(), self.bias.val());
        vae_ops::group_norm_silu_of(x, moments, weight, bias, self.num_groups, Self::EPSILON)
    }
}
