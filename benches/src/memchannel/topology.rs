//! What lines pass on their way: ports of hosts, uplinks of leaf switches if there are two levels of switches, and egress ports with a device
//! behind each.

use mem_channel::ElementId;

/// A link that lines pass in either direction, with the buffers before it. An index: hosts' ports come first, then uplinks, then egress
/// ports.
pub(super) type Element = usize;

/// How hosts are connected to devices.
#[derive(Clone, Debug)]
pub(super) struct Topology {
    /// GB/s that each element carries in each direction.
    gb_s: Vec<f64>,
    hosts: usize,
    uplinks: usize,
}

impl Topology {
    /// One switch, with equal links.
    pub(super) fn one_switch(hosts: usize, egress_ports: usize, gb_s: f64) -> Self {
        Self { gb_s: vec![gb_s; hosts + egress_ports], hosts, uplinks: 0 }
    }

    /// Leaf switches of as many hosts each, whose uplinks meet in a root switch that the devices are at. In GB/s what each carries.
    pub(super) fn two_levels(ports: &[f64], uplinks: &[f64], devices: &[f64]) -> Self {
        Self { gb_s: [ports, uplinks, devices].concat(), hosts: ports.len(), uplinks: uplinks.len() }
    }

    pub(super) fn hosts(&self) -> usize {
        self.hosts
    }

    /// How many elements there are.
    pub(super) fn elements(&self) -> usize {
        self.gb_s.len()
    }

    /// GB/s that an element carries in each direction.
    pub(super) fn gb_s(&self, element: Element) -> f64 {
        self.gb_s[element]
    }

    pub(super) fn is_port(&self, element: Element) -> bool {
        element < self.hosts
    }

    /// The egress port before the device with this number.
    pub(super) fn egress(&self, device: usize) -> Element {
        self.hosts + self.uplinks + device
    }

    /// What a line for `device` passes after `element`, if anything.
    pub(super) fn next(&self, element: Element, device: usize) -> Option<Element> {
        if self.is_port(element) && self.uplinks > 0 {
            Some(self.hosts + element * self.uplinks / self.hosts)
        } else {
            (element < self.hosts + self.uplinks).then(|| self.egress(device))
        }
    }

    /// All that a line of `host` for `device` passes.
    pub(super) fn path(&self, host: usize, device: usize) -> Vec<Element> {
        std::iter::successors(Some(host), |element| self.next(*element, device)).collect()
    }

    /// What lines come from to `element`.
    pub(super) fn feeders(&self, element: Element) -> Vec<Element> {
        let leads = |feeder: &Element| {
            let device = element.saturating_sub(self.hosts + self.uplinks);
            self.next(*feeder, device) == Some(element)
        };
        (0..self.hosts + self.uplinks).filter(leads).collect()
    }
}

/// The name that control has for an element.
pub(super) fn id(element: Element) -> ElementId {
    ElementId(u32::try_from(element).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_pass_one_switch_or_two() {
        let one = Topology::one_switch(3, 2, 22.0);
        assert_eq!(one.path(2, 1), [2, 4]);
        assert_eq!((one.feeders(3), one.feeders(0)), (vec![0, 1, 2], vec![]));
        let two = Topology::two_levels(&[1.0; 4], &[2.0; 2], &[3.0; 3]);
        assert_eq!((two.path(1, 2), two.path(2, 0)), (vec![1, 4, 8], vec![2, 5, 6]));
        assert_eq!((two.feeders(5), two.feeders(8)), (vec![2, 3], vec![4, 5]));
        assert_eq!((two.gb_s(3), two.gb_s(5), two.gb_s(6)), (1.0, 2.0, 3.0));
    }
}
