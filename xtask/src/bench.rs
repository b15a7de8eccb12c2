//! `xtask bench` and `xtask bench-operations`: time decodes, and operations alone, by the protocols of docs/performance.md and
//! keep what they measured.

mod card;
mod operations;
mod outputs;
mod protocol;
mod report;
mod row;

use std::{
    env,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use burn_vae::{DeviceName, Quality, Storage, Tiling};

use crate::{Result, checkout};
pub use operations::{Args as OperationsArgs, run as run_operations};
use outputs::{MEASURING, Outputs};
use report::{Report, Row};
pub use row::{Args as RowArgs, run as run_row};
use row::{DecodeRow, Measurement, Model, Size, TypeName};

/// Time decodes of resident latents on one device, a process a row.
///
/// Every combination of the lists is a row: its first decode is timed apart, then come warm-ups, then runs back to back,
/// each from the call to the end of a device synchronise. Loading, transfers and files are left out.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    rows: RowsArgs,

    #[command(flatten)]
    outputs: Outputs,
}

/// Which rows are measured, and how.
#[derive(Debug, clap::Args)]
#[group(id = MEASURING)]
struct RowsArgs {
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
    #[arg(long, value_name = "N", default_value_t = DecodeRow::MIN_WARMUPS)]
    warmups: usize,

    /// Timed decodes
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::new(DecodeRow::MIN_RUNS).unwrap())]
    runs: NonZeroUsize,

    /// Cut decodes into bands: off, the rows of latents in a band, or auto
    #[arg(long, value_name = "off|ROWS|auto")]
    tile: Option<Tiling>,

    /// Where bands wait: device, host, half, disk
    #[arg(long, value_name = "STORAGE")]
    storage: Option<Storage>,

    /// Also print the time of each stage of the decode: wall clock with a synchronise after each, in decodes of their own
    #[arg(long)]
    sites: bool,

    /// Leave out the synchronise that ends a timed decode: the protocol's check must refuse that wherever work is
    /// asynchronous
    #[arg(long, hide = true)]
    without_synchronise: bool,
}

pub fn run(Args { rows, outputs }: &Args) -> Result {
    outputs.report(rows.warmups, rows.runs.get(), || measure(rows))
}

/// Measures the rows one after another; says how many failed, if not all.
fn measure(args: &RowsArgs) -> Result<(Report<DecodeRow>, usize)> {
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
fn rows(args: &RowsArgs) -> Vec<RowArgs> {
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
                            tile: args.tile,
                            storage: args.storage,
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
fn method(args: &RowsArgs) -> String {
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

/// The peak of the pools, and beside it what the driver counts.
fn memory(measurement: &Measurement) -> String {
    let pools = measurement.row.peak_mib.map(|mib| format!(", {mib:.0} MiB"));
    let predicted = measurement.predicted_mib.map(|mib| format!(" ({mib:.0} predicted)"));
    let driver = measurement
        .driver_mib
        .map(|mib| format!(" (the driver counts {mib:.0} MiB of the card as used)"));
    [pools, predicted, driver].into_iter().flatten().collect()
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
