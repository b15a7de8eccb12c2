//! The library against the CPU's f32: half precision on the CPU, wgpu (in CI: Mesa's lavapipe) and CUDA, each where built
//! in and present.
//!
//! `BURN_VAE_REQUIRE_DEVICE=wgpu` (or `cuda`) makes an absent device a failure instead of a skipped test.

use burn::tensor::Device;
use burn_vae::DType;
use integration_tests::{MICRO_MODELS, TRAINED_MODELS, decode, difference, fixture, load, micro, open, picture};

/// Every random model in f32 against diffusers' f32.
fn micro_models_match(device: &Device, tolerance: f32) {
    for (model, _) in MICRO_MODELS {
        let (latents, expected) = micro(model, device);
        let (max, mean) = difference(&decode(&load(model, device, DType::F32), latents), &expected);
        println!("{model} f32: max {max:.2e}, mean {mean:.2e}");
        assert!(max <= tolerance, "{model}: max abs difference {max}");
    }
}

/// Largest and mean error of a trained model's picture against the CPU's f32 decode.
fn errors(device: &Device, dtype: DType, model: &str, name: &str) -> (f32, f64) {
    let cpu = Device::flex();
    let truth = decode(&load(model, &cpu, DType::F32), picture(model, name, &cpu));
    let image = decode(&load(model, device, dtype), picture(model, name, device));
    let (max, mean) = difference(&image, &truth);
    println!("{model}/{name} {dtype}: max {max:.2e}, mean {mean:.3e}");
    (max, mean)
}

#[test]
fn wgpu_f32_matches_the_cpu() {
    let Some(device) = open("wgpu") else { return };
    micro_models_match(&device, 1e-3);
    let (max, _) = errors(&device, DType::F32, "flux2-tiny", "chelsea");
    assert!(max <= 1e-3, "max abs difference {max}");
}

/// Convolutions and matrix products may run in TF32 on CUDA: 10 bits of mantissa.
const TF32_TOLERANCE: f32 = 2e-2;

#[test]
fn cuda_f32_matches_the_cpu_on_random_models() {
    if let Some(device) = open("cuda") {
        micro_models_match(&device, TF32_TOLERANCE);
    }
}

fn cuda_f32_matches(model: &str) {
    let Some(device) = open("cuda") else { return };
    let (max, _) = errors(&device, DType::F32, model, "chelsea");
    assert!(max <= TF32_TOLERANCE, "max abs difference {max}");
}

/// The mean error of bf16 is at most 1.1 times that of PyTorch's bf16 on the same picture.
fn bf16_errs_no_more_than_pytorch(device: &Device, model: &str, name: &str) {
    let metrics = std::fs::read_to_string(fixture("metrics.json")).unwrap();
    let metrics: serde_json::Value = serde_json::from_str(&metrics).unwrap();
    let pytorch = &metrics["pytorch_bf16_against_f32"]["pictures"][format!("{model}/{name}")]["mean_abs"];
    let (_, mean) = errors(device, DType::BF16, model, name);
    let ratio = mean / pytorch.as_f64().unwrap();
    println!("{model}/{name} bf16: {ratio:.3} of PyTorch's mean error");
    assert!(ratio <= 1.1, "{ratio:.3} of PyTorch's mean error");
}

fn cuda_bf16_errs_no_more_than_pytorch(model: &str, name: &str) {
    if let Some(device) = open("cuda") {
        bf16_errs_no_more_than_pytorch(&device, model, name);
    }
}

#[test]
fn cpu_bf16_errs_no_more_than_pytorch() {
    for model in TRAINED_MODELS {
        bf16_errs_no_more_than_pytorch(&Device::flex(), model, "chelsea");
    }
}

/// A test a model and a picture, so that a failure names them and they can run side by side.
macro_rules! cuda_tests {
    ($($module:ident: $model:literal;)*) => {$(
        mod $module {
            #[test]
            fn cuda_f32_matches_the_cpu() {
                super::cuda_f32_matches($model);
            }

            #[test]
            fn cuda_bf16_astronaut() {
                super::cuda_bf16_errs_no_more_than_pytorch($model, "astronaut");
            }

            #[test]
            fn cuda_bf16_chelsea() {
                super::cuda_bf16_errs_no_more_than_pytorch($model, "chelsea");
            }

            #[test]
            fn cuda_bf16_coffee() {
                super::cuda_bf16_errs_no_more_than_pytorch($model, "coffee");
            }
        }
    )*};
}

cuda_tests! {
    flux2: "flux2-tiny";
    flux1: "flux1-tiny";
    sd: "sd-tiny";
}
