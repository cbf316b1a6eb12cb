//! Memory of the pool that cannot be read any more, and who knows of it.

use std::collections::BTreeMap;

use cxl_pool::{Area, EndpointId, LineCount, LineOffset};
use pod_protocol::objects::Object;

use super::daemon::areas_of;

/// Each takes a whole region from the pool for good.
const FAILURES_MAX: usize = 3;

/// What failed.
#[derive(Debug, Default)]
pub(crate) struct FailedMemory {
    /// What lives of an endpoint noted before they ended: the next one tells when it joins.
    noted: BTreeMap<EndpointId, Vec<Area>>,
    /// What a controller was told, and has kept.
    kept: Vec<Area>,
}

impl FailedMemory {
    /// Whether more may fail.
    pub(super) fn may_fail(&self) -> bool {
        self.noted.values().map(Vec::len).sum::<usize>() < FAILURES_MAX
    }

    /// An endpoint met a line that cannot be read.
    pub(super) fn note(&mut self, endpoint: EndpointId, line: LineOffset) {
        self.noted.entry(endpoint).or_default().push(Area::new(line, LineCount::new(1)));
    }

    /// What an endpoint tells when it joins.
    pub(super) fn told_by(&self, endpoint: EndpointId) -> Vec<Area> {
        self.noted.get(&endpoint).cloned().unwrap_or_default()
    }

    /// The join of an endpoint was accepted, and all that it told is kept.
    pub(super) fn keep(&mut self, endpoint: EndpointId) {
        let new = self.told_by(endpoint).into_iter().filter(|area| !self.kept.contains(area));
        let new: Vec<Area> = new.collect();
        self.kept.extend(new);
    }

    /// What an object has of memory that is known to have failed.
    pub(super) fn is_in(&self, object: &Object) -> Option<Area> {
        areas_of(object).into_iter().find(|area| self.holds(area))
    }

    /// Whether a part of an area is known to have failed.
    pub(super) fn holds(&self, area: &Area) -> bool {
        self.kept.iter().any(|failed| failed.overlaps(area))
    }
}
