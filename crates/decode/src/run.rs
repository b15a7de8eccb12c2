use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Instant,
};

use burn::tensor::{DType as BurnDType, Device, Tensor, TensorData};
use burn_vae::{DeviceName, Latents, LoadOptions, Loaded, Quality, VaeConfig, VaeDecoder, peak_memory};
use serde::Serialize;
use vae_io::{Error, Image, LatentFile, LatentLayout, LatentsReading, Result};

use crate::{
    args::Args,
    outputs::{self, Destination, Target},
    progress::Progress,
};

/// Why a run ended early.
pub enum Failure {
    /// The arguments contradict each other.
    Usage(String),
    /// Something outside was not as it should be.
    Error(Error),
    /// The latents of this file do not fit.
    Latents(PathBuf, Error),
}

impl Failure {
    /// Names the file in errors that know only a shape.
    fn in_file(path: &Path) -> impl FnOnce(Error) -> Self {
        move |error| match error {
            Error::InvalidLatents { .. } | Error::AmbiguousLatents { .. } => Self::Latents(path.to_path_buf(), error),
            error => Self::Error(error),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// One input: what its file holds, what that means, where it goes.
struct Job {
    file: LatentFile,
    reading: LatentsReading,
    target: Target,
}

/// The line that `--json` prints for an image.
#[derive(Serialize)]
struct Record<'a> {
    input: &'a Path,
    output: &'a Path,
    family: String,
    space: String,
    width: usize,
    height: usize,
    device: String,
    dtype: String,
    quality: &'static str,
    load_s: f64,
    decode_s: f64,
    write_s: f64,
    peak_bytes: Option<u64>,
}

/// Decodes all inputs. Everything that can be checked is checked before the first one is decoded.
pub fn run(args: &Args) -> Result<(), Failure> {
    let progress = Progress::new(1, args.quiet);
    let result = run_with(args, &progress);
    progress.finish();
    result
}

fn run_with(args: &Args, progress: &Progress) -> Result<(), Failure> {
    let destination = Destination::parse(args.output.as_deref(), args.latents.len())?;
    if let (Destination::File(path, _), true) = (&destination, args.latents.len() > 1) {
        let message = format!(
            "{} inputs cannot go to one file `{}`; give -o a folder",
            args.latents.len(),
            path.display()
        );
        return Err(Failure::Usage(message));
    }
    let say = |line: &str| {
        if !args.quiet {
            progress.print(line);
        }
    };

    progress.begin("load");
    let started = Instant::now();
    let read = |path: &PathBuf| LatentFile::read(path).map_err(Failure::in_file(path));
    let files = args.latents.iter().map(read).collect::<Result<Vec<_>, _>>()?;
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
        dtype,
    } = VaeDecoder::load(&args.vae, &device, &options)?;
    let plan = decoder.plan(args.quality)?;
    let family = family_name(&config);
    say(&format!("{}: {family}, {report}", args.vae.display()));
    say(&format!("running {dtype} on {device_name}, quality {}", args.quality));
    if dtype != asked {
        say(&format!(
            "note: {asked} overflows in this model (force_upcast), {dtype} is used"
        ));
    }

    let mut jobs = Vec::with_capacity(files.len());
    for file in files {
        let reading = LatentsReading::infer(&file.shape, &file.hint, &config, &args.latents_options())
            .map_err(Failure::in_file(&file.path))?;
        say(&format!("{}: {reading}", file.path.display()));
        let target = destination.target(&file.path, reading.batch);
        jobs.push(Job { file, reading, target });
    }
    let targets: Vec<_> = jobs.iter().map(|job| (job.file.path.as_path(), &job.target)).collect();
    outputs::check(&destination, &targets, args.force)?;
    if args.explain {
        progress.print(&plan.to_string());
    }
    let load_s = started.elapsed().as_secs_f64();

    let images: usize = jobs.iter().map(|job| job.reading.batch).sum();
    progress.add_steps(images * decoder.num_stages() + jobs.len());
    progress.step();
    for job in &jobs {
        let timed = decode_job(job, &decoder, &device, device_name, args.quality, progress)?;
        let name = job.file.path.display().to_string();

        progress.begin(format!("write {name}"));
        if let Destination::Folder(folder) = &destination
            && !folder.as_os_str().is_empty()
        {
            std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        }
        let mut write_s = vec![0.0; job.reading.batch];
        match &job.target {
            Target::Raw(path) => {
                let started = Instant::now();
                timed.image.save_batch(path, args.force)?;
                write_s.fill(started.elapsed().as_secs_f64());
            }
            Target::Pictures(paths) => {
                for (index, path) in paths.iter().enumerate() {
                    let started = Instant::now();
                    timed.image.save(index, path, args.force)?;
                    write_s[index] = started.elapsed().as_secs_f64();
                }
            }
        }
        progress.step();

        for index in 0..job.reading.batch {
            let output = job.target.path_of(index);
            let (width, height) = (job.reading.width, job.reading.height);
            let decode_s = timed.seconds[index];
            say(&format!(
                "{}: {width}x{height}, decoded in {decode_s:.2} s",
                output.display()
            ));
            if args.json {
                let record = Record {
                    input: &job.file.path,
                    output,
                    family: family.clone(),
                    space: job.reading.space.to_string(),
                    width,
                    height,
                    device: device_name.to_string(),
                    dtype: dtype.to_string(),
                    quality: args.quality.name(),
                    load_s,
                    decode_s,
                    write_s: write_s[index],
                    peak_bytes: peak_memory(&device),
                };
                print_json(&record).map_err(Error::io("write", Path::new("standard output")))?;
            }
        }
    }
    Ok(())
}

fn print_json(record: &Record) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    std::io::stdout().lock().write_all(&line)
}

/// Decoded images of one input, and the seconds each took.
struct Timed {
    image: Image,
    seconds: Vec<f64>,
}

/// Decodes the batch of one file image by image, so that none changes another's bits.
fn decode_job(
    job: &Job,
    decoder: &VaeDecoder,
    device: &Device,
    device_name: DeviceName,
    quality: Quality,
    progress: &Progress,
) -> Result<Timed> {
    let mut values = Vec::new();
    let mut seconds = Vec::with_capacity(job.reading.batch);
    let failed = |reason: String| Error::DeviceFailed {
        device: device_name.to_string(),
        reason,
    };
    for index in 0..job.reading.batch {
        let started = Instant::now();
        let name = job.file.path.display().to_string();
        progress.begin(format!("decode {name}"));
        let image = decoder.decode_observed(latents(job, index, device), quality, &mut |stage, _| {
            if progress.is_visible() {
                // Without this the bar would show how fast work is enqueued. A failure comes back at the read below.
                let _ = device.sync();
            }
            progress.begin(format!("decode {name}: {stage} done"));
            progress.step();
        })?;
        device.sync().map_err(|error| failed(error.to_string()))?;
        seconds.push(started.elapsed().as_secs_f64());

        let data = image
            .try_into_data_dtype(BurnDType::F32)
            .map_err(|error| failed(error.to_string()))?;
        let data: Vec<f32> = data.try_into_vec().map_err(|error| failed(format!("{error:?}")))?;
        if data.iter().any(|value| !value.is_finite()) {
            return Err(non_finite_stage(job, index, decoder, device, quality));
        }
        values.extend(data);
    }
    let shape = [job.reading.batch, 3, job.reading.height, job.reading.width];
    let image = Image::new(shape, values);
    Ok(Timed { image, seconds })
}

/// Image `index` of a file's batch, on the device, in the layout and space that were inferred.
fn latents(job: &Job, index: usize, device: &Device) -> Latents {
    let reading = &job.reading;
    let size = job.file.values.len() / reading.batch;
    let values = job.file.values[index * size..(index + 1) * size].to_vec();
    let mut shape = reading.batched_shape();
    shape[0] = 1;
    let data = TensorData::new(values, shape);
    let options = (device, BurnDType::F32);
    let latents = match reading.layout {
        LatentLayout::Map => Latents::diffusion(Tensor::<4>::from_data(data, options)),
        LatentLayout::Tokens => Latents::tokens(Tensor::<3>::from_data(data, options), reading.rows, reading.columns),
    };
    latents.in_space(reading.space)
}

/// Decodes once more to find the first stage whose activation is not finite.
fn non_finite_stage(job: &Job, index: usize, decoder: &VaeDecoder, device: &Device, quality: Quality) -> Error {
    let mut found = None;
    let mut observer = |stage: &str, activation: &Tensor<4>| {
        if found.is_some() {
            return;
        }
        let Ok(data) = activation.clone().try_into_data_dtype(BurnDType::F32) else {
            return;
        };
        let count = data.iter::<f32>().filter(|value| !value.is_finite()).count();
        if count > 0 {
            found = Some((stage.to_string(), count, activation.shape().num_elements()));
        }
    };
    let result = decoder.decode_observed(latents(job, index, device), quality, &mut observer);
    let (stage, count, total) = match (result, found) {
        (Err(error), _) => return error,
        (Ok(_), Some(found)) => found,
        (Ok(image), None) => ("the decoded image".to_string(), 0, image.shape().num_elements()),
    };
    Error::NonFinite {
        stage,
        count,
        total,
        hint: "; the activations overflow: pass --dtype f32, or check the weights",
    }
}

fn family_name(config: &VaeConfig) -> String {
    match (config.family(), config) {
        (Some(family), _) => family.to_string(),
        (None, VaeConfig::AutoencoderKl(_)) => "autoencoder-kl".to_string(),
        (None, VaeConfig::Flux2(_)) => "flux2".to_string(),
    }
}
