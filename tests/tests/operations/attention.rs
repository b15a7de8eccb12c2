//! Attention of one wide head, with its norm, projections and residual.

use burn::tensor::Tensor;
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
    (size, channels, scores, any::<bool>(), any::<u64>().no_shrink()).prop_map(
        |(size, channels, scores, growing, seed)| Case {
            size,
            channels,
            scores,
            growing,
            seed,
        },
    )
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
    if rig.gpu && !rig.is_half() {
        // Several chunks of queries.
        check_case(rig, fixed([1, 76, 77], 8, 1.0));
    }
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
    // Scores, or those of a chunk of queries.
    let scratch = (4 * tokens.next_multiple_of(128).pow(2)).min(128 << 20);
    let found = rig.run(scratch, || layer.forward(x.tensor.clone().into()));

    // The output's projection, folded into the values'; what is added to the values is added to every result.
    let fold = reference::product(&out.0.values, &value.0.values, channels);
    let added = reference::product(&out.0.values, &value.1.values, 1);
    let added: Vec<f64> = added.iter().zip(&out.1.values).map(|(a, b)| a + b).collect();
    let zeros = vec![0.0; channels];
    let image = Image::new(shape, x.values);

    // From the input to the result, in f64.
    let normalized = reference::group_norm(&image, &norm_weight.values, &norm_bias.values, groups, EPSILON).image;
    let project = |weight: &[f64], bias: &[f64]| reference::convolve(&normalized, weight, bias, 1).values;
    let projected = [
        project(&query.0.values, &query.1.values),
        project(&key.0.values, &key.1.values),
        project(&fold, &zeros),
    ];
    let expected = attend(&image, &projected, &added);
    // Probabilities are rounded, and the result. The CPU divides by the sum of the probabilities before they are rounded,
    // and rounds the mixed values as well.
    let Some(relative) = rig.relative(if rig.gpu { 3e-3 } else { 4.5e-3 }) else {
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

    // So what follows is judged from the device's own tokens, queries and keys.
    let normalized = norm.forward(x.tensor);
    let values = |tensor: Tensor<4>| -> Vec<f64> { tensor.into_data().iter::<f64>().collect() };
    let project = |(weight, bias): Projection| {
        let layer = ConvWeight::new(ConvKind::Point, weight.tensor.unsqueeze_dims(&[2, 3]), bias.tensor);
        values(layer.forward(normalized.clone()))
    };
    // The CPU keeps folds in f32.
    let fold = if rig.gpu { rig.rounded(&fold) } else { fold };
    let value = reference::convolve(&Image::new(shape, values(normalized.clone())), &fold, &zeros, 1);
    let projected = [project(query), project(key), rig.rounded(&value.values)];
    let expected = attend(&image, &projected, &added);
    let mixed = (2.0 * rig.unit() + 2f64.powi(-20) * expected.largest_score) * expected.largest_value + 1e-4;
    let bound = |i: usize| mixed + rig.unit() * expected.values[i].abs();
    rig.check(&found, &expected.values, bound, Some(relative));
}

struct Attended {
    values: Vec<f64>,
    largest_score: f64,
    largest_value: f64,
}

/// `x` plus `added` plus attention over queries, keys and values.
fn attend(x: &Image, projected: &[Vec<f64>; 3], added: &[f64]) -> Attended {
    let [batch, height, width, channels] = x.shape;
    let [query, key, value] = projected;
    let mut attended = Attended {
        values: Vec::with_capacity(x.values.len()),
        largest_score: 0.0,
        largest_value: value.iter().fold(0.0, |most, value| value.abs().max(most)),
    };
    for image in 0..batch {
        let size = height * width * channels;
        let [query, key, value] = [query, key, value].map(|values| &values[image * size..][..size]);
        let (mixed, score) = reference::attention(query, key, value, channels);
        attended.largest_score = attended.largest_score.max(score);
        attended.values.extend(mixed);
    }
    let values = attended.values.iter_mut().zip(&x.values).enumerate();
    values.for_each(|(i, (value, x))| *value += x + added[i % channels]);
    attended
}
