//! As much of rtnetlink as a NIC driver needs: look at an interface, hear of its changes, set it up.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pod_protocol::ids::MacAddress;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

/// The routing family is protocol zero.
const NETLINK_ROUTE: Option<Protocol> = None;
const NEW_LINK: u16 = 16;
const DELETE_LINK: u16 = 17;
const GET_LINK: u16 = 18;
const ERROR: u16 = 2;
const FLAG_REQUEST: u16 = 1;
const FLAG_ACKNOWLEDGE: u16 = 4;
const GROUP_LINK: u32 = 1;
const ATTRIBUTE_ADDRESS: u16 = 1;
const ATTRIBUTE_NAME: u16 = 3;
const ATTRIBUTE_MTU: u16 = 4;
const ATTRIBUTE_STATISTICS: u16 = 23;
const ATTRIBUTE_CARRIER_CHANGES: u16 = 35;
/// `AF_UNSPEC`: what concerns the interface itself.
const FAMILY_ANY: u8 = 0;
const INTERFACE_UP: u32 = 1;
const INTERFACE_LOWER_UP: u32 = 1 << 16;
const HEADER_BYTES: usize = 16;
const LINK_BYTES: usize = 16;
const ANSWER_BYTES: usize = 32 * 1024;

/// Fields of the kernel's statistics, up to the carrier errors of the sender.
pub(super) const STATISTICS: usize = 18;

/// An interface as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) index: u32,
    pub(super) mac: Option<MacAddress>,
    pub(super) mtu: u32,
    /// Administratively up, and the layer below has a carrier.
    pub(super) up: bool,
    /// How often its carrier came or went.
    pub(super) carrier_changes: u32,
    /// `struct rtnl_link_stats64`, as far as we look at it.
    pub(super) statistics: [u64; STATISTICS],
}

/// Something that happened to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    Changed(Interface),
    Removed { index: u32 },
}

/// A socket to rtnetlink.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
    answer: Vec<u8>,
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Netlink {
    /// A socket for questions.
    pub(super) fn open() -> io::Result<Self> {
        Self::with_groups(0)
    }

    /// A socket that hears of changes of all interfaces.
    pub(super) fn subscribe() -> io::Result<Self> {
        Self::with_groups(GROUP_LINK)
    }

    fn with_groups(groups: u32) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, NETLINK_ROUTE)?;
        bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self { socket, answer: vec![0; ANSWER_BYTES] })
    }

    /// The interface of this name; an error of kind `NotFound` if there is none, and of no other kind then.
    pub(super) fn by_name(&mut self, name: &str) -> io::Result<Interface> {
        let mut request = link_request(GET_LINK, FLAG_REQUEST, 0, 0);
        let mut value = name.as_bytes().to_vec();
        value.push(0);
        append(&mut request, ATTRIBUTE_NAME, &value);
        // An answer that cannot be read says nothing.
        self.ask(&mut request)?.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sets an interface up, as `ip link set up` does.
    pub(super) fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut request = link_request(NEW_LINK, FLAG_REQUEST | FLAG_ACKNOWLEDGE, index, INTERFACE_UP);
        self.ask(&mut request).map(drop)
    }

    fn ask(&mut self, request: &mut [u8]) -> io::Result<Option<Interface>> {
        let bytes = u32::try_from(request.len()).expect("requests are short");
        request[..4].copy_from_slice(&bytes.to_ne_bytes());
        send(&self.socket, request, SendFlags::empty())?;
        let (received, _) = recv(&self.socket, self.answer.as_mut_slice(), RecvFlags::empty())?;
        let mut found = Ok(None);
        for_each_message(&self.answer[..received], |kind, body| match kind {
            ERROR => {
                let code =
                    body.get(..4).map_or(0, |code| i32::from_ne_bytes([code[0], code[1], code[2], code[3]]));
                if code != 0 {
                    let error = io::Error::from_raw_os_error(-code);
                    let missing = rustix::io::Errno::from_io_error(&error) == Some(rustix::io::Errno::NODEV);
                    found = Err(if missing { io::ErrorKind::NotFound.into() } else { error });
                }
            }
            NEW_LINK => found = Ok(parse_link(body)),
            _ => {}
        });
        found
    }

    /// Waits for the next changes and hands each to `on_event`. After an overrun (`ENOBUFS`) the caller must look at its interface
    /// again.
    pub(super) fn next_events(&mut self, mut on_event: impl FnMut(Event)) -> io::Result<()> {
        let (received, _) = recv(&self.socket, self.answer.as_mut_slice(), RecvFlags::empty())?;
        for_each_message(&self.answer[..received], |kind, body| {
            let Some(interface) = parse_link(body) else { return };
            match kind {
                NEW_LINK => on_event(Event::Changed(interface)),
                // Of another family, such as AF_BRIDGE, it says that the interface is no port of a bridge any more.
                DELETE_LINK if body.first() == Some(&FAMILY_ANY) => {
                    on_event(Event::Removed { index: interface.index });
                }
                _ => {}
            }
        });
        Ok(())
    }
}

/// A request with a header (its length still zero) and an `ifinfomsg`.
fn link_request(kind: u16, flags: u16, index: u32, interface_flags: u32) -> Vec<u8> {
    let mut request = vec![0; HEADER_BYTES + LINK_BYTES];
    request[4..6].copy_from_slice(&kind.to_ne_bytes());
    request[6..8].copy_from_slice(&flags.to_ne_bytes());
    request[20..24].copy_from_slice(&index.to_ne_bytes());
    request[24..28].copy_from_slice(&interface_flags.to_ne_bytes());
    request[28..32].copy_from_slice(&interface_flags.to_ne_bytes());
    request
}

fn append(request: &mut Vec<u8>, attribute: u16, value: &[u8]) {
    let bytes = u16::try_from(4 + value.len()).expect("attributes are short");
    request.extend_from_slice(&bytes.to_ne_bytes());
    request.extend_from_slice(&attribute.to_ne_bytes());
    request.extend_from_slice(value);
    request.resize(request.len().next_multiple_of(4), 0);
}

/// Walks the messages of one datagram; stops at the first that is cut off.
fn for_each_message(mut datagram: &[u8], mut handle: impl FnMut(u16, &[u8])) {
    while let (Some(bytes), Some(kind)) = (read_u32(datagram, 0), read_u16(datagram, 4)) {
        let bytes = bytes as usize;
        if bytes < HEADER_BYTES || bytes > datagram.len() {
            return;
        }
        handle(kind, &datagram[HEADER_BYTES..bytes]);
        datagram = datagram.get(bytes.next_multiple_of(4)..).unwrap_or_default();
    }
}

fn parse_link(body: &[u8]) -> Option<Interface> {
    let index = read_u32(body, 4)?;
    let flags = read_u32(body, 8)?;
    let mut interface = Interface {
        index,
        mac: None,
        mtu: 0,
        up: flags & INTERFACE_UP != 0 && flags & INTERFACE_LOWER_UP != 0,
        carrier_changes: 0,
        statistics: [0; STATISTICS],
    };
    let mut rest = body.get(LINK_BYTES..)?;
    while let (Some(bytes), Some(kind)) = (read_u16(rest, 0), read_u16(rest, 2)) {
        let bytes = usize::from(bytes);
        let Some(value) = rest.get(4..bytes) else { break };
        match kind {
            ATTRIBUTE_ADDRESS => interface.mac = value.try_into().ok().map(MacAddress::new),
            ATTRIBUTE_MTU => interface.mtu = read_u32(value, 0)?,
            ATTRIBUTE_CARRIER_CHANGES => interface.carrier_changes = read_u32(value, 0)?,
            ATTRIBUTE_STATISTICS => {
                for (field, bytes) in interface.statistics.iter_mut().zip(value.chunks_exact(8)) {
                    *field = bytes.try_into().map(u64::from_ne_bytes).unwrap_or_default();
                }
            }
            _ => {}
        }
        rest = rest.get(bytes.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(interface)
}

fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_loopback_interface_is_found() {
        let mut netlink = Netlink::open().expect("netlink");
        let loopback = netlink.by_name("lo").expect("lo");
        assert_eq!(loopback.index, 1);
        assert_eq!(loopback.mac, Some(MacAddress::new([0; 6])));
    }

    #[test]
    fn a_missing_interface_is_not_found() {
        let mut netlink = Netlink::open().expect("netlink");
        let error = netlink.by_name("wadi-missing").expect_err("no such interface");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    proptest! {
        #[test]
        fn any_datagram_is_walked_to_its_end(datagram: Vec<u8>) {
            for_each_message(&datagram, |_, body| {
                let _ = parse_link(body);
            });
        }
    }
}
