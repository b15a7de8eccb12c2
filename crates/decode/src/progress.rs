use std::{io::IsTerminal, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};

/// A bar on standard error when that is a terminal, else nothing.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar that is filled after `steps` steps.
    pub fn new(steps: usize, quiet: bool) -> Self {
        if quiet || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
            };
        }
        let style = ProgressStyle::with_template("{spinner} [{bar:30}] {pos}/{len} {msg} ({elapsed})")
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> ");
        let bar = ProgressBar::new(steps as u64).with_style(style);
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar }
    }

    /// Whether anyone can see it.
    pub fn is_visible(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// More steps than were known at first.
    pub fn add_steps(&self, steps: usize) {
        self.bar.inc_length(steps as u64);
    }

    /// Names what is being done now.
    pub fn begin(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// One step is done.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// Prints a line to standard error without tearing the bar.
    pub fn print(&self, line: &str) {
        self.bar.suspend(|| eprintln!("{line}"));
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
