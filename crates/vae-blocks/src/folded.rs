use burn::{module::Param, nn::conv::Conv2d, tensor::Tensor};
use vae_ops::{AttentionWeight, ConvKind, ConvWeight, Measured, NormWeight};

use crate::{AttentionBlock, Decoder, GroupNorm, Observer, ResnetBlock, VaeModel, conv_weights};

/// A model's decoder with its weights folded and laid out for the fused operations: what [`Quality::High`] runs.
///
/// It holds copies, so it is only as new as the module it was made from; [`burn-vae`'s decoder] owns both.
///
/// [`Quality::High`]: crate::Quality::High
/// [`burn-vae`'s decoder]: https://docs.rs/burn-vae
#[derive(Debug)]
pub struct FoldedDecoder {
    post_quant_conv: Option<ConvWeight>,
    conv_in: ConvWeight,
    mid_resnets: Vec<FoldedResnet>,
    mid_attentions: Vec<AttentionWeight>,
    up_blocks: Vec<FoldedUpBlock>,
    conv_norm_out: NormWeight,
    conv_out: ConvWeight,
}

#[derive(Debug)]
struct FoldedResnet {
    norm1: NormWeight,
    conv1: ConvWeight,
    norm2: NormWeight,
    conv2: ConvWeight,
    conv_shortcut: Option<ConvWeight>,
}

#[derive(Debug)]
struct FoldedUpBlock {
    resnets: Vec<FoldedResnet>,
    upsamplers: Vec<ConvWeight>,
}

impl FoldedDecoder {
    /// Folds the weights of a model, on its device.
    pub fn new(model: &dyn VaeModel) -> Self {
        let decoder: &Decoder = model.decoder();
        let up_blocks = decoder.up_blocks.iter().map(|block| FoldedUpBlock {
            resnets: block.resnets.iter().map(FoldedResnet::new).collect(),
            upsamplers: block
                .upsamplers
                .iter()
                .map(|up| conv(ConvKind::Upsample, &up.conv))
                .collect(),
        });
        Self {
            post_quant_conv: model.post_quant_conv().map(|layer| conv(ConvKind::Point, layer)),
            conv_in: conv(ConvKind::Square, &decoder.conv_in),
            mid_resnets: decoder.mid_block.resnets.iter().map(FoldedResnet::new).collect(),
            mid_attentions: decoder.mid_block.attentions.iter().map(attention).collect(),
            up_blocks: up_blocks.collect(),
            conv_norm_out: norm(&decoder.conv_norm_out),
            conv_out: conv(ConvKind::Square, &decoder.conv_out),
        }
    }

    /// Decodes VAE-space latents in the model's type.
    ///
    /// # Shapes
    /// - `z`: `[batch, latent_channels, height, width]`
    /// - returns `[batch, out_channels, s * height, s * width]` in -1..1, `s` = 2^(up blocks - 1), a view of
    ///   channels-last memory
    pub fn forward(&self, z: Tensor<4>, observer: &mut Observer<'_>) -> Tensor<4> {
        let mut observe = |stage: &str, x: &Tensor<4>| observer(stage, &x.clone().permute([0, 3, 1, 2]));
        let mut z = z.permute([0, 2, 3, 1]);
        if let Some(conv) = &self.post_quant_conv {
            z = conv.forward(z);
            observe("post_quant_conv", &z);
        }
        let mut h = self.conv_in.forward_measured(z, None);
        observe("decoder.conv_in", h.activation());
        let mut attentions = self.mid_attentions.iter();
        for resnet in &self.mid_resnets {
            h = resnet.forward(h);
            if let Some(attention) = attentions.next() {
                h = attention.forward(h).into();
            }
        }
        observe("decoder.mid_block", h.activation());
        for (i, block) in self.up_blocks.iter().enumerate() {
            for resnet in &block.resnets {
                h = resnet.forward(h);
            }
            for upsample in &block.upsamplers {
                h = upsample.forward_measured(h.into_activation(), None);
            }
            observe(&format!("decoder.up_blocks.{i}"), h.activation());
        }
        let image = self.conv_out.forward(self.conv_norm_out.forward_silu(h));
        observe("decoder.conv_out", &image);
        image.permute([0, 3, 1, 2])
    }
}

impl FoldedResnet {
    fn new(block: &ResnetBlock) -> Self {
        Self {
            norm1: norm(&block.norm1),
            conv1: conv(ConvKind::Square, &block.conv1),
            norm2: norm(&block.norm2),
            conv2: conv(ConvKind::Square, &block.conv2),
            conv_shortcut: block.conv_shortcut.as_ref().map(|layer| conv(ConvKind::Point, layer)),
        }
    }

    fn forward(&self, x: Measured) -> Measured {
        let residual = match &self.conv_shortcut {
            Some(shortcut) => shortcut.forward(x.activation().clone()),
            None => x.activation().clone(),
        };
        let h = self.conv1.forward_measured(self.norm1.forward_silu(x), None);
        self.conv2.forward_measured(self.norm2.forward_silu(h), Some(residual))
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
