use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::{LatentSpace, LatentsHint};
use crate::mapped::{float_dtype, map, safetensors_header};
use crate::{DType, Error, Result, npy};

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

impl LatentFile {
    /// Reads `.safetensors` and `.sft` (their only tensor, or the one called `latents` or `latent_tensor`), ComfyUI's
    /// `.latent`, and `.npy` (C or Fortran order, either byte order).
    ///
    /// Memory: the file is mapped, and the values take 4 bytes each; .npy in Fortran or big-endian order takes as much
    /// again for a moment.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExtension`], [`Error::Io`], [`Error::InvalidFile`] for malformed files, files without a clear
    /// tensor of latents and types that are not floating point, [`Error::InvalidLatents`] for shapes that are no
    /// latents of images, [`Error::NonFinite`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        let latents = match extension.to_str() {
            Some("safetensors" | "sft") => read_safetensors(path, false),
            Some("latent") => read_safetensors(path, true),
            Some("npy") => read_npy(path),
            _ => Err(Error::UnknownExtension {
                path: path.to_path_buf(),
                supported: ".safetensors, .sft, .latent (ComfyUI), .npy",
            }),
        }?;
        latents.check_finite()?;
        Ok(latents)
    }

    fn check_finite(&self) -> Result<()> {
        match self.values.iter().filter(|v| !v.is_finite()).count() {
            0 => Ok(()),
            count => Err(Error::NonFinite {
                stage: format!("latents `{}`", self.path.display()),
                count,
                total: self.values.len(),
                hint: "",
            }),
        }
    }
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
fn read_safetensors(path: &Path, is_latent: bool) -> Result<LatentFile> {
    let invalid = |reason| Error::invalid_file(path, "safetensors file of latents", reason);
    let file = map(path)?;
    let (metadata, data) = safetensors_header(&file, MAX_HEADER).map_err(invalid)?;
    let name = latent_tensor(&metadata, is_latent).map_err(invalid)?;
    let info = metadata
        .info(&name)
        .ok_or_else(|| invalid(format!("it has no `{name}`")))?;
    let dtype = float_dtype(info.dtype).ok_or_else(|| {
        let found = info.dtype;
        invalid(format!(
            "`{name}` is {found:?}; latents must be floating point: F16, BF16, F32 or F64"
        ))
    })?;
    let shape = image_shape(&info.shape)?;
    let (start, end) = info.data_offsets;
    let mut values = Vec::with_capacity((end - start) / dtype.size());
    dtype.extend_f32(&data[start..end], &mut values);

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
    Ok(LatentFile {
        path: path.to_path_buf(),
        shape,
        values,
        dtype,
        hint,
    })
}

/// The name of the tensor that holds the latents.
fn latent_tensor(metadata: &Metadata, is_latent: bool) -> Result<String, String> {
    let mut names = metadata.offset_keys();
    names.retain(|name| name != comfyui::MARKER);
    names.sort_unstable();
    let known = |name: &&String| *name == "latents" || *name == comfyui::TENSOR;
    let known: Vec<&String> = names.iter().filter(known).collect();
    let listed = || {
        let more = names.len().saturating_sub(8);
        let shown = names[..names.len() - more].join(", ");
        if more > 0 {
            format!("{shown} and {more} more")
        } else {
            shown
        }
    };
    if is_latent && !known.iter().any(|name| *name == comfyui::TENSOR) {
        return Err(format!(
            "a ComfyUI .latent has a tensor `latent_tensor`, it has: {}",
            listed()
        ));
    }
    match (names.as_slice(), known.as_slice()) {
        ([], _) => Err("it has no tensors".to_owned()),
        ([only], _) => Ok(only.clone()),
        (_, [only]) => Ok((*only).clone()),
        _ => {
            let count = names.len();
            Err(format!(
                "it has {count} tensors and not one called `latents`: {}",
                listed()
            ))
        }
    }
}

fn read_npy(path: &Path) -> Result<LatentFile> {
    let file = map(path)?;
    let array = npy::Array::parse(&file).map_err(|e| Error::invalid_file(path, ".npy file of latents", e))?;
    Ok(LatentFile {
        path: path.to_path_buf(),
        shape: image_shape(&array.shape)?,
        values: array.values(),
        dtype: array.dtype,
        hint: LatentsHint::default(),
    })
}

/// `[B, C, 1, h, w]` as `[B, C, h, w]`, other shapes of latents as they are.
fn image_shape(shape: &[usize]) -> Result<Vec<usize>> {
    if shape.contains(&0) {
        return Err(Error::invalid_latents(shape, "a dimension is zero"));
    }
    match *shape {
        [_, _, _] | [_, _, _, _] => Ok(shape.to_vec()),
        [b, c, 1, h, w] => Ok(vec![b, c, h, w]),
        [_, _, frames, _, _] => Err(Error::invalid_latents(
            shape,
            format!("they are video latents of {frames} frames; only images ([B, C, 1, h, w]) are supported"),
        )),
        _ => Err(Error::invalid_latents(
            shape,
            "supported: maps [B, C, h, w], [C, h, w], [B, C, 1, h, w] and packed tokens [B, L, C]",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::Dtype;
    use safetensors::tensor::TensorView;
    use tempfile::TempDir;

    use super::*;

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
    fn unknown_extensions_and_missing_files_are_refused() {
        for name in ["a.png", "safetensors", "a"] {
            assert!(message(name, &[]).contains(".safetensors, .sft, .latent (ComfyUI), .npy"));
        }
        for name in ["a.safetensors", "a.npy"] {
            assert!(
                matches!(read(name, &[]), Err(Error::InvalidFile { .. })),
                "an empty file"
            );
        }
        let missing = LatentFile::read("no/such.safetensors").unwrap_err().to_string();
        assert!(missing.starts_with("cannot open `no/such.safetensors`"), "{missing}");
    }
}
