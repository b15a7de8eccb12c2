//! What a run says of its files: on standard error for people, as lines of JSON on standard output for programs.

use std::{
    fmt,
    io::Write,
    path::{Path, PathBuf},
    time::Instant,
};

use serde::Serialize;
use vae_io::{Error, Result};

use crate::{Failure, args::Args, inputs::Input, progress::Progress};

/// Why one file failed, whatever becomes of the others.
#[derive(Debug)]
pub struct FileError {
    /// The file, where the error's own text names none.
    path: Option<PathBuf>,
    error: Error,
}

impl FileError {
    /// An error of reading or decoding `path`.
    pub fn new(path: &Path, error: Error) -> Self {
        let names_no_file = matches!(
            error,
            Error::InvalidLatents { .. } | Error::AmbiguousLatents { .. } | Error::NonFinite { .. }
        );
        let path = names_no_file.then(|| path.to_path_buf());
        Self { path, error }
    }
}

/// An error whose text names a file.
impl From<Error> for FileError {
    fn from(error: Error) -> Self {
        Self { path: None, error }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "`{}`: ", path.display())?;
        }
        self.error.fmt(f)
    }
}

/// A line of `--json`.
#[derive(Serialize)]
#[serde(tag = "status", rename_all = "lowercase")]
pub enum Record<'a> {
    /// An image was decoded and written.
    Decoded(DecodedRecord<'a>),
    /// An output was there before.
    Skipped { input: String, output: String },
    /// A file failed.
    Failed { input: String, error: String },
}

/// An image that was decoded and written.
#[derive(Serialize)]
pub struct DecodedRecord<'a> {
    pub input: String,
    pub output: String,
    pub family: &'a str,
    pub space: String,
    pub width: usize,
    pub height: usize,
    pub device: String,
    pub dtype: String,
    pub quality: &'static str,
    pub load_s: f64,
    pub decode_s: f64,
    pub write_s: f64,
    pub peak_bytes: Option<u64>,
}

/// What has become of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Outputs are missing.
    Open {
        outputs: usize,
        any_decoded: bool,
    },
    /// Its outputs are all there, and this run decoded one or more of them.
    Decoded,
    /// Its outputs were all there.
    Skipped,
    Failed,
}

/// Tells of every file of a run, in the order of the calls.
pub struct Report<'a> {
    args: &'a Args,
    progress: &'a Progress,
    inputs: &'a [Input],
    states: Vec<State>,
    images: usize,
    failures: Vec<FileError>,
    started: Instant,
}

impl<'a> Report<'a> {
    pub fn new(args: &'a Args, progress: &'a Progress, inputs: &'a [Input]) -> Self {
        let open = State::Open {
            outputs: usize::MAX,
            any_decoded: false,
        };
        Self {
            args,
            progress,
            inputs,
            states: vec![open; inputs.len()],
            images: 0,
            failures: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Whether there is more to tell of than one file. One that fails is the run's own failure.
    pub fn is_of_several(&self) -> bool {
        self.inputs.len() > 1
    }

    /// An input becomes this many outputs.
    pub fn expect(&mut self, input: usize, outputs: usize) {
        self.states[input] = State::Open {
            outputs,
            any_decoded: false,
        };
    }

    /// The decode of device batches starts now.
    pub fn start_clock(&mut self) {
        self.started = Instant::now();
    }

    /// An output of an input was there before this run.
    ///
    /// # Errors
    /// [`Error::Io`] when standard output fails.
    pub fn skipped(&mut self, input: usize, output: &Path) -> Result<()> {
        // Of several files it is enough to say how many.
        if !self.is_of_several() {
            self.progress.say(&format!("{} exists, skipped", output.display()));
        }
        self.json(&Record::Skipped {
            input: self.argument(input),
            output: output.display().to_string(),
        })?;
        self.output_is_there(input, false);
        Ok(())
    }

    /// An output of an input was written, with these images.
    ///
    /// # Errors
    /// [`Error::Io`] when standard output fails.
    pub fn decoded(&mut self, input: usize, records: Vec<DecodedRecord<'_>>) -> Result<()> {
        for record in records {
            let DecodedRecord {
                output,
                width,
                height,
                decode_s,
                ..
            } = &record;
            self.progress
                .say(&format!("{output}: {width}x{height}, decoded in {decode_s:.2} s"));
            self.json(&Record::Decoded(record))?;
            self.images += 1;
        }
        if !self.is_of_several() {
            self.progress.step();
        }
        self.output_is_there(input, true);
        Ok(())
    }

    /// An input failed; only its first failure is told.
    ///
    /// # Errors
    /// [`Error::Io`] when standard output fails.
    pub fn failed(&mut self, input: usize, error: FileError) -> Result<()> {
        if self.states[input] == State::Failed {
            return Ok(());
        }
        self.close(input, State::Failed);
        if self.is_of_several() {
            self.progress.print(&format!("error: {error}"));
        }
        self.json(&Record::Failed {
            input: self.argument(input),
            error: error.to_string(),
        })?;
        self.failures.push(error);
        Ok(())
    }

    /// Sums up. `stopped` is why not all files had their turn.
    pub fn finish(mut self, stopped: Option<Error>) -> Result<(), Failure> {
        if self.is_of_several() {
            self.sum_up();
        }
        match stopped {
            Some(error) => Err(Failure::Run(error)),
            None if self.failures.is_empty() => Ok(()),
            None if self.is_of_several() => Err(Failure::Reported),
            None => Err(Failure::File(Box::new(self.failures.swap_remove(0)))),
        }
    }

    fn sum_up(&self) {
        let count = |state| self.states.iter().filter(|of| **of == state).count();
        let (decoded, skipped) = (count(State::Decoded), count(State::Skipped));
        let mut line = format!("{} files: {decoded} decoded", self.inputs.len());
        if skipped > 0 {
            line += &format!(", {skipped} skipped");
        }
        if !self.failures.is_empty() {
            line += &format!(", {} failed", self.failures.len());
        }
        let left = self.inputs.len() - decoded - skipped - self.failures.len();
        if left > 0 {
            line += &format!(", {left} not begun or not finished");
        }
        if self.images > 0 {
            let seconds = self.started.elapsed().as_secs_f64();
            let rate = self.images as f64 / seconds;
            let images = if self.images == 1 { "image" } else { "images" };
            line += &format!("; {} {images} in {seconds:.2} s, {rate:.2} a second", self.images);
        }
        if self.failures.is_empty() {
            self.progress.say(&line);
            return;
        }
        self.progress.print(&line);
        for error in &self.failures {
            self.progress.print(&format!("failed: {error}"));
        }
    }

    fn output_is_there(&mut self, input: usize, is_decoded: bool) {
        let State::Open { outputs, any_decoded } = &mut self.states[input] else {
            return;
        };
        *outputs -= 1;
        *any_decoded |= is_decoded;
        if *outputs == 0 {
            let state = if *any_decoded { State::Decoded } else { State::Skipped };
            self.close(input, state);
        }
    }

    fn close(&mut self, input: usize, state: State) {
        self.states[input] = state;
        if self.is_of_several() {
            self.progress.step();
        }
    }

    fn argument(&self, input: usize) -> String {
        self.inputs[input].argument().display().to_string()
    }

    fn json(&self, record: &Record<'_>) -> Result<()> {
        if !self.args.json {
            return Ok(());
        }
        let written = serde_json::to_vec(record).map_err(Into::into).and_then(|mut line| {
            line.push(b'\n');
            std::io::stdout().lock().write_all(&line)
        });
        written.map_err(Error::io("write", Path::new("standard output")))
    }
}
