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
    /// Only names what is being done, until [`count`](Self::count) says how much there is.
    pub fn new(quiet: bool) -> Self {
        if quiet || !std::io::stderr().is_terminal() {
            return Self {
                bar: ProgressBar::hidden(),
                quiet,
            };
        }
        let bar = ProgressBar::new_spinner().with_style(style("{spinner} {msg} ({elapsed})"));
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar, quiet }
    }

    /// A bar that is filled after `steps` steps, each called `unit`.
    pub fn count(&self, steps: usize, unit: &str) {
        let template = format!("{{spinner}} [{{bar:30}}] {{pos}}/{{len}} {unit} {{msg}} ({{elapsed}}, {{eta}} left)");
        self.bar.set_style(style(&template));
        self.bar.set_length(steps as u64);
        // What was skipped or refused before took no time.
        self.bar.reset_eta();
    }

    /// Whether anyone can see it.
    pub fn is_visible(&self) -> bool {
        !self.bar.is_hidden()
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

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
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
