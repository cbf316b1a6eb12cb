//! One host's part of the transport (Algorithm 1).

use std::collections::BTreeMap;

use crate::claims::{at_most, believed};
use crate::mchannel::{Hop, Mchannel, check_weight, exact};
use crate::share::Totals;
use crate::{
    Average, Capacity, Decision, ElementId, MchannelId, MchannelOptions, Measured, MemChannelError, Node,
    Parameters, Record, Share, Sums, TenantId,
};

/// What a tenant is added with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantOptions {
    /// Its part among the tenants, a positive number.
    pub weight: f64,
}

/// All mchannels of a host, and what it knows of the elements on their paths.
#[derive(Clone, Debug)]
pub struct Host {
    parameters: Parameters,
    /// e^(−T_W/K), for windows that were on time.
    decay: f64,
    tenants: BTreeMap<TenantId, TenantOptions>,
    elements: Vec<Element>,
    by_id: BTreeMap<ElementId, usize>,
    mchannels: Vec<Slot>,
    records: Vec<Record>,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    generation: u32,
    mchannel: Option<Mchannel>,
}

#[derive(Clone, Debug)]
struct Element {
    id: ElementId,
    capacity: Capacity,
    /// Among tenants.
    share: Share,
    /// What this host published of the root.
    local: Sums,
    /// A signal came since the last sample.
    observed: bool,
    members: Vec<Member>,
    /// Of all tenants at the element, on any host, in the order of their numbers.
    totals: Vec<Total>,
    root: Totals,
    peers: PeerSignals,
}

/// A tenant at an element, over all hosts.
#[derive(Clone, Copy, Debug)]
struct Total {
    tenant: TenantId,
    weight: f64,
    sums: Totals,
    /// Who spoke of it last.
    said_by: Option<u16>,
}

/// A tenant with mchannels of this host through an element.
#[derive(Clone, Debug)]
struct Member {
    tenant: TenantId,
    weight: f64,
    mchannels: usize,
    /// Among the tenant's mchannels.
    share: Share,
    local: Sums,
}

/// What other hosts say of an element.
#[derive(Clone, Copy, Debug, Default)]
struct PeerSignals {
    capacity: f64,
    hosts: f64,
    load: f64,
    /// Who spoke of it last.
    said_by: Option<u16>,
}

impl Host {
    /// A host without elements, tenants and mchannels.
    pub fn new(parameters: Parameters) -> Result<Self, MemChannelError> {
        parameters.validate()?;
        let decay = Average::decay(parameters.t_w_us, parameters.k_us);
        Ok(Self {
            parameters,
            decay,
            tenants: BTreeMap::new(),
            elements: Vec::new(),
            by_id: BTreeMap::new(),
            mchannels: Vec::new(),
            records: Vec::new(),
        })
    }

    /// The constants it runs with.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Adds an element, or changes how much it carries at most, in bytes/s.
    pub fn set_element(&mut self, id: ElementId, highest_bytes_per_s: f64) -> Result<(), MemChannelError> {
        let capacity = Capacity::new(highest_bytes_per_s)?;
        if let Some(&index) = self.by_id.get(&id) {
            self.elements[index].capacity = capacity;
        } else {
            self.by_id.insert(id, self.elements.len());
            self.elements.push(Element::new(id, capacity));
        }
        let Self { elements, mchannels, .. } = self;
        for mchannel in mchannels.iter_mut().filter_map(|slot| slot.mchannel.as_mut()) {
            mchannel.most_demand = narrowest(elements, &mchannel.path);
        }
        Ok(())
    }

    /// Removes an element that no open mchannel passes through. What is known of the others stays.
    pub fn remove_element(&mut self, id: ElementId) -> Result<(), MemChannelError> {
        let index = *self.by_id.get(&id).ok_or(MemChannelError::UnknownElement(id))?;
        if self.elements[index].members.iter().any(|member| member.mchannels > 0) {
            return Err(MemChannelError::ElementInUse(id));
        }
        self.elements.remove(index);
        self.by_id.remove(&id);
        let places = self.by_id.values_mut().filter(|place| **place > index);
        places.for_each(|place| *place -= 1);
        self.hops().filter(|hop| hop.element > index).for_each(|hop| hop.element -= 1);
        Ok(())
    }

    /// Removes a tenant without open mchannels. What is known of the others stays.
    pub fn remove_tenant(&mut self, id: TenantId) -> Result<(), MemChannelError> {
        if !self.tenants.contains_key(&id) {
            return Err(MemChannelError::UnknownTenant(id));
        }
        let of_tenant = |member: &Member| member.tenant == id;
        let mut members = self.elements.iter().flat_map(|element| &element.members);
        if members.any(|member| of_tenant(member) && member.mchannels > 0) {
            return Err(MemChannelError::TenantInUse(id));
        }
        self.tenants.remove(&id);
        for element in 0..self.elements.len() {
            let Some(index) = self.elements[element].members.iter().position(of_tenant) else { continue };
            self.elements[element].members.remove(index);
            let here = self.hops().filter(|hop| hop.element == element);
            here.filter(|hop| hop.member > index).for_each(|hop| hop.member -= 1);
        }
        Ok(())
    }

    /// Adds a tenant, or changes its weight.
    pub fn set_tenant(&mut self, id: TenantId, options: TenantOptions) -> Result<(), MemChannelError> {
        check_weight(options.weight)?;
        if id == TenantId(u32::MAX) {
            return Err(MemChannelError::ReservedTenant(id));
        }
        self.tenants.insert(id, options);
        let members = self.elements.iter_mut().flat_map(|element| &mut element.members);
        for member in members.filter(|member| member.tenant == id) {
            member.weight = options.weight;
        }
        Ok(())
    }

    /// Opens an mchannel. It runs freely until the next [`schedule`](Self::schedule).
    pub fn open(&mut self, options: &MchannelOptions) -> Result<MchannelId, MemChannelError> {
        let tenant = options.tenant;
        let weight = self.tenants.get(&tenant).ok_or(MemChannelError::UnknownTenant(tenant))?.weight;
        check_weight(options.weight)?;
        let mut indices = Vec::with_capacity(options.path.len());
        for id in &options.path {
            let index = *self.by_id.get(id).ok_or(MemChannelError::UnknownElement(*id))?;
            if indices.contains(&index) {
                return Err(MemChannelError::Path(options.path.len()));
            }
            indices.push(index);
        }
        if indices.is_empty() {
            return Err(MemChannelError::Path(0));
        }
        let mut path = Vec::with_capacity(indices.len());
        for element in indices {
            let member = self.elements[element].join(tenant, weight);
            path.push(Hop { element, member });
        }
        let path = path.into_boxed_slice();
        let most_demand = narrowest(&self.elements, &path);
        let mchannel = Mchannel::new(options.weight, path, most_demand)?;
        let free = self.mchannels.iter().position(|slot| slot.mchannel.is_none());
        let index = free.unwrap_or_else(|| {
            self.mchannels.push(Slot::default());
            self.mchannels.len() - 1
        });
        let slot = &mut self.mchannels[index];
        slot.mchannel = Some(mchannel);
        // A host has nowhere near 2^32 mchannels.
        Ok(MchannelId { slot: u32::try_from(index).unwrap_or(u32::MAX), generation: slot.generation })
    }

    /// Changes w_c.
    pub fn set_weight(&mut self, id: MchannelId, weight: f64) -> Result<(), MemChannelError> {
        check_weight(weight)?;
        self.mchannel(id)?.weight = weight;
        Ok(())
    }

    /// Closes an mchannel.
    pub fn close(&mut self, id: MchannelId) -> Result<(), MemChannelError> {
        self.mchannel(id)?;
        let slot = &mut self.mchannels[id.slot as usize];
        slot.generation = slot.generation.wrapping_add(1);
        if let Some(closed) = slot.mchannel.take() {
            for hop in &closed.path {
                self.elements[hop.element].members[hop.member].mchannels -= 1;
            }
        }
        Ok(())
    }

    /// Takes up a congestion signal L of an element this host looks at (Eq. 6): the part of responses with moderate or severe
    /// overload, or of time with backpressure, from 0 to 1.
    pub fn observe(&mut self, element: ElementId, overloaded_part: f64) -> Result<(), MemChannelError> {
        let index = *self.by_id.get(&element).ok_or(MemChannelError::UnknownElement(element))?;
        let element = &mut self.elements[index];
        element.capacity.observe(overloaded_part, &self.parameters);
        element.observed = true;
        Ok(())
    }

    /// MCHANNEL_SCHED: once per mchannel and T_W, or for as long as `measured` says.
    #[inline]
    pub fn schedule(&mut self, id: MchannelId, measured: &Measured) -> Result<Decision, MemChannelError> {
        let Self { parameters, decay, elements, mchannels, .. } = self;
        let slot = mchannels.get_mut(id.slot as usize).filter(|slot| slot.generation == id.generation);
        let mchannel =
            slot.and_then(|slot| slot.mchannel.as_mut()).ok_or(MemChannelError::UnknownMchannel(id))?;
        let on_time = (measured.elapsed_us - parameters.t_w_us).abs() < parameters.t_w_us * 0.01;
        let decay = if on_time { *decay } else { Average::decay(measured.elapsed_us, parameters.k_us) };
        mchannel.estimate(measured, decay);
        // Line 7 takes the minimum with the α of before as well, which could only ever fall: it begins anew here.
        let share = mchannel.path.iter().fold(f64::INFINITY, |least, hop| {
            least.min(elements[hop.element].members[hop.member].share.of(mchannel.weight))
        });
        Ok(mchannel.decide(share, measured, parameters))
    }

    /// The end of a sampling window that was `elapsed_us` long: sums up what the mchannels did (lines 13–15). Returns what the
    /// other hosts need to know, in an order that only changes when something is added or removed: of elements on the paths of open
    /// mchannels, and of those that it [looked at](Self::observe) since the last sample.
    pub fn sample(&mut self, elapsed_us: f64) -> &[Record] {
        let per_second = if elapsed_us > 0.0 { 1e6 / elapsed_us } else { 0.0 };
        // Who wants less than a line in K wants nothing.
        let nothing = 64.0 * 1e6 / self.parameters.k_us;
        let Self { elements, mchannels, records, .. } = self;
        for member in elements.iter_mut().flat_map(|element| &mut element.members) {
            member.local = Sums::default();
        }
        for mchannel in mchannels.iter_mut().filter_map(|slot| slot.mchannel.as_mut()) {
            let rate = exact(std::mem::take(&mut mchannel.bytes)) * per_second;
            let demand = mchannel.demand().max(rate);
            let (weight, active) = (mchannel.weight, demand > nothing);
            // Of a VM that others measure as well, each tells its part of the weight, and the whole of what it wants.
            let whole = demand + mchannel.elsewhere();
            for hop in &mchannel.path {
                let sums = &mut elements[hop.element].members[hop.member].local;
                sums.rate += rate;
                if active {
                    sums.demand += demand;
                    sums.max_demand = sums.max_demand.max(whole / weight);
                    sums.weight += weight * demand / whole;
                }
            }
        }
        records.clear();
        for element in elements {
            element.sample(records);
        }
        records
    }

    /// Computes capacities and shares anew (lines 16–20) from this host's last [`sample`](Self::sample) and what the others
    /// published, each with its number, all that one published behind the other.
    ///
    /// A host may be wrong. What tenants weigh this one knows by itself, records of elements and tenants that it does not know are of no concern here, of several about one
    /// node the first one counts, and no host is taken to want, move or weigh more than it can. So whatever others publish, an mchannel of weight w that is held back has a share of at
    /// least C·W/ΣW·w/(Σw + n·[`MOST_WEIGHT`](crate::MOST_WEIGHT)) at each element, W being the weight of its tenant among all, Σw what this host's mchannels weigh, and n how many others there are.
    pub fn settle<'a>(&mut self, others: impl IntoIterator<Item = (u16, &'a Record)>) {
        for element in &mut self.elements {
            element.begin();
        }
        for (host, record) in others {
            if let Some(&index) = self.by_id.get(&record.element) {
                self.elements[index].take(host, record, &self.tenants);
            }
        }
        for element in &mut self.elements {
            element.settle(&self.parameters);
        }
    }

    /// C_v as estimated now, in bytes/s.
    pub fn capacity(&self, element: ElementId) -> Option<f64> {
        self.by_id.get(&element).map(|&index| self.elements[index].capacity.get())
    }

    /// α_v among the tenants at an element.
    pub fn share(&self, element: ElementId) -> Option<Share> {
        self.by_id.get(&element).map(|&index| self.elements[index].share)
    }

    /// α among a tenant's mchannels at an element, if it has any on this host.
    pub fn tenant_share(&self, element: ElementId, tenant: TenantId) -> Option<Share> {
        let element = &self.elements[*self.by_id.get(&element)?];
        element.members.iter().find(|member| member.tenant == tenant).map(|member| member.share)
    }

    /// Where the paths of all open mchannels pass.
    fn hops(&mut self) -> impl Iterator<Item = &mut Hop> {
        self.mchannels.iter_mut().filter_map(|slot| slot.mchannel.as_mut()).flat_map(|it| &mut it.path)
    }

    fn mchannel(&mut self, id: MchannelId) -> Result<&mut Mchannel, MemChannelError> {
        self.mchannels
            .get_mut(id.slot as usize)
            .filter(|slot| slot.generation == id.generation)
            .and_then(|slot| slot.mchannel.as_mut())
            .ok_or(MemChannelError::UnknownMchannel(id))
    }
}

fn narrowest(elements: &[Element], path: &[Hop]) -> f64 {
    path.iter().fold(f64::INFINITY, |least, hop| least.min(elements[hop.element].capacity.highest()))
}

impl Element {
    fn new(id: ElementId, capacity: Capacity) -> Self {
        Self {
            id,
            capacity,
            share: Share::FREE,
            local: Sums::default(),
            observed: false,
            members: Vec::new(),
            totals: Vec::new(),
            root: Totals::default(),
            peers: PeerSignals::default(),
        }
    }

    fn join(&mut self, tenant: TenantId, weight: f64) -> usize {
        let known = self.members.iter().position(|member| member.tenant == tenant);
        let index = known.unwrap_or_else(|| {
            self.members.push(Member {
                tenant,
                weight,
                mchannels: 0,
                share: Share::FREE,
                local: Sums::default(),
            });
            self.members.len() - 1
        });
        self.members[index].mchannels += 1;
        index
    }

    fn sample(&mut self, records: &mut Vec<Record>) {
        let mut local = Sums::default();
        for member in &mut self.members {
            member.local.alpha = member.share.in_force(member.local.max_demand);
            local.rate += member.local.rate;
            local.demand += member.local.demand;
            local.max_demand = local.max_demand.max(member.local.demand / member.weight);
            if member.local.weight > 0.0 {
                local.weight += member.weight;
            }
        }
        local.alpha = self.share.in_force(local.max_demand);
        self.local = local;
        let observed = std::mem::take(&mut self.observed);
        if !observed && self.members.iter().all(|member| member.mchannels == 0) {
            return;
        }
        let node = Node::Root { capacity: narrow(self.capacity.get()), load: narrow(self.capacity.load()) };
        records.push(Record { element: self.id, node, sums: local });
        for member in self.members.iter().filter(|member| member.mchannels > 0) {
            let node = Node::Tenant { tenant: member.tenant, weight: narrow(member.weight) };
            records.push(Record { element: self.id, node, sums: member.local });
        }
    }

    fn begin(&mut self) {
        self.totals.clear();
        self.root = Totals::default();
        self.root.add_alpha(&self.local);
        self.peers = PeerSignals::default();
        for index in 0..self.members.len() {
            let Member { tenant, weight, local, .. } = self.members[index];
            self.total(tenant, weight).sums.add(&local);
        }
    }

    /// Takes what another host says of this element.
    fn take(&mut self, host: u16, record: &Record, tenants: &BTreeMap<TenantId, TenantOptions>) {
        let highest = self.capacity.highest();
        let sums = believed(&record.sums, highest);
        match record.node {
            Node::Root { capacity, load } => {
                if self.peers.said_by.replace(host) != Some(host) {
                    self.root.add_alpha(&sums);
                    self.peers.capacity += at_most(f64::from(capacity), highest);
                    self.peers.hosts += 1.0;
                    self.peers.load = self.peers.load.max(at_most(f64::from(load), 1.0));
                }
            }
            Node::Tenant { tenant, .. } => {
                let Some(options) = tenants.get(&tenant) else { return };
                let total = self.total(tenant, options.weight);
                if total.said_by.replace(host) != Some(host) {
                    total.sums.add(&sums);
                }
            }
        }
    }

    fn total(&mut self, tenant: TenantId, weight: f64) -> &mut Total {
        let at = match self.totals.binary_search_by_key(&tenant, |known| known.tenant) {
            Ok(at) => at,
            Err(at) => {
                self.totals.insert(at, Total { tenant, weight, sums: Totals::default(), said_by: None });
                at
            }
        };
        &mut self.totals[at]
    }

    fn settle(&mut self, parameters: &Parameters) {
        for Total { weight, sums, .. } in &self.totals {
            self.root.rate += sums.rate;
            self.root.demand += sums.demand;
            if sums.weight > 0.0 {
                self.root.max_demand = self.root.max_demand.max(sums.demand / weight);
                self.root.weight += weight;
            }
        }
        if self.peers.hosts > 0.0 {
            self.capacity.agree(self.peers.capacity / self.peers.hosts);
        }
        let load = self.capacity.load().max(self.peers.load);
        self.capacity.adjust(self.root.rate, load, parameters);
        self.share = self.root.share(self.capacity.get());
        // From the root to the leaves (§4.4): what a tenant may have is the capacity that its mchannels share.
        for member in &mut self.members {
            let at = self.totals.binary_search_by_key(&member.tenant, |known| known.tenant);
            let totals = at.map_or_else(|_| Totals::default(), |at| self.totals[at].sums);
            member.share = totals.share(self.share.of(member.weight));
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "seven digits of a capacity are enough")]
fn narrow(value: f64) -> f32 {
    value as f32
}
