//! A guest without a VM that sends numbered frames, and a client behind the switch that calls all guests by numbers: none may come twice.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use pod_api::Nic;
use pod_protocol::ids::MacAddress;
use vhost_frontend::mock::{MockGuest, Piece};
use vm_memory::{Bytes as _, GuestAddress};

use crate::arrivals::Arrivals;
use crate::loads::{FRAME_NUMBER_AT, FRAME_TYPE};
use crate::looks::in_pool;
use crate::namespace::Namespace;
use crate::pod::{CLIENT_ADDRESS, Pod};
use crate::waiting::until;

/// The rings of a NIC.
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const VNET_HEADER_BYTES: usize = 12;
const MRG_RXBUF: u64 = 1 << 15;
const MEMORY_BYTES: u64 = 4 << 20;
const RING_SIZE: u16 = 256;
/// Of the guest's memory, for each frame.
const PLACE_BYTES: u64 = 2048;
/// Places to receive into; as many again to send from.
const PLACES: u64 = 128;
const FRAME_BYTES: usize = 600;
/// An address that nobody has.
const NOBODY: MacAddress = MacAddress::new([2, 0xff, 0xff, 0xff, 0xff, 0xff]);
/// To whom the client calls: everybody.
const CALLED: &str = "10.77.0.255:9";
const CALL_BYTES: usize = 64;
/// After how long a call that nobody heard is taken for lost, as where no NIC was there for it.
const HEARD_WITHIN: Duration = Duration::from_millis(50);
/// How many frames are sent at a time.
const FRAMES: u64 = 40;
/// Where the number of a call lies, behind the headers of Ethernet, IPv4 and UDP.
const CALL_NUMBER_AT: usize = 14 + 20 + 8;

/// Dropping it ends it, whatever is in flight.
pub struct FrameGuest {
    guest: MockGuest,
    mac: MacAddress,
    receiving: HashMap<u16, u64>,
    sending: HashMap<u16, u64>,
    free: Vec<u64>,
    calls: Vec<u64>,
    told: Vec<u64>,
}

impl fmt::Debug for FrameGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameGuest").field("mac", &self.mac).finish_non_exhaustive()
    }
}

impl FrameGuest {
    /// Connects to the socket of a NIC that has this address.
    ///
    /// # Panics
    /// If there is no device, or that is no address.
    pub fn connect(socket: &str, mac: &str) -> Self {
        let mut guest = MockGuest::new(MEMORY_BYTES, 2, RING_SIZE);
        guest.connect(socket.as_ref(), MRG_RXBUF);
        let start = guest.data_start();
        let place = |number: u64| start + number * PLACE_BYTES;
        let (receiving, sending) = (HashMap::new(), HashMap::new());
        let free = (PLACES..2 * PLACES).map(place).collect();
        let mac = mac.parse().expect("an address");
        let mut guest = Self { guest, mac, receiving, sending, free, calls: Vec::new(), told: Vec::new() };
        (0..PLACES).for_each(|number| guest.post(place(number)));
        guest
    }

    /// Its address.
    pub fn mac(&self) -> MacAddress {
        self.mac
    }

    /// Sends the frame with this number, which [`Arrivals`] hear, and waits for nothing.
    pub fn send(&mut self, number: u64) {
        self.offer(NOBODY, number);
    }

    /// Sends the frame with this number to another guest.
    pub fn tell(&mut self, other: MacAddress, number: u64) {
        self.offer(other, number);
    }

    /// The numbers by which the client called it, in the order in which they came.
    pub fn calls(&mut self) -> &[u64] {
        self.collect();
        &self.calls
    }

    /// The numbers of the frames that other guests sent to it, in the order in which they came.
    pub fn told(&mut self) -> &[u64] {
        self.collect();
        &self.told
    }

    /// How many frames have yet to be taken from it.
    pub fn in_flight(&mut self) -> usize {
        self.collect();
        self.sending.len()
    }

    fn post(&mut self, address: u64) {
        let bytes = u32::try_from(PLACE_BYTES).expect("short");
        let head = self.guest.offer(RECEIVE, &[Piece { address, bytes, writable: true }], None);
        self.receiving.insert(head, address);
    }

    fn offer(&mut self, to: MacAddress, number: u64) {
        self.collect();
        let address = self.free.pop().expect("fewer frames in flight");
        let mut packet = vec![0; VNET_HEADER_BYTES];
        packet.extend(front(to, self.mac));
        packet.extend(number.to_le_bytes());
        packet.resize(VNET_HEADER_BYTES + FRAME_BYTES, 0xf5);
        self.guest.memory().write_slice(&packet, GuestAddress(address)).expect("in memory");
        let bytes = u32::try_from(packet.len()).expect("short");
        let head = self.guest.offer(TRANSMIT, &[Piece { address, bytes, writable: false }], None);
        self.sending.insert(head, address);
    }

    fn collect(&mut self) {
        while let Some(used) = self.guest.used(TRANSMIT) {
            self.free.push(self.sending.remove(&used.head).expect("each is done with once"));
        }
        while let Some(used) = self.guest.used(RECEIVE) {
            let address = self.receiving.remove(&used.head).expect("each is filled once");
            let mut packet = vec![0; used.written as usize];
            self.guest.memory().read_slice(&mut packet, GuestAddress(address)).expect("in memory");
            self.hear(packet.get(VNET_HEADER_BYTES..).unwrap_or_default());
            self.post(address);
        }
    }

    fn hear(&mut self, frame: &[u8]) {
        let number = |at: usize| frame.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let is_of = |frame_type: u16| frame.get(12..14) == Some(&frame_type.to_be_bytes());
        // IPv4 without options, and UDP.
        if is_of(0x0800) && frame.get(14) == Some(&0x45) && frame.get(23) == Some(&17) {
            self.calls.extend(number(CALL_NUMBER_AT));
        } else if is_of(FRAME_TYPE) {
            self.told.extend(number(FRAME_NUMBER_AT));
        }
    }
}

fn front(to: MacAddress, from: MacAddress) -> Vec<u8> {
    [&to.bytes()[..], &from.bytes()[..], &FRAME_TYPE.to_be_bytes()[..]].concat()
}

/// The numbers of the frames from an address that lie in the pool, where its frontend puts what it sends.
pub fn frames_in_pool(pod: &Pod, from: MacAddress) -> Result<BTreeSet<u64>> {
    let wanted = front(NOBODY, from);
    let places = in_pool(pod, &wanted, FRAME_NUMBER_AT + 8)?;
    let number = |place: &[u8]| place[FRAME_NUMBER_AT..].try_into().map(u64::from_le_bytes);
    Ok(places.iter().filter_map(|place| number(place).ok()).collect())
}

/// The client, which calls all guests at once: each call passes all NICs, and each guest has one.
#[derive(Debug)]
pub struct Caller {
    socket: UdpSocket,
    next: u64,
}

impl Caller {
    /// In the client's namespace.
    pub fn new(client: &Namespace) -> Result<Self> {
        let socket = client.inside(|| {
            let socket = UdpSocket::bind((CLIENT_ADDRESS, 0))?;
            socket.set_broadcast(true)?;
            Ok(socket)
        })?;
        Ok(Self { socket, next: 0 })
    }

    /// Calls by the next number, and says which that is.
    pub fn call(&mut self) -> Result<u64> {
        let number = self.next;
        self.next += 1;
        let mut call = number.to_le_bytes().to_vec();
        call.resize(CALL_BYTES, 0xca);
        self.socket.send_to(&call, CALLED)?;
        Ok(number)
    }
    /// Calls until a guest hears it.
    ///
    /// # Panics
    /// If it never does, or has heard a call twice or after a later one.
    pub fn call_until_heard(&mut self, guest: &mut FrameGuest) {
        until("a call that the guest hears", || {
            let number = self.call().ok()?;
            let began = Instant::now();
            while began.elapsed() < HEARD_WITHIN {
                if guest.calls().last().is_some_and(|heard| *heard >= number) {
                    return Some(());
                }
                thread::sleep(Duration::from_millis(1));
            }
            None
        });
        let calls = guest.calls();
        assert!(calls.is_sorted_by(|one, next| one < next), "{calls:?}");
    }
}

/// A guest that works, and whoever is at the other end.
#[derive(Debug)]
pub struct Talk {
    guest: FrameGuest,
    caller: Caller,
    arrivals: Arrivals,
    sent: u64,
}

impl Talk {
    /// Of the guest with this NIC.
    pub fn begin(pod: &Pod, nic: &Nic) -> Result<Self> {
        let client = pod.client_namespace();
        let (arrivals, caller) = (Arrivals::listen(client)?, Caller::new(client)?);
        Ok(Self { guest: FrameGuest::connect(&nic.socket, &nic.mac), caller, arrivals, sent: 0 })
    }

    /// It goes on both ways: each frame that the guest sends comes once and in order, and it hears no call twice.
    ///
    /// # Panics
    /// If it hears none.
    pub fn check(&mut self) -> Result<()> {
        (0..FRAMES).for_each(|number| self.guest.send(self.sent + number));
        self.sent += FRAMES;
        self.arrivals.expect(self.guest.mac().bytes(), self.sent)?;
        self.caller.call_until_heard(&mut self.guest);
        Ok(())
    }
}
