use burn::nn::conv::Conv2d;
use vae_ops::ConvKind;

use crate::{AttentionBlock, GroupNorm, ResnetBlock, VaeModel};

/// The layers of a model's decoder in order, with weights in any form: convolutions `C`, group norms `N`, attention `A`.
#[derive(Debug)]
pub(crate) struct Layers<C, N, A> {
    pub post_quant_conv: Option<C>,
    pub conv_in: C,
    pub mid_resnets: Vec<ResnetLayers<C, N>>,
    pub mid_attentions: Vec<A>,
    pub up_blocks: Vec<UpBlockLayers<C, N>>,
    pub conv_norm_out: N,
    pub conv_out: C,
}

#[derive(Debug)]
pub(crate) struct ResnetLayers<C, N> {
    pub norm1: N,
    pub conv1: C,
    pub norm2: N,
    pub conv2: C,
    pub conv_shortcut: Option<C>,
}

#[derive(Debug)]
pub(crate) struct UpBlockLayers<C, N> {
    pub resnets: Vec<ResnetLayers<C, N>>,
    pub upsamplers: Vec<C>,
}

impl<C, N, A> Layers<C, N, A> {
    /// The layers of a model, made from its modules.
    pub fn of<'m>(
        model: &'m dyn VaeModel,
        conv: impl Fn(ConvKind, &'m Conv2d) -> C,
        norm: impl Fn(&'m GroupNorm) -> N,
        attention: impl Fn(&'m AttentionBlock) -> A,
    ) -> Self {
        let decoder = model.decoder();
        let resnet = |block: &'m ResnetBlock| ResnetLayers {
            norm1: norm(&block.norm1),
            conv1: conv(ConvKind::Square, &block.conv1),
            norm2: norm(&block.norm2),
            conv2: conv(ConvKind::Square, &block.conv2),
            conv_shortcut: block.conv_shortcut.as_ref().map(|layer| conv(ConvKind::Point, layer)),
        };
        let up_blocks = decoder.up_blocks.iter().map(|block| UpBlockLayers {
            resnets: block.resnets.iter().map(resnet).collect(),
            upsamplers: block
                .upsamplers
                .iter()
                .map(|up| conv(ConvKind::Upsample, &up.conv))
                .collect(),
        });
        Self {
            post_quant_conv: model.post_quant_conv().map(|layer| conv(ConvKind::Point, layer)),
            conv_in: conv(ConvKind::Square, &decoder.conv_in),
            mid_resnets: decoder.mid_block.resnets.iter().map(resnet).collect(),
            mid_attentions: decoder.mid_block.attentions.iter().map(attention).collect(),
            up_blocks: up_blocks.collect(),
            conv_norm_out: norm(&decoder.conv_norm_out),
            conv_out: conv(ConvKind::Square, &decoder.conv_out),
        }
    }
}
