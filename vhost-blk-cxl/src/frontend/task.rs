//! The frontend's worker: all disks of this host, all channels to the hosts that own the SSDs.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use cxl_pool::{Area, HostId, Memory, regions};
use pod_protocol::data_channel::DataChannel;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{ChannelId, LeaseId};
use pod_protocol::objects::{ChannelObject, DiskObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};
use tracing::{info, warn};
use vhost_frontend::pacing::{PaceTimer, Pacing};
use vhost_frontend::{GuestMemory, PoolRam, Ring, StopReason};

use super::Pace;
use super::disk::Disk;
use super::exchange::{Channel, RECEIVE_BUDGET};
use super::spread::SpreadDisk;
use crate::counters::{Counter, Counters};
use crate::message::Completion;

/// The timer among the worker's sources; rings have tokens from their lease and index.
const TIMER: Token = Token(u64::MAX >> 1);

/// What the worker is told.
pub(crate) enum Message {
    /// It is this host's frontend.
    Host(HostId),
    /// Have this channel, in this generation.
    Channel(ChannelObject, Reply<Result<(), String>>),
    /// Have it no longer.
    RemoveChannel(ChannelId),
    /// Have this disk.
    Disk {
        object: Box<DiskObject>,
        counters: Arc<Counters>,
        writeback: Arc<AtomicBool>,
        /// What of the pool may be its guest's memory.
        pool_ram: Option<PoolRam>,
    },
    /// The same disk, with what may change in use; answered when that holds.
    Update(Box<DiskObject>, Reply<()>),
    /// Have it no longer.
    RemoveDisk(LeaseId, Reply<()>),
    /// A ring of a disk started.
    RingStarted(LeaseId, Box<Ring>),
    /// Let go of a ring when nothing of it is in flight, nor owed to a VMM that lives; the answer is its next available index.
    StopRing(LeaseId, u16, StopReason, SyncSender<u16>),
    /// Do not wait for what is in flight any longer.
    HurryRing(LeaseId, u16, StopReason),
    /// Bring what was written to a disk to its medium.
    Flush(LeaseId, SyncSender<()>),
    /// No ring of a disk runs any more: whether its guest has to be told of a loss where it goes on.
    LeavesUntold(LeaseId, SyncSender<bool>),
    /// The guest's memory changed; answered when no request has its data in what is gone any more.
    GuestMemory(LeaseId, GuestMemory, SyncSender<()>),
    /// Do not wait for such requests any longer.
    HurryMemory(LeaseId),
    /// A disk is held to a share of the fabric from now on, or no longer.
    Pace(LeaseId, Option<Arc<Pacing>>, Reply<Result<(), String>>),
    /// Some time has passed.
    Tick(Pace),
    /// Flush an area that no disk uses.
    Scrub(Area, Reply<Result<(), String>>),
}

/// The worker's state.
pub(crate) struct FrontendTask<M: Memory> {
    pub(super) memory: M,
    run: RunDirectory,
    /// Where this is.
    pub(super) host: Option<HostId>,
    /// Whether peers that sleep are to be woken.
    rings_doorbells: bool,
    pub(super) channels: BTreeMap<ChannelId, Channel<M>>,
    pub(super) disks: BTreeMap<LeaseId, Disk<M>>,
    /// Those that lie in several places.
    pub(super) spread: BTreeMap<LeaseId, SpreadDisk<M>>,
    /// Disks that become mirrored as soon as nothing of theirs is in flight, as what.
    pub(super) becoming: BTreeMap<LeaseId, DiskObject>,
    /// Who is told of replicas.
    pub(super) reporter: Option<Reporter>,
    pub(super) completions: Vec<Completion>,
    /// Messages that make no sense, of all channels.
    pub(super) malformed: Arc<Counter>,
    /// For disks that have used up their share of the fabric, or wait for a ring that may not come; there since one may have to.
    timer: Option<PaceTimer>,
}

impl<M: Memory> FrontendTask<M> {
    pub(crate) fn new(
        memory: M,
        run: RunDirectory,
        rings_doorbells: bool,
        malformed: Arc<Counter>,
        reporter: Option<Reporter>,
    ) -> Self {
        Self {
            memory,
            run,
            host: None,
            rings_doorbells,
            channels: BTreeMap::new(),
            disks: BTreeMap::new(),
            spread: BTreeMap::new(),
            becoming: BTreeMap::new(),
            reporter,
            completions: Vec::with_capacity(RECEIVE_BUDGET),
            malformed,
            timer: None,
        }
    }

    fn channel(&mut self, object: &ChannelObject) -> Result<(), String> {
        if self.channels.get(&object.id).is_some_and(|old| old.data.generation == object.generation) {
            return Ok(());
        }
        let mut data =
            DataChannel::open(&self.memory, object, &self.run).map_err(|error| error.to_string())?;
        data.sender.set_wakeups(self.rings_doorbells);
        info!(channel = %object.id, peer = %object.peer, generation = object.generation.get(), "channel begins");
        for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == object.id) {
            disk.channel_restarts();
        }
        for disk in self.spread.values_mut() {
            disk.channel_restarts(object.id);
        }
        self.channels.insert(object.id, Channel::new(data, object));
        Ok(())
    }

    fn disk(&self, lease: LeaseId) -> Option<&Disk<M>> {
        self.disks.get(&lease).or_else(|| self.spread.get(&lease).map(SpreadDisk::disk))
    }

    fn disk_mut(&mut self, lease: LeaseId) -> Option<&mut Disk<M>> {
        let spread = self.spread.get_mut(&lease).map(SpreadDisk::disk_mut);
        self.disks.get_mut(&lease).or(spread)
    }

    fn add_disk(&mut self, disk: Disk<M>) {
        let lease = disk.object().lease;
        if disk.object().replicas.is_empty() {
            self.disks.insert(lease, disk);
            return;
        }
        self.spread.insert(lease, SpreadDisk::new(disk, self.reporter.clone()));
        self.tell_ready_channels(lease);
    }

    fn remove_disk(&mut self, lease: LeaseId, sources: &mut Sources) {
        self.becoming.remove(&lease);
        let spread = self.spread.remove(&lease).map(SpreadDisk::into_disk);
        let Some(mut disk) = self.disks.remove(&lease).or(spread) else { return };
        for ring in disk.rings() {
            unwatch(ring, sources);
        }
        disk.let_go();
    }

    fn start_ring(&mut self, lease: LeaseId, ring: Ring, sources: &mut Sources) {
        let Some(disk) = self.disk_mut(lease) else { return };
        if let Some(kick) = ring.kick()
            && let Err(error) = sources.add(kick, token(lease, ring.index()))
        {
            warn!(%lease, ring = ring.index(), %error, "cannot watch the ring's kick: it is served late");
        }
        let inherits = disk.start_ring(ring);
        let waits = disk.wait().is_some();
        if let Some(spread) = self.spread.get_mut(&lease) {
            spread.begins(inherits);
        }
        if waits && let Err(error) = self.have_timer(sources) {
            warn!(%lease, error, "what a predecessor took from rings that start late may be carried out after newer requests");
            if let Some(disk) = self.disk_mut(lease) {
                disk.waits_for_no_clock();
            }
        }
    }

    fn stop_ring(
        &mut self,
        lease: LeaseId,
        (index, reason): (u16, StopReason),
        done: SyncSender<u16>,
        sources: &mut Sources,
    ) {
        let Some(disk) = self.disk_mut(lease) else {
            let _ = done.try_send(0);
            return;
        };
        if let Some(ring) = disk.rings().find(|ring| ring.index() == index) {
            unwatch(ring, sources);
        }
        disk.stop_ring(index, reason, done);
    }

    fn pace(
        &mut self,
        lease: LeaseId,
        pacing: Option<Arc<Pacing>>,
        sources: &mut Sources,
    ) -> Result<(), String> {
        if pacing.is_some() {
            self.have_timer(sources)?;
        }
        if let Some(disk) = self.disk_mut(lease) {
            disk.pace(pacing);
        }
        Ok(())
    }

    fn have_timer(&mut self, sources: &mut Sources) -> Result<(), String> {
        if self.timer.is_none() {
            let timer = PaceTimer::new().and_then(|timer| sources.add(&timer, TIMER).map(|()| timer));
            self.timer = Some(timer.map_err(|error| format!("no timer: {error}"))?);
        }
        Ok(())
    }

    fn arm_timer(&mut self) {
        let Some(timer) = &mut self.timer else { return };
        let disks = self.disks.values().chain(self.spread.values().map(SpreadDisk::disk));
        if let Some(wait) = disks.filter_map(Disk::wait).min() {
            timer.arm(wait);
        }
    }

    fn scrub(&self, area: Area) -> Result<(), String> {
        let mut disks = self.disks.values().chain(self.spread.values().map(SpreadDisk::disk));
        let used = |disk: &&Disk<M>| {
            let DiskObject { data_area, ram_area, .. } = disk.object();
            data_area.overlaps(&area) || ram_area.is_some_and(|ram| ram.overlaps(&area))
        };
        if let Some(disk) = disks.find(used) {
            return Err(format!("{area} is in use by the disk of {}", disk.object().lease));
        }
        regions::scrub(&self.memory, area);
        Ok(())
    }
}

impl<M: Memory> Task for FrontendTask<M> {
    type Message = Message;

    fn message(&mut self, message: Message, sources: &mut Sources) {
        match message {
            Message::Host(host) => self.host = Some(host),
            Message::Channel(object, opened) => opened.send(self.channel(&object)),
            Message::RemoveChannel(id) => {
                self.channels.remove(&id);
                for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
                    disk.channel_removed();
                }
                for disk in self.spread.values_mut() {
                    disk.channel_removed(id);
                }
            }
            Message::Disk { object, counters, writeback, pool_ram } => {
                let disk = Disk::new(self.memory.clone(), *object, counters, writeback, pool_ram);
                self.add_disk(disk);
            }
            Message::Update(object, done) => {
                self.update(*object);
                done.send(());
            }
            Message::RemoveDisk(lease, reply) => {
                self.remove_disk(lease, sources);
                reply.send(());
            }
            Message::RingStarted(lease, ring) => self.start_ring(lease, *ring, sources),
            Message::StopRing(lease, index, reason, done) => {
                self.stop_ring(lease, (index, reason), done, sources);
            }
            Message::HurryRing(lease, index, reason) => {
                if let Some(disk) = self.disk_mut(lease) {
                    disk.hurry_ring(index, reason);
                }
            }
            Message::Flush(lease, done) => match self.disk_mut(lease) {
                Some(disk) if !disk.object().incoming => disk.flush_writes(done),
                // Nothing was written here.
                _ => drop(done.try_send(())),
            },
            Message::LeavesUntold(lease, done) => {
                let plain = self.disks.get(&lease).is_some_and(Disk::leaves_untold);
                let spread = self.spread.get(&lease).is_some_and(SpreadDisk::leaves_untold);
                let _ = done.try_send(plain || spread);
            }
            Message::GuestMemory(lease, memory, done) => match self.disk_mut(lease) {
                Some(disk) => disk.change_memory(&memory, done),
                None => drop(done.try_send(())),
            },
            Message::HurryMemory(lease) => {
                if let Some(disk) = self.disk_mut(lease) {
                    disk.hurry_taking_back();
                }
            }
            Message::Pace(lease, pacing, done) => done.send(self.pace(lease, pacing, sources)),
            Message::Tick(pace) => {
                let now = Instant::now();
                self.spread.values_mut().for_each(|disk| disk.tick(now, pace));
            }
            Message::Scrub(area, reply) => reply.send(self.scrub(area)),
        }
    }

    fn turn(&mut self) -> Progress {
        let (mut moved, mut answered) = (false, false);
        for disk in self.disks.values_mut() {
            moved |= disk.refuse_owed();
        }
        for disk in self.spread.values_mut() {
            moved |= disk.disk_mut().refuse_owed();
            moved |= disk.take();
        }
        let mut next = self.channels.first_key_value().map(|(&id, _)| id);
        while let Some(id) = next {
            next = self
                .channels
                .range((std::ops::Bound::Excluded(id), std::ops::Bound::Unbounded))
                .next()
                .map(|(&id, _)| id);
            let Some(channel) = self.channels.get_mut(&id) else { continue };
            if !channel.ready {
                channel.ready = channel.data.ready();
                if !channel.ready {
                    continue;
                }
                let near = self.host == Some(channel.data.peer.host);
                info!(channel = %id, near, "channel is ready");
                for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
                    disk.channel_ready();
                }
                for disk in self.spread.values_mut() {
                    disk.channel_ready(id, near);
                }
            }
            answered |= self.receive(id);
            moved |= self.send(id);
        }
        for disk in self.disks.values_mut() {
            let ready = self.channels.get(&disk.object().route.channel).is_some_and(|channel| channel.ready);
            if !ready {
                moved |= disk.submit_without_channel();
                disk.signal();
                disk.release_stopped();
            }
        }
        for disk in self.spread.values_mut() {
            answered |= disk.settle();
            moved |= disk.is_stirred();
        }
        moved |= self.transform();
        self.arm_timer();
        match (answered, moved) {
            (true, _) => Progress::Answered,
            (false, true) => Progress::Busy,
            (false, false) => Progress::Idle,
        }
    }

    fn ready(&mut self, token: Token) {
        if token == TIMER {
            if let Some(timer) = &mut self.timer {
                timer.fired();
            }
            self.disks.values_mut().for_each(Disk::wait_is_over);
            for spread in self.spread.values_mut() {
                spread.disk_mut().wait_is_over();
            }
            return;
        }
        let (lease, index) = named(token);
        let disk = lease.and_then(|lease| self.disk(lease));
        if let Some(ring) = disk.and_then(|disk| disk.rings().find(|ring| ring.index() == index)) {
            ring.drain_kick();
        }
    }

    fn awaits(&self) -> bool {
        // Of a disk in several places, those requests are with it that are with any backend.
        let mut disks = self.disks.values().chain(self.spread.values().map(SpreadDisk::disk));
        disks.any(|disk| disk.with_backend() > 0)
    }

    fn prepare_sleep(&mut self) -> bool {
        let mut idle = true;
        for channel in self.channels.values_mut() {
            // A ready() that turns true is work, and so is everything that came.
            idle &= if channel.ready { channel.data.announce_sleep() } else { !channel.data.ready() };
        }
        for disk in self.disks.values_mut() {
            idle &= disk.prepare_sleep();
        }
        for spread in self.spread.values_mut() {
            idle &= spread.disk_mut().prepare_sleep();
        }
        idle
    }

    fn resume(&mut self) {
        for channel in self.channels.values_mut().filter(|channel| channel.ready) {
            channel.data.wake();
        }
        for disk in self.disks.values_mut() {
            disk.resume();
        }
        for spread in self.spread.values_mut() {
            spread.disk_mut().resume();
        }
    }
}

/// Tells the kernel to forget a ring's kick: the VMM holds a duplicate, so closing ours would not do.
fn unwatch(ring: &Ring, sources: &mut Sources) {
    if let Some(kick) = ring.kick() {
        // It was never added if that failed.
        let _ = sources.remove(kick.as_fd());
    }
}

fn token(lease: LeaseId, ring: u16) -> Token {
    Token(u64::from(lease.get()) << 16 | u64::from(ring))
}

fn named(token: Token) -> (Option<LeaseId>, u16) {
    #[allow(clippy::cast_possible_truncation)] // the two halves of what token() made
    let (lease, ring) = ((token.0 >> 16) as u32, token.0 as u16);
    (LeaseId::new(lease), ring)
}
