//! What found no room in the pool. It is tried again with each command: any may free what it takes, and in a full pool that is large
//! to look at all of it each time would take longer than everything else.

use std::collections::BTreeSet;

use cxl_pool::EndpointId;
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId};

use super::{DeviceId, State};

/// See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanting {
    /// NICs without an area to receive into.
    pub(super) devices: BTreeSet<DeviceId>,
    /// Leases without an area.
    pub(super) leases: BTreeSet<LeaseId>,
    /// Instances without RAM.
    pub(super) instances: BTreeSet<InstanceId>,
    /// Channels without rings.
    pub(super) channels: BTreeSet<ChannelId>,
    /// Frontends without a board.
    pub(super) boards: BTreeSet<EndpointId>,
}

impl Wanting {
    pub(super) fn is_empty(&self) -> bool {
        let Self { devices, leases, instances, channels, boards } = self;
        devices.is_empty()
            && leases.is_empty()
            && instances.is_empty()
            && channels.is_empty()
            && boards.is_empty()
    }
}

impl State {
    /// What found no room is looked at again; all of the pod, if that is not known.
    pub(super) fn touch_wanting(&mut self) {
        self.follow();
        let Some(mut found) = self.known.0.take() else { return };
        let mut work = std::mem::take(&mut found.work);
        if let Some(Wanting { devices, leases, instances, channels, boards }) = found.wanting.take() {
            for id in &devices {
                work.device(self, &found, id);
            }
            for id in leases {
                work.lease(self, id);
            }
            for id in instances {
                work.instance(self, id);
            }
            work.channels.extend(channels);
            work.boards.extend(boards);
        } else {
            work.everything(self);
        }
        found.work = work;
        self.known.0 = Some(found);
    }
}
