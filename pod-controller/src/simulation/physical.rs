//! Daemons, devices, caches and the messages between them, as they are whether a controller knows or not.
//!
//! The messages of one connection in one direction are in one ring of the pool: none overtakes another, and none is lost but with
//! all that come after it, by the end of the connection. What a simulated network may do is the rest: each way between
//! an endpoint and the controller has its own pace, which changes and may be a hundred times that of another, so that what is said
//! by one is heard long before what another had said earlier, and an answer after it was given up; and whatever is on its way when a
//! connection ends, because a daemon dies or is fenced or a controller starts anew, does not arrive.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{Area, EndpointId, HostId, LineCount, LineOffset};
use pod_protocol::commands::Command as Order;
use pod_protocol::controller::{CommandFailure, PortEvent};
use pod_protocol::ids::{LeaseId, RegionId};
use pod_protocol::objects::Object;
use pod_protocol::reports::{DeviceReport, Report};
use pod_state::model::{nic, ssd};
use pod_state::{Presence, State};

use super::caches::Caches;
use super::daemon::{Daemon, Fences, Mail, areas_of, lease_of};
use super::faults::ROLES;
use super::happening::Happening;
use super::lines::Lines;
use super::loads::Loads;
use super::memory::FailedMemory;
use super::port::Event;
use super::random::Random;
pub(crate) use super::seen::Seen;

/// The bound that daemons keep: after this long, on their own clock, they look at their fence before they act.
pub(crate) const FENCE_US: u64 = 250_000;
/// After that every daemon has been started once.
pub(crate) const STARTED_WITHIN_US: u64 = 50_000;
/// The lines of a ring that are cleared.
const RING_HEADER: LineCount = LineCount::new(2);
/// What a daemon that runs says is heard by then.
pub(super) const HEARD_WITHIN_US: u64 = 1_000_000;
/// The longest that a message takes. Two of them take longer than a controller waits for an answer.
const UNDERWAY_MAX_US: u64 = 700_000;
/// How long a way keeps its pace at most.
const PACE_US: u64 = 3_000_000;
/// Who is overtaken by so much was slow.
const LONG_US: u64 = 100_000;

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

#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) now_us: u64,
    pub(crate) random: Random,
    pub(crate) daemons: BTreeMap<EndpointId, Daemon>,
    /// What each host has, and its state.
    pub(crate) devices: BTreeMap<HostId, BTreeMap<String, DeviceReport>>,
    /// Devices that failed and have yet to be opened again.
    pub(crate) failed: BTreeSet<(HostId, String)>,
    /// Devices that their hosts do not have for now.
    pub(crate) lacking: BTreeSet<(HostId, String)>,
    pub(super) agenda: BTreeMap<(u64, u64), Happening>,
    scheduled: u64,
    /// How many orders were given, and how many conversations begun, by all controllers.
    pub(super) tickets: u64,
    pub(super) connections: u64,
    /// The newest fence generation of each life that was fenced.
    pub(crate) fences: BTreeMap<EndpointId, Fences>,
    /// Since when a heartbeat stands still.
    pub(crate) still: BTreeMap<EndpointId, u64>,
    caches: Caches,
    /// Whether it is noticed at once that a region is given on which somebody still holds.
    pub(crate) knows_holders: bool,
    /// What becomes of the lines of regions, unless there are too many.
    pub(crate) lines: Option<Lines>,
    /// Where the pool cannot be read any more.
    pub(crate) memory: FailedMemory,
    /// What guests have devices do, if daemons tell it.
    pub(crate) loads: Option<Loads>,
    /// Who has something of a lease.
    pub(super) users: BTreeMap<LeaseId, BTreeSet<EndpointId>>,
    /// Since when links are down.
    pub(super) down: BTreeMap<(HostId, String), u64>,
    /// How often delays are doubled on the slowest ways.
    doublings_max: u32,
    ways: BTreeMap<(EndpointId, bool), Way>,
    /// When the message to the controller is due that is due last of all, and since when it is on its way.
    slowest: (u64, u64),
    pub(crate) seen: Seen,
    /// What daemons did since somebody looked, if anybody does.
    pub(crate) news: Option<Vec<String>>,
    /// How many orders were obeyed.
    obeyed: u64,
    /// Of controllers of which terms.
    terms: BTreeSet<u64>,
    pub(crate) violation: Option<String>,
}

impl Physical {
    pub(crate) fn new(seed: u64, doublings_max: u32) -> Self {
        Self {
            now_us: 0,
            random: Random::new(seed),
            daemons: BTreeMap::new(),
            devices: BTreeMap::new(),
            failed: BTreeSet::new(),
            lacking: BTreeSet::new(),
            agenda: BTreeMap::new(),
            scheduled: 0,
            tickets: 0,
            connections: 0,
            fences: BTreeMap::new(),
            still: BTreeMap::new(),
            caches: Caches::default(),
            knows_holders: true,
            lines: None,
            memory: FailedMemory::default(),
            loads: None,
            users: BTreeMap::new(),
            down: BTreeMap::new(),
            doublings_max,
            ways: BTreeMap::new(),
            slowest: (0, 0),
            seen: Seen::default(),
            news: None,
            obeyed: 0,
            terms: BTreeSet::new(),
            violation: None,
        }
    }

    /// A host with its daemons, which are going to start. One in three has no devices, and one NIC in three is a backup. Where there are
    /// groups, ordinary NICs of some hosts that follow each other are in one.
    pub(crate) fn add_host(&mut self, number: u16, grouped: bool, dice: &mut Random) {
        let host = HostId::new(number);
        let mut devices = BTreeMap::new();
        if number % 3 != 1 {
            for device in 0..=dice.below(2) {
                let name = format!("nic{device}");
                let backup = (u64::from(number) + device).is_multiple_of(3);
                let mut report = nic(&name, true, backup);
                if let DeviceReport::Nic { lag, .. } = &mut report
                    && grouped
                    && !backup
                    && matches!(number % 6, 5 | 0)
                {
                    *lag = Some(format!("lag{}", number.div_ceil(6)));
                }
                devices.insert(name.clone(), report);
                let name = format!("ssd{device}");
                devices.insert(name.clone(), ssd(&name, 64));
            }
        }
        self.devices.insert(host, devices);
        for role in ROLES {
            let id = EndpointId::new(host, role);
            self.daemons.insert(id, Daemon::new(id));
            self.schedule(dice.below(STARTED_WITHIN_US), Happening::Starts(id));
        }
    }

    /// Everything is mended, and everybody is there.
    pub(crate) fn calm_down(&mut self) {
        if let Some(loads) = &mut self.loads {
            loads.settle(self.now_us);
        }
        let ids: Vec<EndpointId> = self.daemons.keys().copied().collect();
        for id in ids {
            self.schedule(0, Happening::Starts(id));
            let incarnation = self.daemons[&id].incarnation;
            if self.daemons[&id].frozen {
                self.schedule(0, Happening::Thaws(id, incarnation));
            }
        }
        let of_host = |(host, devices): (&HostId, &BTreeMap<String, DeviceReport>)| {
            devices.keys().map(|name| (*host, name.clone())).collect::<Vec<_>>()
        };
        for (host, name) in self.devices.iter().flat_map(of_host).collect::<Vec<_>>() {
            self.schedule(0, Happening::Mended(host, name));
        }
    }

    /// Why some daemon does not have exactly what it should.
    pub(crate) fn unsettled(&self, state: &State) -> Option<String> {
        for daemon in self.daemons.values() {
            let presence = state.endpoints.get(&daemon.id).map(|known| known.presence);
            if !daemon.joined || presence != Some(Presence::Joined) {
                return Some(format!("{} has not joined; it is {presence:?}", daemon.id));
            }
            let desired = state.desired(daemon.id);
            if daemon.objects != desired {
                let differs = |id| daemon.objects.get(id) != desired.get(id);
                let ids: BTreeSet<_> = daemon.objects.keys().chain(desired.keys()).collect();
                let first = ids.into_iter().find(|id| differs(*id));
                let (has, should) = first.map(|id| (daemon.objects.get(id), desired.get(id))).unzip();
                return Some(format!("{} has {has:?} where it should have {should:?}", daemon.id));
            }
            if let Some((region, _)) = state.scrubs(daemon.id).first_key_value() {
                let users = daemon.objects.values().filter(|object| {
                    areas_of(object).iter().any(|area| state.scrubs(daemon.id)[region].overlaps(area))
                });
                let users: Vec<_> = users.map(Object::id).collect();
                return Some(format!(
                    "{} has yet to let go of {region}, which it uses for {users:?}: {:?}",
                    daemon.id,
                    state.regions.get(*region)
                ));
            }
        }
        None
    }

    /// Whether a daemon runs and has the controller's ear.
    pub(crate) fn is_heard(&self, id: EndpointId) -> bool {
        self.daemons.get(&id).is_some_and(|daemon| daemon.is_running() && daemon.joined)
    }

    /// A guest's VMM does something at a device, if there is one.
    pub(crate) fn attach(&mut self, id: EndpointId, lease: LeaseId, connected: bool, running: bool) {
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
            self.report(
                id,
                Report::Attachment { lease, connected, running, write_through: false, untold: false },
            );
        }
    }
}

impl Physical {
    /// Names an order.
    pub(crate) fn new_ticket(&mut self) -> u64 {
        self.tickets += 1;
        self.tickets
    }

    /// Names a conversation.
    pub(crate) fn new_connection(&mut self) -> u64 {
        self.connections += 1;
        self.connections
    }

    pub(crate) fn schedule(&mut self, after_us: u64, what: Happening) {
        self.scheduled += 1;
        self.agenda.insert((self.now_us + after_us, self.scheduled), what);
    }

    /// Most messages are quick, and some are not; on a slow way none is. None overtakes another on the same way.
    pub(crate) fn send(&mut self, endpoint: EndpointId, to_controller: bool, what: Happening) {
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

    pub(crate) fn says(&mut self, id: EndpointId, event: Event) {
        let connection = self.daemons[&id].connection;
        self.send(id, true, Happening::Says(id, connection, Box::new(event)));
    }

    /// How many orders were obeyed, and in how many terms.
    pub(crate) fn obeyed(&self) -> (u64, usize) {
        (self.obeyed, self.terms.len())
    }

    /// A controller makes the first lines of a ring say nothing, before it is anybody's.
    pub(crate) fn clear(&mut self, start: LineOffset) {
        let header = Area::new(start, RING_HEADER);
        if let Err(conflict) = self.caches.clear(header) {
            self.blame(|| conflict);
        }
        if self.memory.holds(&header) {
            self.blame(|| format!("a ring is cleared at {header:?}, which is known to have failed"));
        }
    }

    /// A daemon that joined reports something.
    pub(crate) fn report(&mut self, endpoint: EndpointId, report: Report) {
        let daemon = &self.daemons[&endpoint];
        if daemon.is_running() && daemon.joined {
            self.says(endpoint, PortEvent::Report { endpoint, report });
        }
    }

    pub(crate) fn blame(&mut self, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(what());
        }
    }

    pub(crate) fn kill(&mut self, id: EndpointId) {
        let Some(daemon) = self.daemons.get_mut(&id) else { return };
        for lease in daemon.objects.keys().filter_map(lease_of).collect::<Vec<_>>() {
            self.users.entry(lease).or_default().remove(&id);
        }
        if let Some(daemon) = self.daemons.get_mut(&id) {
            daemon.die();
        }
        self.still.entry(id).or_insert(self.now_us);
    }

    pub(crate) fn lose_caches(&mut self, host: HostId) {
        self.caches.lose(host);
        if let Some(lines) = &self.lines {
            lines.lose(host);
        }
    }

    pub(crate) fn start(&mut self, id: EndpointId) {
        let clock = self.random.between(920, 1090);
        if let Some(daemon) = self.daemons.get_mut(&id).filter(|daemon| !daemon.alive) {
            let incarnation = daemon.incarnation + 1;
            daemon.start(incarnation, clock);
            daemon.looked_us = self.now_us;
            self.still.remove(&id);
        }
    }

    pub(crate) fn freeze(&mut self, id: EndpointId, for_us: u64) {
        // Until then it has looked at its fence every 10 ms, but not since it was fenced, if it was: it would have ended.
        let looked_us = self.now_us.saturating_sub(self.random.below(10_000));
        let fences = self.fences.get(&id);
        if let Some(daemon) = self.daemons.get_mut(&id).filter(|daemon| daemon.is_running()) {
            daemon.frozen = true;
            if !fences.is_some_and(|fences| daemon.is_fenced(fences)) {
                daemon.looked_us = daemon.looked_us.max(looked_us);
            }
            let incarnation = daemon.incarnation;
            self.still.insert(id, self.now_us);
            self.schedule(for_us, Happening::Thaws(id, incarnation));
        }
    }

    /// It was allowed to act; it must not have been fenced for good.
    pub(crate) fn act(&mut self, id: EndpointId, state: &State) {
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
    pub(crate) fn look(&mut self, id: EndpointId, state: &State) {
        let now = self.now_us;
        let Some(daemon) = self.daemons.get_mut(&id).filter(|daemon| daemon.is_running()) else { return };
        daemon.looked_us = now;
        if self.fences.get(&id).is_some_and(|fences| daemon.is_fenced(fences)) {
            self.was_to_be_fenced(id, state);
            self.kill(id);
            let after = self.random.between(1000, 300_000);
            self.schedule(after, Happening::Starts(id));
        }
    }

    /// Nobody fences whom nobody has decided to fence: a daemon that was started again is innocent of what the one before was
    /// fenced for.
    fn was_to_be_fenced(&mut self, id: EndpointId, state: &State) {
        let incarnation = self.daemons[&id].incarnation;
        let known = state.endpoints.get(&id).map(|it| (it.incarnation, it.presence));
        // A host of which nobody beats can be deleted, and what was decided of its daemons is forgotten with it.
        let is_deleted = !state.hosts.contains_key(&id.host);
        let decided = known.map_or(is_deleted, |(life, presence)| {
            life > incarnation || life == incarnation && (presence == Presence::Fencing || presence.is_over())
        });
        if !decided {
            self.blame(|| {
                format!("{id}, life {incarnation}, was fenced, and nobody decided that: {known:?}")
            });
        }
    }

    /// How long, in true time, until a daemon has to look before it acts.
    pub(crate) fn may_act_for(&self, daemon: &Daemon) -> u64 {
        (daemon.looked_us + FENCE_US * 1000 / daemon.clock_permille).saturating_sub(self.now_us)
    }

    /// A frozen daemon goes on where it was: first it acts, unless its clock says that it has to look.
    pub(crate) fn thaw(&mut self, id: EndpointId, state: &State) {
        let Some(daemon) = self.daemons.get_mut(&id) else { return };
        daemon.frozen = false;
        daemon.joined_us = self.now_us;
        self.still.remove(&id);
        if self.may_act_for(&self.daemons[&id]) > 0 {
            self.act(id, state);
        }
        self.look(id, state);
        let waiting = self.daemons.get_mut(&id).map(|daemon| std::mem::take(&mut daemon.inbox));
        for mail in waiting.unwrap_or_default() {
            self.arrives(id, mail);
        }
    }

    /// An endpoint is given a region.
    fn touch(&mut self, id: EndpointId, region: RegionId, area: Area) {
        let known = self
            .caches
            .touch(id, region, area)
            .or_else(|conflict| if self.knows_holders { Err(conflict) } else { Ok(()) });
        let seen = self.lines.as_mut().map_or(Ok(()), |lines| lines.touch(id, region, area));
        if let Err(conflict) = known.and(seen) {
            self.blame(|| conflict);
        }
    }

    pub(crate) fn arrives(&mut self, id: EndpointId, mail: Mail) {
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
        let version = mail.order.version();
        let obeyed = std::mem::replace(&mut daemon.obeyed, (version.term, version.index));
        if daemon.obeyed < obeyed {
            self.blame(|| format!("{id} obeys {version:?} after {obeyed:?}"));
            return;
        }
        let result = daemon.obey(&mail.order);
        self.obeyed += 1;
        self.terms.insert(version.term);
        if let Some(news) = &mut self.news {
            news.push(format!("{id} obeys order {}, {:?}: {result:?}", mail.ticket, mail.order));
        }
        if result.is_ok() {
            match &mail.order {
                Order::Scrub { area, .. } => {
                    self.caches.flush(id, *area);
                    if let Some(lines) = &self.lines {
                        lines.scrub(id, *area);
                    }
                }
                Order::Apply { object, .. } => {
                    for (region, area) in &mail.regions {
                        self.touch(id, *region, *area);
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
        if let Some(Err(what)) = self.lines.as_mut().map(Lines::stir) {
            self.blame(|| what);
        }
        let result = result.map_err(CommandFailure::Refused);
        self.says(id, PortEvent::Answered { endpoint: id, command: mail.ticket, result });
    }
}
