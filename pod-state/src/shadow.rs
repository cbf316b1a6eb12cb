//! Copies of a state for others to read, each brought up to date by what was changed since it was made.
//!
//! There are two for as long as readers are quick: what they have now, and one that they had before and have given back, which becomes
//! the next one. Where somebody has not given that back, all of the state is copied anew, once: after that there are three, so that
//! one may be read for as long as a whole state takes to be written.

use std::collections::BTreeSet;
use std::sync::Arc;

use cxl_pool::EndpointId;
use pod_protocol::ids::{ChannelId, InstanceId, LeaseId, RegionId, VolumeId};

use super::{DeviceId, Fabric, State};

/// Rows that may be other ones than a copy has.
#[derive(Clone, Debug, Default)]
pub(super) struct Rows {
    pub(super) endpoints: BTreeSet<EndpointId>,
    pub(super) devices: BTreeSet<DeviceId>,
    pub(super) volumes: BTreeSet<VolumeId>,
    pub(super) instances: BTreeSet<InstanceId>,
    pub(super) leases: BTreeSet<LeaseId>,
    pub(super) channels: BTreeSet<ChannelId>,
    pub(super) boards: BTreeSet<EndpointId>,
    pub(super) mchannels: BTreeSet<InstanceId>,
    pub(super) regions: BTreeSet<RegionId>,
}

/// How many copies there are at most that readers had before.
const FORMER_MOST: usize = 2;
/// How many leases are noted as changed at most: of more, all may have.
const LEASES_MOST: usize = 4096;

/// A copy of a state for others to read, and those before, which are brought up to date by what was changed.
#[derive(Debug, Default)]
pub struct Shadow {
    shown: Option<Arc<State>>,
    /// What readers had before, the oldest first, and what was changed since then.
    former: Vec<(Arc<State>, Rows)>,
    /// Leases that may have changed, if they are few.
    leases: Option<BTreeSet<LeaseId>>,
}

impl Shadow {
    /// A copy of a state, which must always be the same one as it goes on.
    pub fn of(&mut self, state: &mut State) -> Arc<State> {
        if let Some(shown) = self.shown.as_ref().filter(|shown| shown.index == state.index) {
            debug_assert!(is_the_same(shown, state), "what changes the state counts as a command");
            return Arc::clone(shown);
        }
        let changed = state.take_uncopied();
        match &changed {
            Some(changed) => self.former.iter_mut().for_each(|(_, rows)| rows.extend(changed)),
            None => self.former.clear(),
        }
        let noted = self.leases.take().zip(changed.as_ref()).map(|(mut noted, changed)| {
            noted.extend(&changed.leases);
            noted
        });
        self.leases = noted.filter(|noted| noted.len() <= LEASES_MOST);
        let next = self.given_back(state).unwrap_or_else(|| Arc::new(state.clone()));
        debug_assert!(is_the_same(&next, state), "a change was not noted");
        self.former.extend(self.shown.replace(Arc::clone(&next)).zip(changed));
        let excess = self.former.len().saturating_sub(FORMER_MOST);
        self.former.drain(..excess);
        next
    }

    /// The leases that may be other ones in the last copy than in the last one before this was asked; nothing if all may be.
    pub fn take_leases(&mut self) -> Option<BTreeSet<LeaseId>> {
        self.leases.replace(BTreeSet::new())
    }

    /// A copy that nobody reads any more, brought up to date.
    fn given_back(&mut self, state: &State) -> Option<Arc<State>> {
        let at = self.former.iter_mut().position(|(former, _)| Arc::get_mut(former).is_some())?;
        let (mut former, rows) = self.former.remove(at);
        Arc::get_mut(&mut former)?.copy_rows(state, &rows);
        Some(former)
    }
}

/// Whether a copy is one. Of a large state only now and then, in builds that ask: that takes longer than a turn.
fn is_the_same(copy: &State, state: &State) -> bool {
    let parts = state.leases.len().div_ceil(200).max(1) as u64;
    !state.index.is_multiple_of(parts) || *copy == *state
}

impl Rows {
    fn extend(&mut self, more: &Self) {
        self.endpoints.extend(&more.endpoints);
        self.devices.extend(more.devices.iter().cloned());
        self.volumes.extend(&more.volumes);
        self.instances.extend(&more.instances);
        self.leases.extend(&more.leases);
        self.channels.extend(&more.channels);
        self.boards.extend(&more.boards);
        self.mchannels.extend(&more.mchannels);
        self.regions.extend(&more.regions);
    }
}

impl State {
    /// What may be other than when this was asked before; nothing if all may be.
    pub(super) fn take_uncopied(&mut self) -> Option<Rows> {
        if self.known.0.is_none() {
            self.begin();
        }
        self.follow();
        let rows = (
            self.endpoints.take_uncopied(),
            self.devices.take_uncopied(),
            self.volumes.take_uncopied(),
            self.instances.take_uncopied(),
            self.leases.take_uncopied(),
            self.channels.take_uncopied(),
            self.fabric.boards.take_uncopied(),
            self.fabric.mchannels.take_uncopied(),
            self.regions.take_uncopied(),
        );
        Some(Rows {
            endpoints: rows.0?,
            devices: rows.1?,
            volumes: rows.2?,
            instances: rows.3?,
            leases: rows.4?,
            channels: rows.5?,
            boards: rows.6?,
            mchannels: rows.7?,
            regions: rows.8?,
        })
    }

    /// The rows that commands have touched since a copy was made; nothing if nobody makes copies.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn uncopied(&self) -> Option<Rows> {
        Some(Rows {
            endpoints: self.endpoints.uncopied()?,
            devices: self.devices.uncopied()?,
            volumes: self.volumes.uncopied()?,
            instances: self.instances.uncopied()?,
            leases: self.leases.uncopied()?,
            channels: self.channels.uncopied()?,
            boards: self.fabric.boards.uncopied()?,
            mchannels: self.fabric.mchannels.uncopied()?,
            regions: self.regions.uncopied()?.clone(),
        })
    }

    /// Makes a copy what the state is now, where no other rows than these are other ones.
    fn copy_rows(&mut self, now: &Self, rows: &Rows) {
        // Without a rest, so that nothing is forgotten that is added.
        let Self {
            index,
            options,
            hosts,
            endpoints,
            devices,
            volumes,
            instances,
            types,
            leases,
            regions,
            channels,
            fabric,
            drained_hosts,
            host_labels,
            failovers,
            unbacked,
            keys,
            last,
            short,
            known: _,
        } = self;
        (*index, *failovers, *short) = (now.index, now.failovers, now.short);
        options.clone_from(&now.options);
        hosts.clone_from(&now.hosts);
        types.clone_from(&now.types);
        drained_hosts.clone_from(&now.drained_hosts);
        host_labels.clone_from(&now.host_labels);
        last.clone_from(&now.last);
        unbacked.clone_from(&now.unbacked);
        if keys.latest() != now.keys.latest() {
            keys.clone_from(&now.keys);
        }
        endpoints.copy_rows(&now.endpoints, &rows.endpoints);
        devices.copy_rows(&now.devices, &rows.devices);
        volumes.copy_rows(&now.volumes, &rows.volumes);
        instances.copy_rows(&now.instances, &rows.instances);
        leases.copy_rows(&now.leases, &rows.leases);
        channels.copy_rows(&now.channels, &rows.channels);
        regions.copy_regions(&now.regions, &rows.regions);
        fabric.copy_rows(&now.fabric, &rows.boards, &rows.mchannels);
    }
}

impl Fabric {
    fn copy_rows(&mut self, now: &Self, boards: &BTreeSet<EndpointId>, mchannels: &BTreeSet<InstanceId>) {
        let Self { window_us, sample_us, elements, tenants, mchannels: ours, boards: held, last } = self;
        (*window_us, *sample_us, *last) = (now.window_us, now.sample_us, now.last);
        elements.clone_from(&now.elements);
        tenants.clone_from(&now.tenants);
        ours.copy_rows(&now.mchannels, mchannels);
        held.copy_rows(&now.boards, boards);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Command;
    use crate::model::{guest, guest_with_volume, pod_with_ssds};

    /// A pod that changes with each step: instances come and go, and with them leases, channels and regions.
    fn step(state: &mut State, number: u16) {
        if number % 3 == 2 {
            let name = format!("vm-v{}", number - 1);
            state.carry_out(&Command::DeleteInstance { name, force: true }).expect("it is there");
        } else {
            guest_with_volume(state, &format!("v{number}"), 1, 2, 1).expect("room");
        }
    }

    #[test]
    fn a_copy_that_was_given_back_is_the_next_one_and_one_that_is_read_stays() {
        let (mut state, mut shadow) = (pod_with_ssds(&[(None, None)]), Shadow::default());
        let mut places = BTreeSet::new();
        for number in 0..9 {
            step(&mut state, number);
            let shown = shadow.of(&mut state);
            assert_eq!(*shown, state);
            places.insert(Arc::as_ptr(&shown));
        }
        assert_eq!(places.len(), 2, "there are two, by turns");

        let read = shadow.of(&mut state);
        let as_it_was = State::clone(&read);
        let (mut places, mut shown) = (BTreeSet::new(), Vec::new());
        for number in 9..18 {
            step(&mut state, number);
            let copy = shadow.of(&mut state);
            assert_eq!(*copy, state);
            assert_eq!(*read, as_it_was, "somebody reads it");
            places.insert(Arc::as_ptr(&copy));
            // Whoever looks at a copy has it until there is the next one, so that no other one gets its place.
            shown.truncate(0);
            shown.push(copy);
        }
        assert_eq!(places.len(), 2, "there are two more, by turns, although the third is read for long");
        drop(read);
        step(&mut state, 18);
        assert_eq!(*shadow.of(&mut state), state);
    }

    #[test]
    fn leases_that_may_have_changed_are_noted_until_that_is_asked() {
        let (mut state, mut shadow) = (pod_with_ssds(&[(None, None)]), Shadow::default());
        step(&mut state, 0);
        let before = shadow.of(&mut state);
        assert_eq!(shadow.take_leases(), None, "all may");
        step(&mut state, 1);
        shadow.of(&mut state);
        step(&mut state, 3);
        let after = shadow.of(&mut state);
        let noted = shadow.take_leases().expect("few are");
        let all = before.leases.keys().chain(after.leases.keys());
        let changed: BTreeSet<LeaseId> =
            all.filter(|id| before.leases.get(id) != after.leases.get(id)).copied().collect();
        assert!(noted.is_superset(&changed) && !changed.is_empty());
        assert_eq!(shadow.take_leases(), Some(BTreeSet::new()));
    }

    #[test]
    fn what_changes_nothing_leaves_the_copy_and_what_is_refused_is_not_in_the_next_one() {
        let (mut state, mut shadow) = (pod_with_ssds(&[(None, None)]), Shadow::default());
        step(&mut state, 0);
        let shown = shadow.of(&mut state);
        // A part of it was done before it turned out to be impossible.
        assert!(state.carry_out(&guest("vm2", &["v0"])).is_err(), "somebody has the volume");
        assert!(Arc::ptr_eq(&shown, &shadow.of(&mut state)));
        drop(shown);
        step(&mut state, 1);
        assert_eq!(*shadow.of(&mut state), state);
    }
}
