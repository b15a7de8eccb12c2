use std::ops::Range;

use burn::tensor::{FloatDType, Tensor, activation::silu};

use crate::Moments;

/// Group normalisation with statistics in f32 whatever the input's type, as PyTorch computes it.
///
/// Each of `groups` groups of consecutive channels is normalised over its channels and all pixels with its biased
/// variance, then scaled and shifted per channel: `(x - mean) / sqrt(var + epsilon) * weight + bias`
/// ([Wu & He 2018](https://arxiv.org/abs/1803.08494)). The arithmetic is f32 from input to output; the result is
/// rounded once to the input's type.
///
/// # Shapes
/// - `x`: `[batch, channels, height, width]`, `channels` a multiple of `groups`
/// - `weight`, `bias`: `[channels]`
/// - returns the shape and type of `x`
///
/// Where a variance overflows f32, the group becomes NaN, as in PyTorch, and not a constant that looks like a picture.
pub fn group_norm(x: Tensor<4>, weight: Tensor<1>, bias: Tensor<1>, groups: usize, epsilon: f64) -> Tensor<4> {
    activated(x, weight, bias, groups, epsilon, |x| x)
}

/// [`group_norm`] followed by SiLU, `x * sigmoid(x)`, in the input's type.
pub fn group_norm_silu(x: Tensor<4>, weight: Tensor<1>, bias: Tensor<1>, groups: usize, epsilon: f64) -> Tensor<4> {
    activated(x, weight, bias, groups, epsilon, silu)
}

fn activated(
    x: Tensor<4>,
    weight: Tensor<1>,
    bias: Tensor<1>,
    groups: usize,
    epsilon: f64,
    activation: fn(Tensor<4>) -> Tensor<4>,
) -> Tensor<4> {
    let group_size = x.dims()[1] / groups;
    by_group(x, groups, |x, channels| {
        let of = |x: &Tensor<1>| x.clone().narrow(0, channels.start, channels.len());
        let groups = channels.len() / group_size;
        activation(normalize(x, of(&weight), of(&bias), groups, epsilon))
    })
}

fn normalize(x: Tensor<4>, weight: Tensor<1>, bias: Tensor<1>, groups: usize, epsilon: f64) -> Tensor<4> {
    let dtype: FloatDType = x.dtype().into();
    let [batch, channels, _, _] = x.dims();
    let group_size = channels / groups;
    // Rows, columns, channels: short sums lose less than one over a million pixels, no pass needs the input in another
    // layout, and no thread of a GPU is left with a loop over a whole group (Mesa's lavapipe ends loops at 65,535).
    let group_mean = |x: Tensor<4>| {
        let per_channel = x.mean_dim(3).mean_dim(2).reshape([batch, groups, group_size]);
        per_channel.mean_dim(2)
    };
    let per_channel = |x: Tensor<3>| x.expand([batch, groups, group_size]).reshape([batch, channels, 1, 1]);

    // Burn's own GroupNorm widens f16 only, and bf16 statistics of a million pixels are noise.
    let x = x.cast(FloatDType::F32);
    let mean = group_mean(x.clone());
    // Centring before squaring keeps the variance right where the mean is large.
    let x = x.sub(per_channel(mean));
    let variance = group_mean(x.clone().mul(x.clone()));
    let scale = per_channel(inverse_deviation(variance, epsilon))
        .mul(weight.cast(FloatDType::F32).reshape([1, channels, 1, 1]));
    let shift = bias.cast(FloatDType::F32).reshape([1, channels, 1, 1]);
    x.mul(scale).add(shift).cast(dtype)
}

/// Count, mean and squared deviations of every channel of `[batch, channels, height, width]`, in f32.
pub fn moments(x: &Tensor<4>, groups: usize) -> Moments {
    let of_channels = |x: Tensor<4>, _: Range<usize>| {
        let [batch, channels, height, width] = x.dims();
        let count = (height * width) as f64;
        // As in `normalize`: short sums, of what is centred.
        let mean_of = |x: Tensor<4>| x.mean_dim(3).mean_dim(2);
        let x = x.cast(FloatDType::F32);
        let mean = mean_of(x.clone());
        let x = x.sub(mean.clone());
        let squares = mean_of(x.clone().mul(x)).mul_scalar(count);
        let counts = mean.full_like(count);
        let moments = [counts, mean, squares].map(|moment| moment.reshape([batch, 1, 1, channels]));
        // Channels are where `by_group` joins them.
        Tensor::cat(moments.into(), 2).permute([0, 3, 1, 2])
    };
    Moments::from_parts(by_group(x.clone(), groups, of_channels).permute([0, 2, 3, 1]))
}

/// [`group_norm_silu`] of a band of an image, with the moments of all of the image.
pub fn group_norm_silu_of(
    x: Tensor<4>,
    moments: &Moments,
    weight: Tensor<1>,
    bias: Tensor<1>,
    groups: usize,
    epsilon: f64,
) -> Tensor<4> {
    let dtype: FloatDType = x.dtype().into();
    let [batch, channels, _, _] = x.dims();
    let group_size = channels / groups;
    // All parts of all channels of a group, side by side.
    let [counts, means, squares] = moments.split().map(|moment| {
        let parts = moment.dims()[1];
        let moment = moment.reshape([batch, parts, groups, group_size]).swap_dims(1, 2);
        moment.reshape([batch, groups, parts * group_size])
    });
    let count = counts.clone().sum_dim(2);
    let mean = (counts.clone() * means.clone()).sum_dim(2) / count.clone();
    let apart = means - mean.clone();
    let variance = (squares + counts * apart.clone() * apart).sum_dim(2) / count;

    let per_channel = |x: Tensor<3>| x.expand([batch, groups, group_size]).reshape([batch, channels, 1, 1]);
    let mean = per_channel(mean);
    let scale =
        per_channel(inverse_deviation(variance, epsilon)) * weight.cast(FloatDType::F32).reshape([1, channels, 1, 1]);
    let shift = bias.cast(FloatDType::F32).reshape([1, channels, 1, 1]);
    by_group(x, groups, |x, channels| {
        let of = |x: &Tensor<4>| x.clone().narrow(1, channels.start, channels.len());
        let x = x.cast(FloatDType::F32).sub(of(&mean));
        silu(x.mul(of(&scale)).add(of(&shift)).cast(dtype))
    })
}

/// NaN for a variance that is not finite; its inverse alone would be zero and hide the overflow.
fn inverse_deviation(variance: Tensor<3>, epsilon: f64) -> Tensor<3> {
    let overflow = variance.clone().sub(variance.clone());
    variance.add_scalar(epsilon).sqrt().recip().add(overflow)
}

/// What `of_channels` makes of `x` and the range of all its channels, or on the CPU of each group in parallel, joined along the
/// channels.
///
/// Burn's CPU backend runs most elementwise operations on one thread, each over the whole tensor; a group at a time
/// uses every core and stays in the cache. Groups are independent, so the bits are the same.
fn by_group(
    x: Tensor<4>,
    groups: usize,
    of_channels: impl Fn(Tensor<4>, Range<usize>) -> Tensor<4> + Sync,
) -> Tensor<4> {
    let channels = x.dims()[1];
    #[cfg(feature = "flex")]
    if x.device() == burn::tensor::Device::flex() {
        use rayon::prelude::*;

        let size = channels / groups;
        let one_group = |group: usize| {
            let x = x.clone().narrow(1, group * size, size);
            of_channels(x, group * size..(group + 1) * size)
        };
        return Tensor::cat((0..groups).into_par_iter().map(one_group).collect(), 1);
    }
    of_channels(x, 0..channels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device, Distribution, TensorData};

    fn group_norm_of(x: TensorData, groups: usize, dtype: DType) -> Vec<f32> {
        let device = Device::flex();
        let channels = x.shape()[1];
        let x = Tensor::<4>::from_data(x, (&device, dtype));
        let weight = Tensor::<1>::from_floats(&[2.0, 1.0, 0.5, 1.0][..channels], &device).cast(dtype);
        let bias = Tensor::<1>::from_floats(&[0.0, 1.0, -1.0, 0.5][..channels], &device).cast(dtype);
        let y = group_norm(x, weight, bias, groups, 1e-6);
        assert_eq!(y.dtype(), dtype);
        y.into_data_dtype(DType::F32).try_into_vec().unwrap()
    }

    fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!(
                (found - expected).abs() <= tolerance,
                "{found} is not {expected} within {tolerance}"
            );
        }
    }

    /// torch.nn.functional.group_norm(torch.arange(16.).reshape(1, 4, 2, 2), 2, weight, bias, 1e-6)
    #[test]
    fn matches_pytorch_on_two_groups() {
        let x = TensorData::new((0..16).map(|v| v as f32).collect::<Vec<_>>(), [1, 4, 2, 2]);
        #[rustfmt::skip]
        let expected = [
            -3.055_05, -2.182_179, -1.309_307, -0.436_436, 1.218_218, 1.654_654, 2.091_089, 2.527_525,
            -1.763_763, -1.545_545, -1.327_327, -1.109_109, 0.718_218, 1.154_654, 1.591_089, 2.027_525,
        ];
        assert_close(&group_norm_of(x, 2, DType::F32), &expected, 2e-6);
    }

    #[test]
    fn groups_one_by_one_have_the_bits_of_all_at_once() {
        let device = Device::flex();
        for (shape, groups) in [
            ([1, 6, 3, 5], 2),
            ([2, 12, 7, 1], 4),
            ([1, 4, 1, 9], 4),
            ([3, 6, 2, 2], 1),
        ] {
            let x = Tensor::<4>::random(shape, Distribution::Normal(3.0, 2.0), &device);
            let weight = Tensor::<1>::random([shape[1]], Distribution::Normal(1.0, 0.5), &device);
            let bias = Tensor::<1>::random([shape[1]], Distribution::Normal(0.0, 0.5), &device);
            let one_by_one = group_norm_silu(x.clone(), weight.clone(), bias.clone(), groups, 1e-6);
            let at_once = silu(normalize(x, weight, bias, groups, 1e-6));
            let bits = |x: Tensor<4>| x.into_data().try_into_vec::<f32>().unwrap();
            assert_eq!(bits(one_by_one), bits(at_once), "{shape:?} in {groups} groups");
        }
    }

    #[test]
    fn a_large_mean_does_not_swallow_the_variance() {
        // Values 1000 +- 1: E[x^2] - E[x]^2 in f32 would be off by a tenth.
        let values = (0..64)
            .map(|i| if i % 2 == 0 { 999.0 } else { 1001.0 })
            .collect::<Vec<f32>>();
        let y = group_norm_of(TensorData::new(values, [1, 1, 8, 8]), 1, DType::F32);
        let expected = (0..64)
            .map(|i| if i % 2 == 0 { -2.0 } else { 2.0 })
            .collect::<Vec<f32>>();
        assert_close(&y, &expected, 1e-5);
    }

    #[test]
    fn bf16_statistics_are_not_accumulated_in_bf16() {
        // A bf16 sum of 4096 values near 1 stops growing at 256.
        let values = (0..4096)
            .map(|i| if i % 2 == 0 { 0.5 } else { 1.5 })
            .collect::<Vec<f32>>();
        let y = group_norm_of(TensorData::new(values, [1, 1, 64, 64]), 1, DType::BF16);
        let expected = (0..4096)
            .map(|i| if i % 2 == 0 { -2.0 } else { 2.0 })
            .collect::<Vec<f32>>();
        assert_close(&y, &expected, 1e-2);
    }

    #[test]
    fn f16_squares_above_65504_do_not_overflow() {
        let values = (0..64)
            .map(|i| if i % 2 == 0 { -3000.0 } else { 3000.0 })
            .collect::<Vec<f32>>();
        let y = group_norm_of(TensorData::new(values, [1, 1, 8, 8]), 1, DType::F16);
        let expected = (0..64)
            .map(|i| if i % 2 == 0 { -2.0 } else { 2.0 })
            .collect::<Vec<f32>>();
        assert_close(&y, &expected, 2e-3);
    }

    #[test]
    fn an_overflowing_variance_is_seen() {
        let values = (0..64)
            .map(|i| if i % 2 == 0 { -1e20 } else { 1e20 })
            .collect::<Vec<f32>>();
        let y = group_norm_of(TensorData::new(values, [1, 1, 8, 8]), 1, DType::F32);
        assert!(y.iter().all(|value| value.is_nan()), "{y:?}");
    }

    #[test]
    fn batch_items_have_their_own_statistics() {
        let one = (0..12).map(|v| (v * v) as f32).collect::<Vec<_>>();
        let two = one.iter().map(|v| v * -3.0 + 7.0).collect::<Vec<_>>();
        let both = group_norm_of(
            TensorData::new([one.clone(), two.clone()].concat(), [2, 4, 1, 3]),
            2,
            DType::F32,
        );
        assert_eq!(
            both[..12],
            group_norm_of(TensorData::new(one, [1, 4, 1, 3]), 2, DType::F32)
        );
        assert_eq!(
            both[12..],
            group_norm_of(TensorData::new(two, [1, 4, 1, 3]), 2, DType::F32)
        );
    }
}
