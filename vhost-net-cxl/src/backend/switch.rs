//! Who gets a frame: the small switch between the instances of one NIC.

use std::collections::{HashMap, hash_map};

use pod_protocol::ids::MacAddress;
use pod_protocol::objects::{REGISTRATIONS_MAX, RegistrationState};

use super::registration::RegistrationIndex;
use crate::ethernet::Addresses;
use crate::id_hash::IdHash;

/// An address as a number: hashed and compared at once.
type Key = u64;

/// Of an address in a VLAN; 0 is none.
#[inline]
fn key(mac: MacAddress, vlan: Option<u16>) -> Key {
    let [b0, b1, b2, b3, b4, b5] = mac.bytes();
    let [low, high] = vlan.unwrap_or(0).to_le_bytes();
    u64::from_le_bytes([b0, b1, b2, b3, b4, b5, low, high])
}

const fn is_in_vlan(key: Key) -> bool {
    key >> 48 != 0
}

/// Where frames of a NIC go. It decides and moves nothing.
#[derive(Debug, Default)]
pub struct Switch {
    /// Those who receive frames to their own address: active and draining ones.
    by_mac: HashMap<Key, RegistrationIndex, IdHash>,
    /// Those who receive flooded frames: active ones.
    active: Vec<(RegistrationIndex, MacAddress, Option<u16>)>,
    /// By registration, where it is entered.
    entries: Vec<Option<Entry>>,
    /// How many of the addresses are in a VLAN.
    in_vlans: usize,
}

/// Where a registration is entered that receives anything.
#[derive(Clone, Copy, Debug)]
struct Entry {
    key: Key,
    floods: bool,
}

impl Switch {
    /// A switch without ports.
    pub fn new() -> Self {
        let active = Vec::with_capacity(REGISTRATIONS_MAX);
        Self { by_mac: HashMap::default(), active, entries: Vec::new(), in_vlans: 0 }
    }

    /// Adds a registration, or changes it. Those of a VLAN are among themselves, and so are those without one.
    pub fn set(
        &mut self,
        index: RegistrationIndex,
        mac: MacAddress,
        vlan: Option<u16>,
        state: RegistrationState,
    ) {
        self.remove(index);
        let key = key(mac, vlan);
        let floods = match state {
            RegistrationState::Standby => return,
            RegistrationState::Active => true,
            RegistrationState::Draining => false,
        };
        let receiver = self.by_mac.entry(key);
        if matches!(receiver, hash_map::Entry::Vacant(_)) {
            self.in_vlans += usize::from(is_in_vlan(key));
        }
        // The active one goes first where an address is registered twice.
        let receiver = receiver.or_insert(index);
        if floods {
            *receiver = index;
            self.active.push((index, mac, vlan));
        }
        if self.entries.len() <= index.get() {
            self.entries.resize(index.get() + 1, None);
        }
        self.entries[index.get()] = Some(Entry { key, floods });
    }

    /// Removes a registration.
    pub fn remove(&mut self, index: RegistrationIndex) {
        let entry = self.entries.get_mut(index.get()).and_then(Option::take);
        let Some(Entry { key, floods }) = entry else { return };
        if self.by_mac.get(&key) == Some(&index) {
            self.by_mac.remove(&key);
            self.in_vlans -= usize::from(is_in_vlan(key));
        }
        if floods {
            self.active.retain(|(other, ..)| *other != index);
        }
    }

    /// Who receives frames to this address that have no VLAN tag.
    pub fn receiver(&self, mac: MacAddress) -> Option<RegistrationIndex> {
        self.by_mac.get(&key(mac, None)).copied()
    }

    /// Whether anybody here is in a VLAN.
    #[inline]
    pub fn has_vlans(&self) -> bool {
        self.in_vlans > 0
    }

    /// Puts the local receivers of a frame in this VLAN, or in none, into `receivers`, and says whether it also goes out on the wire if it
    /// came from an instance. Nobody receives a frame with its own source address: a broadcast that comes
    /// back over another NIC would look to the guest like someone else with its address.
    #[inline]
    pub fn route(&self, frame: Addresses, vlan: Option<u16>, receivers: &mut Vec<RegistrationIndex>) -> bool {
        receivers.clear();
        if frame.is_flooded() {
            if frame.is_reserved() {
                // For the host of the NIC, if for anybody.
                return false;
            }
            let others = self.active.iter().filter(|(_, mac, other)| *mac != frame.source && *other == vlan);
            receivers.extend(others.map(|(index, ..)| *index));
            return true;
        }
        if frame.destination == frame.source {
            return false;
        }
        match self.by_mac.get(&key(frame.destination, vlan)) {
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
        let wire = switch.route(Addresses { destination, source }, None, &mut receivers);
        (receivers.iter().map(|index| index.get()).collect(), wire)
    }

    fn three() -> Switch {
        let mut switch = Switch::new();
        switch.set(index(1), mac(1), None, Active);
        switch.set(index(2), mac(2), None, Draining);
        switch.set(index(3), mac(3), None, Standby);
        switch.set(index(4), mac(4), None, Active);
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
    fn what_is_for_the_nearest_bridge_goes_to_nobody() {
        for last in [0, 1, 2, 0x0e] {
            let reserved = MacAddress::new([1, 0x80, 0xc2, 0, 0, last]);
            assert_eq!(route(&three(), mac(9), reserved), (vec![], false));
        }
        for last in [0xcc, 0xcd] {
            let reserved = MacAddress::new([1, 0, 0x0c, 0xcc, 0xcc, last]);
            assert_eq!(route(&three(), mac(9), reserved), (vec![], false));
        }
        assert_eq!(route(&three(), mac(9), MacAddress::new([1, 0x80, 0xc2, 0, 0, 0x10])), (vec![1, 4], true));
    }

    #[test]
    fn nobody_receives_its_own_frame() {
        assert_eq!(route(&three(), mac(1), MacAddress::BROADCAST), (vec![4], true));
        assert_eq!(route(&three(), mac(1), mac(1)), (vec![], false));
    }

    #[test]
    fn vlans_are_apart_from_each_other_and_from_what_is_in_none() {
        let mut switch = three();
        assert!(!switch.has_vlans());
        switch.set(index(5), mac(5), Some(10), Active);
        switch.set(index(6), mac(6), Some(10), Active);
        switch.set(index(7), mac(7), Some(20), Active);
        assert!(switch.has_vlans());
        let route = |vlan, destination| {
            let mut receivers = Vec::new();
            let frame = Addresses { destination, source: mac(6) };
            let wire = switch.route(frame, vlan, &mut receivers);
            (receivers.iter().map(|index| index.get()).collect::<Vec<_>>(), wire)
        };
        assert_eq!(route(Some(10), mac(5)), (vec![5], false));
        assert_eq!(route(Some(10), mac(7)), (vec![], true));
        assert_eq!(route(Some(10), mac(1)), (vec![], true));
        assert_eq!(route(None, mac(5)), (vec![], true));
        assert_eq!(route(Some(10), MacAddress::BROADCAST), (vec![5], true));
        assert_eq!(route(Some(20), MacAddress::BROADCAST), (vec![7], true));
        assert_eq!(route(None, MacAddress::BROADCAST), (vec![1, 4], true));
        for (number, address) in [(5, mac(5)), (6, mac(6)), (7, mac(7))] {
            switch.set(index(number), address, None, Active);
        }
        assert!(!switch.has_vlans());
    }

    #[test]
    fn of_two_with_the_same_address_the_active_one_receives() {
        let mut switch = three();
        switch.set(index(5), mac(1), None, Draining);
        assert_eq!(route(&switch, mac(4), mac(1)), (vec![1], false));
        switch.set(index(6), mac(2), None, Active);
        assert_eq!(route(&switch, mac(4), mac(2)), (vec![6], false));
    }

    #[test]
    fn a_change_of_state_takes_effect_at_once() {
        let mut switch = three();
        switch.set(index(3), mac(3), None, Active);
        switch.set(index(1), mac(1), None, Standby);
        assert_eq!(route(&switch, mac(9), MacAddress::BROADCAST), (vec![4, 3], true));
        assert_eq!(route(&switch, mac(9), mac(1)), (vec![], true));
        switch.remove(index(3));
        assert_eq!(route(&switch, mac(9), mac(3)), (vec![], true));
    }
}
