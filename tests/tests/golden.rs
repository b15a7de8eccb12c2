//! Frozen CPU decodes: what the arithmetic gave when these were recorded, so that a change of it is seen.
//!
//! The CPU's matrix products sum in an order that depends on the instruction set, so the bits are those of one machine
//! and the test allows what another order of summation changes. `BURN_VAE_FREEZE=1` freezes them anew; say why in the
//! commit that does.

use std::{collections::BTreeMap, path::Path};

use burn::tensor::Device;
use burn_vae::DType;
use integration_tests::{MICRO_MODELS, decode, difference, fixture, load, micro, read_tensor};
use safetensors::tensor::TensorView;

/// About ten units in the last place of a value near 1.
const TOLERANCE: f32 = 1e-6;

#[test]
fn cpu_decodes_are_what_they_were() {
    let device = Device::flex();
    let golden = fixture("golden-cpu.safetensors");
    if std::env::var_os("BURN_VAE_FREEZE").is_some() {
        freeze(&golden, &device);
    }
    for (model, _) in MICRO_MODELS {
        let (latents, _) = micro(model, &device);
        let image = decode(&load(model, &device, DType::F32), latents);
        let (max, _) = difference(&image, &read_tensor(&golden, model).1);
        println!("{model}: max difference to the frozen decode {max:e}");
        assert!(max <= TOLERANCE, "{model}: max difference {max:e}");
    }
}

fn freeze(path: &Path, device: &Device) {
    let images: BTreeMap<&str, Vec<u8>> = MICRO_MODELS
        .iter()
        .map(|(model, _)| {
            let image = decode(&load(model, device, DType::F32), micro(model, device).0);
            (*model, image.iter().flat_map(|value| value.to_le_bytes()).collect())
        })
        .collect();
    let views = images.iter().map(|(name, bytes)| {
        let view = TensorView::new(safetensors::Dtype::F32, vec![bytes.len() / 4], bytes).unwrap();
        (*name, view)
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
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
