//! What operators ask of a pod now and then, besides what its users want of it.

use pod_protocol::objects::Priority;
use pod_state::{Command, DeviceId, InstanceType, Labelled, Labels};

use super::faults::Around;

/// How many kinds of instances there may be.
const TYPES: u64 = 3;

impl Around<'_> {
    pub(crate) fn chore(&mut self) -> Command {
        match self.dice.below(8) {
            0 | 1 => {
                let name = format!("vm{}", self.dice.below(self.names));
                Command::SetPriority { name, priority: self.priority().unwrap_or_default() }
            }
            2 | 3 => self.label(),
            4 | 5 => {
                let instance_type = InstanceType {
                    nics: 1,
                    reserved_mbps: if self.dice.once_in(2) { 500 } else { 0 },
                    queue_pairs: self.dice.once_in(2).then_some(2),
                    volume_iops: self.minimum_iops(),
                    priority: self.priority(),
                    labels: self.labels(),
                };
                Command::SetInstanceType { name: self.type_name(), instance_type }
            }
            6 => Command::DeleteInstanceType { name: self.type_name() },
            _ => match self.random_nic() {
                Some((host, name)) => Command::ReleaseLink {
                    device: DeviceId { host, name: name.into() },
                    reason: "somebody knows better".to_owned(),
                },
                None => Command::DeleteInstanceType { name: self.type_name() },
            },
        }
    }

    fn type_name(&mut self) -> String {
        format!("type{}", self.dice.below(TYPES))
    }

    /// Some are of a kind that somebody has described.
    pub(super) fn known_type(&mut self) -> Option<String> {
        if !self.grouped {
            return None;
        }
        let known: Vec<&String> = self.state.into_iter().flat_map(|state| state.types.keys()).collect();
        let name = self.dice.pick(&known).map(|name| (*name).clone());
        name.filter(|_| self.dice.once_in(3))
    }

    fn priority(&mut self) -> Option<Priority> {
        let of_four = self.dice.below(4);
        u16::try_from(of_four * 250).ok().and_then(Priority::new)
    }

    /// What a volume is sure of: most of nothing.
    pub(super) fn minimum_iops(&mut self) -> Option<u64> {
        (self.grouped && self.dice.once_in(4)).then(|| self.dice.between(1, 2000))
    }

    fn label(&mut self) -> Command {
        let number = self.dice.below(self.names);
        let (of, name) = match self.dice.below(4) {
            0 => (Labelled::Instance, format!("vm{number}")),
            1 => (Labelled::Volume, format!("vol{number}")),
            2 => (Labelled::Host, format!("h{}", self.random_daemon().host.get())),
            _ => match self.random_device("") {
                Some((host, device)) => (Labelled::Device, format!("h{}/{device}", host.get())),
                None => (Labelled::Volume, format!("vol{number}")),
            },
        };
        Command::SetLabels { of, name, labels: self.labels() }
    }

    fn labels(&mut self) -> Labels {
        let number = self.dice.below(self.names);
        if self.dice.once_in(3) {
            return Labels::default();
        }
        [("rack".to_owned(), number.to_string())].into()
    }
}
