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
pub(super) struct Rates {
    all: Vec<(String, Labels, f64)>,
    /// Which of them have a label, by its name and then by its value. A pod has thousands of instances with dozens of counters each.
    with: BTreeMap<String, BTreeMap<String, Vec<usize>>>,
}

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
        let all: Vec<(String, Labels, f64)> = rates.collect();
        let mut with: BTreeMap<String, BTreeMap<String, Vec<usize>>> = BTreeMap::new();
        for (place, (_, labels, _)) in all.iter().enumerate() {
            for (name, value) in labels.iter().cloned() {
                with.entry(name).or_default().entry(value).or_default().push(place);
            }
        }
        Self { all, with }
    }

    /// Those with the one of these labels that fewest have.
    fn likely(&self, labels: &[(&str, &str)]) -> Vec<&(String, Labels, f64)> {
        let none: &[usize] = &[];
        let having = |(name, value): &(&str, &str)| {
            self.with.get(*name).and_then(|values| values.get(*value)).map_or(none, Vec::as_slice)
        };
        match labels.iter().map(having).min_by_key(|places| places.len()) {
            Some(places) => places.iter().filter_map(|place| self.all.get(*place)).collect(),
            None => self.all.iter().collect(),
        }
    }

    /// The sum of all counters with this name and these labels.
    pub(super) fn per_second(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let with = |known: &[(String, String)]| {
            labels.iter().all(|(name, value)| known.iter().any(|(n, v)| n == name && v == value))
        };
        let rates = self.likely(labels).into_iter().filter(|(name, known, _)| name == metric && with(known));
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
        assert!((rates.per_second("wadi_device_bytes_total", &[]) - 2010.0).abs() < 1e-9, "of all");
        assert!(of(&[("device", "h9/nic0")]).abs() < 1e-9, "nobody has that label");
    }

    #[test]
    fn of_many_instances_only_one_is_looked_at() {
        let page = |bytes: u64| {
            let line = |vm: u32| {
                format!(
                    "wadi_lease_bytes_total{{instance=\"vm{vm}\",direction=\"receive\"}} {}\n",
                    bytes * u64::from(vm)
                )
            };
            (0..2000).map(line).collect::<String>()
        };
        let began = Instant::now();
        let later = Sample::read(began + Duration::from_secs(1), &page(1));
        let rates = Rates::between(&Sample::read(began, &page(0)), &later);
        let labels = [("direction", "receive"), ("instance", "vm1234")];
        assert_eq!(rates.likely(&labels).len(), 1);
        assert!((rates.per_second("wadi_lease_bytes_total", &labels) - 1234.0).abs() < 1e-9);
    }
}
