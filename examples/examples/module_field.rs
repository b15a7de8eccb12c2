//! A VAE's decoder as a field of one's own module: saved to one record with everything else, loaded back, decoding to the
//! same bits.
//!
//! ```sh
//! cargo run --release -p examples --example module_field
//! ```

use std::path::Path;

use burn::{
    module::Module,
    store::ModuleRecord,
    tensor::{DType, Device, Tensor},
};
use burn_vae::{
    AutoencoderKlFlux2, DeviceName, Flux2Config, Latents, LoadOptions, Quality, VaeConfig, VaeDecoder, VaeModule,
};
use examples::{Denoiser, Picture, Result};

/// Everything that a pipeline has weights for.
#[derive(Module, Debug)]
struct Pipeline {
    denoiser: Denoiser,
    /// Its parameters are `vae.` and the names of diffusers' checkpoint: `vae.decoder.conv_in.weight`, ...
    vae: AutoencoderKlFlux2,
}

impl Pipeline {
    /// Random weights, created when they are first used: loading a record creates none.
    fn new(config: &Flux2Config, device: &Device) -> Self {
        Self {
            denoiser: Denoiser::new(device),
            vae: AutoencoderKlFlux2::new(config, device),
        }
    }

    /// Cloning a module copies no weights. A decoder made once is what keeps the folded weights of [`Quality::High`]: make it
    /// when the weights are final, and keep it.
    fn decoder(&self) -> VaeDecoder {
        VaeDecoder::from_module(self.vae.clone())
    }
}

fn main() -> Result {
    let (device, _) = DeviceName::Auto.open()?;
    let loaded = VaeDecoder::load(examples::VAE, &device, &LoadOptions::default())?;
    let (VaeConfig::Flux2(config), VaeModule::Flux2(vae)) = (loaded.config, loaded.decoder.into_module()) else {
        return Err("this pipeline is made for FLUX.2 latents".into());
    };
    let denoiser = Denoiser::load(&device)?;
    let pipeline = Pipeline { denoiser, vae };

    let path = std::env::temp_dir().join(format!("burn-vae-pipeline-{}.bpk", std::process::id()));
    let result = round_trip(&pipeline, &config, &path, &device);
    std::fs::remove_file(&path)?;
    println!("saved and loaded {} parameters; both decode to the same bits", result?);
    Ok(())
}

/// Saves the pipeline, loads it, and compares pictures of both. The file has to stay while the loaded module is in use: on the CPU
/// its tensors are read from there when they are first needed.
fn round_trip(pipeline: &Pipeline, config: &Flux2Config, path: &Path, device: &Device) -> Result<usize> {
    pipeline.clone().into_record().save(path)?;
    let loaded = Pipeline::new(config, device).try_load_record(ModuleRecord::load(path)?)?;

    let image = |pipeline: &Pipeline| -> Result<Vec<f32>> {
        let latents = Tensor::<4>::ones(Picture::Chelsea.latent_shape(), (device, DType::F32));
        let image = pipeline
            .decoder()
            .decode(Latents::diffusion(latents), Quality::Lossless)?;
        Ok(image.try_into_data_dtype(DType::F32)?.try_into_vec()?)
    };
    if image(pipeline)? != image(&loaded)? {
        return Err("the loaded pipeline decodes to another picture".into());
    }
    Ok(loaded.num_params())
}
