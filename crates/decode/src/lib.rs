//! The program `decode`: saved diffusion latents to images. Parses, calls `burn_vae`, prints.
//!
//! A library only so that `xtask` can write completions and a manual page from the program's own arguments, and keep
//! compiled kernels as it does.

mod allocator;
mod args;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod gpu_cache;
mod inputs;
mod outputs;
mod pipeline;
mod progress;
mod report;
mod run;
mod schedule;
mod session;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, error::ErrorKind};

use args::Args;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use gpu_cache::persist as persist_kernels;
use vae_io::Error;

use report::FileError;

/// Runs the program on the process's arguments. Exit codes: 0 done, 1 failed, 2 wrong usage.
pub fn main() -> ExitCode {
    allocator::map_large_buffers();
    let args = Args::parse();
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    gpu_cache::persist();
    match run::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(message)) => command().error(ErrorKind::ArgumentConflict, message).exit(),
        Err(Failure::Run(error)) => fail(&error),
        Err(Failure::File(error)) => fail(&error),
        Err(Failure::Reported) => ExitCode::FAILURE,
    }
}

/// Why a run is no success.
enum Failure {
    /// The arguments contradict each other.
    Usage(String),
    /// Nothing could be decoded, or no more.
    Run(Error),
    /// The only file failed.
    File(Box<FileError>),
    /// Files of several failed, and it was told which.
    Reported,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Run(error)
    }
}

/// The program's arguments, as clap describes them.
pub fn command() -> clap::Command {
    Args::command()
}

fn fail(message: &dyn std::fmt::Display) -> ExitCode {
    progress::print_stderr(&format!("error: {message}"));
    ExitCode::FAILURE
}
