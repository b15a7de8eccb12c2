//! What the integration tests share: fixtures, decoding them through the library, and full-size models without weights.

pub mod random;

use std::path::{Path, PathBuf};

use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType as BurnDType, Device, Tensor, TensorData},
};
use burn_vae::{DType, DeviceName, Latents, LoadOptions, Quality, VaeDecoder, VaeModule, latents_from_file};
use vae_io::{LatentFile, LatentsOptions, LatentsReading, VaeConfig};

/// The models with random weights, each with the checkpoint files of the same weights.
pub const MICRO_MODELS: [(&str, &[&str]); 4] = [
    (
        "micro-sd",
        &[
            "diffusion_pytorch_model.safetensors",
            "ldm.safetensors",
            "old_attention_names.safetensors",
            "full_checkpoint_ldm.safetensors",
        ],
    ),
    (
        "micro-sd3",
        &[
            "diffusion_pytorch_model.safetensors",
            "ldm.safetensors",
            "full_checkpoint_ldm.safetensors",
        ],
    ),
    (
        "micro-flux2-small",
        &["diffusion_pytorch_model.safetensors", "bfl.safetensors"],
    ),
    ("micro-no-attention", &["diffusion_pytorch_model.safetensors"]),
];

/// The trained models and their pictures.
pub const TRAINED_MODELS: [&str; 3] = ["flux2-tiny", "flux1-tiny", "sd-tiny"];
/// The pictures of each trained model.
pub const PICTURES: [&str; 3] = ["astronaut", "chelsea", "coffee"];

/// A file of tests/fixtures; `BURN_VAE_FIXTURES` names the folder where the tests run elsewhere than they were built.
pub fn fixture(name: &str) -> PathBuf {
    let folder = std::env::var_os("BURN_VAE_FIXTURES")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures"), PathBuf::from);
    folder.join(name)
}

/// Tensor `name` of a safetensors file of f32.
pub fn read_tensor(path: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    assert_eq!(view.dtype(), safetensors::Dtype::F32);
    let (values, []) = view.data().as_chunks::<4>() else {
        panic!("{name} is not f32")
    };
    (
        view.shape().to_vec(),
        values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
    )
}

/// A device by name; none where it is absent, unless `BURN_VAE_REQUIRE_DEVICE` names it.
pub fn open(name: &str) -> Option<Device> {
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

/// Loads a model, or one of the checkpoint files of a model.
pub fn load(path: &str, device: &Device, dtype: DType) -> VaeDecoder {
    let options = LoadOptions {
        dtype: Some(dtype),
        ..LoadOptions::default()
    };
    VaeDecoder::load(fixture(path), device, &options).unwrap().decoder
}

/// Decodes with Lossless and reads the image back as f32.
pub fn decode(vae: &VaeDecoder, latents: Latents) -> Vec<f32> {
    decode_with(vae, latents, Quality::Lossless)
}

/// Decodes and reads the image back as f32.
pub fn decode_with(vae: &VaeDecoder, latents: Latents, quality: Quality) -> Vec<f32> {
    let image = vae.decode(latents, quality).unwrap();
    image.into_data_dtype(BurnDType::F32).try_into_vec().unwrap()
}

/// The VAE-space latents of a micro model, and the image that diffusers makes of them.
pub fn micro(model: &str, device: &Device) -> (Latents, Vec<f32>) {
    let path = fixture(model).join("expected.safetensors");
    let (shape, values) = read_tensor(&path, "vae_latents");
    let latents = Tensor::<4>::from_data(TensorData::new(values, shape), (device, BurnDType::F32));
    (Latents::vae(latents), read_tensor(&path, "image").1)
}

/// The latents of a trained model's picture, read from the file as `decode` reads it.
pub fn picture(model: &str, picture: &str, device: &Device) -> Latents {
    let file = LatentFile::read(fixture(&format!("{model}/latents/{picture}.safetensors"))).unwrap();
    let config = VaeConfig::read(fixture(model).join("config.json")).unwrap();
    let reading = LatentsReading::infer(&file.shape, &file.hint, &config, &LatentsOptions::default()).unwrap();
    latents_from_file(&file, &reading, 0, device)
}

/// Largest and mean absolute difference.
pub fn difference(a: &[f32], b: &[f32]) -> (f32, f64) {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // `f32::max` ignores NaN; a NaN must not read as no difference.
    assert!(differences.clone().all(|d| d.is_finite()), "values are not finite");
    let max = differences.clone().fold(0.0, f32::max);
    let mean = differences.map(f64::from).sum::<f64>() / a.len() as f64;
    (max, mean)
}

/// The paths of a module's parameters, in the order it visits them.
pub fn parameter_names(module: &VaeModule) -> Vec<String> {
    let mut names = ParameterNames::default();
    match module {
        VaeModule::AutoencoderKl(module) => module.visit(&mut names),
        VaeModule::Flux2(module) => module.visit(&mut names),
        _ => panic!("a third family"),
    }
    names.found
}

#[derive(Default)]
struct ParameterNames {
    path: Vec<String>,
    found: Vec<String>,
}

impl ModuleVisitor for ParameterNames {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        self.found.push(self.path.join("."));
    }
}
