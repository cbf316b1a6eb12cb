//! Another program's disk as an SSD: the initiator's side of vhost-user-blk, towards qemu-storage-daemon, SPDK's vhost or
//! anything else that serves one.
//!
//! The pool itself is the memory that the target is given, so its reads and writes go straight to and from the buffers of
//! the guests' requests. What else a split virtqueue needs lies in a few pages beside it.
#![allow(unsafe_code)] // two crates want one descriptor as different types

mod config;
mod requests;
mod ring;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use cxl_pool::Pool;
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use rustix::net::{RecvFlags, recv};
use tracing::{error, info};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vmm_sys_util::eventfd::EventFd;

use self::config::CONFIG_BYTES;
use self::requests::{Abilities, Requests};
use self::ring::{QUEUE_SIZE, RING_BYTES, SharedRing};
use super::verifier::process_verifier;
use super::{Command, Finished, Full, Geometry, OpenError, Outcome, Ssd};
use crate::segments::Segment;

/// Where the target finds ring and headers, behind any pool.
const RING_ADDRESS: u64 = 1 << 46;
/// How far an address of ours seems to be from the one in "guest" memory: targets tell the two kinds apart by it.
const OFFSET: u64 = 1 << 46;
/// How long the target may take to answer while the connection is set up.
const PATIENCE: Duration = Duration::from_secs(10);

/// A disk behind a vhost-user-blk socket.
pub struct VhostUserSsd {
    name: String,
    geometry: Geometry,
    requests: Requests,
    ring: SharedRing,
    kick: OwnedFd,
    call: OwnedFd,
    /// The connection, to see its end.
    socket: UnixStream,
    /// Readable when the target called, or is gone.
    events: OwnedFd,
    ended: Vec<Finished>,
    failure: Option<String>,
    write_verifier: u64,
    /// The connection ends with it.
    _frontend: Frontend,
    _pool: Pool,
}

impl VhostUserSsd {
    /// Connects to a target and gives it the pool as its memory.
    pub fn connect(name: &str, path: &Path, pool: &Pool) -> Result<Self, OpenError> {
        let failed = |what: &'static str, source: io::Error| OpenError::Io {
            ssd: name.to_owned(),
            what,
            path: path.display().to_string(),
            source,
        };
        let socket = UnixStream::connect(path).map_err(|source| failed("connect to", source))?;
        let watched = socket.try_clone().map_err(|source| failed("watch", source))?;
        socket
            .set_read_timeout(Some(PATIENCE))
            .and_then(|()| socket.set_write_timeout(Some(PATIENCE)))
            .map_err(|source| failed("set up", source))?;
        let mut frontend = Frontend::from_stream(socket, 1);
        let (geometry, abilities) =
            agree(&mut frontend).map_err(|source| failed("agree with the target at", source))?;
        if geometry.size_bytes == 0 {
            let (ssd, path) = (name.to_owned(), path.display().to_string());
            return Err(OpenError::TooSmall { ssd, path, size_bytes: 0, block_bytes: geometry.block_bytes });
        }
        let ring = SharedRing::new(RING_ADDRESS).map_err(|source| failed("make a ring for", source))?;
        share(&frontend, &ring, pool)
            .map_err(|source| failed("share the pool with the target at", source))?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = event()
            .and_then(|kick| Ok((kick, event()?)))
            .map_err(|errno| failed("make events for", errno.into()))?;
        start(&mut frontend, &ring, &kick, &call).map_err(|source| failed("start the ring of", source))?;
        // What it has not flushed is lost with it.
        let credentials = rustix::net::sockopt::socket_peercred(&watched).ok();
        let write_verifier = process_verifier(credentials.map(|it| it.pid.as_raw_nonzero().get()));
        let events = watch(&call, &watched).map_err(|source| failed("watch", source))?;
        info!(ssd = name, path = %path.display(), bytes = geometry.size_bytes, block = geometry.block_bytes, ?abilities, "connected");
        Ok(Self {
            name: name.to_owned(),
            geometry,
            requests: Requests::new(abilities),
            ring,
            kick,
            call,
            socket: watched,
            events,
            ended: Vec::new(),
            failure: None,
            write_verifier,
            _frontend: frontend,
            _pool: pool.clone(),
        })
    }

    /// Takes what the target answered. True if there was anything.
    fn collect(&mut self, into: &mut Vec<Finished>) -> bool {
        let mut any = false;
        while let Some((slot, status)) = self.ring.answer() {
            any = true;
            let (next, finished) = self.requests.answered(slot, status);
            if let Some(next) = next {
                self.ring.put(&next, self.requests.list(next.slot));
            }
            into.extend(finished);
        }
        any
    }

    /// Whether the target closed the connection. It says nothing on it by itself otherwise.
    fn is_gone(&self) -> bool {
        match recv(&self.socket, &mut [0_u8][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((bytes, _)) => bytes == 0,
            Err(errno) => errno != rustix::io::Errno::AGAIN && errno != rustix::io::Errno::INTR,
        }
    }
}

fn other(error: impl std::fmt::Display) -> io::Error {
    io::Error::other(error.to_string())
}

/// Agrees on features, and reads what the target says about its disk.
fn agree(frontend: &mut Frontend) -> io::Result<(Geometry, Abilities)> {
    frontend.set_owner().map_err(other)?;
    let offered = frontend.get_features().map_err(other)?;
    let needed = 1 << VIRTIO_F_VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    if offered & needed != needed {
        return Err(other("it does not speak virtio 1 with vhost-user's protocol features"));
    }
    if offered & 1 << VIRTIO_BLK_F_RO != 0 {
        return Err(other("it serves the disk read-only: let it write"));
    }
    let wanted = [
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_RING_F_INDIRECT_DESC,
    ];
    let features = offered & wanted.iter().fold(needed, |features, bit| features | 1 << bit);
    frontend.set_features(features).map_err(other)?;
    let protocol = frontend.get_protocol_features().map_err(other)?;
    if !protocol.contains(VhostUserProtocolFeatures::CONFIG) {
        return Err(other("it does not tell the size of its disk"));
    }
    let protocol = protocol & (VhostUserProtocolFeatures::CONFIG | VhostUserProtocolFeatures::REPLY_ACK);
    frontend.set_protocol_features(protocol).map_err(other)?;
    if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }
    let empty = [0; CONFIG_BYTES as usize];
    let config = frontend.get_config(0, CONFIG_BYTES, VhostUserConfigFlags::WRITABLE, &empty);
    Ok(config::parse(&config.map_err(other)?.1, features))
}

/// Gives the target the pool, and the pages of the ring.
fn share(frontend: &Frontend, ring: &SharedRing, pool: &Pool) -> io::Result<()> {
    let region = |guest_phys_addr, memory_size, mmap_handle| VhostUserMemoryRegionInfo {
        guest_phys_addr,
        memory_size,
        userspace_addr: guest_phys_addr + OFFSET,
        mmap_offset: 0,
        mmap_handle,
    };
    let regions = [
        region(0, pool.superblock().size_bytes, pool.fd().as_raw_fd()),
        region(RING_ADDRESS, RING_BYTES as u64, ring.file().as_raw_fd()),
    ];
    frontend.set_mem_table(&regions).map(drop).map_err(other)
}

fn start(frontend: &mut Frontend, ring: &SharedRing, kick: &OwnedFd, call: &OwnedFd) -> io::Result<()> {
    frontend.set_vring_num(0, QUEUE_SIZE).map_err(other)?;
    frontend.set_vring_base(0, 0).map_err(other)?;
    let [desc_table_addr, avail_ring_addr, used_ring_addr] = ring.addresses().map(|address| address + OFFSET);
    let vring = VringConfigData {
        queue_max_size: QUEUE_SIZE,
        queue_size: QUEUE_SIZE,
        flags: 0,
        desc_table_addr,
        used_ring_addr,
        avail_ring_addr,
        log_addr: None,
    };
    frontend.set_vring_addr(0, &vring).map_err(other)?;
    frontend.set_vring_call(0, &event_fd(call)?).map_err(other)?;
    frontend.set_vring_kick(0, &event_fd(kick)?).map_err(other)?;
    frontend.set_vring_enable(0, true).map_err(other)
}

/// The same event as crate `vhost` wants it.
fn event_fd(fd: &OwnedFd) -> io::Result<EventFd> {
    let duplicate = fd.try_clone()?.into_raw_fd();
    // SAFETY: the descriptor was just made and given up by its owner.
    Ok(unsafe { EventFd::from_raw_fd(duplicate) })
}

fn watch(call: &OwnedFd, socket: &UnixStream) -> io::Result<OwnedFd> {
    let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&events, call, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    epoll::add(
        &events,
        socket,
        epoll::EventData::new_u64(1),
        epoll::EventFlags::IN | epoll::EventFlags::RDHUP,
    )?;
    Ok(events)
}

impl Ssd for VhostUserSsd {
    fn driver(&self) -> &'static str {
        "vhost-user"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, command: Command) -> Result<(), Full> {
        if self.failure.is_some() {
            self.ended.push(Finished { id: command.id, outcome: Outcome::Failed });
            return Ok(());
        }
        match self.requests.begin(command)? {
            Some(request) => self.ring.put(&request, self.requests.list(request.slot)),
            None => self.ended.push(Finished { id: command.id, outcome: Outcome::Done }),
        }
        Ok(())
    }

    fn submit_list(&mut self, command: Command, segments: &[Segment]) -> Result<(), Full> {
        if self.failure.is_some() {
            return self.submit(command);
        }
        if let Some(request) = self.requests.begin_list(command, segments)? {
            self.ring.put(&request, self.requests.list(request.slot));
        }
        Ok(())
    }

    fn kick(&mut self) {
        if self.ring.publish() {
            // It fails only when the counter is full, and then the target has been told.
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
    }

    fn reap(&mut self, into: &mut Vec<Finished>) {
        into.append(&mut self.ended);
        if self.failure.is_some() {
            return;
        }
        if !self.collect(into) {
            let mut fds = [PollFd::new(&self.events, PollFlags::IN)];
            if !matches!(poll(&mut fds, Some(&rustix::event::Timespec::default())), Ok(1..)) {
                return;
            }
            // Then once more: what came before the event was taken is there.
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
            if !self.collect(into) && self.is_gone() {
                error!(ssd = self.name, "the target closed the connection: the device is given up");
                self.failure = Some("the vhost-user target closed the connection".to_owned());
                self.requests.fail_all(into);
                // It would stay readable.
                let _ = epoll::delete(&self.events, &self.socket);
                return;
            }
        }
        // The next requests of commands that take several.
        self.kick();
    }

    fn event(&self) -> Option<BorrowedFd<'_>> {
        Some(self.events.as_fd())
    }

    fn write_verifier(&self) -> u64 {
        self.write_verifier
    }

    fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }
}
