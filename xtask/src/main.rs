//! `cargo xtask`: what proves a decode (`validate`, `bench`, `bench-operations`), what packs it (`bundle`, `dist`), and previews
//! (`fit-preview`).

mod bench;
mod bundle;
mod checkout;
mod dist;
mod fit_preview;
mod validate;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Validation, benchmarks and packing of burn-vae.
#[derive(Debug, Parser)]
#[command(name = "xtask", version, about)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Validate(validate::Args),
    Bench(bench::Args),
    BenchOperations(bench::OperationsArgs),
    /// One row of a benchmark, for `bench` itself
    #[command(hide = true)]
    BenchRow(bench::RowArgs),
    Bundle(bundle::Args),
    Dist(dist::Args),
    FitPreview(fit_preview::Args),
}

/// Any error with its message; the program only prints it.
type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn main() -> ExitCode {
    let args = Args::parse();
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    decode::persist_kernels();
    let result = match args.command {
        Command::Validate(args) => validate::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::BenchOperations(args) => bench::run_operations(&args),
        Command::BenchRow(args) => bench::run_row(&args),
        Command::Bundle(args) => bundle::run(&args),
        Command::Dist(args) => dist::run(&args),
        Command::FitPreview(args) => fit_preview::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
