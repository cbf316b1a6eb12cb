//! Who gets a frame: the small switch between the instances of one NIC.

use std::collections::HashMap;

use pod_protocol::ids::MacAddress;
use pod_protocol::objects::RegistrationState;

use super::receive_buffers::REGISTRATIONS_MAX;
use super::registration::RegistrationIndex;
use crate::ethernet::Addresses;
use crate::id_hash::IdHash;

/// An address as a number: hashed and compared at once.
type Key = u64;

#[inline]
const fn key(mac: MacAddress) -> Key {
    let [b0, b1, b2, b3, b4, b5] = mac.bytes();
    u64::from_le_bytes([b0, b1, b2, b3, b4, b5, 0, 0])
}

/// Where frames of a NIC go. It decides and moves nothing.
#[derive(Debug, Default)]
pub struct Switch {
    /// Those who receive frames to their own address: active and draining ones.
    by_mac: HashMap<Key, RegistrationIndex, IdHash>,
    /// Those who receive flooded frames: active ones.
    active: Vec<(RegistrationIndex, MacAddress)>,
}

impl Switch {
    /// A switch without ports.
    pub fn new() -> Self {
        Self { by_mac: HashMap::default(), active: Vec::with_capacity(REGISTRATIONS_MAX) }
    }

    /// Adds a registration, or changes it.
    pub fn set(&mut self, index: RegistrationIndex, mac: MacAddress, state: RegistrationState) {
        self.remove(index);
        match state {
            RegistrationState::Standby => {}
            RegistrationState::Active => {
                self.by_mac.insert(key(mac), index);
                self.active.push((index, mac));
            }
            // The active one goes first where an address is registered twice.
            RegistrationState::Draining => {
                self.by_mac.entry(key(mac)).or_insert(index);
            }
        }
    }

    /// Removes a registration.
    pub fn remove(&mut self, index: RegistrationIndex) {
        self.by_mac.retain(|_, other| *other != index);
        self.active.retain(|(other, _)| *other != index);
    }

    /// Puts the local receivers of a frame into `receivers`, and says whether it also goes out on the wire if it
    /// came from an instance. Nobody receives a frame with its own source address: a broadcast that comes
    /// back over another NIC would look to the guest like someone else with its address.
    #[inline]
    pub fn route(&self, frame: Addresses, receivers: &mut Vec<RegistrationIndex>) -> bool {
        receivers.clear();
        if frame.is_flooded() {
            let others = self.active.iter().filter(|(_, mac)| *mac != frame.source);
            receivers.extend(others.map(|(index, _)| *index));
            return true;
        }
        if frame.destination == frame.source {
            return false;
        }
        match self.by_mac.get(&key(frame.destination)) {
            Some(index) => {
                receivers.push(*index);
                false
            }
            None => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use RegistrationState::{Active, Draining, Standby};

    fn mac(last: u8) -> MacAddress {
        MacAddress::new([2, 0, 0, 0, 0, last])
    }

    fn index(index: u16) -> RegistrationIndex {
        RegistrationIndex::new(index).expect("below the limit")
    }

    fn route(switch: &Switch, source: MacAddress, destination: MacAddress) -> (Vec<usize>, bool) {
        let mut receivers = Vec::new();
        let wire = switch.route(Addresses { destination, source }, &mut receivers);
        (receivers.iter().map(|index| index.get()).collect(), wire)
    }

    fn three() -> Switch {
        let mut switch = Switch::new();
        switch.set(index(1), mac(1), Active);
        switch.set(index(2), mac(2), Draining);
        switch.set(index(3), mac(3), Standby);
        switch.set(index(4), mac(4), Active);
        switch
    }

    #[test]
    fn a_frame_to_a_local_instance_stays_here() {
        assert_eq!(route(&three(), mac(4), mac(1)), (vec![1], false));
        assert_eq!(route(&three(), mac(4), mac(2)), (vec![2], false), "draining ones still receive");
    }

    #[test]
    fn a_frame_to_a_standby_or_unknown_address_goes_to_the_wire() {
        assert_eq!(route(&three(), mac(4), mac(3)), (vec![], true));
        assert_eq!(route(&three(), mac(4), mac(9)), (vec![], true));
    }

    #[test]
    fn a_flooded_frame_goes_to_active_ones_and_the_wire() {
        assert_eq!(route(&three(), mac(9), MacAddress::BROADCAST), (vec![1, 4], true));
        let multicast = MacAddress::new([1, 0, 0x5e, 0, 0, 1]);
        assert_eq!(route(&three(), mac(9), multicast), (vec![1, 4], true));
    }

    #[test]
    fn nobody_receives_its_own_frame() {
        assert_eq!(route(&three(), mac(1), MacAddress::BROADCAST), (vec![4], true));
        assert_eq!(route(&three(), mac(1), mac(1)), (vec![], false));
    }

    #[test]
    fn a_change_of_state_takes_effect_at_once() {
        let mut switch = three();
        switch.set(index(3), mac(3), Active);
        switch.set(index(1), mac(1), Standby);
        assert_eq!(route(&switch, mac(9), MacAddress::BROADCAST), (vec![4, 3], true));
        assert_eq!(route(&switch, mac(9), mac(1)), (vec![], true));
        switch.remove(index(3));
        assert_eq!(route(&switch, mac(9), mac(3)), (vec![], true));
    }
}
