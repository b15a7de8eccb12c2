//! Which files a run writes, settled before anything is decoded.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use vae_io::{Error, OutputFormat, Result};

/// What `-o` says.
#[derive(Debug)]
pub enum Destination {
    /// One file of this format.
    File(PathBuf, OutputFormat),
    /// A folder that takes `{stem}.png` of each input.
    Folder(PathBuf),
}

/// The files that one input becomes.
#[derive(Debug, PartialEq, Eq)]
pub enum Target {
    /// A picture for each image of the batch.
    Pictures(Vec<PathBuf>),
    /// One raw file for the whole batch.
    Raw(PathBuf),
}

impl Target {
    /// All files of this target.
    pub fn paths(&self) -> &[PathBuf] {
        match self {
            Self::Pictures(paths) => paths,
            Self::Raw(path) => std::slice::from_ref(path),
        }
    }

    /// Refuses images that the format has no room for.
    ///
    /// # Errors
    /// [`Error::ImageTooLarge`]
    pub fn check_size(&self, width: usize, height: usize) -> Result<()> {
        self.paths()
            .iter()
            .try_for_each(|path| OutputFormat::from_path(path)?.check_size(path, width, height))
    }

    /// The file that image `index` of the batch goes to.
    pub fn path_of(&self, index: usize) -> &Path {
        match self {
            Self::Pictures(paths) => &paths[index],
            Self::Raw(path) => path,
        }
    }
}

impl Destination {
    /// Tells a file from a folder: a folder exists, ends with a separator, or is what several inputs need.
    ///
    /// # Errors
    /// [`Error::UnknownExtension`] for a file of no known format.
    pub fn parse(output: Option<&Path>, inputs: usize) -> Result<Self> {
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
            Err(_) if output.is_dir() || (inputs > 1 && output.extension().is_none()) => Ok(folder()),
            Err(error) => Err(error),
        }
    }

    /// The files that an input with a batch of `batch` images becomes, in a folder named after the input.
    pub fn target(&self, input: &Path, batch: usize) -> Target {
        let (folder, stem, extension) = match self {
            Self::File(path, format) if format.holds_batch() => return Target::Raw(path.clone()),
            Self::File(path, _) if batch == 1 => return Target::Pictures(vec![path.clone()]),
            Self::File(path, _) => (
                path.parent().unwrap_or(Path::new("")),
                path.file_stem(),
                path.extension(),
            ),
            Self::Folder(folder) => (folder.as_path(), input.file_stem(), Some("png".as_ref())),
        };
        let name = |index: Option<usize>| {
            // Not through a string: names need not be UTF-8.
            let mut name = stem.unwrap_or_default().to_os_string();
            if let Some(index) = index {
                name.push(format!("_{index}"));
            }
            name.push(".");
            name.push(extension.unwrap_or_default());
            folder.join(name)
        };
        Target::Pictures(match batch {
            1 => vec![name(None)],
            _ => (0..batch).map(|index| name(Some(index))).collect(),
        })
    }
}

/// Refuses what would fail only after decoding: targets that exist (unless `force`), that two inputs share, that this
/// run reads, or whose folder is missing or cannot be written to. The folder of `-o` itself is made.
///
/// # Errors
/// [`Error::OutputCollision`], [`Error::OutputIsInput`], [`Error::Io`] and those of [`OutputFormat::check`].
pub fn check(destination: &Destination, targets: &[(&Path, &Target)], read: &[PathBuf], force: bool) -> Result<()> {
    let read: Vec<PathBuf> = read.iter().filter_map(|path| path.canonicalize().ok()).collect();
    let mut written_by = BTreeMap::new();
    for &(input, target) in targets {
        for path in target.paths() {
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
    }
    if let Destination::Folder(folder) = destination
        && !folder.as_os_str().is_empty()
    {
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    }
    let mut paths = targets.iter().flat_map(|(_, target)| target.paths());
    paths.try_for_each(|path| OutputFormat::check(path, force).map(|_| ()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(output: Option<&str>, batch: usize) -> Vec<String> {
        let destination = Destination::parse(output.map(Path::new), 1).unwrap();
        let target = destination.target(Path::new("in/cat.v1.safetensors"), batch);
        target.paths().iter().map(|path| path.display().to_string()).collect()
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
        let target = Target::Raw("x.npy".into());
        let same = [(Path::new("a"), &target), (Path::new("b"), &target)];
        let error = check(&Destination::Folder(PathBuf::new()), &same, &[], true)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`a`") && error.contains("`b`") && error.contains("x.npy"),
            "{error}"
        );
    }
}
