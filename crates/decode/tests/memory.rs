//! `--tile`, `--storage` and `--max-memory`.

mod common;

use common::*;

#[test]
fn bands_give_the_same_image_from_every_storage_and_are_told() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 21, 9]));
    let decode = |output: &str, options: &[&str]| {
        let args = [file, "--vae", &fixture("micro-sd"), "-o", output];
        let run = lab.decode(&[&args[..], options].concat());
        run.wrote(&[output]);
        (lab.raw_image(output), run)
    };
    for quality in ["lossless", "high"] {
        let (whole, run) = decode(&format!("{quality}.safetensors"), &["--quality", quality]);
        assert!(!run.stderr.contains("bands"), "{run}");
        for storage in ["device", "host", "disk", "half"] {
            let options = ["--quality", quality, "--tile", "2", "--storage", storage];
            let (tiled, run) = decode(&format!("{quality}-{storage}.safetensors"), &options);
            assert!(run.stderr.contains("bands of 2 rows of latents"), "{run}");
            let tolerance = if storage == "half" { 2e-2 } else { F32_TOLERANCE };
            assert_close(&tiled, &whole, tolerance, storage);
        }
    }
}

#[test]
fn auto_takes_bands_only_where_it_must() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 400, 300]));
    let args = [
        file,
        "--vae",
        &fixture("micro-no-attention"),
        "--explain",
        "-o",
        "one.png",
    ];
    let run = lab.decode(&[&args[..], &["--tile", "auto", "--max-memory", "200MiB"]].concat());
    run.wrote(&["one.png"]);
    assert!(run.stderr.contains("bands of"), "{run}");
    assert!(run.stderr.contains("of 200"), "{run}");
}

#[test]
fn what_does_not_fit_is_refused_with_the_numbers_and_the_way_out() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 400, 300]));
    let args = [
        file,
        "--vae",
        &fixture("micro-no-attention"),
        "-o",
        "one.png",
        "--max-memory",
    ];
    let run = lab.decode(&[&args[..], &["200MiB"]].concat());
    run.refused(&["600x800", "200 MiB are allowed", "pass --tile auto"]);
    let run = lab.decode(&[&args[..], &["1MiB", "--tile", "auto"]].concat());
    run.refused(&["600x800", "1 MiB are allowed", "decode a smaller image"]);
}

#[test]
fn flags_that_mean_nothing_are_usage_errors() {
    let lab = Lab::new();
    let file = lab.latents("one.safetensors", &Tensor::wave(&[1, 4, 5, 9]));
    let args = [file, "--vae", &fixture("micro-sd")];
    for flags in [
        ["--tile", "0"],
        ["--tile", "many"],
        ["--storage", "cloud"],
        ["--max-memory", "6GB"],
        ["--max-memory", "-1"],
    ] {
        lab.decode(&[&args[..], &flags].concat()).usage_error();
    }
}
