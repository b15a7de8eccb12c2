use std::{
    fmt,
    path::{Path, PathBuf},
    rc::Rc,
    str::FromStr,
};

use burn::tensor::{DType as BurnDType, Device};
use burn_vae::{DType, DeviceName, Family, LoadOptions, Loaded, Quality, VaeConfig, VaeDecoder, latents_from_file};
use vae_io::{Error, Image, LatentFile, LatentsReading};

use super::{results::Way, say};
use crate::Result;

/// How a side decodes, as the user says it: `quality=lossless,device=cuda,dtype=bf16`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Spec {
    quality: Quality,
    device: DeviceName,
    /// `None` is what decodes best on the device.
    dtype: Option<DType>,
}

impl Spec {
    /// What everything is measured against.
    pub const TRUTH: Self = Self {
        quality: Quality::Lossless,
        device: DeviceName::Cpu,
        dtype: Some(DType::F32),
    };
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "quality={},device={},dtype=", self.quality, self.device)?;
        match self.dtype {
            Some(dtype) => dtype.fmt(f),
            None => f.write_str("auto"),
        }
    }
}

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut spec = Self::default();
        let mut seen = Vec::new();
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                return Err(format!(
                    "`{part}` is not KEY=VALUE; the keys are quality, device and dtype"
                ));
            };
            if seen.contains(&key) {
                return Err(format!("`{key}` is there twice"));
            }
            seen.push(key);
            match (key, value) {
                ("quality", _) => spec.quality = value.parse()?,
                ("device", _) => spec.device = value.parse()?,
                ("dtype", "auto") => spec.dtype = None,
                ("dtype", _) => spec.dtype = Some(value.parse()?),
                _ => return Err(format!("`{key}` is not a key, use quality, device or dtype")),
            }
        }
        Ok(spec)
    }
}

/// One checkpoint on the devices and in the types that sides ask for, loaded once for each.
pub struct Models<'a> {
    vae: &'a Path,
    config: Option<&'a Path>,
    family: Option<Family>,
    models: Vec<Rc<Model>>,
    files: Vec<PathBuf>,
}

/// The weights on a device in a type.
struct Model {
    device: Device,
    device_name: DeviceName,
    /// What was asked for; the decoder may run in another, see [`Loaded::dtype`].
    asked: DType,
    dtype: DType,
    vae: VaeDecoder,
    config: VaeConfig,
}

/// A model and the quality that it decodes with.
pub struct Decoder {
    model: Rc<Model>,
    quality: Quality,
}

impl<'a> Models<'a> {
    pub fn new(vae: &'a Path, config: Option<&'a Path>, family: Option<Family>) -> Self {
        Self {
            vae,
            config,
            family,
            models: Vec::new(),
            files: Vec::new(),
        }
    }

    /// The files that were read.
    pub fn files(&self) -> &Vec<PathBuf> {
        &self.files
    }

    /// Opens the device, loads the weights unless they are there, and checks that the quality can run.
    pub fn decoder(&mut self, spec: &Spec) -> Result<Decoder> {
        let (device, device_name) = spec.device.open()?;
        let asked = spec.dtype.unwrap_or_else(|| device_name.default_dtype());
        let is_there = |model: &&Rc<Model>| (model.device_name, model.asked) == (device_name, asked);
        let model = match self.models.iter().find(is_there) {
            Some(model) => Rc::clone(model),
            None => self.load(device, device_name, asked)?,
        };
        model.vae.plan(spec.quality)?;
        Ok(Decoder {
            model,
            quality: spec.quality,
        })
    }

    fn load(&mut self, device: Device, device_name: DeviceName, asked: DType) -> Result<Rc<Model>> {
        let options = LoadOptions {
            config: self.config.map(Path::to_path_buf),
            family: self.family,
            dtype: Some(asked),
        };
        let Loaded {
            decoder: vae,
            config,
            report,
            files,
            dtype,
        } = VaeDecoder::load(self.vae, &device, &options)?;
        say(&format!("{}: {report}; {dtype} on {device_name}", self.vae.display()));
        if dtype != asked {
            say(&format!(
                "note: {asked} overflows in this model (force_upcast), {dtype} is used"
            ));
        }
        self.files = files;
        let model = Rc::new(Model {
            device,
            device_name,
            asked,
            dtype,
            vae,
            config,
        });
        self.models.push(Rc::clone(&model));
        Ok(model)
    }
}

impl Decoder {
    /// The config of the checkpoint.
    pub fn config(&self) -> &VaeConfig {
        &self.model.config
    }

    /// Whether its images are the truth itself.
    pub fn is_truth(&self) -> bool {
        let found = (self.quality, self.model.device_name, Some(self.model.dtype));
        found == (Spec::TRUTH.quality, Spec::TRUTH.device, Spec::TRUTH.dtype)
    }

    /// What the report says of it.
    pub fn way(&self) -> Way {
        Way::Decode {
            quality: self.quality.name(),
            device: self.model.device_name.to_string(),
            dtype: self.model.dtype.to_string(),
            is_truth: self.is_truth(),
        }
    }

    /// Decodes image `index` of a file: `[1, 3, height, width]`, all values finite.
    pub fn decode(&self, file: &LatentFile, reading: &LatentsReading, index: usize) -> Result<Image> {
        let Model {
            device,
            device_name,
            vae,
            dtype,
            ..
        } = &*self.model;
        let failed = |reason: &dyn fmt::Display| Error::DeviceFailed {
            device: device_name.to_string(),
            reason: reason.to_string(),
        };
        let image = vae.decode(latents_from_file(file, reading, index, device), self.quality)?;
        let shape = image.dims();
        let data = image
            .try_into_data_dtype(BurnDType::F32)
            .map_err(|error| failed(&error))?;
        let values: Vec<f32> = data.try_into_vec().map_err(|error| failed(&error))?;
        let non_finite = values.iter().filter(|value| !value.is_finite()).count();
        if non_finite > 0 {
            return Err(Error::NonFinite {
                stage: format!("the image of {}", self.way()),
                count: non_finite,
                total: values.len(),
                hint: match dtype {
                    DType::F16 | DType::BF16 => "; pass dtype=f32, or check the weights",
                    DType::F32 | DType::F64 => "; check the weights and the scale of the latents",
                },
            }
            .into());
        }
        Ok(Image::new(shape, values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_round_trip_and_default_as_decode_does() {
        let spec: Spec = "device=wgpu:1,dtype=f16,quality=high".parse().unwrap();
        assert_eq!(spec.to_string(), "quality=high,device=wgpu:1,dtype=f16");
        assert_eq!(spec.to_string().parse(), Ok(spec));
        let spec: Spec = "dtype=auto".parse().unwrap();
        assert_eq!(spec, Spec::default());
        assert_eq!(spec.to_string(), "quality=lossless,device=auto,dtype=auto");
        assert_eq!("quality=lossless,device=cpu,dtype=f32".parse(), Ok(Spec::TRUTH));
    }

    #[test]
    fn what_a_spec_cannot_say_is_refused_by_name() {
        let message = |text: &str| text.parse::<Spec>().unwrap_err();
        assert_eq!(
            message(""),
            "`` is not KEY=VALUE; the keys are quality, device and dtype"
        );
        assert_eq!(
            message("cpu"),
            "`cpu` is not KEY=VALUE; the keys are quality, device and dtype"
        );
        assert_eq!(
            message("device=cpu,size=3"),
            "`size` is not a key, use quality, device or dtype"
        );
        assert_eq!(message("dtype=f32,dtype=f16"), "`dtype` is there twice");
        assert!(message("dtype=int8").contains("`int8`"));
        assert!(message("quality=best").contains("`best`"));
        assert!(message("device=gpu").contains("`gpu`"));
    }
}
