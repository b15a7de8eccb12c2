//! The kernels on Burn tensors of the CPU backend.

use burn::tensor::{DType, Tensor, TensorData, bf16, f16};
use burn_flex::{Flex, FlexTensor};

use super::{ConvWeights, Element, conv, group_norm, moments};

/// Any element type of activations, as a kernel and as Burn have it.
trait Value: Element + burn::tensor::Element + bytemuck::Pod {}
impl<E: Element + burn::tensor::Element + bytemuck::Pod> Value for E {}

/// Runs generic code for the type of a tensor.
macro_rules! for_dtype {
    ($dtype:expr, $run:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $run::<f32>($($argument),*),
            DType::F16 => $run::<f16>($($argument),*),
            DType::BF16 => $run::<bf16>($($argument),*),
            dtype => unreachable!("activations are floats of at most 32 bits, not {}", dtype.name()),
        }
    };
}

/// A convolution with bias and residual of `[batch, height, width, channels]`; see [`conv`] for the halo.
pub(crate) fn convolve(
    weights: &ConvWeights,
    bias: &[f32],
    x: Tensor<4>,
    halo: [usize; 2],
    residual: Option<Tensor<4>>,
) -> Tensor<4> {
    for_dtype!(x.dtype(), convolve_as(weights, bias, x, halo, residual))
}

fn convolve_as<E: Value>(
    weights: &ConvWeights,
    bias: &[f32],
    x: Tensor<4>,
    halo: [usize; 2],
    residual: Option<Tensor<4>>,
) -> Tensor<4> {
    let [batch, rows, width, _] = x.dims();
    let scale = weights.kind().phases();
    let height = rows - halo[0] - halo[1];
    let shape = [batch, scale * height, scale * width, weights.channels_out()];
    let (x, residual) = (primitive(x), residual.map(primitive));
    let mut y = vec![E::default(); shape.iter().product()];
    conv(
        weights,
        bias,
        [batch, rows, width],
        halo,
        values(&x),
        residual.as_ref().map(values),
        &mut y,
    );
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, shape)))
}

/// Moments of `[batch, height, width, channels]`: `[batch, 1, 3, channels]`, see [`moments`].
pub(crate) fn measure(x: Tensor<4>) -> Tensor<4> {
    for_dtype!(x.dtype(), measure_as(x))
}

fn measure_as<E: Value>(x: Tensor<4>) -> Tensor<4> {
    let [batch, height, width, channels] = x.dims();
    let measured = moments::<E>([batch, height * width, channels], values(&primitive(x)));
    let shape = [batch, 1, 3, channels];
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(measured, shape)))
}

/// Group normalisation of `[batch, height, width, channels]`, with `known` moments or its own, then SiLU if asked.
pub(crate) fn normalize(
    x: Tensor<4>,
    known: Option<Tensor<4>>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    groups: usize,
    epsilon: f64,
    silu: bool,
) -> Tensor<4> {
    for_dtype!(x.dtype(), normalize_as(x, known, weight, bias, groups, epsilon, silu))
}

fn normalize_as<E: Value>(
    x: Tensor<4>,
    known: Option<Tensor<4>>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    groups: usize,
    epsilon: f64,
    silu: bool,
) -> Tensor<4> {
    let shape @ [batch, height, width, channels] = x.dims();
    let (x, known, weight, bias) = (primitive(x), known.map(primitive), primitive(weight), primitive(bias));
    let mut y = vec![E::default(); shape.iter().product()];
    let sizes = [batch, height * width, channels];
    group_norm(
        sizes,
        values(&x),
        known.as_ref().map(values),
        values(&weight),
        values(&bias),
        groups,
        epsilon,
        silu,
        &mut y,
    );
    Tensor::from_primitive::<Flex>(FlexTensor::from_data(TensorData::new(y, shape)))
}

/// The contiguous tensor of the CPU backend.
fn primitive<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    match tensor.try_into_primitive::<Flex>() {
        Ok(tensor) => tensor.to_contiguous(),
        Err(error) => unreachable!("weights were packed for the CPU, tensors are on it too: {error:?}"),
    }
}

fn values<E: Value>(tensor: &FlexTensor) -> &[E] {
    match tensor.as_slice() {
        Some(values) => values,
        None => unreachable!("the tensor was made contiguous"),
    }
}
