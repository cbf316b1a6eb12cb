//! What was changed of regions: what a command that turns out to be impossible takes back, and what a copy has yet to see.

use std::collections::BTreeSet;

use cxl_pool::EndpointId;
use pod_protocol::ids::RegionId;

use super::{Region, Regions};

/// See the [module](self). No part of the state: regions are alike whatever was changed to make them so.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// The number that was given last before the command.
    last: u32,
    /// What the command did, and how that is taken back.
    steps: Vec<Step>,
    /// The command changed something, whether or not it can be taken back.
    pub(super) changed: bool,
    /// What was changed since somebody took a copy, if somebody does.
    uncopied: Option<BTreeSet<RegionId>>,
    /// What was changed since the regions were published, if somebody does.
    unpublished: Option<BTreeSet<RegionId>>,
}

#[derive(Debug)]
pub(super) enum Step {
    Came(RegionId),
    Held(RegionId, EndpointId),
    Was(Box<Region>),
}

impl Changes {
    /// All regions may be other ones.
    pub(super) fn all() -> Self {
        Self { changed: true, ..Self::default() }
    }

    /// What can be taken back.
    pub(super) fn note(&mut self, step: Step) {
        let id = match &step {
            Step::Came(id) | Step::Held(id, _) => *id,
            Step::Was(region) => region.id,
        };
        self.steps.push(step);
        self.note_for_good(id);
    }

    /// What is not taken back.
    pub(super) fn note_for_good(&mut self, id: RegionId) {
        self.changed = true;
        for waiting in [&mut self.uncopied, &mut self.unpublished].into_iter().flatten() {
            waiting.insert(id);
        }
    }
}

/// A copy has none.
impl Clone for Changes {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Changes {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for Changes {}

impl Regions {
    /// What was changed is not taken back any more.
    pub fn commit(&mut self) {
        self.changes.steps.clear();
        self.changes.last = self.last;
        self.changes.changed = false;
    }

    /// Whether the command has changed anything.
    pub const fn has_changed(&self) -> bool {
        self.changes.changed
    }

    /// Who may have to let go of other regions than before the command, or has others.
    pub fn touched(&self) -> impl Iterator<Item = EndpointId> {
        let steps = &self.changes.steps;
        let before = steps.iter().filter_map(|step| match step {
            Step::Was(region) => Some(&**region),
            Step::Came(_) | Step::Held(..) => None,
        });
        let now = steps.iter().filter_map(|step| match step {
            Step::Came(id) | Step::Held(id, _) => self.by_id.get(id),
            Step::Was(_) => None,
        });
        before.chain(now).flat_map(|region| region.holders.iter().copied().chain([region.writer]))
    }

    /// Makes all regions what they were before the command.
    pub fn take_back(&mut self) {
        for step in std::mem::take(&mut self.changes.steps).into_iter().rev() {
            match step {
                Step::Came(id) => self.cancel(id),
                Step::Held(id, holder) => {
                    if let Some(region) = self.by_id.get_mut(&id) {
                        region.holders.remove(&holder);
                    }
                }
                Step::Was(region) => self.put(*region),
            }
        }
        // Numbers are given again that nobody was told of.
        self.last = self.changes.last;
        self.changes.steps.clear();
        self.changes.changed = false;
    }

    /// The regions that may be other ones than when this was asked before; nothing if all may be.
    pub fn take_uncopied(&mut self) -> Option<BTreeSet<RegionId>> {
        self.changes.uncopied.replace(BTreeSet::new())
    }

    /// What [`Self::take_uncopied`] would return, which is left.
    #[cfg(any(test, feature = "model"))]
    pub fn uncopied(&self) -> Option<&BTreeSet<RegionId>> {
        self.changes.uncopied.as_ref()
    }

    /// The regions that may be other ones, or gone, since this was asked before; nothing if all may be.
    pub fn take_unpublished(&mut self) -> Option<BTreeSet<RegionId>> {
        self.changes.unpublished.replace(BTreeSet::new())
    }

    /// Makes these regions what they are among others, and all else but what only saves time.
    pub fn copy_regions(&mut self, others: &Self, ids: &BTreeSet<RegionId>) {
        (self.data, self.last, self.max) = (others.data, others.last, others.max);
        // They may have changed places.
        for id in ids {
            if let Some(old) = self.by_id.remove(id) {
                self.by_start.remove(&old.area.start);
                self.pending.remove(&old);
            }
        }
        for region in ids.iter().filter_map(|id| others.by_id.get(id)) {
            self.put(region.clone());
        }
    }

    fn put(&mut self, region: Region) {
        if let Some(old) = self.by_id.remove(&region.id) {
            self.pending.remove(&old);
        }
        self.pending.add(&region);
        self.by_start.insert(region.area.start, region.placed());
        self.by_id.insert(region.id, region);
    }
}
