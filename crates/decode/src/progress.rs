use std::{
    io::{IsTerminal, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};

/// What a run tells on standard error: lines, and a bar when that is a terminal.
pub struct Progress {
    bar: ProgressBar,
    quiet: bool,
}

impl Progress {
    /// A bar that is filled after `steps` steps.
    pub fn new(steps: usize, quiet: bool) -> Self {
        if quiet || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
                quiet,
            };
        }
        let style = ProgressStyle::with_template("{spinner} [{bar:30}] {pos}/{len} {msg} ({elapsed})")
            .unwrap_or_else(|_| ProgressStyle::default_bar())
            .progress_chars("=> ");
        let bar = ProgressBar::new(steps as u64).with_style(style);
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar, quiet }
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

    /// Prints a line unless `-q` was given.
    pub fn say(&self, line: &str) {
        if !self.quiet {
            self.print(line);
        }
    }

    /// Prints a line without tearing the bar.
    pub fn print(&self, line: &str) {
        self.bar.suspend(|| print_stderr(line));
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// Prints one line to standard error: control characters, which names may have, are escaped. `eprintln!` would panic where
/// standard error is closed or full, and nothing is lost then but words.
pub fn print_stderr(line: &str) {
    let line: String = line.chars().fold(String::with_capacity(line.len()), |mut line, c| {
        match c.is_control() {
            true => line.extend(c.escape_default()),
            false => line.push(c),
        }
        line
    });
    let _ = writeln!(std::io::stderr(), "{line}");
}
