//! Counters at two moments, and what they grew by in a second.

use std::collections::BTreeMap;
use std::time::Instant;

/// The counters of a page of metrics, by their names with labels.
pub(super) struct Sample {
    at: Instant,
    counters: BTreeMap<String, f64>,
}

impl Sample {
    /// Reads the text format of Prometheus, or of OpenMetrics; what is no counter is passed over.
    pub(super) fn read(at: Instant, text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let counter = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            name.contains("_total").then_some((name.to_owned(), value.parse().ok()?))
        };
        Self { at, counters: lines.filter_map(counter).collect() }
    }
}

/// What grew, per second.
pub(super) struct Rates(Vec<(String, Labels, f64)>);

type Labels = Vec<(String, String)>;

impl Rates {
    pub(super) fn between(before: &Sample, now: &Sample) -> Self {
        let seconds = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
        let rates = now.counters.iter().filter_map(|(name, value)| {
            // What is new has no rate yet, and a daemon that began anew counts from zero again.
            let grown = value - before.counters.get(name)?;
            let (metric, labels) = labels(name);
            (grown >= 0.0).then(|| (metric.to_owned(), labels, grown / seconds))
        });
        Self(rates.collect())
    }

    /// The sum of all counters with this name and these labels.
    pub(super) fn per_second(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let with = |known: &[(String, String)]| {
            labels.iter().all(|(name, value)| known.iter().any(|(n, v)| n == name && v == value))
        };
        let rates = self.0.iter().filter(|(name, known, _)| name == metric && with(known));
        // The sum of no numbers is -0.0 to the library, and would be shown so.
        rates.fold(0.0, |sum, (_, _, rate)| sum + rate)
    }
}

/// A name and its labels. Names of hosts, devices and instances have no quotes in them.
fn labels(name: &str) -> (&str, Labels) {
    let Some((metric, labels)) = name.split_once('{') else { return (name, Vec::new()) };
    let pairs = labels.trim_end_matches('}').split(',');
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((name.to_owned(), value.trim_matches('"').to_owned()))
    };
    (metric, pairs.filter_map(pair).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn counters_become_rates_by_their_labels() {
        let began = Instant::now();
        let page = |receive: u64, transmit: u64, other: u64| {
            format!(
                "# TYPE wadi_device_bytes counter\n\
                 wadi_device_bytes_total{{device=\"h2/nic0\",direction=\"receive\"}} {receive}\n\
                 wadi_device_bytes_total{{device=\"h2/nic0\",direction=\"transmit\"}} {transmit}\n\
                 wadi_device_bytes_total{{device=\"h3/nic0\",direction=\"transmit\"}} {other}\n\
                 wadi_device_up{{device=\"h2/nic0\"}} 1\n# EOF\n"
            )
        };
        let before = Sample::read(began, &page(1000, 10, 500));
        let now = Sample::read(began + Duration::from_secs(2), &page(5000, 30, 100));
        let rates = Rates::between(&before, &now);
        let of = |labels: &[(&str, &str)]| rates.per_second("wadi_device_bytes_total", labels);
        assert!((of(&[("device", "h2/nic0"), ("direction", "receive")]) - 2000.0).abs() < 1e-9);
        assert!((of(&[("device", "h2/nic0")]) - 2010.0).abs() < 1e-9);
        assert!(of(&[("device", "h3/nic0")]).abs() < 1e-9, "it began anew");
        assert!(rates.per_second("wadi_device_up", &[]).abs() < 1e-9, "no counter");
    }
}
