//! What the controller wants measured, turned into a [`Host`] of the transport.

use std::collections::{BTreeMap, BTreeSet};

use mem_channel::{ElementId, Host, MchannelOptions, MemChannelError, Parameters, TenantId, TenantOptions};
use pod_protocol::objects::{ElementObject, FabricObject, MchannelObject};

use super::as_f64;
use super::metered::{Metered, Part};

/// The transport, as far as this endpoint has a part in it.
pub(super) struct Plan {
    pub(super) fabric: FabricObject,
    pub(super) host: Host,
}

impl Plan {
    pub(super) fn new(fabric: FabricObject) -> Result<Self, MemChannelError> {
        let (t_w_us, k_us) = (f64::from(fabric.window_us), f64::from(fabric.sample_us));
        let t_r_min_us = Parameters::default().t_r_min_us.min(t_w_us);
        let mut host = Host::new(Parameters { t_w_us, k_us, t_r_min_us, ..Parameters::default() })?;
        for element in &fabric.elements {
            host.set_element(ElementId(element.element), as_f64(element.bytes_per_second))?;
        }
        for tenant in &fabric.tenants {
            let options = TenantOptions { weight: f64::from(tenant.weight) };
            host.set_tenant(TenantId(tenant.tenant), options)?;
        }
        Ok(Self { fabric, host })
    }

    /// Whether what was learnt stays good with this fabric: averages are of a T_W and a K.
    pub(super) fn may_become(&self, fabric: &FabricObject) -> bool {
        let times = |it: &FabricObject| (it.window_us, it.sample_us);
        times(&self.fabric) == times(fabric)
    }

    /// Takes over what changed of such a fabric. What used something that is no more may move what it likes, and what waited for
    /// something that was not there is held to its share; all others go on as they were.
    pub(super) fn become_(
        &mut self,
        fabric: FabricObject,
        all: &mut BTreeMap<Part, Metered>,
    ) -> Result<(), MemChannelError> {
        let known: BTreeMap<u32, ElementObject> =
            self.fabric.elements.iter().map(|it| (it.element, *it)).collect();
        // An estimate begins anew where it is told that another capacity is there, or looked otherwise whether it is.
        for new in fabric.elements.iter().filter(|it| known.get(&it.element) != Some(*it)) {
            self.host.set_element(ElementId(new.element), as_f64(new.bytes_per_second))?;
        }
        for tenant in &fabric.tenants {
            let options = TenantOptions { weight: f64::from(tenant.weight) };
            self.host.set_tenant(TenantId(tenant.tenant), options)?;
        }
        let before = std::mem::replace(&mut self.fabric, fabric);
        let elements: BTreeSet<u32> = self.fabric.elements.iter().map(|it| it.element).collect();
        let tenants: BTreeSet<u32> = self.fabric.tenants.iter().map(|it| it.tenant).collect();
        let is_known = |object: &MchannelObject| {
            tenants.contains(&object.tenant) && object.path.iter().all(|element| elements.contains(element))
        };
        for metered in all.values_mut().filter(|it| !is_known(&it.object)) {
            self.close(metered);
        }
        for gone in before.elements.iter().filter(|it| !elements.contains(&it.element)) {
            self.host.remove_element(ElementId(gone.element))?;
        }
        for gone in before.tenants.iter().filter(|it| !tenants.contains(&it.tenant)) {
            self.host.remove_tenant(TenantId(gone.tenant))?;
        }
        for metered in all.values_mut() {
            if metered.id.is_some() {
                self.note_most(metered);
            } else {
                self.open(metered);
            }
        }
        Ok(())
    }

    /// Opens an mchannel, if everything that it names is known.
    pub(super) fn open(&mut self, metered: &mut Metered) {
        let object = &metered.object;
        let options = MchannelOptions {
            tenant: TenantId(object.tenant),
            weight: f64::from(object.weight),
            path: object.path.iter().map(|element| ElementId(*element)).collect(),
        };
        // What is unknown was taken away, and this device is about to hear of it too.
        metered.id = self.host.open(&options).ok();
        self.note_most(metered);
        metered.begin(&self.fabric);
    }

    /// Takes over what is said of something that may be open already.
    pub(super) fn change(&mut self, metered: &mut Metered, object: MchannelObject) {
        if metered.id.is_some() && metered.object == object {
            return;
        }
        let weight_only = MchannelObject { weight: object.weight, ..metered.object.clone() } == object;
        metered.object = object;
        if let Some(id) = metered.id.filter(|_| weight_only) {
            // It is open, and its estimates stay good.
            let _ = self.host.set_weight(id, f64::from(metered.object.weight));
        } else {
            self.close(metered);
            self.open(metered);
        }
    }

    /// Notes what its path carries at most.
    pub(super) fn note_most(&self, metered: &mut Metered) {
        let elements = self.fabric.elements.iter().filter(|it| metered.object.path.contains(&it.element));
        let rates = elements.map(|it| as_f64(it.bytes_per_second));
        metered.most = rates.fold(f64::INFINITY, f64::min);
    }

    /// Closes an mchannel that may move what it likes from now on.
    pub(super) fn close(&mut self, metered: &mut Metered) {
        if let Some(id) = metered.id.take() {
            // It was open.
            let _ = self.host.close(id);
        }
        metered.free();
    }

    pub(super) fn close_all(&mut self, all: &mut BTreeMap<Part, Metered>) {
        for metered in all.values_mut() {
            self.close(metered);
        }
    }
}
