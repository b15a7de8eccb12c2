//! `xtask validate` over the fixtures, on the CPU.
//!
//! `BURN_VAE_REQUIRE_CHROMIUM=1` makes an absent Chromium a failure instead of a skipped screenshot.

use std::{
    fs::{self, File},
    io::Write,
    path::PathBuf,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use image::RgbImage;
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::{NamedTempFile, TempDir};

/// No decode or browser takes longer; one that does hangs.
const TIME_LIMIT: Duration = Duration::from_secs(300);

const CPU: &str = "quality=lossless,device=cpu,dtype=f32";

fn fixture(name: &str) -> String {
    format!("{}/../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A folder that the program runs in.
struct Lab(TempDir);

impl Lab {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    fn validate(&self, arguments: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command.arg("validate").args(arguments).current_dir(self.0.path());
        // Without it, graphics drivers print errors of their own.
        command.env("XDG_RUNTIME_DIR", std::env::temp_dir());
        Run(finish(command))
    }

    fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// Writes an f32 array.
    fn npy(&self, name: &str, image: &Tensor) {
        let mut file = File::create(self.path(name)).unwrap();
        let [b, c, h, w] = image.shape;
        let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({b}, {c}, {h}, {w}), }}");
        let header = format!("{header:<117}\n");
        file.write_all(b"\x93NUMPY\x01\x00").unwrap();
        file.write_all(&(header.len() as u16).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        let bytes: Vec<u8> = image.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        file.write_all(&bytes).unwrap();
    }
}

/// Runs a command to its end, or kills it and fails.
fn finish(mut command: Command) -> Output {
    // Files, not pipes: nothing blocks however much is printed.
    let [out, err] = [(); 2].map(|()| NamedTempFile::new().unwrap());
    command.stdin(Stdio::null());
    command.stdout(out.reopen().unwrap()).stderr(err.reopen().unwrap());
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > TIME_LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            let stderr = fs::read(err.path()).unwrap();
            panic!("{command:?} hangs: {}", String::from_utf8_lossy(&stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    Output {
        status,
        stdout: fs::read(out.path()).unwrap(),
        stderr: fs::read(err.path()).unwrap(),
    }
}

/// What a run of the program left behind.
struct Run(Output);

impl Run {
    fn stdout(&self) -> String {
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }

    fn stderr(&self) -> String {
        String::from_utf8(self.0.stderr.clone()).unwrap()
    }

    #[track_caller]
    fn succeeded(self) -> Self {
        assert!(self.0.status.success(), "{}", self.stderr());
        self
    }

    /// Failed with one line of error, the last, which is given back.
    #[track_caller]
    fn failed(&self) -> String {
        let stderr = self.stderr();
        assert_eq!(self.0.status.code(), Some(1), "{stderr}");
        let (before, last) = stderr.trim_end().rsplit_once('\n').unwrap_or(("", stderr.trim_end()));
        assert!(!before.contains("error: "), "{stderr}");
        last.strip_prefix("error: ")
            .unwrap_or_else(|| panic!("{stderr}"))
            .to_string()
    }

    /// The cells of the row of `picture` in the table under `title`.
    #[track_caller]
    fn row(&self, title: &str, picture: &str) -> Vec<String> {
        let text = self.stdout();
        let mut tables = text.split("\n\n").filter_map(|table| table.strip_prefix(title));
        let table = tables.next().unwrap_or_else(|| panic!("no table {title}: {text}"));
        let mut rows = table
            .lines()
            .map(|line| line.split_whitespace().map(str::to_string).collect::<Vec<_>>());
        rows.find(|row| row.first().is_some_and(|name| name == picture))
            .unwrap_or_else(|| panic!("no row {picture}: {text}"))
    }
}

struct Tensor {
    shape: [usize; 4],
    values: Vec<f32>,
}

impl Tensor {
    /// The tensor `image` of a fixture.
    fn expected(name: &str) -> Self {
        let bytes = fs::read(fixture(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor("image").unwrap();
        assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
        let values = tensor.data().as_chunks().0.iter();
        Self {
            shape: tensor.shape().try_into().unwrap(),
            values: values.map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        }
    }

    fn of_picture(picture: &RgbImage) -> Self {
        let (width, height) = (picture.width() as usize, picture.height() as usize);
        let plane = |channel: usize| {
            picture
                .pixels()
                .map(move |pixel| f32::from(pixel[channel]) / 127.5 - 1.0)
        };
        Self {
            shape: [1, 3, height, width],
            values: (0..3).flat_map(plane).collect(),
        }
    }

    /// Adds to the red of a square.
    fn with_square(mut self, corner: usize, side: usize, red: f32) -> Self {
        for y in corner..corner + side {
            for x in corner..corner + side {
                self.values[y * self.shape[3] + x] += red;
            }
        }
        self
    }
}

#[track_caller]
fn assert_near(found: &Value, expected: f64, tolerance: f64) {
    let found = found.as_f64().unwrap();
    assert!(
        (found - expected).abs() <= tolerance,
        "{found} is not {expected} within {tolerance}"
    );
}

#[test]
fn the_cpu_decodes_what_diffusers_does() {
    let lab = Lab::new();
    let (latents, vae) = (fixture("flux2-tiny/latents/chelsea.safetensors"), fixture("flux2-tiny"));
    let reference = fixture("flux2-tiny/chelsea.expected.safetensors");
    let arguments = [&*latents, "--vae", &vae, "--a", CPU, "--reference", &reference];
    let run = lab.validate(&[&arguments[..], &["--bar", "100", "--json", "out.json"]].concat());
    let run = run.succeeded();
    assert_eq!(lab.files(), ["out.json"]);
    let json = lab.json("out.json");
    let comparisons = json["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 1, "A is the truth");
    let picture = &comparisons[0]["pictures"][0];
    assert_eq!(picture["picture"], "chelsea");
    assert_eq!(
        (picture["width"].as_u64(), picture["height"].as_u64()),
        (Some(448), Some(288))
    );
    let unquantised = &picture["f32"];
    assert_near(&unquantised["max_abs"], 2.5e-5, 2.5e-5);
    assert!(unquantised["mean_abs"].as_f64().unwrap() > 0.0, "{unquantised}");
    assert_near(&unquantised["ssim"], 1.0, 1e-7);
    assert!(picture["u8"]["identical_pixels"].as_f64().unwrap() > 0.999, "{picture}");
    assert_eq!(json["bar"]["below"], Value::Array(vec![]));

    let text = run.stdout();
    assert!(
        text.starts_with("A: lossless f32 on cpu (the truth)\nB: reference "),
        "{text}"
    );
    let row = run.row("A against B", "chelsea");
    assert_eq!(row[1], "448x288");
    let psnr: f64 = row[2].parse().unwrap();
    let exact = unquantised["psnr_db"].as_f64().unwrap();
    assert!(
        psnr > 100.0 && psnr <= exact && exact < psnr + 0.01,
        "{psnr} is not {exact} cut off"
    );
}

#[test]
fn a_folder_of_pictures_is_a_reference_of_8_bits() {
    let lab = Lab::new();
    const PICTURES: [&str; 3] = ["astronaut", "chelsea", "coffee"];
    let latents = PICTURES.map(|name| fixture(&format!("flux2-tiny/latents/{name}.safetensors")));
    let vae = fixture("flux2-tiny");
    let mut arguments: Vec<&str> = latents.iter().map(String::as_str).collect();
    arguments.extend(["--vae", &vae, "--a", CPU, "--reference", &vae, "--json", "-"]);
    let run = lab.validate(&arguments).succeeded();
    let json: Value = serde_json::from_str(&run.stdout()).expect("standard output is JSON alone");
    let stderr = run.stderr();
    assert!(
        stderr.contains("\nA against B\npicture"),
        "the table is on standard error: {stderr}"
    );
    assert_eq!(json["b"]["is_eight_bit"], true);
    assert!(stderr.contains("(8 bits a channel: rounding and clamping"), "{stderr}");
    let comparison = &json["comparisons"][0];
    let pictures = comparison["pictures"].as_array().unwrap();
    assert_eq!(pictures.len(), 3);
    let mut worst = f64::INFINITY;
    for (name, picture) in PICTURES.iter().zip(pictures) {
        assert_eq!(picture["picture"], *name);
        // Errors of rounding are uniform, their mean square is a twelfth of the step's: 10 log10(12 * 255^2) = 58.92 dB
        // at most; what is beyond -1..1 is clamped, and costs more.
        let psnr = picture["f32"]["psnr_db"].as_f64().unwrap();
        assert!(psnr > 45.0 && psnr < 58.95, "{picture}");
        assert!(picture["u8"]["identical_pixels"].as_f64().unwrap() > 0.999, "{picture}");
        assert!(picture["u8"]["max_abs"].as_f64().unwrap() <= 1.0, "{picture}");
        worst = worst.min(picture["f32"]["psnr_db"].as_f64().unwrap());
    }
    assert_eq!(comparison["worst"]["f32"]["psnr_db"], worst);
}

/// A reference `chelsea.npy` that differs by 0.5 in the red of a square of 64x64 pixels.
fn plant(lab: &Lab) {
    let expected = Tensor::expected("flux2-tiny/chelsea.expected.safetensors");
    lab.npy("chelsea.npy", &expected.with_square(100, 64, 0.5));
}

/// PSNR and mean error of it: 64 * 64 of 3 * 448 * 288 values are 0.5 off, one of 94.5: 10 log10(4 * 94.5 / 0.25).
const PLANTED: (f64, f64) = (31.795_518, 0.5 / 94.5);

#[test]
fn a_planted_difference_has_the_figures_it_must_have_and_the_bar_is_where_it_is() {
    let lab = Lab::new();
    plant(&lab);
    let (latents, vae) = (fixture("flux2-tiny/latents/chelsea.safetensors"), fixture("flux2-tiny"));
    let validate = |bar: &str, json: &str| {
        let arguments = [&*latents, "--vae", &vae, "--a", CPU, "--reference", "chelsea.npy"];
        lab.validate(&[&arguments[..], &["--bar", bar, "--json", json]].concat())
    };
    let run = validate("31.7", "above.json").succeeded();
    let row = run.row("A against B", "chelsea");
    assert_eq!([&*row[2], &*row[5], &*row[7]], ["31.79", "5.29e-3", "0.500"], "{row:?}");
    assert_eq!(run.row("A against B", "worst")[1..], row[2..]);
    assert_eq!(run.row("A against B", "mean")[1..], row[2..]);
    let json = lab.json("above.json");
    let picture = &json["comparisons"][0]["pictures"][0];
    assert_near(&picture["f32"]["psnr_db"], PLANTED.0, 1e-3);
    assert_near(&picture["f32"]["mean_abs"], PLANTED.1, 1e-5);
    assert_near(&picture["u8"]["identical_pixels"], 1.0 - 4096.0 / 129_024.0, 1e-3);

    let run = validate("31.9", "below.json");
    assert_eq!(
        run.failed(),
        "1 of 1 pictures are below 31.9 dB (PSNR of A against B, range 2): chelsea (31.79 dB)"
    );
    // The figures are there to look at all the same.
    assert_eq!(lab.json("below.json")["bar"]["below"][0], "chelsea (31.79 dB)");
    assert_eq!(run.row("A against B", "chelsea"), row);
}

#[test]
fn both_sides_are_measured_against_the_truth() {
    let lab = Lab::new();
    plant(&lab);
    let (latents, vae) = (fixture("flux2-tiny/latents/chelsea.safetensors"), fixture("flux2-tiny"));
    let validate = |json: &str, arguments: &[&str]| {
        let all = [&*latents, "--vae", &vae, "--json", json, "--a", "device=cpu,dtype=bf16"];
        lab.validate(&[&all[..], arguments].concat()).succeeded()
    };
    // f16 would overflow (force_upcast), so B runs in f32: it is the truth, and is decoded once.
    let run = validate("f16.json", &["--b", "device=cpu,dtype=f16"]);
    let stderr = run.stderr();
    assert!(
        stderr.contains("note: f16 overflows in this model (force_upcast), f32 is used"),
        "{stderr}"
    );
    let json = lab.json("f16.json");
    assert_eq!(
        (&json["a"]["is_truth"], &json["b"]["is_truth"]),
        (&false.into(), &true.into())
    );
    assert_eq!(json["comparisons"].as_array().unwrap().len(), 1);
    let bf16 = &json["comparisons"][0]["pictures"][0];

    // PyTorch's own bf16 errors on this picture.
    let metrics: Value = serde_json::from_slice(&fs::read(fixture("metrics.json")).unwrap()).unwrap();
    let pytorch = &metrics["pytorch_bf16_against_f32"]["pictures"]["flux2-tiny/chelsea"];
    let pytorch = |key: &str| pytorch[key].as_f64().unwrap();
    assert_near(&bf16["f32"]["mean_abs"], pytorch("mean_abs"), 0.1 * pytorch("mean_abs"));
    assert_near(&bf16["f32"]["p99_abs"], pytorch("p99_abs"), 0.1 * pytorch("p99_abs"));
    assert_near(&bf16["f32"]["psnr_db"], pytorch("psnr_range2_db"), 1.0);

    // Without B, the truth is B.
    validate("alone.json", &[]);
    assert_eq!(lab.json("alone.json")["comparisons"], json["comparisons"]);

    // Against a file, the truth is decoded apart, and both sides are measured.
    let run = validate("file.json", &["--reference", "chelsea.npy"]);
    let file = lab.json("file.json");
    let comparisons = file["comparisons"].as_array().unwrap();
    let side = |comparison: &Value, key: &str| comparison[key].as_str().unwrap().to_string();
    let sides: Vec<_> = comparisons
        .iter()
        .map(|c| side(c, "of") + " " + &side(c, "against"))
        .collect();
    assert_eq!(sides, ["a b", "a truth", "b truth"]);
    assert_eq!(&comparisons[1]["pictures"][0], bf16);
    assert_near(&comparisons[2]["pictures"][0]["f32"]["psnr_db"], PLANTED.0, 1e-3);
    assert_eq!(run.row("B against the truth", "chelsea")[2], "31.79");

    validate("without.json", &["--reference", "chelsea.npy", "--no-truth"]);
    let without = lab.json("without.json");
    assert_eq!(without["comparisons"], Value::Array(vec![comparisons[0].clone()]));
}

#[test]
fn images_of_a_batch_are_pictures_of_their_own_and_small_ones_have_no_ssim() {
    let lab = Lab::new();
    let (expected, vae) = (fixture("micro-sd/expected.safetensors"), fixture("micro-sd"));
    let arguments = [
        &*expected,
        "--tensor",
        "vae_latents",
        "--latent-space",
        "vae",
        "--vae",
        &vae,
    ];
    let run = lab.validate(&[&arguments[..], &["--a", CPU, "--reference", &expected]].concat());
    let run = run.succeeded();
    for picture in ["expected_0", "expected_1"] {
        let row = run.row("A against B", picture);
        assert_eq!([&*row[1], &*row[4]], ["10x14", "n/a"]);
        assert!(row[7].parse::<f64>().unwrap() <= 5e-5, "{row:?}");
    }
}

#[test]
fn what_cannot_be_compared_is_one_sentence_and_leaves_no_file() {
    let lab = Lab::new();
    let (latents, vae) = (fixture("flux2-tiny/latents/chelsea.safetensors"), fixture("flux2-tiny"));
    let mut image = Tensor::expected("flux2-tiny/chelsea.expected.safetensors");
    image.shape = [1, 3, 448, 288];
    lab.npy("turned.npy", &image);
    image.shape = [1, 3, 288, 448];
    image.values[7] = f32::NAN;
    lab.npy("nan.npy", &image);
    fs::write(lab.path("kept.html"), "precious").unwrap();
    fs::create_dir(lab.path("empty")).unwrap();
    let before = lab.files();
    let png = fixture("flux2-tiny/chelsea.png");
    let cases: &[(&[&str], &str)] = &[
        (&["--b", "device=cuda:99"], "device cuda:99 is not available: "),
        (&["--no-truth"], "nothing to compare with: pass --b or --reference"),
        (
            &["--reference", "nan.npy"],
            "`nan.npy` contains 1 non-finite values (NaN or Inf) of 387072",
        ),
        (
            &["--reference", "turned.npy"],
            "reference `turned.npy` has the shape [1, 3, 448, 288]",
        ),
        (&["--reference", "missing.npy"], "cannot open `missing.npy`"),
        (&["--reference", "empty"], "no reference for `"),
        (&["--reference", &png, &png], "2 references for 1 files of latents"),
        (&["--html", "kept.html"], "`kept.html` exists; pass --force"),
        (&["--html", "report.txt"], "`report.txt` does not end in .html"),
        (
            &["--json", "no/such/folder.json"],
            "cannot write into the folder `no/such`",
        ),
        (&["--tensor", "image"], "image"),
        (&["--height", "100"], "height"),
    ];
    for (arguments, expected) in cases {
        let mut all = vec![&*latents, "--vae", &vae, "--a", CPU];
        for option in [["--json", "new.json"], ["--html", "new.html"]] {
            if !arguments.contains(&option[0]) {
                all.extend(option);
            }
        }
        all.extend(*arguments);
        let error = lab.validate(&all).failed();
        assert!(error.contains(expected), "{arguments:?}: {error}");
        assert_eq!(lab.files(), before, "{arguments:?}");
    }
    assert_eq!(fs::read(lab.path("kept.html")).unwrap(), b"precious");

    // Wrong usage is clap's: exit code 2.
    let usages: &[&[&str]] = &[
        &["--a", "device=gpu"],
        &["--a", "cpu"],
        &["--bar", "nan"],
        &["--amplify", "0"],
        &["--b", CPU, "--reference", "x.npy"],
    ];
    for arguments in usages {
        let run = lab.validate(&[&[&*latents, "--vae", &vae], *arguments].concat());
        assert_eq!(run.0.status.code(), Some(2), "{arguments:?}: {}", run.stderr());
    }
    assert_eq!(lab.files(), before);
}

#[test]
fn an_image_that_is_not_finite_is_an_error_that_names_picture_and_side() {
    let lab = Lab::new();
    let huge = Tensor {
        shape: [1, 4, 7, 5],
        values: vec![f32::MAX; 4 * 7 * 5],
    };
    lab.npy("huge.npy", &huge);
    let vae = fixture("micro-sd");
    let arguments = [
        "huge.npy", "--vae", &vae, "--a", CPU, "--json", "out.json", "--html", "out.html",
    ];
    let error = lab.validate(&arguments).failed();
    assert!(
        error.starts_with("huge: the image of lossless f32 on cpu contains "),
        "{error}"
    );
    assert!(
        error.ends_with("; check the weights and the scale of the latents"),
        "{error}"
    );
    assert_eq!(lab.files(), ["huge.npy"]);
}

#[test]
fn a_report_never_replaces_what_the_run_reads() {
    let lab = Lab::new();
    fs::copy(fixture("micro-sd/config.json"), lab.path("config.json")).unwrap();
    let before = fs::read(lab.path("config.json")).unwrap();
    let (expected, vae) = (fixture("micro-sd/expected.safetensors"), fixture("micro-sd"));
    let arguments = [&*expected, "--tensor", "vae_latents", "--vae", &vae, "--a", CPU];
    let outputs = ["--config", "config.json", "--json", "config.json", "--force"];
    let error = lab.validate(&[&arguments[..], &outputs].concat()).failed();
    assert_eq!(error, "`config.json` is an input of this run; pass another name");
    assert_eq!(fs::read(lab.path("config.json")).unwrap(), before);
}

// ---------------------------------------------------------------------------------------------------------------------
// The report

/// The square that B has and A has not: its corner, its side, and how much more red it is.
const SQUARE: (usize, usize, f32) = (200, 96, 0.25);

fn is_in_square(x: u32, y: u32) -> bool {
    let (corner, side, _) = SQUARE;
    let inside = corner..corner + side;
    inside.contains(&(x as usize)) && inside.contains(&(y as usize))
}

/// diffusers' picture of astronaut.
fn astronaut() -> RgbImage {
    image::open(fixture("flux2-tiny/astronaut.png")).unwrap().into_rgb8()
}

/// Writes report.html of astronaut: A decoded, B diffusers' picture with a square in it.
fn report(lab: &Lab) -> Run {
    let (corner, side, red) = SQUARE;
    lab.npy(
        "astronaut.npy",
        &Tensor::of_picture(&astronaut()).with_square(corner, side, red),
    );
    let (latents, vae) = (
        fixture("flux2-tiny/latents/astronaut.safetensors"),
        fixture("flux2-tiny"),
    );
    let arguments = [&*latents, "--vae", &vae, "--a", CPU, "--reference", "astronaut.npy"];
    let outputs = ["--bar", "20", "--amplify", "8", "--html", "report.html"];
    lab.validate(&[&arguments[..], &outputs].concat()).succeeded()
}

/// The largest difference in levels of the pixels that `of` chooses.
fn largest_difference(a: &RgbImage, b: &RgbImage, of: impl Fn(u32, u32) -> bool) -> u8 {
    assert_eq!(a.dimensions(), b.dimensions());
    let chosen = a.enumerate_pixels().filter(|(x, y, _)| of(*x, *y));
    let differences = chosen.flat_map(|(x, y, pixel)| [0, 1, 2].map(|c| pixel[c].abs_diff(b.get_pixel(x, y)[c])));
    differences.max().unwrap()
}

/// A picture of the difference: 0.25 of a range of 2 in red, eight times brighter.
#[track_caller]
fn assert_shows_the_square(picture: &RgbImage) {
    let b = astronaut();
    for (x, y, pixel) in picture.enumerate_pixels() {
        let red = if is_in_square(x, y) { 255 } else { 0 };
        for (level, (found, expected)) in b
            .get_pixel(x, y)
            .0
            .into_iter()
            .zip(pixel.0.into_iter().zip([red, 0, 0]))
        {
            // B's rounding to 8 bits is left everywhere, half a level, eight times; and its clamping, where it is at an end.
            let is_near = found.abs_diff(expected) <= 5 || level == 0 || level == 255;
            assert!(is_near, "{pixel:?} at {x}, {y}");
        }
    }
}

#[test]
fn the_report_is_one_file_with_both_pictures_and_their_difference() {
    const PNG: &str = "src=\"data:image/png;base64,";
    let lab = Lab::new();
    report(&lab);
    assert_eq!(lab.files(), ["astronaut.npy", "report.html"]);
    let html = fs::read_to_string(lab.path("report.html")).unwrap();
    let encoded = html.split(PNG).skip(1).map(|rest| rest.split('"').next().unwrap());
    let pictures = encoded.map(|png| {
        image::load_from_memory(&BASE64_STANDARD.decode(png).unwrap())
            .unwrap()
            .into_rgb8()
    });
    let [a, b, difference] = pictures.collect::<Vec<_>>().try_into().unwrap();
    assert!(largest_difference(&a, &astronaut(), |_, _| true) <= 1);
    assert_eq!(largest_difference(&b, &astronaut(), |x, y| !is_in_square(x, y)), 0);
    assert_eq!(
        largest_difference(&b, &astronaut(), is_in_square),
        32,
        "0.25 are 31.9 levels"
    );
    assert_shows_the_square(&difference);

    // Nothing comes from elsewhere, and nothing runs.
    let rest = html.replace(PNG, "");
    for outside in [
        "http:", "https:", "src=", "href", "url(", "@import", "<script", "<link", "<iframe", "onload",
    ] {
        assert!(!rest.contains(outside), "{outside}");
    }
}

/// Opens the report in headless Chromium; `None`, and a word on it, where there is none.
fn chromium(lab: &Lab, arguments: &[&str]) -> Option<Output> {
    if let Err(error) = Command::new("chromium").arg("--version").output() {
        let is_required = std::env::var_os("BURN_VAE_REQUIRE_CHROMIUM").is_some();
        assert!(!is_required, "chromium: {error}");
        eprintln!("skipped: chromium: {error}");
        return None;
    }
    let profile = TempDir::new().unwrap();
    let mut command = Command::new("chromium");
    command
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
        ])
        .args([
            "--disable-background-networking",
            "--hide-scrollbars",
            "--force-color-profile=srgb",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(lab.path("report.html"))
        .current_dir(lab.0.path());
    let output = finish(command);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(output)
}

/// The corner of a picture in a screenshot that shows it pixel by pixel.
fn find(screenshot: &RgbImage, picture: &RgbImage, from_x: u32) -> Option<(u32, u32)> {
    let (width, height) = picture.dimensions();
    let is_alike = |left: u32, top: u32, x: u32, y: u32| {
        let (a, b) = (screenshot.get_pixel(left + x, top + y), picture.get_pixel(x, y));
        (0..3).all(|c| a[c].abs_diff(b[c]) <= 2)
    };
    let is_at = |&(left, top): &(u32, u32)| {
        // Some points all over the picture tell most places apart; then all must agree.
        (0..400).all(|i| is_alike(left, top, i * 379 % width, i * 211 % height))
            && (0..height).all(|y| (0..width).all(|x| is_alike(left, top, x, y)))
    };
    let (right, bottom) = (
        screenshot.width().checked_sub(width)?,
        screenshot.height().checked_sub(height)?,
    );
    let mut corners = (0..=bottom).flat_map(|top| (from_x..=right).map(move |left| (left, top)));
    corners.find(is_at)
}

#[test]
fn chromium_shows_the_pictures_their_difference_the_chart_and_the_numbers() {
    let lab = Lab::new();
    let run = report(&lab);
    // Wide enough for three pictures of 512 pixels in their own size.
    const SIZE: &str = "--window-size=1700,2200";
    if chromium(&lab, &["--screenshot=page.png", SIZE]).is_none() {
        return;
    }
    let open = |name: &str| image::open(lab.path(name)).unwrap().into_rgb8();
    let page = open("page.png");
    let mut with_square = astronaut();
    for (x, y, pixel) in with_square.enumerate_pixels_mut() {
        if is_in_square(x, y) {
            pixel[0] = pixel[0].saturating_add(32);
        }
    }
    let a = find(&page, &astronaut(), 0).expect("A is on the page");
    let b = find(&page, &with_square, a.0 + 512).expect("B is on the page, to the right of A");
    assert_eq!(a.1, b.1, "A and B are side by side");
    let difference = image::imageops::crop_imm(&page, 2 * b.0 - a.0, a.1, 512, 512);
    assert_shows_the_square(&difference.to_image());
    // A is the truth, so the chart has marks of B, in its colour.
    let marks = page.pixels().filter(|pixel| pixel.0 == [180, 84, 10]).count();
    assert!(marks > 50, "{marks} pixels");

    let dom = chromium(&lab, &["--dump-dom"]).unwrap().stdout;
    let dom = String::from_utf8(dom).unwrap();
    for number in &run.row("A against B", "astronaut")[2..] {
        assert!(dom.contains(&format!("<td>{number}</td>")), "{number}");
    }
    for text in [
        "<h1>lossless f32 on cpu against reference astronaut.npy</h1>",
        "Passed: all of 1 at 20 dB or above",
        "Error against the truth",
        "times 8, black is equal",
    ] {
        assert!(dom.contains(text), "{text}");
    }

    // Dark: the same pictures on another page.
    chromium(
        &lab,
        &["--screenshot=dark.png", SIZE, "--blink-settings=preferredColorScheme=0"],
    );
    let dark = open("dark.png");
    let brightness = |page: &RgbImage| page.get_pixel(2, 2).0.into_iter().max().unwrap();
    assert!(
        brightness(&page) > 200 && brightness(&dark) < 50,
        "{} and {}",
        brightness(&page),
        brightness(&dark)
    );
    assert_eq!(find(&dark, &astronaut(), 0), Some(a));
}
