//! Memory-mapped files, and the header of safetensors files.

use std::{
    fs::{self, File},
    path::Path,
};

use memmap2::Mmap;
use safetensors::{Dtype, tensor::Metadata};

use crate::{DType, Error, Result};

/// Maps a regular file for reading; opening a pipe would wait for its writer.
pub(crate) fn map(path: &Path) -> Result<Mmap> {
    let metadata = fs::metadata(path).map_err(Error::io("open", path))?;
    if !metadata.is_file() {
        return Err(Error::invalid_file(path, "input", "it is not a regular file"));
    }
    let file = File::open(path).map_err(Error::io("open", path))?;
    // SAFETY: Rust's rules need bytes that do not change while they are borrowed, which no mapping of a file can
    // promise. As everyone who maps weights we rely on nobody writing to them, say so in `Checkpoint`'s documentation,
    // and treat the bytes as plain numbers: a change gives other numbers, never an invalid value.
    unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))
}

/// The header of a safetensors file, checked against the file, and the data after it; the error is the reason why not.
///
/// Afterwards every tensor's bytes are inside the data, disjoint, and as many as its shape and type say. The crate's own
/// `SafeTensors::read_metadata` (0.8.0) adds lengths of the header up unchecked, so only its [`Metadata`] is used.
pub(crate) fn safetensors_header(file: &[u8], max_header: usize) -> Result<(Metadata, &[u8]), String> {
    let (length, rest) = file
        .split_first_chunk()
        .ok_or_else(|| format!("it has only {} bytes", file.len()))?;
    let length = u64::from_le_bytes(*length);
    let split = usize::try_from(length)
        .ok()
        .and_then(|length| rest.split_at_checked(length));
    let (header, data) = split.ok_or_else(|| {
        let available = rest.len();
        format!("its header claims {length} bytes, the file has {available} after the header's length")
    })?;
    if header.len() > max_header {
        return Err(format!(
            "its header has {length} bytes, at most {max_header} are supported"
        ));
    }
    let metadata: Metadata = serde_json::from_slice(header).map_err(|e| format!("its header is malformed: {e}"))?;
    if metadata.data_len() != data.len() {
        let (expected, found) = (metadata.data_len(), data.len());
        return Err(format!(
            "its header describes {expected} bytes of tensors, the file has {found}"
        ));
    }
    Ok((metadata, data))
}

/// The floating-point types; `None` for integers, booleans and types below 16 bits.
pub(crate) fn float_dtype(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::BF16),
        Dtype::F32 => Some(DType::F32),
        Dtype::F64 => Some(DType::F64),
        _ => None,
    }
}
