//! Group normalisation with and without SiLU.

use proptest::{prelude::*, sample::select};
use vae_ops::NormWeight;

use crate::{
    reference::{self, Image},
    rig::{Rig, for_random, random},
};

/// What a norm is called with.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Batch, height, width; rows of attention have a height of 1.
    size: [usize; 3],
    groups: usize,
    group_channels: usize,
    mean: f32,
    seed: u64,
}

const EPSILON: f64 = 1e-6;

/// Half precision cannot hold a mean of 1000 with a variance of 1.
fn large_mean(rig: &Rig) -> f32 {
    if rig.is_half() { 30.0 } else { 1000.0 }
}

fn cases(rig: &Rig) -> impl Strategy<Value = Case> + use<> {
    let size = prop_oneof![
        2 => [1..=3usize, 1..=33usize, 1..=33usize],
        1 => (1..=2usize, 1..=1500usize).prop_map(|(batch, tokens)| [batch, 1, tokens]),
    ];
    let group_channels = select(vec![1, 2, 3, 6, 12, 16]);
    let groups = prop_oneof![3 => 1..=9usize, 1 => Just(32)];
    let mean = prop_oneof![2 => Just(0.0), 1 => Just(large_mean(rig))];
    (size, groups, group_channels, mean, any::<u64>().no_shrink()).prop_map(
        |(size, groups, group_channels, mean, seed)| Case {
            size,
            groups,
            group_channels,
            mean,
            seed,
        },
    )
}

pub fn check(rig: &Rig) {
    let fixed = |size, groups, group_channels| Case {
        size,
        groups,
        group_channels,
        mean: 0.0,
        seed: 1,
    };
    // One pixel; one group wider than a row of a GPU's cube; several parts of rows.
    check_case(rig, fixed([1, 1, 1], 2, 2));
    check_case(rig, fixed([1, 3, 2], 1, 1030));
    check_case(rig, fixed([2, 90, 91], 32, 4));
    for_random(24, cases(rig), |case| check_case(rig, case));
    constant_channels_become_their_bias(rig);
}

fn check_case(rig: &Rig, case: Case) {
    println!("{:?} {case:?}", rig.dtype);
    let [batch, height, width] = case.size;
    let channels = case.groups * case.group_channels;
    let shape = [batch, height, width, channels];
    let x = random(shape.iter().product(), case.seed).map(|value| value + case.mean);
    let x = rig.given(shape, x.collect());
    let (weight, bias) = (
        rig.random([channels], case.seed ^ 1, 1.0),
        rig.random([channels], case.seed ^ 2, 1.0),
    );
    let image = Image::new(shape, x.values);
    let expected = reference::group_norm(&image, &weight.values, &bias.values, case.groups, EPSILON);
    let layer = NormWeight::new(weight.tensor, bias.tensor, case.groups, EPSILON);
    // Sums, exponentials and the result of about ten are f32: 2e-5. The mean is f32, so known to half a step of its
    // size; that counts as much more as deviations are smaller. In half precision the result is rounded once more.
    let before = |i: usize| {
        let step = 2f64.powi(-23) * (image.values[i].abs() + expected.magnitude[i]);
        2e-5 + step * expected.scale[i].abs()
    };
    let found = rig.run(0, || layer.forward(x.tensor.clone()));
    let values = &expected.image.values;
    rig.check(&found, values, |i| before(i) + rig.unit() * values[i].abs(), None);
    // SiLU has a slope of at most 1.1.
    let silu: Vec<f64> = values.iter().copied().map(reference::silu).collect();
    let found = rig.run(0, || layer.forward_silu(x.tensor.clone()));
    rig.check(&found, &silu, |i| 1.1 * before(i) + rig.unit() * silu[i].abs(), None);
}

/// Whatever the constant: a mean that is off by a step would be divided by a deviation of 0.001.
fn constant_channels_become_their_bias(rig: &Rig) {
    let (groups, group_channels, pixels) = (4, 3, 35 * 37);
    let constants = [0.3, -7.0, 0.0, large_mean(rig) / 3.0];
    let x = (0..pixels).flat_map(|_| constants.into_iter().flat_map(|constant| [constant; 3]));
    let x = rig.given([1, 35, 37, groups * group_channels], x.collect());
    let (weight, bias) = (rig.random([12], 1, 1.0), rig.random([12], 2, 1.0));
    let layer = NormWeight::new(weight.tensor, bias.tensor, groups, EPSILON);
    let expected: Vec<f64> = (0..pixels).flat_map(|_| bias.values.clone()).collect();
    rig.check(
        &rig.run(0, || layer.forward(x.tensor.clone())),
        &expected,
        |_| 1e-6,
        None,
    );
}
