//! Where the control structures lie in the pool. All of it follows from the superblock.

use crate::{
    Area, ByteOffset, EndpointId, LINE_BYTES, LineCount, LineOffset, PoolError, ReplicaId, Superblock,
};

/// The data area begins at a multiple of this and is one long: the size of a huge page.
pub const DATA_ALIGN_BYTES: u64 = 2 << 20;

/// The slots of a control ring, 64 B each.
pub const CONTROL_RING_SLOTS: u32 = 256;

/// A ring's slots, its sender's line and its receiver's line.
const CONTROL_RING_LINES: u64 = CONTROL_RING_SLOTS as u64 + 2;

const SUPERBLOCK_LINES: u64 = 4096 / LINE_BYTES as u64;

/// Role slots of each host. More than there are roles, so that a role can be added in a minor version.
const ROLE_SLOTS: u64 = 8;

/// Of an endpoint: hello (2 lines), heartbeat, one spare.
const ENDPOINT_LINES: u64 = 4;
/// Of the first host: role slots that no role has. In a replica's part of the pool they carry what it says to others.
const REPLICA_ROLE_SLOTS: std::ops::Range<u64> = 5..ROLE_SLOTS;
/// Of a replica: hello and heartbeat as a controller, then hello and heartbeat as one of several.
const REPLICA_LINES: u64 = 4;
/// Of a replica for one endpoint: grant, fence, the ring to the endpoint, the ring from it, two spare.
const LINK_LINES: u64 = 4 + 2 * CONTROL_RING_LINES;

// A replica has a ring to each other one, and a role slot has room for two.
const _: () =
    assert!(REPLICA_SLOTS_LIMIT as u64 - 1 <= 2 * (REPLICA_ROLE_SLOTS.end - REPLICA_ROLE_SLOTS.start));
const _: () = assert!(REPLICA_ROLE_SLOTS.start >= crate::Role::ALL.len() as u64);

const HOST_SLOTS_LIMIT: u16 = 256;
const REPLICA_SLOTS_LIMIT: u16 = 7;

/// How many regions there is room for at least, and in every pool of layout 1.0.
pub const REGION_SLOTS_LEAST: u32 = 4095;
/// How many regions there may be room for at most: the tables of three replicas take 384 MiB then.
pub const REGION_SLOTS_MOST: u32 = (1 << 20) - 1;
/// Where nobody says otherwise there is room for a region for each so many bytes of the pool. Few are that small.
const BYTES_PER_REGION: u64 = 256 << 10;

/// How many regions there is room for in a new pool of this size where nobody says otherwise.
pub fn usual_region_slots(size_bytes: u64) -> u32 {
    let slots = (size_bytes / BYTES_PER_REGION).saturating_sub(1);
    u32::try_from(slots).unwrap_or(u32::MAX).clamp(REGION_SLOTS_LEAST, REGION_SLOTS_MOST)
}

/// Where everything lies in a pool. Nobody stores an address of a control structure: each is computed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    host_slots: u16,
    replica_slots: u16,
    region_slots: u32,
    size_bytes: u64,
}

impl Layout {
    /// The layout of a pool with this superblock.
    pub fn of(superblock: &Superblock) -> Result<Self, PoolError> {
        let Superblock { size_bytes, host_slots, replica_slots, region_slots, .. } = *superblock;
        Self::new(size_bytes, host_slots, replica_slots, region_slots)
    }

    /// The layout of a pool of this size, which must be a multiple of 2 MiB and leave a data area.
    pub fn new(
        size_bytes: u64,
        host_slots: u16,
        replica_slots: u16,
        region_slots: u32,
    ) -> Result<Self, PoolError> {
        for (what, value, least, most) in [
            ("the number of hosts", u32::from(host_slots), 1, u32::from(HOST_SLOTS_LIMIT)),
            ("the number of controller replicas", u32::from(replica_slots), 1, REPLICA_SLOTS_LIMIT.into()),
            ("the number of regions", region_slots, REGION_SLOTS_LEAST, REGION_SLOTS_MOST),
        ] {
            if value < least || value > most {
                return Err(PoolError::Slots { what, value, least, most });
            }
        }
        let layout = Self { host_slots, replica_slots, region_slots, size_bytes };
        let least_bytes = layout.data_start_bytes() + DATA_ALIGN_BYTES;
        if size_bytes < least_bytes || !size_bytes.is_multiple_of(DATA_ALIGN_BYTES) {
            return Err(PoolError::Size { size_bytes, host_slots, least_bytes });
        }
        Ok(layout)
    }

    /// Whether the pool has a slot for this endpoint.
    pub fn has(&self, endpoint: EndpointId) -> bool {
        (1..=self.host_slots).contains(&endpoint.host.get())
    }

    /// Every endpoint that the pool has a slot for.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointId> + use<> {
        (1..=self.host_slots).flat_map(|host| {
            crate::Role::ALL.into_iter().map(move |role| EndpointId::new(crate::HostId::new(host), role))
        })
    }

    /// Every controller replica that the pool has a slot for.
    pub fn replicas(&self) -> impl Iterator<Item = ReplicaId> + use<> {
        (0..self.replica_slots).map(ReplicaId::new)
    }

    /// How many regions each region table has room for.
    pub const fn region_slots(&self) -> u32 {
        self.region_slots
    }

    /// The superblock's page.
    pub fn superblock(&self) -> Area {
        area(0, SUPERBLOCK_LINES)
    }

    /// All control structures: everything but the data area.
    pub fn control(&self) -> Area {
        area(0, self.data().start.get())
    }

    /// The endpoint's hello. Writer: the endpoint.
    pub fn hello(&self, endpoint: EndpointId) -> LineOffset {
        LineOffset::new(self.endpoint_start(endpoint))
    }

    /// The word that the endpoint counts up to show that it lives. Writer: the endpoint.
    pub fn heartbeat(&self, endpoint: EndpointId) -> ByteOffset {
        LineOffset::new(self.endpoint_start(endpoint) + 2).bytes()
    }

    /// The replica's hello. Writer: the replica.
    pub fn controller(&self, replica: ReplicaId) -> LineOffset {
        LineOffset::new(self.replica_start(replica))
    }

    /// The word that the replica counts up to show that it lives. Writer: the replica.
    pub fn controller_heartbeat(&self, replica: ReplicaId) -> ByteOffset {
        LineOffset::new(self.replica_start(replica) + 1).bytes()
    }

    /// What the replica says to the others of itself. Writer: the replica.
    pub fn replica_hello(&self, replica: ReplicaId) -> LineOffset {
        LineOffset::new(self.replica_start(replica) + 2)
    }

    /// The word that the replica counts up, leading or not, to show that it lives. Writer: the replica.
    pub fn replica_heartbeat(&self, replica: ReplicaId) -> ByteOffset {
        LineOffset::new(self.replica_start(replica) + 3).bytes()
    }

    /// The ring of messages from one replica to another: [`CONTROL_RING_SLOTS`] slots of 64 B. It lies where the control
    /// rings of roles would be that the first host does not have, so that every pool has room for it.
    pub fn ring_between(&self, from: ReplicaId, to: ReplicaId) -> Area {
        assert!(from != to && to.get() < self.replica_slots, "no ring from replica {from} to {to}");
        let place = u64::from(if to < from { to.get() } else { to.get() - 1 });
        let link = self.link_at(from, REPLICA_ROLE_SLOTS.start + place / 2);
        area(link + 4 + (place % 2) * CONTROL_RING_LINES, CONTROL_RING_LINES)
    }

    /// The two copies, A and B, of the replica's region table. Writer: the replica.
    pub fn region_tables(&self, replica: ReplicaId) -> [Area; 2] {
        let start = self.replica_start(replica) + REPLICA_LINES;
        let lines = self.region_table_lines();
        [area(start, lines), area(start + lines, lines)]
    }

    /// What the replica grants the endpoint. Writer: the replica.
    pub fn grant(&self, replica: ReplicaId, endpoint: EndpointId) -> LineOffset {
        LineOffset::new(self.link_start(replica, endpoint))
    }

    /// Where the replica revokes what it granted the endpoint. Writer: the replica.
    pub fn fence(&self, replica: ReplicaId, endpoint: EndpointId) -> LineOffset {
        LineOffset::new(self.link_start(replica, endpoint) + 1)
    }

    /// The ring of control messages from the replica to the endpoint: [`CONTROL_RING_SLOTS`] slots of 64 B.
    pub fn ring_to_endpoint(&self, replica: ReplicaId, endpoint: EndpointId) -> Area {
        area(self.link_start(replica, endpoint) + 4, CONTROL_RING_LINES)
    }

    /// The ring of control messages from the endpoint to the replica: [`CONTROL_RING_SLOTS`] slots of 64 B.
    pub fn ring_from_endpoint(&self, replica: ReplicaId, endpoint: EndpointId) -> Area {
        area(self.link_start(replica, endpoint) + 4 + CONTROL_RING_LINES, CONTROL_RING_LINES)
    }

    /// Where regions are leased from: the rest of the pool.
    pub fn data(&self) -> Area {
        let start_bytes = self.data_start_bytes();
        Area::new(ByteOffset::new(start_bytes).line(), LineCount::covering(self.size_bytes - start_bytes))
    }

    /// One copy of the region table: a header line and one line for each region.
    fn region_table_lines(&self) -> u64 {
        1 + u64::from(self.region_slots)
    }

    fn endpoint_slots(&self) -> u64 {
        u64::from(self.host_slots) * ROLE_SLOTS
    }

    fn endpoint_slot(&self, endpoint: EndpointId) -> u64 {
        assert!(self.has(endpoint), "the pool has no slot for {endpoint}");
        u64::from(endpoint.host.get() - 1) * ROLE_SLOTS + u64::from(endpoint.role.slot())
    }

    fn endpoint_start(&self, endpoint: EndpointId) -> u64 {
        SUPERBLOCK_LINES + self.endpoint_slot(endpoint) * ENDPOINT_LINES
    }

    fn replica_lines(&self) -> u64 {
        REPLICA_LINES + 2 * self.region_table_lines() + self.endpoint_slots() * LINK_LINES
    }

    fn replica_start(&self, replica: ReplicaId) -> u64 {
        assert!(
            replica.get() < self.replica_slots,
            "the pool has no slot for controller replica {}",
            replica.get()
        );
        SUPERBLOCK_LINES
            + self.endpoint_slots() * ENDPOINT_LINES
            + u64::from(replica.get()) * self.replica_lines()
    }

    fn link_start(&self, replica: ReplicaId, endpoint: EndpointId) -> u64 {
        self.link_at(replica, self.endpoint_slot(endpoint))
    }

    fn link_at(&self, replica: ReplicaId, slot: u64) -> u64 {
        self.replica_start(replica) + REPLICA_LINES + 2 * self.region_table_lines() + slot * LINK_LINES
    }

    fn data_start_bytes(&self) -> u64 {
        let control_lines = SUPERBLOCK_LINES
            + self.endpoint_slots() * ENDPOINT_LINES
            + u64::from(self.replica_slots) * self.replica_lines();
        LineCount::new(control_lines).bytes().next_multiple_of(DATA_ALIGN_BYTES)
    }
}

const fn area(start: u64, lines: u64) -> Area {
    Area::new(LineOffset::new(start), LineCount::new(lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything(layout: &Layout) -> Vec<Area> {
        let mut areas = vec![layout.superblock(), layout.data()];
        for endpoint in layout.endpoints() {
            areas.push(Area::new(layout.hello(endpoint), LineCount::new(2)));
            areas.push(Area::new(layout.heartbeat(endpoint).line(), LineCount::new(1)));
        }
        for replica in layout.replicas() {
            areas.push(Area::new(layout.controller(replica), LineCount::new(1)));
            areas.push(Area::new(layout.controller_heartbeat(replica).line(), LineCount::new(1)));
            areas.push(Area::new(layout.replica_hello(replica), LineCount::new(1)));
            areas.push(Area::new(layout.replica_heartbeat(replica).line(), LineCount::new(1)));
            areas.extend(layout.region_tables(replica));
            for other in layout.replicas().filter(|other| *other != replica) {
                areas.push(layout.ring_between(replica, other));
            }
            for endpoint in layout.endpoints() {
                areas.push(Area::new(layout.grant(replica, endpoint), LineCount::new(1)));
                areas.push(Area::new(layout.fence(replica, endpoint), LineCount::new(1)));
                areas.push(layout.ring_to_endpoint(replica, endpoint));
                areas.push(layout.ring_from_endpoint(replica, endpoint));
            }
        }
        areas
    }

    #[test]
    fn nothing_overlaps_and_everything_is_inside() {
        let least = REGION_SLOTS_LEAST;
        for (hosts, replicas, regions) in [(1, 1, least), (3, 2, 5000), (16, 3, least), (256, 7, 100_000)] {
            let size_bytes = 1 << 30;
            let layout = Layout::new(size_bytes, hosts, replicas, regions).unwrap();
            let mut areas = everything(&layout);
            areas.sort_by_key(|area| area.start);
            for pair in areas.windows(2) {
                assert!(pair[0].end() <= pair[1].start, "{} and {}", pair[0], pair[1]);
            }
            assert_eq!(layout.data().end().bytes().get(), size_bytes);
            assert_eq!(layout.data().start_byte().get() % DATA_ALIGN_BYTES, 0);
        }
    }

    #[test]
    fn sizes_that_leave_no_data_area_are_refused() {
        let layout = Layout::new(1 << 30, 16, 3, REGION_SLOTS_LEAST).unwrap();
        let least = layout.data_start_bytes() + DATA_ALIGN_BYTES;
        assert!(Layout::new(least, 16, 3, REGION_SLOTS_LEAST).is_ok());
        assert!(matches!(
            Layout::new(least - DATA_ALIGN_BYTES, 16, 3, REGION_SLOTS_LEAST),
            Err(PoolError::Size { .. })
        ));
        assert!(matches!(Layout::new(least + 4096, 16, 3, REGION_SLOTS_LEAST), Err(PoolError::Size { .. })));
        assert!(matches!(Layout::new(1 << 30, 0, 3, REGION_SLOTS_LEAST), Err(PoolError::Slots { .. })));
        assert!(matches!(Layout::new(1 << 30, 257, 3, REGION_SLOTS_LEAST), Err(PoolError::Slots { .. })));
        for regions in [0, REGION_SLOTS_LEAST - 1, REGION_SLOTS_MOST + 1] {
            assert!(matches!(Layout::new(1 << 30, 16, 3, regions), Err(PoolError::Slots { .. })));
        }
        // The tables of this many alone would be larger.
        assert!(matches!(Layout::new(64 << 20, 16, 3, REGION_SLOTS_MOST), Err(PoolError::Size { .. })));
    }

    #[test]
    fn larger_pools_have_room_for_more_regions() {
        for (size_bytes, regions) in [
            (16 << 20, REGION_SLOTS_LEAST),
            (1 << 30, REGION_SLOTS_LEAST),
            (8 << 30, 32_767),
            (4 << 40, REGION_SLOTS_MOST),
            (u64::MAX, REGION_SLOTS_MOST),
        ] {
            assert_eq!(usual_region_slots(size_bytes), regions, "{size_bytes}");
        }
    }
}
