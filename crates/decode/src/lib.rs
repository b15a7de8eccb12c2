//! The program `decode`: saved diffusion latents to images. Parses, calls `burn_vae`, prints.
//!
//! A library only so that `xtask` can write completions and a manual page from the program's own arguments, and keep
//! compiled kernels as it does.

mod args;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod gpu_cache;
mod outputs;
mod progress;
mod run;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, error::ErrorKind};

use args::Args;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub use gpu_cache::persist as persist_kernels;
use run::Failure;

/// Runs the program on the process's arguments. Exit codes: 0 done, 1 failed, 2 wrong usage.
pub fn main() -> ExitCode {
    let args = Args::parse();
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    gpu_cache::persist();
    match run::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Usage(message)) => command().error(ErrorKind::ArgumentConflict, message).exit(),
        Err(Failure::Error(error)) => fail(&error),
        Err(Failure::Latents(path, error)) => fail(&format_args!("`{}`: {error}", path.display())),
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
