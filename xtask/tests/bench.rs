//! `xtask bench` on the CPU with a small model, and `xtask bench-operations` with small images: what they print, write and
//! refuse.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    let folder = std::env::var_os("BURN_VAE_FIXTURES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures"),
        PathBuf::from,
    );
    folder.join(name)
}

fn bench(folder: &Path, arguments: &[&str]) -> Output {
    xtask(folder, "bench", arguments)
}

fn xtask(folder: &Path, command: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask"))
        .arg(command)
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

/// Quick rows of a model of the fixtures.
fn bench_fixture(folder: &Path, sizes: &str, more: &[&str]) -> Output {
    let vae = fixture("micro-sd");
    let mut arguments = vec!["--vae", vae.to_str().unwrap(), "--sizes", sizes];
    arguments.extend(["--device", "cpu", "--warmups", "1", "--runs", "3"]);
    arguments.extend(more);
    bench(folder, &arguments)
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn assert_refused(output: &Output, message: &str) {
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains(message), "{}", text(&output.stderr));
}

#[test]
fn rows_are_printed_written_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench_fixture(folder.path(), "16,32x24", &["--json", "a.json", "--sites"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    for expected in [
        "| micro-sd | 16x16 | 1 | lossless | f32 |",
        "| micro-sd | 32x24 |",
        "| decoder.mid_block |",
    ] {
        assert!(stdout.contains(expected), "{expected} is not in {stdout}");
    }

    let json: Value = serde_json::from_slice(&fs::read(folder.path().join("a.json")).unwrap()).unwrap();
    assert!(json["device"].as_str().unwrap().ends_with(" CPUs"));
    assert!(json["driver"].is_null());
    let row = &json["rows"][1];
    assert_eq!((&row["width"], &row["height"]), (&32.into(), &24.into()));
    assert_eq!((&row["runs"], &row["warmups"]), (&3.into(), &1.into()));
    let number = |name: &str| row[name].as_f64().unwrap();
    assert!(0.0 < number("ms_min") && number("ms_min") <= number("ms_median"));
    assert!(number("ms_median") <= number("ms_max"));
    assert!(number("first_ms") > 0.0 && number("peak_mib") > 1.0);
    assert!(row["clock_mhz_start"].is_null());

    let again = bench(folder.path(), &["--from", "a.json", "--compare", "a.json"]);
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert!(
        text(&again.stdout).contains("| 1.000 | 1.00 |"),
        "{}",
        text(&again.stdout)
    );
    assert!(!text(&again.stdout).contains("note:"));
}

#[test]
fn the_size_and_the_layout_of_given_latents_are_their_file_s() {
    let folder = tempfile::tempdir().unwrap();
    let (vae, latents) = (fixture("flux1-tiny"), fixture("flux1-tiny/latents/coffee.safetensors"));
    let arguments = ["--vae", vae.to_str().unwrap(), "--latents", latents.to_str().unwrap()];
    let output = bench(
        folder.path(),
        &[&arguments[..], &["--device", "cpu", "--warmups", "0", "--runs", "1"]].concat(),
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    let decoded = vae_io::LatentFile::read(&latents).unwrap();
    // This model doubles the size three times.
    let [.., height, width] = decoded.shape[..] else {
        panic!("{:?}", decoded.shape)
    };
    let size = format!("| {}x{} |", 8 * width, 8 * height);
    assert!(
        text(&output.stdout).contains(&size),
        "{size} is not in {}",
        text(&output.stdout)
    );
}

#[test]
fn a_row_that_cannot_run_fails_the_benchmark_but_not_the_other_rows() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench_fixture(folder.path(), "16,15", &["--dtype", "f32,bf16", "--json", "a.json"]);
    assert_refused(&output, "this model makes images of multiples of 2 pixels, not 15x15");
    assert_refused(&output, "error: 2 rows could not be measured");
    let json: Value = serde_json::from_slice(&fs::read(folder.path().join("a.json")).unwrap()).unwrap();
    assert_eq!(json["rows"].as_array().unwrap().len(), 2);
}

#[test]
fn what_would_fail_after_the_measuring_is_refused_before() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |arguments: &[&str], message| {
        let output = bench_fixture(folder.path(), "16", arguments);
        assert_refused(&output, message);
        assert_eq!(text(&output.stdout), "");
    };
    refused(&["--compare", "none.json"], "cannot read none.json");
    refused(&["--json", "none/a.json"], "there is no folder none");
    refused(&["--record"], "this needs a checkout of burn-vae");
    refused(&["--family", "flux2"], "cannot be used with");
    refused(&["--from", "a.json"], "cannot be used with");
    fs::create_dir(folder.path().join("xtask")).unwrap();
    fs::write(folder.path().join("xtask/Cargo.toml"), "").unwrap();
    refused(&["--record"], "--record takes at least 5 warm-ups and 20 runs");
}

#[test]
fn results_of_another_machine_are_recorded_by_its_device() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("xtask")).unwrap();
    fs::write(folder.path().join("xtask/Cargo.toml"), "").unwrap();
    fs::create_dir_all(folder.path().join("benches/results")).unwrap();
    let row = r#"{"family":"flux2","width":512,"height":512,"batch":1,"quality":"eager","dtype":"bf16","ms_median":21.1,
        "ms_min":20.9,"ms_max":22.0,"runs":RUNS,"warmups":5,"first_ms":900.0,"peak_mib":2632.0,"clock_mhz_start":1980,
        "clock_mhz_end":1965}"#;
    let report = |runs: &str| {
        let row = row.replace("RUNS", runs);
        format!(
            r#"{{"device":"NVIDIA H200","driver":"580.1","date":"2026-12-01","commit":"abc","method":"m","rows":[{row}]}}"#
        )
    };
    fs::write(folder.path().join("quick.json"), report("3")).unwrap();
    fs::write(folder.path().join("full.json"), report("20")).unwrap();
    assert_refused(
        &bench(folder.path(), &["--from", "quick.json", "--record"]),
        "--record takes at least",
    );
    for _ in 0..2 {
        let output = bench(folder.path(), &["--from", "full.json", "--record"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains("nvidia-h200.json"));
    }
    let recorded = fs::read(folder.path().join("benches/results/nvidia-h200.json")).unwrap();
    let recorded: Value = serde_json::from_slice(&recorded).unwrap();
    assert_eq!(recorded.as_array().unwrap().len(), 2);
    assert_eq!(recorded[1]["rows"][0]["clock_mhz_end"], 1965);
}

#[test]
fn operations_are_printed_written_compared_and_recorded_apart_from_decodes() {
    let folder = tempfile::tempdir().unwrap();
    let operations = |arguments: &[&str]| xtask(folder.path(), "bench-operations", arguments);
    let quick = ["--only", "conv1x1,group_norm_silu", "--device", "cpu", "--shrink", "64"];
    let output = operations(&[&quick[..], &["--json", "a.json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    for row in [
        "| conv1x1 | 512->256 8x8 | high | f32 |",
        "| group_norm_silu | 128 16x16 | high | f32 |",
    ] {
        assert!(
            text(&output.stdout).contains(row),
            "{row} is not in {}",
            text(&output.stdout)
        );
    }
    let json: Value = serde_json::from_slice(&fs::read(folder.path().join("a.json")).unwrap()).unwrap();
    assert!(json["method"].as_str().unwrap().starts_with("xtask bench-operations: "));
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 7);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(
            0.0 < number("us_min") && number("us_min") <= number("us_median"),
            "{row}"
        );
        assert!(number("us_median") <= number("us_max"), "{row}");
        assert!(number("calls") >= 1.0, "{row}");
        assert_eq!((number("runs"), number("warmups")), (10.0, 2.0));
        assert_eq!(row["tflops"].is_null(), row["operation"] == "group_norm_silu");
        assert_eq!(row["gb_per_s"].is_null(), row["operation"] == "conv1x1");
    }

    fs::create_dir_all(folder.path().join("xtask")).unwrap();
    fs::write(folder.path().join("xtask/Cargo.toml"), "").unwrap();
    fs::create_dir_all(folder.path().join("benches/results")).unwrap();
    let again = operations(&["--from", "a.json", "--compare", "a.json", "--record"]);
    assert!(again.status.success(), "{}", text(&again.stderr));
    assert_eq!(text(&again.stdout).matches("| 1.000 |").count(), 7);
    assert!(
        text(&again.stdout).contains("-operations.json"),
        "{}",
        text(&again.stdout)
    );

    assert_refused(&operations(&["--from", "a.json", "--runs", "3"]), "cannot be used with");
    assert_refused(
        &operations(&["--record", "--runs", "9"]),
        "--record takes at least 2 warm-ups and 10 runs",
    );
    assert_refused(
        &bench(folder.path(), &["--from", "a.json"]),
        "a.json is not this benchmark's JSON",
    );
}

#[test]
fn a_decode_on_a_gpu_whose_last_synchronise_is_removed_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    // Enough work for the device to be later than whoever gives it.
    for (device, model, size) in [("wgpu", "micro-sd", "64"), ("cuda", "flux2-tiny", "2048")] {
        let vae = fixture(model);
        let bench = |more: &[&str]| {
            Command::new(env!("CARGO_BIN_EXE_xtask"))
                .args([
                    "bench",
                    "--vae",
                    vae.to_str().unwrap(),
                    "--sizes",
                    size,
                    "--device",
                    device,
                    "--dtype",
                    "f32",
                ])
                .args(["--warmups", "0", "--runs", "1"])
                .args(more)
                .current_dir(folder.path())
                // Mesa's lavapipe computes on the thread that submits work: let that be when the device is waited for.
                .env("CUBECL_WGPU_MAX_TASKS", "100000")
                .output()
                .unwrap()
        };
        let with = bench(&[]);
        let stderr = text(&with.stderr);
        if stderr.contains("is not available") {
            let required = std::env::var("BURN_VAE_REQUIRE_DEVICE").is_ok_and(|required| required == device);
            assert!(!required, "{stderr}");
            eprintln!("skipped: {stderr}");
            continue;
        }
        assert!(with.status.success(), "{stderr}");
        let without = bench(&["--without-synchronise"]);
        println!("{}", text(&without.stderr));
        assert_refused(&without, "the timer stopped before the device did: ");
    }
}
