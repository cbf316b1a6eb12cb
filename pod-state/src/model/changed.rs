//! What commands changed of a state, to compare that with other states without looking at all of them.

use std::hash::{DefaultHasher, Hasher};
use std::io;

use serde::Serialize;

use crate::State;
use crate::shadow::Rows;

/// The rows that commands have touched, and with them what every command may change.
#[derive(Clone, Debug)]
pub struct Changed(Option<Rows>);

impl Changed {
    /// What was touched since this was asked before; all, where nobody has asked yet.
    pub fn take(state: &mut State) -> Self {
        Self(state.take_uncopied())
    }

    /// A number for all of it, as it is in a state.
    pub fn digest(&self, state: &State) -> u64 {
        let mut digest = Digest::default();
        let Some(rows) = &self.0 else {
            digest.add(state);
            return digest.0.finish();
        };
        digest.add(&(state.index, state.failovers, state.short, &state.last, state.fabric.last));
        digest.add(&(
            &state.drained_hosts,
            &state.unbacked,
            state.hosts.len(),
            state.types.len(),
            state.keys.latest(),
        ));
        rows.endpoints.iter().for_each(|id| digest.add(&(id, state.endpoints.get(id))));
        rows.devices.iter().for_each(|id| digest.add(&(id, state.devices.get(id))));
        rows.volumes.iter().for_each(|id| digest.add(&(id, state.volumes.get(id))));
        rows.instances.iter().for_each(|id| digest.add(&(id, state.instances.get(id))));
        rows.leases.iter().for_each(|id| digest.add(&(id, state.leases.get(id))));
        rows.channels.iter().for_each(|id| digest.add(&(id, state.channels.get(id))));
        rows.boards.iter().for_each(|id| digest.add(&(id, state.fabric.boards.get(id))));
        rows.mchannels.iter().for_each(|id| digest.add(&(id, state.fabric.mchannels.get(id))));
        rows.regions.iter().for_each(|id| digest.add(&(id, state.regions.get(*id))));
        digest.0.finish()
    }
}

#[derive(Default)]
struct Digest(DefaultHasher);

impl Digest {
    fn add(&mut self, what: &impl Serialize) {
        // A digest takes any bytes, and rows are kept as JSON wherever a state is: what cannot be written fails the test that asks.
        serde_json::to_writer(self, what).expect("a state is JSON");
    }
}

impl io::Write for Digest {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{guest_with_volume, pod_with_ssds};

    #[test]
    fn states_that_differ_in_what_was_changed_have_other_digests() {
        let mut state = pod_with_ssds(&[(None, None)]);
        assert!(Changed::take(&mut state).0.is_none(), "at first all is looked at");
        guest_with_volume(&mut state, "v0", 1, 2, 1).expect("room");
        let before = state.clone();
        let changed = Changed::take(&mut state);
        assert_eq!(changed.digest(&state), changed.digest(&before));

        let lease = state.leases.values().next().expect("there is one").id;
        let volume = state.volumes.values().next().expect("there is one").id;
        let mut others = [state.clone(), state.clone(), state.clone(), state.clone()];
        others[0].leases.get_mut(&lease).expect("it is there").socket.push('x');
        others[1].volumes.get_mut(&volume).expect("it is there").size_bytes += 1;
        others[2].volumes.remove(&volume);
        others[3].last.lease += 1;
        for (number, other) in others.iter().enumerate() {
            assert_ne!(changed.digest(other), changed.digest(&state), "{number}");
        }
        // Of what was not touched it says nothing.
        let nothing = Changed::take(&mut state);
        assert_eq!(nothing.digest(&others[0]), nothing.digest(&state));
    }
}
