use burn::{module::Param, nn::conv::Conv2d, tensor::Tensor};
use vae_ops::{AttentionWeight, ConvKind, ConvWeight, NormWeight};

use crate::{AttentionBlock, GroupNorm, VaeModel, conv_weights, layers::Layers};

/// A model's decoder with its weights folded and laid out for the fused operations: what [`Quality::High`] runs.
///
/// It holds copies, so it is only as new as the module it was made from; [`burn-vae`'s decoder] owns both.
///
/// [`Quality::High`]: crate::Quality::High
/// [`burn-vae`'s decoder]: https://docs.rs/burn-vae
#[derive(Debug)]
pub struct FoldedDecoder {
    pub(crate) layers: Layers<ConvWeight, NormWeight, AttentionWeight>,
}

impl FoldedDecoder {
    /// Folds the weights of a model, on its device.
    pub fn new(model: &dyn VaeModel) -> Self {
        Self {
            layers: Layers::of(model, conv, norm, attention),
        }
    }
}

fn norm(layer: &GroupNorm) -> NormWeight {
    NormWeight::new(
        layer.weight.val(),
        layer.bias.val(),
        layer.num_groups,
        GroupNorm::EPSILON,
    )
}

fn conv(kind: ConvKind, layer: &Conv2d) -> ConvWeight {
    let (weight, bias) = conv_weights(layer);
    ConvWeight::new(kind, weight, bias)
}

fn attention(block: &AttentionBlock) -> AttentionWeight {
    // Burn's Linear keeps [channels_in, channels_out].
    let projection = |layer: &burn::nn::Linear| {
        let weight = layer.weight.val().transpose();
        let bias = layer.bias.as_ref().map(Param::val);
        let bias = bias.unwrap_or_else(|| Tensor::zeros([weight.dims()[0]], &weight.device()));
        (weight, bias)
    };
    AttentionWeight::new(
        norm(&block.group_norm),
        projection(&block.to_q),
        projection(&block.to_k),
        projection(&block.to_v),
        projection(&block.to_out[0]),
    )
}
