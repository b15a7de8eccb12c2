//! The fused operations on every device that is there, against stock operations in f32 on the CPU.
//!
//! Bounds are relative to the root mean square of the reference: 1e-5 for f32, and for half precision what rounding the
//! result once (and, in attention, the probabilities) costs.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use integration_tests::open;
use vae_ops::{AttentionWeight, ConvKind, ConvWeight, NormWeight};

/// Deterministic values of roughly unit variance.
fn random(shape: &[usize], seed: u64, scale: f32) -> TensorData {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    // A sum of four uniform values has variance 1/3.
    let values = (0..shape.iter().product()).map(|_| (next() + next() + next() + next()) * 3f32.sqrt() * scale);
    TensorData::new(values.collect::<Vec<f32>>(), shape.to_vec())
}

struct Rig {
    device: Device,
    dtype: FloatDType,
}

impl Rig {
    /// The same values on the device in its type, and on the CPU in f32 after the same rounding.
    fn pair<const D: usize>(&self, shape: [usize; D], seed: u64, scale: f32) -> (Tensor<D>, Tensor<D>) {
        let cpu = Device::flex();
        let rounded = Tensor::<D>::from_data(random(&shape, seed, scale), (&cpu, DType::F32)).cast(self.dtype);
        let reference = rounded.clone().cast(FloatDType::F32);
        let data = reference.clone().into_data();
        (
            Tensor::<D>::from_data(data, (&self.device, DType::F32)).cast(self.dtype),
            reference,
        )
    }

    /// Relative error of half precision times `roundings`, or the bound of f32.
    fn bound(&self, roundings: f64) -> f64 {
        match self.dtype {
            FloatDType::BF16 => 2.5e-3 * roundings,
            FloatDType::F16 => 4e-4 * roundings,
            _ => 1e-5,
        }
    }

    fn check(&self, what: &str, result: Tensor<4>, expected: Tensor<4>, roundings: f64) {
        assert_eq!(result.dims(), expected.dims(), "{what}");
        let result: Vec<f32> = result.into_data_dtype(DType::F32).try_into_vec().unwrap();
        let expected: Vec<f32> = expected.into_data_dtype(DType::F32).try_into_vec().unwrap();
        let pairs = || {
            result
                .iter()
                .zip(&expected)
                .map(|(a, b)| (f64::from(*a), f64::from(*b)))
        };
        let error: f64 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
        let power: f64 = pairs().map(|(_, b)| b * b).sum();
        let relative = (error / power).sqrt();
        let max = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{what} {:?}: relative {relative:.2e}, max {max:.2e}", self.dtype);
        assert!(
            relative <= self.bound(roundings),
            "{what}: relative error {relative:.3e}, max {max:.3e}"
        );
    }
}

fn channels_last(x: Tensor<4>) -> Tensor<4> {
    x.permute([0, 2, 3, 1])
}

fn channels_first(x: Tensor<4>) -> Tensor<4> {
    x.permute([0, 3, 1, 2])
}

fn convolve(x: Tensor<4>, weight: Tensor<4>, bias: Tensor<1>) -> Tensor<4> {
    let padding = weight.dims()[2] / 2;
    let options = burn::tensor::ops::ConvOptions::new([1, 1], [padding, padding], [1, 1], 1);
    burn::tensor::module::conv2d(x, weight, Some(bias), options)
}

fn convolution(rig: &Rig, kind: ConvKind, [n, h, w, i, o]: [usize; 5], residual: bool) {
    let k = if kind == ConvKind::Point { 1 } else { 3 };
    let (x, x_ref) = rig.pair([n, i, h, w], 1, 1.0);
    let (weight, weight_ref) = rig.pair([o, i, k, k], 2, 1.0 / ((k * k * i) as f32).sqrt());
    let (bias, bias_ref) = rig.pair([o], 3, 0.5);
    let x_ref = match kind {
        ConvKind::Upsample => vae_ops::upsample_nearest2x(x_ref),
        _ => x_ref,
    };
    let mut expected = convolve(x_ref, weight_ref, bias_ref);
    let layer = ConvWeight::new(kind, weight, bias);
    let result = if residual {
        let (added, added_ref) = rig.pair(expected.dims(), 4, 1.0);
        expected = expected + added_ref;
        layer
            .forward_measured(channels_last(x), Some(channels_last(added)))
            .into_activation()
    } else {
        layer.forward(channels_last(x))
    };
    // Folded taps are rounded to half precision once more.
    let roundings = if kind == ConvKind::Upsample { 2.0 } else { 1.0 };
    let what = format!(
        "{kind:?} {n}x{h}x{w} {i}->{o}{}",
        if residual { " + residual" } else { "" }
    );
    rig.check(&what, channels_first(result), expected, roundings);
}

fn convolutions(rig: &Rig, shapes: &[[usize; 5]]) {
    for &shape in shapes {
        convolution(rig, ConvKind::Point, shape, false);
        convolution(rig, ConvKind::Square, shape, false);
        convolution(rig, ConvKind::Square, shape, true);
        convolution(rig, ConvKind::Upsample, shape, false);
        convolution(rig, ConvKind::Upsample, shape, true);
    }
}

fn group_norms(rig: &Rig) {
    for (shape, groups, mean) in [
        ([1, 24, 7, 5], 8, 0.0),
        ([2, 48, 1, 3], 8, 0.0),
        ([1, 96, 9, 17], 32, 0.0),
        ([1, 32, 33, 31], 32, 0.0),
        ([1, 128, 40, 41], 32, 0.0),
        ([1, 4, 1, 1], 2, 0.0),
        ([1, 1030, 3, 2], 1, 0.0),
        ([1, 64, 16, 19], 32, 1e3),
    ] {
        // Half precision cannot hold a mean of 1000 with a variance of 1.
        if mean != 0.0 && rig.dtype != FloatDType::F32 {
            continue;
        }
        let (x, x_ref) = rig.pair::<4>(shape, 5, 1.0);
        let (x, x_ref) = (x.add_scalar(mean), x_ref.add_scalar(mean));
        let (weight, weight_ref) = rig.pair([shape[1]], 6, 1.0);
        let (bias, bias_ref) = rig.pair([shape[1]], 7, 1.0);
        let layer = NormWeight::new(weight, bias, groups, 1e-6);
        let what = format!("group norm {shape:?} / {groups}, mean {mean}");
        // At a mean of 1000 one step of f32 is 6e-5 of a deviation.
        let roundings = if mean == 0.0 { 1.0 } else { 10.0 };
        let bound = |x: Tensor<4>, y: Tensor<4>, what: &str| match rig.dtype {
            FloatDType::F32 if mean != 0.0 => {
                let difference: f32 = (x.into_data_dtype(DType::F32).iter::<f32>())
                    .zip(y.into_data_dtype(DType::F32).iter::<f32>())
                    .map(|(a, b)| (a - b).abs())
                    .fold(0.0, f32::max);
                println!("{what}: max {difference:.2e}");
                assert!(difference <= 5e-4, "{what}: max {difference:.3e}");
            }
            _ => rig.check(what, x, y, roundings),
        };
        let expected = vae_ops::group_norm(x_ref.clone(), weight_ref.clone(), bias_ref.clone(), groups, 1e-6);
        bound(channels_first(layer.forward(channels_last(x.clone()))), expected, &what);
        let expected = vae_ops::group_norm_silu(x_ref, weight_ref, bias_ref, groups, 1e-6);
        bound(
            channels_first(layer.forward_silu(channels_last(x))),
            expected,
            &format!("{what}, silu"),
        );
    }
}

fn attention(rig: &Rig, [n, h, w, c]: [usize; 4], groups: usize, scale: f32) {
    let (x, x_ref) = rig.pair([n, c, h, w], 8, 1.0);
    let (norm_weight, norm_weight_ref) = rig.pair([c], 9, 1.0);
    let (norm_bias, norm_bias_ref) = rig.pair([c], 10, 0.5);
    let projections: [_; 4] = std::array::from_fn(|i| {
        let seed = 11 + 2 * i as u64;
        let scale = if i == 0 { scale } else { 1.0 } / (c as f32).sqrt();
        (rig.pair::<2>([c, c], seed, scale), rig.pair::<1>([c], seed + 1, 0.1))
    });
    let [q, k, v, o] = &projections;
    let tokens = vae_ops::group_norm(x_ref.clone(), norm_weight_ref, norm_bias_ref, groups, 1e-6);
    let tokens = tokens.reshape([n, c, h * w]).swap_dims(1, 2);
    let project = |tokens: Tensor<3>, ((_, weight), (_, bias)): &((Tensor<2>, Tensor<2>), (Tensor<1>, Tensor<1>))| {
        tokens.matmul(weight.clone().transpose().unsqueeze()) + bias.clone().unsqueeze::<3>()
    };
    let attended = vae_ops::attention(
        project(tokens.clone(), q),
        project(tokens.clone(), k),
        project(tokens, v),
    );
    let expected = project(attended, o).swap_dims(1, 2).reshape([n, c, h, w]) + x_ref;

    let device =
        |((weight, _), (bias, _)): &((Tensor<2>, Tensor<2>), (Tensor<1>, Tensor<1>))| (weight.clone(), bias.clone());
    let norm = NormWeight::new(norm_weight, norm_bias, groups, 1e-6);
    let layer = AttentionWeight::new(norm, device(q), device(k), device(v), device(o));
    let result = layer.forward(channels_last(x).into());
    let what = format!("attention {n}x{h}x{w} of {c}, scores by {scale}");
    // The normalised tokens, the projections and the probabilities are rounded too, and scores amplify it.
    rig.check(&what, channels_first(result), expected, 2.0 + f64::from(scale));
}

const SMALL: &[[usize; 5]] = &[
    [1, 1, 1, 4, 16],
    [2, 7, 5, 16, 24],
    [1, 17, 9, 24, 3],
    [1, 8, 16, 64, 64],
    [1, 5, 33, 96, 128],
    [1, 3, 2, 1, 1],
];

fn operations(device: &Device, dtype: FloatDType) {
    let rig = Rig {
        device: device.clone(),
        dtype,
    };
    group_norms(&rig);
    convolutions(&rig, SMALL);
    attention(&rig, [1, 5, 7, 16], 8, 1.0);
    attention(&rig, [2, 9, 3, 24], 4, 1.0);
    attention(&rig, [1, 13, 10, 64], 32, 8.0);
}

#[test]
fn cpu_f32() {
    operations(&Device::flex(), FloatDType::F32);
}

#[test]
fn cpu_half() {
    operations(&Device::flex(), FloatDType::BF16);
    operations(&Device::flex(), FloatDType::F16);
}

#[test]
fn wgpu_f32() {
    if let Some(device) = open("wgpu") {
        operations(&device, FloatDType::F32);
    }
}

#[test]
fn wgpu_f16() {
    let Some(device) = open("wgpu") else { return };
    if device.supports_dtype(DType::F16) {
        operations(&device, FloatDType::F16);
    }
}

#[test]
fn cuda_f32() {
    if let Some(device) = open("cuda") {
        operations(&device, FloatDType::F32);
    }
}

/// Shapes that the kernels of sm_90a take, ragged ones and several tiles a cube among them.
const TILES: &[[usize; 5]] = &[
    [1, 17, 19, 8, 128],
    [1, 33, 70, 64, 64],
    [2, 5, 7, 72, 96],
    [1, 16, 16, 16, 256],
    [3, 24, 40, 128, 192],
    [1, 64, 65, 256, 384],
    [1, 130, 131, 128, 512],
    [2, 37, 50, 128, 3],
    [1, 16, 16, 8, 3],
    [1, 20, 35, 72, 4],
];

#[test]
fn cuda_bf16() {
    let Some(device) = open("cuda") else { return };
    operations(&device, FloatDType::BF16);
    let rig = Rig {
        device,
        dtype: FloatDType::BF16,
    };
    convolutions(&rig, TILES);
    wide_attentions(&rig);
}

/// Widths that the kernels of sm_90a take, one of several column tiles among them, and keys in several ranges.
fn wide_attentions(rig: &Rig) {
    attention(rig, [1, 5, 7, 64], 32, 1.0);
    attention(rig, [1, 40, 40, 128], 32, 1.0);
    attention(rig, [1, 8, 16, 192], 32, 8.0);
    attention(rig, [1, 23, 45, 384], 32, 1.0);
    attention(rig, [2, 31, 33, 512], 32, 8.0);
    attention(rig, [1, 1, 1, 512], 32, 1.0);
    attention(rig, [1, 65, 64, 512], 32, 1.0);
}

#[test]
fn cuda_f16() {
    let Some(device) = open("cuda") else { return };
    operations(&device, FloatDType::F16);
    let rig = Rig {
        device,
        dtype: FloatDType::F16,
    };
    convolutions(&rig, TILES);
    wide_attentions(&rig);
}
