use std::collections::BTreeMap;
use std::time::Instant;

use cxl_pool::HostId;
use pod_protocol::reports::DeviceReport;
use pod_state::{Command, DeviceId};

use super::conductor::Conductor;
use super::world::World;
use crate::link_policy::Verdict;

impl<W: World> Conductor<W> {
    /// A NIC lost its link, or failed.
    pub(super) fn note_loss(&mut self, device: &DeviceId, now: Instant) -> Option<Command> {
        self.links.lost(device, now).map(command)
    }

    /// Devices of a host that tell of themselves, of which those that work can be lost again.
    pub(super) fn note_working<'a>(&mut self, host: HostId, reports: impl Iterator<Item = &'a DeviceReport>) {
        for report in reports.filter(|report| report.works()) {
            self.links.works(&DeviceId { host, name: report.name().into() });
        }
    }

    /// What is due of links and of leases that were moved.
    pub(super) fn due_links(&mut self, now: Instant) -> Vec<Command> {
        let verdicts = self.links.due(self.state.held(), self.state.missed_homes(), now);
        let mut commands: Vec<Command> = verdicts.into_iter().map(command).collect();
        for (lease, (generation, due)) in &self.drains {
            if *due <= now {
                commands.push(Command::DrainExpired { lease: *lease, generation: *generation });
            }
        }
        commands
    }

    /// Begins to count the time of what was moved. A controller that was restarted counts anew.
    pub(super) fn watch_drains(&mut self, now: Instant) {
        let current: BTreeMap<_, _> = self.state.drains().collect();
        self.drains.retain(|lease, (generation, _)| current.get(lease) == Some(generation));
        for (lease, generation) in current {
            self.drains.entry(lease).or_insert((generation, now + self.delays.drain));
        }
    }

    /// When something is due next.
    pub(super) fn next_of_links(&self) -> Option<Instant> {
        self.drains.values().map(|(_, due)| *due).chain(self.links.next()).chain(self.load.next()).min()
    }
}

fn command(verdict: Verdict) -> Command {
    match verdict {
        Verdict::Hold(device, reason) => Command::HoldLink { device, reason },
        Verdict::Release(device) => {
            Command::ReleaseLink { device, reason: "it has been calm for long enough".to_owned() }
        }
        Verdict::FailBack(device) => Command::FailBack { device },
    }
}
