use crate::Result;

/// To come.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn run(_args: &Args) -> Result {
    Err("not there yet".into())
}
