//! What responses tell hosts of the load of elements (DevLoad).

use mem_channel::DevLoad;

use super::fabric::number;
use super::topology::Element;

/// Lines, by the level of load that they found, in either direction.
type Levels = [[u64; 4]; 2];

/// What has been told.
pub(super) struct Loads {
    /// Each host, of each element, since it last looked.
    of_hosts: Vec<Vec<Levels>>,
    /// Whoever it was, of the element that is looked at.
    watched: (Element, Levels),
}

impl Loads {
    pub(super) fn new(hosts: usize, elements: usize, watched: Element) -> Self {
        Self { of_hosts: vec![vec![[[0; 4]; 2]; elements]; hosts], watched: (watched, [[0; 4]; 2]) }
    }

    /// A line of a host found this level.
    pub(super) fn note(&mut self, host: usize, element: Element, write: bool, level: DevLoad) {
        let (side, level) = (usize::from(write), usize::from(level.number()));
        self.of_hosts[host][element][side][level] += 1;
        if element == self.watched.0 {
            self.watched.1[side][level] += 1;
        }
    }

    /// Of each element the part of lines that found moderate or severe overload, in the worse direction, since this host last looked.
    pub(super) fn overloaded(&mut self, host: usize) -> Vec<f64> {
        self.of_hosts[host].iter_mut().map(|levels| overloaded_part(std::mem::take(levels))).collect()
    }

    /// What is watched is counted from now on.
    pub(super) fn watch(&mut self) {
        self.watched.1 = Levels::default();
    }

    /// The parts of lines that found each level at the element that is watched, in the busier direction.
    pub(super) fn watched(&self) -> [f64; 4] {
        let [reads, writes] = self.watched.1;
        let busier = if sum(reads) >= sum(writes) { reads } else { writes };
        busier.map(|lines| number(lines) / number(sum(busier).max(1)))
    }
}

fn overloaded_part([reads, writes]: Levels) -> f64 {
    let part = |found: [u64; 4]| {
        let levels = DevLoad::ALL.into_iter().zip(found);
        let over = levels.filter(|(level, _)| level.is_overload()).map(|(_, lines)| lines);
        number(over.sum()) / number(sum(found).max(1))
    };
    part(reads).max(part(writes))
}

fn sum(lines: [u64; 4]) -> u64 {
    lines.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_hears_of_its_own_lines_and_once() {
        let mut loads = Loads::new(2, 3, 2);
        let near = |found: &[f64], expected: &[f64]| {
            assert_eq!(found.len(), expected.len());
            let is_near = found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-9);
            assert!(is_near, "{found:?}, not {expected:?}");
        };
        for (write, level) in [(false, DevLoad::Light), (true, DevLoad::Severe), (true, DevLoad::Optimal)] {
            loads.note(0, 2, write, level);
        }
        near(&loads.overloaded(1), &[0.0; 3]);
        // Of the worse direction, and then nothing new.
        near(&loads.overloaded(0), &[0.0, 0.0, 0.5]);
        near(&loads.overloaded(0), &[0.0; 3]);
        // Of the busier one.
        near(&loads.watched(), &[0.0, 0.5, 0.0, 0.5]);
        loads.watch();
        near(&loads.watched(), &[0.0; 4]);
    }
}
