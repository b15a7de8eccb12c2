use crate::{Error, Result};

/// Decoded images: `[B, C, H, W]` in row-major order, C the decoder's `out_channels` (3: red, green, blue), nominally
/// in -1..1.
#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    shape: [usize; 4],
    data: Vec<f32>,
}

/// An image of 8-bit RGB pixels, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rgb8 {
    /// In pixels.
    pub width: usize,
    /// In pixels.
    pub height: usize,
    /// `3 * width * height` bytes.
    pub pixels: Vec<u8>,
}

impl Image {
    /// Takes the decoder's output.
    ///
    /// # Panics
    ///
    /// When `data` does not have `shape`.
    pub fn new(shape: [usize; 4], data: Vec<f32>) -> Self {
        let len = shape.iter().try_fold(1usize, |len, &d| len.checked_mul(d));
        assert_eq!(len, Some(data.len()), "the data of an image of shape {shape:?}");
        Self { shape, data }
    }

    /// `[B, C, H, W]`
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }

    /// In pixels.
    pub fn height(&self) -> usize {
        self.shape[2]
    }

    /// In pixels.
    pub fn width(&self) -> usize {
        self.shape[3]
    }

    /// The values, row-major.
    pub fn data(&self) -> &[f32] {
        &self.data
    }

    /// The values of one image, `[C, H, W]`.
    ///
    /// # Panics
    ///
    /// When the batch has no image `index`.
    pub fn image(&self, index: usize) -> &[f32] {
        let [batch, c, h, w] = self.shape;
        assert!(index < batch, "image {index} of a batch of {batch}");
        &self.data[index * c * h * w..][..c * h * w]
    }

    /// One image as it is shown: x/2 + 0.5 clamped to 0..1, in f32, times 255, rounded half to even.
    ///
    /// # Errors
    ///
    /// [`Error::NonFinite`]; [`Error::UnsupportedConfig`] unless there are 3 channels.
    ///
    /// # Panics
    ///
    /// When the batch has no image `index`.
    pub fn to_rgb8(&self, index: usize) -> Result<Rgb8> {
        let [_, channels, height, width] = self.shape;
        if channels != 3 {
            return Err(Error::UnsupportedConfig {
                field: "out_channels",
                value: channels.to_string(),
                supported: "3 (RGB) for pictures".to_owned(),
            });
        }
        let values = self.image(index);
        let (red, rest) = values.split_at(height * width);
        let (green, blue) = rest.split_at(height * width);

        let mut pixels = vec![0; values.len()];
        let mut non_finite = 0;
        let rgb = red.iter().zip(green).zip(blue);
        for (pixel, ((&r, &g), &b)) in pixels.as_chunks_mut().0.iter_mut().zip(rgb) {
            *pixel = [byte(r), byte(g), byte(b)];
            non_finite += [r, g, b].map(|x| usize::from(!x.is_finite())).iter().sum::<usize>();
        }
        self.no_non_finite(non_finite, values.len())?;
        Ok(Rgb8 { width, height, pixels })
    }

    /// Fails with [`Error::NonFinite`] if any of `values`, some of these images', is not finite.
    pub(crate) fn check_finite(&self, values: &[f32]) -> Result<()> {
        self.no_non_finite(values.iter().filter(|x| !x.is_finite()).count(), values.len())
    }

    fn no_non_finite(&self, count: usize, total: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        Err(Error::NonFinite {
            stage: "the decoded image".to_owned(),
            count,
            total,
            hint: "; decode with --dtype f32, or check the weights",
        })
    }
}

#[inline]
fn byte(x: f32) -> u8 {
    // The spacing of f32 at 2^23 is one, so the sum is rounded half to even and its low bits are the integer. On x86-64
    // without SSE 4.1, `round_ties_even` is a call of its own and takes three times as long.
    const INTEGERS: f32 = (1u32 << 23) as f32;
    let scaled = (x / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
    (scaled + INTEGERS).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rgb(values: [f32; 3]) -> Vec<u8> {
        Image::new([1, 3, 1, 1], values.to_vec()).to_rgb8(0).unwrap().pixels
    }

    #[test]
    fn values_are_rounded_not_truncated() {
        assert_eq!(rgb([-1.0, 0.0, 1.0]), [0, 128, 255]); // 127.5 to even
        assert_eq!(rgb([0.9999, -0.9999, 0.998]), [255, 0, 255]);
        assert_eq!(rgb([-1.5, 7.0, f32::MAX]), [0, 255, 255]);
    }

    #[test]
    fn every_tie_goes_to_even() {
        let mut ties = 0;
        for k in 0..255u16 {
            // (k + 0.5) / 255 is seldom an f32; take those inputs that scale to a tie exactly.
            let tie = f32::from(k) + 0.5;
            let x = (tie / 255.0 - 0.5) * 2.0;
            if (x / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0 == tie {
                let even = k + k % 2;
                assert_eq!(u16::from(byte(x)), even, "{tie}");
                ties += 1;
            }
        }
        assert!(ties >= 10, "{ties}");
    }

    #[test]
    fn planes_and_images_are_not_mixed_up() {
        let levels: Vec<f32> = (0..24).map(|i| f32::from(i as u8) / 255.0 * 2.0 - 1.0).collect();
        let image = Image::new([2, 3, 1, 4], levels);
        let first = image.to_rgb8(0).unwrap();
        assert_eq!((first.width, first.height), (4, 1));
        assert_eq!(first.pixels, [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]);
        assert_eq!(image.to_rgb8(1).unwrap().pixels[..3], [12, 16, 20]);
    }

    #[test]
    fn non_finite_values_are_an_error_and_not_black_pixels() {
        let mut data = vec![0.0; 24];
        data[1] = f32::NAN;
        data[5] = f32::INFINITY;
        let image = Image::new([2, 3, 2, 2], data);
        assert_eq!(
            image.to_rgb8(0).unwrap_err().to_string(),
            "the decoded image contains 2 non-finite values (NaN or Inf) of 12; decode with --dtype f32, or check the weights"
        );
        assert!(image.to_rgb8(1).is_ok());
    }

    #[test]
    fn other_channel_counts_are_refused() {
        let image = Image::new([1, 4, 1, 1], vec![0.0; 4]);
        assert!(matches!(
            image.to_rgb8(0),
            Err(Error::UnsupportedConfig {
                field: "out_channels",
                ..
            })
        ));
    }

    proptest! {
        #[test]
        fn rounding_is_the_f64_rule_on_the_f32_product(x in prop_oneof![-1.5f32..1.5, any::<f32>()]) {
            prop_assume!(x.is_finite());
            let product = (x / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
            prop_assert_eq!(f64::from(byte(x)), f64::from(product).round_ties_even());
            // And within half a level of the exact value, but for the two f32 roundings (2^-24 of 255 each).
            let exact = (f64::from(x) / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0;
            prop_assert!((f64::from(byte(x)) - exact).abs() <= 0.5 + 4e-5);
        }
    }
}
