//! Frozen CPU decodes: what the arithmetic gave when these were recorded, so that a change of it is seen.
//!
//! The CPU's matrix products sum in an order that depends on the instruction set, so the bits are those of one machine
//! and the test allows what another order of summation changes.

use burn::tensor::Device;
use burn_vae::DType;
use integration_tests::{MICRO_MODELS, decode, difference, fixture, load, micro, read_tensor};

/// About ten units in the last place of a value near 1.
const TOLERANCE: f32 = 1e-6;

#[test]
fn cpu_decodes_are_what_they_were() {
    let device = Device::flex();
    let golden = fixture("golden-cpu.safetensors");
    for (model, _) in MICRO_MODELS {
        let (latents, _) = micro(model, &device);
        let image = decode(&load(model, &device, DType::F32), latents);
        let (max, _) = difference(&image, &read_tensor(&golden, model).1);
        println!("{model}: max difference to the frozen decode {max:e}");
        assert!(max <= TOLERANCE, "{model}: max difference {max:e}");
    }
}

#[test]
fn the_same_decode_twice_gives_the_same_bits() {
    let device = Device::flex();
    for (model, _) in MICRO_MODELS {
        let vae = load(model, &device, DType::F32);
        let once = decode(&vae, micro(model, &device).0);
        assert_eq!(once, decode(&vae, micro(model, &device).0), "{model}");
    }
}
