//! A run from the arguments to the summary. Everything that can be checked is checked before the first decode.

use std::{
    collections::{HashMap, HashSet},
    io::IsTerminal,
    path::Path,
    sync::Arc,
};

use burn_vae::VaeConfig;
use vae_io::{Error, LatentFile, LatentHeader, LatentsReading, Result};

use crate::{
    Failure,
    args::Args,
    inputs::{Input, expand},
    outputs::{self, Destination},
    pipeline::{self, Job, Task, Work},
    progress::Progress,
    report::{FileError, Report},
    schedule::{ImageId, batch_limit, schedule},
    session::{Opened, Session},
};

/// Decodes all inputs.
pub fn run(args: &Args) -> Result<(), Failure> {
    let progress = Progress::new(args.quiet);
    let result = decode(args, &progress);
    progress.finish();
    result
}

fn decode(args: &Args, progress: &Progress) -> Result<(), Failure> {
    let inputs = expand(&args.latents)?;
    let destination = destination(args, &inputs)?;
    let mut report = Report::new(args, progress, &inputs);

    progress.begin("look at the latents");
    let mut found = Vec::with_capacity(inputs.len());
    for (input, of) in inputs.iter().enumerate() {
        match look(of, args.tensor.as_deref()) {
            Ok((header, file)) => found.push((input, header, file)),
            Err(error) => report.failed(input, FileError::new(of.path(), error))?,
        }
    }
    if found.is_empty() {
        return report.finish(None);
    }

    let Opened {
        session,
        config,
        plan,
        files,
    } = Session::open(args, progress)?;
    let mut jobs = Vec::with_capacity(found.len());
    for (input, header, file) in found {
        match read(&header, &config, args) {
            Ok(reading) => jobs.push(Job {
                input,
                header,
                reading,
                file,
            }),
            Err(error) => report.failed(input, FileError::new(&header.path, error))?,
        }
    }
    say_readings(&jobs, progress);

    if args.explain {
        plan.to_string().lines().for_each(|line| progress.print(line));
    }
    let mut tasks = Vec::new();
    let mut skipped = Vec::new();
    let mut predicted = HashSet::new();
    for (index, job) in jobs.iter().enumerate() {
        let outputs = destination.outputs(inputs[job.input].output_name(), job.reading.batch, args.force);
        let (width, height) = (job.reading.width, job.reading.height);
        if let Err(error) = outputs.iter().try_for_each(|output| output.check_size(width, height)) {
            report.failed(job.input, error.into())?;
            continue;
        }
        match session.preflight(1, width, height) {
            Ok(preflight) => {
                if (args.explain || preflight.tile.rows.is_some()) && predicted.insert((width, height)) {
                    let line = format!("{}: {preflight}", job.header.path.display());
                    match args.explain {
                        true => progress.print(&line),
                        false => progress.say(&line),
                    }
                }
            }
            Err(error) => {
                report.failed(job.input, FileError::new(&job.header.path, error))?;
                continue;
            }
        }
        report.expect(job.input, outputs.len());
        for mut output in outputs {
            if args.resume && output.is_finished() {
                skipped.push(Task { job: index, output });
                continue;
            }
            output.replace |= args.resume && output.existing_bytes() == Some(0);
            tasks.push(Task { job: index, output });
        }
    }
    let named = tasks.iter().chain(&skipped);
    let named = named.map(|task| (jobs[task.job].header.path.as_path(), &task.output));
    let read = files
        .iter()
        .map(|file| file.as_path())
        .chain(inputs.iter().map(Input::path));
    outputs::check_names(named, read)?;
    outputs::prepare(&destination, tasks.iter().map(|task| &task.output))?;
    for Task { job, output } in &skipped {
        report.skipped(jobs[*job].input, &output.path)?;
    }

    let images = tasks.iter().enumerate().flat_map(|(output, task)| {
        let reading = &jobs[task.job].reading;
        let image = move |index| (ImageId { output, index }, reading);
        task.output.images.clone().map(image)
    });
    let mut limits = HashMap::new();
    for Job { reading, .. } in &jobs {
        limits.entry((reading.width, reading.height)).or_insert_with(|| {
            let most = batch_limit(args.batch, args.quality, session.device_name, reading);
            session.fitting_batch(most, reading.width, reading.height)
        });
    }
    let batches = schedule(images, |reading| limits[&(reading.width, reading.height)]);
    let work = Work {
        args,
        inputs: &inputs,
        session: &session,
        jobs: &jobs,
        tasks: &tasks,
        batches: &batches,
    };
    let (steps, unit) = work.steps();
    progress.count(steps, unit);
    report.start_clock();
    let (report, stopped) = pipeline::run(&work, report, progress);
    report.finish(stopped)
}

/// Where the outputs go.
fn destination(args: &Args, inputs: &[Input]) -> Result<Destination, Failure> {
    if inputs.iter().filter(|input| **input == Input::StandardInput).count() > 1 {
        return Err(Failure::Usage("standard input (-) can be read only once".to_string()));
    }
    // A folder may happen to have one file.
    let named = inputs
        .iter()
        .zip(&args.latents)
        .all(|(input, argument)| input.argument() == argument);
    let several = inputs.len() > 1 || !named;
    let destination = Destination::parse(args.output.as_deref(), several)?;
    match &destination {
        Destination::File(path, _) if inputs.len() > 1 => Err(Failure::Usage(format!(
            "{} inputs cannot go to one file `{}`; give -o a folder",
            inputs.len(),
            path.display()
        ))),
        _ => Ok(destination),
    }
}

/// What an input says of its latents; the file itself where it can be read only once.
fn look(input: &Input, tensor: Option<&str>) -> Result<(LatentHeader, Option<Arc<LatentFile>>)> {
    match input {
        Input::File(path) => Ok((LatentHeader::read(path, tensor)?, None)),
        Input::StandardInput => {
            let file = read_standard_input(input.path(), tensor)?;
            Ok((file.header(), Some(Arc::new(file))))
        }
    }
}

/// Reads latents from standard input; a terminal would only wait for someone to type them.
fn read_standard_input(name: &Path, tensor: Option<&str>) -> Result<LatentFile> {
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        let reason = "it is a terminal; pipe a file into it, or name the file in place of -";
        return Err(Error::invalid_file(name, "file of latents", reason));
    }
    LatentFile::read_stream(stdin.lock(), name, tensor)
}

fn read(header: &LatentHeader, config: &VaeConfig, args: &Args) -> Result<LatentsReading> {
    LatentsReading::infer(&header.shape, &header.hint, config, &args.latents_options())
}

/// Says what was inferred, once for all files that it is the same of.
fn say_readings(jobs: &[Job], progress: &Progress) {
    let mut lines: Vec<(String, &Path, usize)> = Vec::new();
    let mut places = HashMap::new();
    for job in jobs {
        let reading = job.reading.to_string();
        let place = *places.entry(reading.clone()).or_insert_with(|| {
            lines.push((reading, &job.header.path, 0));
            lines.len() - 1
        });
        lines[place].2 += 1;
    }
    for (reading, first, files) in lines {
        let more = match files {
            1 => String::new(),
            files => format!(" and {} more", files - 1),
        };
        progress.say(&format!("{}{more}: {reading}", first.display()));
    }
}
