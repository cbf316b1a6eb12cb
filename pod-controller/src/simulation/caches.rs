//! What lies in the caches of hosts: every line of every region that an endpoint was ever given, until it was flushed.

use std::collections::{BTreeMap, BTreeSet};

use cxl_pool::{Area, EndpointId, HostId};
use pod_protocol::ids::RegionId;

/// Places by their first line. They never overlap: that is what is checked.
#[derive(Debug, Default)]
pub(crate) struct Caches {
    by_start: BTreeMap<u64, Place>,
}

#[derive(Debug)]
struct Place {
    region: RegionId,
    end: u64,
    holders: BTreeSet<EndpointId>,
}

impl Caches {
    /// An endpoint is given a region. Says who else may still write there, under another number.
    pub(crate) fn touch(&mut self, endpoint: EndpointId, region: RegionId, area: Area) -> Result<(), String> {
        let (start, end) = (area.start.get(), area.start.get() + area.lines.get());
        let before = self.by_start.range(..end).next_back().filter(|(_, place)| place.end > start);
        match before {
            Some((_, place)) if place.region != region => Err(format!(
                "{endpoint} is given {region} at {area:?}, where {} still hold {}",
                place.holders.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                place.region
            )),
            _ => {
                let place =
                    self.by_start.entry(start).or_insert(Place { region, end, holders: BTreeSet::new() });
                place.holders.insert(endpoint);
                Ok(())
            }
        }
    }

    /// Somebody writes to an area that is nobody's. Says whose it is, if it is not so.
    pub(crate) fn clear(&self, area: Area) -> Result<(), String> {
        let (start, end) = (area.start.get(), area.start.get() + area.lines.get());
        match self.by_start.range(..end).next_back().filter(|(_, place)| place.end > start) {
            Some((_, place)) => Err(format!(
                "a ring is cleared at {area:?}, where {} have {}",
                place.holders.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
                place.region
            )),
            None => Ok(()),
        }
    }

    /// An endpoint has flushed an area.
    pub(crate) fn flush(&mut self, endpoint: EndpointId, area: Area) {
        if let Some(place) = self.by_start.get_mut(&area.start.get()) {
            place.holders.remove(&endpoint);
            if place.holders.is_empty() {
                self.by_start.remove(&area.start.get());
            }
        }
    }

    /// A host lost its power, and its caches with it.
    pub(crate) fn lose(&mut self, host: HostId) {
        self.by_start.retain(|_, place| {
            place.holders.retain(|holder| holder.host != host);
            !place.holders.is_empty()
        });
    }
}
