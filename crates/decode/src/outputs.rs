//! Which files a run writes, settled before anything is decoded.

use std::{
    collections::{HashMap, HashSet},
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use vae_io::{Error, OutputFormat, Result, remove_unfinished};

/// What `-o` says.
#[derive(Debug)]
pub enum Destination {
    /// One file of this format.
    File(PathBuf, OutputFormat),
    /// A folder that takes `{stem}.png` of each input.
    Folder(PathBuf),
}

/// A file that a run writes.
#[derive(Debug, PartialEq, Eq)]
pub struct Output {
    /// Its name.
    pub path: PathBuf,
    /// The images of its input's batch that it holds: one for a picture, all for a raw file.
    pub images: Range<usize>,
    /// Whether a file of that name is replaced.
    pub replace: bool,
}

impl Output {
    /// Refuses images that the format has no room for.
    ///
    /// # Errors
    /// [`Error::ImageTooLarge`]
    pub fn check_size(&self, width: usize, height: usize) -> Result<()> {
        OutputFormat::from_path(&self.path)?.check_size(&self.path, width, height)
    }

    /// Whether an earlier run wrote it. Outputs appear under their names when they are complete, so a file that is there is
    /// whole; but one that is empty was lost with the power, as no format is.
    pub fn is_finished(&self) -> bool {
        self.existing_bytes().is_some_and(|bytes| bytes > 0)
    }

    /// The size of the file of that name, if there is one.
    pub fn existing_bytes(&self) -> Option<u64> {
        let metadata = fs::metadata(&self.path).ok()?;
        metadata.is_file().then_some(metadata.len())
    }
}

impl Destination {
    /// Tells a file from a folder: a folder exists, ends with a separator, or is what arguments that may name `several` files
    /// need.
    ///
    /// # Errors
    /// [`Error::UnknownExtension`] for a file of no known format.
    pub fn parse(output: Option<&Path>, several: bool) -> Result<Self> {
        let Some(output) = output else {
            return Ok(Self::Folder(PathBuf::new()));
        };
        let folder = || Self::Folder(output.to_path_buf());
        let last = output.as_os_str().as_encoded_bytes().last();
        if last.is_some_and(|&byte| std::path::is_separator(byte.into())) {
            return Ok(folder());
        }
        match OutputFormat::from_path(output) {
            Ok(format) => Ok(Self::File(output.to_path_buf(), format)),
            Err(_) if output.is_dir() || (several && output.extension().is_none()) => Ok(folder()),
            Err(error) => Err(error),
        }
    }

    /// The files that an input with a batch of `batch` images becomes, in a folder named after the input.
    pub fn outputs(&self, input: &Path, batch: usize, replace: bool) -> Vec<Output> {
        let output = |path, images| Output { path, images, replace };
        let (folder, stem, extension) = match self {
            Self::File(path, format) if format.holds_batch() => return vec![output(path.clone(), 0..batch)],
            Self::File(path, _) if batch == 1 => return vec![output(path.clone(), 0..1)],
            Self::File(path, _) => (
                path.parent().unwrap_or(Path::new("")),
                path.file_stem(),
                path.extension(),
            ),
            Self::Folder(folder) => (folder.as_path(), input.file_stem(), Some("png".as_ref())),
        };
        let picture = |index: usize| {
            // Not through a string: names need not be UTF-8.
            let mut name = stem.unwrap_or_default().to_os_string();
            if batch > 1 {
                name.push(format!("_{index}"));
            }
            name.push(".");
            name.push(extension.unwrap_or_default());
            output(folder.join(name), index..index + 1)
        };
        (0..batch).map(picture).collect()
    }
}

/// Refuses outputs, each given with its input, whose names two inputs share, that are folders, or that this run reads.
///
/// # Errors
/// [`Error::OutputCollision`], [`Error::OutputIsInput`], [`Error::Io`].
pub fn check_names<'a>(
    outputs: impl IntoIterator<Item = (&'a Path, &'a Output)>,
    read: impl IntoIterator<Item = impl AsRef<Path>>,
) -> Result<()> {
    let read = read.into_iter().filter_map(|path| path.as_ref().canonicalize().ok());
    let read: HashSet<PathBuf> = read.collect();
    let mut written_by = HashMap::new();
    for (input, Output { path, .. }) in outputs {
        if let Some(other) = written_by.insert(path, input) {
            return Err(Error::OutputCollision {
                path: path.clone(),
                inputs: [other.to_path_buf(), input.to_path_buf()],
            });
        }
        if path.is_dir() {
            return Err(Error::io("write", path)(std::io::ErrorKind::IsADirectory.into()));
        }
        if path.canonicalize().is_ok_and(|path| read.contains(&path)) {
            return Err(Error::OutputIsInput { path: path.clone() });
        }
    }
    Ok(())
}

/// Makes the folder that `-o` names, removes what killed runs left in it, and refuses what would fail only after decoding:
/// outputs that exist and are not to be replaced, and a folder that is missing or cannot be written to.
///
/// # Errors
/// [`Error::Io`] and those of [`OutputFormat::check`].
pub fn prepare<'a>(destination: &Destination, outputs: impl IntoIterator<Item = &'a Output>) -> Result<()> {
    let mut outputs = outputs.into_iter();
    let Some(first) = outputs.next() else {
        return Ok(());
    };
    if let Destination::Folder(folder) = destination
        && !folder.as_os_str().is_empty()
    {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    // All outputs of a run are in one folder.
    OutputFormat::check(&first.path, first.replace)?;
    let folder = first.path.parent().filter(|folder| !folder.as_os_str().is_empty());
    // A folder that may be written to but not listed is no reason to stop.
    let _ = remove_unfinished(folder.unwrap_or(Path::new(".")));
    for Output { path, replace, .. } in outputs {
        if !replace && fs::symlink_metadata(path).is_ok() {
            return Err(Error::OutputExists { path: path.clone() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(output: Option<&str>, batch: usize) -> Vec<String> {
        let destination = Destination::parse(output.map(Path::new), false).unwrap();
        let outputs = destination.outputs(Path::new("in/cat.v1.safetensors"), batch, false);
        let images: Vec<usize> = outputs.iter().flat_map(|output| output.images.clone()).collect();
        assert_eq!(images, Vec::from_iter(0..batch), "every image has one place");
        outputs.iter().map(|output| output.path.display().to_string()).collect()
    }

    #[test]
    fn names_follow_the_input_or_the_output() {
        assert_eq!(targets(None, 1), ["cat.v1.png"]);
        assert_eq!(targets(None, 2), ["cat.v1_0.png", "cat.v1_1.png"]);
        assert_eq!(targets(Some("new/"), 1), ["new/cat.v1.png"]);
        assert_eq!(targets(Some("a/b.jpg"), 1), ["a/b.jpg"]);
        assert_eq!(targets(Some("a/b.jpg"), 2), ["a/b_0.jpg", "a/b_1.jpg"]);
        assert_eq!(targets(Some("a/b.npy"), 2), ["a/b.npy"]);
    }

    #[test]
    fn two_inputs_never_write_one_file() {
        let output = &Destination::parse(Some(Path::new("x.npy")), false)
            .unwrap()
            .outputs(Path::new("a"), 1, true)[0];
        let same = [(Path::new("a"), output), (Path::new("b"), output)];
        let error = check_names(same, [""]).unwrap_err().to_string();
        assert!(
            error.contains("`a`") && error.contains("`b`") && error.contains("x.npy"),
            "{error}"
        );
    }

    #[test]
    fn only_a_file_with_content_is_finished() {
        let folder = tempfile::TempDir::new().unwrap();
        let output = &Destination::Folder(folder.path().to_path_buf()).outputs(Path::new("a.npy"), 1, false)[0];
        assert!(!output.is_finished());
        fs::create_dir(&output.path).unwrap();
        assert!(!output.is_finished());
        fs::remove_dir(&output.path).unwrap();
        fs::write(&output.path, "").unwrap();
        assert!(!output.is_finished());
        fs::write(&output.path, "x").unwrap();
        assert!(output.is_finished());
    }
}
