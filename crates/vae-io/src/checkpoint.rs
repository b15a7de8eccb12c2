//! Checkpoints in the safetensors format: where they are, and their decoder's tensors under one set of names.

mod keys;
mod locate;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::TensorInfo;

use crate::mapped::{float_dtype, map, safetensors_header};
use crate::{DType, Error, Result};

/// The format's own limit.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// The decoder's tensors of a checkpoint, memory-mapped.
///
/// Keys are those of diffusers' decoders (`decoder.up_blocks.0.resnets.0.conv1.weight`, `post_quant_conv.weight`,
/// `bn.running_mean`), whichever style the files use: diffusers, its old attention names, LDM / Black Forest Labs, each
/// also inside a full checkpoint (`first_stage_model.`, `vae.`), even mixed. The encoder, other models and training
/// state are [`ignored`](Self::ignored).
///
/// Opening reads headers only; a tensor is read from disk when its bytes are. The files must not be changed meanwhile:
/// bytes may change under the reader, and reading past the end of a shortened file ends the process.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<PathBuf>,
    maps: Vec<Mmap>,
    config: Option<PathBuf>,
    tensors: BTreeMap<String, Place>,
    ignored: usize,
}

/// Where a tensor is.
#[derive(Debug)]
struct Place {
    file: usize,
    range: Range<usize>,
    dtype: DType,
    shape: Vec<usize>,
    source_key: String,
}

/// A tensor of a [`Checkpoint`].
#[derive(Debug, Clone, Copy)]
pub struct CheckpointTensor<'a> {
    /// The type it is stored in.
    pub dtype: DType,
    /// Attention matrices have two dimensions, also where the file stores them as 1x1 convolutions.
    pub shape: &'a [usize],
    /// Little-endian elements in row-major order, as many as `shape` and `dtype` say; of any alignment.
    pub bytes: &'a [u8],
    /// Its name in the file.
    pub source_key: &'a str,
}

impl CheckpointTensor<'_> {
    /// The elements as f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.bytes.len() / self.dtype.size());
        self.dtype.extend_f32(self.bytes, &mut values);
        values
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, the folder of a model, or the folder of a pipeline with the model in `vae/`.
    ///
    /// In a folder, the weights are `diffusion_pytorch_model.safetensors`, the shards of its index, or the only
    /// `.safetensors` file with a decoder.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]; [`Error::UnknownExtension`]; [`Error::InvalidFile`] for a broken file or index, for a folder
    /// without weights or with several, and for a checkpoint without a decoder, with two copies of a tensor, or with
    /// decoder tensors that are not f16, bf16, f32 or f64.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let locate::Located { files, config } = locate::locate(path)?;
        let maps = files.iter().map(|file| map(file)).collect::<Result<Vec<_>>>()?;
        let headers = files
            .iter()
            .zip(&maps)
            .map(|(file, map)| read_header(map, file))
            .collect::<Result<Vec<_>>>()?;

        let mut checkpoint = Self {
            path: path.to_owned(),
            files,
            maps,
            config,
            tensors: BTreeMap::new(),
            ignored: 0,
        };
        let names = headers
            .iter()
            .flat_map(|header| header.tensors.iter().map(|(name, _)| name.as_str()));
        let up_blocks = keys::count_up_blocks(names);
        for (file, header) in headers.into_iter().enumerate() {
            for (source_key, info) in header.tensors {
                match keys::canonical(&source_key, up_blocks) {
                    Some(key) => checkpoint.insert(key, file, header.data_start, source_key, info)?,
                    None => checkpoint.ignored += 1,
                }
            }
        }
        if checkpoint.tensors.is_empty() {
            let reason = format!("none of its {} tensors belongs to a decoder", checkpoint.ignored);
            return Err(Error::invalid_file(path, "VAE checkpoint", reason));
        }
        Ok(checkpoint)
    }

    /// A tensor by its canonical key.
    pub fn get(&self, key: &str) -> Option<CheckpointTensor<'_>> {
        let tensor = self.tensors.get(key)?;
        Some(CheckpointTensor {
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: &self.maps[tensor.file][tensor.range.clone()],
            source_key: &tensor.source_key,
        })
    }

    /// The canonical keys, sorted; among them those of tensors inside the decoder that no known model has.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// How many tensors are not the decoder's.
    pub fn ignored(&self) -> usize {
        self.ignored
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that hold the weights.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The `config.json` in the model's folder, or beside a single file if it is an AutoencoderKL's.
    pub fn config_path(&self) -> Option<PathBuf> {
        self.config.clone()
    }

    fn insert(&mut self, key: String, file: usize, start: usize, source_key: String, info: TensorInfo) -> Result<()> {
        let invalid = |reason: String| Error::invalid_file(&self.files[file], "VAE checkpoint", reason);
        let dtype = float_dtype(info.dtype).ok_or_else(|| {
            invalid(format!(
                "`{source_key}` is of type {}, supported: F16, BF16, F32, F64",
                info.dtype
            ))
        })?;
        let mut shape = info.shape;
        if keys::is_attention_matrix(&key) && matches!(shape.as_slice(), [_, _, 1, 1]) {
            shape.truncate(2);
        }
        match self.tensors.entry(key) {
            Entry::Occupied(other) => {
                let other = other.get();
                let elsewhere = if other.file == file {
                    String::new()
                } else {
                    format!(" of `{}`", self.files[other.file].display())
                };
                Err(invalid(format!(
                    "`{source_key}` and `{}`{elsewhere} are the same tensor",
                    other.source_key
                )))
            }
            Entry::Vacant(entry) => {
                let (from, to) = info.data_offsets;
                let range = start + from..start + to; // read_header has checked that the file has it
                entry.insert(Place {
                    file,
                    range,
                    dtype,
                    shape,
                    source_key,
                });
                Ok(())
            }
        }
    }
}

/// A validated header.
struct Header {
    data_start: usize,
    /// Sorted by name, so that errors do not depend on the order of a hash map.
    tensors: Vec<(String, TensorInfo)>,
}

fn read_header(file: &[u8], path: &Path) -> Result<Header> {
    let (metadata, data) = safetensors_header(file, MAX_HEADER_BYTES)
        .map_err(|reason| Error::invalid_file(path, "safetensors file", reason))?;
    let tensors = metadata.tensors().into_iter();
    let mut tensors: Vec<_> = tensors.map(|(name, info)| (name, info.clone())).collect();
    tensors.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(Header {
        data_start: file.len() - data.len(),
        tensors,
    })
}

/// Whether a file has any tensor of a decoder.
fn has_decoder(path: &Path) -> Result<bool> {
    let header = read_header(&map(path)?, path)?;
    let names = || header.tensors.iter().map(|(name, _)| name.as_str());
    let up_blocks = keys::count_up_blocks(names());
    Ok(names().any(|name| keys::canonical(name, up_blocks).is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(json: &str, data: usize) -> Result<Header> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        read_header(&bytes, Path::new("x.safetensors"))
    }

    fn reason(result: Result<Header>) -> String {
        match result {
            Err(Error::InvalidFile { reason, .. }) => reason,
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("accepted"),
        }
    }

    #[test]
    fn offsets_that_overlap_leave_holes_or_leave_the_file_are_refused() {
        let tensor = |name: &str, offsets: [usize; 2]| {
            format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":{offsets:?}}}"#)
        };
        let two = |a, b| format!("{{{},{}}}", tensor("a", a), tensor("b", b));
        assert_eq!(header(&two([0, 4], [4, 8]), 8).unwrap().tensors.len(), 2);
        for (a, b) in [
            ([0, 4], [2, 6]),
            ([0, 4], [6, 10]),
            ([4, 8], [8, 12]),
            ([0, 4], [8, 4]),
            ([0, 8], [8, 12]),
        ] {
            assert!(reason(header(&two(a, b), 8)).contains("header"), "{a:?} {b:?}");
        }
        assert_eq!(
            reason(header(&two([0, 4], [4, 8]), 7)),
            "its header describes 8 bytes of tensors, the file has 7"
        );
        assert_eq!(
            reason(header(&two([0, 4], [4, 8]), 9)),
            "its header describes 8 bytes of tensors, the file has 9"
        );
    }

    #[test]
    fn a_header_longer_than_the_file_is_refused_before_it_is_read() {
        for length in [3, 1000, u64::MAX, i64::MAX as u64] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend(b"{}");
            assert!(reason(read_header(&bytes, Path::new("x"))).contains("the file has 2 after"));
        }
    }

    #[test]
    fn sizes_whose_sum_overflows_do_not_panic() {
        // Nine tensors of the largest size that passes each on its own; their end is just under 2^64.
        let size = usize::MAX / 8;
        let mut tensors: Vec<_> = (0..8)
            .map(|i| {
                format!(
                    r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{},{}]}}"#,
                    i * size,
                    (i + 1) * size
                )
            })
            .collect();
        let end = 8 * size;
        tensors.push(format!(
            r#""t8":{{"dtype":"U8","shape":[7],"data_offsets":[{end},{}]}}"#,
            usize::MAX
        ));
        assert!(reason(header(&format!("{{{}}}", tensors.join(",")), 4)).contains("the file has 4"));
        let overflow = r#"{"t":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
        assert!(reason(header(overflow, 0)).contains("overflow"));
    }

    #[test]
    fn what_is_not_a_header_is_refused() {
        for json in [
            "",
            "[]",
            "{",
            "{\"a\": 1}",
            "null",
            r#"{"a":{"dtype":"F3","shape":[],"data_offsets":[0,4]}}"#,
        ] {
            assert!(reason(header(json, 4)).contains("header"), "{json}");
        }
    }
}
