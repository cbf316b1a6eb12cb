//! What a benchmark found, for machines.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// What it is compared with; nothing if there is no rival for it.
    pub(crate) rival: Option<String>,
    pub(crate) rival_value: Option<f64>,
    /// Ours over the rival's.
    pub(crate) ratio: Option<f64>,
    pub(crate) goal: Option<String>,
    pub(crate) met: Option<bool>,
}

/// What a figure should be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    AtLeast(f64),
    AtMost(f64),
    /// At most this part of it above or below.
    Within {
        of: f64,
        part: f64,
    },
}

impl Goal {
    pub(crate) fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(least) => value >= least,
            Self::AtMost(most) => value <= most,
            Self::Within { of, part } => (value - of).abs() <= of * part,
        }
    }
}

impl Figure {
    pub(crate) fn new(name: String, value: f64, unit: &'static str) -> Self {
        Self { name, value, unit, rival: None, rival_value: None, ratio: None, goal: None, met: None }
    }

    /// Compares it with a rival, which may be missing.
    pub(crate) fn against(mut self, rival: &str, rival_value: Option<f64>) -> Self {
        self.rival = Some(rival.to_owned());
        self.rival_value = rival_value;
        self.ratio = rival_value.filter(|value| *value > 0.0).map(|value| self.value / value);
        self
    }

    pub(crate) fn with_goal(mut self, goal: Goal) -> Self {
        self.goal = Some(match goal {
            Goal::AtLeast(least) => format!(">= {least}"),
            Goal::AtMost(most) => format!("<= {most}"),
            Goal::Within { of, part } => format!("{of} ± {:.0} %", part * 100.0),
        });
        self.met = Some(goal.is_met(self.value));
        self
    }
}

/// Prints which goals were met.
pub(crate) fn print_goals(figures: &[Figure]) {
    for figure in figures {
        let Some(goal) = &figure.goal else { continue };
        let verdict = if figure.met == Some(true) { "met" } else { "MISSED" };
        let value = format!("{:.1} {}", figure.value, figure.unit);
        let ratio = figure.ratio.map(|ratio| format!(", {ratio:.2} of the rival's")).unwrap_or_default();
        println!("{verdict:<7} {:<48} {value:>12}, goal {goal}{ratio}", figure.name);
    }
}

/// Writes a file, with its directory.
pub(crate) fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the figures as JSON.
pub(crate) fn write_figures(path: &Path, figures: &[Figure]) -> Result<()> {
    write(path, &(serde_json::to_string_pretty(figures)? + "\n"))
}

/// The one in the middle; of an even number, the lower one of the two.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_compared_and_judged() {
        let figure =
            Figure::new("x".to_owned(), 6.0, "ns").against("peer", Some(3.0)).with_goal(Goal::AtMost(5.0));
        assert_eq!((figure.ratio, figure.met), (Some(2.0), Some(false)));
        let alone = Figure::new("x".to_owned(), 6.0, "ns").against("peer", None);
        assert_eq!(alone.ratio, None);
        assert_eq!(alone.rival.as_deref(), Some("peer"), "a missing rival is named");
    }

    #[test]
    fn medians() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0]), Some(1.0));
    }
}
