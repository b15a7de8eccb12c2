//! PyTorch's `.pt` files as far as tensors go: what `torch.save` writes since 1.6 of a tensor, or of a dict with tensors.
//!
//! The file is a zip archive that stores `ROOT/data.pkl`, a pickle that describes the tensors, and `ROOT/data/KEY`, the
//! bytes of each storage. The pickle is not run: see [`pickle`].

mod pickle;

use std::rc::Rc;

use self::pickle::{Saved, Tensor};
use crate::DType;
use crate::archive::{Archive, MAX_EXPANSION};
use crate::strided::row_major;

/// Bytes of a pickle. It takes about 150 for a tensor, and reading it up to 112 times its size.
const MAX_PICKLE: usize = 256 << 10;

/// A `.pt` file in memory whose pickle is read and whose tensors are not.
pub(crate) struct File<'a> {
    archive: Archive<'a>,
    root: String,
    saved: Saved<'a>,
}

impl<'a> File<'a> {
    /// Reads the pickle under a [`root`]; the error is the reason why it is none of a tensor, or of a dict.
    pub fn open(mut archive: Archive<'a>, root: &str) -> Result<Self, String> {
        if let Some(order) = archive.stored(&format!("{root}byteorder"))?
            && order.trim_ascii() != b"little"
        {
            return Err(format!(
                "its byte order is '{}', only little is supported",
                order.escape_ascii()
            ));
        }
        let pickle = archive.stored(&format!("{root}data.pkl"))?.unwrap_or_default();
        if pickle.len() > MAX_PICKLE {
            return Err(format!(
                "its pickle has {} bytes, at most {MAX_PICKLE} are supported; save the tensor of latents alone",
                pickle.len()
            ));
        }
        let saved = pickle::read(pickle).map_err(|e| format!("its pickle {e}"))?;
        let root = root.to_owned();
        Ok(Self { archive, root, saved })
    }

    /// The names of a dict's tensors; `None` for a tensor that is saved without one.
    pub fn names(&self) -> Option<Vec<String>> {
        match &self.saved {
            Saved::Tensor(_) => None,
            Saved::Dict(tensors) => Some(tensors.keys().map(|name| name.to_string()).collect()),
        }
    }

    /// The shape of the tensor of this name, or of the one that has none.
    pub fn shape(&self, name: Option<&str>) -> Result<&[usize], String> {
        Ok(&self.tensor(name)?.shape)
    }

    /// The type that its values are stored in.
    pub fn dtype(&self, name: Option<&str>) -> Result<DType, String> {
        match self.tensor(name)?.storage.class {
            "HalfStorage" => Ok(DType::F16),
            "BFloat16Storage" => Ok(DType::BF16),
            "FloatStorage" => Ok(DType::F32),
            "DoubleStorage" => Ok(DType::F64),
            class => Err(format!(
                "its values are of torch.{class}; latents must be floating point: float16, bfloat16, float32 or float64"
            )),
        }
    }

    /// Its values in row-major order.
    pub fn values(&mut self, name: Option<&str>) -> Result<Vec<f32>, String> {
        let dtype = self.dtype(name)?;
        let tensor = Rc::clone(self.tensor(name)?);
        let (storage, offset, shape) = (tensor.storage, tensor.offset, &tensor.shape);
        let member = format!("{}data/{}", self.root, storage.key);
        let bytes = self
            .archive
            .stored(&member)?
            .ok_or_else(|| format!("it has no member `{member}`"))?;
        if storage.elements.checked_mul(dtype.size()) != Some(bytes.len()) {
            let (expected, found) = (storage.elements, bytes.len());
            return Err(format!(
                "its member `{member}` should hold {expected} {dtype} and has {found} bytes"
            ));
        }

        let outside = || format!("its tensor goes past the {} values that are stored", storage.elements);
        let count = shape
            .iter()
            .try_fold(1usize, |count, &size| count.checked_mul(size))
            .ok_or_else(outside)?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let steps = shape.iter().zip(&tensor.strides);
        let last = steps
            .map(|(size, stride)| (size - 1).checked_mul(*stride))
            .try_fold(offset, |last, step| last.checked_add(step?));
        let last = last.filter(|&last| last < storage.elements).ok_or_else(outside)?;
        if count > storage.elements.saturating_mul(MAX_EXPANSION) {
            return Err(format!(
                "its tensor repeats {} values {} times; save it as it is, without expand",
                storage.elements,
                count / storage.elements
            ));
        }
        let mut values = Vec::with_capacity(last - offset + 1);
        dtype.extend_f32(&bytes[offset * dtype.size()..(last + 1) * dtype.size()], &mut values);
        Ok(row_major(values, shape, &tensor.strides))
    }

    fn tensor(&self, name: Option<&str>) -> Result<&Rc<Tensor<'a>>, String> {
        match (&self.saved, name) {
            (Saved::Tensor(tensor), None) => Ok(tensor),
            (Saved::Dict(tensors), Some(name)) if let Some(tensor) = tensors.get(name) => Ok(tensor),
            _ => Err("it has no such tensor".to_owned()),
        }
    }
}

/// Where an archive with these members holds a pickle, if it does: the folder with its slash, which is the file's name when
/// it was saved, "archive/" or nothing.
pub(crate) fn root(members: &[String]) -> Option<&str> {
    let roots = members.iter().filter_map(|name| name.strip_suffix("data.pkl"));
    roots
        .filter(|root| root.is_empty() || root.ends_with('/'))
        .min_by_key(|root| root.len())
}
