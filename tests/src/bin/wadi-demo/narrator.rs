//! Tells a person what is going on.

use std::time::{Duration, Instant};

use guest_images::Progress;
use indicatif::{ProgressBar, ProgressStyle};

/// A line per step: it turns while the step runs and says how long it took.
pub(crate) struct Narrator {
    bar: ProgressBar,
    begun: Instant,
    step: String,
    step_begun: Instant,
}

impl Narrator {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self { bar: ProgressBar::new_spinner(), begun: now, step: String::new(), step_begun: now }
    }

    /// Runs `work` as a step; `what` says what it does.
    pub(crate) fn step<T>(
        &mut self,
        what: &str,
        work: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        what.clone_into(&mut self.step);
        self.step_begun = Instant::now();
        if self.bar.is_hidden() {
            println!("   {what} …");
        } else {
            self.bar.set_style(style("{spinner} {msg} … {elapsed}"));
            self.bar.reset_elapsed();
            self.bar.set_message(what.to_owned());
            self.bar.enable_steady_tick(Duration::from_millis(100));
        }
        let result = work(self);
        let mark = if result.is_ok() { "✓" } else { "✗" };
        let line = format!(" {mark} {} ({:.1} s)", self.step, self.step_begun.elapsed().as_secs_f64());
        if self.bar.is_hidden() {
            println!("{line}");
        } else {
            self.bar.println(line);
            self.bar.disable_steady_tick();
            self.bar.finish_and_clear();
        }
        result
    }

    /// Says the step's outcome in place of what it does.
    pub(crate) fn outcome(&mut self, what: String) {
        self.step = what;
    }

    /// How long everything took so far.
    pub(crate) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }
}

impl Progress for Narrator {
    fn step(&mut self, what: &str) {
        if !self.bar.is_hidden() {
            self.bar.set_message(format!("test guest: {what}"));
        }
    }

    fn bytes(&mut self, done: u64, total: u64) {
        self.bar.set_style(style("{spinner} {msg} [{bar:30}] {bytes}/{total_bytes}"));
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_spinner())
}
