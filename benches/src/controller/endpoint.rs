//! Endpoints that obey at once: they hear over rings in the pool and by a doorbell, as daemons do.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use cxl_channel::doorbell::{Doorbell, DoorbellListener};
use cxl_channel::{Exchange, Incoming, Receiver, RingPlacement, Sender, Wake};
use cxl_pool::{Area, CONTROL_RING_SLOTS, EndpointId, Generation, HardwareMemory, Layout, ReplicaId, Role};
use pod_protocol::commands::Command;
use pod_protocol::controller::PortEvent;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Object;

/// Longer than anything takes here.
const DEADLINE: Duration = Duration::from_mins(10);

/// All of a pod.
#[derive(Default)]
pub(super) struct Endpoints {
    each: BTreeMap<EndpointId, Endpoint>,
    /// What the controller has yet to hear.
    pub(super) events: VecDeque<PortEvent<u64, EndpointId>>,
    tickets: u64,
    /// How often something was queued for one of them.
    pub(super) told: usize,
    /// Since when the last backend can hear all that was queued for it.
    pub(super) backends_told_at: Option<Instant>,
    /// By lease: since when its frontend can hear what its port or disk is.
    pub(super) frontends_told_at: BTreeMap<LeaseId, Instant>,
    /// Why one could not be told.
    pub(super) failed: Vec<String>,
}

struct Endpoint {
    /// The controller's end.
    controller: Exchange<HardwareMemory>,
    daemon: Exchange<HardwareMemory>,
    bell: Doorbell,
    listener: DoorbellListener,
    /// How many commands it has not heard yet.
    unheard: usize,
    /// Of which ports and disks it is told in what is queued.
    devices: Vec<LeaseId>,
}

impl Endpoints {
    /// One more, in a pool that is used for nothing else. Its doorbell hangs in a directory.
    pub(super) fn add(
        &mut self,
        memory: &HardwareMemory,
        layout: &Layout,
        id: EndpointId,
        directory: &Path,
    ) -> Result<()> {
        self.each.insert(id, Endpoint::new(memory, layout, id, directory)?);
        Ok(())
    }

    /// Queues a command. It counts as obeyed.
    pub(super) fn send(&mut self, to: EndpointId, command: &Command) -> u64 {
        self.tickets += 1;
        self.told += 1;
        if let Some(endpoint) = self.each.get_mut(&to)
            && let Err(error) = endpoint.send(command)
        {
            self.failed.push(format!("{to}: {error:#}"));
        }
        let command = self.tickets;
        self.events.push_back(PortEvent::Answered { endpoint: to, command, result: Ok(()) });
        command
    }

    /// Sends what is queued for one.
    pub(super) fn let_hear(&mut self, to: EndpointId) {
        let Some(endpoint) = self.each.get_mut(&to) else { return };
        endpoint.flush();
        let now = Instant::now();
        self.frontends_told_at.extend(endpoint.devices.drain(..).map(|lease| (lease, now)));
        if matches!(to.role, Role::NetBackend | Role::BlkBackend) {
            self.backends_told_at = Some(now);
        }
    }

    /// What the controller hears next. Once that is nothing, whoever was told something hears it.
    pub(super) fn poll(&mut self) -> Option<PortEvent<u64, EndpointId>> {
        if self.events.is_empty() {
            for (id, endpoint) in self.each.iter_mut().filter(|(_, it)| it.unheard > 0) {
                if let Err(error) = endpoint.obey() {
                    self.failed.push(format!("{id}: {error:#}"));
                }
            }
        }
        self.events.pop_front()
    }
}

impl Endpoint {
    /// Both ends of its control connection.
    fn new(memory: &HardwareMemory, layout: &Layout, id: EndpointId, directory: &Path) -> Result<Self> {
        let replica = ReplicaId::new(0);
        let placement = |area: Area| RingPlacement { start: area.start, slots: CONTROL_RING_SLOTS };
        let there = placement(layout.ring_to_endpoint(replica, id));
        let back = placement(layout.ring_from_endpoint(replica, id));
        let generation = Generation::new(1);
        let senders = [there, back].map(|ring| Sender::begin(memory.clone(), ring, generation));
        let receivers = [back, there].map(|ring| Receiver::open(memory.clone(), ring, generation));
        let [controller, daemon] = {
            let ([to_daemon, to_controller], [from_daemon, from_controller]) = (senders, receivers);
            [Exchange::new(to_daemon, from_daemon), Exchange::new(to_controller, from_controller)]
        };
        let path = directory.join(format!("{}-{:?}.bell", id.host, id.role));
        let listener = DoorbellListener::bind(&path)?;
        let mut this = Self {
            controller,
            daemon,
            bell: Doorbell::connect(&path),
            listener,
            unheard: 0,
            devices: Vec::new(),
        };
        for _ in 0..2 {
            this.controller.ready();
            this.daemon.ready();
        }
        this.obey()?;
        Ok(this)
    }

    /// Queues a command as the controller's port does.
    fn send(&mut self, command: &Command) -> Result<()> {
        self.unheard += 1;
        match command {
            Command::Apply { object: Object::Port(port), .. } => self.devices.push(port.lease),
            Command::Apply { object: Object::Disk(disk), .. } => self.devices.push(disk.lease),
            _ => {}
        }
        let payload = serde_json::to_vec(command)?;
        self.controller.request(&payload, Instant::now() + DEADLINE).context("a command was not queued")?;
        Ok(())
    }

    /// Puts what is queued into the ring, and rings if the endpoint sleeps.
    fn flush(&mut self) {
        if self.controller.flush() == Wake::Needed {
            self.bell.ring();
        }
    }

    /// Hears everything, answers, and goes to sleep.
    fn obey(&mut self) -> Result<()> {
        let now = Instant::now();
        let answer = serde_json::to_vec(&Ok::<(), String>(()))?;
        self.listener.drain();
        loop {
            self.daemon.wake();
            let mut any = false;
            while let Some(incoming) = self.daemon.poll(now) {
                let Incoming::Request { id, .. } = incoming else {
                    return Err(anyhow!("a controller sends nothing but requests: {incoming:?}"));
                };
                self.daemon.respond(id, &answer)?;
                any = true;
                self.unheard -= 1;
            }
            // Both ends are here: neither has to be rung for.
            let _ = self.daemon.flush();
            while self.controller.poll(now).is_some() {}
            let _ = self.controller.flush();
            if !any && self.daemon.announce_sleep() {
                return Ok(());
            }
        }
    }
}
