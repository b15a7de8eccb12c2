//! How far two images are apart.
//!
//! SSIM is fovea's, which agrees with scikit-image; docs/accuracy.md says what else was looked at.

use fovea::analyze::quality::{PeakValue, SsimParams, ssim};
use fovea::pixel::MonoF32;
use serde::Serialize;

use crate::{Error, Image, Result, Rgb8};

/// How far two images of one size are apart, in the units of the images: -1..1 for decoded ones, levels for 8-bit ones.
///
/// Serialised, an infinite ratio and a missing similarity are null.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Metrics {
    /// Peak signal-to-noise ratio in dB over all values, with a peak of 2 for decoded images and 255 for 8-bit ones.
    /// Infinite where all values are equal.
    pub psnr_db: f64,
    /// Structural similarity, the mean over the channels: Gaussian window of sigma 1.5 and 11x11 pixels, K1 = 0.01,
    /// K2 = 0.03, population covariance, only where the whole window is inside the image. `None` for images with a side
    /// of less than 11 pixels.
    ///
    /// It depends on the offset of values, so decoded images are taken as they are shown, x/2 + 0.5 (not clamped, not
    /// rounded) with a range of 1, and its scale is the same for both kinds of images.
    ///
    /// Wang, Bovik, Sheikh, Simoncelli: Image quality assessment: from error visibility to structural similarity, 2004.
    pub ssim: Option<f64>,
    /// Mean of the absolute differences of values.
    pub mean_abs: f64,
    /// Their 99th percentile, interpolated as NumPy does.
    pub p99_abs: f64,
    /// The largest of them.
    pub max_abs: f64,
    /// Share of pixels, 0..1, that are equal in every channel.
    pub identical_pixels: f64,
}

impl Metrics {
    /// Compares image `index` of two batches of decoded images.
    ///
    /// # Errors
    ///
    /// [`Error::ImagesDiffer`] when the shapes do, [`Error::NonFinite`].
    ///
    /// # Panics
    ///
    /// When the batch has no image `index`.
    pub fn of_images(a: &Image, b: &Image, index: usize) -> Result<Self> {
        if a.shape() != b.shape() {
            return Err(Error::ImagesDiffer {
                a: a.shape(),
                b: b.shape(),
            });
        }
        let (a_values, b_values) = (a.image(index), b.image(index));
        a.check_finite(a_values)?;
        b.check_finite(b_values)?;
        let shown = |x: f32| x / 2.0 + 0.5;
        let ssim = mean_ssim(a_values, b_values, (a.width(), a.height()), 1.0, shown);
        Ok(Self::measure(a_values, b_values, a.width() * a.height(), 2.0, ssim))
    }

    /// Compares two 8-bit images.
    ///
    /// # Errors
    ///
    /// [`Error::ImagesDiffer`] when the sizes do.
    ///
    /// # Panics
    ///
    /// When an image has not `3 * width * height` bytes.
    pub fn of_rgb8(a: &Rgb8, b: &Rgb8) -> Result<Self> {
        let shape = |image: &Rgb8| [1, 3, image.height, image.width];
        if shape(a) != shape(b) {
            return Err(Error::ImagesDiffer {
                a: shape(a),
                b: shape(b),
            });
        }
        let (a_values, b_values) = (planes(a), planes(b));
        let ssim = mean_ssim(&a_values, &b_values, (a.width, a.height), 255.0, |x| x);
        Ok(Self::measure(&a_values, &b_values, a.width * a.height, 255.0, ssim))
    }

    /// All but SSIM, of values that lie in planes of `pixels`.
    fn measure(a: &[f32], b: &[f32], pixels: usize, peak: f64, ssim: Option<f64>) -> Self {
        let count = a.len().max(1) as f64;
        let squares = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2));
        let mean_square = squares.sum::<f64>() / count;
        let mut differences: Vec<f32> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
        let mut identical = vec![true; pixels];
        for plane in differences.chunks_exact(pixels.max(1)) {
            for (identical, &difference) in identical.iter_mut().zip(plane) {
                *identical &= difference == 0.0;
            }
        }
        let identical = identical.into_iter().filter(|&identical| identical).count();
        Self {
            psnr_db: 10.0 * (peak * peak / mean_square).log10(),
            ssim,
            mean_abs: differences.iter().map(|&x| f64::from(x)).sum::<f64>() / count,
            max_abs: differences.iter().copied().fold(0.0, f32::max).into(),
            p99_abs: percentile(&mut differences, 0.99),
            identical_pixels: identical as f64 / pixels.max(1) as f64,
        }
    }
}

/// The levels of an image, a plane a channel.
fn planes(image: &Rgb8) -> Vec<f32> {
    let (pixels, rest) = image.pixels.as_chunks::<3>();
    let complete = rest.is_empty() && image.width.checked_mul(image.height) == Some(pixels.len());
    assert!(complete, "the pixels of an image of {}x{}", image.width, image.height);
    (0..3)
        .flat_map(|channel| pixels.iter().map(move |pixel| f32::from(pixel[channel])))
        .collect()
}

/// Between the two order statistics around `share * (n - 1)`, in proportion. Reorders `values`.
fn percentile(values: &mut [f32], share: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let position = share * (values.len() - 1) as f64;
    let (_, &mut lower, above) = values.select_nth_unstable_by(position as usize, f32::total_cmp);
    let upper = above.iter().copied().min_by(f32::total_cmp).unwrap_or(lower);
    f64::from(lower) + position.fract() * (f64::from(upper) - f64::from(lower))
}

/// The mean SSIM of the planes, their values seen through `shown`; `None` where the window does not fit.
fn mean_ssim(
    a: &[f32],
    b: &[f32],
    (width, height): (usize, usize),
    range: f64,
    shown: impl Fn(f32) -> f32,
) -> Option<f64> {
    let parameters = SsimParams::reference(PeakValue::new(range)?);
    let plane = |values: &[f32]| {
        let values = values.iter().map(|&x| MonoF32::new(shown(x))).collect();
        fovea::image::Image::from_vec(width, height, values).ok()
    };
    let pixels = width.checked_mul(height).filter(|&pixels| pixels > 0)?;
    let planes = a.chunks_exact(pixels).zip(b.chunks_exact(pixels));
    let channels = planes.len();
    let sum: f64 = planes
        // Its only error now is an image that is smaller than the window.
        .map(|(a, b)| ssim(&plane(a)?, &plane(b)?, parameters).ok())
        .sum::<Option<f64>>()?;
    Some(sum / channels as f64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn fixture(name: &str) -> Rgb8 {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/fixtures")
            .join(name);
        let image = image::open(path).unwrap().into_rgb8();
        Rgb8 {
            width: image.width() as usize,
            height: image.height() as usize,
            pixels: image.into_raw(),
        }
    }

    fn assert_near(found: f64, expected: f64, tolerance: f64, what: &str) {
        assert!(
            (found - expected).abs() <= tolerance,
            "{what}: {found} is not {expected} within {tolerance}"
        );
    }

    /// An image of one channel.
    fn grey(width: usize, height: usize, value: impl Fn(usize, usize) -> f32) -> Image {
        let values = (0..width * height).map(|i| value(i % width, i / width)).collect();
        Image::new([1, 1, height, width], values)
    }

    #[test]
    fn the_pairs_of_the_fixtures_differ_as_scikit_image_says() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/metrics.json");
        let file: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let pairs = file["pairs"].as_array().unwrap();
        assert_eq!(pairs.len(), 4);
        for pair in pairs {
            let (a, b) = (pair["a"].as_str().unwrap(), pair["b"].as_str().unwrap());
            let name = format!("{a} and {b}");
            let expected = |key: &str| pair[key].as_f64().unwrap_or(f64::INFINITY);
            let metrics = Metrics::of_rgb8(&fixture(a), &fixture(b)).unwrap();
            match expected("psnr_db") {
                f64::INFINITY => assert_eq!(metrics.psnr_db, f64::INFINITY, "{name}"),
                psnr => assert_near(metrics.psnr_db, psnr, 1e-4, &name),
            }
            assert_near(metrics.ssim.unwrap(), expected("ssim"), 1e-4, &name);
            assert_near(metrics.mean_abs, expected("mean_abs"), 1e-9, &name);
            assert_eq!(metrics.max_abs, expected("max_abs"), "{name}");
            assert_near(metrics.identical_pixels, expected("identical_pixels"), 1e-12, &name);
        }
    }

    #[test]
    fn decoded_images_are_compared_unquantised_with_a_range_of_2() {
        let wave = |x: usize, y: usize| ((x * x + 3 * y) as f32 * 0.37).sin();
        let image = |offset: f32| {
            let values = (0..3 * 16 * 24).map(|i| {
                let (channel, pixel) = (i / (16 * 24), i % (16 * 24));
                let (x, y) = (pixel % 24, pixel / 24);
                wave(x + 5 * channel, y) * 0.8 + offset * wave(3 * y, x) * 0.25
            });
            Image::new([1, 3, 16, 24], values.collect())
        };
        let metrics = Metrics::of_images(&image(0.0), &image(1.0), 0).unwrap();
        // scikit-image 0.26 and NumPy on the same values; SSIM of x/2 + 0.5 with data_range=1 (of x itself with data_range=2 it is 0.658).
        assert_near(metrics.psnr_db, 21.115_523_8, 1e-4, "psnr");
        assert_near(metrics.ssim.unwrap(), 0.954_637_8, 1e-4, "ssim");
        assert_near(metrics.mean_abs, 0.157_843_8, 1e-6, "mean");
        assert_near(metrics.p99_abs, 0.249_964_2, 1e-6, "p99");
        assert_near(metrics.max_abs, 0.25, 1e-6, "max");
    }

    #[test]
    fn the_second_image_of_a_batch_is_not_the_first() {
        let batch = |second: f32| Image::new([2, 1, 1, 2], vec![0.0, 0.0, 0.5, second]);
        let (a, b) = (batch(0.5), batch(1.0));
        assert_eq!(Metrics::of_images(&a, &b, 0).unwrap().max_abs, 0.0);
        assert_eq!(Metrics::of_images(&a, &b, 1).unwrap().max_abs, 0.5);
    }

    #[test]
    fn identical_images_have_infinite_psnr_and_an_ssim_of_one() {
        let image = grey(13, 11, |x, y| (x * y) as f32 / 200.0 - 0.3);
        let metrics = Metrics::of_images(&image, &image.clone(), 0).unwrap();
        let expected = Metrics {
            psnr_db: f64::INFINITY,
            ssim: Some(1.0),
            mean_abs: 0.0,
            p99_abs: 0.0,
            max_abs: 0.0,
            identical_pixels: 1.0,
        };
        assert_eq!(metrics, expected);
    }

    #[test]
    fn images_smaller_than_the_window_have_no_ssim_and_all_else() {
        for (width, height) in [(10, 11), (11, 10), (64, 1), (1, 1)] {
            let black = grey(width, height, |_, _| -1.0);
            let metrics = Metrics::of_images(&black, &grey(width, height, |_, _| 1.0), 0).unwrap();
            assert_eq!((metrics.psnr_db, metrics.ssim), (0.0, None), "{width}x{height}");
            assert_eq!((metrics.mean_abs, metrics.p99_abs, metrics.max_abs), (2.0, 2.0, 2.0));
            assert_eq!(metrics.identical_pixels, 0.0);
        }
        let window = grey(11, 11, |x, _| x as f32 / 11.0);
        assert_eq!(Metrics::of_images(&window, &window, 0).unwrap().ssim, Some(1.0));
    }

    #[test]
    fn a_pixel_that_differs_in_one_channel_is_not_identical() {
        let a = Rgb8 {
            width: 4,
            height: 1,
            pixels: vec![7; 12],
        };
        let mut b = a.clone();
        b.pixels[5] = 9;
        let metrics = Metrics::of_rgb8(&a, &b).unwrap();
        assert_eq!((metrics.identical_pixels, metrics.max_abs), (0.75, 2.0));
        assert_near(metrics.mean_abs, 2.0 / 12.0, 1e-12, "mean of twelve values");
        // 10 log10(255^2 / (4 / 12))
        assert_near(metrics.psnr_db, 52.9020, 1e-4, "psnr");
    }

    #[test]
    fn percentiles_lie_between_values_as_in_numpy() {
        // np.percentile([0, 1, 10, 100], 99) = 10 + 0.97 * 90
        assert_near(percentile(&mut [100.0, 0.0, 10.0, 1.0], 0.99), 97.3, 1e-9, "of four");
        assert_near(percentile(&mut [3.0, 1.0, 2.0], 0.5), 2.0, 0.0, "the median");
        assert_eq!(percentile(&mut [5.0], 0.99), 5.0);
        assert_eq!(percentile(&mut [], 0.99), 0.0);
    }

    #[test]
    fn images_of_other_sizes_and_non_finite_ones_are_refused() {
        let image = |value| grey(3, 2, move |x, _| if x == 0 { value } else { 0.0 });
        let message = |a: &Image, b: &Image| Metrics::of_images(a, b, 0).unwrap_err().to_string();
        assert_eq!(
            message(&image(0.0), &grey(2, 3, |_, _| 0.0)),
            "images of shapes [1, 1, 2, 3] and [1, 1, 3, 2] cannot be compared; pass images of the same size"
        );
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (a, b) in [(value, 0.0), (0.0, value)] {
                let message = message(&image(a), &image(b));
                assert!(message.contains("2 non-finite values (NaN or Inf) of 6"), "{message}");
            }
        }
        let (small, large) = (fixture("flux2-tiny/chelsea.png"), fixture("flux2-tiny/coffee.png"));
        assert!(matches!(
            Metrics::of_rgb8(&small, &large),
            Err(Error::ImagesDiffer {
                a: [1, 3, 288, 448],
                b: [1, 3, 400, 592]
            })
        ));
    }
}
