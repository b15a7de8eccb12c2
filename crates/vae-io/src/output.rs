//! Images into files, whole or not at all.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use image::codecs::{jpeg::JpegEncoder, png::PngEncoder, webp::WebPEncoder};
use image::{ExtendedColorType, ImageEncoder, ImageError};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tempfile::NamedTempFile;

use crate::{Error, Image, Result, npy};

/// The formats that images are written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputFormat {
    /// 8-bit RGB, without alpha and gamma.
    Png,
    /// Quality 95.
    Jpeg,
    /// Lossless.
    WebP,
    /// The f32 values as a tensor `image`, `[B, 3, H, W]`.
    Safetensors,
    /// The f32 values, `[B, 3, H, W]`.
    Npy,
}

const JPEG_QUALITY: u8 = 95;

impl OutputFormat {
    /// The format that a path's extension names: png, jpg or jpeg, webp, safetensors, npy.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExtension`]
    pub fn from_path(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
        match extension.to_str() {
            Some("png") => Ok(Self::Png),
            Some("jpg" | "jpeg") => Ok(Self::Jpeg),
            Some("webp") => Ok(Self::WebP),
            Some("safetensors") => Ok(Self::Safetensors),
            Some("npy") => Ok(Self::Npy),
            _ => Err(unknown_extension(path, ".png, .jpg, .jpeg, .webp, .safetensors, .npy")),
        }
    }

    /// What will keep an output from being written, as far as it can be told beforehand; the format if nothing will.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownExtension`], [`Error::OutputExists`] unless `force`, [`Error::Io`] for a folder that is missing or
    /// cannot be written to.
    pub fn check(path: impl AsRef<Path>, force: bool) -> Result<Self> {
        let path = path.as_ref();
        let format = Self::from_path(path)?;
        let folder = folder_of(path);
        let is_folder = fs::metadata(folder).map(|folder| folder.is_dir());
        if !is_folder.map_err(Error::io("write into the folder", folder))? {
            return Err(Error::io("write into the folder", folder)(
                io::ErrorKind::NotADirectory.into(),
            ));
        }
        if !force && fs::symlink_metadata(path).is_ok() {
            return Err(output_exists(path));
        }
        tempfile::tempfile_in(folder).map_err(|e| Error::io("write into the folder", folder)(e.kind().into()))?;
        Ok(format)
    }

    /// Refuses images with more pixels a side than the format has numbers for.
    ///
    /// # Errors
    ///
    /// [`Error::ImageTooLarge`]
    pub fn check_size(self, path: impl AsRef<Path>, width: usize, height: usize) -> Result<()> {
        let (format, limit) = match self {
            Self::Jpeg => ("JPEG", 65_535),
            Self::WebP => ("WebP", 16_384),
            Self::Png => ("PNG", i32::MAX as usize),
            Self::Safetensors | Self::Npy => return Ok(()),
        };
        if width.max(height) <= limit {
            return Ok(());
        }
        Err(Error::ImageTooLarge {
            path: path.as_ref().to_path_buf(),
            format,
            width,
            height,
            limit,
        })
    }

    /// Whether a file of this format holds a whole batch; pictures hold one image.
    pub fn holds_batch(self) -> bool {
        matches!(self, Self::Safetensors | Self::Npy)
    }
}

impl Image {
    /// Writes one image of the batch in the format of the path's extension; tensors are `[1, C, H, W]`.
    ///
    /// The file appears whole or not at all, and without `force` it never replaces another.
    ///
    /// # Errors
    ///
    /// Those of [`OutputFormat::check`] and [`Image::to_rgb8`], and [`Error::Io`].
    ///
    /// # Panics
    ///
    /// When the batch has no image `index`.
    pub fn save(&self, index: usize, path: impl AsRef<Path>, force: bool) -> Result<()> {
        let path = path.as_ref();
        let format = OutputFormat::check(path, force)?;
        let [_, c, h, w] = self.shape();
        if format.holds_batch() {
            return self.save_tensor(format, [1, c, h, w], self.image(index), path, force);
        }
        format.check_size(path, w, h)?;
        let rgb = self.to_rgb8(index)?;
        let side = |pixels: usize| u32::try_from(pixels).map_err(|e| Error::io("encode", path)(io::Error::other(e)));
        let (width, height) = (side(rgb.width)?, side(rgb.height)?);
        write_whole(path, force, |out| {
            let color = ExtendedColorType::Rgb8;
            match format {
                OutputFormat::Png => PngEncoder::new(out).write_image(&rgb.pixels, width, height, color),
                OutputFormat::Jpeg => {
                    let encoder = JpegEncoder::new_with_quality(out, JPEG_QUALITY);
                    encoder.write_image(&rgb.pixels, width, height, color)
                }
                _ => WebPEncoder::new_lossless(out).write_image(&rgb.pixels, width, height, color),
            }
            .map_err(|error| match error {
                ImageError::IoError(error) => error,
                error => io::Error::other(error),
            })
        })
    }

    /// Writes the whole batch, `[B, C, H, W]`, into one .safetensors or .npy file, as [`Image::save`] does.
    ///
    /// # Errors
    ///
    /// Those of [`OutputFormat::check`], [`Error::UnknownExtension`] for pictures, [`Error::NonFinite`], [`Error::Io`].
    pub fn save_batch(&self, path: impl AsRef<Path>, force: bool) -> Result<()> {
        let path = path.as_ref();
        let format = OutputFormat::check(path, force)?;
        if !format.holds_batch() {
            return Err(unknown_extension(path, ".safetensors, .npy for a whole batch"));
        }
        self.save_tensor(format, self.shape(), self.data(), path, force)
    }

    fn save_tensor(
        &self,
        format: OutputFormat,
        shape: [usize; 4],
        values: &[f32],
        path: &Path,
        force: bool,
    ) -> Result<()> {
        self.check_finite(values)?;
        write_whole(path, force, |out| {
            match format {
                OutputFormat::Npy => out.write_all(&npy::f32_header(&shape))?,
                _ => out.write_all(&safetensors_header(&shape, size_of_val(values))?)?,
            }
            write_values(out, values)
        })
    }
}

/// Lets `write` fill a temporary file beside `path`, which takes its name only when it is complete.
fn write_whole(
    path: &Path,
    force: bool,
    write: impl FnOnce(&mut BufWriter<NamedTempFile>) -> io::Result<()>,
) -> Result<()> {
    let file = create_unfinished(folder_of(path))
        // The error's own text names the temporary file.
        .map_err(|e| Error::io("create", path)(e.kind().into()))?;
    let mut out = BufWriter::with_capacity(1 << 16, file);
    write(&mut out).map_err(Error::io("write", path))?;
    let file = out.into_inner().map_err(|e| Error::io("write", path)(e.into_error()))?;

    let persisted = if force {
        file.persist(path)
    } else {
        file.persist_noclobber(path)
    };
    match persisted {
        Ok(_) => Ok(()),
        Err(e) if !force && e.error.kind() == io::ErrorKind::AlreadyExists => Err(output_exists(path)),
        Err(e) => Err(Error::io("create", path)(e.error)),
    }
}

/// What an output is called before it is complete, random characters between the two. No other program's files are.
const UNFINISHED: (&str, &str) = (".burn-vae-", ".tmp");

/// A file that is locked for as long as its writer lives, so that [`remove_unfinished`] knows it from one that a killed
/// process left behind.
fn create_unfinished(folder: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(UNFINISHED.0).suffix(UNFINISHED.1);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // What other programs create files with; the umask applies. The default is for the owner only.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    loop {
        let file = builder.tempfile_in(folder)?;
        match file.as_file().lock() {
            // Removed between its creation and its lock, as a left one.
            Ok(()) if !file.path().try_exists()? => continue,
            Ok(()) => return Ok(file),
            // A file system without locks: there unfinished files are never removed.
            Err(_) => return Ok(file),
        }
    }
}

/// Removes what killed processes left of outputs that they were writing into a folder; files that are being written now
/// stay. Gives the number of files that were removed.
///
/// # Errors
///
/// [`Error::Io`] when the folder cannot be listed. A file that cannot be opened, locked or removed stays.
pub fn remove_unfinished(folder: impl AsRef<Path>) -> Result<usize> {
    let folder = folder.as_ref();
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let is_unfinished = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with(UNFINISHED.0)
            && name.ends_with(UNFINISHED.1)
            && entry.file_type().is_ok_and(|kind| kind.is_file())
    };
    let removed = entries.flatten().filter(is_unfinished).filter(|entry| {
        // Some systems lock only files that are open for writing.
        let Ok(file) = fs::OpenOptions::new().write(true).open(entry.path()) else {
            return false;
        };
        file.try_lock().is_ok() && fs::remove_file(entry.path()).is_ok()
    });
    Ok(removed.count())
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// The header of a safetensors file with one tensor, `image`.
fn safetensors_header(shape: &[usize], bytes: usize) -> io::Result<Vec<u8>> {
    let info = TensorInfo {
        dtype: Dtype::F32,
        shape: shape.to_vec(),
        data_offsets: (0, bytes),
    };
    let metadata = Metadata::new(None, vec![("image".to_owned(), info)]).map_err(io::Error::other)?;
    let mut json = serde_json::to_vec(&metadata)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

fn write_values(out: &mut impl Write, values: &[f32]) -> io::Result<()> {
    let mut block = Vec::new();
    for values in values.chunks(1 << 14) {
        block.clear();
        block.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        out.write_all(&block)?;
    }
    Ok(())
}

fn unknown_extension(path: &Path, supported: &'static str) -> Error {
    Error::UnknownExtension {
        path: path.to_path_buf(),
        supported,
    }
}

fn output_exists(path: &Path) -> Error {
    Error::OutputExists {
        path: path.to_path_buf(),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// Two images of 5x4 with every channel different.
    fn images() -> Image {
        let data = (0..120).map(|i| i as f32 / 60.0 - 1.0).collect();
        Image::new([2, 3, 4, 5], data)
    }

    fn names(folder: &TempDir) -> Vec<String> {
        let entries = fs::read_dir(folder.path()).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn decoded(path: &Path) -> image::DynamicImage {
        image::ImageReader::open(path).unwrap().decode().unwrap()
    }

    #[test]
    fn lossless_pictures_hold_the_rounded_pixels_and_no_alpha() {
        let folder = TempDir::new().unwrap();
        for name in ["a.png", "a.webp", "B.PNG"] {
            let path = folder.path().join(name);
            images().save(1, &path, false).unwrap();
            let picture = decoded(&path);
            assert_eq!(picture.color(), image::ColorType::Rgb8, "{name}");
            assert_eq!((picture.width(), picture.height()), (5, 4));
            assert_eq!(picture.into_bytes(), images().to_rgb8(1).unwrap().pixels, "{name}");
        }
    }

    #[test]
    fn png_has_no_gamma() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.png");
        images().save(0, &path, false).unwrap();
        let bytes = fs::read(path).unwrap();
        let mut chunks = Vec::new();
        let mut rest = &bytes[8..];
        while let Some((length, after)) = rest.split_first_chunk() {
            chunks.push(String::from_utf8_lossy(&after[..4]).into_owned());
            rest = &after[4 + u32::from_be_bytes(*length) as usize + 4..];
        }
        assert_eq!(chunks, ["IHDR", "IDAT", "IEND"]);
    }

    #[test]
    fn jpeg_is_close() {
        let folder = TempDir::new().unwrap();
        for name in ["a.jpg", "a.jpeg"] {
            let path = folder.path().join(name);
            let grey = Image::new([1, 3, 16, 16], vec![0.25; 3 * 256]);
            grey.save(0, &path, false).unwrap();
            // A grey of 159; quality 95 keeps the mean of a block to a quarter level, and the colour conversions round.
            assert!(decoded(&path).into_bytes().iter().all(|&b| b.abs_diff(159) <= 2));
        }
    }

    #[test]
    fn tensors_hold_the_values_as_they_are() {
        let folder = TempDir::new().unwrap();
        let le = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();

        let path = folder.path().join("a.safetensors");
        images().save_batch(&path, false).unwrap();
        let bytes = fs::read(&path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let image = tensors.tensor("image").unwrap();
        assert_eq!((image.dtype(), image.shape()), (Dtype::F32, &[2, 3, 4, 5][..]));
        assert_eq!(image.data(), le(images().data()));
        assert_eq!(tensors.len(), 1);

        let path = folder.path().join("a.npy");
        images().save_batch(&path, false).unwrap();
        let bytes = fs::read(&path).unwrap();
        let array = npy::Array::parse(&bytes).unwrap();
        assert_eq!(
            (&array.shape[..], array.values()),
            (&[2, 3, 4, 5][..], images().data().to_vec())
        );

        images().save(1, &path, true).unwrap();
        let bytes = fs::read(&path).unwrap();
        let array = npy::Array::parse(&bytes).unwrap();
        assert_eq!(
            (&array.shape[..], array.values()),
            (&[1, 3, 4, 5][..], images().data()[60..].to_vec())
        );
    }

    #[test]
    fn an_existing_file_is_kept_without_force() {
        let folder = TempDir::new().unwrap();
        for name in ["a.png", "a.npy"] {
            let path = folder.path().join(name);
            fs::write(&path, "precious").unwrap();
            assert!(matches!(
                images().save(0, &path, false),
                Err(Error::OutputExists { .. })
            ));
            assert_eq!(fs::read(&path).unwrap(), b"precious");
            images().save(0, &path, true).unwrap();
            assert_ne!(fs::read(&path).unwrap(), b"precious");
        }
        assert_eq!(names(&folder).len(), 2, "nothing else is left");
    }

    #[test]
    fn a_file_that_appears_while_writing_is_kept() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.png");
        let written = write_whole(&path, false, |out| {
            fs::write(&path, "precious")?;
            out.write_all(b"new")
        });
        assert!(matches!(written, Err(Error::OutputExists { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert_eq!(names(&folder), ["a.png"]);
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let folder = TempDir::new().unwrap();
        for name in [
            ".burn-vae-killed.tmp",
            ".tmp-abcdef",
            ".burn-vae-a.png",
            "a.tmp",
            "a.png",
        ] {
            fs::write(folder.path().join(name), "half").unwrap();
        }
        fs::create_dir(folder.path().join(".burn-vae-folder.tmp")).unwrap();
        let path = folder.path().join("b.png");
        let written = write_whole(&path, false, |out| {
            // Another process starts meanwhile.
            assert_eq!(remove_unfinished(&folder).unwrap(), 1);
            out.write_all(b"whole")
        });
        written.unwrap();
        assert_eq!(fs::read(path).unwrap(), b"whole");
        let mut names = names(&folder);
        names.sort();
        let kept = [
            ".burn-vae-a.png",
            ".burn-vae-folder.tmp",
            ".tmp-abcdef",
            "a.png",
            "a.tmp",
            "b.png",
        ];
        assert_eq!(names, kept);
        assert_eq!(remove_unfinished(&folder).unwrap(), 0);
    }

    #[test]
    fn nothing_is_left_of_a_failed_write() {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("a.png");
        let written = write_whole(&path, true, |out| {
            out.write_all(&[0; 1 << 17])?;
            Err(io::Error::other("disk on fire"))
        });
        let message = written.unwrap_err().to_string();
        assert!(
            message.starts_with("cannot write `") && message.ends_with("disk on fire"),
            "{message}"
        );

        // WebP has at most 16384 pixels a side.
        let wide = Image::new([1, 3, 1, 16385], vec![0.0; 3 * 16385]);
        assert!(matches!(
            wide.save(0, folder.path().join("a.webp"), false),
            Err(Error::ImageTooLarge { limit: 16_384, .. })
        ));

        let mut broken = images().data().to_vec();
        broken[0] = f32::NAN;
        let broken = Image::new([2, 3, 4, 5], broken);
        for name in ["a.png", "a.npy", "a.safetensors"] {
            let saved = broken.save(0, folder.path().join(name), false);
            assert!(matches!(
                saved,
                Err(Error::NonFinite {
                    count: 1,
                    total: 60,
                    ..
                })
            ));
        }
        assert!(names(&folder).is_empty());
    }

    #[test]
    fn missing_and_wrong_folders_are_errors() {
        let folder = TempDir::new().unwrap();
        let missing = folder.path().join("no/such/a.png");
        let message = images().save(0, missing, false).unwrap_err().to_string();
        assert!(message.starts_with("cannot write into the folder `"), "{message}");

        fs::write(folder.path().join("file"), "").unwrap();
        assert!(matches!(
            images().save(0, folder.path().join("file/a.png"), false),
            Err(Error::Io { .. })
        ));
        fs::create_dir(folder.path().join("a.png")).unwrap();
        assert!(matches!(
            images().save(0, folder.path().join("a.png"), true),
            Err(Error::Io { .. })
        ));
        assert_eq!(names(&folder).len(), 2, "nothing else is left");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_unwritable_folder_is_an_error() {
        // Whoever runs the tests, no one creates files here.
        assert!(matches!(
            images().save(0, "/proc/self/a.png", false),
            Err(Error::Io { .. })
        ));
    }

    #[test]
    #[cfg(unix)]
    fn outputs_have_the_permissions_of_any_new_file() {
        use std::os::unix::fs::PermissionsExt;
        let folder = TempDir::new().unwrap();
        let (ours, plain) = (folder.path().join("a.png"), folder.path().join("plain"));
        images().save(0, &ours, false).unwrap();
        fs::write(&plain, "").unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&ours), mode(&plain));
    }

    #[test]
    fn unknown_extensions_are_refused_before_anything_is_written() {
        let folder = TempDir::new().unwrap();
        for name in ["a.gif", "a", ".png", "a.png.tmp"] {
            let saved = images().save(0, folder.path().join(name), false);
            assert!(matches!(saved, Err(Error::UnknownExtension { .. })), "{name}");
        }
        let message = images()
            .save_batch(folder.path().join("a.png"), false)
            .unwrap_err()
            .to_string();
        assert!(message.contains(".safetensors, .npy for a whole batch"), "{message}");
        assert!(names(&folder).is_empty());
    }
}
