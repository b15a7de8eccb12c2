//! Which files the arguments name.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use glob::MatchOptions;
use vae_io::{Error, Result};

/// One input of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// `-`
    StandardInput,
    /// Any other.
    File(PathBuf),
}

/// What standard input is called on the command line.
const STANDARD_INPUT: &str = "-";

/// Extensions of the files that a folder gives. A file that is named itself may have any.
const EXTENSIONS: [&str; 7] = ["safetensors", "sft", "latent", "npy", "npz", "pt", "pth"];

/// As a shell expands patterns.
const PATTERN: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

impl Input {
    /// What messages call it.
    pub fn path(&self) -> &Path {
        match self {
            Self::StandardInput => Path::new("standard input"),
            Self::File(path) => path,
        }
    }

    /// What it was called on the command line.
    pub fn argument(&self) -> &Path {
        match self {
            Self::StandardInput => Path::new(STANDARD_INPUT),
            Self::File(path) => path,
        }
    }

    /// The name that pictures in a folder are made from.
    pub fn output_name(&self) -> &Path {
        match self {
            Self::StandardInput => Path::new("latents"),
            Self::File(path) => path,
        }
    }
}

/// The inputs that the arguments name, in their order; those of a folder or a pattern are sorted. A pattern means what it
/// means where a shell expands it.
///
/// # Errors
/// [`Error::Io`] for what does not exist or cannot be listed, [`Error::InvalidFile`] for folders without latents and
/// patterns that are malformed or match nothing.
pub fn expand(arguments: &[PathBuf]) -> Result<Vec<Input>> {
    let mut inputs = Vec::with_capacity(arguments.len());
    for argument in arguments {
        if argument == Path::new(STANDARD_INPUT) {
            inputs.push(Input::StandardInput);
            continue;
        }
        // A name with brackets may be a file's own.
        match (fs::metadata(argument), argument.to_str()) {
            (Err(error), Some(pattern)) if error.kind() == io::ErrorKind::NotFound && is_pattern(pattern) => {
                for path in matches(pattern)? {
                    expand_path(path, &mut inputs)?;
                }
            }
            (Err(error), _) => return Err(Error::io("open", argument)(error)),
            (Ok(_), _) => expand_path(argument.clone(), &mut inputs)?,
        }
    }
    Ok(inputs)
}

/// Whether an argument that is no file can name several.
pub fn is_pattern(argument: &str) -> bool {
    argument.contains(['*', '?', '['])
}

/// The paths that a pattern matches, sorted.
fn matches(pattern: &str) -> Result<Vec<PathBuf>> {
    let invalid = |reason: String| Error::invalid_file(Path::new(pattern), "name or pattern", reason);
    let paths = glob::glob_with(pattern, PATTERN).map_err(|error| invalid(error.to_string()))?;
    let paths: Vec<PathBuf> = paths
        .collect::<Result<_, _>>()
        .map_err(|error| Error::io("list", error.path())(error.error().kind().into()))?;
    if paths.is_empty() {
        return Err(invalid("it matches no file".to_string()));
    }
    Ok(paths)
}

/// A file as it is, a folder's files of latents.
fn expand_path(path: PathBuf, inputs: &mut Vec<Input>) -> Result<()> {
    if !path.is_dir() {
        inputs.push(Input::File(path));
        return Ok(());
    }
    let entries = fs::read_dir(&path)
        .and_then(Iterator::collect::<io::Result<Vec<_>>>)
        .map_err(Error::io("list", &path))?;
    let mut files: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
    files.retain(|file| is_latents(file) && !file.is_dir());
    if files.is_empty() {
        let extensions = EXTENSIONS.map(|extension| format!(".{extension}")).join(", ");
        let reason = format!("it has no files that end with {extensions}");
        return Err(Error::invalid_file(&path, "folder of latents", reason));
    }
    files.sort_unstable();
    inputs.extend(files.into_iter().map(Input::File));
    Ok(())
}

/// Whether the name is that of a file of latents, and not hidden.
fn is_latents(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    let extension = path.extension().unwrap_or_default();
    !name.as_encoded_bytes().starts_with(b".") && EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    fn folder(files: &[&str]) -> TempDir {
        let folder = TempDir::new().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        folder
    }

    /// The names of the inputs below `folder`.
    fn expanded(folder: &TempDir, arguments: &[&str]) -> Result<Vec<String>> {
        let arguments: Vec<_> = arguments.iter().map(|name| folder.path().join(name)).collect();
        let name = |input: Input| {
            let path = input.path().strip_prefix(folder.path()).unwrap();
            path.display().to_string()
        };
        Ok(expand(&arguments)?.into_iter().map(name).collect())
    }

    #[test]
    fn a_folder_gives_its_files_of_latents_sorted_and_nothing_below() {
        let files = [
            "b.npy",
            "a.PT",
            "c.png",
            ".hidden.npy",
            ".burn-vae-x.tmp",
            "notes.txt",
            "d/e.npy",
        ];
        let folder = folder(&files);
        assert_eq!(expanded(&folder, &["."]).unwrap(), ["a.PT", "b.npy"]);
        assert_eq!(expanded(&folder, &["d", "b.npy"]).unwrap(), ["d/e.npy", "b.npy"]);
    }

    #[test]
    fn a_pattern_means_what_it_means_to_a_shell() {
        let folder = folder(&["b/2.npy", "a/1.npy", "a/.0.npy", "a/x.png", "c/d/3.npy"]);
        assert_eq!(expanded(&folder, &["*/?.npy"]).unwrap(), ["a/1.npy", "b/2.npy"]);
        assert_eq!(expanded(&folder, &["[ab]"]).unwrap(), ["a/1.npy", "b/2.npy"]);
        assert_eq!(
            expanded(&folder, &["**/*.npy"]).unwrap(),
            ["a/1.npy", "b/2.npy", "c/d/3.npy"]
        );
        // A file that is named, if only by a pattern, is an input whatever its name.
        assert_eq!(expanded(&folder, &["a/*"]).unwrap(), ["a/1.npy", "a/x.png"]);
    }

    #[test]
    fn a_file_whose_name_is_a_pattern_is_that_file() {
        let folder = folder(&["a[1].npy", "a1.npy"]);
        assert_eq!(expanded(&folder, &["a[1].npy"]).unwrap(), ["a[1].npy"]);
    }

    #[test]
    fn what_names_nothing_is_refused() {
        let folder = folder(&["empty/x.png", "a.npy"]);
        for (argument, reason) in [
            ("empty", "no files that end with .safetensors"),
            ("*.pt", "it matches no file"),
            ("a***.npy", "wildcards"),
            ("b.npy", "cannot open"),
        ] {
            let error = expanded(&folder, &["a.npy", argument]).unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains(argument), "{error}");
        }
    }
}
