//! Which objects the endpoint holds, and which of them the controller has confirmed since its latest grant.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::LeaseId;
use crate::objects::{Object, ObjectId};

/// The objects of an endpoint. Decides; the handler acts.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// What was applied last, or nothing while the last application failed.
    held: BTreeMap<ObjectId, Option<Object>>,
    confirmed: BTreeSet<ObjectId>,
}

impl Ledger {
    /// The controller is about to say again what it wants.
    pub(super) fn begin(&mut self) {
        self.confirmed.clear();
    }

    /// The controller wants this. Returns whether that changes anything.
    pub(super) fn wants(&mut self, object: &Object) -> bool {
        let id = object.id();
        let changes = self.held.get(&id).is_none_or(|held| held.as_ref() != Some(object));
        self.confirmed.insert(id);
        changes
    }

    /// The handler took an object over, or failed to: then some of it may be there.
    pub(super) fn applied(&mut self, id: ObjectId, object: Option<Object>) {
        self.held.insert(id, object);
    }

    /// The handler gave an object up.
    pub(super) fn removed(&mut self, id: &ObjectId) {
        self.held.remove(id);
        self.confirmed.remove(id);
    }

    /// Everything was said: what is held but was not mentioned, users before what they use.
    pub(super) fn unconfirmed(&self) -> Vec<ObjectId> {
        self.held.keys().rev().filter(|id| !self.confirmed.contains(id)).cloned().collect()
    }

    /// Whether the device of a lease is held, or some of it.
    pub(super) fn has_lease(&self, lease: LeaseId) -> bool {
        [ObjectId::Port(lease), ObjectId::Disk(lease)].iter().any(|id| self.held.contains_key(id))
    }

    /// Whether nothing is held that anybody uses.
    pub(super) fn is_empty(&self) -> bool {
        self.held.keys().all(|id| *id == ObjectId::Protocol)
    }
}

#[cfg(test)]
mod tests {
    use cxl_pool::{Area, LineCount, LineOffset};

    use super::*;
    use crate::objects::NicObject;

    fn nic(name: &str, lines: u64) -> Object {
        let rx_area = Area::new(LineOffset::new(0), LineCount::new(lines));
        Object::Nic(NicObject { nic: name.into(), rx_area })
    }

    fn apply(ledger: &mut Ledger, object: Object) -> bool {
        let changes = ledger.wants(&object);
        ledger.applied(object.id(), Some(object));
        changes
    }

    #[test]
    fn equal_object_changes_nothing_and_a_different_one_does() {
        let mut ledger = Ledger::default();
        assert!(apply(&mut ledger, nic("a", 1)));
        assert!(!apply(&mut ledger, nic("a", 1)));
        assert!(apply(&mut ledger, nic("a", 2)));
    }

    #[test]
    fn failed_object_is_applied_again() {
        let mut ledger = Ledger::default();
        assert!(ledger.wants(&nic("a", 1)));
        ledger.applied(nic("a", 1).id(), None);
        assert!(ledger.wants(&nic("a", 1)));
    }

    #[test]
    fn only_what_a_new_grant_does_not_mention_is_unconfirmed() {
        let mut ledger = Ledger::default();
        apply(&mut ledger, nic("a", 1));
        apply(&mut ledger, nic("b", 1));
        assert!(ledger.unconfirmed().is_empty());
        ledger.begin();
        assert!(!apply(&mut ledger, nic("b", 1)));
        assert_eq!(ledger.unconfirmed(), [nic("a", 1).id()]);
        ledger.removed(&nic("a", 1).id());
        assert!(ledger.unconfirmed().is_empty() && !ledger.is_empty());
    }
}
