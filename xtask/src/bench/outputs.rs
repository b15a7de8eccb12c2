//! Where a benchmark's results go, and what they are held against.

use std::path::{Path, PathBuf};

use super::report::{self, Report, Row};
use crate::{Result, checkout};

/// What every benchmark does with its results.
#[derive(Debug, clap::Args)]
pub struct Outputs {
    /// Write the results there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Append the results to the device's file in benches/results/ of the checkout
    #[arg(long)]
    record: bool,

    /// Also print the ratios to the rows of another file of results, of --json, --record or benches/side_by_side
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,

    /// Measure nothing: take the results of another machine's --json, to print, record or compare
    #[arg(long, value_name = "FILE", conflicts_with_all = [MEASURING, "json"])]
    from: Option<PathBuf>,
}

/// The group of the arguments that say what is measured.
pub const MEASURING: &str = "measuring";

impl Outputs {
    /// Measures, or reads what was measured; `measure` also says how many rows failed. `warmups` and `runs` are what it will
    /// take.
    pub fn report<R: Row>(
        &self,
        warmups: usize,
        runs: usize,
        measure: impl FnOnce() -> Result<(Report<R>, usize)>,
    ) -> Result {
        // What could fail after minutes of measuring is tried first.
        let others = self.compare.as_deref().map(report::read).transpose()?;
        let results = self
            .record
            .then(|| checkout::root().map(|root| root.join("benches/results")))
            .transpose()?;
        let check_counts =
            |warmups: usize, runs: usize| match self.record && (warmups < R::MIN_WARMUPS || runs < R::MIN_RUNS) {
                true => Err(format!(
                    "--record takes at least {} warm-ups and {} runs",
                    R::MIN_WARMUPS,
                    R::MIN_RUNS
                )),
                false => Ok(()),
            };
        if self.from.is_none() {
            check_counts(warmups, runs)?;
        }
        if let Some(folder) = self.json.as_deref().and_then(Path::parent)
            && folder != Path::new("")
            && !folder.is_dir()
        {
            return Err(format!("--json: there is no folder {}", folder.display()).into());
        }

        let (reports, failed) = match &self.from {
            Some(path) => (report::read::<R>(path)?, 0),
            None => {
                let (report, failed) = measure()?;
                (vec![report], failed)
            }
        };
        for row in reports.iter().flat_map(|report| &report.rows) {
            check_counts(row.warmups(), row.runs())?;
        }
        for report in &reports {
            println!("{}", heading(report));
            println!("{}", report::table(&report.rows));
            if let (Some(others), Some(path)) = (&others, &self.compare) {
                print_comparison(report, others, path);
            }
            if let Some(path) = &self.json {
                report::write(path, report)?;
            }
            if let Some(folder) = &results {
                println!("recorded in {}", report::record(folder, report)?.display());
            }
        }
        match failed {
            0 => Ok(()),
            1 => Err("one row could not be measured".into()),
            rows => Err(format!("{rows} rows could not be measured").into()),
        }
    }
}

fn heading<R>(report: &Report<R>) -> String {
    let Report {
        device,
        driver,
        date,
        commit,
        method,
        ..
    } = report;
    let driver = driver
        .as_deref()
        .map(|driver| format!(", driver {driver}"))
        .unwrap_or_default();
    format!("{device}{driver}; commit {commit}; {date}. {method}.\n")
}

fn print_comparison<R: Row>(report: &Report<R>, others: &[Report<R>], path: &Path) {
    match report::comparison(report, others) {
        Some(table) => println!("{table}"),
        None => println!("no row of {} is of the same work\n", path.display()),
    }
    for other in others.iter().filter(|other| other.device != report.device) {
        println!(
            "note: {} has rows of another device, {}\n",
            path.display(),
            other.device
        );
    }
}
