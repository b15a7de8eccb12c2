//! Attention of one wide head, with its norm, projections and residual.

use proptest::{prelude::*, sample::select};
use vae_ops::{AttentionWeight, ConvKind, ConvWeight, NormWeight};

use crate::{
    reference::{self, Image},
    rig::{Given, Rig, for_random, random},
};

/// What attention is called with.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Batch, height, width.
    size: [usize; 3],
    channels: usize,
    /// Deviation of the scores, about.
    scores: f32,
    /// Tokens grow along the image, and scores with them.
    growing: bool,
    seed: u64,
}

const EPSILON: f64 = 1e-6;

fn case(
    size: impl Strategy<Value = [usize; 3]>,
    channels: impl Strategy<Value = usize>,
) -> impl Strategy<Value = Case> {
    let scores = select(vec![0.0, 1.0, 8.0, 30.0]);
    (size, channels, scores, any::<bool>(), any::<u64>()).prop_map(|(size, channels, scores, growing, seed)| Case {
        size,
        channels,
        scores,
        growing,
        seed,
    })
}

pub fn check(rig: &Rig) {
    let fixed = |size, channels, scores| Case {
        size,
        channels,
        scores,
        growing: false,
        seed: 1,
    };
    check_case(rig, fixed([1, 1, 1], 16, 1.0));
    // Several chunks of queries.
    check_case(rig, fixed([1, 76, 77], 8, 1.0));
    let sizes = [1..=2usize, 1..=15usize, 1..=15usize];
    for_random(12, case(sizes, select(vec![4, 12, 24, 64, 96])), |case| {
        check_case(rig, case)
    });
    if !rig.hopper {
        return;
    }
    // One query, keys in several ranges, several chunks, every tile of the widest.
    check_case(rig, fixed([1, 1, 1], 512, 1.0));
    check_case(rig, fixed([1, 65, 64], 512, 1.0));
    check_case(rig, fixed([1, 111, 111], 64, 8.0));
    check_case(rig, fixed([2, 31, 33], 384, 8.0));
    let sizes = [1..=2usize, 1..=40usize, 1..=40usize];
    let channels = prop_oneof![2 => (1..=8usize).prop_map(|n| 64 * n), 1 => select(vec![384, 512])];
    for_random(16, case(sizes, channels), |case| check_case(rig, case));
}

/// Weight `[channels, channels]` and bias.
type Projection = (Given<2>, Given<1>);

fn check_case(rig: &Rig, case: Case) {
    println!("{:?} {case:?}", rig.dtype);
    let ([batch, height, width], channels) = (case.size, case.channels);
    let (tokens, groups) = (height * width, 4);
    let shape = [batch, height, width, channels];
    let growth = |i: usize| match case.growing {
        true => 0.05 + 2.0 * (i / channels % tokens) as f32 / tokens as f32,
        false => 1.0,
    };
    let x = random(shape.iter().product(), case.seed).enumerate();
    let x = rig.given(shape, x.map(|(i, value)| value * growth(i)).collect());
    let norm_weight = rig.random([channels], case.seed ^ 1, 1.0);
    let norm_bias = rig.random([channels], case.seed ^ 2, 0.5);
    let [query, key, value, out]: [Projection; 4] = std::array::from_fn(|i| {
        let seed = case.seed ^ (3 + 2 * i as u64);
        let deviation = if i == 0 { case.scores } else { 1.0 } / (channels as f32).sqrt();
        let weight = rig.random([channels, channels], seed, deviation);
        (weight, rig.random([channels], seed ^ 1, 0.1))
    });

    // The operation.
    let norm = NormWeight::new(norm_weight.tensor.clone(), norm_bias.tensor.clone(), groups, EPSILON);
    let tensors = |(weight, bias): &Projection| (weight.tensor.clone(), bias.tensor.clone());
    let layer = AttentionWeight::new(
        norm.clone(),
        tensors(&query),
        tensors(&key),
        tensors(&value),
        tensors(&out),
    );
    // Scores of a few queries at least are in scratch memory.
    let scratch = (2 * tokens.next_multiple_of(128).pow(2)).min(1 << 26);
    let found = rig.run(scratch, || layer.forward(x.tensor.clone().into()));

    // Queries, keys and folded values as one projection; what is added to the values is added to every result.
    let fold = reference::product(&out.0.values, &value.0.values, channels);
    let weight = [query.0.values, key.0.values, fold].concat();
    let zeros = vec![0.0; channels];
    let bias = [query.1.values, key.1.values, zeros].concat();
    let added = reference::product(&out.0.values, &value.1.values, 1);
    let added: Vec<f64> = added.iter().zip(&out.1.values).map(|(a, b)| a + b).collect();
    let image = Image::new(shape, x.values);
    let attend = |projected: &[f64]| attend(&image, projected, &added);

    // From the input to the result, in f64.
    let normalized = reference::group_norm(&image, &norm_weight.values, &norm_bias.values, groups, EPSILON).image;
    let projected = reference::convolve(&normalized, &weight, &bias, 1);
    let expected = attend(&projected.values);
    let Some(relative) = rig.relative(3e-3) else {
        // f32: sums cost 2e-5, and a score that is off by some steps of its size makes a weight, so a value, as wrong.
        let bound = 2e-5 + 2f64.powi(-20) * expected.largest_score * expected.largest_value;
        rig.check(&found, &expected.values, |_| bound, None);
        return;
    };
    // Tokens, queries and keys are rounded on the way, which large scores magnify.
    if case.scores <= 8.0 && !case.growing {
        let magnified = rig.relative(2.5e-3 * (2.0 + f64::from(case.scores)));
        rig.check(&found, &expected.values, |_| f64::MAX, magnified);
    }

    // So what follows is judged from the device's own queries, keys and values.
    let f32s = |values: &[f64]| values.iter().map(|&value| value as f32).collect();
    let weight = rig.given([3 * channels, channels, 1, 1], f32s(&weight)).tensor;
    let bias = rig.given([3 * channels], f32s(&bias)).tensor;
    let projected = ConvWeight::new(ConvKind::Point, weight, bias).forward(norm.forward(x.tensor));
    let expected = attend(&projected.into_data().iter::<f64>().collect::<Vec<_>>());
    // Weights are rounded, on the CPU the mixed values too, and the result: 2.4e-3 in bf16 all together.
    let mixed = (2.0 * rig.unit() + 2f64.powi(-20) * expected.largest_score) * expected.largest_value + 1e-4;
    let bound = |i: usize| mixed + rig.unit() * expected.values[i].abs();
    rig.check(&found, &expected.values, bound, Some(relative));
}

struct Attended {
    values: Vec<f64>,
    largest_score: f64,
    largest_value: f64,
}

/// `x` plus `added` plus attention over queries, keys and values that lie side by side in `projected`.
fn attend(x: &Image, projected: &[f64], added: &[f64]) -> Attended {
    let channels = added.len();
    let batch = x.shape[0];
    let mut attended = Attended {
        values: Vec::with_capacity(x.values.len()),
        largest_score: 0.0,
        largest_value: 0.0,
    };
    for projected in projected.chunks_exact(projected.len() / batch) {
        let part = |index: usize| -> Vec<f64> {
            let rows = projected.chunks_exact(3 * channels);
            rows.flat_map(|row| &row[index * channels..][..channels])
                .copied()
                .collect()
        };
        let value = part(2);
        let (mixed, score) = reference::attention(&part(0), &part(1), &value, channels);
        attended.largest_score = attended.largest_score.max(score);
        attended.largest_value = value
            .iter()
            .fold(attended.largest_value, |most, value| most.max(value.abs()));
        attended.values.extend(mixed);
    }
    let values = attended.values.iter_mut().zip(&x.values).enumerate();
    values.for_each(|(i, (value, x))| *value += x + added[i % channels]);
    attended
}
