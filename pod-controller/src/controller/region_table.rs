//! The controller's regions, as its table in the pool shows them.

use std::collections::BTreeSet;

use cxl_pool::regions::{Purpose, RegionEntry, RegionState, TableFull, TableVersion, TableWriter};
use cxl_pool::{Layout, Memory, ReplicaId};
use pod_protocol::ids::RegionId;
use pod_state::{self as state, Region, RegionUse, Regions};

/// The table of one leader.
#[derive(Debug)]
pub struct RegionTable {
    writer: TableWriter,
    /// It was told of all regions, and of all changes since.
    is_whole: bool,
}

impl RegionTable {
    /// A table that shows nothing yet.
    pub fn new(layout: &Layout, replica: ReplicaId) -> Self {
        Self { writer: TableWriter::new(layout, replica), is_whole: false }
    }

    /// Shows the regions as they are. These may have changed since it was asked to before; without that, all.
    pub fn publish<M: Memory>(
        &mut self,
        memory: &M,
        version: TableVersion,
        regions: &Regions,
        changed: Option<BTreeSet<RegionId>>,
    ) {
        let told = match changed.filter(|_| self.is_whole) {
            Some(changed) => self.update(regions, &changed),
            None => self.show_all(regions),
        };
        self.is_whole = told.is_ok();
        match told {
            Ok(()) => self.writer.publish(memory, version),
            Err(error) => tracing::error!("the region table in the pool is out of date: {error}"),
        }
    }

    fn show_all(&mut self, regions: &Regions) -> Result<(), TableFull> {
        self.writer.clear();
        regions.iter().try_for_each(|region| self.writer.set(&entry(region)))
    }

    fn update(&mut self, regions: &Regions, changed: &BTreeSet<RegionId>) -> Result<(), TableFull> {
        // First, since others may need their room.
        for gone in changed.iter().filter(|id| regions.get(**id).is_none()) {
            self.writer.remove(gone.get());
        }
        let mut there = changed.iter().filter_map(|id| regions.get(*id));
        there.try_for_each(|region| self.writer.set(&entry(region)))
    }
}

fn entry(region: &Region) -> RegionEntry {
    RegionEntry {
        id: region.id.get(),
        area: region.area,
        holder: region.writer.host,
        purpose: match region.purpose {
            state::Purpose::Ring(_) => Purpose::Ring,
            state::Purpose::Transmit(_) => Purpose::TxArea,
            state::Purpose::Receive(_) => Purpose::RxArea,
            // The table in the pool has no word of its own for the others.
            state::Purpose::Data(_)
            | state::Purpose::Ram(_)
            | state::Purpose::Board(_)
            | state::Purpose::Nothing => Purpose::DataArea,
        },
        state: match region.usage {
            RegionUse::InUse => RegionState::Leased,
            RegionUse::Quarantined | RegionUse::Failed => RegionState::Quarantined,
        },
    }
}
