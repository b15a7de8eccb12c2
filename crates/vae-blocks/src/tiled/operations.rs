use std::{marker::PhantomData, ops::Range};

use burn::{nn::conv::Conv2d, tensor::Tensor};
use vae_ops::{AttentionWeight, ConvKind, ConvWeight, Measured, Moments, NormWeight};

use crate::{AttentionBlock, GroupNorm, Result, VaeModel, conv_weights, layers::Layers};

use super::bands::Place;
use super::storage::{Away, Store};

/// What a decode in bands is made of: on channels-last tensors with folded weights ([`Fused`]), on Burn's own operations
/// ([`Stock`]), or on nothing but sizes ([`Sizes`](crate::memory::Sizes)), which is how its memory is predicted.
pub(crate) trait Operations: Sized {
    /// An activation of all images of a batch, or a band of it.
    type Tensor: Clone;
    /// Of an activation, for the group norm that follows.
    type Moments: Clone;
    /// Where a band is while nothing computes with it.
    type Away;
    type Conv;
    type Norm;
    type Attention;

    fn kind(&self, conv: &Self::Conv) -> ConvKind;

    /// Multiply-adds for one pixel of the input.
    fn work(&self, conv: &Self::Conv) -> f64;

    /// Images, height and width.
    fn pixels(&self, x: &Self::Tensor) -> [usize; 3];

    fn height(&self, x: &Self::Tensor) -> usize {
        self.pixels(x)[1]
    }

    /// Some rows; a view where there are views.
    fn crop(&self, x: Self::Tensor, rows: Range<usize>) -> Self::Tensor;

    /// Several bands, from top to bottom, as one.
    fn stack(&self, bands: Vec<Self::Tensor>) -> Self::Tensor;

    /// A convolution of a band plus `residual`. The first `halo[0]` and last `halo[1]` rows of `x` are the band's neighbours
    /// and have no result; where there are none the image ends, and zeros are outside.
    fn conv(
        &self,
        conv: &Self::Conv,
        x: Self::Tensor,
        halo: [usize; 2],
        residual: Option<Self::Tensor>,
    ) -> Self::Tensor;

    /// [`conv`](Self::conv) and the moments of its result.
    fn conv_measured(
        &self,
        conv: &Self::Conv,
        x: Self::Tensor,
        halo: [usize; 2],
        residual: Option<Self::Tensor>,
    ) -> (Self::Tensor, Self::Moments);

    fn merge(&self, moments: Self::Moments, others: Self::Moments) -> Self::Moments;

    /// Normalises a band with the moments of all bands, then SiLU.
    fn norm_silu(&self, norm: &Self::Norm, x: Self::Tensor, moments: &Self::Moments) -> Self::Tensor;

    /// Attention over all pixels of a whole activation, and the moments of the result.
    fn attention(
        &self,
        attention: &Self::Attention,
        x: Self::Tensor,
        moments: Self::Moments,
    ) -> (Self::Tensor, Self::Moments);

    /// Starts to move a band to where bands are kept.
    fn send_away(&self, x: Self::Tensor) -> Result<Place<Self>>;

    /// Starts to move a band back.
    fn call_back(&self, away: Self::Away) -> Result<Self::Away>;

    /// A band, when it is back.
    fn take_back(&self, away: Self::Away) -> Result<Self::Tensor>;
}

/// Layers for some [`Operations`].
pub(crate) type LayersOf<O> = Layers<<O as Operations>::Conv, <O as Operations>::Norm, <O as Operations>::Attention>;

/// Channels-last, by the fused operations.
pub(crate) struct Fused {
    pub store: Store,
}

impl Operations for Fused {
    type Tensor = Tensor<4>;
    type Moments = Moments;
    type Away = Away;
    type Conv = ConvWeight;
    type Norm = NormWeight;
    type Attention = AttentionWeight;

    fn kind(&self, conv: &ConvWeight) -> ConvKind {
        conv.kind()
    }

    fn work(&self, conv: &ConvWeight) -> f64 {
        let [channels_in, channels_out] = conv.channels();
        work(conv.kind(), channels_in, channels_out)
    }

    fn pixels(&self, x: &Tensor<4>) -> [usize; 3] {
        let [batch, height, width, _] = x.dims();
        [batch, height, width]
    }

    fn crop(&self, x: Tensor<4>, rows: Range<usize>) -> Tensor<4> {
        x.narrow(1, rows.start, rows.len())
    }

    fn stack(&self, bands: Vec<Tensor<4>>) -> Tensor<4> {
        Tensor::cat(bands, 1)
    }

    fn conv(&self, conv: &ConvWeight, x: Tensor<4>, halo: [usize; 2], residual: Option<Tensor<4>>) -> Tensor<4> {
        conv.forward_band(x, halo, residual)
    }

    fn conv_measured(
        &self,
        conv: &ConvWeight,
        x: Tensor<4>,
        halo: [usize; 2],
        residual: Option<Tensor<4>>,
    ) -> (Tensor<4>, Moments) {
        // With a halo, an epilogue would measure rows that are cut off.
        let y = match halo {
            [0, 0] => conv.forward_measured(x, residual),
            _ => conv.forward_band(x, halo, residual).into(),
        };
        y.into_parts()
    }

    fn merge(&self, moments: Moments, others: Moments) -> Moments {
        moments.merge(others)
    }

    fn norm_silu(&self, norm: &NormWeight, x: Tensor<4>, moments: &Moments) -> Tensor<4> {
        norm.forward_silu(Measured::new(x, moments.clone()))
    }

    fn attention(&self, attention: &AttentionWeight, x: Tensor<4>, moments: Moments) -> (Tensor<4>, Moments) {
        Measured::from(attention.forward(Measured::new(x, moments))).into_parts()
    }

    fn send_away(&self, x: Tensor<4>) -> Result<Place<Self>> {
        self.store.send_away(x)
    }

    fn call_back(&self, away: Away) -> Result<Away> {
        self.store.call_back(away)
    }

    fn take_back(&self, away: Away) -> Result<Tensor<4>> {
        self.store.take_back(away)
    }
}

/// `[batch, channels, height, width]`, by Burn's own operations in the model's order.
pub(crate) struct Stock<'m> {
    pub store: Store,
    /// Of every group norm.
    pub groups: usize,
    pub model: PhantomData<&'m ()>,
}

/// A convolution by Burn's own operations.
pub(crate) struct StockConv<'m> {
    kind: ConvKind,
    layer: &'m Conv2d,
}

/// The layers of a model for [`Stock`].
pub(crate) fn stock_layers(model: &dyn VaeModel) -> LayersOf<Stock<'_>> {
    Layers::of(
        model,
        |kind, layer| StockConv { kind, layer },
        |norm| norm,
        |block| block,
    )
}

impl<'m> Operations for Stock<'m> {
    type Tensor = Tensor<4>;
    type Moments = Moments;
    type Away = Away;
    type Conv = StockConv<'m>;
    type Norm = &'m GroupNorm;
    type Attention = &'m AttentionBlock;

    fn kind(&self, conv: &StockConv<'m>) -> ConvKind {
        conv.kind
    }

    fn work(&self, conv: &StockConv<'m>) -> f64 {
        let [channels_out, channels_in, ..] = conv.layer.weight.dims();
        work(conv.kind, channels_in, channels_out)
    }

    fn pixels(&self, x: &Tensor<4>) -> [usize; 3] {
        let [batch, _, height, width] = x.dims();
        [batch, height, width]
    }

    fn crop(&self, x: Tensor<4>, rows: Range<usize>) -> Tensor<4> {
        x.narrow(2, rows.start, rows.len())
    }

    fn stack(&self, bands: Vec<Tensor<4>>) -> Tensor<4> {
        Tensor::cat(bands, 2)
    }

    fn conv(&self, conv: &StockConv<'m>, x: Tensor<4>, halo: [usize; 2], residual: Option<Tensor<4>>) -> Tensor<4> {
        let (weight, bias) = conv_weights(conv.layer);
        let [above, below] = halo;
        let y = match conv.kind {
            ConvKind::Point => {
                let rows = above..self.height(&x) - below;
                vae_ops::conv2d(self.crop(x, rows), weight, bias)
            }
            ConvKind::Square => vae_ops::conv2d_padded(self.with_a_row_around(x, halo), weight, bias, [0, 1]),
            ConvKind::Upsample => {
                // Of two rows that a neighbour becomes, the nearer one is read.
                let x = vae_ops::upsample_nearest2x(x);
                let rows = above..self.height(&x) - below;
                vae_ops::conv2d_padded(self.with_a_row_around(self.crop(x, rows), halo), weight, bias, [0, 1])
            }
        };
        match residual {
            Some(residual) => y + residual,
            None => y,
        }
    }

    fn conv_measured(
        &self,
        conv: &StockConv<'m>,
        x: Tensor<4>,
        halo: [usize; 2],
        residual: Option<Tensor<4>>,
    ) -> (Tensor<4>, Moments) {
        let y = self.conv(conv, x, halo, residual);
        let moments = vae_ops::moments(&y, self.groups);
        (y, moments)
    }

    fn merge(&self, moments: Moments, others: Moments) -> Moments {
        moments.merge(others)
    }

    fn norm_silu(&self, norm: &&'m GroupNorm, x: Tensor<4>, moments: &Moments) -> Tensor<4> {
        norm.forward_silu_of(x, moments)
    }

    fn attention(&self, attention: &&'m AttentionBlock, x: Tensor<4>, _moments: Moments) -> (Tensor<4>, Moments) {
        let y = attention.forward(x);
        let moments = vae_ops::moments(&y, self.groups);
        (y, moments)
    }

    fn send_away(&self, x: Tensor<4>) -> Result<Place<Self>> {
        self.store.send_away(x)
    }

    fn call_back(&self, away: Away) -> Result<Away> {
        self.store.call_back(away)
    }

    fn take_back(&self, away: Away) -> Result<Tensor<4>> {
        self.store.take_back(away)
    }
}

impl Stock<'_> {
    /// Zeros for the neighbours that a band does not have: beyond the image.
    fn with_a_row_around(&self, x: Tensor<4>, halo: [usize; 2]) -> Tensor<4> {
        let zeros = |known: usize| match known {
            0 => Some(x.clone().narrow(2, 0, 1).zeros_like()),
            _ => None,
        };
        let rows: Vec<_> = zeros(halo[0])
            .into_iter()
            .chain([x.clone()])
            .chain(zeros(halo[1]))
            .collect();
        self.stack(rows)
    }
}

/// Multiply-adds of a convolution for one pixel of its input.
pub(crate) fn work(kind: ConvKind, channels_in: usize, channels_out: usize) -> f64 {
    let taps = match kind {
        ConvKind::Point => 1,
        ConvKind::Square => 9,
        ConvKind::Upsample => 36,
    };
    (taps * channels_in * channels_out) as f64
}
