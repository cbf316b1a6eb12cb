//! How the bandwidth of the fabric is shared: what it consists of, who shares it, and where hosts tell each other of it.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{Area, EndpointId, HostId, LineCount, Role};
use pod_api::{DEFAULT_TENANT, EventKind};
use pod_protocol::ids::{InstanceId, RegionId};
use pod_protocol::objects::{
    ElementObject, FabricObject, MchannelObject, Object, PeerObject, Signal, TenantObject,
};
use pod_protocol::protocol::Protocol;
use serde::{Deserialize, Serialize};

use super::protocol::not_yet;
use super::refusal::shown;
use super::wanting::Wanting;
use super::{Effect, Hold, Lease, Purpose, Refusal, RefusalKind, State, Table, check_name, table};

/// The greatest weight of an instance or a tenant.
pub const WEIGHT_MAX: u32 = 1000;

/// Lines in which an endpoint publishes its sums, and as many in which it publishes what its VMs want: room for the sums of 56 elements
/// of 8 tenants each, and for 511 VMs.
const BOARD_LINES: u64 = 512;
/// What a board has room for beside its header.
const RECORDS_MAX: u64 = BOARD_LINES - 1;
/// Ports of 256 hosts, and three times as many links and devices.
const ELEMENTS_MAX: usize = 1024;
/// Frontends of 1.0 publish something of each element, whether they use it or not.
const ELEMENTS_MAX_BEFORE: usize = 64;
const TENANTS_MAX: usize = 64;
/// Below that a window of bytes is less than the shortest request.
const BYTES_PER_SECOND_MIN: u64 = 1_000_000;
const WINDOW_US: std::ops::RangeInclusive<u32> = 100..=1_000_000;
const SAMPLE_US_MAX: u32 = 10_000_000;

/// What the fabric consists of, and who shares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fabric {
    /// T_W in µs.
    pub window_us: u32,
    /// K in µs.
    pub sample_us: u32,
    /// Ports, links and devices, by name. Without any nothing is shared.
    pub elements: BTreeMap<String, Element>,
    /// Owners of instances, by name.
    pub tenants: BTreeMap<String, Tenant>,
    /// Instances that have a share.
    pub mchannels: Table<InstanceId, Mchannel>,
    /// Where frontends publish what they use.
    #[serde(with = "table::pairs")]
    pub(super) boards: Table<EndpointId, Hold>,
    /// The number that was given last.
    pub(super) last: u32,
}

impl Default for Fabric {
    fn default() -> Self {
        Self {
            window_us: 1000,
            sample_us: 10_000,
            elements: BTreeMap::new(),
            tenants: BTreeMap::new(),
            mchannels: Table::default(),
            boards: Table::default(),
            last: 0,
        }
    }
}

/// A port, link or device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Element {
    /// Its number. Never used again.
    pub number: u32,
    /// What it carries at most.
    pub bytes_per_second: u64,
    /// What tells whether it carries less now.
    #[serde(default, skip_serializing_if = "Signal::is_off")]
    pub signal: Signal,
}

/// An owner of instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// Its number. Never used again.
    pub number: u32,
    /// Its part among the tenants.
    pub weight: u32,
}

/// An instance's share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mchannel {
    /// Its part among the instances of its tenant.
    pub weight: u32,
    /// Whose it is.
    pub tenant: String,
    /// What it passes through.
    pub path: Vec<String>,
}

/// What is said of the fabric as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricWish {
    /// T_W in µs.
    pub window_us: u32,
    /// K in µs.
    pub sample_us: u32,
    /// What each element carries at most, in bytes/s.
    pub elements: BTreeMap<String, u64>,
    /// The weight of each tenant.
    pub tenants: BTreeMap<String, u32>,
    /// What tells hosts how congested an element is, where something does.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub signals: BTreeMap<String, Signal>,
}

impl FabricWish {
    /// `counts_by_host`: whether it is looked at what the instances of a host use, once they have a share ([`State::check_board`]).
    fn check(&self, counts_by_host: bool) -> Result<(), Refusal> {
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        for name in self.elements.keys() {
            check_name("an element of the fabric", name)?;
        }
        for name in self.tenants.keys() {
            check_name("a tenant", name)?;
        }
        if !WINDOW_US.contains(&self.window_us) {
            return invalid(format!("window_us must be {} to {}", WINDOW_US.start(), WINDOW_US.end()));
        }
        if self.sample_us < self.window_us || self.sample_us > SAMPLE_US_MAX {
            return invalid(format!("sample_us must be at least window_us, and at most {SAMPLE_US_MAX}"));
        }
        if let Some((name, _)) = self.elements.iter().find(|(_, rate)| **rate < BYTES_PER_SECOND_MIN) {
            return invalid(format!(
                "the element {} must carry {BYTES_PER_SECOND_MIN} bytes/s at least",
                shown(name)
            ));
        }
        if let Some((name, _)) = self.tenants.iter().find(|(_, weight)| !is_weight(**weight)) {
            return invalid(format!("the weight of the tenant {} must be 1 to {WEIGHT_MAX}", shown(name)));
        }
        if let Some(unknown) = self.signals.keys().find(|name| !self.elements.contains_key(*name)) {
            return invalid(format!("there is a signal for {}, which is no element", shown(unknown)));
        }
        let (elements, tenants) = (self.elements.len(), self.tenants.len());
        let elements_max = if counts_by_host { ELEMENTS_MAX } else { ELEMENTS_MAX_BEFORE };
        if elements > elements_max || tenants > TENANTS_MAX {
            return invalid(format!(
                "at most {elements_max} elements and {TENANTS_MAX} tenants are possible"
            ));
        }
        // The root and each tenant of each element have a line.
        let lines = elements as u64 * (tenants as u64 + 2);
        if !counts_by_host && lines > RECORDS_MAX {
            return invalid(format!(
                "{elements} elements of {tenants} tenants need {lines} lines for the sums of a host, and there are {RECORDS_MAX}: \
                 name fewer"
            ));
        }
        Ok(())
    }
}

const fn is_weight(weight: u32) -> bool {
    weight >= 1 && weight <= WEIGHT_MAX
}

impl State {
    pub(super) fn set_fabric(&mut self, wish: &FabricWish, effects: &mut Vec<Effect>) -> Result<(), Refusal> {
        wish.check(self.shares_large_fabrics())?;
        if !wish.signals.is_empty() && !self.looks_at_congestion() {
            let what = "hosts can look at how congested elements of the fabric are";
            return Err(not_yet(what, Protocol::LOOKS_AT_CONGESTION));
        }
        for (instance, mchannel) in &self.fabric.mchannels {
            let elements = mchannel.path.iter().filter(|name| !wish.elements.contains_key(*name));
            let known = |name: &String| name == DEFAULT_TENANT || wish.tenants.contains_key(name);
            let tenant = Some(&mchannel.tenant).filter(|name| !known(name));
            if let Some(missing) = elements.chain(tenant).next() {
                let instance = self.instances.get(instance).map_or("", |it| it.name.as_str());
                let detail = format!(
                    "the mchannel of the instance {instance} needs {}: change or clear that first",
                    shown(missing)
                );
                return Err(Refusal::new(RefusalKind::Busy, detail));
            }
        }
        let before = self.fabric.clone();
        let Fabric { elements, tenants, last, .. } = &mut self.fabric;
        let mut number = |known: Option<u32>| {
            known.unwrap_or_else(|| {
                *last += 1;
                *last
            })
        };
        let new_elements = wish.elements.iter().map(|(name, rate)| {
            let number = number(elements.get(name).map(|it| it.number));
            let signal = wish.signals.get(name).copied().unwrap_or_default();
            (name.clone(), Element { number, bytes_per_second: *rate, signal })
        });
        let new_elements: BTreeMap<String, Element> = new_elements.collect();
        let mut wished = wish.tenants.clone();
        wished.entry(DEFAULT_TENANT.to_owned()).or_insert(1);
        let new_tenants = wished.into_iter().map(|(name, weight)| {
            let number = number(tenants.get(&name).map(|it| it.number));
            (name, Tenant { number, weight })
        });
        let new_tenants: BTreeMap<String, Tenant> = new_tenants.collect();
        (*elements, *tenants) = (new_elements, new_tenants);
        (self.fabric.window_us, self.fabric.sample_us) = (wish.window_us, wish.sample_us);
        if self.fabric == before {
            return Ok(());
        }
        self.touch_everything();
        let message = match wish.elements.len() {
            0 => "its bandwidth is not shared out".to_owned(),
            count => format!("{count} elements are shared among {} tenants", self.fabric.tenants.len()),
        };
        effects.push(Effect::event(EventKind::FabricChanged, "fabric", message));
        Ok(())
    }

    pub(super) fn set_mchannel(
        &mut self,
        instance: &str,
        wish: &Mchannel,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.instance_named(instance).ok_or_else(|| Refusal::not_found("instance", instance))?.id;
        let invalid = |detail: String| Err(Refusal::new(RefusalKind::InvalidValue, detail));
        if !is_weight(wish.weight) {
            return invalid(format!("the weight must be 1 to {WEIGHT_MAX}"));
        }
        if wish.path.is_empty() {
            return invalid(
                "a path has one element of the fabric at least: name what it passes through".into(),
            );
        }
        let unique: BTreeSet<&String> = wish.path.iter().collect();
        if unique.len() != wish.path.len() {
            return invalid("a path passes through each element once".into());
        }
        if let Some(unknown) = wish.path.iter().find(|name| !self.fabric.elements.contains_key(*name)) {
            return Err(Refusal::not_found("element of the fabric", unknown));
        }
        if !self.fabric.tenants.contains_key(&wish.tenant) {
            return Err(Refusal::not_found("tenant", &wish.tenant));
        }
        if self.shares_large_fabrics() {
            self.check_board(id, wish)?;
        }
        if self.fabric.mchannels.insert(id, wish.clone()).as_ref() != Some(wish) {
            let message = format!(
                "weight {} among those of {}, through {}",
                wish.weight,
                wish.tenant,
                wish.path.join(", ")
            );
            effects.push(Effect::event(EventKind::MchannelSet, instance, message));
        }
        Ok(())
    }

    /// Whether the frontends of an instance's host, and of the one that it moves to, have lines for what they publish once it has this
    /// share: of each element that instances there use one for all, and one for each of their tenants.
    fn check_board(&self, id: InstanceId, wish: &Mchannel) -> Result<(), Refusal> {
        let Some(instance) = self.instances.get(&id) else { return Ok(()) };
        for host in std::iter::once(instance.host).chain(instance.incoming) {
            let mut used: BTreeSet<(&str, Option<&str>)> = BTreeSet::new();
            let others = self.instances_at(host).filter(|other| *other != id);
            let others = others.filter_map(|other| self.fabric.mchannels.get(&other));
            for mchannel in others.chain([wish]) {
                for element in &mchannel.path {
                    used.extend([(element.as_str(), None), (element, Some(mchannel.tenant.as_str()))]);
                }
            }
            if used.len() as u64 > RECORDS_MAX {
                let detail = format!(
                    "the instances on {} would use elements that need {} lines for its sums, and there are {RECORDS_MAX}: have them \
                     pass through fewer elements, or belong to fewer tenants",
                    self.host_name(host),
                    used.len()
                );
                return Err(Refusal::new(RefusalKind::NoRoom, detail));
            }
        }
        Ok(())
    }

    /// The instances that are on a host, or on their way there.
    fn instances_at(&self, host: HostId) -> impl Iterator<Item = InstanceId> {
        let found = self.found().filter(|_| self.instances.is_followed());
        let known = found.map(|found| found.at_host.get(&host).cloned().unwrap_or_default());
        let known = known.unwrap_or_else(|| {
            let there = self.instances.values().filter(|it| it.host == host || it.incoming == Some(host));
            there.map(|it| it.id).collect()
        });
        known.into_iter()
    }

    pub(super) fn clear_mchannel(
        &mut self,
        instance: &str,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let id = self.instance_named(instance).ok_or_else(|| Refusal::not_found("instance", instance))?.id;
        if self.fabric.mchannels.remove(&id).is_none() {
            return Err(Refusal::not_found("mchannel of an instance", instance));
        }
        let message = "it may use the fabric as it likes";
        effects.push(Effect::event(EventKind::MchannelCleared, instance, message));
        Ok(())
    }

    /// Gives each life of a frontend a board of its own while the fabric is shared, and forgets shares of instances that are
    /// gone.
    pub(super) fn make_boards(&mut self, wanting: &mut Wanting) {
        let touched: Vec<InstanceId> = self.work().flat_map(|work| &work.instances).copied().collect();
        for gone in touched.iter().filter(|id| !self.instances.contains_key(id)) {
            self.fabric.mchannels.remove(gone);
        }
        let is_shared = !self.fabric.elements.is_empty();
        let has_board = |id: &&EndpointId| is_frontend(id.role) || self.fabric.boards.contains_key(id);
        let touched = self.work().flat_map(|work| work.endpoints.union(&work.boards));
        let ids: Vec<EndpointId> = touched.filter(has_board).copied().collect();
        for id in ids {
            let life = self.life_of(id).filter(|_| is_shared);
            let fenced = self.endpoints.get(&id).is_some_and(|it| !it.presence.is_over());
            let known = self.fabric.boards.get(&id);
            let kept = known.is_some_and(|hold| match life {
                Some(life) => hold.incarnation == life,
                // Whether it still writes there is not known yet.
                None => is_shared && fenced,
            });
            if kept {
                continue;
            }
            if let Some(old) = self.fabric.boards.remove(&id) {
                self.regions.retire(old.region);
            }
            if let Some(incarnation) = life {
                let lines = LineCount::new(2 * BOARD_LINES);
                let region = self.regions.allocate(lines, Purpose::Board(id), id);
                if let Some(region) = region.map(|region| region.id) {
                    self.fabric.boards.insert(id, Hold { region, incarnation });
                } else {
                    wanting.boards.insert(id);
                }
            }
        }
    }

    /// Regions of boards, and who reads or writes there.
    pub(super) fn held_boards(&self) -> Vec<(RegionId, EndpointId)> {
        let all = || self.endpoints.keys().filter(|id| is_frontend(id.role));
        let mut held = Vec::new();
        for work in self.work() {
            // Everybody has the new ones, and who is new has them all.
            for hold in work.boards.iter().filter_map(|id| self.fabric.boards.get(id)) {
                held.extend(all().map(|reader| (hold.region, *reader)));
            }
            for reader in work.endpoints.iter().filter(|id| is_frontend(id.role)) {
                held.extend(self.fabric.boards.values().map(|hold| (hold.region, *reader)));
            }
        }
        held
    }

    /// All regions of boards.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn board_regions(&self) -> impl Iterator<Item = RegionId> {
        self.fabric.boards.values().map(|hold| hold.region)
    }

    /// No board lies in this region any more.
    pub(super) fn give_up_board(&mut self, region: RegionId) {
        self.fabric.boards.retain(|_, hold| hold.region != region);
    }

    /// What controllers of 1.0 cannot read: what tells of congestion.
    pub(super) fn forget_signals(&mut self) {
        self.fabric.elements.values_mut().for_each(|element| element.signal = Signal::Off);
    }

    /// There are no boards any more.
    pub(super) fn forget_boards(&mut self) {
        self.fabric.boards.clear();
    }

    /// The two halves of an endpoint's board: sums, and what VMs want.
    pub(super) fn board(&self, id: EndpointId) -> Option<(Area, Area)> {
        let hold = self.fabric.boards.get(&id).filter(|hold| self.life_of(id) == Some(hold.incarnation))?;
        let area = self.area(hold.region)?;
        let half = LineCount::new(BOARD_LINES);
        Some((Area::new(area.start, half), Area::new(area.start.saturating_add(half), half)))
    }

    /// How a frontend shares the fabric, if it is shared.
    pub(super) fn fabric_object(&self, id: EndpointId) -> Option<FabricObject> {
        let (sums, vms) = self.board(id)?;
        let others = self.fabric.boards.keys().filter(|other| **other != id);
        let peers =
            others.filter_map(|other| Some(PeerObject { endpoint: *other, sums: self.board(*other)?.0 }));
        let sibling = match id.role {
            Role::NetFrontend => EndpointId::new(id.host, Role::BlkFrontend),
            _ => EndpointId::new(id.host, Role::NetFrontend),
        };
        let Fabric { window_us, sample_us, elements, tenants, .. } = &self.fabric;
        let element = |it: &Element| ElementObject {
            element: it.number,
            bytes_per_second: it.bytes_per_second,
            signal: it.signal,
        };
        let tenant = |it: &Tenant| TenantObject { tenant: it.number, weight: it.weight };
        Some(FabricObject {
            window_us: *window_us,
            sample_us: *sample_us,
            sums,
            vms,
            peers: peers.collect(),
            sibling: self.board(sibling).map(|(_, vms)| vms),
            elements: elements.values().map(element).collect(),
            tenants: tenants.values().map(tenant).collect(),
        })
    }

    /// How a leased device is held to its instance's share, if it has one.
    pub(super) fn mchannel_object(&self, lease: &Lease) -> Option<Object> {
        let mchannel = self.fabric.mchannels.get(&lease.instance)?;
        let path = mchannel.path.iter().map(|name| self.fabric.elements.get(name).map(|it| it.number));
        Some(Object::Mchannel(MchannelObject {
            lease: lease.id,
            instance: lease.instance,
            name: self.instances.get(&lease.instance).map_or_else(String::new, |it| it.name.clone()),
            weight: mchannel.weight,
            tenant: self.fabric.tenants.get(&mchannel.tenant)?.number,
            path: path.collect::<Option<_>>()?,
        }))
    }
}

const fn is_frontend(role: Role) -> bool {
    matches!(role, Role::NetFrontend | Role::BlkFrontend)
}
