//! Group normalisation of channels-last activations in two passes over memory.

use bytemuck::zeroed_vec;
use macerator::{Scalar, Simd, Vector, WithSimd};
use rayon::prelude::*;

use super::Element;
use super::simd::{Isa, LINE, Line, floats, floats_mut, lines, vectors, vectors_mut};

/// Elements, about, that a thread takes at a time. A constant, so that sums do not depend on the number of threads.
const PIECE: usize = 1 << 17;

/// Elements, about, that are converted to `f32` at a time: they stay in the L1 cache.
const RUN: usize = 1 << 12;

/// Group normalisation, and SiLU if `silu`: `y = (x - mean) / sqrt(variance + epsilon) * weight + bias`, with the mean and
/// biased variance of each of `groups` groups of consecutive channels over all pixels of an item of the batch.
///
/// - `x`, `y`: `[batch, pixels, channels]`, `channels` a multiple of `groups`
/// - `known`: those of [`moments`] to normalise with, `[batch, parts, 3, channels]`, in place of the moments of `x`
/// - `weight`, `bias`: `[channels]`
///
/// Sums are `f64`, of differences from each channel's first value; the rest is `f32`, rounded once. Where a variance
/// overflows `f32` the group becomes NaN, as in PyTorch, and not a constant that looks like a picture. The bits do not
/// depend on the number of threads.
///
/// # Panics
/// If a length does not fit, or `groups` does not divide `channels`.
#[allow(clippy::too_many_arguments)] // They are the operation's.
pub fn group_norm<E: Element>(
    [batch, pixels, channels]: [usize; 3],
    x: &[E],
    known: Option<&[f32]>,
    weight: &[f32],
    bias: &[f32],
    groups: usize,
    epsilon: f64,
    silu: bool,
    y: &mut [E],
) {
    let length = [batch, pixels, channels]
        .into_iter()
        .try_fold(1usize, usize::checked_mul);
    assert_eq!(Some(x.len()), length, "length of the input");
    assert_eq!(Some(y.len()), length, "length of the output");
    assert_eq!([weight.len(), bias.len()], [channels; 2], "length of weight and bias");
    assert!(
        groups > 0 && channels % groups == 0,
        "{channels} channels in {groups} groups"
    );
    if x.is_empty() {
        return;
    }
    let isa = Isa::detect();
    let image = pixels * channels;
    let x_images = x.chunks_exact(image);
    for (item, (x, y)) in x_images.zip(y.chunks_exact_mut(image)).enumerate() {
        let moments = match known {
            Some(known) => merged(&known[known.len() / batch * item..][..known.len() / batch], channels),
            None => channel_moments(isa, x, channels),
        };
        let coefficients = Coefficients::new(&moments, weight, bias, groups, epsilon);
        coefficients.apply(isa, x, silu, y);
    }
}

/// Count, mean, and sum of squared deviations from it, of each channel: `[batch, 3, channels]` of `[batch, pixels, channels]`.
///
/// Those of several parts of an image one after another, `[parts, 3, channels]`, are those of the image.
///
/// # Panics
/// If a length does not fit.
pub fn moments<E: Element>([batch, pixels, channels]: [usize; 3], x: &[E]) -> Vec<f32> {
    let length = [batch, pixels, channels]
        .into_iter()
        .try_fold(1usize, usize::checked_mul);
    assert_eq!(Some(x.len()), length, "length of the input");
    let isa = Isa::detect();
    let mut all = Vec::with_capacity(batch * 3 * channels);
    for x in x.chunks_exact(pixels * channels) {
        let moments = channel_moments(isa, x, channels);
        let count = pixels as f64;
        all.extend(moments.iter().map(|_| count as f32));
        all.extend(moments.iter().map(|&(mean, _)| mean as f32));
        all.extend(moments.iter().map(|&(_, variance)| (variance * count) as f32));
    }
    all
}

/// Mean and biased variance of each channel, from `[parts, 3, channels]` of [`moments`].
fn merged(parts: &[f32], channels: usize) -> Vec<(f64, f64)> {
    let of_channel = |channel: usize| {
        let part = |part: usize| [0, 1, 2].map(|moment| f64::from(parts[(part * 3 + moment) * channels + channel]));
        let parts = || (0..parts.len() / (3 * channels)).map(part);
        let count: f64 = parts().map(|[count, ..]| count).sum();
        let mean = parts().map(|[part, mean, _]| part * mean).sum::<f64>() / count;
        let squares: f64 = parts()
            .map(|[part, of, squares]| squares + part * (of - mean) * (of - mean))
            .sum();
        (mean, squares / count)
    };
    (0..channels).map(of_channel).collect()
}

/// Mean and biased variance of each channel of an image.
fn channel_moments<E: Element>(isa: Isa, x: &[E], channels: usize) -> Vec<(f64, f64)> {
    let mut first = vec![0.0; channels];
    E::widen(&x[..channels], &mut first);
    let first: Vec<f64> = first.into_iter().map(f64::from).collect();
    let sums_of = |piece: &[E]| {
        let mut sums = vec![0.0; channels];
        let mut squares = vec![0.0; channels];
        let mut wide = vec![0.0; pixels_of(RUN, channels)];
        for run in piece.chunks(wide.len()) {
            let wide = &mut wide[..run.len()];
            E::widen(run, wide);
            isa.run(Accumulate {
                x: wide,
                first: &first,
                sums: &mut sums,
                squares: &mut squares,
            });
        }
        (sums, squares)
    };
    let pieces: Vec<_> = x.par_chunks(pixels_of(PIECE, channels)).map(sums_of).collect();
    let count = (x.len() / channels) as f64;
    let moments_of = |channel: usize| {
        let mean = pieces.iter().map(|(sums, _)| sums[channel]).sum::<f64>() / count;
        let square = pieces.iter().map(|(_, squares)| squares[channel]).sum::<f64>() / count;
        (first[channel] + mean, square - mean * mean)
    };
    (0..channels).map(moments_of).collect()
}

/// About `elements` elements in whole pixels.
fn pixels_of(elements: usize, channels: usize) -> usize {
    (elements / channels).max(1) * channels
}

struct Accumulate<'a> {
    x: &'a [f32],
    first: &'a [f64],
    sums: &'a mut [f64],
    squares: &'a mut [f64],
}

impl WithSimd for Accumulate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        let channels = self.first.len();
        let (first, sums, squares) = (self.first, &mut self.sums[..channels], &mut self.squares[..channels]);
        for pixel in self.x.chunks_exact(channels) {
            for channel in 0..channels {
                let difference = f64::from(pixel[channel]) - first[channel];
                sums[channel] += difference;
                squares[channel] += difference * difference;
            }
        }
    }
}

/// What each channel is normalised with: `(x - mean) * scale + shift`. Repeated over pixels until a whole number of
/// lines is full, so that any number of channels is a loop over vectors.
struct Coefficients {
    mean: Vec<Line>,
    scale: Vec<Line>,
    shift: Vec<Line>,
}

impl Coefficients {
    fn new(moments: &[(f64, f64)], weight: &[f32], bias: &[f32], groups: usize, epsilon: f64) -> Self {
        let channels = moments.len();
        let size = channels / groups;
        let mut repeat = 1;
        while !(repeat * channels).is_multiple_of(LINE) {
            repeat *= 2;
        }
        let zeroed = || zeroed_vec::<Line>(repeat * channels / LINE);
        let (mut means, mut scales, mut shifts) = (zeroed(), zeroed(), zeroed());
        for (group, moments) in moments.chunks_exact(size).enumerate() {
            let mean = moments.iter().map(|(mean, _)| mean).sum::<f64>() / size as f64;
            let spread = |(of, variance): &(f64, f64)| variance + (of - mean) * (of - mean);
            let variance = moments.iter().map(spread).sum::<f64>() / size as f64;
            let inverse_deviation = if (variance as f32).is_finite() {
                1.0 / (variance.max(0.0) + epsilon).sqrt()
            } else {
                f64::NAN
            };
            for channel in group * size..(group + 1) * size {
                let scale = f64::from(weight[channel]) * inverse_deviation;
                // What rounding takes from the mean goes to the shift.
                let lost = mean - f64::from(mean as f32);
                for pixel in 0..repeat {
                    let position = pixel * channels + channel;
                    floats_mut(&mut means)[position] = mean as f32;
                    floats_mut(&mut scales)[position] = scale as f32;
                    floats_mut(&mut shifts)[position] = (f64::from(bias[channel]) - lost * scale) as f32;
                }
            }
        }
        Self {
            mean: means,
            scale: scales,
            shift: shifts,
        }
    }

    fn apply<E: Element>(&self, isa: Isa, x: &[E], silu: bool, y: &mut [E]) {
        let period = self.mean.len() * LINE;
        let piece = pixels_of(PIECE, period);
        x.par_chunks(piece).zip(y.par_chunks_mut(piece)).for_each(|(x, y)| {
            let mut wide = zeroed_vec::<Line>(lines(pixels_of(RUN, period)));
            let run = wide.len() * LINE;
            for (x, y) in x.chunks(run).zip(y.chunks_mut(run)) {
                E::widen(x, &mut floats_mut(&mut wide)[..x.len()]);
                let x = &mut wide[..lines(x.len())];
                if silu {
                    isa.run(Apply::<true> { x, coefficients: self });
                } else {
                    isa.run(Apply::<false> { x, coefficients: self });
                }
                E::narrow(&floats(&wide)[..y.len()], y);
            }
        });
    }
}

struct Apply<'a, const SILU: bool> {
    x: &'a mut [Line],
    coefficients: &'a Coefficients,
}

impl<const SILU: bool> WithSimd for Apply<'_, SILU> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self) {
        let Coefficients { mean, scale, shift } = self.coefficients;
        let (mean, scale, shift) = (vectors::<S>(mean), vectors::<S>(scale), vectors::<S>(shift));
        for x in vectors_mut::<S>(self.x).chunks_mut(mean.len()) {
            for (((x, mean), scale), shift) in x.iter_mut().zip(mean).zip(scale).zip(shift) {
                let normal = (*x - *mean).mul_add(*scale, *shift);
                *x = if SILU { silu(normal) } else { normal };
            }
        }
    }
}

/// `x / (1 + exp(-x))`
#[inline(always)]
fn silu<S: Simd>(x: Vector<S, f32>) -> Vector<S, f32> {
    let one = 1f32.splat::<S>();
    x / (one + exp(0f32.splat::<S>() - x))
}

/// `exp(x)` to 2e-7 of it, between -87.3 and 88.3; constant outside.
#[inline(always)]
fn exp<S: Simd>(x: Vector<S, f32>) -> Vector<S, f32> {
    // ln 2 in two parts, so that multiples of the first are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let x = x.min((88.3f32).splat::<S>()).max((-87.3f32).splat::<S>());
    let exponent = (x * core::f32::consts::LOG2_E.splat::<S>()).round_to_int();
    let whole = exponent.to_float();
    let x = whole.mul_add((-LN_2_HIGH).splat::<S>(), x);
    let x = whole.mul_add((-LN_2_LOW).splat::<S>(), x);
    // Taylor's series: x is within ln 2 / 2 of zero.
    let mut sum = (1.0f32 / 5040.0).splat::<S>();
    for factor in [1.0f32 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum.mul_add(x, factor.splat::<S>());
    }
    let power = (exponent + 127i32.splat::<S>()) << 23;
    sum * S::typed::<f32>(*power)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    fn rounded<E: Element>(values: &[f32]) -> Vec<E> {
        let mut narrow = vec![E::default(); values.len()];
        E::narrow(values, &mut narrow);
        narrow
    }

    fn widened<E: Element>(values: &[E]) -> Vec<f32> {
        let mut wide = vec![0.0; values.len()];
        E::widen(values, &mut wide);
        wide
    }

    /// `(index * factor) mod 1` between -1 and 1: spread evenly, and no two channels alike.
    fn values(count: usize, factor: f64) -> Vec<f32> {
        (0..count)
            .map(|index| (2.0 * (index as f64 * factor).fract() - 1.0) as f32)
            .collect()
    }

    fn coefficients(channels: usize) -> (Vec<f32>, Vec<f32>) {
        let weight = values(channels, 0.724_5)
            .into_iter()
            .map(|value| 1.0 + value / 2.0)
            .collect();
        (weight, values(channels, 0.569_8))
    }

    fn run<E: Element>(shape: [usize; 3], x: &[f32], groups: usize, silu: bool) -> Vec<f32> {
        let (weight, bias) = coefficients(shape[2]);
        let mut y = rounded(&vec![f32::NAN; x.len()]);
        group_norm::<E>(shape, &rounded(x), None, &weight, &bias, groups, 1e-6, silu, &mut y);
        widened(&y)
    }

    /// The definition, in `f64`.
    fn expected<E: Element>(shape: [usize; 3], x: &[f32], groups: usize, silu: bool) -> Vec<f64> {
        let [batch, pixels, channels] = shape;
        let (weight, bias) = coefficients(channels);
        let x = widened(&rounded::<E>(x));
        let size = channels / groups;
        let mut y = vec![0.0; x.len()];
        for (image, group) in (0..batch).flat_map(|image| (0..groups).map(move |group| (image, group))) {
            let pixels = image * pixels..(image + 1) * pixels;
            let positions = || {
                pixels.clone().flat_map(|pixel| {
                    (group * size..(group + 1) * size).map(move |channel| (pixel * channels + channel, channel))
                })
            };
            let count = positions().count() as f64;
            let mean = positions().map(|(position, _)| f64::from(x[position])).sum::<f64>() / count;
            let variance = positions()
                .map(|(position, _)| (f64::from(x[position]) - mean).powi(2))
                .sum::<f64>()
                / count;
            for (position, channel) in positions() {
                let normal = (f64::from(x[position]) - mean) / (variance + 1e-6).sqrt();
                let value = normal * f64::from(weight[channel]) + f64::from(bias[channel]);
                y[position] = if silu { value / (1.0 + (-value).exp()) } else { value };
            }
        }
        y
    }

    #[track_caller]
    fn assert_close<E: Element>(shape: [usize; 3], x: &[f32], groups: usize, silu: bool, absolute: f64, relative: f64) {
        let found = run::<E>(shape, x, groups, silu);
        for (index, (found, expected)) in found.into_iter().zip(expected::<E>(shape, x, groups, silu)).enumerate() {
            assert!(
                (f64::from(found) - expected).abs() <= absolute + relative * expected.abs(),
                "{shape:?} in {groups} groups, SiLU {silu}: element {index} is {found}, not {expected}"
            );
        }
    }

    /// torch.nn.functional.group_norm of arange(16).reshape(1, 4, 2, 2) in two groups, weight [2, 1, 0.5, 1] and bias
    /// [0, 1, -1, 0.5], eps 1e-6, permuted to channels last.
    #[test]
    fn matches_pytorch_on_two_groups() {
        let x: Vec<f32> = (0..4)
            .flat_map(|pixel| (0..4).map(move |channel| (channel * 4 + pixel) as f32))
            .collect();
        let mut y = [0.0f32; 16];
        group_norm(
            [1, 4, 4],
            &x,
            None,
            &[2.0, 1.0, 0.5, 1.0],
            &[0.0, 1.0, -1.0, 0.5],
            2,
            1e-6,
            false,
            &mut y,
        );
        #[rustfmt::skip]
        let expected = [
            -3.055_05, 1.218_218, -1.763_763, 0.718_218, -2.182_179, 1.654_654, -1.545_545, 1.154_654,
            -1.309_307, 2.091_089, -1.327_327, 1.591_089, -0.436_436, 2.527_525, -1.109_109, 2.027_525,
        ];
        for (found, expected) in y.into_iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-6, "{found} is not {expected}");
        }
    }

    #[test]
    fn group_sizes_of_every_family() {
        for size in [1, 2, 3, 4, 6, 8, 12, 16] {
            for groups in [1, 3, 32] {
                let channels = size * groups;
                let x = values(2 * 35 * channels, 0.618_034);
                assert_close::<f32>([2, 35, channels], &x, groups, size % 2 == 0, 2e-6, 0.0);
            }
        }
    }

    #[test]
    fn every_instruction_set_normalises() {
        let (channels, groups) = (24, 8);
        let x = values(77 * channels, 0.618_034);
        let (weight, bias) = coefficients(channels);
        let expected = expected::<f32>([1, 77, channels], &x, groups, true);
        for isa in Isa::all() {
            let coefficients = Coefficients::new(&channel_moments(isa, &x, channels), &weight, &bias, groups, 1e-6);
            let mut y = vec![f32::NAN; x.len()];
            coefficients.apply(isa, &x, true, &mut y);
            for (found, expected) in y.into_iter().zip(&expected) {
                assert!(
                    (f64::from(found) - expected).abs() <= 2e-6,
                    "{isa:?}: {found} is not {expected}"
                );
            }
        }
    }

    #[test]
    fn a_large_mean_does_not_swallow_the_variance() {
        // Deviations of 1 at 1000 are known to 6e-5 in f32; nothing may be added to that.
        let x: Vec<f32> = values(4099 * 8, 0.618_034)
            .into_iter()
            .map(|value| 1000.0 + value * 1.732)
            .collect();
        assert_close::<f32>([1, 4099, 8], &x, 2, false, 2e-6, 0.0);
        let x: Vec<f32> = x.into_iter().map(|value| value * 1000.0).collect();
        assert_close::<f32>([1, 4099, 8], &x, 2, false, 2e-6, 0.0);
    }

    #[test]
    fn a_first_pixel_unlike_all_others_does_no_harm() {
        let mut x = values(5000 * 4, 0.618_034);
        x[..4].fill(3e4);
        assert_close::<f32>([1, 5000, 4], &x, 2, false, 2e-5, 0.0);
    }

    #[test]
    fn moments_of_parts_normalise_as_those_of_the_whole() {
        // A mean far from zero, and parts whose means differ.
        let (batch, pixels, channels) = (2, 5000, 6);
        let mut x = values(batch * pixels * channels, 0.618_034);
        for (index, value) in x.iter_mut().enumerate() {
            *value += 100.0 + (index / channels % pixels / 1500) as f32;
        }
        let (weight, bias) = coefficients(channels);
        let normal = |known: Option<&[f32]>| {
            let mut y = vec![f32::NAN; x.len()];
            group_norm(
                [batch, pixels, channels],
                &x,
                known,
                &weight,
                &bias,
                2,
                1e-6,
                true,
                &mut y,
            );
            y
        };
        let parts = [0..1, 1..1501, 1501..4000, 4000..5000];
        let of_image = |image: &[f32]| {
            let part = |part: &std::ops::Range<usize>| {
                moments(
                    [1, part.len(), channels],
                    &image[part.start * channels..part.end * channels],
                )
            };
            parts.iter().flat_map(part).collect::<Vec<_>>()
        };
        let known: Vec<f32> = x.chunks_exact(pixels * channels).flat_map(of_image).collect();
        for (found, expected) in normal(Some(&known)).iter().zip(normal(None)) {
            assert!((found - expected).abs() <= 1e-5, "{found} is not {expected}");
        }
        assert_eq!(moments([batch, pixels, channels], &x).len(), batch * 3 * channels);
    }

    #[test]
    fn constant_channels_become_their_bias() {
        let (weight, bias) = ([2.0; 4], [0.25, -1.0, 3.0, 0.5]);
        let mut y = [f32::NAN; 4 * 1000];
        group_norm(
            [1, 1000, 4],
            &[1e6f32 / 3.0; 4 * 1000],
            None,
            &weight,
            &bias,
            2,
            1e-6,
            false,
            &mut y,
        );
        for (index, found) in y.into_iter().enumerate() {
            assert!(
                (found - bias[index % 4]).abs() <= 1e-6,
                "{found} is not {}",
                bias[index % 4]
            );
        }
    }

    #[test]
    fn an_overflowing_variance_is_seen() {
        for silu in [false, true] {
            let mut x = values(64 * 6, 0.618_034);
            for pixel in x.chunks_exact_mut(6) {
                pixel[..3].iter_mut().for_each(|value| *value = value.signum() * 1e20);
            }
            let y = run::<f32>([1, 64, 6], &x, 2, silu);
            for pixel in y.chunks_exact(6) {
                assert!(pixel[..3].iter().all(|value| value.is_nan()), "{pixel:?}");
                assert!(pixel[3..].iter().all(|value| value.is_finite()), "{pixel:?}");
            }
        }
    }

    #[test]
    fn a_variance_near_the_largest_f32_is_none_that_overflows() {
        let x: Vec<f32> = values(64 * 4, 0.618_034)
            .into_iter()
            .map(|value| value * 1e19)
            .collect();
        assert_close::<f32>([1, 64, 4], &x, 2, false, 2e-6, 0.0);
    }

    #[test]
    fn f16_squares_above_65504_do_not_overflow() {
        let x: Vec<f32> = values(64 * 4, 0.618_034).into_iter().map(|value| value * 6e4).collect();
        assert_close::<f16>([1, 64, 4], &x, 2, true, 1e-5, 0.5 * f64::from(f16::EPSILON));
    }

    #[test]
    fn silu_is_exact_from_end_to_end() {
        // Beyond the range of the exponential too.
        let x: Vec<f32> = (-2000..2000).map(|step| step as f32 / 16.0).collect();
        for isa in Isa::all() {
            let one = Coefficients {
                mean: vec![Line([0.0; LINE])],
                scale: vec![Line([1.0; LINE])],
                shift: vec![Line([0.0; LINE])],
            };
            let mut y = vec![f32::NAN; x.len()];
            one.apply(isa, &x, true, &mut y);
            for (&x, found) in x.iter().zip(y) {
                let expected = f64::from(x) / (1.0 + f64::from(-x).exp());
                assert!(
                    (f64::from(found) - expected).abs() <= 4e-7 * expected.abs() + 1e-30,
                    "{isa:?}: SiLU of {x} is {found}, not {expected}"
                );
            }
        }
    }

    #[test]
    fn not_a_number_stays_one() {
        let mut x = values(64 * 4, 0.618_034);
        x[17] = f32::NAN;
        for silu in [false, true] {
            let y = run::<f32>([1, 64, 4], &x, 2, silu);
            assert!(
                y.chunks_exact(4)
                    .all(|pixel| pixel[0].is_nan() && pixel[1].is_nan() && pixel[2].is_finite()),
                "{y:?}"
            );
        }
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        // Several pieces, the last not full.
        let shape = [2, 9001, 48];
        let x = values(shape.iter().product(), 0.618_034);
        let bits = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let y = pool.install(|| run::<f32>(shape, &x, 16, true));
            y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let one = bits(1);
        for threads in [2, 3] {
            assert!(bits(threads) == one, "{threads} threads");
        }
    }

    #[test]
    #[should_panic(expected = "6 channels in 4 groups")]
    fn groups_that_do_not_divide_the_channels_are_refused() {
        run::<f32>([1, 1, 6], &[0.0; 6], 4, false);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_shape_in_any_type(
            batch in 1..4usize,
            pixels in 1..400usize,
            size in 1..17usize,
            groups in 1..9usize,
            mean in -100.0..100.0f32,
            silu in any::<bool>(),
        ) {
            let shape = [batch, pixels, size * groups];
            let x: Vec<f32> = values(shape.iter().product(), 0.618_034).into_iter().map(|value| value + mean).collect();
            // One value alone, or values that rounding made equal, have a variance of nothing but epsilon.
            assert_close::<f32>(shape, &x, groups, silu, 1e-5, 0.0);
            assert_close::<f16>(shape, &x, groups, silu, 1e-5, 0.5 * f64::from(f16::EPSILON));
            assert_close::<bf16>(shape, &x, groups, silu, 1e-5, 0.5 * f64::from(bf16::EPSILON));
        }
    }
}
