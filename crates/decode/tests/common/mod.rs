//! What the black-box tests of `decode` share: a scratch folder to run the program in, tensors and the files they are
//! written to (sound or deliberately broken), and assertions that print what the program said when they fail.

#![allow(dead_code)] // each test binary uses its own part of this module

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use safetensors::SafeTensors;
pub use safetensors::tensor::Dtype;
use safetensors::tensor::TensorView;
#[allow(unused_imports)] // as above
pub use serde_json::{Value, json};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures");

/// The largest absolute difference to diffusers, in f32 and -1..1.
pub const F32_TOLERANCE: f32 = 5e-5;
/// The same where the latents went through a scaling or a normalisation, and back, on their way into the file.
pub const ROUND_TRIP_TOLERANCE: f32 = 1e-4;

/// No run of the program takes longer; one that does hangs.
const TIME_LIMIT: Duration = Duration::from_secs(300);

pub const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";

/// The path of a fixture, as an argument.
pub fn fixture(name: &str) -> String {
    format!("{FIXTURES}/{name}")
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub type Tensors = BTreeMap<String, Tensor>;

impl Tensor {
    pub fn f32(shape: &[usize], values: impl IntoIterator<Item = f32>) -> Self {
        let bytes: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        assert_eq!(
            bytes.len(),
            4 * shape.iter().product::<usize>(),
            "test bug: values do not fill {shape:?}"
        );
        Self {
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// Zeros of any element type.
    pub fn zeros(dtype: Dtype, shape: &[usize]) -> Self {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        Self {
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// Latent-like values between -1 and 1, the same every time and different everywhere.
    pub fn wave(shape: &[usize]) -> Self {
        let len = shape.iter().product::<usize>();
        Self::f32(
            shape,
            (0..len).map(|i| (0.7 * i as f32).sin() * (0.013 * i as f32 + 0.5).cos()),
        )
    }

    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The values of a float tensor, widened to f32.
    pub fn values(&self) -> Vec<f32> {
        let pairs = || self.bytes.as_chunks::<2>().0.iter();
        match self.dtype {
            Dtype::F32 => self
                .bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect(),
            Dtype::F16 => pairs().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            other => panic!("test bug: the values of a {other:?} tensor"),
        }
    }

    pub fn cast(&self, dtype: Dtype) -> Self {
        let values = self.values().into_iter();
        let bytes = match dtype {
            Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
            Dtype::F16 => values.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::BF16 => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
            other => panic!("test bug: a cast to {other:?}"),
        };
        Self {
            dtype,
            shape: self.shape.clone(),
            bytes,
        }
    }

    pub fn map(&self, f: impl Fn(usize, f32) -> f32) -> Self {
        Self::f32(&self.shape, self.values().into_iter().enumerate().map(|(i, x)| f(i, x)))
    }

    /// `f(channel, value)` over a tensor whose second dimension is channels.
    pub fn map_channels(&self, f: impl Fn(usize, f32) -> f32) -> Self {
        let plane: usize = self.shape[2..].iter().product();
        self.map(|i, x| f(i / plane % self.shape[1], x))
    }

    pub fn reshaped(&self, shape: &[usize]) -> Self {
        assert_eq!(
            self.len(),
            shape.iter().product::<usize>(),
            "test bug: {:?} is not {shape:?}",
            self.shape
        );
        Self {
            shape: shape.to_vec(),
            ..self.clone()
        }
    }

    /// `[B, C, 2h, 2w]` to `[B, 4C, h, w]`, channels in the order (c, row, column) of FLUX.1 and FLUX.2.
    pub fn patchified(&self) -> Self {
        let [b, c, height, width] = self.shape[..] else {
            panic!("test bug: patchify of {:?}", self.shape)
        };
        let (h, w, x) = (height / 2, width / 2, self.values());
        let source = |i: usize| {
            let (column, row, channel, image) = (i % w, i / w % h, i / (w * h) % (4 * c), i / (w * h * 4 * c));
            let (from, pi, pj) = (channel / 4, channel / 2 % 2, channel % 2);
            ((image * c + from) * height + 2 * row + pi) * width + 2 * column + pj
        };
        Self::f32(&[b, 4 * c, h, w], (0..b * 4 * c * h * w).map(|i| x[source(i)]))
    }

    /// `[B, C, h, w]` to `[B, hw, C]`, in raster order.
    pub fn tokens(&self) -> Self {
        let [b, c, h, w] = self.shape[..] else {
            panic!("test bug: tokens of {:?}", self.shape)
        };
        let (l, x) = (h * w, self.values());
        Self::f32(
            &[b, l, c],
            (0..b * l * c).map(|i| x[(i / (l * c) * c + i % c) * l + i / c % l]),
        )
    }

    /// Image (or latents) `index` of a batch, as a batch of one.
    pub fn one_of_batch(&self, index: usize) -> Self {
        let size = self.bytes.len() / self.shape[0];
        Self {
            dtype: self.dtype,
            shape: [&[1], &self.shape[1..]].concat(),
            bytes: self.bytes[index * size..][..size].to_vec(),
        }
    }

    /// Image `index` of a batch, as 8-bit RGB: halved, shifted, clamped, rounded half to even.
    pub fn picture(&self, index: usize) -> image::RgbImage {
        let [_, 3, h, w] = self.shape[..] else {
            panic!("test bug: a picture of {:?}", self.shape)
        };
        let x = self.values();
        image::RgbImage::from_fn(w as u32, h as u32, |column, row| {
            let at = |c: usize| x[((index * 3 + c) * h + row as usize) * w + column as usize];
            image::Rgb([0, 1, 2].map(|c| ((at(c) / 2.0 + 0.5).clamp(0.0, 1.0) * 255.0).round_ties_even() as u8))
        })
    }
}

/// What diffusers made of a micro fixture: the latents in VAE space and the image, in f32.
pub fn micro(name: &str) -> (Tensor, Tensor) {
    let mut tensors = read_safetensors(fixture(&format!("{name}/expected.safetensors")));
    let mut take = |key: &str| {
        tensors
            .remove(key)
            .unwrap_or_else(|| panic!("{name}/expected.safetensors has no {key}"))
    };
    (take("vae_latents"), take("image"))
}

// ---------------------------------------------------------------------------------------------------------------------
// Files

pub fn read_safetensors(path: impl AsRef<Path>) -> Tensors {
    let path = path.as_ref();
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let own = |view: TensorView| Tensor {
        dtype: view.dtype(),
        shape: view.shape().into(),
        bytes: view.data().into(),
    };
    file.iter().map(|(name, view)| (name.to_owned(), own(view))).collect()
}

pub fn safetensors_bytes<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    metadata: &[(&str, &str)],
) -> Vec<u8> {
    let view = |t: &'a Tensor| TensorView::new(t.dtype, t.shape.clone(), &t.bytes).expect("test bug: a sound tensor");
    let metadata: HashMap<String, String> = metadata.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let views = tensors.into_iter().map(|(name, tensor)| (name, view(tensor)));
    safetensors::serialize(views, (!metadata.is_empty()).then_some(metadata)).expect("test bug: sound tensors")
}

/// A safetensors file as written by hand: any header, any length before it, any bytes after it.
pub fn forged_safetensors(header_len: u64, header: &str, data: &[u8]) -> Vec<u8> {
    [&header_len.to_le_bytes(), header.as_bytes(), data].concat()
}

/// A NumPy file, version 1.0, as written by hand: `shape` is the Python tuple in the header.
pub fn npy_bytes(descr: &str, fortran_order: bool, shape: &str, data: &[u8]) -> Vec<u8> {
    let order = if fortran_order { "True" } else { "False" };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}");
    header.extend(std::iter::repeat_n(' ', 63 - (10 + header.len()) % 64));
    header.push('\n');
    [
        b"\x93NUMPY\x01\x00",
        &(header.len() as u16).to_le_bytes()[..],
        header.as_bytes(),
        data,
    ]
    .concat()
}

/// The Python tuple of a shape.
pub fn tuple(shape: &[usize]) -> String {
    format!("({})", shape.iter().map(|d| format!("{d},")).collect::<String>())
}

/// An f32 tensor as `numpy.save` writes it.
pub fn npy(tensor: &Tensor) -> Vec<u8> {
    npy_bytes("<f4", false, &tuple(&tensor.shape), &tensor.cast(Dtype::F32).bytes)
}

pub fn read_npy(path: impl AsRef<Path>) -> Tensor {
    let bytes = fs::read(path).expect("a .npy file");
    assert_eq!(&bytes[..6], b"\x93NUMPY", "not a NumPy file");
    let (start, length) = match bytes[6] {
        1 => (10, u16::from_le_bytes([bytes[8], bytes[9]]) as usize),
        _ => (12, u32::from_le_bytes(bytes[8..12].try_into().unwrap()) as usize),
    };
    let header = str::from_utf8(&bytes[start..start + length]).expect("a text header");
    let compact = header.replace([' ', '"'], "").replace('\'', "");
    assert!(compact.contains("descr:<f4"), "not little-endian f32: {header}");
    assert!(compact.contains("fortran_order:False"), "not in C order: {header}");
    let shape = compact
        .split("shape:(")
        .nth(1)
        .and_then(|rest| rest.split(')').next())
        .expect("a shape");
    let shape: Vec<usize> = shape
        .split(',')
        .filter(|d| !d.is_empty())
        .map(|d| d.parse().expect("a size"))
        .collect();
    assert_eq!(
        bytes.len() - start - length,
        4 * shape.iter().product::<usize>(),
        "data that does not fill {shape:?}"
    );
    Tensor {
        dtype: Dtype::F32,
        shape,
        bytes: bytes[start + length..].to_vec(),
    }
}

/// The types of a PNG's chunks, in order.
pub fn png_chunks(png: &[u8]) -> Vec<String> {
    let mut rest = png.strip_prefix(b"\x89PNG\r\n\x1a\n").expect("a PNG signature");
    let mut chunks = Vec::new();
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        chunks.push(String::from_utf8_lossy(&tail[..4]).into_owned());
        rest = &tail[4 + u32::from_be_bytes(*length) as usize + 4..];
    }
    chunks
}

pub fn read_picture(path: impl AsRef<Path>) -> image::RgbImage {
    let path = path.as_ref();
    let picture = image::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert_eq!(
        picture.color(),
        image::ColorType::Rgb8,
        "{} is not 8-bit RGB",
        path.display()
    );
    picture.into_rgb8()
}

// ---------------------------------------------------------------------------------------------------------------------
// A folder to run the program in

pub struct Lab {
    dir: tempfile::TempDir,
}

type Snapshot = BTreeMap<PathBuf, Vec<u8>>;

impl Lab {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a temporary folder"),
        }
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file (and the folders above it); gives its name back, to pass to the program, which runs in the lab.
    pub fn write<'n>(&self, name: &'n str, bytes: impl AsRef<[u8]>) -> &'n str {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        name
    }

    pub fn folder<'n>(&self, name: &'n str) -> &'n str {
        fs::create_dir_all(self.path(name)).unwrap();
        name
    }

    /// Saves latents as a pipeline would: one tensor `latents`.
    pub fn latents<'n>(&self, name: &'n str, latents: &Tensor) -> &'n str {
        self.write(name, safetensors_bytes([("latents", latents)], &[]))
    }

    /// A copy of a fixture's model (its config.json and one weights file) in a folder, after `edit`.
    pub fn model<'n>(
        &self,
        folder: &'n str,
        (fixture_name, weights): (&str, &str),
        edit: impl FnOnce(&mut Tensors, &mut Value),
    ) -> &'n str {
        let mut tensors = read_safetensors(fixture(&format!("{fixture_name}/{weights}")));
        let config = fs::read(fixture(&format!("{fixture_name}/config.json"))).expect("a config");
        let mut config = serde_json::from_slice(&config).expect("a JSON config");
        edit(&mut tensors, &mut config);
        self.write(&format!("{folder}/config.json"), config.to_string());
        self.weights(&format!("{folder}/{WEIGHTS}"), &tensors);
        folder
    }

    pub fn weights<'n>(&self, name: &'n str, tensors: &Tensors) -> &'n str {
        self.write(
            name,
            safetensors_bytes(tensors.iter().map(|(k, t)| (k.as_str(), t)), &[]),
        )
    }

    /// Copies one file of the fixtures under another name.
    pub fn copy<'n>(&self, from: &str, to: &'n str) -> &'n str {
        self.write(
            to,
            fs::read(fixture(from)).unwrap_or_else(|e| panic!("fixture {from}: {e}")),
        )
    }

    /// The tensor `image` of a raw output, which must hold nothing else.
    #[track_caller]
    pub fn raw_image(&self, name: &str) -> Tensor {
        let tensors = read_safetensors(self.path(name));
        assert_eq!(tensors.keys().collect::<Vec<_>>(), ["image"], "the tensors of {name}");
        let image = tensors.into_values().next().unwrap();
        assert_eq!(image.dtype, Dtype::F32, "the element type of {name}");
        image
    }

    /// Runs `decode ARGS --device cpu` in the lab.
    pub fn decode(&self, args: &[&str]) -> Run {
        self.decode_on_any_device(&[args, &["--device", "cpu"]].concat())
    }

    /// Runs `decode ARGS` in the lab.
    pub fn decode_on_any_device(&self, args: &[&str]) -> Run {
        self.run(self.command().args(args))
    }

    /// `decode` without arguments, for those that are no strings. Backtraces are on: a user who has them on must still
    /// read one sentence.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_decode"));
        command
            .current_dir(self.dir.path())
            .env("RUST_BACKTRACE", "1")
            // Without it Mesa's Vulkan driver prints lines of its own that start with "error:".
            .env("XDG_RUNTIME_DIR", std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs a [`Lab::command`]. What it says must fit into the 64 KiB that a pipe holds.
    #[track_caller]
    pub fn run(&self, command: &mut Command) -> Run {
        let before = self.snapshot();
        let mut child = command.spawn().expect("the decode binary starts");
        let started = Instant::now();
        while child.try_wait().expect("a child to wait for").is_none() {
            if started.elapsed() > TIME_LIMIT {
                child.kill().and_then(|()| child.wait()).expect("a child to kill");
                panic!("this hangs: {command:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let output = child.wait_with_output().expect("what the child said");
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        let canonical = |path: &Path| path.canonicalize().unwrap_or_default().display().to_string();
        Run {
            command: format!("decode {}", args.join(" ")),
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8 on stdout"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8 on stderr"),
            before,
            after: self.snapshot(),
            roots: vec![
                self.dir.path().display().to_string(),
                canonical(self.dir.path()),
                FIXTURES.to_owned(),
                canonical(Path::new(FIXTURES)),
            ],
        }
    }

    fn snapshot(&self) -> Snapshot {
        fn visit(folder: &Path, root: &Path, files: &mut Snapshot) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    visit(&path, root, files);
                } else {
                    // Reading a pipe would wait for its writer.
                    let content = if path.is_file() {
                        fs::read(&path).unwrap()
                    } else {
                        Vec::new()
                    };
                    files.insert(path.strip_prefix(root).unwrap().to_owned(), content);
                }
            }
        }
        let mut files = Snapshot::new();
        visit(self.dir.path(), self.dir.path(), &mut files);
        files
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the program did

pub struct Run {
    command: String,
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    before: Snapshot,
    after: Snapshot,
    /// Folders of this machine, which may contain any word or number: taken out of a message before it is searched.
    roots: Vec<String>,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let changes = self.changes();
        let code = self.code.map_or("a signal".to_owned(), |code| code.to_string());
        writeln!(
            f,
            "$ {}\nexit: {code}\nfiles written, changed or removed: {changes:?}",
            self.command
        )?;
        write!(
            f,
            "--- stdout\n{}\n--- stderr\n{}\n---",
            self.stdout.trim_end(),
            self.stderr.trim_end()
        )
    }
}

impl Run {
    /// The files that the run wrote, changed or removed.
    pub fn changes(&self) -> BTreeSet<String> {
        let names: BTreeSet<_> = self.before.keys().chain(self.after.keys()).collect();
        let changed = names
            .into_iter()
            .filter(|name| self.before.get(*name) != self.after.get(*name));
        changed.map(|name| name.display().to_string()).collect()
    }

    /// Exit 0, and exactly these files written: no less, and no temporary left behind.
    #[track_caller]
    pub fn wrote(&self, files: &[&str]) -> &Self {
        assert_eq!(self.code, Some(0), "the decode failed\n{self}");
        assert!(!self.stderr.contains("panicked"), "a thread panicked\n{self}");
        let expected: BTreeSet<String> = files.iter().map(|name| name.to_string()).collect();
        assert_eq!(self.changes(), expected, "other files than expected\n{self}");
        self
    }

    /// Exit 1, one sentence that starts with `error:` and ends stderr, nothing on stdout, no file touched, no panic.
    /// The sentence mentions every one of `needles` ("a|b" is either of two), whatever the case. A number is looked for
    /// as a number of its own (4 is not in 14), a shape like "[1,4,7,5]" in any of the usual spellings.
    #[track_caller]
    pub fn refused(&self, needles: &[&str]) -> &Self {
        assert!(
            !self.stderr.contains("panicked"),
            "a panic is not an error message\n{self}"
        );
        assert_eq!(self.code, Some(1), "a failure must exit with 1\n{self}");
        assert_eq!(self.stdout, "", "a failure must leave stdout empty\n{self}");
        assert_eq!(
            self.changes(),
            BTreeSet::new(),
            "a failure must not touch a file\n{self}"
        );
        let sentence = self.sentence();
        for needle in needles {
            let found = needle.split('|').any(|alternative| mentions(&sentence, alternative));
            assert!(found, "the error must mention {needle:?}\n{self}");
        }
        self
    }

    /// The one line with the error, without the machine's own paths.
    #[track_caller]
    pub fn sentence(&self) -> String {
        let lines: Vec<&str> = self
            .stderr
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
            .collect();
        let errors: Vec<&&str> = lines.iter().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(
            errors.len(),
            1,
            "stderr must hold exactly one line that starts with \"error:\"\n{self}"
        );
        assert_eq!(
            lines.last(),
            Some(errors[0]),
            "the error must be the last line, and one line\n{self}"
        );
        assert!(
            errors[0].len() > "error: ".len() + 10,
            "an error must say something\n{self}"
        );
        let hidden: Vec<&String> = self.roots.iter().filter(|root| !root.is_empty()).collect();
        hidden
            .into_iter()
            .fold(errors[0].to_string(), |text, root| text.replace(root.as_str(), ""))
    }

    /// Exit 2, from the argument parser: nothing on stdout, no file touched.
    #[track_caller]
    pub fn usage_error(&self) -> &Self {
        assert_eq!(self.code, Some(2), "a usage error must exit with 2\n{self}");
        assert!(
            !self.stderr.contains("panicked"),
            "a panic is not a usage error\n{self}"
        );
        assert!(
            self.stderr.contains("error:"),
            "a usage error must be explained\n{self}"
        );
        assert_eq!(self.stdout, "", "a usage error must leave stdout empty\n{self}");
        assert_eq!(
            self.changes(),
            BTreeSet::new(),
            "a usage error must not touch a file\n{self}"
        );
        self
    }

    /// The objects that `--json` printed: every line of stdout is one.
    #[track_caller]
    pub fn json(&self) -> Vec<Value> {
        let parse =
            |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("stdout is not JSON lines: {e}\n{self}"));
        self.stdout.lines().map(parse).collect()
    }

    /// The value of `key` in the only line of `--json`.
    #[track_caller]
    pub fn json_field(&self, key: &str) -> Value {
        let lines = self.json();
        assert_eq!(lines.len(), 1, "one image is one line of JSON\n{self}");
        lines[0]
            .get(key)
            .cloned()
            .unwrap_or_else(|| panic!("no {key:?} in the JSON\n{self}"))
    }
}

fn mentions(sentence: &str, needle: &str) -> bool {
    let sentence = sentence.to_lowercase();
    if needle.starts_with('[') {
        let compact = |text: &str| text.replace([' ', '[', ']', '(', ')'], "").replace(['x', '×'], ",");
        compact(&sentence).contains(&compact(needle))
    } else if needle.bytes().all(|b| b.is_ascii_digit()) {
        sentence
            .split(|c: char| !c.is_alphanumeric())
            .any(|word| word == needle)
    } else {
        sentence.contains(&needle.to_lowercase())
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Comparisons

/// Absolute differences, never a correlation: the largest one must stay within `tolerance`, and NaN never does.
#[track_caller]
pub fn assert_close(actual: &Tensor, expected: &Tensor, tolerance: f32, what: &str) {
    assert_eq!(actual.shape, expected.shape, "{what}: the shape");
    let (actual, expected) = (actual.values(), expected.values());
    let distance = |i: usize| (actual[i] - expected[i]).abs();
    let wrong = |i: &usize| distance(*i) > tolerance || distance(*i).is_nan();
    if let Some(first) = (0..actual.len()).find(wrong) {
        let worst = (0..actual.len()).map(distance).fold(0.0, f32::max);
        let count = (0..actual.len()).filter(wrong).count();
        let (found, wanted, total) = (actual[first], expected[first], actual.len());
        panic!(
            "{what}: {count} of {total} values are off by more than {tolerance:e}, at most by {worst:e}; \
             the first, at {first}, is {found} and should be {wanted}"
        );
    }
}

#[track_caller]
pub fn assert_close_on_average(actual: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(actual.shape, expected.shape, "{what}: the shape");
    let pairs = actual.values().into_iter().zip(expected.values());
    let mean = pairs.map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / actual.len() as f64;
    assert!(
        mean <= tolerance,
        "{what}: off by {mean:e} on average, not {tolerance:e}"
    );
}

#[track_caller]
pub fn assert_same_bits(actual: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(actual.shape, expected.shape, "{what}: the shape");
    if actual.bytes != expected.bytes {
        assert_close(actual, expected, 0.0, what);
        panic!("{what}: equal values in other bits");
    }
}

/// How far two values of any channel are apart at most, and how many of a thousand are identical.
#[track_caller]
pub fn picture_difference(actual: &image::RgbImage, expected: &image::RgbImage, what: &str) -> (u8, f64) {
    assert_eq!(actual.dimensions(), expected.dimensions(), "{what}: the size");
    let pairs = || actual.iter().zip(expected.iter());
    let worst = pairs().map(|(a, b)| a.abs_diff(*b)).max().unwrap();
    (
        worst,
        1000.0 * pairs().filter(|(a, b)| a == b).count() as f64 / expected.len() as f64,
    )
}

/// Every value within 1, 99.9 % identical: truncation instead of rounding already fails.
#[track_caller]
pub fn assert_same_picture(actual: &image::RgbImage, expected: &image::RgbImage, what: &str) {
    let (worst, identical) = picture_difference(actual, expected, what);
    assert!(worst <= 1, "{what}: a value is off by {worst}");
    assert!(
        identical >= 999.0,
        "{what}: only {identical:.2} of 1000 values are identical"
    );
}
