//! Telling a person how far a build is.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Hears of a build's steps.
pub trait Progress {
    /// A step begins.
    fn step(&mut self, what: &str);
    /// So much of the step's download has arrived.
    fn bytes(&mut self, done: u64, total: u64);
}

/// Says nothing.
#[derive(Debug, Default, Clone, Copy)]
pub struct Silent;

impl Progress for Silent {
    fn step(&mut self, _what: &str) {}
    fn bytes(&mut self, _done: u64, _total: u64) {}
}

/// A bar on the terminal; without a terminal, a line per step.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
}

impl Bar {
    /// A bar that shows up with the first step.
    pub fn new() -> Self {
        Self { bar: ProgressBar::new(0) }
    }
}

impl Default for Bar {
    fn default() -> Self {
        Self::new()
    }
}

impl Progress for Bar {
    fn step(&mut self, what: &str) {
        if self.bar.is_hidden() {
            eprintln!("guest: {what}");
            return;
        }
        self.bar.set_style(spinner());
        self.bar.set_message(format!("guest: {what}"));
        self.bar.enable_steady_tick(Duration::from_millis(100));
    }

    fn bytes(&mut self, done: u64, total: u64) {
        self.bar.set_style(gauge());
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

fn spinner() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn gauge() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {msg} [{bar:30}] {bytes}/{total_bytes}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
