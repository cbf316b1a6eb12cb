//! The virtio-net device as the VMM sees it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cxl_pool::FileIdentity;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{LeaseId, MacAddress};
use pod_protocol::objects::PortObject;
use pod_protocol::reports::Report;
use pod_protocol::worker::WorkerHandle;
use vhost_frontend::{
    ConfigSpace, DeviceSink, DeviceSpec, GuestMemory, PoolRam, Ring, StopReason, VMM_PATIENCE,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_bindings::virtio_net as bits;

use super::Order;
use crate::offloads::Offloads;

const QUEUE_SIZE_MAX: u16 = 1024;
const LINK_UP: u16 = 1;

/// What the device of a port offers. Where it is known which file or device the pool is, a VMM that maps more of it than the
/// guest's own part is refused.
pub fn device_spec(object: &PortObject, pool_file: Option<FileIdentity>) -> DeviceSpec {
    let mut features = 1 << VIRTIO_RING_F_EVENT_IDX
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        | 1 << bits::VIRTIO_NET_F_MRG_RXBUF
        | 1 << bits::VIRTIO_NET_F_MTU
        | 1 << bits::VIRTIO_NET_F_MAC
        | 1 << bits::VIRTIO_NET_F_STATUS
        // The VMM asks its guest to announce itself after a live migration; we only let it.
        | 1 << bits::VIRTIO_NET_F_GUEST_ANNOUNCE;
    if object.queue_pairs > 1 {
        features |= 1 << bits::VIRTIO_NET_F_MQ;
    }
    // What the NIC can do that the instance has first. Where it moves later, the backend does what is missing.
    features |= object.features & Offloads::ALL.features();
    DeviceSpec {
        name: format!("{}-{}", object.instance_name, object.device),
        virtio_features: features,
        assumed_features: assumed_features(object),
        config: ConfigSpace::new(config_space(object)),
        queues: 2 * object.queue_pairs,
        queues_hint: |count| {
            let pairs = count / 2;
            format!(
                "the lease has {pairs} pairs of queues: give QEMU's -netdev vhost-user queues={pairs}, or create the instance with \
                 --nic queue-pairs= as many as the VMM has"
            )
        },
        queue_size_max: QUEUE_SIZE_MAX,
        in_order: true,
        announces: true,
        // Transmit queues.
        discards: |index| !index.is_multiple_of(2),
        pool_ram: pool_file.map(|file| PoolRam { file, leased: object.ram_area }),
        vmm_patience: VMM_PATIENCE,
    }
}

/// What any driver understands of us, and may ask of us: not that frames reach it unfinished.
fn assumed_features(object: &PortObject) -> u64 {
    1 << VIRTIO_F_VERSION_1
        | 1 << VIRTIO_RING_F_INDIRECT_DESC
        // One that does not merge has buffers into which each frame fits.
        | 1 << bits::VIRTIO_NET_F_MRG_RXBUF
        | object.features & Offloads::FROM_GUESTS
}

/// `struct virtio_net_config` up to the MTU.
fn config_space(object: &PortObject) -> Vec<u8> {
    let mut config = Vec::with_capacity(12);
    config.extend(object.mac.bytes());
    config.extend(LINK_UP.to_le_bytes());
    config.extend(object.queue_pairs.to_le_bytes());
    config.extend(object.mtu.to_le_bytes());
    config
}

/// Passes what the VMM says on to the worker.
pub(super) struct Sink {
    worker: WorkerHandle<Order>,
    attachment: Arc<Attachment>,
}

/// What the controller is told about the VMM of a lease.
struct Attachment {
    lease: LeaseId,
    reporter: Reporter,
    /// Nobody reports without it, so that what is reported last is what holds.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    connected: bool,
    /// Which queues run.
    running: BTreeSet<u16>,
    /// None runs any more, and what they sent is still under way.
    letting_go: bool,
}

impl Attachment {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, state: &State) {
        self.reporter.report(Report::Attachment {
            lease: self.lease,
            connected: state.connected,
            running: !state.running.is_empty() || state.letting_go,
            write_through: false,
            untold: false,
        });
    }

    /// What the queues sent is done with. They may run again by now.
    fn let_go(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.letting_go) {
            self.report(&state);
        }
    }

    fn connected(&self, connected: bool) {
        let mut state = self.state();
        state.connected = connected;
        self.report(&state);
    }
}

impl Sink {
    pub(super) fn new(lease: LeaseId, worker: WorkerHandle<Order>, reporter: Reporter) -> Self {
        Self { worker, attachment: Arc::new(Attachment { lease, reporter, state: Mutex::default() }) }
    }

    fn lease(&self) -> LeaseId {
        self.attachment.lease
    }
}

// A worker that has ended was fenced or told to stop, and the daemon ends too: nothing is left to be told.
impl DeviceSink for Sink {
    fn connected(&mut self) {
        self.attachment.connected(true);
    }

    fn nobody_came(&mut self) {
        // Whoever knows of a VMM in our life before waits for this.
        self.attachment.report(&self.attachment.state());
    }

    fn features(&mut self, acknowledged: u64) {
        let _ = self.worker.send(Order::Features(self.lease(), acknowledged));
    }

    fn ring_started(&mut self, ring: Ring) {
        let (index, enabled) = (ring.index(), ring.is_enabled());
        // The worker hears of it first: it tells nobody then that queues were let go of which run again.
        let _ = self.worker.send(Order::RingStarted(self.lease(), Box::new(ring)));
        let mut state = self.attachment.state();
        if enabled && state.running.insert(index) && state.running.len() == 1 {
            state.letting_go = false;
            self.attachment.report(&state);
        }
    }

    fn ring_stopped(&mut self, index: u16, _reason: StopReason) -> u16 {
        // What the ring sent lies in the pool already, so its descriptors are returned at once in either case.
        // Unless some of it lies in the guest's memory.
        let next = self.worker.call(|reply| Order::RingStopped(self.lease(), index, reply)).unwrap_or(0);
        let mut state = self.attachment.state();
        if state.running.remove(&index) && state.running.is_empty() {
            state.letting_go = true;
            let attachment = Arc::clone(&self.attachment);
            let then = Box::new(move || attachment.let_go());
            let _ = self.worker.send(Order::LetGo(self.lease(), then));
        }
        next
    }

    fn memory_changed(&mut self, memory: &GuestMemory) {
        let _ = self.worker.call(|reply| Order::MemoryChanged(self.lease(), memory.clone(), reply));
    }

    fn announce(&mut self, address: [u8; 6]) {
        let _ = self.worker.send(Order::Announce(self.lease(), MacAddress::new(address)));
    }

    fn disconnected(&mut self) {
        self.attachment.connected(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cxl_pool::{Area, LineCount, LineOffset};
    use pod_protocol::ids::{ChannelId, InstanceId, LeaseGeneration};
    use pod_protocol::objects::{NicPolicy, Route};

    #[test]
    fn a_device_offers_what_its_nics_can_do() {
        let route = Route { channel: ChannelId::new(1), generation: LeaseGeneration::new(1) };
        let object = PortObject {
            lease: LeaseId::new(1).expect("small"),
            instance: InstanceId::new(1),
            instance_name: "vm".into(),
            device: "net0".into(),
            socket: "vm-net0.sock".into(),
            vmm_listens: false,
            mac: MacAddress::new([2, 0, 0, 0, 0, 1]),
            mtu: 1400,
            queue_pairs: 2,
            features: Offloads::CHECKSUM.features(),
            tx_area: Area::new(LineOffset::new(0), LineCount::new(1)),
            active: route,
            rails: Vec::new(),
            standby: None,
            draining: None,
            incoming: false,
            policy: NicPolicy::default(),
            ram_area: None,
        };
        let spec = device_spec(&object, None);
        assert_eq!(spec.queues, 4);
        assert_eq!(spec.config.read(0, 12), [2, 0, 0, 0, 0, 1, 1, 0, 2, 0, 0x78, 5]);
        let has = |bit: u32| spec.virtio_features >> bit & 1 == 1;
        assert!(
            has(bits::VIRTIO_NET_F_CSUM) && has(bits::VIRTIO_NET_F_GUEST_CSUM) && has(bits::VIRTIO_NET_F_MQ)
        );
        assert!(has(bits::VIRTIO_NET_F_GUEST_ANNOUNCE), "a guest that moves announces itself");
        assert!(!has(bits::VIRTIO_NET_F_HOST_TSO4) && !has(bits::VIRTIO_NET_F_GUEST_TSO4));
        let assumed = |bit: u32| spec.assumed_features >> bit & 1 == 1;
        assert!(assumed(VIRTIO_F_VERSION_1) && assumed(bits::VIRTIO_NET_F_CSUM));
        assert!(!assumed(bits::VIRTIO_NET_F_GUEST_CSUM) && !assumed(VIRTIO_RING_F_EVENT_IDX));
    }
}
