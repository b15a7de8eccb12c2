//! The library on GPUs against the CPU's f32: wgpu (in CI: Mesa's lavapipe) and CUDA, each where built in and present.
//!
//! `BURN_VAE_REQUIRE_DEVICE=wgpu` (or `cuda`) makes an absent device a failure instead of a skipped test.

use burn::tensor::Device;
use burn_vae::{DType, DeviceName};
use integration_tests::{MICRO_MODELS, PICTURES, TRAINED_MODELS, decode, difference, fixture, load, micro, picture};

fn open(name: &str) -> Option<Device> {
    match name.parse::<DeviceName>().unwrap().open() {
        Ok((device, _)) => Some(device),
        Err(error) => {
            let required = std::env::var("BURN_VAE_REQUIRE_DEVICE").is_ok_and(|required| required == name);
            assert!(!required, "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Every random model in f32 against diffusers' f32, and a picture of some trained ones against the CPU's.
fn f32_matches(device: &Device, trained: &[&str], tolerance: f32) {
    for (model, _) in MICRO_MODELS {
        let (latents, expected) = micro(model, device);
        let (max, _) = difference(&decode(&load(model, device, DType::F32), latents), &expected);
        assert!(max <= tolerance, "{model}: max abs difference {max}");
    }
    let cpu = Device::flex();
    for model in trained {
        let image = decode(&load(model, device, DType::F32), picture(model, "chelsea", device));
        let truth = decode(&load(model, &cpu, DType::F32), picture(model, "chelsea", &cpu));
        let (max, mean) = difference(&image, &truth);
        println!("{model}/chelsea f32: max {max:.2e}, mean {mean:.2e}");
        assert!(max <= tolerance, "{model}: max abs difference {max}");
    }
}

#[test]
fn wgpu_f32_matches_the_cpu() {
    if let Some(device) = open("wgpu") {
        f32_matches(&device, &["flux2-tiny"], 1e-3);
    }
}

#[test]
fn cuda_f32_matches_the_cpu() {
    if let Some(device) = open("cuda") {
        // Convolutions and matrix products may run in TF32 there: 10 bits of mantissa.
        f32_matches(&device, &TRAINED_MODELS, 2e-2);
    }
}

#[test]
fn cuda_bf16_errs_no_more_than_pytorch() {
    let Some(device) = open("cuda") else { return };
    let metrics = std::fs::read_to_string(fixture("metrics.json")).unwrap();
    let metrics: serde_json::Value = serde_json::from_str(&metrics).unwrap();
    let cpu = Device::flex();
    let mut worse = Vec::new();
    for model in TRAINED_MODELS {
        let (f32, bf16) = (load(model, &cpu, DType::F32), load(model, &device, DType::BF16));
        for name in PICTURES {
            let truth = decode(&f32, picture(model, name, &cpu));
            let (max, mean) = difference(&decode(&bf16, picture(model, name, &device)), &truth);
            let pytorch = &metrics["pytorch_bf16_against_f32"]["pictures"][format!("{model}/{name}")]["mean_abs"];
            let ratio = mean / pytorch.as_f64().unwrap();
            println!("{model}/{name} bf16: max {max:.2e}, mean {mean:.3e}, {ratio:.3} of PyTorch's mean");
            if ratio > 1.1 {
                worse.push(format!("{model}/{name}: {ratio:.3}"));
            }
        }
    }
    assert!(worse.is_empty(), "mean error over 1.1x PyTorch's: {worse:?}");
}
