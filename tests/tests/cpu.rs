//! The library on the CPU, f32: against diffusers' own f32 outputs, and what must not change a bit.

use burn::{
    module::Module,
    store::ModuleRecord,
    tensor::{Device, Tensor, TensorData},
};
use burn_vae::{
    AutoencoderKl, AutoencoderKlFlux2, DType, Latents, Quality, VaeConfig, VaeDecoder, VaeModule, latents_from_file,
};
use integration_tests::{
    MICRO_MODELS, TRAINED_MODELS, decode, difference, fixture, load, micro, parameter_names, picture, read_tensor,
};
use vae_io::{LatentFile, LatentsOptions, LatentsReading};

#[test]
fn every_random_model_and_key_style_matches_diffusers() {
    let device = Device::flex();
    for (model, files) in MICRO_MODELS {
        let (latents, expected) = micro(model, &device);
        let mut first: Option<Vec<f32>> = None;
        for file in files {
            let image = decode(&load(&format!("{model}/{file}"), &device, DType::F32), latents.clone());
            let (max, _) = difference(&image, &expected);
            assert!(max <= 5e-5, "{model}/{file}: max abs difference {max}");
            // The same weights under other names decode to the same bits.
            let first = first.get_or_insert_with(|| image.clone());
            assert_eq!(image, *first, "{model}/{file}");
        }
    }
}

#[test]
fn trained_models_match_diffusers() {
    let device = Device::flex();
    for model in TRAINED_MODELS {
        let image = decode(&load(model, &device, DType::F32), picture(model, "chelsea", &device));
        let (_, expected) = read_tensor(&fixture(&format!("{model}/chelsea.expected.safetensors")), "image");
        let (max, _) = difference(&image, &expected);
        assert!(max <= 5e-5, "{model}: max abs difference {max}");
    }
}

#[test]
fn every_layout_and_format_of_a_picture_is_the_same_picture() {
    let device = Device::flex();
    for model in TRAINED_MODELS {
        let vae = load(model, &device, DType::F32);
        let config = VaeConfig::read(fixture(model).join("config.json")).unwrap();
        let (shape, expected) = read_tensor(&fixture(&format!("{model}/chelsea.expected.safetensors")), "image");
        let mut decoded = 0;
        for entry in std::fs::read_dir(fixture(model).join("latents")).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            if !name.starts_with("chelsea.") {
                continue;
            }
            let file = LatentFile::read(&path).unwrap();
            let options = LatentsOptions::default();
            let reading = LatentsReading::infer(&file.shape, &file.hint, &config, &options).unwrap();
            assert_eq!([1, 3, reading.height, reading.width], shape[..], "{model}/{name}");
            let latents = latents_from_file(&file, &reading, 0, &device);
            let (max, _) = difference(&decode(&vae, latents), &expected);
            assert!(max <= 5e-5, "{model}/{name}: max abs difference {max}");
            decoded += 1;
        }
        // .safetensors and ComfyUI's, and FLUX.2's VAE space; .npy, .npz and .pt, and ComfyUI's without its marker.
        let expected = match model {
            "flux2-tiny" => 3,
            "flux1-tiny" => 5,
            _ => 6,
        };
        assert_eq!(decoded, expected, "{model}");
    }
}

#[test]
fn a_saved_record_loads_strictly_into_a_new_module_and_decodes_to_the_same_bits() {
    let device = Device::flex();
    for model in ["micro-sd", "micro-sd3", "micro-flux2-small", "micro-no-attention"] {
        let (latents, _) = micro(model, &device);
        let vae = load(model, &device, DType::F32);
        let before = decode(&vae, latents.clone());

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.bpk");
        let config = VaeConfig::read(fixture(model).join("config.json")).unwrap();
        let reloaded: VaeModule = match (vae.into_module(), config) {
            (VaeModule::AutoencoderKl(module), VaeConfig::AutoencoderKl(config)) => {
                module.into_record().save(&path).unwrap();
                let record = ModuleRecord::load(&path).unwrap();
                AutoencoderKl::new(&config, &device).load_record(record).into()
            }
            (VaeModule::Flux2(module), VaeConfig::Flux2(config)) => {
                module.into_record().save(&path).unwrap();
                let record = ModuleRecord::load(&path).unwrap();
                AutoencoderKlFlux2::new(&config, &device).load_record(record).into()
            }
            _ => panic!("{model}: module and config are of different families"),
        };
        assert_eq!(decode(&VaeDecoder::from_module(reloaded), latents), before, "{model}");
    }
}

#[test]
fn other_weights_do_not_decode_to_the_same_picture() {
    // Guards the test above and every comparison of bits: weights must matter.
    let device = Device::flex();
    let (latents, expected) = micro("micro-sd", &device);
    let config = VaeConfig::read(fixture("micro-sd/config.json")).unwrap();
    let VaeConfig::AutoencoderKl(config) = config else {
        panic!("micro-sd is an AutoencoderKL")
    };
    let image = decode(&VaeDecoder::from_module(AutoencoderKl::new(&config, &device)), latents);
    assert!(difference(&image, &expected).0 > 0.01);
}

#[test]
fn a_record_of_another_model_is_refused() {
    let device = Device::flex();
    let record = |model| match load(model, &device, DType::F32).into_module() {
        VaeModule::AutoencoderKl(module) => module.into_record(),
        VaeModule::Flux2(module) => module.into_record(),
        _ => panic!("{model} is of a third family"),
    };
    let config = VaeConfig::read(fixture("micro-sd/config.json")).unwrap();
    let VaeConfig::AutoencoderKl(config) = config else {
        panic!("micro-sd is an AutoencoderKL")
    };
    let module = || AutoencoderKl::new(&config, &device);
    assert!(module().try_load_record(record("micro-sd")).is_ok());
    for other in ["micro-sd3", "micro-flux2-small", "micro-no-attention"] {
        assert!(module().try_load_record(record(other)).is_err(), "{other}");
    }
}

#[test]
fn parameters_are_named_as_in_diffusers_checkpoints() {
    let device = Device::flex();
    let path = fixture("micro-flux2-small/diffusion_pytorch_model.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut expected: Vec<String> = file.names().into_iter().map(str::to_string).collect();
    expected
        .retain(|name| name != "bn.num_batches_tracked" && !name.starts_with("encoder") && !name.starts_with("quant"));
    expected.sort();
    let mut found = parameter_names(load("micro-flux2-small", &device, DType::F32).module());
    found.sort();
    assert_eq!(found, expected);
}

#[test]
fn one_image_of_a_batch_is_the_image_it_is_alone() {
    let device = Device::flex();
    let (shape, values) = read_tensor(&fixture("micro-sd3/expected.safetensors"), "vae_latents");
    let vae = load("micro-sd3", &device, DType::F32);
    let latents = |values: &[f32], batch: usize| {
        let mut shape = shape.clone();
        shape[0] = batch;
        let data = TensorData::new(values.to_vec(), shape);
        Latents::vae(Tensor::from_data(data, &device))
    };
    let both = decode(&vae, latents(&values, 2));
    let alone = decode(&vae, latents(&values[..values.len() / 2], 1));
    let (max, _) = difference(&both[..alone.len()], &alone);
    assert!(max <= 5e-6, "max abs difference {max}");
}

#[test]
fn half_precision_on_the_cpu_stays_near_f32() {
    let device = Device::flex();
    let (latents, expected) = micro("micro-flux2-small", &device);
    // bf16 keeps 8 bits of mantissa, f16 11; micro-flux2-small says force_upcast, so f16 runs in f32.
    let bf16 = decode(&load("micro-flux2-small", &device, DType::BF16), latents.clone());
    let (max, mean) = difference(&bf16, &expected);
    assert!(
        mean <= 5e-3 && max <= 5e-2 && mean > 0.0,
        "bf16: max {max}, mean {mean}"
    );
    let f16 = decode(&load("micro-flux2-small", &device, DType::F16), latents);
    assert!(difference(&f16, &expected).0 <= 5e-5);
}

#[test]
fn latents_that_do_not_fit_are_refused_before_anything_runs() {
    let device = Device::flex();
    let vae = load("micro-sd3", &device, DType::F32);
    let latents = |shape| Latents::diffusion(Tensor::<4>::zeros(shape, &device));
    for quality in Quality::ALL {
        let error = vae.decode(latents([1, 4, 8, 8]), quality).unwrap_err().to_string();
        assert!(error.contains("4 channels and the VAE takes 16"), "{error}");
    }
}
