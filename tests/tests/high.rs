//! `Quality::High` against Lossless and against the CPU's f32, on every device that is there.

use burn::{module::Module, store::ModuleRecord, tensor::Device};
use burn_vae::{DType, Quality, VaeConfig, VaeDecoder, VaeModule};
use integration_tests::{
    MICRO_MODELS, PICTURES, TRAINED_MODELS, decode, decode_with, difference, fixture, load, micro, open,
    parameter_names, picture, random,
};

/// PSNR of images in -1..1.
fn psnr(a: &[f32], b: &[f32]) -> f64 {
    let squares: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    10.0 * (4.0 * a.len() as f64 / squares).log10()
}

fn micro_models_match(device: &Device, tolerance: f32) {
    for (model, _) in MICRO_MODELS {
        let (latents, expected) = micro(model, device);
        let vae = load(model, device, DType::F32);
        let (max, mean) = difference(&decode_with(&vae, latents, Quality::High), &expected);
        println!("{model} f32 high: max {max:.2e}, mean {mean:.2e}");
        assert!(max <= tolerance, "{model}: max abs difference {max}");
    }
}

/// High of one picture in f32 against Lossless on the CPU.
fn f32_matches_lossless(device: &Device, model: &str, name: &str, bar: f64) {
    let cpu = Device::flex();
    let truth = decode(&load(model, &cpu, DType::F32), picture(model, name, &cpu));
    let vae = load(model, device, DType::F32);
    let decibels = psnr(&decode_with(&vae, picture(model, name, device), Quality::High), &truth);
    println!("{model}/{name}: {decibels:.1} dB");
    assert!(decibels >= bar, "{model}/{name}: {decibels:.1} dB");
}

#[test]
fn cpu_random_models_match() {
    micro_models_match(&Device::flex(), 5e-5);
}

#[test]
fn cpu_f32_is_lossless_to_100_db() {
    for model in TRAINED_MODELS {
        for name in PICTURES {
            f32_matches_lossless(&Device::flex(), model, name, 100.0);
        }
    }
}

#[test]
fn wgpu_f32_matches() {
    let Some(device) = open("wgpu") else { return };
    micro_models_match(&device, 1e-4);
    f32_matches_lossless(&device, "flux2-tiny", "chelsea", 100.0);
}

#[test]
fn cuda_f32_matches() {
    let Some(device) = open("cuda") else { return };
    micro_models_match(&device, 1e-4);
    for model in TRAINED_MODELS {
        f32_matches_lossless(&device, model, "chelsea", 100.0);
    }
}

/// High in bf16 is within 55 dB of Lossless in bf16, errs no more than it on average, and at most 1.05 times as much as
/// PyTorch's bf16 on any picture.
fn bf16_errs_no_more_than_lossless(device: &Device) {
    let metrics = std::fs::read_to_string(fixture("metrics.json")).unwrap();
    let metrics: serde_json::Value = serde_json::from_str(&metrics).unwrap();
    let cpu = Device::flex();
    let mut ratios = Vec::new();
    for model in TRAINED_MODELS {
        let vae = load(model, device, DType::BF16);
        let truth = load(model, &cpu, DType::F32);
        for name in PICTURES {
            let truth = decode(&truth, picture(model, name, &cpu));
            let lossless = decode(&vae, picture(model, name, device));
            let high = decode_with(&vae, picture(model, name, device), Quality::High);
            let decibels = psnr(&high, &lossless);
            let (_, high) = difference(&high, &truth);
            let (_, lossless) = difference(&lossless, &truth);
            let pytorch = &metrics["pytorch_bf16_against_f32"]["pictures"][format!("{model}/{name}")]["mean_abs"];
            let of_pytorch = high / pytorch.as_f64().unwrap();
            let of_lossless = high / lossless;
            println!(
                "{model}/{name} bf16: {decibels:.1} dB to lossless, {of_lossless:.3} of its error, {of_pytorch:.3} of PyTorch's"
            );
            assert!(decibels >= 55.0, "{model}/{name}: {decibels:.1} dB");
            assert!(of_pytorch <= 1.05, "{model}/{name}: {of_pytorch:.3} of PyTorch's error");
            ratios.push(of_lossless);
        }
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    println!("mean {mean:.4} of lossless's error");
    assert!(mean <= 1.0, "{mean:.4} of lossless's error");
}

#[test]
fn cuda_bf16_errs_no_more_than_lossless() {
    if let Some(device) = open("cuda") {
        bf16_errs_no_more_than_lossless(&device);
    }
}

/// Lossless has the same bits before, between and after High, and so has High.
fn gate_leaves_no_trace(device: &Device, dtype: DType) {
    let vae: VaeDecoder = load("micro-sd", device, dtype);
    let latents = || micro("micro-sd", device).0;
    let lossless = decode(&vae, latents());
    let high = decode_with(&vae, latents(), Quality::High);
    assert_ne!(lossless, high, "High ran Lossless");
    for _ in 0..2 {
        assert_eq!(decode(&vae, latents()), lossless);
        assert_eq!(decode_with(&vae, latents(), Quality::High), high);
    }
    // As in a decoder that never ran the other.
    let fresh = load("micro-sd", device, dtype);
    assert_eq!(decode_with(&fresh, latents(), Quality::High), high);
}

/// Folds of weights that are gone would decode to their picture.
fn other_weights_decode_as_in_a_fresh_decoder(device: &Device, dtype: DType) {
    let latents = || micro("micro-sd", device).0;
    let vae = load("micro-sd", device, dtype);
    let before = decode_with(&vae, latents(), Quality::High);

    let config = VaeConfig::read(fixture("micro-sd/config.json")).unwrap();
    let fresh = random::decoder(&config, device, vae.dtype());
    let VaeModule::AutoencoderKl(other) = fresh.module().clone() else {
        panic!("micro-sd is an AutoencoderKL")
    };
    let VaeModule::AutoencoderKl(module) = vae.into_module() else {
        panic!("micro-sd is an AutoencoderKL")
    };
    let vae = VaeDecoder::from_module(module.load_record(other.into_record()));
    let after = decode_with(&vae, latents(), Quality::High);
    assert_ne!(after, before, "the weights are the same");
    assert_eq!(after, decode_with(&fresh, latents(), Quality::High));
    assert_eq!(decode(&vae, latents()), decode(&fresh, latents()));
}

/// What High derives from the weights is in no record.
fn records_are_the_same_after_high(device: &Device, dtype: DType) {
    let latents = || micro("micro-sd", device).0;
    let vae = load("micro-sd", device, dtype);
    let folder = tempfile::tempdir().unwrap();
    let save = |name: &str| {
        let VaeModule::AutoencoderKl(module) = vae.module().clone() else {
            panic!("micro-sd is an AutoencoderKL")
        };
        let path = folder.path().join(name);
        module.into_record().save(&path).unwrap();
        std::fs::read(path).unwrap()
    };
    let (names, record) = (parameter_names(vae.module()), save("before.bpk"));
    let high = decode_with(&vae, latents(), Quality::High);
    assert_eq!(parameter_names(vae.module()), names);
    assert!(save("after.bpk") == record, "the record's bytes are others");

    let VaeModule::AutoencoderKl(module) = vae.into_module() else {
        panic!("micro-sd is an AutoencoderKL")
    };
    let record = ModuleRecord::load(folder.path().join("after.bpk")).unwrap();
    let vae = VaeDecoder::from_module(module.try_load_record(record).unwrap());
    assert_eq!(decode_with(&vae, latents(), Quality::High), high);
}

/// Threads that decode at once, the first calls of High among them, get what they get one after the other.
fn threads_share_a_decoder(device: &Device, dtype: DType) {
    let latents = || micro("micro-sd", device).0;
    let expected = {
        let vae = load("micro-sd", device, dtype);
        Quality::ALL.map(|quality| decode_with(&vae, latents(), quality))
    };
    let vae = load("micro-sd", device, dtype);
    let qualities = [Quality::High, Quality::Lossless, Quality::High];
    let start = std::sync::Barrier::new(qualities.len());
    std::thread::scope(|scope| {
        for quality in qualities {
            let (vae, start, expected) = (&vae, &start, &expected);
            let latents = latents();
            scope.spawn(move || {
                start.wait();
                for _ in 0..4 {
                    let image = decode_with(vae, latents.clone(), quality);
                    let expected = &expected[usize::from(quality == Quality::High)];
                    assert!(image == *expected, "{quality} beside other threads");
                }
            });
        }
    });
}

/// The tests of the gate on a device.
macro_rules! gate_tests {
    ($($module:ident: $device:literal in $dtype:ident;)*) => {$(
        mod $module {
            use super::*;

            #[test]
            fn gate_leaves_no_trace() {
                if let Some(device) = open($device) {
                    super::gate_leaves_no_trace(&device, DType::$dtype);
                }
            }

            #[test]
            fn other_weights_decode_as_in_a_fresh_decoder() {
                if let Some(device) = open($device) {
                    super::other_weights_decode_as_in_a_fresh_decoder(&device, DType::$dtype);
                }
            }

            #[test]
            fn records_are_the_same_after_high() {
                if let Some(device) = open($device) {
                    super::records_are_the_same_after_high(&device, DType::$dtype);
                }
            }

            #[test]
            fn threads_share_a_decoder() {
                if let Some(device) = open($device) {
                    super::threads_share_a_decoder(&device, DType::$dtype);
                }
            }
        }
    )*};
}

gate_tests! {
    cpu: "cpu" in F32;
    wgpu: "wgpu" in F32;
    cuda: "cuda" in BF16;
}
