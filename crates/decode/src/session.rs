//! A model on a device, ready to decode.

use std::{ops::ControlFlow, path::PathBuf, time::Instant};

use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use burn_vae::{
    DType, DecodeOptions, DeviceName, Latents, LoadOptions, Loaded, Plan, Preflight, Progress as Decoding, Quality,
    Storage, Tiling, VaeConfig, VaeDecoder, peak_memory,
};
use vae_io::{Error, LatentLayout, LatentsReading, Result};

use crate::{args::Args, progress::Progress};

/// Everything that a run decodes with.
pub struct Session {
    decoder: VaeDecoder,
    device: Device,
    pub device_name: DeviceName,
    pub dtype: DType,
    pub quality: Quality,
    tiling: Option<Tiling>,
    storage: Option<Storage>,
    max_memory: Option<u64>,
    /// Pixels on each axis for one of the latents, in VAE space.
    scale: usize,
    pub family: String,
    pub load_s: f64,
}

/// A session and what is needed only before it decodes.
pub struct Opened {
    pub session: Session,
    pub config: VaeConfig,
    pub plan: Plan,
    /// The files that the model was read from.
    pub files: Vec<PathBuf>,
}

impl Session {
    /// Opens the device, loads the model, and says which and how.
    ///
    /// # Errors
    /// Those of [`DeviceName::open`], [`VaeDecoder::load`] and [`VaeDecoder::plan`].
    pub fn open(args: &Args, progress: &Progress) -> Result<Opened> {
        progress.begin("load");
        let started = Instant::now();
        let (device, device_name) = args.device.open()?;
        let asked = args.dtype.on(device_name);
        let options = LoadOptions {
            config: args.config.clone(),
            family: args.family,
            dtype: Some(asked),
        };
        let Loaded {
            decoder,
            config,
            report,
            files,
            dtype,
        } = VaeDecoder::load(&args.vae, &device, &options)?;
        let plan = decoder.plan(args.quality)?;
        let family = family_name(&config);
        progress.say(&format!("{}: {family}, {report}", args.vae.display()));
        progress.say(&format!("running {dtype} on {device_name}, quality {}", args.quality));
        if dtype != asked {
            progress.say(&format!(
                "note: {asked} overflows in this model (force_upcast), {dtype} is used"
            ));
        }
        let session = Self {
            decoder,
            device,
            device_name,
            dtype,
            quality: args.quality,
            tiling: args.tile,
            storage: args.storage,
            max_memory: args.max_memory,
            scale: config.decoder().upscale(),
            family,
            load_s: started.elapsed().as_secs_f64(),
        };
        Ok(Opened {
            session,
            config,
            plan,
            files,
        })
    }

    /// Stages that an observer of [`launch`](Self::launch) is told of.
    pub fn num_stages(&self) -> usize {
        self.decoder.num_stages()
    }

    /// Whether decoding has happened when [`launch`](Self::launch) returns.
    pub fn is_synchronous(&self) -> bool {
        self.device_name == DeviceName::Cpu
    }

    fn options(&self) -> DecodeOptions<'static> {
        DecodeOptions {
            tiling: self.tiling,
            storage: self.storage,
            max_memory: self.max_memory,
            ..DecodeOptions::new(self.quality)
        }
    }

    /// What a decode of images of so many pixels will run as.
    ///
    /// # Errors
    /// Those of [`VaeDecoder::preflight`].
    pub fn preflight(&self, batch: usize, width: usize, height: usize) -> Result<Preflight> {
        let size = [batch, height / self.scale, width / self.scale];
        self.decoder.preflight(size, &self.options())
    }

    /// The largest batch of at most `most` images that fits into the memory without more bands than one image needs.
    pub fn fitting_batch(&self, most: usize, width: usize, height: usize) -> usize {
        let single = self.preflight(1, width, height).map(|preflight| preflight.tile);
        let fits = |&batch: &usize| {
            let preflight = self.preflight(batch, width, height);
            preflight.is_ok_and(|preflight| single.as_ref().is_ok_and(|single| preflight.tile == *single))
        };
        (2..=most).rev().find(fits).unwrap_or(1)
    }

    /// Enqueues the decode of the latents of a batch, as they are stored: f32 pixels, `[batch * 3, height * width]`.
    ///
    /// The pixels are in row-major order, so that whichever thread reads them only copies.
    ///
    /// # Errors
    /// Those of [`VaeDecoder::decode_with`].
    pub fn launch(
        &self,
        values: Vec<f32>,
        reading: &LatentsReading,
        batch: usize,
        observer: &mut dyn FnMut(&Decoding<'_>),
    ) -> Result<Tensor<2>> {
        let latents = self.latents(values, reading, batch);
        let mut progress = |decoding: &Decoding<'_>| {
            observer(decoding);
            ControlFlow::Continue(())
        };
        let options = DecodeOptions {
            progress: Some(&mut progress),
            ..self.options()
        };
        let image = self.decoder.decode_with(latents, options)?.image;
        let [batch, channels, height, width] = image.dims();
        let planes = image.cast(BurnDType::F32).reshape([batch * channels, height * width]);
        Ok(planes)
    }

    fn latents(&self, values: Vec<f32>, reading: &LatentsReading, batch: usize) -> Latents {
        let mut shape = reading.batched_shape();
        shape[0] = batch;
        let data = TensorData::new(values, shape);
        let options = (&self.device, BurnDType::F32);
        let latents = match reading.layout {
            LatentLayout::Map => Latents::diffusion(Tensor::<4>::from_data(data, options)),
            LatentLayout::Tokens => {
                Latents::tokens(Tensor::<3>::from_data(data, options), reading.rows, reading.columns)
            }
        };
        latents.in_space(reading.space)
    }

    /// Waits for pixels and copies them from the device.
    ///
    /// # Errors
    /// [`Error::DeviceFailed`]
    pub fn read(&self, pixels: Tensor<2>) -> Result<Vec<f32>> {
        let data = pixels.try_into_data().map_err(|error| self.failed(error))?;
        data.try_into_vec().map_err(|error| self.failed(error))
    }

    /// The error of a decode with `count` pixels of `total` that are not finite: decodes once more to name the first stage
    /// whose activation is not.
    pub fn non_finite(&self, values: Vec<f32>, reading: &LatentsReading, count: usize, total: usize) -> Error {
        let mut found = None;
        let mut observer = |decoding: &Decoding<'_>| {
            if found.is_none()
                && let Ok(data) = decoding.activation.clone().try_into_data_dtype(BurnDType::F32)
            {
                let count = data.iter::<f32>().filter(|value| !value.is_finite()).count();
                found = (count > 0).then(|| (decoding.stage.to_string(), count, data.num_elements()));
            }
        };
        if let Err(error) = self.launch(values, reading, 1, &mut observer) {
            return error;
        }
        let (stage, count, total) = found.unwrap_or(("the decoded image".to_string(), count, total));
        Error::NonFinite {
            stage,
            count,
            total,
            hint: match self.dtype {
                DType::F16 | DType::BF16 => "; pass --dtype f32, or check the weights",
                DType::F32 | DType::F64 => "; check the weights and the scale of the latents",
            },
        }
    }

    /// Waits for what was enqueued.
    pub fn sync(&self) {
        // A failure comes back when the pixels are read.
        let _ = self.device.sync();
    }

    /// Bytes of memory at their peak; see [`peak_memory`].
    pub fn peak_bytes(&self) -> Option<u64> {
        peak_memory(&self.device)
    }

    fn failed(&self, error: impl std::fmt::Display) -> Error {
        Error::DeviceFailed {
            device: self.device_name.to_string(),
            reason: error.to_string(),
        }
    }
}

fn family_name(config: &VaeConfig) -> String {
    match (config.family(), config) {
        (Some(family), _) => family.to_string(),
        (None, VaeConfig::AutoencoderKl(_)) => "autoencoder-kl".to_string(),
        (None, VaeConfig::Flux2(_)) => "flux2".to_string(),
    }
}
