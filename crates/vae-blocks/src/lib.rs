//! The decoder that every supported VAE shares, as Burn modules, with the gate and the plan that choose how it runs.
//!
//! Field names are the checkpoint's key names, so a module's parameter paths are the keys of diffusers' checkpoints
//! without a table in between.

mod attention_block;
mod decoder;
mod folded;
mod group_norm;
mod latents;
mod layers;
mod memory;
mod mid_block;
mod model;
mod plan;
mod quality;
mod resnet_block;
mod tiled;
mod up_block;
mod upsample;

pub use attention_block::AttentionBlock;
pub use decoder::{Decoder, Observer, StageObserver};
pub use folded::FoldedDecoder;
pub use group_norm::GroupNorm;
pub use latents::{LatentMap, Latents};
pub use memory::{DecodeCase, MemoryEstimate};
pub use mid_block::MidBlock;
pub use model::VaeModel;
pub use plan::{Implementation, Operation, Plan, Site, SitePlan};
pub use quality::Quality;
pub use resnet_block::ResnetBlock;
pub use tiled::{Progress, Storage, TilePlan, Watch, decode_lossless};
pub use up_block::UpBlock;
pub use upsample::Upsample;
pub use vae_io::{DecoderConfig, Error, LatentSpace, Result};
pub use vae_ops::{
    support::{ConvEngine, DeviceLimits, DeviceProfile, GpuProfile, Runtime, device_name},
    unpatchify2x2,
};

use burn::{
    nn::{
        PaddingConfig2d,
        conv::{Conv2d, Conv2dConfig},
    },
    tensor::{Device, Tensor},
};

/// The 3x3 convolution of a VAE decoder: stride 1, padding 1, with a bias.
pub(crate) fn conv3x3(channels_in: usize, channels_out: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new([channels_in, channels_out], [3, 3])
        .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
        .init(device)
}

/// The 1x1 convolution of a VAE decoder, with a bias.
pub fn conv1x1(channels_in: usize, channels_out: usize, device: &Device) -> Conv2d {
    Conv2dConfig::new([channels_in, channels_out], [1, 1]).init(device)
}

/// Weight and bias of a convolution made by [`conv3x3`] or [`conv1x1`].
pub(crate) fn conv_weights(conv: &Conv2d) -> (Tensor<4>, Tensor<1>) {
    let weight = conv.weight.val();
    let bias = match &conv.bias {
        Some(bias) => bias.val(),
        None => Tensor::zeros([weight.dims()[0]], (&weight.device(), weight.dtype())),
    };
    (weight, bias)
}

/// As `Conv2d::forward`, with sums in f32; see [`vae_ops::conv2d`].
pub(crate) fn convolve(conv: &Conv2d, x: Tensor<4>) -> Tensor<4> {
    let (weight, bias) = conv_weights(conv);
    vae_ops::conv2d(x, weight, bias)
}
