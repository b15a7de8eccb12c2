use std::path::{Path, PathBuf};

use crate::DType;

/// Everything that can go wrong between a file of latents and a picture.
///
/// The text of each variant is one sentence that says what is wrong and how to get out of it; command-line flags are
/// named where one helps, and library users find the option of the same name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "a variant's text says what its fields are")]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// What was tried: "open", "read", "create", ...
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },

    /// A file is not what its extension or header says.
    #[error("`{}` is not a valid {kind}: {reason}", path.display())]
    InvalidFile {
        path: PathBuf,
        /// "safetensors file", ".npy file", "config", ...
        kind: &'static str,
        reason: String,
    },

    /// A file's extension names a format that cannot be read or written.
    #[error("`{}` has an unknown extension; supported: {supported}", path.display())]
    UnknownExtension { path: PathBuf, supported: &'static str },

    /// An output exists and overwriting was not asked for.
    #[error("`{}` exists; pass --force to overwrite it, --resume to keep it, or -o for another name", path.display())]
    OutputExists { path: PathBuf },

    /// Nothing says which model family weights or latents belong to.
    #[error("the model family is unknown: {reason}; pass --config FILE or --family {{{candidates}}}")]
    UnknownFamily { reason: String, candidates: String },

    /// An output would replace a file that the same run reads.
    #[error("`{}` is an input of this run; pass another -o", path.display())]
    OutputIsInput { path: PathBuf },

    /// A picture format does not go that far.
    #[error("`{}` cannot hold an image of {width}x{height}: {format} ends at {limit} pixels a side; write a .png", path.display())]
    ImageTooLarge {
        path: PathBuf,
        format: &'static str,
        width: usize,
        height: usize,
        limit: usize,
    },

    /// Two inputs would be written to one file.
    #[error("`{}` and `{}` would both be written to `{}`; leave one out, or decode them in two runs", inputs[0].display(), inputs[1].display(), path.display())]
    OutputCollision { path: PathBuf, inputs: [PathBuf; 2] },

    /// A config names something that is not implemented; it is refused, never approximated.
    #[error("unsupported config: {field} is {value}, supported: {supported}")]
    UnsupportedConfig {
        field: &'static str,
        value: String,
        supported: String,
    },

    /// The latents can be read in more than one way.
    #[error("latents of shape {shape:?} can be {}; pass {flag}", candidates.join(" or "))]
    AmbiguousLatents {
        shape: Vec<usize>,
        candidates: Vec<String>,
        flag: &'static str,
    },

    /// The latents do not fit the model or the options given.
    #[error("latents of shape {shape:?} cannot be decoded: {reason}")]
    InvalidLatents { shape: Vec<usize>, reason: String },

    /// The decoder's weights do not match the checkpoint. The text names the first few of each kind, the fields hold all.
    #[error(
        "the checkpoint does not fit the model: {}",
        list_differences(missing, unexpected, mismatched)
    )]
    WeightsMismatch {
        /// Parameters of the decoder that the checkpoint lacks.
        missing: Vec<String>,
        /// Decoder tensors of the checkpoint that the model has no place for.
        unexpected: Vec<String>,
        /// Tensors whose shape is not the parameter's.
        mismatched: Vec<ShapeMismatch>,
    },

    /// Values that are NaN or infinite.
    #[error("{stage} contains {count} non-finite values (NaN or Inf) of {total}{hint}")]
    NonFinite {
        /// Where they were found: "`x.safetensors`", "decoder.up_blocks.2", ...
        stage: String,
        count: usize,
        total: usize,
        /// Empty, or the way out with its leading separator ("; pass --dtype f32").
        hint: &'static str,
    },

    /// Images that are not of one shape cannot be compared.
    #[error("images of shapes {a:?} and {b:?} cannot be compared; pass images of the same size")]
    ImagesDiffer { a: [usize; 4], b: [usize; 4] },

    /// The asked quality cannot run on this device, dtype or model.
    #[error("quality {quality} is not available: {}", reasons.join("; "))]
    QualityUnavailable {
        quality: &'static str,
        reasons: Vec<String>,
    },

    /// The device is not built in, not present, or does not exist.
    #[error("device {device} is not available: {reason}")]
    DeviceUnavailable { device: String, reason: String },

    /// The device cannot compute in this type.
    #[error("device {device} does not support {dtype}; pass --dtype {supported}")]
    UnsupportedDType {
        device: String,
        dtype: DType,
        supported: &'static str,
    },

    /// A decode would need more memory than there is, or than was allowed. Nothing has run.
    #[error("{decode} would take {needed} of {memory} and {available}; {suggestion}")]
    OutOfMemory {
        /// Its size and how it is cut.
        decode: String,
        /// "1955 MiB", or what else there is too much of.
        needed: String,
        /// Whose memory.
        memory: String,
        /// "1024 MiB are allowed", "... are there".
        available: String,
        /// The way out.
        suggestion: String,
    },

    /// Whoever asked for the decode ended it.
    #[error("the decode was cancelled")]
    Cancelled,

    /// The device failed while it was computing.
    #[error("device {device} failed: {reason}")]
    DeviceFailed { device: String, reason: String },
}

/// A tensor of a checkpoint whose shape is not the model's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeMismatch {
    /// The tensor, in diffusers' spelling.
    pub key: String,
    /// The shape in the model, as PyTorch has it.
    pub expected: Vec<usize>,
    /// The shape in the checkpoint.
    pub found: Vec<usize>,
}

impl Error {
    /// An [`Error::Io`] for `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    }

    /// An [`Error::InvalidFile`].
    pub fn invalid_file(path: &Path, kind: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidFile {
            path: path.to_path_buf(),
            kind,
            reason: reason.into(),
        }
    }

    /// An [`Error::InvalidLatents`].
    pub fn invalid_latents(shape: &[usize], reason: impl Into<String>) -> Self {
        Self::InvalidLatents {
            shape: shape.to_vec(),
            reason: reason.into(),
        }
    }
}

/// Names at most this many tensors of each kind; a wrong family differs in hundreds.
const LISTED: usize = 8;

fn list_differences(missing: &[String], unexpected: &[String], mismatched: &[ShapeMismatch]) -> String {
    let list = |what: &str, names: Vec<String>| {
        let more = names.len().saturating_sub(LISTED);
        let shown = names[..names.len() - more].join(", ");
        let more = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        format!("{} {what} ({shown}{more})", names.len())
    };
    let mut parts = Vec::new();
    if !missing.is_empty() {
        parts.push(list("missing", missing.to_vec()));
    }
    if !mismatched.is_empty() {
        let names = mismatched
            .iter()
            .map(|m| format!("{}: expected {:?}, found {:?}", m.key, m.expected, m.found));
        parts.push(list("of another shape", names.collect()));
    }
    if !unexpected.is_empty() {
        parts.push(list("unexpected", unexpected.to_vec()));
    }
    format!(
        "{}; check that the file is complete and that the config is its own",
        parts.join(", ")
    )
}
