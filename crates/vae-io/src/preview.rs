use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::{Error, Image, Result, config::read_json};

/// What errors call the file.
const KIND: &str = "preview projection";
/// About three hundred kilobytes for the widest latents that a config may have.
const MAX_BYTES: u64 = 4 << 20;
const MAX_CHANNELS: usize = 65_536;
const COLOURS: usize = 3;

/// A linear map from the channels of a latent in VAE space to the colour of its pixels: an approximate picture of latents
/// for next to nothing, in the size of the latents.
///
/// Fitted per model to its decoder. As a file it is JSON beside the weights, `ae.preview.json` beside `ae.safetensors`:
///
/// ```json
/// { "weight": [[0.1, 0.2, 0.3], [-0.1, 0.0, 0.1]], "bias": [0.0, -0.1, -0.2] }
/// ```
///
/// `weight` has red, green and blue for each latent channel. Colours are `sum(weight[c] * z[c]) + bias`, clamped to -1..1,
/// and `z` is in VAE space: before `post_quant_conv`, without scaling, normalisation or patches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PreviewProjection {
    /// Red, green and blue for each latent channel.
    pub weight: Vec<[f32; COLOURS]>,
    /// Red, green and blue of latents that are zero.
    pub bias: [f32; COLOURS],
}

/// Latents of one picture, and their decode as it is shown (clamped to -1..1) averaged over the pixels of each latent: what a
/// projection is fitted to.
#[derive(Debug, Clone)]
pub struct PreviewSample {
    latents: Image,
    colours: Image,
}

impl PreviewSample {
    /// Pairs latents in VAE space, `[1, C, h, w]`, with their decode, `[1, 3, s * h, s * w]`, which is averaged.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the shapes do not go together, [`Error::NonFinite`].
    pub fn new(latents: Image, decoded: &Image) -> Result<Self> {
        let [batch, _, height, width] = latents.shape();
        let [images, colours, rows, columns] = decoded.shape();
        let fits = batch == 1
            && images == 1
            && colours == COLOURS
            && height > 0
            && width > 0
            && rows > 0
            && columns > 0
            && rows % height == 0
            && columns % width == 0;
        if !fits {
            let reason = format!("a decode of shape {:?} is none of theirs", decoded.shape());
            return Err(Error::invalid_latents(&latents.shape(), reason));
        }
        latents.check_finite(latents.data())?;
        decoded.check_finite(decoded.data())?;
        let (down, across) = (rows / height, columns / width);
        let mut sums = vec![0f64; COLOURS * height * width];
        for (row, values) in decoded.data().chunks_exact(columns).enumerate() {
            // Rows of all colours follow each other, and each has a whole number of latents' rows.
            let sums = &mut sums[row / down * width..][..width];
            for (sum, values) in sums.iter_mut().zip(values.chunks_exact(across)) {
                *sum += values
                    .iter()
                    .map(|&value| f64::from(value.clamp(-1.0, 1.0)))
                    .sum::<f64>();
            }
        }
        let count = (down * across) as f64;
        let colours = sums.iter().map(|sum| (sum / count) as f32).collect();
        Ok(Self {
            latents,
            colours: Image::new([1, COLOURS, height, width], colours),
        })
    }

    /// The averaged decode, `[1, 3, h, w]`.
    pub fn colours(&self) -> &Image {
        &self.colours
    }

    /// One colour all over, the average: what any preview has to beat.
    pub fn mean_colour(&self) -> Image {
        let pixels = self.latents.height() * self.latents.width();
        let planes = self.colours.data().chunks_exact(pixels);
        let means = planes.flat_map(|plane| {
            let sum: f64 = plane.iter().map(|&value| f64::from(value)).sum();
            std::iter::repeat_n((sum / pixels as f64) as f32, pixels)
        });
        Image::new(self.colours.shape(), means.collect())
    }
}

impl PreviewProjection {
    /// Ridge, as a part of the latents' mean variance: the fit is the one that noise of so much variance on the latents
    /// would give. Latents in the middle of sampling are noisy, and pictures that are not fitted come out better: chosen by
    /// leaving out each picture of the fixtures in turn, as documented in docs/accuracy.md.
    const RIDGE: f64 = 0.1;

    /// The least-squares fit to latents of a few pictures.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when there is no sample, or they have different channels.
    pub fn fit<'a>(samples: impl IntoIterator<Item = &'a PreviewSample>) -> Result<Self> {
        let mut moments = Moments::default();
        for sample in samples {
            moments.add(sample)?;
        }
        if moments.count == 0.0 {
            return Err(Error::invalid_latents(&[0], "there are none to fit a preview to"));
        }
        let (covariance, cross) = moments.centred();
        let channels = moments.channels;
        let trace: f64 = (0..channels).map(|c| covariance[c * channels + c]).sum();
        // Latents without any variance tell nothing: all weights are zero then.
        let ridge = (Self::RIDGE * trace / channels as f64).max(f64::MIN_POSITIVE.sqrt());
        let mut system = covariance;
        for c in 0..channels {
            system[c * channels + c] += ridge;
        }
        let weight = solve(system, cross);
        let bias = std::array::from_fn(|colour| {
            let of_mean: f64 = weight
                .iter()
                .zip(&moments.latents)
                .map(|(w, sum)| w[colour] * sum)
                .sum();
            ((moments.colours[colour] - of_mean) / moments.count) as f32
        });
        let weight = weight.iter().map(|colours| colours.map(|w| w as f32)).collect();
        Ok(Self { weight, bias })
    }

    /// The preview of a sample, for comparison with its [`colours`](PreviewSample::colours).
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the sample has another number of channels.
    pub fn apply(&self, sample: &PreviewSample) -> Result<Image> {
        self.check_channels(sample.latents.shape()[1])?;
        let [_, _, height, width] = sample.latents.shape();
        let mut image = Vec::with_capacity(COLOURS * height * width);
        for colour in 0..COLOURS {
            let mut plane = vec![self.bias[colour]; height * width];
            for (weight, latents) in self
                .weight
                .iter()
                .zip(sample.latents.data().chunks_exact(height * width))
            {
                for (value, latent) in plane.iter_mut().zip(latents) {
                    *value += weight[colour] * latent;
                }
            }
            image.extend(plane.into_iter().map(|value| value.clamp(-1.0, 1.0)));
        }
        Ok(Image::new([1, COLOURS, height, width], image))
    }

    /// Where the projection of a checkpoint is: the file of its weights (of several the first) with `.preview.json` in place
    /// of its extension. A name of its own for each file, because folders of single-file checkpoints hold several models.
    pub fn path_beside(weights: impl AsRef<Path>) -> PathBuf {
        weights.as_ref().with_extension("preview.json")
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::InvalidFile`] if it is not JSON with `weight` and `bias`, or a number is not finite.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let invalid = |reason: String| Error::invalid_file(path, KIND, reason);
        let value = read_json(path, KIND, MAX_BYTES)?;
        let projection: Self = serde_json::from_value(value).map_err(|error| invalid(error.to_string()))?;
        if !(1..=MAX_CHANNELS).contains(&projection.weight.len()) {
            return Err(invalid(format!("it has {} latent channels", projection.weight.len())));
        }
        // A number that f32 cannot hold reads as infinity.
        let mut numbers = projection.weight.iter().flatten().chain(&projection.bias);
        if numbers.any(|number| !number.is_finite()) {
            return Err(invalid("a number is not finite".to_owned()));
        }
        Ok(projection)
    }

    /// The text of a file.
    pub fn to_json(&self) -> String {
        let list = |colours: &[f32; COLOURS]| {
            let [red, green, blue] = colours;
            format!("[{red:?}, {green:?}, {blue:?}]")
        };
        let weight: Vec<String> = self
            .weight
            .iter()
            .map(|colours| format!("    {}", list(colours)))
            .collect();
        format!(
            "{{\n  \"weight\": [\n{}\n  ],\n  \"bias\": {}\n}}\n",
            weight.join(",\n"),
            list(&self.bias)
        )
    }

    /// Checks that the projection is for latents of so many channels.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`]
    pub fn check_channels(&self, channels: usize) -> Result<()> {
        let own = self.weight.len();
        if own == channels {
            return Ok(());
        }
        let reason = format!("the preview projection is for {own} channels; fit it again (cargo xtask fit-preview)");
        Err(Error::invalid_latents(&[channels], reason))
    }
}

/// Sums over all latents of all samples.
#[derive(Default)]
struct Moments {
    channels: usize,
    count: f64,
    /// `[C]`
    latents: Vec<f64>,
    colours: [f64; COLOURS],
    /// `[C, C]`, of products; only columns up to the row.
    squares: Vec<f64>,
    /// `[C]`, of products with each colour.
    cross: Vec<[f64; COLOURS]>,
}

impl Moments {
    fn add(&mut self, sample: &PreviewSample) -> Result<()> {
        let [_, channels, height, width] = sample.latents.shape();
        if self.count == 0.0 {
            *self = Self {
                channels,
                latents: vec![0.0; channels],
                squares: vec![0.0; channels * channels],
                cross: vec![[0.0; COLOURS]; channels],
                ..Self::default()
            };
        }
        if channels != self.channels {
            let reason = format!("those of another picture have {} channels", self.channels);
            return Err(Error::invalid_latents(&sample.latents.shape(), reason));
        }
        let pixels = height * width;
        self.count += pixels as f64;
        let planes: Vec<&[f32]> = sample.latents.data().chunks_exact(pixels).collect();
        let colours: Vec<&[f32]> = sample.colours.data().chunks_exact(pixels).collect();
        for (sum, plane) in self.colours.iter_mut().zip(&colours) {
            *sum += plane.iter().map(|&value| f64::from(value)).sum::<f64>();
        }
        for (i, plane) in planes.iter().enumerate() {
            self.latents[i] += plane.iter().map(|&value| f64::from(value)).sum::<f64>();
            for (j, other) in planes[..=i].iter().enumerate() {
                self.squares[i * channels + j] += dot(plane, other);
            }
            for (sum, colours) in self.cross[i].iter_mut().zip(&colours) {
                *sum += dot(plane, colours);
            }
        }
        Ok(())
    }

    /// The covariances of the channels (`[C, C]`, columns up to the row) and with the colours.
    fn centred(&self) -> (Vec<f64>, Vec<[f64; COLOURS]>) {
        let mean = |sum: f64| sum / self.count;
        let mut covariance = vec![0.0; self.squares.len()];
        for i in 0..self.channels {
            for j in 0..=i {
                let at = i * self.channels + j;
                covariance[at] = mean(self.squares[at]) - mean(self.latents[i]) * mean(self.latents[j]);
            }
        }
        let cross = self.cross.iter().zip(&self.latents).map(|(products, &latents)| {
            std::array::from_fn(|colour| mean(products[colour]) - mean(latents) * mean(self.colours[colour]))
        });
        (covariance, cross.collect())
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// Solves `system * x = right` for a symmetric positive definite system, given by its columns up to the row, by Cholesky.
fn solve(mut system: Vec<f64>, mut right: Vec<[f64; COLOURS]>) -> Vec<[f64; COLOURS]> {
    let n = right.len();
    for i in 0..n {
        for j in 0..=i {
            let products: f64 = (0..j).map(|k| system[i * n + k] * system[j * n + k]).sum();
            let rest = system[i * n + j] - products;
            system[i * n + j] = match i == j {
                true => rest.sqrt(),
                false => rest / system[j * n + j],
            };
        }
    }
    let subtract =
        |row: &mut [f64; COLOURS], known: &[[f64; COLOURS]], factors: &dyn Fn(usize) -> f64, divisor: f64| {
            for (colour, value) in row.iter_mut().enumerate() {
                let sum: f64 = known
                    .iter()
                    .enumerate()
                    .map(|(k, known)| factors(k) * known[colour])
                    .sum();
                *value = (*value - sum) / divisor;
            }
        };
    for i in 0..n {
        let (known, rest) = right.split_at_mut(i);
        subtract(&mut rest[0], known, &|k| system[i * n + k], system[i * n + i]);
    }
    for i in (0..n).rev() {
        let (rest, known) = right.split_at_mut(i + 1);
        subtract(&mut rest[i], known, &|k| system[(i + 1 + k) * n + i], system[i * n + i]);
    }
    right
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    /// Two channels of 2x3 latents, and a decode of twice the size that has the projection's colours, with details that
    /// average out.
    fn sample(projection: &PreviewProjection) -> PreviewSample {
        let latents = Image::new(
            [1, 2, 2, 3],
            vec![0.25, -0.5, 0.125, 0.75, 0.0, -0.25, 0.0, 0.25, -0.25, 0.125, 0.5, -0.75],
        );
        let decoded = (0..3 * 4 * 6).map(|i| {
            let (colour, row, column) = (i / 24, i / 6 % 4, i % 6);
            let at = row / 2 * 3 + column / 2;
            let [a, b] = [latents.data()[at], latents.data()[6 + at]];
            let detail = if (row + column) % 2 == 0 { 0.25 } else { -0.25 };
            projection.weight[0][colour] * a + projection.weight[1][colour] * b + projection.bias[colour] + detail
        });
        let decoded = Image::new([1, 3, 4, 6], decoded.collect());
        PreviewSample::new(latents, &decoded).unwrap()
    }

    fn projection() -> PreviewProjection {
        PreviewProjection {
            weight: vec![[0.5, -0.25, 0.125], [0.0, 1.0, -0.5]],
            bias: [0.25, 0.0, -0.5],
        }
    }

    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn a_decode_is_averaged_over_the_pixels_of_a_latent() {
        let sample = sample(&projection());
        let applied = projection().apply(&sample).unwrap();
        assert_eq!(sample.colours().shape(), [1, 3, 2, 3]);
        // The first latent: 0.5 * 0.25 + 0.25; the last one's blue: 0.125 * -0.25 - 0.5 * -0.75 - 0.5.
        assert!((sample.colours().data()[0] - 0.375).abs() <= 1e-6);
        assert!((sample.colours().data()[17] + 0.156_25).abs() <= 1e-6);
        assert!(largest_difference(applied.data(), sample.colours().data()) <= 1e-6);
        let mean = sample.mean_colour();
        // 0.5 * 0.375 / 6 + 0.25
        assert!((mean.data()[0] - 0.281_25).abs() <= 1e-6 && mean.data()[0] == mean.data()[5]);
    }

    #[test]
    fn the_fit_solves_the_ridge_s_normal_equations() {
        let sample = sample(&projection());
        let fitted = PreviewProjection::fit([&sample, &sample]).unwrap();
        // numpy: solve(cov + 0.1 * trace / 2 * I, cov @ W), with the bias that keeps the mean colour.
        let expected = [
            0.453_312_8,
            -0.214_783_8,
            0.107_391_9,
            0.005_936_3,
            0.905_519_8,
            -0.452_759_9,
            0.253_041_6,
            -0.004_169_4,
            -0.497_915_3,
        ];
        let found: Vec<f32> = fitted.weight.iter().chain([&fitted.bias]).flatten().copied().collect();
        assert!(largest_difference(&found, &expected) <= 1e-5, "{found:?}");
    }

    #[test]
    fn latents_that_are_all_equal_give_their_colour() {
        let latents = Image::new([1, 2, 1, 2], vec![1.0, 1.0, -3.0, -3.0]);
        let decoded = Image::new([1, 3, 1, 2], vec![0.25, 0.25, 0.5, 0.5, -1.0, -1.0]);
        let fitted = PreviewProjection::fit([&PreviewSample::new(latents, &decoded).unwrap()]).unwrap();
        assert_eq!(fitted.weight, [[0.0; 3]; 2]);
        assert_eq!(fitted.bias, [0.25, 0.5, -1.0]);
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        let image = |shape: [usize; 4]| Image::new(shape, vec![0.0; shape.iter().product()]);
        for (latents, decoded) in [
            ([1, 2, 2, 3], [1, 3, 4, 7]),
            ([1, 2, 2, 3], [1, 3, 0, 6]),
            ([1, 2, 2, 3], [2, 3, 4, 6]),
            ([1, 2, 0, 3], [1, 3, 4, 6]),
            ([2, 2, 2, 3], [1, 3, 4, 6]),
        ] {
            let error = PreviewSample::new(image(latents), &image(decoded)).unwrap_err();
            assert!(error.to_string().contains("none of theirs"), "{error}");
        }
        assert!(
            PreviewProjection::fit([])
                .unwrap_err()
                .to_string()
                .contains("none to fit")
        );
        let other = PreviewSample::new(image([1, 3, 1, 1]), &image([1, 3, 2, 2])).unwrap();
        let error = PreviewProjection::fit([&sample(&projection()), &other]).unwrap_err();
        assert!(error.to_string().contains("have 2 channels"), "{error}");
        let error = projection().apply(&other).unwrap_err().to_string();
        assert!(error.contains("for 2 channels; fit it again"), "{error}");
    }

    #[test]
    fn files_of_one_folder_have_projections_of_their_own() {
        let beside = |path| PreviewProjection::path_beside(path).display().to_string();
        assert_eq!(beside("vae/ae.safetensors"), "vae/ae.preview.json");
        assert_eq!(beside("vae/sdxl.v1.safetensors"), "vae/sdxl.v1.preview.json");
    }

    #[test]
    fn a_written_file_reads_back_to_the_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.preview.json");
        let projection = PreviewProjection {
            weight: vec![[1.0 / 3.0, -1e-30, 3e38], [0.1, -0.0, 7.0]],
            bias: [f32::MIN_POSITIVE, 0.3, -0.7],
        };
        fs::write(&path, projection.to_json()).unwrap();
        assert_eq!(PreviewProjection::read(&path).unwrap(), projection);
    }

    #[test]
    fn a_broken_file_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.preview.json");
        for (text, reason) in [
            ("", "EOF"),
            ("[1]", "invalid type"),
            (r#"{"bias": [0, 0, 0]}"#, "missing field `weight`"),
            (r#"{"weight": [], "bias": [0, 0, 0]}"#, "0 latent channels"),
            (r#"{"weight": [[0, 0]], "bias": [0, 0, 0]}"#, "invalid length 2"),
            (r#"{"weight": [[0, 0, 1e60]], "bias": [0, 0, 0]}"#, "not finite"),
        ] {
            fs::write(&path, text).unwrap();
            let error = PreviewProjection::read(&path).unwrap_err().to_string();
            assert!(error.contains("x.preview.json") && error.contains(reason), "{error}");
        }
    }

    proptest! {
        #[test]
        fn mutated_files_never_panic(at in 0usize..200, byte: u8) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("x.preview.json");
            let mut text = projection().to_json().into_bytes();
            let at = at % text.len();
            text[at] = byte;
            fs::write(&path, text).unwrap();
            if let Ok(projection) = PreviewProjection::read(&path) {
                prop_assert!(projection.weight.iter().flatten().all(|number| number.is_finite()));
            }
        }
    }
}
