//! Daemons, devices, caches and the messages between them, as they are whether a controller knows or not.
//!
//! The messages of one connection in one direction are in one ring of the pool: none overtakes another, and none is lost but with
//! all that come after it, by the end of the connection. What a simulated network may do is the rest: each way between
//! an endpoint and the controller has its own pace, which changes and may be a hundred times that of another, so that what is said
//! by one is heard long before what another had said earlier, and an answer after it was given up; and whatever is on its way when a
//! connection ends, because a daemon dies or is fenced or a controller starts anew, does not arrive.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId, Role};
use pod_protocol::commands::Command as Order;
use pod_protocol::controller::{CommandFailure, PortEvent};
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::Object;
use pod_protocol::reports::{DeviceReport, Report};
use pod_state::{DeviceId, State};

use super::caches::Caches;
use super::daemon::{Daemon, Mail, lease_of};
use super::random::Random;
use super::world::{Event, FENCE_US, Happening};

/// What a daemon that runs says is heard by then.
const HEARD_WITHIN_US: u64 = 1_000_000;
/// The longest that a message takes. Two of them take longer than a controller waits for an answer.
const UNDERWAY_MAX_US: u64 = 700_000;
/// How long a way keeps its pace at most.
const PACE_US: u64 = 3_000_000;
/// Who is overtaken by so much was slow.
const LONG_US: u64 = 100_000;

impl Seen {
    /// With what was seen elsewhere.
    pub(super) fn add(&mut self, more: Self) {
        self.said += more.said;
        self.overtook += more.overtook;
        self.lost += more.lost;
        self.late += more.late;
    }
}

/// One direction between an endpoint and the controller.
#[derive(Clone, Copy, Debug, Default)]
struct Way {
    /// When its last message is due, so that none overtakes another.
    last_due: u64,
    /// How often its delays are doubled.
    doublings: u32,
    /// Until when it is so slow.
    until: u64,
}

/// How much of what the network may do has been seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Messages to the controller.
    pub(super) said: u64,
    /// Of them, those heard before what somebody else had said long before.
    pub(super) overtook: u64,
    /// Messages, either way, that were on their way when their connection ended.
    pub(super) lost: u64,
    /// Orders that were given up although their answer was on its way.
    pub(super) late: u64,
}

#[derive(Debug)]
pub(super) struct Physical {
    pub(super) now_us: u64,
    pub(super) random: Random,
    pub(super) daemons: BTreeMap<EndpointId, Daemon>,
    /// What each host has, and its state.
    pub(super) devices: BTreeMap<HostId, BTreeMap<String, DeviceReport>>,
    /// NICs that failed and have yet to be opened again.
    pub(super) failed: BTreeSet<(HostId, String)>,
    pub(super) agenda: BTreeMap<(u64, u64), Happening>,
    scheduled: u64,
    pub(super) fences: BTreeMap<EndpointId, u64>,
    /// Since when a heartbeat stands still.
    pub(super) still: BTreeMap<EndpointId, u64>,
    caches: Caches,
    /// Who has something of a lease.
    users: BTreeMap<LeaseId, BTreeSet<EndpointId>>,
    /// Since when links are down.
    down: BTreeMap<(HostId, String), u64>,
    /// How often delays are doubled on the slowest ways.
    doublings_max: u32,
    ways: BTreeMap<(EndpointId, bool), Way>,
    /// When the message to the controller is due that is due last of all, and since when it is on its way.
    slowest: (u64, u64),
    pub(super) seen: Seen,
    pub(super) violation: Option<String>,
}

impl Physical {
    pub(super) fn new(seed: u64, doublings_max: u32) -> Self {
        Self {
            now_us: 0,
            random: Random::new(seed),
            daemons: BTreeMap::new(),
            devices: BTreeMap::new(),
            failed: BTreeSet::new(),
            agenda: BTreeMap::new(),
            scheduled: 0,
            fences: BTreeMap::new(),
            still: BTreeMap::new(),
            caches: Caches::default(),
            users: BTreeMap::new(),
            down: BTreeMap::new(),
            doublings_max,
            ways: BTreeMap::new(),
            slowest: (0, 0),
            seen: Seen::default(),
            violation: None,
        }
    }

    /// Sets the link of a NIC, and lets its daemon say so.
    pub(super) fn set_link(&mut self, host: HostId, nic: &str, now_up: bool) {
        let devices = self.devices.entry(host).or_default();
        if let Some(DeviceReport::Nic { up, .. }) = devices.get_mut(nic)
            && *up != now_up
        {
            *up = now_up;
            if now_up {
                self.down.remove(&(host, nic.to_owned()));
            } else {
                self.down.insert((host, nic.to_owned()), self.now_us);
            }
            let backend = EndpointId::new(host, Role::NetBackend);
            let reason = "its cable".to_owned();
            self.report(backend, Report::Link { device: nic.to_owned(), up: now_up, reason });
        }
    }

    /// Whether a NIC has had no link for so long that a controller that has been there since then must know.
    pub(super) fn has_been_down(&self, id: &DeviceId, controller_since_us: u64) -> bool {
        let Some(down) = self.down.get(&(id.host, id.name.to_string())) else { return false };
        let daemon = &self.daemons[&id.net_backend()];
        let since = controller_since_us.max(*down).max(daemon.joined_us);
        daemon.is_running() && daemon.joined && self.now_us.saturating_sub(since) > HEARD_WITHIN_US
    }

    /// Whether a daemon runs and has the controller's ear.
    pub(super) fn is_heard(&self, id: EndpointId) -> bool {
        self.daemons.get(&id).is_some_and(|daemon| daemon.is_running() && daemon.joined)
    }

    /// A guest's VMM does something at a device, if there is one.
    pub(super) fn attach(&mut self, id: EndpointId, lease: LeaseId, connected: bool, running: bool) {
        let Some(daemon) = self.daemons.get_mut(&id).filter(|it| it.is_running() && it.joined) else {
            return;
        };
        let there = daemon.objects.values().any(|object| match object {
            Object::Port(port) => port.lease == lease,
            Object::Disk(disk) => disk.lease == lease,
            _ => false,
        });
        if there {
            daemon.attached.insert(lease, (connected, running));
            self.report(id, Report::Attachment { lease, connected, running, write_through: false });
        }
    }
}

impl Physical {
    pub(super) fn schedule(&mut self, after_us: u64, what: Happening) {
        self.scheduled += 1;
        self.agenda.insert((self.now_us + after_us, self.scheduled), what);
    }

    /// Most messages are quick, and some are not; on a slow way none is. None overtakes another on the same way.
    pub(super) fn send(&mut self, endpoint: EndpointId, to_controller: bool, what: Happening) {
        let (now, random) = (self.now_us, &mut self.random);
        let way = self.ways.entry((endpoint, to_controller)).or_default();
        if way.until <= now {
            // Half of them are as quick as can be, a quarter is half as quick, and so on.
            way.doublings = random.next().trailing_zeros().min(self.doublings_max);
            way.until = now + random.below(PACE_US);
        }
        let delay = if random.once_in(40) { random.below(400_000) } else { random.between(50, 3000) };
        let delay = (delay << way.doublings).min(UNDERWAY_MAX_US);
        let due = (now + delay).max(way.last_due);
        way.last_due = due;
        if to_controller {
            self.seen.said += 1;
            let (last, since) = self.slowest;
            self.seen.overtook += u64::from(due < last && now - since > LONG_US);
            self.slowest = self.slowest.max((due, now));
        }
        self.schedule(due - now, what);
    }

    pub(super) fn says(&mut self, id: EndpointId, event: Event) {
        let connection = self.daemons[&id].connection;
        self.send(id, true, Happening::Says(id, connection, event));
    }

    /// A daemon that joined reports something.
    pub(super) fn report(&mut self, endpoint: EndpointId, report: Report) {
        let daemon = &self.daemons[&endpoint];
        if daemon.is_running() && daemon.joined {
            self.says(endpoint, PortEvent::Report { endpoint, report });
        }
    }

    pub(super) fn devices_of(&self, id: EndpointId) -> Vec<DeviceReport> {
        let of_role = |device: &&DeviceReport| {
            matches!(
                (id.role, device),
                (Role::NetBackend, DeviceReport::Nic { .. }) | (Role::BlkBackend, DeviceReport::Ssd { .. })
            )
        };
        self.devices.get(&id.host).into_iter().flat_map(BTreeMap::values).filter(of_role).cloned().collect()
    }

    pub(super) fn blame(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(super) fn kill(&mut self, id: EndpointId) {
        let Some(daemon) = self.daemons.get_mut(&id) else { return };
        for lease in daemon.objects.keys().filter_map(lease_of).collect::<Vec<_>>() {
            self.users.entry(lease).or_default().remove(&id);
        }
        if let Some(daemon) = self.daemons.get_mut(&id) {
            daemon.die();
        }
        self.still.entry(id).or_insert(self.now_us);
    }

    pub(super) fn lose_caches(&mut self, host: HostId) {
        self.caches.lose(host);
    }

    pub(super) fn start(&mut self, id: EndpointId) {
        let clock = self.random.between(920, 1090);
        if let Some(daemon) = self.daemons.get_mut(&id).filter(|daemon| !daemon.alive) {
            let incarnation = daemon.incarnation + 1;
            daemon.start(incarnation, clock);
            daemon.looked_us = self.now_us;
            self.still.remove(&id);
        }
    }

    pub(super) fn freeze(&mut self, id: EndpointId, for_us: u64) {
        // Until then it has looked at its fence every 10 ms.
        let looked_us = self.now_us.saturating_sub(self.random.below(10_000));
        if let Some(daemon) = self.daemons.get_mut(&id).filter(|daemon| daemon.is_running()) {
            daemon.frozen = true;
            daemon.looked_us = daemon.looked_us.max(looked_us);
            let incarnation = daemon.incarnation;
            self.still.insert(id, self.now_us);
            self.schedule(for_us, Happening::Thaws(id, incarnation));
        }
    }

    /// It was allowed to act; it must not have been fenced for good.
    pub(super) fn act(&mut self, id: EndpointId, state: &State) {
        let daemon = &self.daemons[&id];
        if daemon.granted
            && state
                .endpoints
                .get(&id)
                .is_some_and(|known| known.incarnation == daemon.incarnation && known.presence.is_over())
        {
            let incarnation = daemon.incarnation;
            self.blame(|| format!("{id}, life {incarnation}, acts although it is over"));
        }
    }

    /// It looks at its fence line, and ends if there is a newer generation.
    pub(super) fn look(&mut self, id: EndpointId) {
        let now = self.now_us;
        let fence = self.fences.get(&id).copied().unwrap_or(0);
        let Some(daemon) = self.daemons.get_mut(&id).filter(|daemon| daemon.is_running()) else { return };
        daemon.looked_us = now;
        if daemon.granted && fence > daemon.granted_fence {
            self.kill(id);
            let after = self.random.between(1000, 300_000);
            self.schedule(after, Happening::Starts(id));
        }
    }

    /// How long, in true time, until a daemon has to look before it acts.
    pub(super) fn may_act_for(&self, daemon: &Daemon) -> u64 {
        (daemon.looked_us + FENCE_US * 1000 / daemon.clock_permille).saturating_sub(self.now_us)
    }

    /// A frozen daemon goes on where it was: first it acts, unless its clock says that it has to look.
    pub(super) fn thaw(&mut self, id: EndpointId, state: &State) {
        let Some(daemon) = self.daemons.get_mut(&id) else { return };
        daemon.frozen = false;
        daemon.joined_us = self.now_us;
        self.still.remove(&id);
        if self.may_act_for(&self.daemons[&id]) > 0 {
            self.act(id, state);
        }
        self.look(id);
        let waiting = self.daemons.get_mut(&id).map(|daemon| std::mem::take(&mut daemon.inbox));
        for mail in waiting.unwrap_or_default() {
            self.arrives(id, mail);
        }
    }

    pub(super) fn arrives(&mut self, id: EndpointId, mail: Mail) {
        let Some(daemon) = self.daemons.get_mut(&id) else { return };
        if !daemon.alive || daemon.connection != mail.connection {
            self.seen.lost += 1;
            return;
        }
        if daemon.frozen {
            daemon.inbox.push_back(mail);
            return;
        }
        let before: BTreeSet<LeaseId> = daemon.objects.keys().filter_map(lease_of).collect();
        let result = daemon.obey(&mail.order);
        if result.is_ok() {
            match &mail.order {
                Order::Scrub { area, .. } => self.caches.flush(id, *area),
                Order::Apply { object, .. } => {
                    for (region, area) in &mail.regions {
                        if let Err(conflict) = self.caches.touch(id, *region, *area) {
                            self.blame(|| conflict);
                        }
                    }
                    if let Some(lease) = lease_of(&object.id()) {
                        self.users.entry(lease).or_default().insert(id);
                        self.one_holder(lease);
                        self.one_meaning(lease);
                    }
                }
                Order::Remove { .. } | Order::Synced { .. } => {
                    let daemon = &self.daemons[&id];
                    let now: BTreeSet<LeaseId> = daemon.objects.keys().filter_map(lease_of).collect();
                    for lease in before.difference(&now) {
                        self.users.entry(*lease).or_default().remove(&id);
                    }
                }
            }
        }
        let result = result.map_err(CommandFailure::Refused);
        self.says(id, PortEvent::Answered { endpoint: id, command: mail.ticket, result });
    }

    /// What a frontend sends to one place of a volume does not land in another one.
    fn one_meaning(&mut self, lease: LeaseId) {
        let users: Vec<&Daemon> =
            self.users[&lease].iter().map(|id| &self.daemons[id]).filter(|it| it.alive).collect();
        let served: BTreeMap<_, _> = users.iter().flat_map(|backend| backend.serves(lease)).collect();
        let mut meant = users.iter().flat_map(|frontend| frontend.means(lease));
        let wrong = meant.find_map(|(name, ssd)| {
            served.get(&name).filter(|there| **there != ssd).map(|there| (ssd, there.clone()))
        });
        if let Some((ssd, there)) = wrong {
            self.blame(|| format!("what is sent to {ssd} for {lease} lands on {there}"));
        }
    }

    /// Whatever is on its way: only one frontend's messages are accepted, and only one NIC is the active one. The SSDs of a
    /// mirror learn one after the other that its instance has moved: each has one writer, and nothing is acknowledged to
    /// whom one of them refuses.
    fn one_holder(&mut self, lease: LeaseId) {
        let users: Vec<&Daemon> =
            self.users[&lease].iter().map(|id| &self.daemons[id]).filter(|it| it.alive).collect();
        let mut writers: BTreeMap<Option<EndpointId>, BTreeSet<EndpointId>> = BTreeMap::new();
        let mut active = BTreeSet::new();
        for backend in &users {
            let place = (backend.id.role == Role::BlkBackend).then_some(backend.id);
            for (channel, generation, is_active) in backend.accepts(lease) {
                let at = backend.channel(channel);
                for frontend in users.iter().filter(|it| it.writes(lease).contains(&(channel, generation))) {
                    if at.is_some() && frontend.channel(channel) == at {
                        writers.entry(place).or_default().insert(frontend.id);
                    }
                }
                if is_active && !active.insert(generation) {
                    let id = backend.id;
                    self.violation
                        .get_or_insert(format!("{lease} is active twice with {generation:?}, at {id} too"));
                    return;
                }
            }
        }
        if let Some(writers) = writers.into_values().find(|writers| writers.len() > 1) {
            self.blame(|| format!("{lease} has two writers: {writers:?}"));
        }
    }
}
