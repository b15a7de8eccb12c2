use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use super::{LatentSpace, LatentsHint};
use crate::archive::Archive;
use crate::mapped::{float_dtype, map, safetensors_header};
use crate::{DType, Error, Result, npy, torch};

/// Latents of a file, widened to f32.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentFile {
    /// Where they were read from.
    pub path: PathBuf,
    /// `[B, C, h, w]`, `[C, h, w]` or `[B, L, C]`, no dimension zero; `[B, C, 1, h, w]` is squeezed to four dimensions.
    pub shape: Vec<usize>,
    /// The values in row-major order, all of them finite.
    pub values: Vec<f32>,
    /// The type they are stored in.
    pub dtype: DType,
    /// What else the file says.
    pub hint: LatentsHint,
}

/// What a file of latents says before its values are read.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentHeader {
    /// Where it was read from.
    pub path: PathBuf,
    /// As [`LatentFile::shape`].
    pub shape: Vec<usize>,
    /// What else the file says.
    pub hint: LatentsHint,
}

impl LatentHeader {
    /// Reads as much of a file as [`LatentFile::read_tensor`] needs to know where its values are, which touches little more
    /// than the header: only the member of an .npz is unpacked.
    ///
    /// # Errors
    ///
    /// Those of [`LatentFile::read_tensor`], but for what only the values tell: that some are not finite, or that those of
    /// a .pt are missing.
    pub fn read(path: impl AsRef<Path>, tensor: Option<&str>) -> Result<Self> {
        let path = path.as_ref();
        let Stored { shape, hint, .. } = parse(&map(path)?, path, tensor, Extent::Header)?;
        let path = path.to_path_buf();
        Ok(Self { path, shape, hint })
    }
}

impl LatentFile {
    /// What [`LatentHeader::read`] reads of the same file.
    pub fn header(&self) -> LatentHeader {
        LatentHeader {
            path: self.path.clone(),
            shape: self.shape.clone(),
            hint: self.hint,
        }
    }

    /// Reads a file's only tensor, or the one of several that is called `latents` or `latent_tensor`.
    ///
    /// The format is told by the file's content, not by its name:
    ///
    /// - safetensors, and ComfyUI's `.latent`, which is one with a marker. Where the marker is missing, the extension
    ///   `.latent` says that the file is an old one of ComfyUI's.
    /// - NumPy's `.npy` (C or Fortran order, either byte order), and `.npz` with such arrays, stored or deflated.
    /// - PyTorch's `.pt`: a tensor or a dict with tensors, as `torch.save` writes them since version 1.6. The pickle is
    ///   read and not run.
    ///
    /// Memory: the file is mapped, and the values take 4 bytes each; Fortran or big-endian order and views with other
    /// strides take as much again for a moment, and a member of an .npz its unpacked bytes, at most 16 times (and 64 KiB
    /// more than) what it takes in the file.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::InvalidFile`] for other and malformed files, files without a clear tensor of latents and
    /// types that are not floating point, [`Error::InvalidLatents`] for shapes that are no latents of images,
    /// [`Error::NonFinite`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        Self::read_tensor(path, None)
    }

    /// Reads the tensor of this name, for files that hold several; `None` is [`LatentFile::read`].
    ///
    /// # Errors
    ///
    /// Those of [`LatentFile::read`]; [`Error::InvalidFile`] lists the names that are there if this one is not, or if the
    /// file's only tensor has no name.
    pub fn read_tensor(path: impl AsRef<Path>, tensor: Option<&str>) -> Result<Self> {
        let path = path.as_ref();
        Self::parse(&map(path)?, path, tensor)
    }

    /// Reads a stream to its end, as [`LatentFile::read_tensor`] reads a file; errors call it `name`, which becomes `path`.
    ///
    /// A stream that does not start as latents do is not read further.
    ///
    /// # Errors
    ///
    /// Those of [`LatentFile::read_tensor`].
    pub fn read_stream(mut stream: impl Read, name: impl AsRef<Path>, tensor: Option<&str>) -> Result<Self> {
        let name = name.as_ref();
        let mut bytes = Vec::new();
        let start = (&mut stream).take(Format::MAGIC_BYTES as u64).read_to_end(&mut bytes);
        start.map_err(Error::io("read", name))?;
        Format::of(&bytes).map_err(|reason| Error::invalid_file(name, FILE, reason))?;
        stream.read_to_end(&mut bytes).map_err(Error::io("read", name))?;
        Self::parse(&bytes, name, tensor)
    }

    fn parse(bytes: &[u8], path: &Path, tensor: Option<&str>) -> Result<Self> {
        let Stored {
            shape,
            dtype,
            values,
            hint,
        } = parse(bytes, path, tensor, Extent::Values)?;
        match values.iter().filter(|v| !v.is_finite()).count() {
            0 => Ok(Self {
                path: path.to_path_buf(),
                shape,
                values,
                dtype,
                hint,
            }),
            count => Err(Error::NonFinite {
                stage: format!("latents `{}`", path.display()),
                count,
                total: values.len(),
                hint: "",
            }),
        }
    }
}

/// How far a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// [`Stored::values`] stay empty.
    Header,
    Values,
}

fn parse(bytes: &[u8], path: &Path, tensor: Option<&str>, extent: Extent) -> Result<Stored> {
    let format = Format::of(bytes).map_err(|reason| Error::invalid_file(path, FILE, reason))?;
    match format {
        Format::Safetensors => {
            // Nothing in the file says so of ComfyUI's old ones.
            let is_latent = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("latent"));
            read_safetensors(bytes, tensor, is_latent, extent)
        }
        Format::Npy => read_npy(bytes, tensor, extent),
        Format::Zip => read_zip(bytes, tensor, extent),
    }
    .map_err(|fault| match fault {
        Fault::File(kind, reason) => Error::invalid_file(path, kind, reason),
        Fault::Shape(error) => error,
    })
}

/// What a file is to be that is none.
const FILE: &str = "file of latents";

#[derive(Debug, Clone, Copy)]
enum Format {
    Safetensors,
    Npy,
    /// .npz or .pt
    Zip,
}

impl Format {
    /// As many as [`Format::of`] looks at.
    const MAGIC_BYTES: usize = 9;

    /// The format of a file that starts with these bytes; the error is the reason why it has none.
    fn of(bytes: &[u8]) -> Result<Self, String> {
        match bytes {
            [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => Ok(Self::Npy),
            [b'P', b'K', 3, 4, ..] => Ok(Self::Zip),
            // The header's length and the header, which is an object of JSON.
            [_, _, _, _, _, _, _, _, b'{', ..] => Ok(Self::Safetensors),
            [] => Err("it is empty".to_owned()),
            // A pickle that is not in an archive.
            [0x80, 2..=5, ..] => Err(
                "it is a bare pickle, as PyTorch wrote before 1.6; load it and save it again with torch.save"
                    .to_owned(),
            ),
            _ => Err("it is none of .safetensors, ComfyUI's .latent, .npy, .npz and PyTorch's .pt".to_owned()),
        }
    }
}

/// What a file holds, whatever its format.
struct Stored {
    shape: Vec<usize>,
    dtype: DType,
    /// Empty after [`Extent::Header`].
    values: Vec<f32>,
    hint: LatentsHint,
}

/// Why a file holds no latents, until its path is known.
enum Fault {
    /// What the file should be, and why it is not.
    File(&'static str, String),
    Shape(Error),
}

/// The [`Fault`] of a file that should be of this kind.
fn fault<E: fmt::Display>(kind: &'static str) -> impl Fn(E) -> Fault {
    move |reason| Fault::File(kind, reason.to_string())
}

/// ComfyUI's `SaveLatent` writes a safetensors file with `latent_tensor` and an empty tensor as a marker. Its values are
/// what a sampler node hands to "VAE Decode": in VAE space, except for FLUX.2, whose 128 channels stay batch-norm
/// normalised. `LoadLatent` takes files without the marker for older ones, which were scaled by SD 1's factor.
mod comfyui {
    pub const TENSOR: &str = "latent_tensor";
    pub const MARKER: &str = "latent_format_version_0";
    /// PyTorch rounds the quotient to f32 before it multiplies f32 values.
    pub const UNVERSIONED: f32 = (1.0f64 / 0.18215) as f32;
    pub const FLUX2_CHANNELS: usize = 128;
}

/// Bytes of the header of a file of latents. Parsing takes several times its size.
const MAX_HEADER: usize = 16 << 20;

/// `is_latent`: the extension says that the file is ComfyUI's; otherwise its marker does.
fn read_safetensors(bytes: &[u8], tensor: Option<&str>, is_latent: bool, extent: Extent) -> Result<Stored, Fault> {
    let invalid = fault("safetensors file of latents");
    let (metadata, data) = safetensors_header(bytes, MAX_HEADER).map_err(&invalid)?;
    let mut names = metadata.offset_keys();
    names.retain(|name| name != comfyui::MARKER);
    let name = match tensor {
        None if is_latent && !names.iter().any(|name| name == comfyui::TENSOR) => {
            let found = listed(&names);
            return Err(invalid(format!(
                "a ComfyUI .latent has a tensor `latent_tensor`, it has: {found}"
            )));
        }
        None if is_latent => comfyui::TENSOR,
        _ => choose(&names, tensor).map_err(&invalid)?,
    };
    let info = metadata
        .info(name)
        .ok_or_else(|| invalid(format!("it has no `{name}`")))?;
    let dtype = float_dtype(info.dtype).ok_or_else(|| {
        let found = info.dtype;
        invalid(format!(
            "`{name}` is {found:?}; latents must be floating point: F16, BF16, F32 or F64"
        ))
    })?;
    let shape = image_shape(&info.shape)?;
    let mut values = Vec::new();
    if extent == Extent::Values {
        let (start, end) = info.data_offsets;
        values.reserve_exact((end - start) / dtype.size());
        dtype.extend_f32(&data[start..end], &mut values);
    }

    let pixels = |key| {
        let value = metadata.metadata().as_ref()?.get(key)?;
        value.trim().parse().ok().filter(|&pixels: &usize| pixels > 0)
    };
    let mut hint = LatentsHint {
        height: pixels("height"),
        width: pixels("width"),
        space: None,
    };
    let has_marker = metadata.info(comfyui::MARKER).is_some();
    if name == comfyui::TENSOR && (is_latent || has_marker) {
        if !has_marker {
            values.iter_mut().for_each(|v| *v *= comfyui::UNVERSIONED);
        }
        let is_flux2 = shape[shape.len() - 3] == comfyui::FLUX2_CHANNELS;
        hint.space = Some(if is_flux2 {
            LatentSpace::Diffusion
        } else {
            LatentSpace::Vae
        });
    }
    Ok(Stored {
        shape,
        dtype,
        values,
        hint,
    })
}

fn read_npy(bytes: &[u8], tensor: Option<&str>, extent: Extent) -> Result<Stored, Fault> {
    let invalid = fault(".npy file of latents");
    nameless(tensor).map_err(&invalid)?;
    stored_array(npy::Array::parse(bytes).map_err(invalid)?, extent)
}

fn stored_array(array: npy::Array<'_>, extent: Extent) -> Result<Stored, Fault> {
    Ok(Stored {
        shape: image_shape(&array.shape)?,
        dtype: array.dtype,
        values: match extent {
            Extent::Header => Vec::new(),
            Extent::Values => array.values(),
        },
        hint: LatentsHint::default(),
    })
}

/// An archive of .npy files, or PyTorch's.
fn read_zip(bytes: &[u8], tensor: Option<&str>, extent: Extent) -> Result<Stored, Fault> {
    const ARRAY: &str = ".npy";
    let archive = Archive::open(bytes).map_err(fault(FILE))?;
    let members = archive.names().map_err(fault(FILE))?;
    if let Some(root) = torch::root(&members) {
        return read_torch(archive, root, tensor, extent);
    }
    let names: Vec<_> = members.iter().filter_map(|name| name.strip_suffix(ARRAY)).collect();
    if names.is_empty() {
        let found = listed(&members);
        return Err(fault(FILE)(format!(
            "it is a zip archive without .npy arrays or PyTorch's data.pkl; it has: {found}"
        )));
    }
    let invalid = fault(".npz file of latents");
    let name = choose(&names, tensor).map_err(&invalid)?;
    let mut archive = archive;
    let array = archive.unpacked(&format!("{name}{ARRAY}")).map_err(&invalid)?;
    let array = npy::Array::parse(&array).map_err(|e| invalid(format!("`{name}`: {e}")))?;
    stored_array(array, extent)
}

fn read_torch(archive: Archive<'_>, root: &str, tensor: Option<&str>, extent: Extent) -> Result<Stored, Fault> {
    let invalid = fault("PyTorch file of latents");
    let mut file = torch::File::open(archive, root).map_err(&invalid)?;
    let names = file.names();
    let name = match &names {
        None => nameless(tensor).map(|()| None),
        Some(names) => choose(names, tensor).map(Some),
    };
    let name = name.map_err(&invalid)?;
    let shape = image_shape(file.shape(name).map_err(&invalid)?)?;
    let dtype = file.dtype(name).map_err(&invalid)?;
    let values = match extent {
        Extent::Header => Vec::new(),
        Extent::Values => file.values(name).map_err(invalid)?,
    };
    Ok(Stored {
        shape,
        dtype,
        values,
        hint: LatentsHint::default(),
    })
}

/// The name of the tensor that holds the latents: the one asked for, the only one, or the one that is called so.
fn choose<'n, S: AsRef<str>>(names: &'n [S], tensor: Option<&str>) -> Result<&'n str, String> {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let is_known = |name: &&str| tensor.map_or(["latents", comfyui::TENSOR].contains(name), |tensor| *name == tensor);
    let known: Vec<&str> = names.iter().copied().filter(is_known).collect();
    match (names.as_slice(), known.as_slice(), tensor) {
        ([], ..) => Err("it has no tensors".to_owned()),
        (_, [name], _) | ([name], _, None) => Ok(name),
        (_, _, Some(tensor)) => Err(format!("it has no tensor `{tensor}`; it has: {}", listed(&names))),
        (names, _, None) => {
            let count = names.len();
            Err(format!(
                "it has {count} tensors and not one called `latents`; pass --tensor with one of: {}",
                listed(names)
            ))
        }
    }
}

fn nameless(tensor: Option<&str>) -> Result<(), String> {
    match tensor {
        None => Ok(()),
        Some(tensor) => Err(format!(
            "it has one tensor without a name, and no `{tensor}`; leave out --tensor"
        )),
    }
}

/// The first few names, in order.
fn listed<S: AsRef<str>>(names: &[S]) -> String {
    let mut names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    names.sort_unstable();
    let more = names.len().saturating_sub(8);
    let shown = names[..names.len() - more].join(", ");
    if more > 0 {
        format!("{shown} and {more} more")
    } else {
        shown
    }
}

/// `[B, C, 1, h, w]` as `[B, C, h, w]`, other shapes of latents as they are.
fn image_shape(shape: &[usize]) -> Result<Vec<usize>, Fault> {
    let invalid = |reason: &str| Err(Fault::Shape(Error::invalid_latents(shape, reason)));
    if shape.contains(&0) {
        return invalid("a dimension is zero");
    }
    match *shape {
        [_, _, _] | [_, _, _, _] => Ok(shape.to_vec()),
        [b, c, 1, h, w] => Ok(vec![b, c, h, w]),
        [_, _, frames, _, _] => invalid(&format!(
            "they are video latents of {frames} frames; only images ([B, C, 1, h, w]) are supported"
        )),
        _ => invalid("supported: maps [B, C, h, w], [C, h, w], [B, C, 1, h, w] and packed tokens [B, L, C]"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use tempfile::TempDir;

    use super::*;
    use crate::archive::tests::zipped;

    /// Writes `bytes` under `name` and reads it.
    fn read(name: &str, bytes: &[u8]) -> Result<LatentFile> {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        LatentFile::read(&path)
    }

    fn message(name: &str, bytes: &[u8]) -> String {
        read(name, bytes).expect_err("an invalid file").to_string()
    }

    /// A safetensors file of these tensors (name, type, shape), filled with the bytes of f32 0.5.
    fn safetensors(tensors: &[(&str, Dtype, &[usize])], metadata: &[(&str, &str)]) -> Vec<u8> {
        let data: Vec<u8> = 0.5f32.to_le_bytes().repeat(4096);
        let views = tensors.iter().map(|&(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape.to_vec(), &data[..bytes]).unwrap())
        });
        let metadata = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        safetensors::serialize(views, Some(metadata)).unwrap()
    }

    fn with_header(length: u64, header: &str, data: &[u8]) -> Vec<u8> {
        [&length.to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
        let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}");
        let length = (dict.len() as u16).to_le_bytes();
        [b"\x93NUMPY\x01\x00", &length[..], dict.as_bytes(), data].concat()
    }

    const SHAPE: &[usize] = &[1, 4, 2, 3];

    #[test]
    fn a_single_tensor_is_read_whatever_its_name() {
        let file = safetensors(&[("x", Dtype::F32, SHAPE)], &[("height", "16"), ("width", "24")]);
        for name in ["a.safetensors", "a.sft", "a.SafeTensors"] {
            let latents = read(name, &file).unwrap();
            assert_eq!(latents.shape, SHAPE);
            assert_eq!(latents.values, [0.5; 24]);
            assert_eq!(latents.dtype, DType::F32);
            let hint = LatentsHint {
                height: Some(16),
                width: Some(24),
                space: None,
            };
            assert_eq!(latents.hint, hint);
        }
    }

    #[test]
    fn metadata_that_is_no_size_is_no_hint() {
        let file = safetensors(&[("x", Dtype::F32, SHAPE)], &[("height", "-16"), ("width", "0")]);
        assert_eq!(read("a.safetensors", &file).unwrap().hint, LatentsHint::default());
    }

    #[test]
    fn of_several_tensors_the_one_of_latents_is_read_and_others_are_named() {
        let of = |names: &[&str]| {
            let tensors: Vec<_> = names.iter().map(|&n| (n, Dtype::F32, SHAPE)).collect();
            read("a.safetensors", &safetensors(&tensors, &[]))
        };
        assert!(of(&["latents", "noise"]).is_ok());
        assert!(of(&["latent_tensor", "noise"]).is_ok());
        for names in [&["noise", "image"][..], &["latents", "latent_tensor"]] {
            let message = of(names).unwrap_err().to_string();
            assert!(names.iter().all(|n| message.contains(n)), "{message}");
        }
        let many: Vec<String> = (0..500).map(|i| format!("layer.{i}")).collect();
        let many: Vec<_> = many.iter().map(|n| (n.as_str(), Dtype::F32, &[1][..])).collect();
        let message = message("a.safetensors", &safetensors(&many, &[]));
        assert!(
            message.contains("500 tensors") && message.contains("492 more"),
            "{message}"
        );
        let none = self::message("a.safetensors", &with_header(2, "{}", &[]));
        assert!(none.contains("no tensors"), "{none}");
    }

    #[test]
    fn comfyui_latents_are_in_vae_space() {
        let marked = [
            ("latent_tensor", Dtype::F32, SHAPE),
            ("latent_format_version_0", Dtype::F32, &[0][..]),
        ];
        for name in ["a.latent", "a.safetensors"] {
            let latents = read(name, &safetensors(&marked, &[])).unwrap();
            assert_eq!(latents.hint.space, Some(LatentSpace::Vae));
            assert_eq!(latents.values, [0.5; 24]);
        }
    }

    #[test]
    fn comfyui_latents_without_the_marker_are_unscaled() {
        let file = safetensors(&[("latent_tensor", Dtype::F32, SHAPE)], &[]);
        let latents = read("a.latent", &file).unwrap();
        assert_eq!(latents.hint.space, Some(LatentSpace::Vae));
        // 0.5 / 0.18215, within one f32 rounding.
        assert!(
            (latents.values[0] - 2.744_990_3).abs() <= 2.5e-7,
            "{}",
            latents.values[0]
        );
        // A safetensors file does not follow ComfyUI's convention without its marker.
        let latents = read("a.safetensors", &file).unwrap();
        assert_eq!((latents.hint.space, latents.values[0]), (None, 0.5));
    }

    #[test]
    fn comfyui_flux2_latents_stay_normalised() {
        let shape: &[usize] = &[1, 128, 1, 2];
        let marked = [
            ("latent_tensor", Dtype::F32, shape),
            ("latent_format_version_0", Dtype::F32, &[0][..]),
        ];
        let latents = read("a.latent", &safetensors(&marked, &[])).unwrap();
        assert_eq!(latents.hint.space, Some(LatentSpace::Diffusion));
    }

    #[test]
    fn a_latent_file_that_is_not_comfyuis_is_refused() {
        let message = message("a.latent", &safetensors(&[("x", Dtype::F32, SHAPE)], &[]));
        assert!(message.contains("`latent_tensor`, it has: x"), "{message}");
    }

    #[test]
    fn malformed_safetensors_are_refused() {
        let file = safetensors(&[("x", Dtype::F32, SHAPE)], &[]);
        for end in 0..file.len() {
            assert!(matches!(
                read("a.safetensors", &file[..end]),
                Err(Error::InvalidFile { .. })
            ));
        }
        let longer = [&file[..], &[0]].concat();
        assert!(message("a.safetensors", &longer).contains("describes 96 bytes of tensors, the file has 97"));

        let tensor = |shape: &str, end: &str| {
            let header = format!("{{\"x\":{{\"dtype\":\"F32\",\"shape\":{shape},\"data_offsets\":[0,{end}]}}}}");
            message("a.safetensors", &with_header(header.len() as u64, &header, &[0; 8]))
        };
        assert!(tensor("[1,1,4]", "8").contains("malformed"));
        assert!(tensor("[4294967296,4294967296,1]", "8").contains("overflow"));
        assert!(tensor("[1,1,2]", "18446744073709551615").contains("malformed"));
        assert!(tensor("[-1,1,2]", "8").contains("malformed"));

        for length in [3, 1 << 24, (1 << 24) + 1, u64::MAX - 7, u64::MAX] {
            let message = message("a.safetensors", &with_header(length, "{}", &[]));
            assert!(message.contains("header claims"), "{message}");
        }
    }

    #[test]
    fn tensor_ends_that_overflow_together_are_refused() {
        // Eight tensors of 2^61 - 1 bytes, which the safetensors crate accepts one by one.
        const BYTES: u64 = (1 << 61) - 1;
        let tensors: Vec<String> = (0..8u64)
            .map(|i| {
                let (start, end) = (i * BYTES, (i + 1) * BYTES);
                format!("\"{i}\":{{\"dtype\":\"U8\",\"shape\":[{BYTES}],\"data_offsets\":[{start},{end}]}}")
            })
            .collect();
        let header = format!("{{{}}}", tensors.join(","));
        let message = message("a.safetensors", &with_header(header.len() as u64, &header, &[]));
        assert!(message.contains("18446744073709551608 bytes of tensors"), "{message}");
    }

    #[test]
    fn integer_latents_are_refused() {
        let file = safetensors(&[("x", Dtype::I64, SHAPE)], &[]);
        assert!(message("a.safetensors", &file).contains("`x` is I64; latents must be floating point"));
        let file = npy("<i4", "(1, 4, 2, 3)", &[0; 96]);
        assert!(message("a.npy", &file).contains("'<i4'; latents must be floating point"));
        let file = npy("|O", "(1,)", &[0; 8]);
        assert!(message("a.npy", &file).contains("object arrays are pickles; save a float array"));
    }

    #[test]
    fn a_frame_dimension_of_one_is_squeezed_and_videos_are_refused() {
        let file = |shape: &[usize]| safetensors(&[("x", Dtype::F32, shape)], &[]);
        assert_eq!(read("a.safetensors", &file(&[1, 4, 1, 2, 3])).unwrap().shape, SHAPE);
        assert!(message("a.safetensors", &file(&[1, 4, 2, 2, 3])).contains("video latents of 2 frames"));
    }

    #[test]
    fn shapes_that_are_no_latents_are_refused() {
        for shape in ["()", "(8,)", "(4, 2)", "(1, 1, 1, 1, 2, 4)"] {
            let message = message(
                "a.npy",
                &npy("<f4", shape, &[0; 32][..if shape == "()" { 4 } else { 32 }]),
            );
            assert!(message.contains("supported: maps"), "{message}");
        }
        assert!(message("a.npy", &npy("<f4", "(1, 4, 0, 3)", &[])).contains("dimension is zero"));
        let file = safetensors(&[("x", Dtype::F32, &[1, 4, 0, 3])], &[]);
        assert!(message("a.safetensors", &file).contains("dimension is zero"));
    }

    #[test]
    fn non_finite_latents_are_counted() {
        let values = [1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        match read("a.npy", &npy("<f4", "(1, 1, 4)", &bytes)) {
            Err(Error::NonFinite {
                stage,
                count: 3,
                total: 4,
                ..
            }) => assert!(stage.ends_with("a.npy`")),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_tensor_is_read_by_its_name_and_missing_names_list_what_is_there() {
        let file = safetensors(
            &[
                ("latents", Dtype::F32, SHAPE),
                ("noise", Dtype::F32, &[1, 4, 3, 2]),
                ("steps", Dtype::I64, &[2]),
            ],
            &[],
        );
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.safetensors");
        fs::write(&path, file).unwrap();
        let shape = |tensor| LatentFile::read_tensor(&path, tensor).map(|latents| latents.shape);
        assert_eq!(shape(None).unwrap(), SHAPE);
        assert_eq!(shape(Some("latents")).unwrap(), SHAPE);
        assert_eq!(shape(Some("noise")).unwrap(), [1, 4, 3, 2]);
        let error = shape(Some("steps")).unwrap_err().to_string();
        assert!(error.contains("`steps` is I64"), "{error}");
        for name in ["", "latent", "latents "] {
            let error = shape(Some(name)).unwrap_err().to_string();
            let expected = format!("it has no tensor `{name}`; it has: latents, noise, steps");
            assert!(error.ends_with(&expected), "{error}");
        }
    }

    #[test]
    fn a_name_for_the_only_array_of_an_npy_file_is_not_ignored() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.npy");
        fs::write(&path, npy("<f4", "(1, 1, 2)", &[0; 8])).unwrap();
        let error = LatentFile::read_tensor(&path, Some("x")).unwrap_err().to_string();
        assert!(error.ends_with("no `x`; leave out --tensor"), "{error}");
    }

    #[test]
    fn a_tensor_of_a_comfyui_file_by_its_own_name_follows_no_convention() {
        let tensors = [("latent_tensor", Dtype::F32, SHAPE), ("mask", Dtype::F32, SHAPE)];
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.latent");
        fs::write(&path, safetensors(&tensors, &[])).unwrap();
        let read = |tensor| LatentFile::read_tensor(&path, Some(tensor)).unwrap();
        assert_eq!((read("mask").hint.space, read("mask").values[0]), (None, 0.5));
        assert_eq!(read("latent_tensor").hint.space, Some(LatentSpace::Vae));
        assert_eq!(read("latent_tensor"), LatentFile::read(&path).unwrap());
    }

    #[test]
    fn the_content_tells_the_format_whatever_the_extension() {
        let file = safetensors(&[("x", Dtype::F32, SHAPE)], &[]);
        let array = npy("<f4", "(1, 1, 2)", &[0; 8]);
        for name in ["a", "a.npy", "a.safetensors", "a.png"] {
            assert_eq!(read(name, &file).unwrap().shape, SHAPE);
            assert_eq!(read(name, &array).unwrap().shape, [1, 1, 2]);
            assert!(message(name, b"\x89PNG\r\n\x1a\n and more").contains("none of .safetensors"));
            assert!(message(name, &[]).contains("is not a valid file of latents: it is empty"));
        }
        let missing = LatentFile::read("no/such.safetensors").unwrap_err().to_string();
        assert!(missing.starts_with("cannot open `no/such.safetensors`"), "{missing}");
    }

    #[test]
    fn a_header_is_what_the_whole_file_says() {
        let folder = TempDir::new().unwrap();
        let marked = [
            ("latent_tensor", Dtype::F32, SHAPE),
            ("latent_format_version_0", Dtype::F32, &[0][..]),
        ];
        let array = npy("<f4", "(1, 1, 2)", &[0; 8]);
        let files = [
            safetensors(&marked, &[("height", "16")]),
            array.clone(),
            zipped(true, &[("x.npy", &array)]),
        ];
        for bytes in files {
            let path = folder.path().join("a");
            fs::write(&path, &bytes).unwrap();
            let header = LatentHeader::read(&path, None).unwrap();
            assert_eq!(header, LatentFile::read(&path).unwrap().header());
            // A file that is cut is known to be before its values are read.
            fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            assert!(matches!(
                LatentHeader::read(&path, None),
                Err(Error::InvalidFile { .. })
            ));
        }
        let nan = npy("<f4", "(1, 1, 1)", &f32::NAN.to_le_bytes());
        fs::write(folder.path().join("nan"), nan).unwrap();
        assert!(LatentHeader::read(folder.path().join("nan"), None).is_ok());
    }

    #[test]
    fn an_archive_of_neither_arrays_nor_tensors_is_refused() {
        let archive = zipped(false, &[("a.txt", b"x"), ("b.txt", b"y")]);
        let message = message("a.npz", &archive);
        assert!(
            message.ends_with("without .npy arrays or PyTorch's data.pkl; it has: a.txt, b.txt"),
            "{message}"
        );
    }

    #[test]
    fn a_stream_reads_as_its_file_does() {
        let marked = [
            ("latent_tensor", Dtype::F32, SHAPE),
            ("latent_format_version_0", Dtype::F32, &[0][..]),
        ];
        let array = npy("<f4", "(1, 1, 2)", &[0; 8]);
        let archive = zipped(true, &[("x.npy", &array)]);
        for bytes in [safetensors(&marked, &[]), array, archive] {
            let stream = LatentFile::read_stream(&bytes[..], "standard input", None).unwrap();
            assert_eq!(stream.path.to_str(), Some("standard input"));
            let file = read("a", &bytes).unwrap();
            let path = file.path.clone();
            assert_eq!(file, LatentFile { path, ..stream });
        }
    }

    #[test]
    fn a_stream_that_is_no_latents_is_not_read_to_its_end() {
        let error = LatentFile::read_stream(std::io::repeat(0), "standard input", None).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("`standard input` is not a valid file of latents"),
            "{error}"
        );
    }

    #[test]
    fn a_stream_that_breaks_is_no_end() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
        }
        let array = npy("<f4", "(1, 1, 2)", &[0; 8]);
        for start in [0, 20, array.len()] {
            let error = LatentFile::read_stream(array[..start].chain(Broken), "standard input", None).unwrap_err();
            assert!(error.to_string().starts_with("cannot read `standard input`"), "{error}");
        }
    }
}
