//! Convolutions with bias, residual, and moments that the norm after them uses.

use proptest::{prelude::*, sample::select};
use vae_ops::{ConvKind, ConvWeight, NormWeight};

use crate::{
    reference::{self, Image},
    rig::{Rig, for_random, random},
};

/// What a convolution is called with.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: ConvKind,
    /// Batch, height, width.
    size: [usize; 3],
    channels_in: usize,
    channels_out: usize,
    residual: bool,
    /// Of the input.
    mean: f32,
    /// Of the norm that follows.
    groups: usize,
    seed: u64,
}

/// Multiply-adds of the reference at most, so that a case takes a fraction of a second.
const MOST_PRODUCTS: usize = 1 << 31;
const EPSILON: f64 = 1e-6;

impl Case {
    fn side(&self) -> usize {
        if self.kind == ConvKind::Point { 1 } else { 3 }
    }

    fn pixels_out(&self) -> usize {
        let scale = if self.kind == ConvKind::Upsample { 4 } else { 1 };
        self.size.iter().product::<usize>() * scale
    }

    /// The case with an image small enough for the reference.
    fn bounded(mut self) -> Self {
        while self.pixels_out() * self.side().pow(2) * self.channels_in * self.channels_out > MOST_PRODUCTS {
            let longest = (0..3).max_by_key(|&i| self.size[i]).unwrap_or(0);
            self.size[longest] = self.size[longest].div_ceil(2);
        }
        self
    }
}

/// Kinds, epilogues and values around a shape.
fn case(shape: impl Strategy<Value = ([usize; 3], usize, usize)>) -> impl Strategy<Value = Case> {
    let kind = select(vec![ConvKind::Point, ConvKind::Square, ConvKind::Upsample]);
    let mean = prop_oneof![3 => Just(0.0f32), 1 => Just(30.0)];
    (
        shape,
        kind,
        any::<bool>(),
        mean,
        any::<prop::sample::Index>(),
        any::<u64>().no_shrink(),
    )
        .prop_map(
            |((size, channels_in, channels_out), kind, residual, mean, groups, seed)| {
                let divisors: Vec<usize> = (1..=channels_out)
                    .filter(|&groups| channels_out % groups == 0)
                    .collect();
                let groups = *groups.get(&divisors);
                let case = Case {
                    kind,
                    size,
                    channels_in,
                    channels_out,
                    residual,
                    mean,
                    groups,
                    seed,
                };
                case.bounded()
            },
        )
}

/// Any few channels of any small image.
fn small() -> impl Strategy<Value = Case> {
    case(([1..=2usize, 1..=19usize, 1..=19usize], 1..=40usize, 1..=40usize))
}

/// What the kernels of sm_90a take: multiples of 8 channels, or fewer than 8 for the picture, and images that end around
/// the edges of tiles.
fn tiles() -> impl Strategy<Value = Case> {
    let side = || {
        prop_oneof![
            1..=9usize,
            (1..=5usize, 0..=2usize).prop_map(|(tiles, off)| 16 * tiles + off - 1)
        ]
    };
    let channels = || prop_oneof![2 => (1..=24usize).prop_map(|n| 8 * n), 1 => (1..=8usize).prop_map(|n| 64 * n)];
    let channels_out = prop_oneof![5 => channels(), 1 => 1..=7usize];
    let size = (1..=2usize, side(), side()).prop_map(|(batch, height, width)| [batch, height, width]);
    case((size, channels(), channels_out))
}

/// `[batch, height, width, channels_in, channels_out]`: one pixel, one channel, a picture, an image narrower than any tile.
const SMALL: &[[usize; 5]] = &[
    [1, 1, 1, 4, 16],
    [1, 3, 2, 1, 1],
    [1, 17, 9, 24, 3],
    [1, 5, 33, 96, 128],
];

/// More tiles than multiprocessors, a batch of ragged images, channels that end within a tile, pictures of 3 and 4 channels.
const TILES: &[[usize; 5]] = &[
    [1, 130, 131, 64, 512],
    [3, 24, 40, 128, 192],
    [2, 5, 7, 72, 96],
    [1, 17, 19, 8, 128],
    [2, 37, 50, 128, 3],
    [1, 20, 35, 72, 4],
];

fn fixed(shapes: &[[usize; 5]]) -> impl Iterator<Item = Case> {
    shapes
        .iter()
        .flat_map(|&[batch, height, width, channels_in, channels_out]| {
            let kinds = [ConvKind::Point, ConvKind::Square, ConvKind::Upsample];
            kinds.into_iter().flat_map(move |kind| {
                [false, true].map(|residual| Case {
                    kind,
                    size: [batch, height, width],
                    channels_in,
                    channels_out,
                    residual,
                    mean: 0.0,
                    groups: 1,
                    seed: 1,
                })
            })
        })
}

pub fn check(rig: &Rig) {
    fixed(SMALL).for_each(|case| check_case(rig, case));
    for_random(16, small(), |case| check_case(rig, case));
    if rig.hopper {
        fixed(TILES).for_each(|case| check_case(rig, case));
        for_random(32, tiles(), |case| check_case(rig, case));
    }
}

fn check_case(rig: &Rig, case: Case) {
    println!("{:?} {case:?}", rig.dtype);
    let Case {
        kind,
        size: [batch, height, width],
        channels_in,
        channels_out,
        ..
    } = case;
    let side = case.side();
    let shape = [batch, height, width, channels_in];
    let x = random(shape.iter().product(), case.seed).map(|value| value + case.mean);
    let x = rig.given(shape, x.collect());
    let deviation = 1.0 / ((side * side * channels_in) as f32).sqrt();
    let weight = rig.random([channels_out, channels_in, side, side], case.seed ^ 1, deviation);
    let bias = rig.random([channels_out], case.seed ^ 2, 0.5);
    let scale = if kind == ConvKind::Upsample { 2 } else { 1 };
    let shape_out = [batch, scale * height, scale * width, channels_out];
    let residual = case.residual.then(|| rig.random(shape_out, case.seed ^ 3, 1.0));

    let mut image = Image::new(shape, x.values);
    if kind == ConvKind::Upsample {
        image = reference::upsample(&image);
    }
    let mut expected = reference::convolve(&image, &weight.values, &bias.values, side);
    if let Some(residual) = &residual {
        expected = reference::add(&expected, &Image::new(shape_out, residual.values.clone()));
    }

    let layer = ConvWeight::new(kind, weight.tensor, bias.tensor);
    let measured = || {
        layer.forward_measured(
            x.tensor.clone(),
            residual.as_ref().map(|residual| residual.tensor.clone()),
        )
    };
    let found = rig.run(0, || measured().into_activation());
    // Sums of a few thousand products of about one each, in f32: 2e-5, with tensor cores, which truncate, 1e-4. In half
    // precision the result is rounded once.
    let magnitude = 1.0 + f64::from(case.mean);
    let sums = if rig.is_half() { 1e-4 } else { 2e-5 } * magnitude;
    // The taps of a doubled image are sums, which GPUs round once more. Each product is off by up to a unit, and the sum
    // of many, of random signs, by less than three.
    let folded = rig.is_half() && rig.gpu && kind == ConvKind::Upsample;
    let taps = if folded { 3.0 * rig.unit() * magnitude } else { 0.0 };
    let bound = |i: usize| sums + taps + rig.unit() * expected.values[i].abs();
    // Rounding once costs 1.65e-3 in bf16; rounding the taps costs as much again, and squares add up. That is an average
    // over many weights, and over values that do not all lie just above a power of two.
    let average = case.mean == 0.0 && channels_in.min(channels_out) >= 8;
    let relative = rig.relative(if folded { 2.5e-3 } else { 2e-3 }).filter(|_| average);
    rig.check(&found, &expected.values, bound, relative);
    if residual.is_none() {
        let plain = rig.run(0, || layer.forward(x.tensor.clone()));
        assert!(plain == found, "measuring the result changed its bits");
    }

    let norm_weight = rig.random([channels_out], case.seed ^ 4, 1.0);
    let norm_bias = rig.random([channels_out], case.seed ^ 5, 1.0);
    let normalized = reference::group_norm(&expected, &norm_weight.values, &norm_bias.values, case.groups, EPSILON);
    let norm = NormWeight::new(norm_weight.tensor, norm_bias.tensor, case.groups, EPSILON);
    let found = rig.run(0, || norm.forward(measured()));
    // An element is off by `bound` before it is normalised, and by the same again from the group's mean and deviation.
    let normalized_bound = |i: usize| {
        let group = sums + taps + rig.unit() * normalized.magnitude[i];
        let before = bound(i) + group;
        2e-5 + 2.0 * before * normalized.scale[i].abs() + rig.unit() * normalized.image.values[i].abs()
    };
    rig.check(&found, &normalized.image.values, normalized_bound, None);
}
