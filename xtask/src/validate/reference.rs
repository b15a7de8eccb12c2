//! Images of side B that are read instead of decoded.

use std::path::{Path, PathBuf};

use image::{ColorType, DynamicImage, ImageReader};
use vae_io::{Error, Image, LatentFile};

use crate::Result;

/// The formats of references.
const EXTENSIONS: [&str; 3] = ["safetensors", "npy", "png"];

/// The reference images of one file of latents.
#[derive(Debug)]
pub struct Reference {
    images: Image,
    /// They come from a picture of 8 bits a channel.
    pub is_eight_bit: bool,
}

impl Reference {
    /// Reads images of `shape`, `[batch, channels, height, width]`: the tensor `image` of a .safetensors file, a .npy
    /// array, both in -1..1, or a .png picture.
    pub fn read(path: &Path, shape: [usize; 4]) -> Result<Self> {
        let in_reference = |error: Error| format!("reference: {error}");
        let (found, values, is_eight_bit) = match extension(path) {
            Some("png") => read_png(path)?,
            Some(extension) => {
                let name = (extension == "safetensors").then_some("image");
                let file = LatentFile::read_tensor(path, name).map_err(in_reference)?;
                (file.shape, file.values, false)
            }
            None => {
                let supported = ".safetensors, .npy, .png";
                let path = path.to_path_buf();
                return Err(in_reference(Error::UnknownExtension { path, supported }).into());
            }
        };
        let batched = match found.len() {
            3 => [&[1], found.as_slice()].concat(),
            _ => found.clone(),
        };
        if batched != shape {
            return Err(format!(
                "reference `{}` has the shape {found:?}, and its latents decode to {shape:?}; pass the images of these \
                 latents",
                path.display()
            )
            .into());
        }
        Ok(Self {
            images: Image::new(shape, values),
            is_eight_bit,
        })
    }

    /// Image `index` of the batch, as a batch of one.
    pub fn image(&self, index: usize) -> Image {
        let [_, channels, height, width] = self.images.shape();
        Image::new([1, channels, height, width], self.images.image(index).to_vec())
    }
}

/// Which of [`EXTENSIONS`] a path has.
fn extension(path: &Path) -> Option<&'static str> {
    let extension = path.extension()?;
    EXTENSIONS
        .into_iter()
        .find(|known| extension.eq_ignore_ascii_case(known))
}

/// The shape, values in -1..1, and whether they have 8 bits.
fn read_png(path: &Path) -> Result<(Vec<usize>, Vec<f32>, bool)> {
    let reader = ImageReader::open(path).map_err(Error::io("open", path))?;
    let invalid = |reason: String| format!("reference: {}", Error::invalid_file(path, ".png picture", reason));
    let picture = reader.decode().map_err(|error| invalid(error.to_string()))?;
    let is_eight_bit = match picture.color() {
        ColorType::Rgb8 => true,
        ColorType::Rgb16 => false,
        other => {
            let reason = format!("its pixels are {other:?}; pictures must be RGB of 8 or 16 bits, without alpha");
            return Err(invalid(reason).into());
        }
    };
    Ok((
        vec![1, 3, picture.height() as usize, picture.width() as usize],
        planes(picture),
        is_eight_bit,
    ))
}

/// -1..1, a plane a channel.
fn planes(picture: DynamicImage) -> Vec<f32> {
    let pixels = picture.into_rgb32f();
    (0..3)
        .flat_map(|channel| pixels.pixels().map(move |pixel| pixel[channel] * 2.0 - 1.0))
        .collect()
}

/// The reference of each file of latents, or none if none are given.
///
/// A folder holds a file of the same stem for each; files are taken in the order of the latents.
pub fn pair(latents: &[PathBuf], references: &[PathBuf]) -> Result<Vec<PathBuf>> {
    match references {
        [] => Ok(Vec::new()),
        [folder] if folder.is_dir() => latents.iter().map(|latents| in_folder(folder, latents)).collect(),
        files => {
            if files.len() != latents.len() {
                let (files, latents) = (files.len(), latents.len());
                return Err(format!(
                    "{files} references for {latents} files of latents; pass one for each in the same order, or a folder"
                )
                .into());
            }
            // Two lists that a shell or a user sorted differently would compare other pictures.
            for (i, file) in files.iter().enumerate() {
                let other = |(j, latents): &(usize, &PathBuf)| *j != i && latents.file_stem() == file.file_stem();
                if latents[i].file_stem() != file.file_stem()
                    && let Some((_, other)) = latents.iter().enumerate().find(other)
                {
                    return Err(format!(
                        "reference `{}` stands where `{}` is among the latents, and `{}` has its name; pass references in \
                         the order of the latents",
                        file.display(),
                        latents[i].display(),
                        other.display()
                    )
                    .into());
                }
            }
            Ok(files.to_vec())
        }
    }
}

/// The only file of a known format in `folder` with the stem of `latents`.
fn in_folder(folder: &Path, latents: &Path) -> Result<PathBuf> {
    let stem = latents.file_stem().unwrap_or_default();
    let named = |extension: &str| {
        let mut name = stem.to_os_string();
        name.push(".");
        name.push(extension);
        folder.join(name)
    };
    let candidates = EXTENSIONS.map(named);
    let found: Vec<&PathBuf> = candidates.iter().filter(|path| path.is_file()).collect();
    match found.as_slice() {
        [only] => Ok((*only).clone()),
        [] => Err(format!(
            "no reference for `{}`: none of `{}` is a file",
            latents.display(),
            candidates
                .each_ref()
                .map(|path| path.display().to_string())
                .join("`, `")
        )
        .into()),
        [first, second, ..] => Err(format!(
            "two references for `{}`: `{}` and `{}`; pass files instead of the folder",
            latents.display(),
            first.display(),
            second.display()
        )
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(names: &[&str]) -> Vec<PathBuf> {
        names.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn files_are_paired_in_order_and_never_crosswise() {
        let latents = paths(&["l/cat.npy", "l/dog.npy"]);
        let pair = |references: &[&str]| pair(&latents, &paths(references)).map_err(|error| error.to_string());
        assert_eq!(pair(&[]), Ok(vec![]));
        assert_eq!(pair(&["1.png", "2.png"]), Ok(paths(&["1.png", "2.png"])));
        assert_eq!(pair(&["cat.png", "dog.png"]), Ok(paths(&["cat.png", "dog.png"])));
        let crossed = pair(&["dog.png", "cat.png"]).unwrap_err();
        assert!(
            crossed.starts_with("reference `dog.png` stands where `l/cat.npy` is"),
            "{crossed}"
        );
        let few = pair(&["cat.png"]).unwrap_err();
        assert!(few.starts_with("1 references for 2 files of latents"), "{few}");
    }

    #[test]
    fn a_folder_gives_each_stem_its_one_file() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["cat.png", "dog.v1.npy", "cow.png", "cow.safetensors"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let references = [folder.path().to_path_buf()];
        let pair = |latents: &[&str]| pair(&paths(latents), &references).map_err(|error| error.to_string());
        let found = pair(&["l/dog.v1.safetensors", "cat.npy"]).unwrap();
        assert_eq!(found, ["dog.v1.npy", "cat.png"].map(|name| folder.path().join(name)));
        assert!(
            pair(&["bird.npy"])
                .unwrap_err()
                .starts_with("no reference for `bird.npy`: none of `")
        );
        assert!(
            pair(&["cow.npy"])
                .unwrap_err()
                .starts_with("two references for `cow.npy`")
        );
    }

    #[test]
    fn a_png_is_read_as_it_is_shown_in_planes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.png");
        let levels = [0, 255, 51, 204, 102, 128];
        image::RgbImage::from_raw(2, 1, levels.to_vec())
            .unwrap()
            .save(&path)
            .unwrap();
        let reference = Reference::read(&path, [1, 3, 1, 2]).unwrap();
        assert!(reference.is_eight_bit);
        for (found, expected) in reference
            .image(0)
            .data()
            .iter()
            .zip([-1.0, 0.6, 1.0, -0.2, -0.6, 0.003_921_6])
        {
            assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
        }
        assert_eq!(reference.image(0).to_rgb8(0).unwrap().pixels, levels);

        let message = Reference::read(&path, [1, 3, 2, 1]).unwrap_err().to_string();
        assert!(
            message.contains("has the shape [1, 3, 1, 2], and its latents decode to [1, 3, 2, 1]"),
            "{message}"
        );
        image::RgbaImage::new(2, 1).save(&path).unwrap();
        let message = Reference::read(&path, [1, 3, 1, 2]).unwrap_err().to_string();
        assert!(message.contains("its pixels are Rgba8"), "{message}");
    }

    #[test]
    fn references_of_unknown_and_broken_formats_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.jpg", "a.png", "a.npy", "a.safetensors"] {
            let path = folder.path().join(name);
            std::fs::write(&path, "no picture").unwrap();
            let message = Reference::read(&path, [1, 3, 1, 1]).unwrap_err().to_string();
            assert!(
                message.starts_with("reference: `") && message.contains(name),
                "{message}"
            );
        }
        let message = Reference::read(Path::new("no/such.png"), [1, 3, 1, 1])
            .unwrap_err()
            .to_string();
        assert!(message.starts_with("cannot open `no/such.png`"), "{message}");
    }
}
