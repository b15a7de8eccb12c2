//! `xtask dist`: what a package of `decode` ships beside the program, made from its own arguments.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use clap_complete::Shell;

use crate::{Result, checkout};

/// Write shell completions and the manual page of decode.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The folder for completions/ and man/man1/; by default dist in the checkout
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result {
    let folder = match &args.output {
        Some(folder) => folder.clone(),
        None => checkout::root()?.join("dist"),
    };
    for path in write(&folder)? {
        println!("{}", path.display());
    }
    Ok(())
}

/// Writes all files, over those of an earlier run, and lists them.
fn write(folder: &Path) -> Result<Vec<PathBuf>> {
    let failed = |error: std::io::Error| format!("cannot write to {}: {error}", folder.display());
    let completions = folder.join("completions");
    let manual = folder.join("man/man1");
    for folder in [&completions, &manual] {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let mut files = Vec::new();
    for &shell in Shell::value_variants() {
        let path = clap_complete::generate_to(shell, &mut decode::command(), "decode", &completions);
        files.push(path.map_err(failed)?);
    }
    files.push(
        clap_mangen::Man::new(decode::command())
            .generate_to(&manual)
            .map_err(failed)?,
    );
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_and_the_manual_know_the_options_of_decode() {
        let folder = tempfile::tempdir().unwrap();
        let files = write(folder.path()).unwrap();
        let names: Vec<_> = files
            .iter()
            .map(|path| path.strip_prefix(folder.path()).unwrap().display().to_string())
            .collect();
        for name in [
            "completions/decode.bash",
            "completions/decode.elv",
            "completions/decode.fish",
            "completions/_decode.ps1",
            "completions/_decode",
            "man/man1/decode.1",
        ] {
            assert!(
                names.iter().any(|written| written == name),
                "{name} is not among {names:?}"
            );
        }
        for path in &files {
            let text = fs::read_to_string(path).unwrap().replace("\\-", "-");
            for option in decode::command()
                .get_arguments()
                .filter_map(|argument| argument.get_long())
            {
                assert!(text.contains(option), "{} does not know {option}", path.display());
            }
        }
        // Again, over what is there.
        assert_eq!(write(folder.path()).unwrap(), files);
    }
}
