//! What became of a command.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::HostId;
use pod_protocol::ids::LeaseId;

use super::fabric::{Element, Tenant};
use super::{Command, Effect, InstanceType, Labelled, Labels, Last, Options, Refusal, State};

/// See the [module](self).
#[derive(Debug)]
pub struct Outcome {
    /// What follows.
    pub effects: Vec<Effect>,
    /// Whether there is anything to be kept: otherwise all is as it was, and the command does not count.
    pub changed: bool,
    /// Whether there may be other regions.
    pub regions_changed: bool,
}

/// What of the state is in no table.
#[derive(PartialEq, Eq)]
struct Rest {
    options: Options,
    /// The name of the host that a join is about.
    host: Option<String>,
    types: BTreeMap<String, InstanceType>,
    fabric: (u32, u32, BTreeMap<String, Element>, BTreeMap<String, Tenant>),
    drained_hosts: BTreeSet<HostId>,
    /// Of hosts, where the command is about them.
    labels: Option<BTreeMap<HostId, Labels>>,
    failovers: u64,
    unbacked: BTreeSet<LeaseId>,
    key: Option<String>,
    last: Last,
    short: bool,
}

impl Command {
    /// Whether it labels one of these.
    pub(super) fn labels(&self, what: Labelled) -> bool {
        match self {
            Self::Request { asked, .. } => asked.labels(what),
            Self::SetLabels { of, .. } => *of == what,
            _ => false,
        }
    }
}

impl State {
    /// Carries out a command, or refuses it and changes nothing. One that changes nothing is not counted either.
    pub fn carry_out(&mut self, command: &Command) -> Result<Outcome, Refusal> {
        // What was changed before is not this command's.
        self.begin();
        let (index, before) = (self.index, self.rest(command));
        let effects = self.apply(command)?;
        let regions_changed = self.regions.has_changed();
        let changed =
            !effects.is_empty() || regions_changed || self.rows_changed() || self.rest(command) != before;
        if !changed {
            self.index = index;
        }
        Ok(Outcome { effects, changed, regions_changed })
    }

    fn rest(&self, command: &Command) -> Rest {
        let host = match command {
            // Other commands do not name hosts, and forget them with their endpoints.
            Command::Join { endpoint, .. } => self.hosts.get(&endpoint.host).cloned(),
            _ => None,
        };
        let fabric = &self.fabric;
        Rest {
            options: self.options.clone(),
            host,
            types: self.types.clone(),
            fabric: (fabric.window_us, fabric.sample_us, fabric.elements.clone(), fabric.tenants.clone()),
            drained_hosts: self.drained_hosts.clone(),
            labels: command.labels(Labelled::Host).then(|| self.host_labels.clone()),
            failovers: self.failovers,
            unbacked: self.unbacked.clone(),
            key: self.keys.latest().map(str::to_owned),
            last: self.last.clone(),
            short: self.short,
        }
    }
}
