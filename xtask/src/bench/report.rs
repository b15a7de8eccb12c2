//! What a benchmark writes: JSON to keep and to compare with, tables to read.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Result;

/// One run of a benchmark on one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report<R> {
    /// The device, as it names itself.
    pub device: String,
    /// The version of its driver, where it tells.
    pub driver: Option<String>,
    /// In UTC, as 2026-12-31.
    pub date: String,
    /// What was measured.
    pub commit: String,
    /// How it was measured.
    pub method: String,
    pub rows: Vec<R>,
}

/// What a report has rows of.
pub trait Row: Clone + Serialize + DeserializeOwned {
    /// Ends the names of the files in which such rows are kept, after the device's.
    const KEPT_AS: &str;
    /// What is recorded has at least as many.
    const MIN_WARMUPS: usize;
    const MIN_RUNS: usize;
    /// The two lines that a Markdown table of rows starts with, and those of a comparison.
    const TABLE_HEAD: &str;
    const COMPARISON_HEAD: &str;

    fn warmups(&self) -> usize;
    fn runs(&self) -> usize;

    /// How it was computed.
    fn implementation(&self) -> &str;

    /// Whether both are of the same work, however it was computed.
    fn is_comparable(&self, other: &Self) -> bool;

    /// A line of a table, without its end.
    fn table_line(&self) -> String;

    /// A line of a comparison with another row, whose origin is `source`, without its end.
    fn comparison_line(&self, other: &Self, source: &str) -> String;
}

/// Reads a report, or a list of them as [`record`] keeps.
///
/// # Errors
/// When the file is not there or is neither.
pub fn read<R: Row>(path: &Path) -> Result<Vec<Report<R>>> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let parsed = if text.trim_start().starts_with('[') {
        serde_json::from_str(&text)
    } else {
        serde_json::from_str(&text).map(|report| vec![report])
    };
    parsed.map_err(|error| format!("{} is not this benchmark's JSON: {error}", path.display()).into())
}

/// Writes a report in full or not at all.
pub fn write<R: Row>(path: &Path, report: &Report<R>) -> Result {
    write_json(path, report)
}

/// Appends a report to those of its device in `folder`, and says in which file.
pub fn record<R: Row>(folder: &Path, report: &Report<R>) -> Result<PathBuf> {
    let path = folder.join(format!("{}{}.json", record_name(&report.device), R::KEPT_AS));
    let mut reports = if path.exists() { read(&path)? } else { Vec::new() };
    reports.push(report.clone());
    write_json(&path, &reports)?;
    Ok(path)
}

fn write_json(path: &Path, value: &impl Serialize) -> Result {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    let partial = path.with_extension("json.partial");
    let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
    written.map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}

/// `NVIDIA H200` is `nvidia-h200` in names of files.
fn record_name(device: &str) -> String {
    let lower = device.to_ascii_lowercase();
    let words: Vec<_> = lower
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .collect();
    if words.is_empty() {
        "unnamed".into()
    } else {
        words.join("-")
    }
}

/// The rows as a Markdown table.
pub fn table<R: Row>(rows: &[R]) -> String {
    let lines = rows.iter().map(|row| row.table_line() + "\n");
    [R::TABLE_HEAD.to_string()].into_iter().chain(lines).collect()
}

/// A clock at the start and the end of the timed runs, for a cell of a table.
pub fn clocks(start: Option<u32>, end: Option<u32>) -> String {
    match (start, end) {
        (Some(start), Some(end)) => format!("{start}-{end}"),
        _ => String::new(),
    }
}

/// A Markdown table of `report` against the rows of `others` for the same work: of the same implementation if there are
/// such, else of every one, the newest of each. `None` when no row has a counterpart.
pub fn comparison<R: Row>(report: &Report<R>, others: &[Report<R>]) -> Option<String> {
    let mut lines = Vec::new();
    for row in &report.rows {
        let mut counterparts: Vec<(&Report<R>, &R)> = Vec::new();
        for (other, counterpart) in others
            .iter()
            .rev()
            .flat_map(|other| other.rows.iter().map(move |row| (other, row)))
        {
            let is_new = counterparts
                .iter()
                .all(|(_, known)| known.implementation() != counterpart.implementation());
            if row.is_comparable(counterpart) && is_new {
                counterparts.push((other, counterpart));
            }
        }
        let is_own = |(_, counterpart): &(&Report<R>, &R)| counterpart.implementation() == row.implementation();
        if counterparts.iter().any(is_own) {
            counterparts.retain(is_own);
        }
        lines.extend(counterparts.into_iter().map(|(other, counterpart)| {
            let source = format!("{} ({} {})", counterpart.implementation(), other.commit, other.date);
            row.comparison_line(counterpart, &source) + "\n"
        }));
    }
    (!lines.is_empty()).then(|| format!("{}{}", R::COMPARISON_HEAD, lines.concat()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::DecodeRow;

    fn row(quality: &str, width: usize, ms_median: f64) -> DecodeRow {
        DecodeRow {
            family: "flux2".into(),
            width,
            height: 512,
            batch: 1,
            quality: quality.into(),
            dtype: "bf16".into(),
            ms_median,
            ms_min: 9.5,
            ms_max: 11.25,
            runs: 20,
            warmups: 5,
            first_ms: 1234.6,
            peak_mib: Some(1000.0),
            clock_mhz_start: Some(1980),
            clock_mhz_end: None,
        }
    }

    fn report(commit: &str, rows: Vec<DecodeRow>) -> Report<DecodeRow> {
        Report {
            device: "NVIDIA H200".into(),
            driver: Some("580.1".into()),
            date: "2026-12-01".into(),
            commit: commit.into(),
            method: "wall clock".into(),
            rows,
        }
    }

    #[test]
    fn the_json_has_the_fields_that_others_read_and_no_more() {
        let json = serde_json::to_value(report("abc", vec![row("lossless", 512, 10.0)])).unwrap();
        let keys = |value: &serde_json::Value| {
            let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
            keys.sort_unstable();
            keys.join(" ")
        };
        assert_eq!(keys(&json), "commit date device driver method rows");
        assert_eq!(
            keys(&json["rows"][0]),
            "batch clock_mhz_end clock_mhz_start dtype family first_ms height ms_max ms_median ms_min peak_mib quality \
             runs warmups width"
        );
        assert!(json["rows"][0]["clock_mhz_end"].is_null());
    }

    #[test]
    fn reports_are_appended_to_those_of_their_device() {
        let folder = tempfile::tempdir().unwrap();
        let first = report("abc", vec![row("lossless", 512, 10.0)]);
        let second = report("def", vec![row("high", 512, 5.0)]);
        let path = record(folder.path(), &first).unwrap();
        assert_eq!(path, folder.path().join("nvidia-h200.json"));
        assert_eq!(record(folder.path(), &second).unwrap(), path);
        assert_eq!(read::<DecodeRow>(&path).unwrap(), [first.clone(), second]);
        let alone = folder.path().join("alone.json");
        write(&alone, &first).unwrap();
        assert_eq!(read::<DecodeRow>(&alone).unwrap(), [first]);
        assert_eq!(
            fs::read_dir(folder.path()).unwrap().count(),
            2,
            "a partial file was left"
        );
    }

    #[test]
    fn a_record_that_is_damaged_is_refused_and_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nvidia-h200.json");
        fs::write(&path, "[{").unwrap();
        let error = record(folder.path(), &report("abc", vec![])).unwrap_err().to_string();
        assert!(
            error.contains("nvidia-h200.json is not this benchmark's JSON"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "[{");
    }

    #[test]
    fn names_of_devices_become_names_of_files() {
        assert_eq!(
            record_name("Intel(R) Xeon(R) Processor, 2 CPUs"),
            "intel-r-xeon-r-processor-2-cpus"
        );
        assert_eq!(record_name("../../etc"), "etc");
        assert_eq!(record_name("東京"), "unnamed");
    }

    #[test]
    fn a_row_is_compared_with_the_newest_of_its_quality() {
        let ours = report("new", vec![row("lossless", 512, 10.0)]);
        let others = [
            report("old", vec![row("lossless", 512, 40.0)]),
            report(
                "mid",
                vec![
                    row("lossless", 512, 20.0),
                    row("high", 512, 1.0),
                    row("lossless", 1024, 5.0),
                ],
            ),
        ];
        let text = comparison(&ours, &others).unwrap();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(
            text.contains("| lossless (mid 2026-12-01) | 20.00 | 0.500 | 1.00 |"),
            "{text}"
        );
    }

    #[test]
    fn a_quality_that_the_other_file_lacks_is_compared_with_all_it_has() {
        let ours = report("new", vec![row("high", 512, 10.0)]);
        let theirs = report("torch", vec![row("eager", 512, 20.0), row("compile", 512, 8.0)]);
        let text = comparison(&ours, &[theirs]).unwrap();
        assert!(text.contains("| eager (torch 2026-12-01) | 20.00 | 0.500 |"), "{text}");
        assert!(text.contains("| compile (torch 2026-12-01) | 8.00 | 1.250 |"), "{text}");
    }

    #[test]
    fn other_work_is_not_compared() {
        let ours = report("new", vec![row("high", 512, 10.0)]);
        let mut other = row("high", 512, 20.0);
        other.dtype = "f32".into();
        assert_eq!(
            comparison(&ours, &[report("old", vec![other, row("high", 1024, 1.0)])]),
            None
        );
    }

    #[test]
    fn the_table_shows_clocks_only_where_both_are_known() {
        let mut known = row("lossless", 512, 10.0);
        known.clock_mhz_end = Some(1965);
        let text = table(&[row("lossless", 512, 10.0), known]);
        let lines: Vec<_> = text.lines().collect();
        assert!(
            lines[2].ends_with("| 10.00 | 9.50 | 11.25 | 1235 | 1000 |  |"),
            "{text}"
        );
        assert!(lines[3].ends_with("| 1000 | 1980-1965 |"), "{text}");
    }
}
