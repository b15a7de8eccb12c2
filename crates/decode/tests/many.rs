//! The program on many files: folders, patterns, device batches, bad files among good ones, interrupted runs.

mod common;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use common::*;

const VAE: &str = "micro-sd";

/// Writes latents for micro-sd of several sizes, in several formats, into `in/`; gives the names of their pictures.
fn mixed_folder(lab: &Lab) -> Vec<&'static str> {
    lab.latents("in/b.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    lab.write("in/a.npy", npy(&Tensor::wave(&[1, 4, 5, 9]).map(|_, x| -x)));
    lab.latents(
        "in/c.safetensors",
        &Tensor::wave(&[1, 4, 7, 5]).map(|_, x| 0.5 * x).cast(Dtype::F16),
    );
    lab.latents(
        "in/pair.sft",
        &Tensor::wave(&[2, 4, 7, 5]).map(|i, x| x + 0.001 * i as f32),
    );
    lab.copy("sd-tiny/latents/chelsea.pt", "in/d.pt");
    lab.copy("sd-tiny/latents/chelsea.npz", "in/e.npz");
    lab.copy("sd-tiny/latents/chelsea.comfyui.latent", "in/f.latent");
    lab.write("in/notes.txt", "not latents");
    lab.write("in/below/g.npy", "not looked at");
    vec!["a", "b", "c", "d", "e", "f", "pair_0", "pair_1"]
}

/// `decode ARGUMENTS --vae micro-sd`, on the CPU.
fn decode(lab: &Lab, arguments: &[&str]) -> Run {
    lab.decode(&[arguments, &["--vae", &fixture(VAE)]].concat())
}

fn pictures(folder: &str, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("{folder}/{name}.png")).collect()
}

#[track_caller]
fn wrote(run: &Run, files: &[String]) {
    run.wrote(&files.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Exit 1, and exactly these files written.
#[track_caller]
fn failed_but_wrote(run: &Run, files: &[&str]) {
    assert_eq!(run.code, Some(1), "{run}");
    assert!(!run.stderr.contains("panicked"), "{run}");
    let expected = files.iter().map(|name| name.to_string()).collect();
    assert_eq!(run.changes(), expected, "{run}");
}

/// Peak signal-to-noise ratio in dB, for values whose range is `range`.
fn psnr(a: impl IntoIterator<Item = f64>, b: impl IntoIterator<Item = f64>, range: f64) -> f64 {
    let squares: Vec<f64> = a.into_iter().zip(b).map(|(a, b)| (a - b).powi(2)).collect();
    let mean = squares.iter().sum::<f64>() / squares.len() as f64;
    10.0 * (range * range / mean).log10()
}

fn psnr_of_tensors(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.shape, b.shape);
    let values = |tensor: &Tensor| tensor.values().into_iter().map(f64::from);
    psnr(values(a), values(b), 2.0)
}

fn psnr_of_pictures(a: &Path, b: &Path) -> f64 {
    let (a, b) = (read_picture(a), read_picture(b));
    assert_eq!(a.dimensions(), b.dimensions());
    psnr(a.iter().map(|&x| x.into()), b.iter().map(|&x| x.into()), 255.0)
}

/// The statuses and inputs of the lines of `--json`.
fn statuses(run: &Run) -> Vec<(String, String)> {
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_else(|| panic!("{key}\n{run}")).to_owned();
    let lines = run.json();
    lines
        .iter()
        .map(|line| (text(line, "status"), text(line, "input")))
        .collect()
}

// ---------------------------------------------------------------------------------------------------------------------
// The same pictures as one by one

#[test]
fn a_folder_gives_the_pictures_of_its_files_one_by_one_bit_for_bit() {
    let lab = Lab::new();
    let names = mixed_folder(&lab);
    let run = decode(&lab, &["in", "-o", "out"]);
    wrote(&run, &pictures("out", &names));
    assert!(run.stderr.contains("7 files: 7 decoded; 8 images in"), "{run}");
    for file in [
        "a.npy",
        "b.safetensors",
        "c.safetensors",
        "d.pt",
        "e.npz",
        "f.latent",
        "pair.sft",
    ] {
        decode(&lab, &[&format!("in/{file}"), "-o", "single/"]);
    }
    for name in names {
        let read = |folder: &str| fs::read(lab.path(format!("{folder}/{name}.png"))).unwrap();
        assert!(read("out") == read("single"), "{name}");
    }
}

#[test]
fn images_of_several_files_in_one_device_batch_are_what_they_are_alone() {
    let lab = Lab::new();
    let names = mixed_folder(&lab);
    for quality in ["lossless", "high"] {
        let (one, four) = (format!("{quality}-1"), format!("{quality}-4"));
        for (out, batch) in [(&one, "1"), (&four, "4")] {
            let run = decode(
                &lab,
                &["in", "-o", out, "--quality", quality, "--batch", batch, "--json"],
            );
            wrote(&run, &pictures(out, &names));
            // All images of a batch take the same time, so a batch size that is ignored shows.
            let seconds: Vec<f64> = run
                .json()
                .iter()
                .map(|line| line["decode_s"].as_f64().unwrap())
                .collect();
            let inputs: Vec<String> = statuses(&run).into_iter().map(|(_, input)| input).collect();
            if batch == "4" {
                let order = [
                    "a.npy",
                    "b.safetensors",
                    "c.safetensors",
                    "pair.sft",
                    "pair.sft",
                    "d.pt",
                    "e.npz",
                    "f.latent",
                ];
                assert_eq!(inputs, order.map(|file| format!("in/{file}")), "{run}");
                // d and e are in diffusion space, f in VAE space.
                let sizes = [1, 4, 2, 1];
                let mut rest = &seconds[..];
                for size in sizes {
                    let (batch, after) = rest.split_at(size);
                    assert!(batch.iter().all(|s| *s == batch[0]), "{run}");
                    assert!(after.first() != Some(&batch[0]), "{run}");
                    rest = after;
                }
            } else {
                assert!(seconds.windows(2).all(|pair| pair[0] != pair[1]), "{run}");
            }
        }
        for name in &names {
            let path = |out: &str| lab.path(format!("{out}/{name}.png"));
            let psnr = psnr_of_pictures(&path(&one), &path(&four));
            assert!(psnr >= 60.0, "{quality} {name}: {psnr} dB");
        }
    }
}

/// In f32, and in one raw file that several device batches end up in.
#[test]
fn a_file_of_six_images_in_device_batches_of_four_is_the_file_decoded_one_by_one() {
    let lab = Lab::new();
    let six = lab.latents("six.safetensors", &Tensor::wave(&[6, 4, 7, 5]));
    for quality in ["lossless", "high"] {
        let raw = |batch: &[&str], out: &str| {
            decode(&lab, &[&[six, "-o", out, "--quality", quality], batch].concat()).wrote(&[out]);
            read_npy(lab.path(out))
        };
        let one = raw(&["--batch", "1"], &format!("{quality}-1.npy"));
        let four = raw(&["--batch", "4"], &format!("{quality}-4.npy"));
        let default = raw(&[], &format!("{quality}.npy"));
        let psnr = psnr_of_tensors(&four, &one);
        assert!(psnr >= 60.0, "{quality}: {psnr} dB");
        // On the CPU both qualities decode one by one unless asked.
        assert_same_bits(&default, &one, quality);
    }
}

/// Threads that copy images from a GPU are not the one that decodes them. Skipped where there is no Vulkan device.
#[test]
fn a_gpu_decodes_a_folder_as_the_cpu_does() {
    let lab = Lab::new();
    let names = ["a", "b", "c", "d", "e", "f"];
    for (i, name) in names.into_iter().enumerate() {
        let latents = Tensor::wave(&[1, 4, 7, 5 + i / 4]).map(|_, x| x * (1.0 + i as f32 / 8.0));
        lab.write(&format!("in/{name}.npy"), npy(&latents));
    }
    let vae = fixture(VAE);
    wrote(&decode(&lab, &["in", "-o", "cpu"]), &pictures("cpu", &names));
    for (quality, batch) in [("lossless", "1"), ("high", "3")] {
        let options = ["in", "-o", quality, "--quality", quality, "--batch", batch];
        let run = lab.decode_on_any_device(&[&options[..], &["--vae", &vae, "--device", "wgpu"]].concat());
        if run.stderr.contains("device wgpu is not available") {
            let required = std::env::var("BURN_VAE_REQUIRE_DEVICE").is_ok_and(|device| device == "wgpu");
            assert!(!required, "{run}");
            return;
        }
        wrote(&run, &pictures(quality, &names));
        for name in names {
            let path = |folder: &str| lab.path(format!("{folder}/{name}.png"));
            let psnr = psnr_of_pictures(&path("cpu"), &path(quality));
            assert!(psnr >= 60.0, "{quality} {name}: {psnr} dB");
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// What is an input

#[test]
fn a_quoted_pattern_is_what_the_shell_would_have_made_of_it() {
    let lab = Lab::new();
    let z = Tensor::wave(&[1, 4, 3, 4]);
    for name in ["day-1/a.npy", "day-2/b.npy", "day-2/c.npy", "night/d.npy", "x[1].npy"] {
        lab.write(name, npy(&z));
    }
    decode(&lab, &["day-*/[ab].npy", "x[1].npy", "-o", "one/"]).wrote(&["one/a.png", "one/b.png", "one/x[1].png"]);
    // A pattern may match folders, and one match is enough.
    decode(&lab, &["day-*", "-o", "two"]).wrote(&["two/a.png", "two/b.png", "two/c.png"]);
    decode(&lab, &["**/d.npy", "-o", "three"]).wrote(&["three/d.png"]);
}

#[test]
fn outputs_in_the_folder_of_the_inputs_are_not_decoded_by_the_next_run() {
    let lab = Lab::new();
    lab.write("in/a.npy", npy(&Tensor::wave(&[1, 4, 3, 4])));
    lab.latents("in/b.safetensors", &Tensor::wave(&[1, 4, 3, 4]));
    decode(&lab, &["in", "-o", "in"]).wrote(&["in/a.png", "in/b.png"]);
    decode(&lab, &["in", "-o", "in/pictures/"]).wrote(&["in/pictures/a.png", "in/pictures/b.png"]);
    let run = decode(&lab, &["in", "-o", "in", "--resume"]);
    run.wrote(&[]);
    assert!(run.stderr.contains("2 files: 0 decoded, 2 skipped"), "{run}");
}

#[test]
fn collisions_in_folders_are_refused_before_anything_is_written() {
    let lab = Lab::new();
    let z = npy(&Tensor::wave(&[1, 4, 3, 4]));
    for name in ["a/same.npy", "a/other.npy", "b/same.npy", "c/same.npy", "c/same.pt"] {
        lab.write(name, &z);
    }
    for inputs in [
        &["a", "b"][..],
        &["c"],
        &["a", "a/same.npy"],
        &["a", "a"],
        &["*/same.npy"],
    ] {
        decode(&lab, &[inputs, &["-o", "out"]].concat()).refused(&["would both be written", "out/", "two runs"]);
    }
    assert!(!lab.path("out").exists());
    decode(&lab, &["a", "-o", "one.png"]).usage_error();
}

// ---------------------------------------------------------------------------------------------------------------------
// Bad files

#[test]
fn bad_files_are_reported_and_the_others_are_decoded() {
    let good = Tensor::wave(&[1, 4, 7, 5]);
    let whole = safetensors_bytes([("latents", &good)], &[]);
    for batch in ["1", "4"] {
        let lab = Lab::new();
        lab.latents("in/a.safetensors", &good);
        lab.write("in/b-corrupt.safetensors", "not a file of latents");
        lab.write("in/c-cut.safetensors", &whole[..whole.len() - 1]);
        lab.latents("in/d-family.safetensors", &Tensor::wave(&[1, 16, 7, 5]));
        lab.latents("in/e.safetensors", &good);
        // Their headers are sound.
        lab.write("in/f-nan.npy", npy(&good.map(|_, _| f32::NAN)));
        lab.latents("in/g-huge.safetensors", &good.map(|_, x| x * 1e20));
        lab.latents("in/h.safetensors", &good);
        let run = decode(&lab, &["in", "-o", "out", "--batch", batch, "--json"]);
        failed_but_wrote(&run, &["out/a.png", "out/e.png", "out/h.png"]);
        let bad = [
            ("b-corrupt.safetensors", "none of .safetensors"),
            ("c-cut.safetensors", "bytes"),
            ("d-family.safetensors", "16-channel latents"),
            ("f-nan.npy", "140 non-finite values"),
            ("g-huge.safetensors", "decoder."),
        ];
        for (file, reason) in bad {
            // At the time, and in the summary.
            for start in ["error:", "failed:"] {
                let told = |line: &&str| line.starts_with(start) && line.contains(file) && line.contains(reason);
                assert_eq!(run.stderr.lines().filter(told).count(), 1, "{start} {file}\n{run}");
            }
        }
        assert!(run.stderr.contains("8 files: 3 decoded, 5 failed; 3 images"), "{run}");
        let mut statuses = statuses(&run);
        // What is bad on the face of it is told first.
        assert_eq!(statuses[0].1, "in/b-corrupt.safetensors", "{run}");
        statuses.sort_by(|a, b| a.1.cmp(&b.1));
        let statuses: Vec<&str> = statuses.iter().map(|(status, _)| status.as_str()).collect();
        let expected = [
            "decoded", "failed", "failed", "failed", "decoded", "failed", "failed", "decoded",
        ];
        assert_eq!(statuses, expected, "{run}");
    }
}

#[test]
fn a_folder_without_a_good_file_fails_and_makes_no_folder() {
    let lab = Lab::new();
    lab.write("in/a.npy", "bad");
    lab.write("in/b.npy", "bad");
    let run = decode(&lab, &["in", "-o", "out"]);
    failed_but_wrote(&run, &[]);
    assert!(run.stderr.contains("2 files: 0 decoded, 2 failed"), "{run}");
    lab.write("in/b.npy", npy(&Tensor::wave(&[1, 16, 7, 5])));
    failed_but_wrote(&decode(&lab, &["in", "-o", "out"]), &[]);
    assert!(!lab.path("out").exists());
}

/// A folder with one file is a run of one file.
#[test]
fn the_only_file_of_a_folder_fails_in_one_sentence() {
    let lab = Lab::new();
    lab.write("in/a.npy", "bad");
    decode(&lab, &["in", "-o", "out"]).refused(&["in/a.npy"]);
    lab.write("in/a.npy", npy(&Tensor::wave(&[1, 4, 3, 4])));
    decode(&lab, &["in", "-o", "out"]).wrote(&["out/a.png"]);
}

#[cfg(unix)]
#[test]
fn unreadable_files_are_bad_files() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let lab = Lab::new();
    let z = npy(&Tensor::wave(&[1, 4, 3, 4]));
    lab.write("in/a.npy", &z);
    lab.write("in/b.npy", &z);
    symlink("nowhere", lab.path("in/c.npy")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(lab.path("in/d.npy")).status();
    assert!(made.expect("mkfifo").success());
    fs::set_permissions(lab.path("in/b.npy"), fs::Permissions::from_mode(0o000)).unwrap();
    if fs::read(lab.path("in/b.npy")).is_ok() {
        // Root may read everything.
        fs::write(lab.path("in/b.npy"), "").unwrap();
    }
    let mut command = lab.command();
    command.args(["in", "--vae", &fixture(VAE), "-o", "out", "--device", "cpu"]);
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    for file in ["in/b.npy", "in/c.npy", "in/d.npy"] {
        let told = |line: &&str| line.starts_with("error:") && line.contains(file);
        assert_eq!(stderr.lines().filter(told).count(), 1, "{file}\n{stderr}");
    }
    assert!(stderr.contains("4 files: 1 decoded, 3 failed"), "{stderr}");
    assert_eq!(fs::read_dir(lab.path("out")).unwrap().count(), 1);
}

/// What keeps every file from being told of ends the run, however many there are.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_stops_the_run_with_one_sentence() {
    let lab = Lab::new();
    for i in 0..20 {
        lab.write(&format!("in/{i:02}.npy"), npy(&Tensor::wave(&[1, 4, 3, 4])));
    }
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = lab.command();
    command.args(["in", "--vae", &fixture(VAE), "-o", "out", "--device", "cpu", "--json"]);
    let run = lab.run(command.stdout(full));
    assert_eq!(run.code, Some(1), "{run}");
    let last = run.stderr.lines().last().unwrap();
    assert!(last.starts_with("error: cannot write `standard output`"), "{run}");
    assert!(run.stderr.contains("not begun or not finished"), "{run}");
    assert!(run.changes().len() < 20, "it went on\n{run}");
}

// ---------------------------------------------------------------------------------------------------------------------
// Interrupted runs

/// The pictures in a folder, which may not exist yet: when they were written, and what they hold.
fn pictures_in(folder: &Path) -> BTreeMap<OsString, (SystemTime, Vec<u8>)> {
    let entries = fs::read_dir(folder).into_iter().flatten().map(Result::unwrap);
    let pictures = entries.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "png"));
    let stamp = |entry: fs::DirEntry| {
        let modified = entry.metadata().unwrap().modified().unwrap();
        (entry.file_name(), (modified, fs::read(entry.path()).unwrap()))
    };
    pictures.map(stamp).collect()
}

/// Killed three times in the middle: nothing is lost, half-written or done twice.
#[cfg(unix)]
#[test]
fn a_killed_run_is_finished_by_the_next() {
    const FILES: usize = 40;
    let lab = Lab::new();
    for i in 0..FILES {
        let latents = Tensor::wave(&[1, 4, 24, 20 + i % 2]).map(|_, x| x * (1.0 + i as f32 / 40.0));
        lab.latents(&format!("in/{i:02}.safetensors"), &latents);
    }
    let pair = Tensor::wave(&[2, 4, 24, 20]);
    lab.latents("in/pair.safetensors", &pair);
    let vae = fixture(VAE);
    let args = |out: &'static str| ["in", "--vae", vae.as_str(), "--device", "cpu", "--json", "-o", out];
    let whole = lab.run(lab.command().args(args("whole")));
    let expected = pictures_in(&lab.path("whole"));
    assert_eq!((whole.code, expected.len()), (Some(0), FILES + 2), "{whole}");

    let out = lab.path("out");
    let mut done = BTreeMap::new();
    // INT would do the same, but is ignored where tests run in the background of a script.
    for signal in ["KILL", "TERM", "KILL"] {
        let mut child = lab.command().args(args("out")).arg("--resume").spawn().unwrap();
        let started = Instant::now();
        while pictures_in(&out).len() < done.len() + 3 {
            assert!(started.elapsed() < Duration::from_secs(60), "it writes nothing");
            assert!(child.try_wait().unwrap().is_none(), "it was not killed in the middle");
            std::thread::sleep(Duration::from_millis(1));
        }
        let kill = std::process::Command::new("kill")
            .args([format!("-{signal}"), child.id().to_string()])
            .status();
        assert!(kill.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), None, "{signal}: it ended by itself");
        let before = std::mem::replace(&mut done, pictures_in(&out));
        assert!(done.len() < FILES, "{signal}: everything was done");
        for (name, (_, content)) in &done {
            assert!(*content == expected[name].1, "{name:?} is not whole");
        }
        for (name, picture) in before {
            assert!(done[&name] == picture, "{name:?} was done twice");
        }
    }
    // One of a pair is missing, and something that a killed run left is there.
    decode(&lab, &["in/pair.safetensors", "-o", "out", "--resume"]);
    fs::remove_file(lab.path("out/pair_1.png")).unwrap();
    lab.write("out/.burn-vae-abcdef.tmp", "half a picture");
    let before = pictures_in(&out);

    let last = lab.run(lab.command().args(args("out")).arg("--resume"));
    assert_eq!(last.code, Some(0), "{last}");
    let done = pictures_in(&out);
    for (name, picture) in &before {
        assert!(done[name] == *picture, "{name:?} was done twice");
    }
    let decoded = last
        .json()
        .into_iter()
        .filter(|line| line["status"] == json!("decoded"));
    assert_eq!(decoded.count(), FILES + 2 - before.len(), "{last}");
    assert_eq!(last.json().len(), FILES + 2, "every output is told of\n{last}");
    let left: Vec<_> = fs::read_dir(&out).unwrap().collect();
    assert_eq!(left.len(), FILES + 2, "more than pictures is left: {left:?}");
    for (name, (_, content)) in &expected {
        assert!(done[name].1 == *content, "{name:?}");
    }
}

/// They may decode the same, but neither fails, loses a picture or removes what the other is writing.
#[test]
fn two_runs_that_resume_one_folder_at_once_do_no_harm() {
    let lab = Lab::new();
    for i in 0..12 {
        lab.write(&format!("in/{i:02}.npy"), npy(&Tensor::wave(&[1, 4, 12, 8 + i])));
    }
    let vae = fixture(VAE);
    let start = || {
        let args = ["in", "--vae", &vae, "--device", "cpu", "-o", "out", "--resume"];
        lab.command().args(args).spawn().unwrap()
    };
    for run in [start(), start()].map(|run| run.wait_with_output().unwrap()) {
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(run.status.success() && !said.contains("failed"), "{said}");
    }
    assert_eq!(fs::read_dir(lab.path("out")).unwrap().count(), 12);
    let expected = decode(&lab, &["in", "-o", "alone"]);
    assert_eq!(expected.changes().len(), 12, "{expected}");
    let contents = |folder: &str| -> Vec<Vec<u8>> {
        let pictures = pictures_in(&lab.path(folder));
        pictures.into_values().map(|(_, content)| content).collect()
    };
    assert!(contents("out") == contents("alone"));
}

#[test]
fn resume_skips_what_exists_and_replaces_only_what_is_empty() {
    let lab = Lab::new();
    let z = npy(&Tensor::wave(&[1, 4, 3, 4]));
    for name in ["in/done.npy", "in/lost.npy", "in/new.npy"] {
        lab.write(name, &z);
    }
    lab.write("out/done.png", "an older picture");
    lab.write("out/lost.png", "");
    let run = decode(&lab, &["in", "-o", "out", "--resume"]);
    run.wrote(&["out/lost.png", "out/new.png"]);
    assert!(run.stderr.contains("3 files: 2 decoded, 1 skipped"), "{run}");
    // One file alone, and a name that is no file.
    let run = decode(&lab, &["in/done.npy", "-o", "out", "--resume"]);
    run.wrote(&[]);
    assert!(run.stderr.contains("out/done.png exists, skipped"), "{run}");
    lab.write("taken/done.png/keep.txt", "keep");
    decode(&lab, &["in/done.npy", "-o", "taken", "--resume"]).refused(&["taken/done.png", "directory"]);
    // A file that was written by hand is no less there for another run without --resume.
    decode(&lab, &["in", "-o", "out"]).refused(&["out/done.png", "exists"]);
}

/// Images that are sound are kept although another of their file is not.
#[test]
fn a_bad_image_of_a_file_is_reported_and_decoded_again_by_resume() {
    let lab = Lab::new();
    let half_huge = Tensor::wave(&[2, 4, 7, 5]).map(|i, x| if i < 140 { x } else { x * 1e20 });
    lab.latents("in/pair.safetensors", &half_huge);
    lab.latents("in/z.safetensors", &Tensor::wave(&[1, 4, 7, 5]));
    let run = decode(&lab, &["in", "-o", "out", "--batch", "4"]);
    failed_but_wrote(&run, &["out/pair_0.png", "out/z.png"]);
    assert!(run.stderr.contains("2 files: 1 decoded, 1 failed"), "{run}");
    lab.latents("in/pair.safetensors", &Tensor::wave(&[2, 4, 7, 5]));
    decode(&lab, &["in", "-o", "out", "--resume"]).wrote(&["out/pair_1.png"]);
    // A raw file has room for all or none.
    let file = lab.latents("pair.safetensors", &half_huge);
    decode(&lab, &[file, "-o", "pair.npy"]).refused(&["pair.safetensors", "non-finite"]);
}
