use cxl_channel::RingPlacement;
use cxl_pool::{Area, LineCount, REGION_SLOTS_LEAST};
use pod_protocol::objects::{Engine, REGISTRATIONS_MAX};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Words of a network message.
const NET_WORDS: usize = 2;
/// Words of a storage message.
const BLK_WORDS: usize = 8;

/// Sizes and limits. They apply to what is allocated from now on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The pool that the state is about.
    pub pool: Uuid,
    /// Where regions may lie.
    pub data: Area,
    /// Of the area that an instance's NIC sends from.
    pub tx_area: LineCount,
    /// Of the area that a NIC receives into.
    pub rx_area: LineCount,
    /// Of the area that the data of a disk's requests lies in.
    pub data_area: LineCount,
    /// Of each ring between network engines.
    pub net_slots: u32,
    /// Of each ring between storage engines.
    pub blk_slots: u32,
    /// The most receive buffers that an instance may hold.
    pub rx_quota_buffers: u32,
    /// Request queues of a disk.
    pub disk_queues: u16,
    /// The longest name that a socket's file may have.
    pub socket_name_bytes_max: usize,
    /// How many regions there may be: what the table in the pool has room for.
    #[serde(default = "regions_max")]
    pub regions_max: usize,
    /// How many leases may lean on a NIC: use it, or have it as their backup.
    #[serde(default = "nic_leases_max")]
    pub nic_leases_max: u32,
    /// How much of devices may be promised.
    #[serde(default)]
    pub placement: PlacementPolicy,
    /// The minor of the version that the whole pod speaks. Controllers of 1.0 neither write nor read it.
    #[serde(default, skip_serializing_if = "is_first")]
    pub protocol_minor: u16,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
const fn is_first(minor: &u16) -> bool {
    *minor == 0
}

/// A NIC's backend has room for so many, but for those that are about to leave it.
pub const NIC_LEASES_MAX: u32 = 4000;

const _: () = assert!(NIC_LEASES_MAX as usize + 90 <= REGISTRATIONS_MAX);

const fn nic_leases_max() -> u32 {
    NIC_LEASES_MAX
}

/// What the region table of each pool has room for at least.
pub const REGIONS_MAX: usize = REGION_SLOTS_LEAST as usize;

const fn regions_max() -> usize {
    REGIONS_MAX
}

/// How much of devices may be promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementPolicy {
    /// Of a NIC's speed, how much may be reserved, in percent; above 100, not all of it can be used at once.
    pub nic_overcommit_percent: u32,
    /// Of an SSD's requests per second, how much may be reserved, in percent.
    pub ssd_overcommit_percent: u32,
    /// Whether bandwidth is reserved only where a backup NIC of another host could carry it too.
    pub prove_failover: bool,
    /// Whether guests may have their RAM in the pool. Their VMMs can reach all of it then.
    #[serde(default = "allowed")]
    pub guest_ram: bool,
    /// Which NIC of those that would do a lease gets, beside what is nearer.
    #[serde(default)]
    pub nics: Filling,
    /// Which SSD a volume gets.
    #[serde(default)]
    pub ssds: Filling,
}

/// In which order devices are filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Filling {
    /// The one with the largest share free comes first: each has little to do, and the failure of one concerns few.
    #[default]
    Spread,
    /// The one with the smallest share free that has room comes first: what is large finds room later, and fewer devices do.
    Pack,
}

const fn allowed() -> bool {
    true
}

impl Default for PlacementPolicy {
    fn default() -> Self {
        Self {
            nic_overcommit_percent: 100,
            ssd_overcommit_percent: 100,
            prove_failover: true,
            guest_ram: true,
            nics: Filling::Spread,
            ssds: Filling::Spread,
        }
    }
}

impl Options {
    /// How many slots each ring of an engine's channel has.
    pub(super) fn slots(&self, engine: Engine) -> u32 {
        match engine {
            Engine::Net => self.net_slots,
            Engine::Blk => self.blk_slots,
        }
    }

    /// How many lines each ring of an engine's channel takes.
    pub(super) fn ring_lines(&self, engine: Engine) -> LineCount {
        let words = match engine {
            Engine::Net => NET_WORDS,
            Engine::Blk => BLK_WORDS,
        };
        RingPlacement::lines(self.slots(engine), words)
    }
}
