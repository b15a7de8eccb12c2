//! The report as one HTML file: no script, nothing from outside, light and dark.

use std::fmt::{self, Write};

use base64::{display::Base64Display, prelude::BASE64_STANDARD};
use image::{ExtendedColorType, ImageEncoder, codecs::png::PngEncoder};
use vae_io::{Image, LatentsReading, Rgb8};

use super::{
    chart::Chart,
    results::{Abs, Comparison, Percent, Psnr, Report, Row, Ssim, Way},
    table::{COLUMNS, numbers},
};
use crate::Result;

/// The page.
pub struct Page<'a> {
    pub report: &'a Report,
    /// In the order of the report's pictures.
    pub cards: &'a [Card],
    /// How much the differences in `cards` are brightened.
    pub amplify: u32,
}

/// The pictures of one row of the tables.
pub struct Card {
    /// What the latents were taken to be.
    reading: String,
    /// As PNG: A, B, and their difference.
    a: Vec<u8>,
    b: Vec<u8>,
    difference: Vec<u8>,
}

impl Card {
    /// From two batches of one image.
    pub fn new(reading: &LatentsReading, a: &Image, b: &Image, amplify: u32) -> Result<Self> {
        Ok(Self {
            reading: reading.to_string(),
            a: png(&a.to_rgb8(0)?)?,
            b: png(&b.to_rgb8(0)?)?,
            difference: png(&difference(a, b, amplify).to_rgb8(0)?)?,
        })
    }
}

/// |A - B| times `amplify`, from black for none to white for the whole range.
fn difference(a: &Image, b: &Image, amplify: u32) -> Image {
    // Half a difference of values in -1..1 is one of 0..1, and an image's black is -1.
    let brightened = |(a, b): (&f32, &f32)| (a - b).abs() * amplify as f32 - 1.0;
    Image::new(a.shape(), a.data().iter().zip(b.data()).map(brightened).collect())
}

fn png(picture: &Rgb8) -> Result<Vec<u8>> {
    let mut file = Vec::new();
    let (width, height) = (u32::try_from(picture.width)?, u32::try_from(picture.height)?);
    PngEncoder::new(&mut file).write_image(&picture.pixels, width, height, ExtendedColorType::Rgb8)?;
    Ok(file)
}

/// Text with HTML's special characters escaped, for content and quoted attributes.
pub struct Text<T>(pub T);

impl<T: fmt::Display> fmt::Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.to_string().chars() {
            match c {
                '<' => f.write_str("&lt;"),
                '>' => f.write_str("&gt;"),
                '&' => f.write_str("&amp;"),
                '"' => f.write_str("&quot;"),
                c => f.write_char(c),
            }?;
        }
        Ok(())
    }
}

impl fmt::Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { a, b, .. } = self.report;
        write!(
            f,
            r#"<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="kicker">burn-vae validate</p>
<h1>{title}</h1>
"#,
            title = Text(format!("{a} against {b}")),
        )?;
        self.verdict(f)?;
        f.write_str("</header>\n")?;
        self.tiles(f)?;
        self.what(f)?;
        self.tables(f)?;
        self.chart(f)?;
        f.write_str("<h2>Pictures</h2>\n")?;
        let rows = self.report.sides().pictures.iter();
        for (index, (row, card)) in rows.zip(self.cards).enumerate() {
            self.card(f, index, row, card)?;
        }
        f.write_str(GLOSSARY)?;
        f.write_str("</main>\n</body>\n</html>\n")
    }
}

impl Page<'_> {
    /// Whether the bar was reached.
    fn verdict(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bar) = &self.report.bar else { return Ok(()) };
        let count = self.report.sides().pictures.len();
        match bar.below.as_slice() {
            [] => writeln!(
                f,
                r#"<p class="verdict pass">Passed: all of {count} at {} dB or above</p>"#,
                bar.psnr_db
            ),
            below => writeln!(
                f,
                r#"<p class="verdict fail">Failed: {} of {count} below {} dB: {}</p>"#,
                below.len(),
                bar.psnr_db,
                Text(below.join(", "))
            ),
        }
    }

    /// The worst figures of A against B.
    fn tiles(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let worst = &self.report.sides().worst;
        let tiles = [
            (
                "worst PSNR",
                format!("{} dB", Psnr(worst.f32.psnr_db)),
                "range 2, unquantised",
            ),
            (
                "worst PSNR u8",
                format!("{} dB", Psnr(worst.u8.psnr_db)),
                "8-bit pictures",
            ),
            ("worst SSIM", Ssim(worst.f32.ssim).to_string(), "1 is equal"),
            (
                "largest error",
                Abs(worst.f32.max_abs).to_string(),
                "of values in -1..1",
            ),
            (
                "identical pixels",
                Percent(worst.u8.identical_pixels).to_string(),
                "8-bit, least of all pictures",
            ),
        ];
        f.write_str("<dl class=\"tiles\">\n")?;
        for (name, figure, note) in tiles {
            writeln!(
                f,
                "<div><dt>{name}</dt><dd>{figure}</dd><dd class=\"note\">{note}</dd></div>"
            )?;
        }
        f.write_str("</dl>\n")
    }

    /// What was compared.
    fn what(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        f.write_str("<h2>What was compared</h2>\n<dl class=\"what\">\n")?;
        let mut entry = |name: &str, text: String| writeln!(f, "<dt>{name}</dt><dd>{}</dd>", Text(text));
        entry("A", describe(&report.a))?;
        entry("B", describe(&report.b))?;
        if report.comparisons.len() > 1 {
            entry("Truth", "lossless f32 on cpu".to_string())?;
        }
        entry("VAE", format!("{}: {}", report.vae, report.model))?;
        let date = &report.date;
        entry(
            "Made",
            format!("{date} by burn-vae {} ({})", report.burn_vae, report.commit),
        )?;
        f.write_str("</dl>\n")
    }

    fn tables(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<div class=\"tables\">\n")?;
        for comparison in &self.report.comparisons {
            writeln!(f, "<section>\n<h2>{}</h2>", comparison.title())?;
            self.table(f, comparison)?;
            f.write_str("</section>\n")?;
        }
        f.write_str("</div>\n")
    }

    fn table(&self, f: &mut fmt::Formatter<'_>, comparison: &Comparison) -> fmt::Result {
        f.write_str(
            "<div class=\"scroll\"><table>\n<thead><tr><th scope=\"col\">picture</th><th scope=\"col\">size</th>",
        )?;
        write_cells(f, "th scope=\"col\"", "th", COLUMNS)?;
        f.write_str("</tr></thead>\n<tbody>\n")?;
        for row in &comparison.pictures {
            let size = format!("{}&times;{}", row.width, row.height);
            write!(f, "<tr><th scope=\"row\">{}</th><td>{size}</td>", Text(&row.picture))?;
            write_cells(f, "td", "td", numbers(&row.figures))?;
            f.write_str("</tr>\n")?;
        }
        f.write_str("</tbody>\n<tfoot>\n")?;
        for (name, figures) in [("worst", &comparison.worst), ("mean", &comparison.mean)] {
            write!(f, "<tr><th scope=\"row\">{name}</th><td></td>")?;
            write_cells(f, "td", "td", numbers(figures))?;
            f.write_str("</tr>\n")?;
        }
        f.write_str("</tfoot>\n</table></div>\n")
    }

    fn chart(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chart = Chart::new(self.report);
        if chart.is_empty() {
            return Ok(());
        }
        f.write_str("<h2>Error against the truth</h2>\n")?;
        f.write_str(
            "<p>Absolute error of values in -1..1 against the Lossless f32 decode on the CPU, on a logarithmic scale: \
             mean, 99th percentile and largest.</p>\n",
        )?;
        writeln!(f, "<figure class=\"scroll\">{chart}</figure>")
    }

    fn card(&self, f: &mut fmt::Formatter<'_>, index: usize, row: &Row, card: &Card) -> fmt::Result {
        let name = Text(&row.picture);
        writeln!(
            f,
            "<article>\n<h3>{name}</h3>\n<p class=\"note\">{}</p>",
            Text(&card.reading)
        )?;
        f.write_str("<div class=\"pictures\">\n")?;
        let amplify = self.amplify;
        let panels = [
            ("A", self.report.a.to_string(), &card.a),
            ("B", self.report.b.to_string(), &card.b),
            (
                "|A &minus; B|",
                format!("times {amplify}, black is equal"),
                &card.difference,
            ),
        ];
        for (title, note, png) in panels {
            writeln!(
                f,
                "<figure><img width=\"{width}\" height=\"{height}\" alt=\"{title} of {name}\" \
                 src=\"data:image/png;base64,{png}\"><figcaption><b>{title}</b> {note}</figcaption></figure>",
                width = row.width,
                height = row.height,
                png = Base64Display::new(png, &BASE64_STANDARD),
                note = Text(note),
            )?;
        }
        f.write_str("</div>\n<div class=\"scroll\"><table>\n<thead><tr><td></td>")?;
        write_cells(f, "th scope=\"col\"", "th", COLUMNS)?;
        f.write_str("</tr></thead>\n<tbody>\n")?;
        for comparison in &self.report.comparisons {
            write!(f, "<tr><th scope=\"row\">{}</th>", comparison.title())?;
            write_cells(f, "td", "td", numbers(&comparison.pictures[index].figures))?;
            f.write_str("</tr>\n")?;
        }
        f.write_str("</tbody>\n</table></div>\n</article>\n")
    }
}

/// A way in full.
fn describe(way: &Way) -> String {
    let text = match way {
        Way::Decode { .. } => way.to_string(),
        Way::Reference { files, .. } => format!("reference {}", files.join(", ")),
    };
    match way.note() {
        Some(note) => format!("{text} ({note})"),
        None => text,
    }
}

fn write_cells<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    open: &str,
    close: &str,
    cells: [impl fmt::Display; N],
) -> fmt::Result {
    cells.iter().try_for_each(|cell| write!(f, "<{open}>{cell}</{close}>"))
}

const STYLE: &str = include_str!("page.css");

const GLOSSARY: &str = "<footer>
<h2>How to read the figures</h2>
<dl class=\"what\">
<dt>PSNR</dt><dd>Peak signal-to-noise ratio in dB of the unquantised images in -1..1 (range 2), and of the 8-bit pictures (u8, \
range 255). Infinite (inf) where the images are equal. 6 dB more is half the error.</dd>
<dt>SSIM</dt><dd>Structural similarity of the unquantised images as they are shown, Gaussian window of 11&times;11 pixels, mean of \
the channels; n/a for images with a side of less than 11 pixels.</dd>
<dt>abs</dt><dd>Absolute errors of values in -1..1: mean, 99th percentile, largest. One level of an 8-bit picture is 7.8e-3.</dd>
<dt>identical</dt><dd>Share of the pixels of the 8-bit pictures that are equal in all channels.</dd>
</dl>
<p class=\"note\">Figures are cut off, not rounded: what misses a round number does not read as if it had reached it.</p>
</footer>
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_write_html() {
        let name = r#"<img src="x" onerror=a&b>"#;
        assert_eq!(Text(name).to_string(), "&lt;img src=&quot;x&quot; onerror=a&amp;b&gt;");
    }

    #[test]
    fn a_difference_is_brightened_by_its_factor_and_has_no_sign() {
        let image = |values: [f32; 3]| Image::new([1, 3, 1, 1], values.to_vec());
        // 2/255 is one level.
        let level = 2.0 / 255.0;
        let found = difference(&image([0.5, 0.0, -0.5]), &image([0.5 - level, level, -0.5]), 64);
        assert_eq!(found.to_rgb8(0).unwrap().pixels, [64, 64, 0]);
        let found = difference(&image([1.0, 0.0, 0.0]), &image([-1.0, 1.0, 0.0]), 1);
        assert_eq!(found.to_rgb8(0).unwrap().pixels, [255, 128, 0]);
    }
}
