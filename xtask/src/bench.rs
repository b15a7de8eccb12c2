//! `xtask bench`: times decodes by the protocol of docs/performance.md and keeps what it measured.

mod card;
mod protocol;
mod report;
mod row;

use std::{
    env,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use burn_vae::{DeviceName, Quality};

use crate::{Result, checkout};
use report::Report;
pub use row::{Args as RowArgs, run as run_row};
use row::{Measurement, Model, Size, TypeName};

/// Time decodes of resident latents on one device, a process a row.
///
/// Every combination of the lists is a row: its first decode is timed apart, then come warm-ups, then runs back to back,
/// each from the call to the end of a device synchronise. Loading, transfers and files are left out.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Full-size models with random weights: sd, sdxl, sd3, flux1, flux2, flux2-small
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "flux2")]
    family: Vec<Model>,

    /// The weights of a folder or a .safetensors file, in place of random ones
    #[arg(long, value_name = "PATH", conflicts_with = "family")]
    vae: Option<PathBuf>,

    /// Sizes of the image in pixels, as 1024 or 1024x768 (width, height)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512,1024,2048")]
    sizes: Vec<Size>,

    /// The first latents of a file, in place of random ones of each size
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sizes", "batch"])]
    latents: Option<PathBuf>,

    /// Images decoded at once
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1")]
    batch: Vec<NonZeroUsize>,

    /// lossless, high
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "lossless")]
    quality: Vec<Quality>,

    /// auto, f32, f16, bf16; auto is bf16 on CUDA, else f32
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "auto")]
    dtype: Vec<TypeName>,

    /// auto, cpu, cuda, cuda:N, wgpu or wgpu:N
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Auto)]
    device: DeviceName,

    /// Decodes between the first one and the timed ones
    #[arg(long, value_name = "N", default_value_t = MIN_WARMUPS)]
    warmups: usize,

    /// Timed decodes
    #[arg(long, value_name = "N", default_value_t = MIN_RUNS)]
    runs: NonZeroUsize,

    /// Also print the time of each stage of the decode: wall clock with a synchronise after each, in decodes of their own
    #[arg(long)]
    sites: bool,

    /// Leave out the synchronise that ends a timed decode: the protocol's check must refuse that wherever work is
    /// asynchronous
    #[arg(long, hide = true)]
    without_synchronise: bool,

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
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "family", "vae", "sizes", "latents", "batch", "quality", "dtype", "device", "warmups", "runs", "sites", "json", "without_synchronise",
    ])]
    from: Option<PathBuf>,
}

/// What is recorded has at least as many.
const MIN_WARMUPS: usize = 5;
const MIN_RUNS: NonZeroUsize = NonZeroUsize::new(20).unwrap();

pub fn run(args: &Args) -> Result {
    // What could fail after minutes of measuring is tried first.
    let others = args.compare.as_deref().map(report::read).transpose()?;
    let results = args
        .record
        .then(|| checkout::root().map(|root| root.join("benches/results")))
        .transpose()?;
    let check_counts =
        |warmups: usize, runs: usize| match args.record && (warmups < MIN_WARMUPS || runs < MIN_RUNS.get()) {
            true => Err(format!(
                "--record takes at least {MIN_WARMUPS} warm-ups and {MIN_RUNS} runs"
            )),
            false => Ok(()),
        };
    if args.from.is_none() {
        check_counts(args.warmups, args.runs.get())?;
    }
    if let Some(folder) = args.json.as_deref().and_then(Path::parent)
        && folder != Path::new("")
        && !folder.is_dir()
    {
        return Err(format!("--json: there is no folder {}", folder.display()).into());
    }

    let (reports, failed) = match &args.from {
        Some(path) => (report::read(path)?, 0),
        None => {
            let (report, failed) = measure(args)?;
            (vec![report], failed)
        }
    };
    for row in reports.iter().flat_map(|report| &report.rows) {
        check_counts(row.warmups, row.runs)?;
    }
    for report in &reports {
        println!("{}", heading(report));
        println!("{}", report::table(&report.rows));
        if let (Some(others), Some(path)) = (&others, &args.compare) {
            print_comparison(report, others, path);
        }
        if let Some(path) = &args.json {
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

/// Measures the rows one after another; says how many failed, if not all.
fn measure(args: &Args) -> Result<(Report, usize)> {
    let mut measurements = Vec::new();
    let mut failed = 0;
    for row in rows(args) {
        match measure_row(&row) {
            Ok(measurement) => {
                eprintln!("{row}: {:.2} ms{}", measurement.row.ms_median, memory(&measurement));
                if args.sites {
                    print_stages(&row, &measurement);
                }
                measurements.push(measurement);
            }
            Err(error) => {
                eprintln!("{row}: {error}");
                failed += 1;
            }
        }
    }
    let first = measurements.first().ok_or("no row could be measured")?;
    let report = Report {
        device: first.device.clone(),
        driver: first.driver.clone(),
        date: jiff::Timestamp::now().strftime("%F").to_string(),
        commit: checkout::commit(),
        method: method(args),
        rows: measurements.iter().map(|measurement| measurement.row.clone()).collect(),
    };
    Ok((report, failed))
}

/// Every combination, the quickest to change last.
fn rows(args: &Args) -> Vec<RowArgs> {
    let families: Vec<_> = match args.vae {
        Some(_) => vec![None],
        None => args.family.iter().copied().map(Some).collect(),
    };
    let sizes: Vec<_> = match args.latents {
        Some(_) => vec![None],
        None => args.sizes.iter().copied().map(Some).collect(),
    };
    let mut rows = Vec::new();
    for &family in &families {
        for &size in &sizes {
            for &batch in &args.batch {
                for &dtype in &args.dtype {
                    for &quality in &args.quality {
                        rows.push(RowArgs {
                            family,
                            vae: args.vae.clone(),
                            size,
                            latents: args.latents.clone(),
                            batch,
                            quality,
                            dtype,
                            device: args.device,
                            warmups: args.warmups,
                            runs: args.runs,
                            sites: args.sites,
                            without_synchronise: args.without_synchronise,
                        });
                    }
                }
            }
        }
    }
    rows
}

/// Starts this program again for one row.
fn measure_row(row: &RowArgs) -> Result<Measurement> {
    let output = Command::new(env::current_exe()?)
        .arg("bench-row")
        .args(row.to_arguments())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        return Err(format!("its process ended with {}", output.status).into());
    }
    // After whatever a library may have printed.
    let line = output
        .stdout
        .trim_ascii_end()
        .rsplit(|&byte| byte == b'\n')
        .next()
        .unwrap_or_default();
    Ok(serde_json::from_slice(line)?)
}

/// How the rows were measured, for whoever reads them later.
fn method(args: &Args) -> String {
    let name = |path: &Path| path.file_name().unwrap_or(path.as_os_str()).display().to_string();
    let given = |path: &Option<PathBuf>| path.as_deref().map_or("random".into(), name);
    format!(
        "xtask bench: wall clock from the call of decode to the end of a device synchronise, {} weights and {} latents on \
         the device; a process a row; first decode apart, with the kernels to compile that the user's cache lacks; \
         autotune not built in; peak_mib is what the device's pools reserved, on the CPU the process's resident set",
        given(&args.vae),
        given(&args.latents),
    )
}

fn heading(report: &Report) -> String {
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

fn print_comparison(report: &Report, others: &[Report], path: &Path) {
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

/// The peak of the pools, and beside it what the driver counts.
fn memory(measurement: &Measurement) -> String {
    let pools = measurement.row.peak_mib.map(|mib| format!(", {mib:.0} MiB"));
    let driver = measurement
        .driver_mib
        .map(|mib| format!(" (the driver counts {mib:.0} MiB of the card as used)"));
    [pools, driver].into_iter().flatten().collect()
}

fn print_stages(row: &RowArgs, measurement: &Measurement) {
    let total: f64 = measurement.stages.iter().map(|(_, milliseconds)| milliseconds).sum();
    println!(
        "{row}, by stage with a synchronise after each ({:.2} ms without):\n",
        measurement.row.ms_median
    );
    println!("| stage | median ms | share |\n|---|---:|---:|");
    for (stage, milliseconds) in &measurement.stages {
        println!("| {stage} | {milliseconds:.3} | {:.1}% |", 100.0 * milliseconds / total);
    }
    println!("| sum | {total:.3} | |\n");
}
