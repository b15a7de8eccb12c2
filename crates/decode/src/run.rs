use std::{
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    time::Instant,
};

use burn::tensor::{DType as BurnDType, Device, Tensor};
use burn_vae::{
    DType, DeviceName, LoadOptions, Loaded, Observer, Quality, VaeConfig, VaeDecoder, latents_from_file, peak_memory,
};
use serde::Serialize;
use vae_io::{Error, Image, LatentFile, LatentsReading, Result};

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

/// One input: what it was called, what it holds, what that means, where it goes.
struct Job {
    input: PathBuf,
    file: LatentFile,
    reading: LatentsReading,
    target: Target,
}

/// The line that `--json` prints for an image.
#[derive(Serialize)]
struct Record<'a> {
    input: String,
    output: String,
    family: &'a str,
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

/// Everything a run decodes with.
struct Session {
    decoder: VaeDecoder,
    device: Device,
    device_name: DeviceName,
    dtype: DType,
    quality: Quality,
    family: String,
    load_s: f64,
}

/// Decoded images of one input, and the seconds each took.
struct Timed {
    image: Image,
    seconds: Vec<f64>,
}

/// Decodes all inputs. Everything that can be checked is checked before the first one is decoded.
pub fn run(args: &Args) -> Result<(), Failure> {
    let progress = Progress::new(1, args.quiet);
    let result = prepare(args, &progress).and_then(|(session, jobs)| {
        progress.add_steps(jobs.iter().map(|job| job.reading.batch).sum::<usize>() * session.decoder.num_stages());
        progress.add_steps(jobs.len());
        progress.step();
        jobs.iter().try_for_each(|job| session.run(job, args, &progress))
    });
    progress.finish();
    result
}

fn prepare(args: &Args, progress: &Progress) -> Result<(Session, Vec<Job>), Failure> {
    let destination = Destination::parse(args.output.as_deref(), args.latents.len())?;
    if let (Destination::File(path, _), inputs @ 2..) = (&destination, args.latents.len()) {
        let message = format!(
            "{inputs} inputs cannot go to one file `{}`; give -o a folder",
            path.display()
        );
        return Err(Failure::Usage(message));
    }

    let is_standard_input = |path: &Path| path == Path::new(STANDARD_INPUT);
    if args.latents.iter().filter(|path| is_standard_input(path)).count() > 1 {
        return Err(Failure::Usage("standard input (-) can be read only once".to_string()));
    }

    progress.begin("load");
    let started = Instant::now();
    let tensor = args.tensor.as_deref();
    let read = |path: &PathBuf| match is_standard_input(path) {
        true => read_standard_input(tensor),
        false => LatentFile::read_tensor(path, tensor).map_err(Failure::in_file(path)),
    };
    let latents = args.latents.iter().map(read).collect::<Result<Vec<_>, _>>()?;
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
        mut files,
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

    let mut jobs = Vec::with_capacity(latents.len());
    for (input, file) in args.latents.iter().zip(latents) {
        let reading = LatentsReading::infer(&file.shape, &file.hint, &config, &args.latents_options())
            .map_err(Failure::in_file(&file.path))?;
        progress.say(&format!("{}: {reading}", file.path.display()));
        let named_after = match is_standard_input(input) {
            true => Path::new("latents"),
            false => input,
        };
        let target = destination.target(named_after, reading.batch);
        target.check_size(reading.width, reading.height)?;
        let input = input.clone();
        jobs.push(Job {
            input,
            file,
            reading,
            target,
        });
    }
    files.extend(args.latents.iter().filter(|path| !is_standard_input(path)).cloned());
    let targets: Vec<_> = jobs.iter().map(|job| (job.file.path.as_path(), &job.target)).collect();
    outputs::check(&destination, &targets, &files, args.force)?;
    if args.explain {
        plan.to_string().lines().for_each(|line| progress.print(line));
    }
    let session = Session {
        decoder,
        device,
        device_name,
        dtype,
        quality: args.quality,
        family,
        load_s: started.elapsed().as_secs_f64(),
    };
    Ok((session, jobs))
}

/// The input that is no file.
const STANDARD_INPUT: &str = "-";

/// What messages call it.
const STANDARD_INPUT_NAME: &str = "standard input";

/// Reads latents from standard input; a terminal would only wait for someone to type them.
fn read_standard_input(tensor: Option<&str>) -> Result<LatentFile, Failure> {
    let name = Path::new(STANDARD_INPUT_NAME);
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        let reason = "it is a terminal; pipe a file into it, or name the file in place of -";
        return Err(Error::invalid_file(name, "file of latents", reason).into());
    }
    LatentFile::read_stream(stdin.lock(), name, tensor).map_err(Failure::in_file(name))
}

impl Session {
    /// Decodes one input, writes its files and reports them.
    fn run(&self, job: &Job, args: &Args, progress: &Progress) -> Result<(), Failure> {
        let name = job.file.path.display().to_string();
        let Timed { image, seconds } = self.decode(job, progress)?;

        progress.begin(format!("write {name}"));
        let mut write_s = vec![0.0; job.reading.batch];
        match &job.target {
            Target::Raw(path) => {
                let started = Instant::now();
                image.save_batch(path, args.force)?;
                write_s.fill(started.elapsed().as_secs_f64());
            }
            Target::Pictures(paths) => {
                for (index, path) in paths.iter().enumerate() {
                    let started = Instant::now();
                    image.save(index, path, args.force)?;
                    write_s[index] = started.elapsed().as_secs_f64();
                }
            }
        }
        progress.step();

        let (width, height) = (job.reading.width, job.reading.height);
        for (index, &decode_s) in seconds.iter().enumerate() {
            let output = job.target.path_of(index).display().to_string();
            progress.say(&format!("{output}: {width}x{height}, decoded in {decode_s:.2} s"));
            if args.json {
                let record = Record {
                    input: job.input.display().to_string(),
                    output,
                    family: &self.family,
                    space: job.reading.space.to_string(),
                    width,
                    height,
                    device: self.device_name.to_string(),
                    dtype: self.dtype.to_string(),
                    quality: self.quality.name(),
                    load_s: self.load_s,
                    decode_s,
                    write_s: write_s[index],
                    peak_bytes: peak_memory(&self.device),
                };
                print_json(&record).map_err(Error::io("write", Path::new("standard output")))?;
            }
        }
        Ok(())
    }

    /// Decodes the batch of one file image by image, so that none changes another's bits.
    fn decode(&self, job: &Job, progress: &Progress) -> Result<Timed> {
        let name = job.file.path.display().to_string();
        let mut values = Vec::new();
        let mut seconds = Vec::with_capacity(job.reading.batch);
        for index in 0..job.reading.batch {
            progress.begin(format!("decode {name}"));
            let started = Instant::now();
            let image = self.decode_image(job, index, &mut |stage, _| {
                if progress.is_visible() {
                    // Without this the bar would show how fast work is enqueued. A failure comes back at the read below.
                    let _ = self.device.sync();
                }
                progress.begin(format!("decode {name}: {stage} done"));
                progress.step();
            })?;
            self.device.sync().map_err(|error| self.failed(error))?;
            seconds.push(started.elapsed().as_secs_f64());

            let data = image
                .try_into_data_dtype(BurnDType::F32)
                .map_err(|error| self.failed(error))?;
            let data: Vec<f32> = data.try_into_vec().map_err(|error| self.failed(error))?;
            let non_finite = data.iter().filter(|value| !value.is_finite()).count();
            if non_finite > 0 {
                return Err(self.non_finite(job, index, non_finite, data.len()));
            }
            values.extend(data);
        }
        let shape = [job.reading.batch, 3, job.reading.height, job.reading.width];
        Ok(Timed {
            image: Image::new(shape, values),
            seconds,
        })
    }

    fn decode_image(&self, job: &Job, index: usize, observer: &mut Observer<'_>) -> Result<Tensor<4>> {
        let latents = latents_from_file(&job.file, &job.reading, index, &self.device);
        self.decoder.decode_observed(latents, self.quality, observer)
    }

    /// Decodes once more to name the first stage whose activation is not finite.
    fn non_finite(&self, job: &Job, index: usize, count: usize, total: usize) -> Error {
        let mut found = None;
        let mut observer = |stage: &str, activation: &Tensor<4>| {
            if found.is_none()
                && let Ok(data) = activation.clone().try_into_data_dtype(BurnDType::F32)
            {
                let count = data.iter::<f32>().filter(|value| !value.is_finite()).count();
                found = (count > 0).then(|| (stage.to_string(), count, activation.shape().num_elements()));
            }
        };
        if let Err(error) = self.decode_image(job, index, &mut observer) {
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

    fn failed(&self, error: impl std::fmt::Display) -> Error {
        Error::DeviceFailed {
            device: self.device_name.to_string(),
            reason: error.to_string(),
        }
    }
}

fn print_json(record: &Record) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    std::io::stdout().lock().write_all(&line)
}

fn family_name(config: &VaeConfig) -> String {
    match (config.family(), config) {
        (Some(family), _) => family.to_string(),
        (None, VaeConfig::AutoencoderKl(_)) => "autoencoder-kl".to_string(),
        (None, VaeConfig::Flux2(_)) => "flux2".to_string(),
    }
}
