//! The copies of a broadcast or multicast frame for those of the same NIC.
//!
//! They get theirs when it has gone out, or was given up: until then it may be sent again over another NIC, as all that is
//! not acknowledged, and those who move there too would get it twice.

use cxl_pool::Memory;
use pod_protocol::ids::MacAddress;

use super::Backend;
use super::outgoing::gather;
use super::share::Reach;
use super::wire::Outgoing;
use crate::ethernet::Addresses;

impl<M: Memory> Backend<M> {
    /// Gives those here their copies of a flooded packet of which nothing is sent again.
    pub(super) fn deliver_flooded(&mut self, place: usize, packet: &Outgoing) {
        let (index, port) = (packet.registration, &self.ports[place]);
        let Some(sender) = &port.registrations[index.get()] else { return };
        let mut source = std::mem::take(&mut self.source);
        source.clear();
        if gather(&self.memory, sender, &packet.message, |it| source.push(it)) {
            let mut receivers = std::mem::take(&mut self.receivers);
            // Whichever group it is for. Where it comes from was checked.
            let addresses = Addresses { destination: MacAddress::BROADCAST, source: sender.object.mac };
            port.switch.route(addresses, packet.vlan, &mut receivers);
            self.deliver_locally(place, index, &source, packet.header, (&receivers, Reach::Group));
            self.receivers = receivers;
        }
        self.source = source;
    }
}
