//! Which quarantined regions an endpoint has yet to let go of: asked for whenever it is told something, while a pod that lost a
//! host may have thousands of them.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{EndpointId, HostId};
use pod_protocol::ids::RegionId;

use super::{Region, RegionUse};

/// See the [module](self). No endpoint is in it without a region, so that two of them are alike if they say the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pending(BTreeMap<EndpointId, BTreeSet<RegionId>>);

impl Pending {
    pub(super) fn of<'a>(regions: impl Iterator<Item = &'a Region>) -> Self {
        let mut pending = Self::default();
        regions.for_each(|region| pending.add(region));
        pending
    }

    /// Those that an endpoint has yet to let go of.
    pub(super) fn of_holder(&self, holder: EndpointId) -> impl Iterator<Item = RegionId> {
        self.0.get(&holder).into_iter().flatten().copied()
    }

    /// A region is as it is now; nothing of it is known here.
    pub(super) fn add(&mut self, region: &Region) {
        if region.usage == RegionUse::Quarantined {
            for holder in &region.holders {
                self.0.entry(*holder).or_default().insert(region.id);
            }
        }
    }

    /// A region was as it was when it was added.
    pub(super) fn remove(&mut self, region: &Region) {
        if region.usage == RegionUse::Quarantined {
            region.holders.iter().for_each(|holder| self.let_go(*holder, region.id));
        }
    }

    /// An endpoint has let go.
    pub(super) fn let_go(&mut self, holder: EndpointId, region: RegionId) {
        if let Some(known) = self.0.get_mut(&holder) {
            known.remove(&region);
            if known.is_empty() {
                self.0.remove(&holder);
            }
        }
    }

    /// All of a host have let go of everything.
    pub(super) fn forget(&mut self, host: HostId) {
        self.0.retain(|holder, _| holder.host != host);
    }
}
