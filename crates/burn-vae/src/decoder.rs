use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
};

use autoencoder_kl::AutoencoderKl;
use burn::tensor::{DType as BurnDType, Device, FloatDType, Tensor};
use flux2::AutoencoderKlFlux2;
use vae_blocks::{
    DeviceLimits, DeviceProfile, FoldedDecoder, Latents, Observer, Plan, Progress, Quality, Storage, VaeModel,
    decode_lossless, device_name,
};
use vae_io::{Checkpoint, DType, Error, Family, Result, VaeConfig};

use crate::{DecodeOptions, Decoded, LoadReport, Preflight, Tiling, apply_checkpoint, preflight::Forecaster};

/// A VAE's decoding half with its weights on a device.
///
/// Owns its module: whatever changes the weights consumes the decoder ([`into_module`](Self::into_module)) and makes
/// a new one, so the folded weights of [`Quality::High`] cannot be stale.
#[derive(Debug)]
pub struct VaeDecoder {
    module: VaeModule,
    /// Made by the first call that needs them, on the module's device and in its type.
    folded: OnceLock<FoldedDecoder>,
    /// Of the module's device.
    profile: OnceLock<(DeviceProfile, DeviceLimits)>,
    /// The last answer of [`preflight`](Self::preflight): a pipeline asks again and again.
    forecast: Mutex<Option<(Question, Preflight)>>,
}

/// What a preflight depends on: the size, the quality, how the decode is cut and kept, the memory that it may take, and whether
/// weights are folded already.
type Question = ([usize; 3], Quality, Option<Tiling>, Option<Storage>, Option<u64>, bool);

/// The Burn module of either family.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum VaeModule {
    /// SD 1 and 2, SDXL, SD3, FLUX.1, Z-Image, ...
    AutoencoderKl(AutoencoderKl),
    /// FLUX.2.
    Flux2(AutoencoderKlFlux2),
}

/// How [`VaeDecoder::load`] reads a checkpoint; the default takes everything from the files.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// A diffusers config.json in place of the one beside the weights.
    pub config: Option<PathBuf>,
    /// The family, for weights without a config; a config of another family is refused.
    pub family: Option<Family>,
    /// The type to run in: f32 (the default), f16 or bf16.
    pub dtype: Option<DType>,
}

/// A decoder and how it came about.
#[derive(Debug)]
pub struct Loaded {
    /// Ready to decode.
    pub decoder: VaeDecoder,
    /// The config that was read or inferred.
    pub config: VaeConfig,
    /// Which tensors were applied.
    pub report: LoadReport,
    /// The files that were read: weights, and the config if there was one.
    pub files: Vec<PathBuf>,
    /// The type it runs in. Not the one asked for where f16 would overflow (`force_upcast`): that is f32.
    pub dtype: DType,
}

impl VaeDecoder {
    /// Loads a checkpoint onto a device: a safetensors file or a folder in diffusers' layout; see
    /// [`Checkpoint::open`].
    ///
    /// # Errors
    /// Files that cannot be read, configs that are not supported, weights that do not fit
    /// ([`Error::WeightsMismatch`]), and a device that cannot compute in the type ([`Error::UnsupportedDType`]).
    pub fn load(path: impl AsRef<Path>, device: &Device, options: &LoadOptions) -> Result<Loaded> {
        let checkpoint = Checkpoint::open(path.as_ref())?;
        let config_path = options.config.clone().or_else(|| checkpoint.config_path());
        let config = read_config(&checkpoint, config_path.as_deref(), options.family)?;
        let asked = options.dtype.unwrap_or(DType::F32);
        let dtype = match asked {
            DType::F16 if config.force_upcast() => DType::F32,
            dtype => dtype,
        };
        let float = float_dtype(dtype, device)?;
        let (module, report) = match &config {
            VaeConfig::AutoencoderKl(config) => {
                let (module, report) = apply_checkpoint(AutoencoderKl::new(config, device), &checkpoint, float);
                (VaeModule::AutoencoderKl(module), report)
            }
            VaeConfig::Flux2(config) => {
                let (module, report) = apply_checkpoint(AutoencoderKlFlux2::new(config, device), &checkpoint, float);
                (VaeModule::Flux2(module), report)
            }
        };
        report.check()?;
        Ok(Loaded {
            decoder: Self::from_module(module),
            config,
            report,
            files: checkpoint.files().iter().cloned().chain(config_path).collect(),
            dtype,
        })
    }

    /// Wraps a module that the caller built, on the module's device and in its type.
    pub fn from_module(module: impl Into<VaeModule>) -> Self {
        Self {
            module: module.into(),
            folded: OnceLock::new(),
            profile: OnceLock::new(),
            forecast: Mutex::default(),
        }
    }

    /// The module, for reading and for saving its record.
    pub fn module(&self) -> &VaeModule {
        &self.module
    }

    /// Gives the module back, to change its weights or to move it.
    pub fn into_module(self) -> VaeModule {
        self.module
    }

    /// Decodes latents to images of `[batch, 3, height, width]` in -1..1, in the model's type, on its device.
    ///
    /// Enqueues the work and returns without synchronising; values are read or checked by whoever reads the image.
    ///
    /// # Errors
    /// [`Error::InvalidLatents`] when the latents do not fit the model or are on another device,
    /// [`Error::QualityUnavailable`] when `quality` cannot run, [`Error::OutOfMemory`] when it would not fit.
    pub fn decode(&self, latents: Latents, quality: Quality) -> Result<Tensor<4>> {
        let decoded = self.decode_with(latents, DecodeOptions::new(quality))?;
        Ok(decoded.image)
    }

    /// [`decode`](Self::decode), with a look at the activation after each of [`num_stages`](Self::num_stages) stages: all of it,
    /// or the last band where the decode had to be cut.
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn decode_observed(
        &self,
        latents: Latents,
        quality: Quality,
        observer: &mut Observer<'_>,
    ) -> Result<Tensor<4>> {
        let mut progress = |progress: &Progress<'_>| {
            if progress.ends_stage {
                observer(progress.stage, progress.activation);
            }
            ControlFlow::Continue(())
        };
        let options = DecodeOptions {
            progress: Some(&mut progress),
            ..DecodeOptions::new(quality)
        };
        Ok(self.decode_with(latents, options)?.image)
    }

    /// [`decode`](Self::decode) with more to say, and told how it ran.
    ///
    /// # Errors
    /// As [`decode`](Self::decode), [`Error::OutOfMemory`] before anything runs where the decode would not fit, and
    /// [`Error::Cancelled`].
    pub fn decode_with(&self, latents: Latents, mut options: DecodeOptions<'_>) -> Result<Decoded> {
        let quality = options.quality;
        // Folding takes time and memory: everything is refused before it.
        if self.folded.get().is_none() {
            self.plan(quality)?;
        }
        let z = self.model().prepare(latents)?;
        let [batch, _, height, width] = z.dims();
        let preflight = self.preflight([batch, height, width], &options)?;
        let mut watch = |progress: Progress<'_>| {
            let flow = options.progress.as_mut().map(|callback| callback(&progress));
            match flow {
                Some(ControlFlow::Break(())) => Err(Error::Cancelled),
                _ => Ok(()),
            }
        };
        let image = match quality {
            Quality::Lossless => decode_lossless(self.model(), z, preflight.tile, &mut watch)?,
            Quality::High => {
                let folded = self.folded.get_or_init(|| FoldedDecoder::new(self.model()));
                folded.decode(self.model(), z, preflight.tile, &mut watch)?
            }
        };
        Ok(Decoded { image, preflight })
    }

    /// How a decode of `[images, height, width]`, of latents in VAE space, will run, and its memory. Runs nothing.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where it does not fit, with the options that would.
    pub fn preflight(&self, size: [usize; 3], options: &DecodeOptions<'_>) -> Result<Preflight> {
        let device = self.device();
        let (profile, limits) = self
            .profile
            .get_or_init(|| (DeviceProfile::of(&device), DeviceLimits::of(&device)));
        let folded = self.folded.get().is_some();
        let &DecodeOptions {
            quality,
            tiling,
            storage,
            max_memory,
            ..
        } = options;
        let question = (size, quality, tiling, storage, max_memory, folded);
        let mut last = self.forecast.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((asked, preflight)) = *last
            && asked == question
        {
            return Ok(preflight);
        }
        let forecaster = Forecaster {
            model: self.model(),
            device: profile,
            limits: *limits,
            quality,
            size,
            folded,
        };
        let preflight = forecaster.preflight(options)?;
        // What a host has left changes, a GPU's memory does not.
        let depends_on_host = preflight.memory.device == 0 || preflight.tile.storage != Storage::Device;
        *last = (!depends_on_host).then_some((question, preflight));
        Ok(preflight)
    }

    /// Decodes zeros of these sizes of latents, `(height, width)` in VAE space, and waits: for single images of these sizes,
    /// kernels are compiled and weights folded when it returns.
    ///
    /// # Errors
    /// As [`decode`](Self::decode), and [`Error::DeviceFailed`].
    pub fn warm_up(&self, sizes: &[(usize, usize)], quality: Quality) -> Result<()> {
        let device = self.device();
        let channels = self.model().decoder_config().latent_channels;
        for &(height, width) in sizes {
            let latents = Tensor::zeros([1, channels, height, width], (&device, BurnDType::F32));
            self.decode(Latents::vae(latents), quality)?;
        }
        device.sync().map_err(|error| Error::DeviceFailed {
            device: device_name(&device),
            reason: error.to_string(),
        })
    }

    /// Stages that an observer is told of in one decode.
    pub fn num_stages(&self) -> usize {
        self.model().num_stages()
    }

    /// What would run for `quality`, site by site.
    ///
    /// # Errors
    /// [`Error::QualityUnavailable`] with the reasons.
    pub fn plan(&self, quality: Quality) -> Result<Plan> {
        self.model().plan(quality)
    }

    /// The device that the weights are on.
    pub fn device(&self) -> Device {
        self.model().device()
    }

    /// The type of weights, activations and images.
    pub fn dtype(&self) -> FloatDType {
        self.model().dtype()
    }

    fn model(&self) -> &dyn VaeModel {
        match &self.module {
            VaeModule::AutoencoderKl(module) => module,
            VaeModule::Flux2(module) => module,
        }
    }
}

impl From<AutoencoderKl> for VaeModule {
    fn from(module: AutoencoderKl) -> Self {
        Self::AutoencoderKl(module)
    }
}

impl From<AutoencoderKlFlux2> for VaeModule {
    fn from(module: AutoencoderKlFlux2) -> Self {
        Self::Flux2(module)
    }
}

/// The config of a file, else what the tensors and the family tell.
fn read_config(checkpoint: &Checkpoint, path: Option<&Path>, family: Option<Family>) -> Result<VaeConfig> {
    let Some(path) = path else {
        return VaeConfig::infer(checkpoint, family);
    };
    let config = VaeConfig::read(path)?;
    if let Some(family) = family {
        config.check_family(family)?;
    }
    Ok(config)
}

/// Burn's name of a type, if the device computes in it.
///
/// # Errors
/// [`Error::UnsupportedDType`] where it does not.
pub fn float_dtype(dtype: DType, device: &Device) -> Result<FloatDType> {
    let float = match dtype {
        DType::F16 => Some(FloatDType::F16),
        DType::BF16 => Some(FloatDType::BF16),
        DType::F32 => Some(FloatDType::F32),
        // Statistics and softmax are f32, so it would promise more than it gives.
        DType::F64 => None,
    };
    float
        .filter(|&float| device.supports_dtype(BurnDType::from(float)))
        .ok_or_else(|| Error::UnsupportedDType {
            device: device_name(device),
            dtype,
            supported: "f32",
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AutoencoderKlConfig;

    fn decoder() -> VaeDecoder {
        let mut config = AutoencoderKlConfig::sd();
        config.decoder.block_out_channels = vec![32, 64];
        config.decoder.layers_per_block = 1;
        VaeDecoder::from_module(AutoencoderKl::new(&config, &Device::flex()))
    }

    fn latents(channels: usize) -> Latents {
        Latents::vae(Tensor::zeros([1, channels, 2, 3], &Device::flex()))
    }

    fn is_folded(vae: &VaeDecoder) -> bool {
        vae.folded.get().is_some()
    }

    #[test]
    fn lossless_folds_nothing() {
        let vae = decoder();
        vae.decode(latents(4), Quality::Lossless).unwrap();
        vae.warm_up(&[(2, 3)], Quality::Lossless).unwrap();
        for quality in Quality::ALL {
            vae.plan(quality).unwrap();
        }
        assert!(!is_folded(&vae));
    }

    #[test]
    fn high_folds_once() {
        let vae = decoder();
        vae.warm_up(&[(2, 3)], Quality::High).unwrap();
        let folded: *const FoldedDecoder = vae.folded.get().unwrap();
        vae.decode(latents(4), Quality::High).unwrap();
        vae.decode(latents(4), Quality::Lossless).unwrap();
        assert!(std::ptr::eq(folded, vae.folded.get().unwrap()));
    }

    #[test]
    fn a_refused_decode_folds_nothing() {
        let vae = decoder();
        vae.decode(latents(5), Quality::High).unwrap_err();
        assert!(!is_folded(&vae));
    }

    #[test]
    fn a_module_that_was_taken_out_leaves_its_folds_behind() {
        let vae = decoder();
        vae.decode(latents(4), Quality::High).unwrap();
        assert!(is_folded(&vae));
        assert!(!is_folded(&VaeDecoder::from_module(vae.into_module())));
    }
}
