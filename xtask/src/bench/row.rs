//! `xtask bench-row`: one row of a benchmark, in a process of its own, so that its peak of memory and its first decode
//! are those of this row alone.

use std::{
    fmt,
    num::NonZeroUsize,
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor};
use burn_vae::{
    DType, DecodeOptions, DeviceName, Flux2Config, Latents, LoadOptions, Loaded, Preflight, Quality, Storage, Tiling,
    VaeConfig, VaeDecoder, float_dtype, latents_from_file, peak_memory,
};
use integration_tests::random;
use serde::{Deserialize, Serialize};
use vae_io::{Family, LatentFile, LatentsOptions, LatentsReading};

use super::{
    card::{Card, device_name},
    protocol::{self, Work, device_failed, median, milliseconds, read_last},
    report::{Row, clocks},
};
use crate::Result;

/// What one row times.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[arg(long, conflicts_with = "vae", required_unless_present = "vae")]
    pub family: Option<Model>,
    #[arg(long)]
    pub vae: Option<PathBuf>,
    #[arg(long, conflicts_with = "latents", required_unless_present = "latents")]
    pub size: Option<Size>,
    #[arg(long)]
    pub latents: Option<PathBuf>,
    #[arg(long)]
    pub batch: NonZeroUsize,
    #[arg(long)]
    pub quality: Quality,
    #[arg(long)]
    pub dtype: TypeName,
    #[arg(long)]
    pub device: DeviceName,
    #[arg(long)]
    pub warmups: usize,
    #[arg(long)]
    pub runs: NonZeroUsize,
    #[arg(long)]
    pub tile: Option<Tiling>,
    #[arg(long)]
    pub storage: Option<Storage>,
    #[arg(long)]
    pub sites: bool,
    #[arg(long)]
    pub without_synchronise: bool,
}

impl Args {
    /// The quality, and how the decode is cut if that is said.
    fn computation(&self) -> String {
        let tile = self.tile.map(|tile| format!(" tile {tile}")).unwrap_or_default();
        let storage = self
            .storage
            .map(|storage| format!(" storage {storage}"))
            .unwrap_or_default();
        format!("{}{tile}{storage}", self.quality)
    }

    /// The command line that parses to these.
    pub fn to_arguments(&self) -> Vec<std::ffi::OsString> {
        let mut arguments = Vec::new();
        let mut push = |name: &str, value: std::ffi::OsString| arguments.extend([name.into(), value]);
        if let Some(family) = self.family {
            push("--family", family.to_string().into());
        }
        if let Some(vae) = &self.vae {
            push("--vae", vae.into());
        }
        if let Some(size) = self.size {
            push("--size", size.to_string().into());
        }
        if let Some(latents) = &self.latents {
            push("--latents", latents.into());
        }
        push("--batch", self.batch.to_string().into());
        push("--quality", self.quality.to_string().into());
        push("--dtype", self.dtype.to_string().into());
        push("--device", self.device.to_string().into());
        push("--warmups", self.warmups.to_string().into());
        push("--runs", self.runs.to_string().into());
        if let Some(tile) = self.tile {
            push("--tile", tile.to_string().into());
        }
        if let Some(storage) = self.storage {
            push("--storage", storage.to_string().into());
        }
        for (flag, is_set) in [
            ("--sites", self.sites),
            ("--without-synchronise", self.without_synchronise),
        ] {
            arguments.extend(is_set.then(|| flag.into()));
        }
        arguments
    }
}

impl fmt::Display for Args {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.family, &self.vae) {
            (Some(family), _) => write!(f, "{family}")?,
            (None, vae) => write!(f, "{}", vae.as_deref().unwrap_or("".as_ref()).display())?,
        }
        match (&self.size, &self.latents) {
            (Some(size), _) => write!(f, " {size}")?,
            (None, latents) => write!(f, " {}", latents.as_deref().unwrap_or("".as_ref()).display())?,
        }
        write!(
            f,
            " batch {} {} {} on {}",
            self.batch,
            self.computation(),
            self.dtype,
            self.device
        )
    }
}

/// A full-size model by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    Family(Family),
    Flux2Small,
}

impl Model {
    const SMALL: &str = "flux2-small";

    fn config(self) -> VaeConfig {
        match self {
            Self::Family(family) => VaeConfig::preset(family),
            Self::Flux2Small => VaeConfig::Flux2(Flux2Config::small()),
        }
    }

    /// The model whose decoder this config describes.
    fn of(config: &VaeConfig) -> Option<Self> {
        let family = config.family().map(Self::Family);
        let mut candidates = family.into_iter().chain([Self::Flux2Small]);
        candidates.find(|model| model.config().decoder() == config.decoder())
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Family(family) => write!(f, "{family}"),
            Self::Flux2Small => f.write_str(Self::SMALL),
        }
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == Self::SMALL {
            return Ok(Self::Flux2Small);
        }
        name.parse()
            .map(Self::Family)
            .map_err(|_| format!("`{name}` is not a model; use sd, sdxl, sd3, flux1, flux2 or flux2-small"))
    }
}

/// The size of an image, as `1024` or `1024x768` (width, height).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub width: usize,
    pub height: usize,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.width, self.height)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (width, height) = text.split_once('x').unwrap_or((text, text));
        let pixels = |text: &str| text.parse().ok().filter(|&pixels| (1..=1 << 16).contains(&pixels));
        match (pixels(width), pixels(height)) {
            (Some(width), Some(height)) => Ok(Self { width, height }),
            _ => Err(format!(
                "`{text}` is not an image's size; use pixels as 1024 or 1024x768, up to 65536"
            )),
        }
    }
}

/// The type to compute in; `auto` is what decodes best on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeName(Option<DType>);

impl TypeName {
    /// The type on a device of this name.
    pub fn on(self, name: DeviceName) -> DType {
        self.0.unwrap_or_else(|| name.default_dtype())
    }
}

impl fmt::Display for TypeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(dtype) => write!(f, "{dtype}"),
            None => f.write_str("auto"),
        }
    }
}

impl FromStr for TypeName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "auto" => Ok(Self(None)),
            "f32" => Ok(Self(Some(DType::F32))),
            "f16" => Ok(Self(Some(DType::F16))),
            "bf16" => Ok(Self(Some(DType::BF16))),
            _ => Err(format!(
                "`{name}` is not a type to decode in; use auto, f32, f16 or bf16"
            )),
        }
    }
}

/// The times of one decode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecodeRow {
    pub family: String,
    /// Of the image, in pixels.
    pub width: usize,
    pub height: usize,
    pub batch: usize,
    /// How it was computed: `lossless`, `high`, or the name of another implementation.
    pub quality: String,
    pub dtype: String,
    pub ms_median: f64,
    pub ms_min: f64,
    pub ms_max: f64,
    pub runs: usize,
    pub warmups: usize,
    /// Of the first decode, which compiles kernels.
    pub first_ms: f64,
    pub peak_mib: Option<f64>,
    pub clock_mhz_start: Option<u32>,
    pub clock_mhz_end: Option<u32>,
}

impl Row for DecodeRow {
    const KEPT_AS: &str = "";
    const MIN_WARMUPS: usize = 5;
    const MIN_RUNS: usize = 20;
    const TABLE_HEAD: &str = "| family | image | batch | quality | dtype | median ms | min | max | first ms | peak MiB | clock MHz |\n\
         |---|---|---:|---|---|---:|---:|---:|---:|---:|---:|\n";
    const COMPARISON_HEAD: &str = "| family | image | batch | dtype | quality | ms | against | its ms | time ratio | memory ratio |\n\
         |---|---|---:|---|---|---:|---|---:|---:|---:|\n";

    fn warmups(&self) -> usize {
        self.warmups
    }

    fn runs(&self) -> usize {
        self.runs
    }

    fn implementation(&self) -> &str {
        &self.quality
    }

    fn is_comparable(&self, other: &Self) -> bool {
        let work = |row: &Self| (row.family.clone(), row.width, row.height, row.batch, row.dtype.clone());
        work(self) == work(other)
    }

    fn table_line(&self) -> String {
        let Self {
            family,
            width,
            height,
            batch,
            quality,
            dtype,
            ..
        } = self;
        format!(
            "| {family} | {width}x{height} | {batch} | {quality} | {dtype} | {:.2} | {:.2} | {:.2} | {:.0} | {} | {} |",
            self.ms_median,
            self.ms_min,
            self.ms_max,
            self.first_ms,
            self.peak_mib.map(|mib| format!("{mib:.0}")).unwrap_or_default(),
            clocks(self.clock_mhz_start, self.clock_mhz_end),
        )
    }

    fn comparison_line(&self, other: &Self, source: &str) -> String {
        let Self {
            family,
            width,
            height,
            batch,
            quality,
            dtype,
            ..
        } = self;
        let memory = match (self.peak_mib, other.peak_mib) {
            (Some(ours), Some(theirs)) if theirs > 0.0 => format!("{:.2}", ours / theirs),
            _ => String::new(),
        };
        format!(
            "| {family} | {width}x{height} | {batch} | {dtype} | {quality} | {:.2} | {source} | {:.2} | {:.3} | {memory} |",
            self.ms_median,
            other.ms_median,
            self.ms_median / other.ms_median,
        )
    }
}

/// What a row's process reports to the benchmark.
#[derive(Debug, Serialize, Deserialize)]
pub struct Measurement {
    pub device: String,
    pub driver: Option<String>,
    pub row: DecodeRow,
    /// What was predicted of the memory that `peak_mib` counts.
    pub predicted_mib: Option<f64>,
    /// What the driver counts as used of the device's memory at the end of the runs.
    pub driver_mib: Option<f64>,
    /// Asked for by `sites`: each stage's name and its median.
    pub stages: Vec<(String, f64)>,
}

/// Measures, and prints a [`Measurement`] as a line of JSON.
pub fn run(args: &Args) -> Result {
    println!("{}", serde_json::to_string(&measure(args)?)?);
    Ok(())
}

/// Decodes of the breakdown, after one that compiles what it needs.
const STAGE_RUNS: usize = 5;

fn measure(args: &Args) -> Result<Measurement> {
    let (device, name) = args.device.open()?;
    let card = Card::of(&device, name);
    if card.is_none() && matches!(name, DeviceName::Cuda(_)) {
        eprintln!("note: NVIDIA's management library (libnvidia-ml) does not answer; clocks and driver stay unknown");
    }
    let (config, decoder) = model(args, &device, name)?;
    let family = match Model::of(&config) {
        Some(model) => model.to_string(),
        None => {
            let name = args.vae.as_deref().and_then(Path::file_name);
            name.map_or("unnamed".into(), |name| name.display().to_string())
        }
    };
    let (latents, size) = latents(args, &config, &device)?;
    let mut decode = DeviceDecode {
        decoder,
        latents,
        quality: args.quality,
        tiling: args.tile,
        storage: args.storage,
        device,
        preflight: None,
        synchronises: !args.without_synchronise,
        image: None,
    };

    let peak = |decode: &DeviceDecode| peak_memory(&decode.device).map(|bytes| bytes as f64 / f64::from(1 << 20));
    let clock = || card.as_ref().and_then(Card::clock_mhz);
    let first = protocol::time(&mut decode, 1)?;
    let peak_of_first = peak(&decode);
    protocol::time(&mut decode, args.warmups)?;
    let clock_mhz_start = clock();
    let mut times = protocol::time(&mut decode, args.runs.get())?;
    let clock_mhz_end = clock();
    let peak_mib = peak_of_first.into_iter().chain(peak(&decode)).reduce(f64::max);
    let driver_mib = card.as_ref().and_then(Card::used_mib);
    protocol::check(&mut decode)?;
    decode.check_values()?;
    let stages = if args.sites {
        decode.stages(STAGE_RUNS)?
    } else {
        Vec::new()
    };

    times.sort_unstable();
    Ok(Measurement {
        device: device_name(&decode.device, name),
        driver: card.as_ref().and_then(Card::driver),
        row: DecodeRow {
            family,
            width: size.width,
            height: size.height,
            batch: args.batch.get(),
            quality: args.computation(),
            dtype: burn::tensor::DType::from(decode.decoder.dtype()).name().into(),
            ms_median: milliseconds(median(&times)),
            ms_min: milliseconds(times[0]),
            ms_max: milliseconds(times[times.len() - 1]),
            runs: times.len(),
            warmups: args.warmups,
            first_ms: milliseconds(median(&first)),
            peak_mib,
            clock_mhz_start,
            clock_mhz_end,
        },
        predicted_mib: decode.preflight.map(|preflight| {
            let memory = preflight.memory;
            let counted = if memory.device > 0 { memory.device } else { memory.host };
            counted as f64 / f64::from(1 << 20)
        }),
        driver_mib,
        stages,
    })
}

/// The model with the weights of a file, or with random ones.
fn model(args: &Args, device: &Device, name: DeviceName) -> Result<(VaeConfig, VaeDecoder)> {
    let dtype = args.dtype.on(name);
    match (&args.vae, args.family) {
        (Some(path), _) => {
            let options = LoadOptions {
                dtype: Some(dtype),
                ..LoadOptions::default()
            };
            let Loaded { config, decoder, .. } = VaeDecoder::load(path, device, &options)?;
            Ok((config, decoder))
        }
        (None, Some(model)) => {
            let config = model.config();
            let decoder = random::decoder(&config, device, float_dtype(dtype, device)?);
            Ok((config, decoder))
        }
        (None, None) => Err("pass --family or --vae".into()),
    }
}

/// The latents of a file, or random ones of the size asked for; and the size of their image.
fn latents(args: &Args, config: &VaeConfig, device: &Device) -> Result<(Latents, Size)> {
    if let Some(path) = &args.latents {
        let file = LatentFile::read(path)?;
        let reading = LatentsReading::infer(&file.shape, &file.hint, config, &LatentsOptions::default())?;
        let size = Size {
            width: reading.width,
            height: reading.height,
        };
        return Ok((latents_from_file(&file, &reading, 0, device), size));
    }
    let size = args.size.ok_or("pass --size or --latents")?;
    let shape = latent_shape(config, size, args.batch.get())?;
    Ok((random::latents(shape, device), size))
}

/// `[batch, channels, height, width]` of diffusion latents for an image of this size.
fn latent_shape(config: &VaeConfig, size: Size, batch: usize) -> Result<[usize; 4]> {
    let decoder = config.decoder();
    // FLUX.2's are 2x2 patches.
    let patch = match config {
        VaeConfig::AutoencoderKl(_) => 1,
        VaeConfig::Flux2(_) => 2,
    };
    let pixels = patch * decoder.upscale();
    if !size.width.is_multiple_of(pixels) || !size.height.is_multiple_of(pixels) {
        return Err(format!("this model makes images of multiples of {pixels} pixels, not {size}").into());
    }
    let channels = patch * patch * decoder.latent_channels;
    let shape = [batch, channels, size.height / pixels, size.width / pixels];
    let elements = shape
        .iter()
        .try_fold(1usize, |elements, &size| elements.checked_mul(size));
    if elements.is_none_or(|elements| elements > i32::MAX as usize) {
        return Err(
            format!("latents of {batch} images of {size} have over 2^31 values; pass a smaller --batch").into(),
        );
    }
    Ok(shape)
}

/// Decodes latents that stay on the device.
struct DeviceDecode {
    decoder: VaeDecoder,
    latents: Latents,
    quality: Quality,
    tiling: Option<Tiling>,
    storage: Option<Storage>,
    device: Device,
    /// Of the last run.
    preflight: Option<Preflight>,
    /// Off only to show that the protocol's check refuses such times.
    synchronises: bool,
    /// Of the last run.
    image: Option<Tensor<4>>,
}

impl DeviceDecode {
    fn image(&self) -> Result<Tensor<4>> {
        self.image.clone().ok_or_else(|| "nothing was decoded yet".into())
    }

    /// Refuses images whose values are not finite: the arithmetic of NaN may cost less.
    fn check_values(&self) -> Result {
        let image = self.image()?.try_into_data().map_err(device_failed)?;
        let count = image.iter::<f32>().filter(|value| !value.is_finite()).count();
        if count > 0 {
            let total = image.num_elements();
            return Err(format!(
                "{count} of the image's {total} values are not finite; pass --dtype f32, or check the weights"
            )
            .into());
        }
        Ok(())
    }

    /// Medians of each stage's wall clock, with a synchronise after each.
    fn stages(&mut self, runs: usize) -> Result<Vec<(String, f64)>> {
        let mut stages: Vec<(String, Vec<Duration>)> = Vec::new();
        for run in 0..=runs {
            let mut index = 0;
            let mut failure = None;
            let mut started = Instant::now();
            let mut observer = |stage: &str, _: &Tensor<4>| {
                failure = failure.take().or(self.device.sync().err());
                if run == 0 {
                    stages.push((stage.to_string(), Vec::new()));
                } else {
                    stages[index].1.push(started.elapsed());
                }
                index += 1;
                started = Instant::now();
            };
            self.decoder
                .decode_observed(self.latents.clone(), self.quality, &mut observer)?;
            if let Some(error) = failure {
                return Err(device_failed(error).into());
            }
        }
        Ok(stages
            .into_iter()
            .map(|(stage, times)| (stage, milliseconds(median(&times))))
            .collect())
    }
}

impl Work for DeviceDecode {
    fn run(&mut self) -> Result {
        // First, so that two images never count towards the peak.
        self.image = None;
        let options = DecodeOptions {
            tiling: self.tiling,
            storage: self.storage,
            ..DecodeOptions::new(self.quality)
        };
        let decoded = self.decoder.decode_with(self.latents.clone(), options)?;
        self.image = Some(decoded.image);
        self.preflight = Some(decoded.preflight);
        if self.synchronises {
            self.device.sync().map_err(device_failed)?;
        }
        Ok(())
    }

    fn read(&mut self) -> Result {
        read_last(self.image()?)
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::FloatDType;
    use burn_vae::AutoencoderKlConfig;
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn arguments_survive_the_command_line() {
        let args = Args {
            family: None,
            vae: Some("a folder/vae".into()),
            size: Some(Size { width: 64, height: 32 }),
            latents: None,
            batch: NonZeroUsize::new(2).unwrap(),
            quality: Quality::High,
            dtype: TypeName(Some(DType::BF16)),
            device: DeviceName::Cuda(1),
            warmups: 3,
            runs: NonZeroUsize::MIN,
            tile: Some(Tiling::Rows(NonZeroUsize::MIN)),
            storage: Some(Storage::Host),
            sites: true,
            without_synchronise: false,
        };
        let arguments = std::iter::once("bench-row".into()).chain(args.to_arguments());
        let parsed = Program::try_parse_from(arguments).unwrap().args;
        assert_eq!(format!("{parsed:?}"), format!("{args:?}"));
    }

    #[test]
    fn sizes_and_models_that_do_not_exist_are_refused() {
        assert_eq!(
            "1024x768".parse(),
            Ok(Size {
                width: 1024,
                height: 768
            })
        );
        assert_eq!("512".parse::<Size>().unwrap().to_string(), "512x512");
        for size in ["", "0", "x", "1024x", "-8", "8x8x8", "65537"] {
            assert!(size.parse::<Size>().is_err(), "{size}");
        }
        for name in ["sd", "sdxl", "sd3", "flux1", "flux2", "flux2-small"] {
            let model: Model = name.parse().unwrap();
            assert_eq!(model.to_string(), name);
            assert_eq!(Model::of(&model.config()), Some(model));
        }
        assert!("flux3".parse::<Model>().is_err());
        assert!("f64".parse::<TypeName>().is_err());
    }

    #[test]
    fn latents_of_each_family_have_its_channels_and_scale() {
        let shape_of = |config: VaeConfig, size: &str, batch| {
            latent_shape(&config, size.parse().unwrap(), batch).map_err(|error| error.to_string())
        };
        let shape = |config, size| shape_of(config, size, 3);
        let sd = || VaeConfig::AutoencoderKl(AutoencoderKlConfig::sd());
        let flux2 = || VaeConfig::Flux2(Flux2Config::flux2());
        assert_eq!(shape(sd(), "64x24"), Ok([3, 4, 3, 8]));
        assert_eq!(shape(flux2(), "64x48"), Ok([3, 128, 3, 4]));
        let error = "this model makes images of multiples of 16 pixels, not 64x24";
        assert_eq!(shape(flux2(), "64x24"), Err(error.into()));
        let error = shape_of(sd(), "64", usize::MAX).unwrap_err();
        assert!(error.contains("pass a smaller --batch"), "{error}");
    }

    fn small_decode() -> DeviceDecode {
        let device = Device::flex();
        let mut config = AutoencoderKlConfig::flux1();
        config.decoder.block_out_channels = vec![32, 64];
        let config = VaeConfig::AutoencoderKl(config);
        DeviceDecode {
            decoder: random::decoder(&config, &device, FloatDType::F32),
            latents: random::latents([1, 16, 48, 48], &device),
            quality: Quality::Lossless,
            tiling: None,
            storage: None,
            device,
            preflight: None,
            synchronises: true,
            image: None,
        }
    }

    #[test]
    fn decodes_on_the_cpu_pass_the_protocol_s_check() {
        let mut decode = small_decode();
        protocol::check(&mut decode).unwrap();
        decode.check_values().unwrap();
    }

    #[test]
    fn stages_are_timed_in_the_order_of_the_decode() {
        let mut decode = small_decode();
        let stages = decode.stages(2).unwrap();
        let names: Vec<_> = stages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), decode.decoder.num_stages());
        assert_eq!((names[0], names[names.len() - 1]), ("latents", "decoder.conv_out"));
        assert!(stages.iter().all(|(_, milliseconds)| *milliseconds > 0.0), "{stages:?}");
    }
}
