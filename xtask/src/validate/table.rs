//! The figures as text.

use std::fmt;

use super::results::{Abs, Comparison, Figures, Percent, Psnr, Report, Side, Ssim};

/// What each number of a row is; the header of tables here and in the page.
pub const COLUMNS: [&str; 7] = [
    "PSNR dB",
    "PSNR u8 dB",
    "SSIM",
    "mean abs",
    "p99 abs",
    "max abs",
    "identical",
];

/// A row's numbers in the order of [`COLUMNS`].
pub fn numbers(figures: &Figures) -> [String; 7] {
    let Figures { f32, u8 } = figures;
    [
        Psnr(f32.psnr_db).to_string(),
        Psnr(u8.psnr_db).to_string(),
        Ssim(f32.ssim).to_string(),
        Abs(f32.mean_abs).to_string(),
        Abs(f32.p99_abs).to_string(),
        Abs(f32.max_abs).to_string(),
        Percent(u8.identical_pixels).to_string(),
    ]
}

/// What the sides are, and a table for each comparison.
pub struct Table<'a>(pub &'a Report);

impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { a, b, comparisons, .. } = self.0;
        for (side, way) in [(Side::A, a), (Side::B, b)] {
            match way.note() {
                Some(note) => writeln!(f, "{side}: {way} ({note})")?,
                None => writeln!(f, "{side}: {way}")?,
            }
        }
        comparisons.iter().try_for_each(|comparison| {
            writeln!(f, "\n{}", comparison.title())?;
            write_rows(f, comparison)
        })
    }
}

fn write_rows(f: &mut fmt::Formatter<'_>, comparison: &Comparison) -> fmt::Result {
    let cells = |name: &str, size: String, numbers: [String; 7]| {
        let mut cells = vec![name.to_string(), size];
        cells.extend(numbers);
        cells
    };
    let mut rows = vec![cells("picture", "size".to_string(), COLUMNS.map(str::to_string))];
    for row in &comparison.pictures {
        let size = format!("{}x{}", row.width, row.height);
        rows.push(cells(&row.picture, size, numbers(&row.figures)));
    }
    rows.push(cells("worst", String::new(), numbers(&comparison.worst)));
    rows.push(cells("mean", String::new(), numbers(&comparison.mean)));

    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    for row in &rows {
        // Names to the left, numbers to the right.
        write!(f, "{:<1$}", row[0], widths[0])?;
        for (cell, width) in row.iter().zip(&widths).skip(1) {
            write!(f, "  {cell:>width$}")?;
        }
        writeln!(f)?;
    }
    Ok(())
}
