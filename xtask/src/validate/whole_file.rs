//! Files that appear whole or not at all.

use std::{
    fs,
    io::{ErrorKind, Write},
    path::Path,
};

use vae_io::Error;

use crate::Result;

/// Refuses what would fail only after decoding: another extension, a file that exists (unless `force`), a folder that is
/// missing or cannot be written to.
pub fn check(path: Option<&Path>, extension: &'static str, force: bool) -> Result {
    let Some(path) = path else { return Ok(()) };
    if path.extension().is_none_or(|found| found != extension) {
        return Err(format!("`{}` does not end in .{extension}", path.display()).into());
    }
    if !force && fs::symlink_metadata(path).is_ok() {
        return Err(exists(path));
    }
    if path.is_dir() {
        return Err(Error::io("write", path)(ErrorKind::IsADirectory.into()).into());
    }
    let folder = folder_of(path);
    tempfile::tempfile_in(folder).map_err(|error| Error::io("write into the folder", folder)(error.kind().into()))?;
    Ok(())
}

/// Refuses to replace a file that this run reads.
pub fn check_is_no_input(path: &Path, read: &[&Path]) -> Result {
    let Ok(target) = path.canonicalize() else { return Ok(()) };
    match read
        .iter()
        .any(|read| read.canonicalize().is_ok_and(|read| read == target))
    {
        true => Err(format!("`{}` is an input of this run; pass another name", path.display()).into()),
        false => Ok(()),
    }
}

/// Writes a temporary file beside `path`, which takes its name when it is complete.
pub fn write(path: &Path, text: &str, force: bool) -> Result {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".tmp-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // What other programs create files with; the umask applies. The default is for the owner only.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    let file = builder.tempfile_in(folder_of(path));
    let mut file = file.map_err(|error| Error::io("create", path)(error.kind().into()))?;
    file.write_all(text.as_bytes()).map_err(Error::io("write", path))?;
    let persisted = match force {
        true => file.persist(path),
        false => file.persist_noclobber(path),
    };
    match persisted {
        Ok(_) => Ok(()),
        Err(error) if !force && error.error.kind() == ErrorKind::AlreadyExists => Err(exists(path)),
        Err(error) => Err(Error::io("create", path)(error.error).into()),
    }
}

fn exists(path: &Path) -> Box<dyn std::error::Error> {
    format!(
        "`{}` exists; pass --force to overwrite it, or another name",
        path.display()
    )
    .into()
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
