//! The operations of [`Quality::High`](../vae_blocks): the same mathematics, re-associated and fused, channels-last.
//!
//! Activations are `[batch, height, width, channels]` and contiguous; sums, statistics and folds are f32; every result is
//! rounded once to the activations' type. Weights are folded and laid out once, by [`ConvWeight`], [`NormWeight`] and
//! [`AttentionWeight`].

use std::sync::Arc;

use burn::{
    backend::{Backend, Dispatch, ExtensionType, backend_extension, tensor::FloatTensor},
    tensor::{Device, FloatDType, Tensor},
};

/// Which convolution, all with stride 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConvKind {
    /// 1x1.
    Point,
    /// 3x3, padding 1.
    Square,
    /// Nearest-neighbour doubling, then 3x3 with padding 1. The doubled image never exists: each of its four phases is a
    /// 2x2 convolution of the image, whose taps are sums of the 3x3's (`y` even: rows y-1 and y take 0 and 1+2; `y` odd:
    /// rows y and y+1 take 0+1 and 2; columns alike).
    Upsample,
}

impl ConvKind {
    /// Taps on each axis, after folding.
    #[cfg(feature = "gpu")]
    pub(crate) fn taps(self) -> usize {
        match self {
            Self::Point => 1,
            Self::Square => 3,
            Self::Upsample => 2,
        }
    }

    /// Output pixels on each axis for a pixel of the input.
    pub(crate) fn phases(self) -> usize {
        match self {
            Self::Point | Self::Square => 1,
            Self::Upsample => 2,
        }
    }
}

/// What a backend must know of a convolution besides its tensors.
#[derive(Debug, Clone, Copy)]
pub struct ConvSpec {
    /// Which one.
    pub kind: ConvKind,
    /// Channels of the result.
    pub channels_out: usize,
    /// Whether a normalisation of the result follows.
    pub measure: bool,
}

/// What a backend must know of a normalisation besides its tensors.
#[derive(Debug, Clone, Copy)]
pub struct NormSpec {
    /// Groups that the channels are split into.
    pub groups: usize,
    /// Added to the variance.
    pub epsilon: f32,
    /// SiLU of the result.
    pub silu: bool,
}

/// A tensor or none, across the backends.
#[derive(ExtensionType)]
pub enum OptionalTensor<B: Backend> {
    /// None.
    None,
    /// One.
    Some(FloatTensor<B>),
}

/// The result of a convolution.
#[derive(ExtensionType)]
pub struct ConvOutput<B: Backend> {
    /// `[batch, height, width, channels]`
    pub y: FloatTensor<B>,
    /// Moments of `y` in the backend's own form, if they were asked for and come with the convolution.
    #[extension_type]
    pub moments: OptionalTensor<B>,
}

/// The fused operations of a GPU's backend; [`crate::fused`] has their meaning.
#[backend_extension(Cube: cfg(feature = "gpu"))]
pub trait FusedOps: Backend {
    /// Folds and lays out `[channels_out, channels_in, k, k]`; the result is the backend's own.
    fn pack_conv_weight(weight: FloatTensor<Self>, kind: ConvKind, dtype: FloatDType) -> FloatTensor<Self>;

    /// A convolution with a bias in f32, added to `residual`.
    fn fused_conv(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        #[extension_type] residual: OptionalTensor<Self>,
        spec: ConvSpec,
    ) -> ConvOutput<Self>;

    /// GroupNorm with weight and bias in f32; `moments` are those of `x` if they are known.
    fn fused_group_norm(
        x: FloatTensor<Self>,
        #[extension_type] moments: OptionalTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        spec: NormSpec,
    ) -> FloatTensor<Self>;

    /// Moments of `[batch, height, width, channels]` as [`Moments`] has them.
    fn channel_moments(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// `x` plus attention over all pixels of `normalized`, packed as [`AttentionWeight`] has it.
    fn fused_attention(
        x: FloatTensor<Self>,
        normalized: FloatTensor<Self>,
        projection: FloatTensor<Self>,
        projection_bias: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// Count, mean, and sum of squared deviations from that mean, of every channel over some parts of an activation, in f32.
/// Those of bands of an activation, [merged](Self::merge), are the activation's.
#[derive(Debug, Clone)]
pub struct Moments {
    /// `[batch, parts, 3, channels]`
    parts: Tensor<4>,
}

impl Moments {
    /// Parts that are kept apart: more are cheaper to reduce than to keep.
    const PARTS: usize = 4096;

    pub(crate) fn from_parts(parts: Tensor<4>) -> Self {
        Self { parts }
    }

    /// The moments of `[batch, height, width, channels]`.
    ///
    /// # Panics
    /// As [`NormWeight::forward`].
    pub fn of(x: &Tensor<4>) -> Self {
        assert!(x.shape().num_elements() > 0, "moments of an empty tensor");
        #[cfg(feature = "flex")]
        if is_cpu(&x.device()) {
            return Self::from_parts(crate::cpu::measure(x.clone()));
        }
        Self::from_parts(Tensor::from_dispatch(Dispatch::channel_moments(
            x.clone().into_dispatch(),
        )))
    }

    /// The moments of both sets of pixels together.
    pub fn merge(self, other: Self) -> Self {
        let merged = Self::from_parts(Tensor::cat(vec![self.parts, other.parts], 1));
        match merged.parts.dims()[1] {
            parts if parts > Self::PARTS => merged.reduced(),
            _ => merged,
        }
    }

    /// One part in place of all ([Chan et al. 1979](https://doi.org/10.1080/00031305.1983.10483115)).
    fn reduced(self) -> Self {
        let [counts, means, squares] = self.split();
        let count = counts.clone().sum_dim(1);
        // As deviations from the first, so that a mean far from zero costs no digits.
        let first = means.clone().narrow(1, 0, 1);
        let deviations = means - first.clone();
        let deviation = (counts.clone() * deviations.clone()).sum_dim(1) / count.clone();
        let apart = deviations - deviation.clone();
        let squares = (squares + counts * apart.clone() * apart).sum_dim(1);
        Self::from_parts(Tensor::cat(vec![count, first + deviation, squares], 2))
    }

    /// Counts, means and squared deviations, `[batch, parts, 1, channels]` each.
    pub(crate) fn split(&self) -> [Tensor<4>; 3] {
        [0, 1, 2].map(|moment| self.parts.clone().narrow(2, moment, 1))
    }
}

/// An activation, with its moments where they are known.
#[derive(Debug, Clone)]
pub struct Measured {
    x: Tensor<4>,
    moments: Option<Tensor<4>>,
}

impl Measured {
    /// `x`, `[batch, height, width, channels]`, to be normalised with `moments`, those of all pixels of the images that it is
    /// a band of.
    pub fn new(x: Tensor<4>, moments: Moments) -> Self {
        Self {
            x,
            moments: Some(moments.parts),
        }
    }

    /// `[batch, height, width, channels]`
    pub fn activation(&self) -> &Tensor<4> {
        &self.x
    }

    /// The activation alone.
    pub fn into_activation(self) -> Tensor<4> {
        self.x
    }

    /// The activation and its moments, taken now if nothing delivered them.
    pub fn into_parts(self) -> (Tensor<4>, Moments) {
        let moments = match self.moments {
            Some(parts) => Moments::from_parts(parts),
            None => Moments::of(&self.x),
        };
        (self.x, moments)
    }
}

impl From<Tensor<4>> for Measured {
    fn from(x: Tensor<4>) -> Self {
        Self { x, moments: None }
    }
}

fn optional<const D: usize>(tensor: Option<Tensor<D>>) -> OptionalTensor<Dispatch> {
    tensor.map_or(OptionalTensor::None, |tensor| {
        OptionalTensor::Some(tensor.into_dispatch())
    })
}

/// A convolution, ready to run.
#[derive(Debug, Clone)]
pub struct ConvWeight {
    packed: Packed,
    spec: ConvSpec,
    channels_in: usize,
    dtype: FloatDType,
}

/// Weights and bias as the device wants them.
#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "a model has a few dozen")]
enum Packed {
    #[cfg(feature = "flex")]
    Cpu {
        weight: Arc<crate::cpu::ConvWeights>,
        bias: Arc<[f32]>,
    },
    Gpu {
        weight: Tensor<2>,
        bias: Tensor<1>,
    },
}

impl Packed {
    /// Folds and lays out `weight` for activations of type `dtype`; `bias` is f32.
    fn new(kind: ConvKind, weight: Tensor<4>, bias: Tensor<1>, dtype: FloatDType) -> Self {
        #[cfg(feature = "flex")]
        if is_cpu(&weight.device()) {
            let [channels_out, channels_in, ..] = weight.dims();
            let weight = crate::cpu::ConvWeights::pack(kind, &floats(weight), channels_out, channels_in);
            return Self::Cpu {
                weight: Arc::new(weight),
                bias: floats(bias).into(),
            };
        }
        Self::Gpu {
            weight: Tensor::from_dispatch(Dispatch::pack_conv_weight(weight.into_dispatch(), kind, dtype)),
            bias,
        }
    }
}

/// Whether a device is Burn's CPU backend, whose kernels are functions and no backend extension.
#[cfg(feature = "flex")]
fn is_cpu(device: &Device) -> bool {
    matches!(device.as_dispatch(), burn::backend::DispatchDevice::Flex(_))
}

/// The values of a tensor on the CPU.
#[cfg(feature = "flex")]
fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data_dtype(burn::tensor::DType::F32).iter::<f32>().collect()
}

impl ConvWeight {
    /// Folds `weight`, `[channels_out, channels_in, k, k]`, with `bias`, `[channels_out]`, for activations of the weight's type.
    pub fn new(kind: ConvKind, weight: Tensor<4>, bias: Tensor<1>) -> Self {
        let dtype = FloatDType::from(weight.dtype());
        Self::folded(kind, weight, bias.cast(FloatDType::F32), dtype)
    }

    fn folded(kind: ConvKind, weight: Tensor<4>, bias: Tensor<1>, dtype: FloatDType) -> Self {
        let [channels_out, channels_in, ..] = weight.dims();
        Self {
            packed: Packed::new(kind, weight, bias, dtype),
            spec: ConvSpec {
                kind,
                channels_out,
                measure: false,
            },
            channels_in,
            dtype,
        }
    }

    /// Which convolution it is.
    pub fn kind(&self) -> ConvKind {
        self.spec.kind
    }

    /// Channels of the input and of the result.
    pub fn channels(&self) -> [usize; 2] {
        [self.channels_in, self.spec.channels_out]
    }

    /// `[batch, height, width, channels_in]` to `[batch, height, width, channels_out]`, twice as high and wide for
    /// [`ConvKind::Upsample`].
    ///
    /// # Panics
    /// If channels, type or the residual's shape do not fit, and on devices that
    /// [`DeviceProfile::refusals`](crate::support::DeviceProfile::refusals) has reasons for.
    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.run(x, [0, 0], None, false).x
    }

    /// [`forward`](Self::forward) for a result that is normalised next, plus `residual` before it is rounded.
    pub fn forward_measured(&self, x: Tensor<4>, residual: Option<Tensor<4>>) -> Measured {
        self.run(x, [0, 0], residual, true)
    }

    /// [`forward`](Self::forward) for a band of an image, plus `residual` before it is rounded. The first `halo[0]` and the
    /// last `halo[1]` rows of `x` are neighbours of the band: they are read, and the result has no rows for them.
    pub fn forward_band(&self, x: Tensor<4>, halo: [usize; 2], residual: Option<Tensor<4>>) -> Tensor<4> {
        self.run(x, halo, residual, false).x
    }

    fn run(&self, x: Tensor<4>, halo: [usize; 2], residual: Option<Tensor<4>>, measure: bool) -> Measured {
        // Kernels take lengths and types from here unchecked.
        let [batch, rows, width, channels_in] = x.dims();
        assert!(x.shape().num_elements() > 0, "a convolution of an empty tensor");
        assert!(halo[0] + halo[1] < rows, "{rows} rows with {halo:?} for the halo");
        assert_eq!(channels_in, self.channels_in, "channels of the input");
        assert_eq!(FloatDType::from(x.dtype()), self.dtype, "type of the input");
        let height = rows - halo[0] - halo[1];
        if let Some(residual) = &residual {
            let scale = self.spec.kind.phases();
            let dims = [batch, scale * height, scale * width, self.spec.channels_out];
            assert_eq!(residual.dims(), dims, "shape of the residual");
            assert_eq!(residual.dtype(), x.dtype(), "type of the residual");
        }
        match &self.packed {
            #[cfg(feature = "flex")]
            Packed::Cpu { weight, bias } => crate::cpu::convolve(weight, bias, x, halo, residual).into(),
            Packed::Gpu { weight, bias } if halo == [0, 0] => {
                let spec = ConvSpec { measure, ..self.spec };
                let (weight, bias) = (weight.clone().into_dispatch(), bias.clone().into_dispatch());
                let output = Dispatch::fused_conv(x.into_dispatch(), weight, bias, optional(residual), spec);
                Measured {
                    x: Tensor::from_dispatch(output.y),
                    moments: match output.moments {
                        OptionalTensor::Some(moments) => Some(Tensor::from_dispatch(moments)),
                        OptionalTensor::None => None,
                    },
                }
            }
            Packed::Gpu { .. } => {
                // The kernels have a row of output for every row of input; those of the halo are cut off, and what is added
                // to them does not matter.
                let scale = self.spec.kind.phases();
                let widened = residual.map(|residual| {
                    let rows = |row| residual.clone().narrow(1, row, 1);
                    let above = (0..halo[0] * scale).map(|_| rows(0));
                    let below = (0..halo[1] * scale).map(|_| rows(height * scale - 1));
                    Tensor::cat(above.chain([residual.clone()]).chain(below).collect(), 1)
                });
                let y = self.run(x, [0, 0], widened, false).x;
                y.narrow(1, halo[0] * scale, height * scale).into()
            }
        }
    }
}

/// A group normalisation, ready to run.
#[derive(Debug, Clone)]
pub struct NormWeight {
    weight: Tensor<1>,
    bias: Tensor<1>,
    groups: usize,
    epsilon: f64,
}

impl NormWeight {
    /// `weight` and `bias` are `[channels]`, a multiple of `groups`.
    pub fn new(weight: Tensor<1>, bias: Tensor<1>, groups: usize, epsilon: f64) -> Self {
        Self {
            weight: weight.cast(FloatDType::F32),
            bias: bias.cast(FloatDType::F32),
            groups,
            epsilon,
        }
    }

    /// Normalises `[batch, height, width, channels]`.
    pub fn forward(&self, x: impl Into<Measured>) -> Tensor<4> {
        self.run(x.into(), false)
    }

    /// [`forward`](Self::forward), then SiLU.
    pub fn forward_silu(&self, x: impl Into<Measured>) -> Tensor<4> {
        self.run(x.into(), true)
    }

    fn run(&self, Measured { x, moments }: Measured, silu: bool) -> Tensor<4> {
        let channels = x.dims()[3];
        assert!(x.shape().num_elements() > 0, "a norm of an empty tensor");
        assert_eq!([channels], self.weight.dims(), "channels of the input");
        assert!(
            channels.is_multiple_of(self.groups),
            "{channels} channels in {} groups",
            self.groups
        );
        #[cfg(feature = "flex")]
        if is_cpu(&x.device()) {
            let (weight, bias) = (self.weight.clone(), self.bias.clone());
            return crate::cpu::normalize(x, moments, weight, bias, self.groups, self.epsilon, silu);
        }
        let spec = NormSpec {
            groups: self.groups,
            epsilon: self.epsilon as f32,
            silu,
        };
        let (weight, bias) = (self.weight.clone().into_dispatch(), self.bias.clone().into_dispatch());
        Tensor::from_dispatch(Dispatch::fused_group_norm(
            x.into_dispatch(),
            optional(moments),
            weight,
            bias,
            spec,
        ))
    }
}

/// Single-head attention, ready to run: queries, keys and values from one product, the output's projection folded into that
/// of the values. The rows of a softmax add up to 1, so `(A (x V + v)) O + o = A (x V O) + (v O + o)`.
#[derive(Debug, Clone)]
pub struct AttentionWeight {
    norm: NormWeight,
    /// To queries, keys and values, in this order; without a bias for the values.
    projection: ConvWeight,
    bias: Tensor<1>,
}

/// A projection: weight `[channels_out, channels_in]` and bias `[channels_out]`.
pub type Projection = (Tensor<2>, Tensor<1>);

impl AttentionWeight {
    /// Folds the four projections of an attention block over normalised activations.
    pub fn new(norm: NormWeight, query: Projection, key: Projection, value: Projection, out: Projection) -> Self {
        let dtype = FloatDType::from(query.0.dtype());
        let wide = |(weight, bias): Projection| (weight.cast(FloatDType::F32), bias.cast(FloatDType::F32));
        let ((query, query_bias), (key, key_bias)) = (wide(query), wide(key));
        let ((value, value_bias), (out, out_bias)) = (wide(value), wide(out));
        let point = |weight: Tensor<2>, bias: Tensor<1>, dtype| {
            ConvWeight::folded(ConvKind::Point, weight.unsqueeze_dims(&[2, 3]), bias, dtype)
        };
        // The folds are products in f32 by the same operation, because a GPU's own may round to TF32.
        let channels = out.dims()[0];
        let project = point(out, out_bias.zeros_like(), FloatDType::F32);
        let bias = project.forward(value_bias.reshape([1, 1, 1, -1])).reshape([channels]) + out_bias;
        // Rows of the transposed values times the projection: the fold, transposed.
        let folded = project.forward(value.transpose().unsqueeze_dims(&[0, 1]));
        let folded = folded.reshape([channels, channels]).transpose();
        let projection_bias = Tensor::cat(vec![query_bias, key_bias, bias.zeros_like()], 0);
        Self {
            norm,
            projection: point(Tensor::cat(vec![query, key, folded], 0), projection_bias, dtype),
            bias,
        }
    }

    /// `x`, `[batch, height, width, channels]`, plus attention over its pixels.
    pub fn forward(&self, x: Measured) -> Tensor<4> {
        let normalized = self.norm.forward(x.clone());
        let x = x.x;
        match &self.projection.packed {
            #[cfg(feature = "flex")]
            Packed::Cpu { .. } => {
                let [batch, height, width, channels] = x.dims();
                let tokens = self
                    .projection
                    .forward(normalized)
                    .reshape([batch, height * width, 3 * channels]);
                let [query, key, value] = [0, 1, 2].map(|i| tokens.clone().narrow(2, i * channels, channels));
                let attended = crate::attention(query, key, value).reshape([batch, height, width, channels]);
                let dtype = FloatDType::from(x.dtype());
                let wide = |x: Tensor<4>| x.cast(FloatDType::F32);
                (wide(attended) + wide(x) + self.bias.clone().reshape([1, 1, 1, -1])).cast(dtype)
            }
            Packed::Gpu { weight, bias } => Tensor::from_dispatch(Dispatch::fused_attention(
                x.into_dispatch(),
                normalized.into_dispatch(),
                weight.clone().into_dispatch(),
                bias.clone().into_dispatch(),
                self.bias.clone().into_dispatch(),
            )),
        }
    }
}
