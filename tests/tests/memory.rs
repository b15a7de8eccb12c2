//! The memory of decodes: what is predicted against what a process takes, and what does not fit.

use std::{env, process::Command, time::Instant};

use burn::tensor::{DType as BurnDType, Device, Distribution, Tensor};
use burn_vae::{
    AutoencoderKl, AutoencoderKlConfig, DecodeOptions, Latents, Quality, Storage, Tiling, VaeDecoder, peak_memory,
};
use serde_json::{Value, json};

/// Asks this test's process for one decode; JSON as [`Case::to_json`] writes it.
const CASE: &str = "BURN_VAE_MEMORY_CASE";

/// A decode in a process of its own.
#[derive(Clone)]
struct Case {
    /// Of the blocks from the image inwards.
    widths: Vec<usize>,
    /// Images, height and width of the latents.
    size: [usize; 3],
    quality: Quality,
    tile: &'static str,
    storage: Storage,
}

impl Case {
    fn to_json(&self) -> Value {
        json!({
            "widths": self.widths,
            "size": self.size,
            "quality": self.quality.name(),
            "tile": self.tile,
            "storage": self.storage.name(),
        })
    }

    /// What a process of its own says of it.
    fn run(&self) -> Value {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--exact", "a_decode_in_a_process_of_its_own", "--nocapture"])
            .env(CASE, self.to_json().to_string())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().find_map(|line| line.split_once("measured: "));
        serde_json::from_str(line.unwrap_or_else(|| panic!("{text}")).1).unwrap()
    }
}

/// Does nothing but for the tests below, which call this program again for it.
#[test]
fn a_decode_in_a_process_of_its_own() {
    let Ok(case) = env::var(CASE) else { return };
    let case: Value = serde_json::from_str(&case).unwrap();
    let numbers = |name: &str| -> Vec<usize> {
        let numbers = case[name].as_array().unwrap().iter();
        numbers.map(|number| number.as_u64().unwrap() as usize).collect()
    };
    let text = |name: &str| case[name].as_str().unwrap();
    let device = Device::flex();
    let mut config = AutoencoderKlConfig::flux1();
    config.decoder.block_out_channels = numbers("widths");
    let vae = VaeDecoder::from_module(AutoencoderKl::new(&config, &device));
    let [batch, height, width] = numbers("size")[..] else {
        panic!("{case}")
    };
    let shape = [batch, config.decoder.latent_channels, height, width];
    let options = || DecodeOptions {
        tiling: Some(text("tile").parse::<Tiling>().unwrap()),
        storage: Some(text("storage").parse().unwrap()),
        max_memory: Some(1 << 40),
        ..DecodeOptions::new(text("quality").parse().unwrap())
    };
    let predicted = vae.preflight([batch, height, width], &options()).unwrap().memory.host;
    let latents = Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (&device, BurnDType::F32));
    let started = Instant::now();
    let image = vae.decode_with(Latents::vae(latents), options()).unwrap().image;
    let seconds = started.elapsed().as_secs_f64();
    assert!(image.mean().into_scalar::<f32>().is_finite());
    let peak = peak_memory(&device).unwrap();
    println!(
        "measured: {}",
        json!({ "peak": peak, "predicted": predicted, "seconds": seconds })
    );
}

fn compare(case: &Case) -> (f64, f64) {
    let measured = case.run();
    let mib = |name: &str| measured[name].as_u64().unwrap() as f64 / f64::from(1 << 20);
    let (peak, predicted) = (mib("peak"), mib("predicted"));
    println!(
        "{:?} {:?} {} {} {}: {peak:.0} MiB, predicted {predicted:.0} ({:+.1}%), {:.1} s",
        case.widths,
        case.size,
        case.quality,
        case.tile,
        case.storage,
        100.0 * (predicted / peak - 1.0),
        measured["seconds"].as_f64().unwrap()
    );
    (peak, predicted)
}

/// Cases given as `quality tile storage batch height width`, separated by `;`, on the full-size model.
#[test]
#[ignore = "takes minutes and gigabytes; BURN_VAE_MEMORY_CASES says of what"]
fn full_size() {
    for case in env::var("BURN_VAE_MEMORY_CASES").unwrap().split(';') {
        let words: Vec<&str> = case.split_whitespace().collect();
        let number = |index: usize| words[index].parse().unwrap();
        compare(&Case {
            widths: vec![128, 256, 512, 512],
            size: [number(3), number(4), number(5)],
            quality: words[0].parse().unwrap(),
            tile: words[1].to_string().leak(),
            storage: words[2].parse().unwrap(),
        });
    }
}
