//! The operations by their definitions, in f64: plain loops over channels-last arrays.

use rayon::prelude::*;

/// `[batch, height, width, channels]`
#[derive(Debug, Clone)]
pub struct Image {
    pub shape: [usize; 4],
    pub values: Vec<f64>,
}

impl Image {
    pub fn new(shape: [usize; 4], values: Vec<f64>) -> Self {
        assert_eq!(values.len(), shape.iter().product::<usize>());
        Self { shape, values }
    }

    /// Channels of the pixel at row `y` and column `x`.
    fn pixel(&self, image: usize, y: usize, x: usize) -> &[f64] {
        let [_, height, width, channels] = self.shape;
        &self.values[((image * height + y) * width + x) * channels..][..channels]
    }
}

/// Every pixel four times.
pub fn upsample(x: &Image) -> Image {
    let [batch, height, width, channels] = x.shape;
    let mut values = Vec::with_capacity(4 * x.values.len());
    for image in 0..batch {
        for row in 0..2 * height {
            for column in 0..2 * width {
                values.extend_from_slice(x.pixel(image, row / 2, column / 2));
            }
        }
    }
    Image::new([batch, 2 * height, 2 * width, channels], values)
}

/// Stride 1, zeros around the image; `weight` is `[channels_out, channels_in, side, side]`, `side` odd.
pub fn convolve(x: &Image, weight: &[f64], bias: &[f64], side: usize) -> Image {
    let [batch, height, width, channels_in] = x.shape;
    let channels_out = bias.len();
    assert_eq!(weight.len(), channels_out * channels_in * side * side);
    // To `[side, side, channels_in, channels_out]`, so that the innermost loop runs along memory.
    let weight: Vec<f64> = (0..weight.len())
        .map(|i| {
            let (tap, channels) = (i / (channels_in * channels_out), i % (channels_in * channels_out));
            let (channel_in, channel_out) = (channels / channels_out, channels % channels_out);
            weight[(channel_out * channels_in + channel_in) * side * side + tap]
        })
        .collect();
    let mut y = vec![0.0; batch * height * width * channels_out];
    y.par_chunks_exact_mut(width * channels_out)
        .enumerate()
        .for_each(|(line, y)| {
            let (image, row) = (line / height, line % height);
            for (column, y) in y.chunks_exact_mut(channels_out).enumerate() {
                y.copy_from_slice(bias);
                for tap in 0..side * side {
                    let (row, column) = (row + tap / side, column + tap % side);
                    let inside = |position, length| (side / 2..side / 2 + length).contains(&position);
                    if !inside(row, height) || !inside(column, width) {
                        continue;
                    }
                    let pixel = x.pixel(image, row - side / 2, column - side / 2);
                    let weight = &weight[tap * channels_in * channels_out..];
                    for (x, weight) in pixel.iter().zip(weight.chunks_exact(channels_out)) {
                        y.iter_mut().zip(weight).for_each(|(y, weight)| *y += x * weight);
                    }
                }
            }
        });
    Image::new([batch, height, width, channels_out], y)
}

pub fn add(x: &Image, y: &Image) -> Image {
    assert_eq!(x.shape, y.shape);
    Image::new(x.shape, x.values.iter().zip(&y.values).map(|(x, y)| x + y).collect())
}

/// A normalised image, and for every element what it took to get there.
pub struct Normalized {
    pub image: Image,
    /// `weight / sqrt(variance + epsilon)`
    pub scale: Vec<f64>,
    /// Root mean square of the element's group before it was normalised.
    pub magnitude: Vec<f64>,
}

/// `(x - mean) / sqrt(variance + epsilon) * weight + bias`, mean and biased variance those of a group of channels.
pub fn group_norm(x: &Image, weight: &[f64], bias: &[f64], groups: usize, epsilon: f64) -> Normalized {
    let [batch, height, width, channels] = x.shape;
    let (pixels, group_channels) = (height * width, channels / groups);
    let zeros = || vec![0.0; x.values.len()];
    let (mut values, mut scale, mut magnitude) = (zeros(), zeros(), zeros());
    for image in 0..batch {
        for group in 0..groups {
            let members: Vec<usize> = (0..pixels * group_channels)
                .map(|i| {
                    let (pixel, channel) = (i / group_channels, group * group_channels + i % group_channels);
                    (image * pixels + pixel) * channels + channel
                })
                .collect();
            let mean_of =
                |f: &dyn Fn(f64) -> f64| members.iter().map(|&i| f(x.values[i])).sum::<f64>() / members.len() as f64;
            let mean = mean_of(&|x| x);
            let variance = mean_of(&|x| (x - mean).powi(2));
            let root_mean_square = mean_of(&|x| x * x).sqrt();
            for &i in &members {
                scale[i] = weight[i % channels] / (variance + epsilon).sqrt();
                values[i] = (x.values[i] - mean) * scale[i] + bias[i % channels];
                magnitude[i] = root_mean_square;
            }
        }
    }
    Normalized {
        image: Image::new(x.shape, values),
        scale,
        magnitude,
    }
}

pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// `out[row][column] = sum over k of a[row][k] * b[k][column]`, `b` with `columns` columns.
pub fn product(a: &[f64], b: &[f64], columns: usize) -> Vec<f64> {
    let depth = b.len() / columns;
    let mut out = vec![0.0; a.len() / depth * columns];
    out.par_chunks_exact_mut(columns)
        .zip(a.par_chunks_exact(depth))
        .for_each(|(out, a)| {
            for (a, b) in a.iter().zip(b.chunks_exact(columns)) {
                out.iter_mut().zip(b).for_each(|(out, b)| *out += a * b);
            }
        });
    out
}

pub fn transpose(a: &[f64], columns: usize) -> Vec<f64> {
    let rows = a.len() / columns;
    (0..a.len()).map(|i| a[i % rows * columns + i / rows]).collect()
}

/// `softmax(query key^T / sqrt(channels)) value` over rows of `channels`, and the largest score's magnitude.
pub fn attention(query: &[f64], key: &[f64], value: &[f64], channels: usize) -> (Vec<f64>, f64) {
    let key = transpose(key, channels);
    let tokens = key.len() / channels;
    let mut out = vec![0.0; query.len()];
    let largest = out
        .par_chunks_exact_mut(channels)
        .zip(query.par_chunks_exact(channels))
        .map(|(out, query)| {
            let mut scores = vec![0.0; tokens];
            for (query, key) in query.iter().zip(key.chunks_exact(tokens)) {
                scores
                    .iter_mut()
                    .zip(key)
                    .for_each(|(score, key)| *score += query * key);
            }
            scores.iter_mut().for_each(|score| *score /= (channels as f64).sqrt());
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let least = scores.iter().copied().fold(f64::INFINITY, f64::min);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (weight, value) in weights.iter().zip(value.chunks_exact(channels)) {
                out.iter_mut()
                    .zip(value)
                    .for_each(|(out, value)| *out += weight / sum * value);
            }
            most.abs().max(least.abs())
        })
        .reduce(|| 0.0, f64::max);
    (out, largest)
}
