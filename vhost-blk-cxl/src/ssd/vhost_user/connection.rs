//! A connection to a target.
#![allow(unsafe_code)] // two crates want one descriptor as different types

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use cxl_pool::Pool;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::{RecvFlags, recv};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_OK,
};
use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use vmm_sys_util::eventfd::EventFd;

use super::config::{self, CONFIG_BYTES};
use super::identity::{Disk, ID_BYTES};
use super::requests::Abilities;
use super::ring::{QUEUE_SIZE, RING_BYTES, SharedRing};
use super::scratch::{SCRATCH_ADDRESS, SCRATCH_BYTES, Scratch};
use crate::ssd::verifier::process_verifier;
use crate::ssd::{Geometry, OpenError};

/// Where the target finds ring and headers, behind any pool.
pub(super) const RING_ADDRESS: u64 = 1 << 46;
/// How far an address of ours seems to be from the one in "guest" memory: targets tell the two kinds apart by it.
const OFFSET: u64 = 1 << 46;
/// How long the target may take to answer while the connection is set up.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Where a target is, and what it is given.
#[derive(Clone)]
pub(super) struct Target {
    /// The device's name here.
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// None for whoever only looks at what is there.
    pub(super) pool: Option<Pool>,
    pub(super) scratch: Arc<Scratch>,
}

/// A connection, with a ring that is being served.
pub(super) struct Connection {
    pub(super) disk: Disk,
    pub(super) abilities: Abilities,
    pub(super) ring: SharedRing,
    pub(super) kick: OwnedFd,
    pub(super) call: OwnedFd,
    /// To see its end.
    pub(super) socket: UnixStream,
    pub(super) write_verifier: u64,
    pub(super) peer: Peer,
    /// It ends with this.
    _frontend: Frontend,
}

/// The process at the other end, as far as that can be told.
#[derive(Default)]
pub(super) struct Peer {
    pid: Option<i32>,
    /// Readable when it has ended, and with it what the kernel did for it.
    pub(super) process: Option<OwnedFd>,
}

impl Peer {
    fn of(socket: &UnixStream) -> Self {
        let pid = rustix::net::sockopt::socket_peercred(socket).ok().map(|it| it.pid.as_raw_nonzero().get());
        // What listens for others, as a supervisor does, says nothing of who serves.
        let known = pid.filter(|&pid| pid > 1).and_then(Pid::from_raw);
        Self { pid, process: known.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) }
    }

    /// Whether both are the same process, or nobody can tell.
    pub(super) fn may_be(&self, other: &Self) -> bool {
        self.pid == other.pid
    }
}

impl Connection {
    /// Connects to a target and gives it the pool as its memory.
    pub(super) fn open(target: &Target) -> Result<Self, OpenError> {
        let Target { name, path, pool, scratch } = target;
        let began = Instant::now();
        let failed = |what: &'static str, source: io::Error| {
            let is_late = began.elapsed() >= PATIENCE;
            let source = if is_late { io::Error::new(io::ErrorKind::TimedOut, source) } else { source };
            OpenError::Io { ssd: name.clone(), what, path: path.display().to_string(), source }
        };
        let socket = UnixStream::connect(path).map_err(|source| failed("connect to", source))?;
        let watched = socket.try_clone().map_err(|source| failed("watch", source))?;
        let _limit = limit(&socket).map_err(|source| failed("set up", source))?;
        let peer = Peer::of(&socket);
        let mut frontend = Frontend::from_stream(socket, 1);
        let (geometry, abilities) =
            agree(&mut frontend).map_err(|source| failed("agree with the target at", source))?;
        if geometry.size_bytes == 0 {
            let (ssd, path) = (name.clone(), path.display().to_string());
            return Err(OpenError::TooSmall { ssd, path, size_bytes: 0, block_bytes: geometry.block_bytes });
        }
        let ring = SharedRing::new(RING_ADDRESS).map_err(|source| failed("make a ring for", source))?;
        share(&frontend, &ring, scratch, pool.as_ref())
            .map_err(|source| failed("share the pool with the target at", source))?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = event()
            .and_then(|kick| Ok((kick, event()?)))
            .map_err(|errno| failed("make events for", errno.into()))?;
        start(&mut frontend, &ring, &kick, &call).map_err(|source| failed("start the ring of", source))?;
        // What it has not flushed is lost with it.
        let write_verifier = process_verifier(peer.pid);
        let mut connection = Self {
            disk: Disk { geometry, id: None },
            abilities,
            ring,
            kick,
            call,
            socket: watched,
            write_verifier,
            peer,
            _frontend: frontend,
        };
        connection.disk.id = connection.ask_for_id().map_err(|source| failed("ask for its id", source))?;
        Ok(connection)
    }

    /// What the disk calls itself; nothing if it does not. Before anything else is asked for.
    fn ask_for_id(&mut self) -> io::Result<Option<[u8; ID_BYTES as usize]>> {
        self.ring.put_id_request();
        self.kick();
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some((_, status)) = self.ring.answer() {
                return Ok((u32::from(status) == VIRTIO_BLK_S_OK).then(|| self.ring.id()));
            }
            let left = until.saturating_duration_since(Instant::now());
            let mut fds =
                [PollFd::new(&self.call, PollFlags::IN), PollFd::new(&self.socket, PollFlags::RDHUP)];
            match poll(&mut fds, Some(&left.try_into().unwrap_or_default())) {
                Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                Ok(_) if !fds[1].revents().is_empty() => return Err(io::ErrorKind::ConnectionReset.into()),
                Ok(_) => drop(rustix::io::read(&self.call, &mut [0; 8])),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Whether the target closed it. It says nothing on it by itself otherwise.
    pub(super) fn is_gone(&self) -> bool {
        match recv(&self.socket, &mut [0_u8][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((bytes, _)) => bytes == 0,
            Err(errno) => errno != rustix::io::Errno::AGAIN && errno != rustix::io::Errno::INTR,
        }
    }

    /// Tells the target what was put into the ring.
    pub(super) fn kick(&mut self) {
        if self.ring.publish() {
            // It fails only when the counter is full, and then the target has been told.
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
    }
}

/// Ends a conversation that has not ended in time, as long as what is returned is there. The crate that leads it takes no timeout of the
/// socket for an error, and would wait for ever.
fn limit(socket: &UnixStream) -> io::Result<Sender<()>> {
    let (limit, ended) = channel();
    let socket = socket.try_clone()?;
    thread::Builder::new().name("target-limit".to_owned()).spawn(move || {
        if ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
            // It may be closed already.
            let _ = socket.shutdown(Shutdown::Both);
        }
    })?;
    Ok(limit)
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

/// Gives the target the pool, and what lies beside it.
fn share(frontend: &Frontend, ring: &SharedRing, scratch: &Scratch, pool: Option<&Pool>) -> io::Result<()> {
    let region = |guest_phys_addr, memory_size, mmap_handle| VhostUserMemoryRegionInfo {
        guest_phys_addr,
        memory_size,
        userspace_addr: guest_phys_addr + OFFSET,
        mmap_offset: 0,
        mmap_handle,
    };
    let beside = [
        region(RING_ADDRESS, RING_BYTES as u64, ring.file().as_raw_fd()),
        region(SCRATCH_ADDRESS, SCRATCH_BYTES as u64, scratch.file().as_raw_fd()),
    ];
    let pool = pool.map(|pool| region(0, pool.superblock().size_bytes, pool.fd().as_raw_fd()));
    let regions: Vec<_> = pool.into_iter().chain(beside).collect();
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
