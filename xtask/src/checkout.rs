//! The checkout that xtask was started in, and the commit that its programs were built from.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::Result;

/// The root of the checkout around the current folder.
///
/// # Errors
/// When there is none.
pub fn root() -> Result<PathBuf> {
    let here = env::current_dir()?;
    let root = here
        .ancestors()
        .find(|folder| folder.join("xtask/Cargo.toml").is_file());
    root.map(Path::to_path_buf)
        .ok_or_else(|| "this needs a checkout of burn-vae; change into one".into())
}

/// What this program was built from: in a bundle what its file `COMMIT` says, in a checkout what git says, with `-dirty`
/// for a tree with changes.
pub fn commit() -> String {
    let bundled = env::current_exe().ok().and_then(|program| {
        let bundle = program.ancestors().nth(2)?.join("COMMIT");
        fs::read_to_string(bundle).ok()
    });
    let commit = bundled.map(|text| text.trim().to_string());
    commit
        .or_else(|| git_commit(&root().ok()?))
        .unwrap_or_else(|| "unknown".into())
}

/// The commit that is checked out there.
pub fn git_commit(root: &Path) -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).current_dir(root).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_string())
    };
    let head = git(&["rev-parse", "--short", "HEAD"])?;
    let dirty = !git(&["status", "--porcelain"])?.is_empty();
    Some(if dirty { format!("{head}-dirty") } else { head })
}
