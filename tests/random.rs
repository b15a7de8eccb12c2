//! Random weights and latents: the same numbers on every device, for tests and benchmarks that need no checkpoint.

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData},
};
use burn_vae::{AutoencoderKl, AutoencoderKlFlux2, Latents, VaeConfig, VaeDecoder, VaeModule};
use rand::{SeedableRng, rngs::StdRng};

/// Of the weights, and of the latents.
const SEED: u64 = 0;

/// A decoder with random weights. Convolutions keep the variance of what they read, so activations stay of order one.
pub fn decoder(config: &VaeConfig, device: &Device, dtype: FloatDType) -> VaeDecoder {
    let mut weights = RandomWeights {
        rng: StdRng::seed_from_u64(SEED),
        dtype: dtype.into(),
        name: String::new(),
    };
    VaeDecoder::from_module(match config {
        VaeConfig::AutoencoderKl(config) => {
            VaeModule::AutoencoderKl(AutoencoderKl::new(config, device).map(&mut weights))
        }
        VaeConfig::Flux2(config) => VaeModule::Flux2(AutoencoderKlFlux2::new(config, device).map(&mut weights)),
    })
}

/// Standard normal latents, as a pipeline's loop ends with them, of `[batch, channels, height, width]` in f32.
pub fn latents(shape: [usize; 4], device: &Device) -> Latents {
    let mut rng = StdRng::seed_from_u64(SEED);
    let data = TensorData::random::<f32, _, _>(shape, Distribution::Normal(0.0, 1.0), &mut rng);
    Latents::diffusion(Tensor::from_data(data, (device, DType::F32)))
}

struct RandomWeights {
    rng: StdRng,
    dtype: DType,
    /// Of the parameter, within its layer.
    name: String,
}

impl ModuleMapper for RandomWeights {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.name = name.to_string();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape = param.lazy_shape();
        let distribution = match D {
            // Convolutions are [out, in, rows, columns], linear layers [in, out].
            4 => variance_of_one_in(shape[1..].iter().product()),
            2 => variance_of_one_in(shape[0]),
            _ if self.name == "weight" || self.name == "running_var" => Distribution::Uniform(0.8, 1.2),
            _ => Distribution::Uniform(-0.1, 0.1),
        };
        let data = TensorData::random::<f32, _, _>(shape, distribution, &mut self.rng).convert_dtype(self.dtype);
        let id = param.id;
        let value = Tensor::from_data(data, (&param.lazy_device(), self.dtype));
        param.transform_for_load(value, id)
    }
}

/// Weights that sum `inputs` values of variance one to one of variance one.
pub fn variance_of_one_in(inputs: usize) -> Distribution {
    let bound = (3.0 / inputs as f64).sqrt();
    Distribution::Uniform(-bound, bound)
}

#[cfg(test)]
mod tests {
    use burn_vae::{AutoencoderKlConfig, Flux2Config, Quality};

    use super::*;

    fn narrow(mut config: VaeConfig) -> VaeConfig {
        let decoder = match &mut config {
            VaeConfig::AutoencoderKl(config) => &mut config.decoder,
            VaeConfig::Flux2(config) => &mut config.decoder,
        };
        decoder.block_out_channels = vec![32, 32, 64, 64];
        config
    }

    #[test]
    fn activations_stay_of_order_one_in_every_stage() {
        let device = Device::flex();
        for (config, channels) in [
            (VaeConfig::AutoencoderKl(AutoencoderKlConfig::flux1()), 16),
            (VaeConfig::Flux2(Flux2Config::flux2()), 128),
        ] {
            let vae = decoder(&narrow(config), &device, FloatDType::F32);
            let mut stages = 0;
            let mut observer = |stage: &str, activation: &Tensor<4>| {
                let square: f32 = activation.clone().square().mean().into_scalar();
                assert!((0.1..10.0).contains(&square.sqrt()), "{stage}: {}", square.sqrt());
                stages += 1;
            };
            vae.decode_observed(latents([1, channels, 4, 6], &device), Quality::Lossless, &mut observer)
                .unwrap();
            assert_eq!(stages, vae.num_stages());
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_picture_in_the_type_asked_for() {
        let device = Device::flex();
        let image = || {
            let config = narrow(VaeConfig::AutoencoderKl(AutoencoderKlConfig::sd()));
            let vae = decoder(&config, &device, FloatDType::BF16);
            assert_eq!(vae.dtype(), FloatDType::BF16);
            let image = vae.decode(latents([1, 4, 2, 2], &device), Quality::Lossless).unwrap();
            image.into_data()
        };
        assert_eq!(image(), image());
    }
}
