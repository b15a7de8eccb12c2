//! Reading, decoding and writing at once: a thread reads the next files while this one decodes, and others copy finished
//! images from the device and encode them. Every queue between them is bounded.
//!
//! Decodes are enqueued, not waited for, and the threads that write also wait for the pixels: a GPU has the next batch before
//! it is done with the last.

use std::{
    collections::{HashMap, HashSet},
    io::ErrorKind,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread,
    time::Instant,
};

use burn::tensor::Tensor;
use vae_io::{Error, Image, LatentFile, LatentHeader, LatentsReading, Result};

use crate::{
    args::Args,
    inputs::Input,
    outputs::Output,
    progress::Progress,
    report::{DecodedRecord, FileError, Report},
    schedule::{ImageId, writers},
    session::Session,
};

/// An input that can be decoded.
pub struct Job {
    /// Its place among the run's inputs.
    pub input: usize,
    pub header: LatentHeader,
    pub reading: LatentsReading,
    /// What was read already, because it can be read only once.
    pub file: Option<Arc<LatentFile>>,
}

/// An output that is to be written, and the place of its input's [`Job`].
pub struct Task {
    pub job: usize,
    pub output: Output,
}

/// What a run decodes.
pub struct Work<'a> {
    pub args: &'a Args,
    pub inputs: &'a [Input],
    pub session: &'a Session,
    pub jobs: &'a [Job],
    pub tasks: &'a [Task],
    pub batches: &'a [Vec<ImageId>],
}

/// Device batches of latents that are read ahead.
const READ_AHEAD: usize = 2;

/// Latents of a device batch.
struct Loaded {
    /// Counted over the run.
    batch: usize,
    /// Those that could be read.
    images: Vec<ImageId>,
    values: Vec<f32>,
}

/// A device batch whose decode is enqueued.
struct Launched {
    loaded: Loaded,
    pixels: Tensor<2>,
    started: Instant,
}

/// An image with pixels that are not finite.
struct Suspect {
    image: ImageId,
    latents: Vec<f32>,
    count: usize,
    total: usize,
}

/// When the device batch of an image was decoded.
#[derive(Clone, Copy)]
struct Timing {
    batch: usize,
    /// In that batch.
    images: usize,
    started: Instant,
    /// When the pixels were read.
    ready: Instant,
}

/// What has become of a task.
enum Outcome {
    Pending,
    Written {
        images: Vec<Timing>,
        write_s: f64,
    },
    Failed(FileError),
    /// Another run wrote the output meanwhile.
    Skipped,
    /// Another task of the same input failed.
    Dropped,
    Told,
}

/// Decodes everything, and reports each output in the order of the batches, whichever is written first. Gives the report
/// back, and the error that stopped the run, if one did.
pub fn run<'a>(work: &'a Work<'a>, report: Report<'a>, progress: &Progress) -> (Report<'a>, Option<Error>) {
    let ledger = Ledger::new(work, report);
    let assemblies = Mutex::default();
    let largest = work.batches.iter().map(|batch| work.batch_bytes(batch)).max();
    let writers = writers(work.session.device_name, largest.unwrap_or(0));
    thread::scope(|scope| {
        let (send_loaded, loaded) = sync_channel(READ_AHEAD);
        scope.spawn(|| work.load(send_loaded, &ledger));

        // Nothing waits in the queue itself: a batch is handed over when a thread is free.
        let (launched, take_launched) = sync_channel(0);
        let take_launched = Arc::new(Mutex::new(take_launched));
        let (send_suspect, suspects) = channel();
        for _ in 0..writers {
            let writer = Writer {
                work,
                ledger: &ledger,
                assemblies: &assemblies,
                suspects: send_suspect.clone(),
            };
            let take_launched = Arc::clone(&take_launched);
            scope.spawn(move || writer.run(&take_launched));
        }
        // Only the threads hold them, so that this one does not wait for threads that are gone.
        drop((take_launched, send_suspect));

        for loaded in loaded {
            suspects.try_iter().for_each(|suspect| work.diagnose(suspect, &ledger));
            if ledger.is_stopped() || !work.launch(loaded, &launched, &ledger, progress) {
                break;
            }
        }
        drop(launched);
        suspects.iter().for_each(|suspect| work.diagnose(suspect, &ledger));
    });
    ledger.close()
}

/// Whether the next file would fail as well.
fn stops_the_run(error: &Error) -> bool {
    match error {
        Error::DeviceFailed { .. } | Error::DeviceUnavailable { .. } | Error::QualityUnavailable { .. } => true,
        Error::Io { source, .. } => matches!(
            source.kind(),
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::ReadOnlyFilesystem
        ),
        _ => false,
    }
}

impl Work<'_> {
    fn job_of(&self, image: ImageId) -> &Job {
        &self.jobs[self.tasks[image.output].job]
    }

    /// Bytes of the pixels of a device batch.
    fn batch_bytes(&self, batch: &[ImageId]) -> usize {
        let pixels = |&image: &ImageId| {
            let reading = &self.job_of(image).reading;
            reading.width.saturating_mul(reading.height)
        };
        let pixels = batch.iter().map(pixels).fold(0, usize::saturating_add);
        pixels.saturating_mul(3 * size_of::<f32>())
    }

    /// Reads the latents of every batch, until nobody takes them.
    fn load(&self, send: SyncSender<Loaded>, ledger: &Ledger<'_>) {
        // Images of one file follow each other, mostly.
        let mut last: Option<(usize, Arc<LatentFile>)> = None;
        let mut failed = HashSet::new();
        for (batch, images) in self.batches.iter().enumerate() {
            let mut loaded = Loaded {
                batch,
                images: Vec::with_capacity(images.len()),
                values: Vec::new(),
            };
            for &image in images {
                let job = self.tasks[image.output].job;
                let file = match &last {
                    _ if failed.contains(&job) => {
                        ledger.settle(image.output, Outcome::Dropped);
                        continue;
                    }
                    Some((of, file)) if *of == job => Ok(Arc::clone(file)),
                    _ => self.jobs[job].read(self.args.tensor.as_deref()),
                };
                match file {
                    Ok(file) => {
                        let size = file.values.len() / self.jobs[job].reading.batch;
                        loaded.values.extend(&file.values[image.index * size..][..size]);
                        loaded.images.push(image);
                        last = Some((job, file));
                    }
                    Err(error) => {
                        failed.insert(job);
                        let error = FileError::new(&self.jobs[job].header.path, error);
                        ledger.settle(image.output, Outcome::Failed(error));
                    }
                }
            }
            if !loaded.images.is_empty() && send.send(loaded).is_err() {
                return;
            }
        }
    }

    /// Enqueues the decode of a batch and hands it over. False when nobody takes it.
    fn launch(&self, loaded: Loaded, send: &SyncSender<Launched>, ledger: &Ledger<'_>, progress: &Progress) -> bool {
        let Loaded { batch, images, values } = &loaded;
        let first = self.job_of(images[0]);
        let mut name = first.header.path.display().to_string();
        if images.len() > 1 {
            name += &format!(" and {} more", images.len() - 1);
        }
        progress.begin(format!("decode {name}"));
        let started = Instant::now();
        let pixels = self
            .session
            .launch(values.clone(), &first.reading, images.len(), &mut |decoding| {
                if decoding.ends_stage {
                    self.observe(&name, decoding.stage, progress);
                }
            });
        match pixels {
            Ok(pixels) => send
                .send(Launched {
                    loaded,
                    pixels,
                    started,
                })
                .is_ok(),
            Err(error) if stops_the_run(&error) => {
                ledger.stop(error);
                true
            }
            // Several may be more than the device takes at once.
            Err(error) if images.len() > 1 => {
                progress.say(&format!("note: decoding {name} one by one: {error}"));
                let size = values.len() / images.len();
                let mut singles = images.iter().zip(values.chunks(size)).map(|(&image, values)| Loaded {
                    batch: *batch,
                    images: vec![image],
                    values: values.to_vec(),
                });
                singles.all(|single| self.launch(single, send, ledger, progress))
            }
            Err(error) => {
                let error = FileError::new(&first.header.path, error);
                ledger.settle(images[0].output, Outcome::Failed(error));
                true
            }
        }
    }

    /// Shows that a stage was enqueued, or is done.
    fn observe(&self, name: &str, stage: &str, progress: &Progress) {
        if self.counts_stages() {
            if progress.is_visible() && self.batches.len() == 1 {
                // Without this the bar would show how fast work is enqueued.
                self.session.sync();
            }
            progress.step();
        }
        if self.counts_stages() || self.session.is_synchronous() {
            progress.begin(format!("decode {name}: {stage} done"));
        }
    }

    /// Steps of the progress bar, and what they are called: stages of one file, or files.
    pub fn steps(&self) -> (usize, &'static str) {
        match self.counts_stages() {
            true => (
                self.batches.len() * self.session.num_stages() + self.tasks.len(),
                "steps",
            ),
            false => (self.inputs.len(), "files"),
        }
    }

    fn counts_stages(&self) -> bool {
        self.inputs.len() == 1
    }

    /// Finds out where pixels went wrong.
    fn diagnose(&self, suspect: Suspect, ledger: &Ledger<'_>) {
        let Suspect {
            image,
            latents,
            count,
            total,
        } = suspect;
        let job = self.job_of(image);
        let error = self.session.non_finite(latents, &job.reading, count, total);
        if stops_the_run(&error) {
            ledger.stop(error);
        } else {
            let error = FileError::new(&job.header.path, error);
            ledger.settle(image.output, Outcome::Failed(error));
        }
    }
}

impl Job {
    fn read(&self, tensor: Option<&str>) -> Result<Arc<LatentFile>> {
        if let Some(file) = &self.file {
            return Ok(Arc::clone(file));
        }
        let path = &self.header.path;
        let file = LatentFile::read_tensor(path, tensor)?;
        if file.header() != self.header {
            let reason = "it was another when this run began; decode it again";
            return Err(Error::invalid_file(path, "file of latents", reason));
        }
        Ok(Arc::new(file))
    }
}

/// Copies pixels from the device and writes them.
struct Writer<'s, 'a> {
    work: &'a Work<'a>,
    ledger: &'s Ledger<'a>,
    assemblies: &'s Mutex<HashMap<usize, Assembly>>,
    suspects: Sender<Suspect>,
}

/// The images of an output of several, until all are there.
struct Assembly {
    image: Vec<f32>,
    /// By the place of the image in the batch.
    timings: Vec<Timing>,
    missing: usize,
}

impl Writer<'_, '_> {
    fn run(&self, launched: &Mutex<Receiver<Launched>>) {
        loop {
            // Not in the head of a loop, where the lock would be held while a batch is written.
            let launched = lock(launched).recv();
            let Ok(launched) = launched else { return };
            if self.ledger.is_stopped() {
                continue;
            }
            if let Err(error) = self.write(launched) {
                self.ledger.stop(error);
            }
        }
    }

    /// Writes the outputs of a batch, or parts of them; an error stops the run.
    fn write(&self, launched: Launched) -> Result<()> {
        let Launched {
            loaded: Loaded { batch, images, values },
            pixels,
            started,
        } = launched;
        let pixels = self.work.session.read(pixels)?;
        let timing = Timing {
            batch,
            images: images.len(),
            started,
            ready: Instant::now(),
        };
        let reading = &self.work.job_of(images[0]).reading;
        let decoded = Image::new([images.len(), 3, reading.height, reading.width], pixels);
        let latents = values.len() / images.len();
        for (place, &image) in images.iter().enumerate() {
            let pixels = decoded.image(place);
            let count = pixels.iter().filter(|value| !value.is_finite()).count();
            if count > 0 {
                let suspect = Suspect {
                    image,
                    latents: values[place * latents..][..latents].to_vec(),
                    count,
                    total: pixels.len(),
                };
                // The thread that decodes takes them to the end, unless it is gone with a panic of its own.
                let _ = self.suspects.send(suspect);
                continue;
            }
            let Output {
                path,
                images: held,
                replace,
            } = &self.work.tasks[image.output].output;
            let writing = Instant::now();
            let (written, images) = if held.len() == 1 {
                (decoded.save(place, path, *replace), vec![timing])
            } else if let Some(assembly) = self.assemble(image, pixels, timing) {
                let shape = [held.len(), 3, reading.height, reading.width];
                let whole = Image::new(shape, assembly.image);
                (whole.save_batch(path, *replace), assembly.timings)
            } else {
                continue;
            };
            let write_s = writing.elapsed().as_secs_f64();
            match written {
                Ok(()) => self.ledger.settle(image.output, Outcome::Written { images, write_s }),
                Err(Error::OutputExists { .. }) if self.work.args.resume => {
                    self.ledger.settle(image.output, Outcome::Skipped);
                }
                Err(error) if stops_the_run(&error) => return Err(error),
                Err(error) => {
                    let error = FileError::new(&self.work.job_of(image).header.path, error);
                    self.ledger.settle(image.output, Outcome::Failed(error));
                }
            }
        }
        Ok(())
    }

    /// Puts an image in its place of an output of several; gives them all if it was the last.
    fn assemble(&self, image: ImageId, pixels: &[f32], timing: Timing) -> Option<Assembly> {
        let mut assemblies = lock(self.assemblies);
        let count = self.work.tasks[image.output].output.images.len();
        let assembly = assemblies.entry(image.output).or_insert_with(|| Assembly {
            image: vec![0.0; count * pixels.len()],
            timings: vec![timing; count],
            missing: count,
        });
        assembly.image[image.index * pixels.len()..][..pixels.len()].copy_from_slice(pixels);
        assembly.timings[image.index] = timing;
        assembly.missing -= 1;
        match assembly.missing {
            0 => assemblies.remove(&image.output),
            _ => None,
        }
    }
}

/// What has become of every task, told in order.
struct Ledger<'a> {
    work: &'a Work<'a>,
    pages: Mutex<Pages<'a>>,
}

struct Pages<'a> {
    report: Report<'a>,
    /// By task.
    outcomes: Vec<Outcome>,
    /// Tasks in the order that they are told in: that of their last images.
    order: Vec<usize>,
    /// How many of them were told.
    told: usize,
    /// The device batch that was told of last, and the seconds of each of its images.
    last: Option<(Timing, f64)>,
    stopped: Option<Error>,
}

impl<'a> Ledger<'a> {
    fn new(work: &'a Work<'a>, report: Report<'a>) -> Self {
        let mut missing: Vec<usize> = work.tasks.iter().map(|task| task.output.images.len()).collect();
        let mut order = Vec::with_capacity(missing.len());
        for image in work.batches.iter().flatten() {
            missing[image.output] -= 1;
            if missing[image.output] == 0 {
                order.push(image.output);
            }
        }
        let pages = Pages {
            report,
            outcomes: work.tasks.iter().map(|_| Outcome::Pending).collect(),
            order,
            told: 0,
            last: None,
            stopped: None,
        };
        Self {
            work,
            pages: Mutex::new(pages),
        }
    }

    /// A task has come to an end; what comes after its first end is ignored. Tells all that can be told now.
    fn settle(&self, task: usize, outcome: Outcome) {
        let mut pages = lock(&self.pages);
        if !matches!(pages.outcomes[task], Outcome::Pending) {
            return;
        }
        pages.outcomes[task] = outcome;
        while let Some(&task) = pages.order.get(pages.told)
            && !matches!(pages.outcomes[task], Outcome::Pending)
        {
            pages.told += 1;
            pages.tell(task, self.work);
        }
    }

    /// Ends the run with an error; the first one counts.
    fn stop(&self, error: Error) {
        lock(&self.pages).stopped.get_or_insert(error);
    }

    fn is_stopped(&self) -> bool {
        lock(&self.pages).stopped.is_some()
    }

    /// Tells what waited for tasks that did not come to an end.
    fn close(self) -> (Report<'a>, Option<Error>) {
        let mut pages = self.pages.into_inner().unwrap_or_else(PoisonError::into_inner);
        for task in pages.order.split_off(pages.told) {
            pages.tell(task, self.work);
        }
        (pages.report, pages.stopped)
    }
}

impl Pages<'_> {
    fn tell(&mut self, task: usize, work: &Work<'_>) {
        let Task { job, output } = &work.tasks[task];
        let job = &work.jobs[*job];
        let told = match std::mem::replace(&mut self.outcomes[task], Outcome::Told) {
            Outcome::Pending | Outcome::Dropped | Outcome::Told => Ok(()),
            Outcome::Failed(error) => self.report.failed(job.input, error),
            Outcome::Skipped => self.report.skipped(job.input, &output.path),
            Outcome::Written { images, write_s } => {
                let session = work.session;
                let peak_bytes = work.args.json.then(|| session.peak_bytes()).flatten();
                let record = |decode_s| DecodedRecord {
                    input: work.inputs[job.input].argument().display().to_string(),
                    output: output.path.display().to_string(),
                    family: &session.family,
                    space: job.reading.space.to_string(),
                    width: job.reading.width,
                    height: job.reading.height,
                    device: session.device_name.to_string(),
                    dtype: session.dtype.to_string(),
                    quality: session.quality.name(),
                    load_s: session.load_s,
                    decode_s,
                    write_s,
                    peak_bytes,
                };
                let records = images.into_iter().map(|timing| record(self.seconds(timing))).collect();
                self.report.decoded(job.input, records)
            }
        };
        if let Err(error) = told {
            self.stopped.get_or_insert(error);
        }
    }

    /// Seconds that an image took: its share of what its batch took after the one before, which it may have waited for.
    fn seconds(&mut self, timing: Timing) -> f64 {
        match self.last {
            Some((last, seconds)) if last.batch == timing.batch && last.started == timing.started => seconds,
            last => {
                let begun = last.map_or(timing.started, |(last, _)| last.ready.max(timing.started));
                let seconds = timing.ready.duration_since(begun).as_secs_f64() / timing.images as f64;
                self.last = Some((timing, seconds));
                seconds
            }
        }
    }
}

/// A panic of another thread is reported where that thread is joined.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
