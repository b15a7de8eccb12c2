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
            // As `decode` sets it for itself: glibc's heap would keep the gaps between bands.
            .env("MALLOC_MMAP_THRESHOLD_", (8 << 20).to_string())
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
    // Of all threads: what other programs on the machine hardly change.
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let times = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    let ticks: f64 = times.take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    let line = json!({ "peak": peak, "predicted": predicted, "seconds": seconds, "cpu_seconds": ticks / 100.0 });
    println!("measured: {line}");
}

fn compare(case: &Case) -> (f64, f64) {
    let measured = case.run();
    let mib = |name: &str| measured[name].as_u64().unwrap() as f64 / f64::from(1 << 20);
    let (peak, predicted) = (mib("peak"), mib("predicted"));
    println!(
        "{:?} {:?} {} {} {}: {peak:.0} MiB, predicted {predicted:.0} ({:+.1}%), {:.1} s, {:.1} of CPUs",
        case.widths,
        case.size,
        case.quality,
        case.tile,
        case.storage,
        100.0 * (predicted / peak - 1.0),
        measured["seconds"].as_f64().unwrap(),
        measured["cpu_seconds"].as_f64().unwrap()
    );
    (peak, predicted)
}

/// Never under what is measured, and at most a fifth over; small decodes are not held to the fifth, because what a process takes
/// besides is a constant.
#[test]
fn what_the_cpu_takes_was_predicted() {
    if !cfg!(target_os = "linux") {
        return;
    }
    let case = |quality, tile, storage| Case {
        widths: vec![64, 64, 128, 128],
        size: [1, 40, 32],
        quality,
        tile,
        storage,
    };
    for case in [
        case(Quality::High, "off", Storage::Device),
        case(Quality::High, "3", Storage::Device),
        Case {
            size: [2, 28, 24],
            ..case(Quality::High, "3", Storage::Half)
        },
        case(Quality::High, "3", Storage::Disk),
        case(Quality::Lossless, "off", Storage::Device),
        case(Quality::Lossless, "3", Storage::Device),
    ] {
        let (peak, predicted) = compare(&case);
        assert!(
            predicted >= peak && predicted <= 1.2 * peak + 40.0,
            "{peak:.0} MiB, predicted {predicted:.0}"
        );
    }
}

#[test]
fn bands_take_less_memory_and_a_refused_decode_none() {
    let device = Device::flex();
    let vae = VaeDecoder::from_module(AutoencoderKl::new(&AutoencoderKlConfig::flux1(), &device));
    let size = [1, 128, 128];
    let mib = 1u64 << 20;
    let options = |tile: &str, storage, max_memory| DecodeOptions {
        tiling: Some(tile.parse::<Tiling>().unwrap()),
        storage,
        max_memory: Some(max_memory),
        ..DecodeOptions::new(Quality::High)
    };
    let plenty = 1 << 40;
    let of = |tile, storage| {
        vae.preflight(size, &options(tile, Some(storage), plenty))
            .unwrap()
            .memory
            .host
    };
    let (whole, bands) = (of("off", Storage::Device), of("8", Storage::Device));
    let (half, disk) = (of("8", Storage::Half), of("8", Storage::Disk));
    println!("{} {} {} {}", whole / mib, bands / mib, half / mib, disk / mib);
    assert!(whole > bands && bands > half && half > disk);
    assert!(bands <= 3 << 30 && half <= 2 << 30 && disk <= 2 << 30);

    let automatic = |max_memory| vae.preflight(size, &options("auto", None, max_memory));
    assert_eq!(automatic(plenty).unwrap().tile.rows, None);
    let chosen = automatic(whole - 1).unwrap();
    assert!(chosen.tile.rows.is_some() && chosen.memory.host < whole, "{chosen:?}");
    let refusal = automatic(disk).unwrap_err().to_string();
    assert!(refusal.contains("pass --tile auto --storage disk"), "{refusal}");
    // Refused before anything is folded or computed.
    let latents = || Latents::vae(Tensor::<4>::zeros([1, 16, 128, 128], (&device, BurnDType::F32)));
    let started = Instant::now();
    let error = vae
        .decode_with(latents(), options("off", None, whole - 1))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("1024x1024") && error.ends_with("pass --tile auto"),
        "{error}"
    );
    assert!(started.elapsed().as_secs_f64() < 5.0, "it took {:?}", started.elapsed());
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
