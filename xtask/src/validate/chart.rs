//! The error of each side against the truth, as SVG.

use std::fmt;

use vae_io::Metrics;

use super::{
    page::Text,
    results::{Abs, Report, Side},
};

/// A line a picture and side: mean, 99th percentile and largest absolute error on a logarithmic axis.
///
/// Colours are the page's `--a` and `--b`; each line also has its side's letter.
pub struct Chart<'a> {
    sides: Vec<(Side, Vec<(&'a str, Metrics)>)>,
}

// In pixels. From left to right: pictures' names, the sides' letters, the axis.
const NAMES: f64 = 190.0;
const LEFT: f64 = NAMES + 24.0;
const AXIS: f64 = 620.0;
const WIDTH: f64 = LEFT + AXIS + 40.0;
// From top to bottom: room for a label, a line for each side of a picture, a gap, ..., the axis's labels, the legend.
const TOP: f64 = 34.0;
const LINE: f64 = 20.0;
const GAP: f64 = 10.0;
const BELOW: f64 = 62.0;
/// From the middle of a text to its baseline.
const BASELINE: f64 = 4.5;

/// One level of an 8-bit picture, in -1..1.
const LEVEL: f64 = 2.0 / 255.0;

/// Longer names are shortened.
const NAME_CHARS: usize = 24;

impl<'a> Chart<'a> {
    pub fn new(report: &'a Report) -> Self {
        let errors = |side| {
            let rows = report.errors(side)?.pictures.iter();
            Some((side, rows.map(|row| (row.picture.as_str(), row.figures.f32)).collect()))
        };
        Self {
            sides: [Side::A, Side::B].into_iter().filter_map(errors).collect(),
        }
    }

    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.sides.is_empty()
    }

    /// The powers of ten around all errors; zero has no logarithm.
    fn decades(&self) -> (i32, i32) {
        let errors = self.sides.iter().flat_map(|(_, rows)| rows);
        let errors = errors.flat_map(|(_, error)| [error.mean_abs, error.p99_abs, error.max_abs]);
        let decades = errors.filter(|&error| error > 0.0).map(f64::log10);
        let (low, high) = decades.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), decade| {
            (low.min(decade), high.max(decade))
        });
        match low <= high {
            true => (low.floor() as i32, (high.ceil() as i32).max(low.floor() as i32 + 1)),
            false => (-3, 0),
        }
    }
}

impl fmt::Display for Chart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (low, high) = self.decades();
        let x = |error: f64| LEFT + AXIS * (error.log10() - f64::from(low)) / f64::from(high - low);
        let pictures = self.sides.first().map_or(0, |(_, rows)| rows.len());
        let pitch = LINE * self.sides.len() as f64 + GAP;
        let bottom = TOP + pitch * pictures as f64;
        let height = bottom + BELOW;
        writeln!(
            f,
            r#"<svg role="img" aria-label="Absolute error against the truth" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">"#
        )?;
        for decade in low..=high {
            let x = x(10f64.powi(decade));
            line(f, x, bottom, r#"stroke="var(--line)""#)?;
            let power = if decade == 0 {
                "1".to_string()
            } else {
                format!("1e{decade}")
            };
            label(f, x, bottom + 18.0, &power)?;
        }
        if (10f64.powi(low)..=10f64.powi(high)).contains(&LEVEL) {
            line(f, x(LEVEL), bottom, r#"stroke="var(--muted)" stroke-dasharray="4 4""#)?;
            label(f, x(LEVEL), TOP - 14.0, "one 8-bit level")?;
        }
        for index in 0..pictures {
            let top = TOP + GAP / 2.0 + pitch * index as f64;
            let name = self.sides[0].1[index].0;
            let middle = top + LINE * self.sides.len() as f64 / 2.0 + BASELINE;
            let (full, short) = (Text(name), Text(shortened(name)));
            writeln!(
                f,
                r#"<text y="{middle}" fill="var(--ink)"><title>{full}</title>{short}</text>"#
            )?;
            for (number, (side, rows)) in self.sides.iter().enumerate() {
                let y = top + LINE * (number as f64 + 0.5);
                marks(f, *side, y, &rows[index].1, x)?;
            }
        }
        legend(f, bottom + 46.0)?;
        f.write_str("</svg>")
    }
}

/// A vertical of the grid.
fn line(f: &mut fmt::Formatter<'_>, x: f64, bottom: f64, stroke: &str) -> fmt::Result {
    writeln!(f, r#"<path d="M{x:.1} {}V{bottom}" {stroke}/>"#, TOP - 8.0)
}

/// A text of the grid.
fn label(f: &mut fmt::Formatter<'_>, x: f64, y: f64, text: &str) -> fmt::Result {
    writeln!(
        f,
        r#"<text x="{x:.1}" y="{y}" text-anchor="middle" fill="var(--muted)">{text}</text>"#
    )
}

/// The errors of one picture of a side: a dot, a bar and a ring on a line, with the figures as a tooltip.
fn marks(f: &mut fmt::Formatter<'_>, side: Side, y: f64, error: &Metrics, x: impl Fn(f64) -> f64) -> fmt::Result {
    let colour = match side {
        Side::A => "var(--a)",
        Side::B | Side::Truth => "var(--b)",
    };
    let [mean, p99, max] = [error.mean_abs, error.p99_abs, error.max_abs];
    writeln!(
        f,
        r#"<g transform="translate(0 {y})" stroke="{colour}" stroke-width="2" fill="none"><title>{side}: mean {}, p99 {}, max {}</title>"#,
        Abs(mean),
        Abs(p99),
        Abs(max)
    )?;
    writeln!(
        f,
        r#"<text x="{NAMES}" y="{BASELINE}" fill="{colour}" stroke="none" font-weight="600">{side}</text>"#
    )?;
    if max == 0.0 {
        writeln!(
            f,
            r#"<text x="{}" y="{BASELINE}" fill="{colour}" stroke="none">no error</text>"#,
            LEFT + 8.0
        )?;
    } else {
        // The mean of a few errors may round to zero where the largest does not.
        let [mean, p99, max] = [mean, p99, max].map(|error| x(error).max(LEFT));
        writeln!(f, r#"<path d="M{mean:.1} 0H{max:.1}" stroke-opacity=".45"/>"#)?;
        writeln!(f, r#"<circle cx="{mean:.1}" r="4.5" fill="{colour}"/>"#)?;
        writeln!(f, r#"<path d="M{p99:.1} -6V6"/>"#)?;
        writeln!(f, r#"<circle cx="{max:.1}" r="4.5" fill="var(--page)"/>"#)?;
    }
    f.write_str("</g>\n")
}

/// What the marks are.
fn legend(f: &mut fmt::Formatter<'_>, y: f64) -> fmt::Result {
    let marks = [
        (0.0, r#"<circle r="4.5" fill="var(--muted)"/>"#, "mean"),
        (90.0, r#"<path d="M0 -6V6"/>"#, "99th percentile"),
        (240.0, r#"<circle r="4.5"/>"#, "largest"),
    ];
    for (offset, mark, name) in marks {
        writeln!(
            f,
            r#"<g transform="translate({x} {y})" stroke="var(--muted)" stroke-width="2" fill="none">{mark}<text x="12" y="{BASELINE}" fill="var(--muted)" stroke="none">{name}</text></g>"#,
            x = LEFT + offset + 5.0,
        )?;
    }
    Ok(())
}

fn shortened(name: &str) -> String {
    match name.chars().count() > NAME_CHARS {
        true => name.chars().take(NAME_CHARS - 1).chain(['\u{2026}']).collect(),
        false => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(errors: &[(&'static str, [f64; 3])]) -> Chart<'static> {
        let metrics = |[mean_abs, p99_abs, max_abs]: [f64; 3]| Metrics {
            psnr_db: 0.0,
            ssim: None,
            mean_abs,
            p99_abs,
            max_abs,
            identical_pixels: 0.0,
        };
        let rows = errors.iter().map(|(name, errors)| (*name, metrics(*errors)));
        Chart {
            sides: vec![(Side::A, rows.collect())],
        }
    }

    #[test]
    fn marks_are_where_their_logarithms_are() {
        // Four decades of 155 pixels each from 214 on.
        let svg = chart(&[("cat", [1e-4, 1e-3, 1e-2]), ("dog", [1e-3, 1e-2, 1.0])]).to_string();
        assert!(svg.contains(r#"<circle cx="214.0" r="4.5" fill="var(--a)"/>"#), "{svg}");
        assert!(svg.contains(r#"<path d="M369.0 -6V6"/>"#), "{svg}");
        assert!(
            svg.contains(r#"<circle cx="834.0" r="4.5" fill="var(--page)"/>"#),
            "{svg}"
        );
        assert!(
            svg.contains(r#"<title>A: mean 1.00e-4, p99 1.00e-3, max 1.00e-2</title>"#),
            "{svg}"
        );
        assert!(svg.contains("one 8-bit level"), "{svg}");
    }

    #[test]
    fn errors_of_zero_are_said_and_not_drawn() {
        let svg = chart(&[("cat", [0.0; 3])]).to_string();
        assert!(
            svg.contains("no error") && !svg.contains("NaN") && !svg.contains("inf"),
            "{svg}"
        );
        // One value of many: the 99th percentile is zero, the largest is not.
        let svg = chart(&[("cat", [1e-9, 0.0, 1e-3])]).to_string();
        assert!(
            !svg.contains("NaN") && !svg.contains("inf") && !svg.contains("no error"),
            "{svg}"
        );
        let svg = chart(&[("cat", [1e-3; 3])]).to_string();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn long_names_are_shortened_and_kept_in_the_tooltip() {
        let name = "a-very-long-name-of-a-picture-in-a-folder";
        let svg = chart(&[(name, [1e-3; 3])]).to_string();
        assert!(
            svg.contains(&format!("<title>{name}</title>a-very-long-name-of-a-p\u{2026}</text>")),
            "{svg}"
        );
    }
}
