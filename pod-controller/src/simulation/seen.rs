//! How much of what may happen did.

use super::deeds::Deed;
use super::kinds::Kind;
use super::tally::Tally;

/// What the network did, and the controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Messages to the controller.
    pub(crate) said: u64,
    /// Of them, those heard before what somebody else had said long before.
    pub(crate) overtook: u64,
    /// Messages, either way, that were on their way when their connection ended.
    pub(crate) lost: u64,
    /// Orders that were given up although their answer was on its way.
    pub(crate) late: u64,
    /// Regions that were given out.
    pub(crate) given: u64,
    /// Of them, those where another host had one before.
    pub(crate) given_on: u64,
    /// How often leases were moved off NICs that carried too much, and volumes off SSDs.
    pub(crate) moved: [u64; 2],
    /// What went wrong otherwise.
    pub(crate) faults: Tally<Kind>,
    /// What was asked for and granted.
    pub(crate) deeds: Tally<Deed>,
}

impl Seen {
    /// With what was seen elsewhere.
    pub(crate) fn add(&mut self, more: &Self) {
        self.said += more.said;
        self.overtook += more.overtook;
        self.lost += more.lost;
        self.late += more.late;
        self.given += more.given;
        self.given_on += more.given_on;
        self.moved = std::array::from_fn(|kind| self.moved[kind] + more.moved[kind]);
        self.faults.add(&more.faults);
        self.deeds.add(&more.deeds);
    }
}
