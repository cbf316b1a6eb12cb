//! What is counted per lease and per NIC, and why packets are dropped.
//!
//! A worker counts, the control thread reads: each counter has one writer, so plain loads and stores suffice.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pod_protocol::ids::LeaseId;
use pod_protocol::telemetry::LeaseTelemetry;

use crate::nic::statistics::DriverTroubles;

/// A number that only grows, written by one thread.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to it; only its one writer may.
    #[inline]
    pub fn add(&self, amount: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
    }

    /// Its value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! drop_reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a packet was dropped.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum DropReason { $($(#[$doc])* $name,)* }

        impl DropReason {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Its name in telemetry.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

drop_reasons! {
    /// Frontend: a descriptor chain that cannot hold a packet.
    BadChain = "bad-chain",
    /// A virtio-net header that contradicts its frame or uses what was not negotiated.
    BadHeader = "bad-header",
    /// Frontend: the guest has posted no, or not enough, receive buffers.
    NoGuestBuffers = "no-guest-buffers",
    /// Frontend: no receive queue is running.
    NoGuestQueue = "no-guest-queue",
    /// A frame relies on an offload that its receiver does not accept.
    ReceiverOffloads = "receiver-offloads",
    /// A message that contradicts itself or the pieces before it.
    BadMessage = "bad-message",
    /// The packet lies outside of what is leased to the instance that sends it, or of where its NIC receives.
    OutsideArea = "outside-area",
    /// Backend: the source address is not the instance's own.
    Spoofed = "spoofed-source",
    /// A message of an older holder of the lease.
    Stale = "stale-generation",
    /// Frontend: a flooded frame that another NIC has delivered already, as the instance moves from one to the other.
    Doubled = "doubled",
    /// Backend: a network address that is not the instance's own, or a frame that hides its addresses.
    SpoofedAddress = "spoofed-address",
    /// Backend: a frame for the nearest bridge alone, which is the switch's business and the host's.
    Reserved = "reserved-address",
    /// Backend: an instance that is in a VLAN sent a frame with a tag.
    Tagged = "vlan-tag",
    /// The instance receives as much as it may: from a NIC at its backend, from several at the frontend.
    RateLimit = "rate-limit",
    /// Frontend: more frames wait than are kept for an instance that has used up its share of the fabric.
    FabricShare = "fabric-share",
    /// Backend: what room is left is kept for instances that have had less than they are promised.
    KeptForOthers = "kept-for-minimum",
    /// Backend: the instance holds as many receive buffers as it may.
    ReceiveQuota = "receive-quota",
    /// Backend: the instance holds as many receive buffers, or messages of its channel, as are left for all.
    ReceiveShare = "receive-share",
    /// Backend: no receive buffer was free for a frame between two local instances.
    NoReceiveBuffers = "no-receive-buffers",
    /// Backend: the channel to the instance's frontend is full or not ready.
    ChannelFull = "channel-full",
    /// Backend: the NIC's link was down for too long.
    LinkDown = "link-down",
    /// Frontend: the queue stopped before a packet whose payload lies in the guest's memory was sent.
    QueueStopped = "queue-stopped",
    /// Frontend: the VMM had disabled the queue.
    QueueDisabled = "queue-disabled",
    /// Backend: the NIC's driver, or the kernel behind it, found fault with the packet.
    Refused = "nic-refused",
    /// Backend: too many packets wait for the NIC.
    Backlog = "nic-full",
}

/// What is counted for one lease.
#[derive(Debug, Default)]
pub struct LeaseCounters {
    /// Packets from the instance.
    pub tx_packets: Counter,
    /// Their bytes.
    pub tx_bytes: Counter,
    /// Frontend: those of them whose payload was not copied.
    pub zero_copy: Counter,
    /// Packets to the instance.
    pub rx_packets: Counter,
    /// Their bytes.
    pub rx_bytes: Counter,
    /// How often the instance had to wait for the rate that it is allowed.
    pub rate_waits: Counter,
    /// Packets from the instance that had to wait for it.
    pub throttled: Counter,
    drops: [Counter; DropReason::ALL.len()],
}

impl LeaseCounters {
    /// Counts a dropped packet.
    pub fn count_drop(&self, reason: DropReason) {
        self.drops[reason as usize].add(1);
    }

    /// How many were dropped for this reason.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize].get()
    }

    /// Counts a packet to the instance.
    #[inline]
    pub fn count_rx(&self, bytes: u32) {
        self.rx_packets.add(1);
        self.rx_bytes.add(u64::from(bytes));
    }

    fn add_to(&self, telemetry: &mut LeaseTelemetry) {
        telemetry.tx_packets += self.tx_packets.get();
        telemetry.tx_bytes += self.tx_bytes.get();
        telemetry.rx_packets += self.rx_packets.get();
        telemetry.rx_bytes += self.rx_bytes.get();
        telemetry.rate_waits += self.rate_waits.get();
        telemetry.throttled += self.throttled.get();
        for reason in DropReason::ALL {
            let drops = self.drops(*reason);
            if drops > 0 {
                *telemetry.drops.entry(reason.name().to_owned()).or_default() += drops;
            }
        }
    }
}

/// Why a frame that a NIC received was given to nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameFault {
    /// It is for nobody here: another host's on the same wire, or an instance's that has left.
    NoReceiver,
    /// It is too short for addresses.
    Short,
    /// It is longer than any packet, as where the kernel was told to put more than 64 KiB into one.
    Long,
    /// It was received while the backend stood still, and may have arrived at another one.
    StoodStill,
}

impl FrameFault {
    const ALL: [(Self, &str); 4] = [
        (Self::NoReceiver, "no-receiver"),
        (Self::Short, "too-short"),
        (Self::Long, "too-long"),
        (Self::StoodStill, "stood-still"),
    ];
}

/// What is counted for one NIC.
#[derive(Debug, Default)]
pub struct NicCounters {
    /// Whether it can carry traffic: its link is up, and its driver works.
    pub up: AtomicBool,
    /// How often it was opened again after its driver had failed.
    pub reopened: Counter,
    /// Frames received.
    pub rx_packets: Counter,
    /// Their bytes.
    pub rx_bytes: Counter,
    /// Packets sent.
    pub tx_packets: Counter,
    /// Their bytes.
    pub tx_bytes: Counter,
    /// What went wrong for the device.
    pub errors: Counter,
    /// What its driver knows of its troubles.
    pub driver: DriverTroubles,
    frame_faults: [Counter; FrameFault::ALL.len()],
}

impl NicCounters {
    /// Counts frames that were given to nobody.
    pub fn count_frames(&self, fault: FrameFault, frames: u64) {
        self.frame_faults[fault as usize].add(frames);
    }

    /// Frames that were given to nobody, by reason.
    pub fn dropped(&self) -> BTreeMap<String, u64> {
        let all =
            FrameFault::ALL.iter().map(|(fault, name)| (*name, self.frame_faults[*fault as usize].get()));
        all.filter(|(_, count)| *count > 0).map(|(name, count)| (name.to_owned(), count)).collect()
    }
}

/// The counters of all leases that an engine serves.
#[derive(Clone, Debug, Default)]
pub struct LeaseBook(Arc<Mutex<BTreeMap<LeaseId, Arc<LeaseCounters>>>>);

impl LeaseBook {
    /// The counters of a lease, at zero when they are new.
    pub fn open(&self, lease: LeaseId) -> Arc<LeaseCounters> {
        let mut book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(book.entry(lease).or_default())
    }

    /// Forgets a lease.
    pub fn close(&self, lease: LeaseId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&lease);
    }

    /// Packets of all leases whose payload was not copied.
    pub fn zero_copy(&self) -> u64 {
        let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.values().map(|counters| counters.zero_copy.get()).sum()
    }

    /// All of them, as they are now.
    pub fn telemetry(&self) -> Vec<LeaseTelemetry> {
        let book = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        book.iter()
            .map(|(lease, counters)| {
                let mut telemetry = LeaseTelemetry::new(*lease);
                counters.add_to(&mut telemetry);
                telemetry
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn telemetry_names_what_was_dropped() {
        let book = LeaseBook::default();
        let lease = LeaseId::new(7).expect("small");
        let counters = book.open(lease);
        counters.tx_packets.add(1);
        counters.tx_bytes.add(100);
        counters.count_drop(DropReason::Spoofed);
        counters.count_drop(DropReason::Spoofed);
        let telemetry = book.telemetry();
        assert_eq!(telemetry.len(), 1);
        assert_eq!((telemetry[0].tx_packets, telemetry[0].tx_bytes), (1, 100));
        assert_eq!(telemetry[0].drops, BTreeMap::from([("spoofed-source".to_owned(), 2)]));
        book.close(lease);
        assert!(book.telemetry().is_empty());
    }

    #[test]
    fn every_reason_is_explained() {
        let page = include_str!("../../docs/network.md");
        let reasons = DropReason::ALL.iter().map(|reason| reason.name());
        for name in reasons.chain(FrameFault::ALL.map(|(_, name)| name)) {
            assert!(page.contains(&format!("`{name}`")), "docs/network.md does not explain {name}");
        }
    }
}
