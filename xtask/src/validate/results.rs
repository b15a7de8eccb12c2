//! What a run found: the content of the JSON, and of what else is written.

use std::fmt;

use serde::Serialize;
use vae_io::{Image, Metrics};

use crate::Result;

/// All of it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The version.
    pub burn_vae: &'static str,
    pub commit: String,
    pub date: String,
    /// The checkpoint, as the user named it.
    pub vae: String,
    /// Its class and family.
    pub model: String,
    pub a: Way,
    pub b: Way,
    /// A against B; then, where the truth was decoded apart from them, both against it.
    pub comparisons: Vec<Comparison>,
    pub bar: Option<Bar>,
}

/// How the images of a side came about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Way {
    Decode {
        quality: &'static str,
        device: String,
        dtype: String,
        /// It is the Lossless f32 decode on the CPU, which all others are measured against.
        is_truth: bool,
    },
    Reference {
        files: Vec<String>,
        /// Some are pictures of 8 bits a channel.
        is_eight_bit: bool,
    },
}

/// Whose images are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    A,
    B,
    Truth,
}

/// Two sides, picture by picture.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    pub of: Side,
    pub against: Side,
    pub pictures: Vec<Row>,
    pub worst: Figures,
    pub mean: Figures,
}

/// One picture of two sides.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    pub picture: String,
    pub width: usize,
    pub height: usize,
    #[serde(flatten)]
    pub figures: Figures,
}

/// How far images are apart.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// As decoded, unquantised, in -1..1.
    pub f32: Metrics,
    /// As shown, in levels.
    pub u8: Metrics,
}

/// The least PSNR of A against B.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bar {
    /// With a range of 2.
    pub psnr_db: f64,
    /// The pictures that are below it.
    pub below: Vec<String>,
}

impl Report {
    /// A against B.
    pub fn sides(&self) -> &Comparison {
        &self.comparisons[0]
    }

    /// A or B against the truth; `None` where there is none, and for a side that is the truth.
    pub fn errors(&self, side: Side) -> Option<&Comparison> {
        let (own, other) = match side {
            Side::A => (&self.a, &self.b),
            Side::B => (&self.b, &self.a),
            Side::Truth => return None,
        };
        if own.is_truth() {
            return None;
        }
        let against_truth = |c: &&Comparison| (c.of, c.against) == (side, Side::Truth);
        let sides = other.is_truth().then(|| self.sides());
        self.comparisons.iter().find(against_truth).or(sides)
    }
}

impl Way {
    pub fn is_truth(&self) -> bool {
        matches!(self, Self::Decode { is_truth: true, .. })
    }

    /// What the reader of its figures must know.
    pub fn note(&self) -> Option<&'static str> {
        match self {
            Self::Decode { is_truth: true, .. } => Some("the truth"),
            Self::Reference { is_eight_bit: true, .. } => {
                Some("8 bits a channel: rounding and clamping keep PSNR with a range of 2 below 59 dB, go by PSNR u8")
            }
            _ => None,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decode {
                quality, device, dtype, ..
            } => write!(f, "{quality} {dtype} on {device}"),
            Self::Reference { files, .. } => match files.as_slice() {
                [only] => write!(f, "reference {only}"),
                files => write!(f, "{} reference files", files.len()),
            },
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::A => "A",
            Self::B => "B",
            Self::Truth => "the truth",
        })
    }
}

impl Comparison {
    /// Sums up rows, of which there is at least one.
    pub fn new(of: Side, against: Side, pictures: Vec<Row>) -> Self {
        let f32: Vec<Metrics> = pictures.iter().map(|row| row.figures.f32).collect();
        let u8: Vec<Metrics> = pictures.iter().map(|row| row.figures.u8).collect();
        let all = |sum_up: fn(&[Metrics]) -> Metrics| Figures {
            f32: sum_up(&f32),
            u8: sum_up(&u8),
        };
        Self {
            of,
            against,
            worst: all(worst),
            mean: all(mean),
            pictures,
        }
    }

    /// Of what against what.
    pub fn title(&self) -> String {
        format!("{} against {}", self.of, self.against)
    }
}

/// The worst of each figure; a similarity is missing only where all are.
fn worst(of: &[Metrics]) -> Metrics {
    let smallest = |figure: fn(&Metrics) -> f64| of.iter().map(figure).fold(f64::INFINITY, f64::min);
    let largest = |figure: fn(&Metrics) -> f64| of.iter().map(figure).fold(0.0, f64::max);
    Metrics {
        psnr_db: smallest(|m| m.psnr_db),
        ssim: of.iter().filter_map(|m| m.ssim).reduce(f64::min),
        mean_abs: largest(|m| m.mean_abs),
        p99_abs: largest(|m| m.p99_abs),
        max_abs: largest(|m| m.max_abs),
        identical_pixels: smallest(|m| m.identical_pixels),
    }
}

/// The arithmetic mean of each figure: infinite for PSNR if one is; of the similarities that there are.
fn mean(of: &[Metrics]) -> Metrics {
    let mean_of = |figures: Vec<f64>| figures.iter().sum::<f64>() / figures.len() as f64;
    let mean = |figure: fn(&Metrics) -> f64| mean_of(of.iter().map(figure).collect());
    let similarities: Vec<f64> = of.iter().filter_map(|m| m.ssim).collect();
    Metrics {
        psnr_db: mean(|m| m.psnr_db),
        ssim: (!similarities.is_empty()).then(|| mean_of(similarities)),
        mean_abs: mean(|m| m.mean_abs),
        p99_abs: mean(|m| m.p99_abs),
        max_abs: mean(|m| m.max_abs),
        identical_pixels: mean(|m| m.identical_pixels),
    }
}

impl Row {
    /// Compares two batches of one image.
    pub fn compare(picture: &str, of: &Image, against: &Image) -> vae_io::Result<Self> {
        Ok(Self {
            picture: picture.to_string(),
            width: of.width(),
            height: of.height(),
            figures: Figures {
                f32: Metrics::of_images(of, against, 0)?,
                u8: Metrics::of_rgb8(&of.to_rgb8(0)?, &against.to_rgb8(0)?)?,
            },
        })
    }
}

impl Bar {
    /// Lists the pictures below.
    pub fn judge(psnr_db: f64, sides: &Comparison) -> Self {
        let below = |row: &&Row| row.figures.f32.psnr_db < psnr_db;
        let name = |row: &Row| format!("{} ({} dB)", row.picture, Psnr(row.figures.f32.psnr_db));
        Self {
            psnr_db,
            below: sides.pictures.iter().filter(below).map(name).collect(),
        }
    }

    /// Fails if there is one.
    pub fn check(&self, pictures: usize) -> Result {
        match self.below.as_slice() {
            [] => Ok(()),
            below => Err(format!(
                "{} of {pictures} pictures are below {} dB (PSNR of A against B, range 2): {}",
                below.len(),
                self.psnr_db,
                below.join(", ")
            )
            .into()),
        }
    }
}

/// How figures are printed. All are cut off rather than rounded, so that what misses 55 dB, an SSIM of 1 or all pixels
/// does not read as if it had reached them.
pub struct Psnr(pub f64);

/// Structural similarity; `n/a` for images smaller than its window.
pub struct Ssim(pub Option<f64>);

/// An absolute error.
pub struct Abs(pub f64);

/// A share as a percentage.
pub struct Percent(pub f64);

impl fmt::Display for Psnr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}", cut(self.0, 1e2))
    }
}

impl fmt::Display for Ssim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ssim) => write!(f, "{:.6}", cut(ssim, 1e6)),
            None => f.write_str("n/a"),
        }
    }
}

impl fmt::Display for Abs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0.0 => f.write_str("0"),
            error if error < 0.1 => write!(f, "{error:.2e}"),
            error => write!(f, "{error:.3}"),
        }
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2}%", cut(self.0 * 100.0, 1e2))
    }
}

/// Without the digits after those that `scale` moves before the point.
fn cut(number: f64, scale: f64) -> f64 {
    (number * scale).floor() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(values: [f32; 3]) -> Image {
        Image::new([1, 3, 1, 1], values.to_vec())
    }

    fn comparison(of: Side, against: Side) -> Comparison {
        let rows = [
            ("near", [0.0, 0.0, 0.002]),
            ("same", [0.0; 3]),
            ("far", [0.0, 1.0, 1.0]),
        ];
        let row = |(name, values): (&str, [f32; 3])| Row::compare(name, &image(values), &image([0.0; 3])).unwrap();
        Comparison::new(of, against, rows.map(row).to_vec())
    }

    fn decode(is_truth: bool) -> Way {
        Way::Decode {
            quality: "lossless",
            device: "cpu".into(),
            dtype: "f32".into(),
            is_truth,
        }
    }

    fn report(a: Way, b: Way, comparisons: Vec<Comparison>) -> Report {
        Report {
            burn_vae: "",
            commit: String::new(),
            date: String::new(),
            vae: String::new(),
            model: String::new(),
            a,
            b,
            comparisons,
            bar: None,
        }
    }

    #[test]
    fn the_worst_and_the_mean_are_of_each_figure() {
        let comparison = comparison(Side::A, Side::B);
        let (worst, mean) = (comparison.worst, comparison.mean);
        // 10 log10(4 / (2 / 3))
        assert!((worst.f32.psnr_db - 7.781_512_5).abs() < 1e-6, "{worst:?}");
        assert_eq!((worst.f32.max_abs, worst.f32.ssim), (1.0, None));
        assert_eq!((worst.f32.identical_pixels, worst.u8.identical_pixels), (0.0, 0.0));
        assert_eq!(mean.f32.psnr_db, f64::INFINITY);
        assert!((mean.f32.max_abs - 1.002 / 3.0).abs() < 1e-6, "{mean:?}");
        // A 500th of the range is no level, so two of three pictures look the same.
        assert_eq!(
            (mean.f32.identical_pixels, mean.u8.identical_pixels),
            (1.0 / 3.0, 2.0 / 3.0)
        );
    }

    #[test]
    fn the_bar_names_what_is_below_and_not_what_is_on_it() {
        let comparison = comparison(Side::A, Side::B);
        let exactly = comparison.worst.f32.psnr_db;
        assert!(Bar::judge(exactly, &comparison).check(3).is_ok());
        let error = Bar::judge(exactly + 1e-9, &comparison)
            .check(3)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("1 of 3 pictures are below 7.78"), "{error}");
        assert!(
            error.ends_with("dB (PSNR of A against B, range 2): far (7.78 dB)"),
            "{error}"
        );
    }

    #[test]
    fn errors_are_against_the_truth_whichever_side_is_the_truth() {
        let sides = || comparison(Side::A, Side::B);
        let apart = report(
            decode(false),
            decode(false),
            vec![
                sides(),
                comparison(Side::A, Side::Truth),
                comparison(Side::B, Side::Truth),
            ],
        );
        let against = |report: &Report, side| report.errors(side).map(|c| (c.of, c.against));
        assert_eq!(against(&apart, Side::A), Some((Side::A, Side::Truth)));
        assert_eq!(against(&apart, Side::B), Some((Side::B, Side::Truth)));
        let b = report(decode(false), decode(true), vec![sides()]);
        assert_eq!(
            [against(&b, Side::A), against(&b, Side::B)],
            [Some((Side::A, Side::B)), None]
        );
        let a = report(decode(true), decode(false), vec![sides()]);
        assert_eq!(
            [against(&a, Side::A), against(&a, Side::B)],
            [None, Some((Side::A, Side::B))]
        );
        let neither = report(decode(false), decode(false), vec![sides()]);
        assert_eq!([against(&neither, Side::A), against(&neither, Side::B)], [None, None]);
    }

    #[test]
    fn figures_that_miss_a_round_number_do_not_read_as_it() {
        assert_eq!(Psnr(54.999_9).to_string(), "54.99");
        assert_eq!(Psnr(f64::INFINITY).to_string(), "inf");
        assert_eq!(Ssim(Some(0.999_999_9)).to_string(), "0.999999");
        assert_eq!(Ssim(Some(1.0)).to_string(), "1.000000");
        assert_eq!(Percent(0.999_999).to_string(), "99.99%");
        assert_eq!(Percent(1.0).to_string(), "100.00%");
        assert_eq!(
            [0.0, 0.001_234, 0.25].map(|error| Abs(error).to_string()),
            ["0", "1.23e-3", "0.250"]
        );
    }
}
