//! One K of the meter: measure, publish, read, decide.

#[cfg(test)]
mod omissions;

use std::collections::BTreeMap;

use cxl_pool::{Area, LINE_BYTES, Memory};
use mem_channel::{DevLoad, ElementId, Measured, Node, Peers, Record, Sums, TenantId};
use pod_protocol::mchannel::{Board, PeerBoard};
use pod_protocol::objects::{ElementObject, FabricObject, PeerObject, Signal};

use super::metered::{Metered, Moves, Part, Together, Unheld};
use super::plan::Plan;
use super::signal::{Load, Signals};
use super::{as_f64, whole};

/// What others published counts for so many K,
const STALE_AFTER_KS: f64 = 10.0;
/// and for so long at least: a thread that measures may be held up on a busy host, and its workers go on with what was decided last. Were it not
/// counted, the others would take what those use. The last order to vCPUs holds as long.
const STALE_AFTER_US_MIN: f64 = 1_000_000.0;
/// In records about VMs, where there is no element.
const NO_ELEMENT: ElementId = ElementId(u32::MAX);
/// A VM has no more devices at a frontend.
const DEVICES_MAX: f64 = 64.0;

/// An [`Exchange`], whatever the memory.
pub(super) trait Exchanges: Send {
    /// Whether the boards of this fabric lie where these do.
    fn fits(&self, plan: &Plan) -> bool;

    /// Whether it writes there.
    fn uses(&self, area: Area) -> bool;

    /// Takes over who the others are.
    fn follow(&mut self, plan: &Plan);

    /// How loaded an element with a signal was seen to be last, if that is known.
    fn level(&self, element: u32) -> Option<DevLoad>;

    /// What was measured in a K that is over becomes what may be moved in the next one.
    fn round(&mut self, plan: &mut Plan, all: &mut BTreeMap<Part, Metered>, elapsed_us: f64, now_us: f64);
}

/// What this endpoint publishes, and what it reads of others.
pub(super) struct Exchange<M> {
    memory: M,
    sums: Board<M>,
    vms: Board<M>,
    places: (Area, Area),
    boards: Vec<(PeerObject, u16, PeerBoard<M>)>,
    sibling: Option<(Area, PeerBoard<M>)>,
    peers: Peers,
    siblings: Peers,
    last_key: u16,
    signals: Signals,
    levels: BTreeMap<u32, DevLoad>,
    /// A full board is told of once.
    told: bool,
}

impl<M: Memory> Exchange<M> {
    pub(super) fn new(memory: M, plan: &Plan) -> Self {
        // The line of a board that is the last to be needed is this host's own, and nobody waits for it.
        let vms = plan.fabric.vms;
        let line = vms.start_byte().saturating_add(vms.bytes().saturating_sub(LINE_BYTES as u64));
        let signals = Signals::new(memory.clone(), line);
        Self::with_signals(memory, plan, signals)
    }

    /// With what else tells how congested the fabric is.
    pub(super) fn with_signals(memory: M, plan: &Plan, signals: Signals) -> Self {
        let (sums, vms) = (plan.fabric.sums, plan.fabric.vms);
        let stale_after_us = stale_after_us(&plan.fabric);
        let mut exchange = Self {
            sums: fresh(&memory, sums),
            vms: fresh(&memory, vms),
            places: (sums, vms),
            memory,
            boards: Vec::new(),
            sibling: None,
            peers: Peers::new(stale_after_us),
            siblings: Peers::new(stale_after_us),
            last_key: 0,
            signals,
            levels: BTreeMap::new(),
            told: false,
        };
        exchange.follow(plan);
        exchange
    }

    fn look_at_sibling(&mut self, now_us: f64) {
        if let Some((_, board)) = &mut self.sibling {
            board.read(&mut self.siblings, now_us);
        }
    }

    /// Notes for each device what the other devices of its VM want, here and at the other frontend of this host. Its vCPUs are one more.
    fn note_elsewhere(&self, all: &mut BTreeMap<Part, Metered>, now_us: f64) {
        let mut wanted: BTreeMap<u32, Vec<(Option<Part>, f64)>> = BTreeMap::new();
        for (_, record) in self.siblings.records(now_us) {
            if let (NO_ELEMENT, Node::Tenant { tenant, .. }) = (record.element, record.node) {
                let of_vm = wanted.entry(tenant.0).or_default();
                of_vm.extend(demands(&record.sums).map(|demand| (None, demand)));
            }
        }
        for (part, metered) in all.iter().filter(|(_, metered)| metered.id.is_some()) {
            let of_vm = wanted.entry(metered.object.instance.get()).or_default();
            of_vm.push((Some(*part), metered.said.demand));
        }
        let is_unheld =
            |metered: &Metered| matches!(&metered.moves, Moves::Vcpus(vcpus) if !vcpus.are_held());
        let of_unheld = |(part, metered): (&Part, &Metered)| (*part, metered.said.rate);
        let unheld: BTreeMap<Part, f64> =
            all.iter().filter(|(_, metered)| is_unheld(metered)).map(of_unheld).collect();
        for (part, metered) in all.iter_mut() {
            metered.elsewhere.clear();
            metered.unheld = None;
            let of_vm = wanted.get(&metered.object.instance.get()).into_iter().flatten();
            (metered.told, metered.vcpus) = (Vec::new(), None);
            for (other, demand) in of_vm.filter(|(other, _)| *other != Some(*part)) {
                if let Some(rate) = other.and_then(|other| unheld.get(&other)) {
                    metered.unheld = Some(Unheld { demand: *demand, rate: *rate });
                    continue;
                }
                metered.elsewhere.push(*demand);
                match other {
                    Some(Part::Device(_)) => {}
                    Some(Part::Vcpus(_)) => metered.vcpus = Some(*demand),
                    None => metered.told.push(*demand),
                }
            }
        }
    }

    /// Looks how congested the elements are that something here passes through, and that something tells of.
    fn observe(&mut self, plan: &mut Plan, all: &BTreeMap<Part, Metered>, now_us: f64) {
        let Plan { fabric, host } = plan;
        let looked_at = |it: &&ElementObject| {
            let passes =
                |metered: &Metered| metered.id.is_some() && metered.object.path.contains(&it.element);
            !it.signal.is_off() && all.values().any(passes)
        };
        let mut seen: BTreeMap<Signal, Option<Load>> = BTreeMap::new();
        self.levels.clear();
        for element in fabric.elements.iter().filter(looked_at) {
            let signals = &mut self.signals;
            let look = || signals.chosen(element.signal).and_then(|signal| signal.look(now_us));
            let load = *seen.entry(element.signal).or_insert_with(look);
            // Where nothing is known, nothing is congested: what was said last must not hold for ever.
            let part = load.map_or(0.0, |load| load.overloaded_part);
            // It is an element of this fabric.
            let _ = host.observe(ElementId(element.element), part);
            if let Some(load) = load {
                self.levels.insert(element.element, load.level);
            }
        }
    }

    fn publish(&mut self, plan: &mut Plan, all: &BTreeMap<Part, Metered>, elapsed_us: f64) {
        let mut full = self.sums.publish(plan.host.sample(elapsed_us)).err();
        // One for each VM, of all its devices here.
        let mut vms: BTreeMap<u32, Sums> = BTreeMap::new();
        for metered in all.values().filter(|metered| metered.id.is_some()) {
            let sums = vms.entry(metered.object.instance.get()).or_default();
            sums.rate += metered.said.rate;
            sums.demand += metered.said.demand;
            sums.max_demand = sums.max_demand.max(metered.said.demand);
            sums.weight += f64::from(u8::from(metered.said.demand > 0.0));
        }
        let record = |(instance, sums)| Record {
            element: NO_ELEMENT,
            node: Node::Tenant { tenant: TenantId(instance), weight: 1.0 },
            sums,
        };
        let vms: Vec<Record> = vms.into_iter().map(record).collect();
        full = full.or(self.vms.publish(&vms).err());
        if let Some(error) = full
            && !std::mem::replace(&mut self.told, true)
        {
            tracing::warn!(%error, "shares of the fabric are computed without all that this host has");
        }
    }
}

impl<M: Memory> Exchanges for Exchange<M> {
    fn level(&self, element: u32) -> Option<DevLoad> {
        self.levels.get(&element).copied()
    }

    fn fits(&self, plan: &Plan) -> bool {
        self.places == (plan.fabric.sums, plan.fabric.vms)
    }

    fn uses(&self, area: Area) -> bool {
        self.places.0.overlaps(&area) || self.places.1.overlaps(&area)
    }

    fn follow(&mut self, plan: &Plan) {
        let stale_after_us = stale_after_us(&plan.fabric);
        self.peers.set_stale_after(stale_after_us);
        self.siblings.set_stale_after(stale_after_us);
        let Self { boards, peers, .. } = self;
        boards.retain(|(known, key, _)| {
            let kept = plan.fabric.peers.contains(known);
            if !kept {
                peers.forget(*key);
            }
            kept
        });
        for peer in &plan.fabric.peers {
            if !self.boards.iter().any(|(known, ..)| known == peer) {
                // A number of its own for each life of an endpoint: its records begin anew.
                self.last_key = self.last_key.wrapping_add(1);
                let board = PeerBoard::new(self.memory.clone(), self.last_key, peer.sums);
                self.boards.push((*peer, self.last_key, board));
            }
        }
        if self.sibling.as_ref().map(|(area, _)| *area) != plan.fabric.sibling {
            self.siblings = Peers::new(stale_after_us);
            let board = |area| (area, PeerBoard::new(self.memory.clone(), 0, area));
            self.sibling = plan.fabric.sibling.map(board);
        }
    }

    fn round(&mut self, plan: &mut Plan, all: &mut BTreeMap<Part, Metered>, elapsed_us: f64, now_us: f64) {
        self.look_at_sibling(now_us);
        for metered in all.values_mut() {
            let measured = metered.measure(elapsed_us, now_us);
            let Some(id) = metered.id else { continue };
            if let Ok(decision) = plan.host.schedule(id, &measured) {
                metered.said.rate = decision.rate;
                metered.said.demand = decision.demand;
            }
        }
        self.note_elsewhere(all, now_us);
        self.observe(plan, all, now_us);
        self.publish(plan, all, elapsed_us);
        for (.., board) in &mut self.boards {
            board.read(&mut self.peers, now_us);
        }
        plan.host.settle(self.peers.records(now_us));
        let mut together: BTreeMap<u32, Together> = BTreeMap::new();
        for metered in all.values_mut() {
            let Some(id) = metered.id else { continue };
            // Nothing more was measured; but α is new, and F of the next K is to come about under it.
            let nothing = Measured { demand_elsewhere: metered.demand_elsewhere(), ..Measured::default() };
            let Ok(decision) = plan.host.schedule(id, &nothing) else { continue };
            if let Some(its) = metered.decide(&decision, &plan.fabric, now_us) {
                let least = together.entry(metered.object.instance.get()).or_insert(its);
                least.rate = least.rate.min(its.rate);
                least.vcpus = least.vcpus.max(its.vcpus);
            }
        }
        for metered in all.values().filter(|metered| metered.id.is_some()) {
            if let Some(together) = together.get(&metered.object.instance.get()) {
                metered.limit_together(together, now_us);
            }
        }
    }
}

/// What each of the devices wants that a sibling's record about a VM is about: so many want so much together, and one of them so much of that.
fn demands(sums: &Sums) -> impl Iterator<Item = f64> {
    let count = whole(sums.weight.clamp(1.0, DEVICES_MAX));
    let even = sums.demand / as_f64(count);
    // An earlier version does not tell.
    let most = sums.max_demand.clamp(even, sums.demand.max(even));
    let others = (sums.demand - most) / as_f64(count.max(2) - 1);
    std::iter::once(most).chain((1..count).map(move |_| others))
}

/// For how long what others published counts.
pub(super) fn stale_after_us(fabric: &FabricObject) -> f64 {
    (STALE_AFTER_KS * f64::from(fabric.sample_us)).max(STALE_AFTER_US_MIN)
}

/// A board in an area that somebody else may have used before.
fn fresh<M: Memory>(memory: &M, area: Area) -> Board<M> {
    for line in 0..area.lines.get() {
        let at = area.start_byte().saturating_add(line * LINE_BYTES as u64);
        memory.store_words(at, [0; LINE_BYTES / 8]);
    }
    memory.write_back(area.start_byte(), area.bytes());
    memory.store_fence();
    Board::open(memory.clone(), area)
}

/// As telemetry has it.
pub(super) fn rounded(rate: f64) -> u64 {
    whole(rate.round())
}
