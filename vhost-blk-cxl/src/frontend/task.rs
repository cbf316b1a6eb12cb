//! The frontend's worker: all disks of this host, all channels to the hosts that own the SSDs.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use cxl_pool::{Area, Memory, regions};
use pod_protocol::data_channel::DataChannel;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{ChannelId, LeaseId};
use pod_protocol::objects::{ChannelObject, DiskObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};
use tracing::{info, warn};
use vhost_frontend::{GuestMemory, PoolRam, Ring, StopReason};

use super::disk::{Allowance, Disk};
use super::mirrored::MirroredDisk;
use super::spread::SpreadDisk;
use crate::counters::{Counter, Counters};
use crate::message::{Completion, WORDS, Words};

/// Answers taken from a channel per turn.
const RECEIVE_BUDGET: usize = 64;
/// Requests sent on a channel per turn.
const SEND_BUDGET: u32 = 64;

/// What the worker is told.
pub(crate) enum Message {
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
    /// Let go of a ring when nothing of it is in flight; the answer is its next available index.
    StopRing(LeaseId, u16, SyncSender<u16>),
    /// Do not wait for what is in flight any longer.
    HurryRing(LeaseId, u16, StopReason),
    /// The guest's memory changed.
    GuestMemory(LeaseId, GuestMemory, SyncSender<()>),
    /// Some time has passed.
    Tick {
        /// How long a replica may keep a request.
        replica_timeout: Option<Duration>,
    },
    /// Flush an area that no disk uses.
    Scrub(Area, Reply<Result<(), String>>),
}

/// A channel to a backend.
struct Channel<M: Memory> {
    data: DataChannel<M, WORDS>,
    ready: bool,
    /// More are never outstanding than the way back has room for.
    capacity: u32,
    outbox: Vec<Words>,
}

/// The worker's state.
pub(crate) struct FrontendTask<M: Memory> {
    memory: M,
    run: RunDirectory,
    /// Whether peers that sleep are to be woken.
    rings_doorbells: bool,
    channels: BTreeMap<ChannelId, Channel<M>>,
    disks: BTreeMap<LeaseId, Disk<M>>,
    /// Those that lie in several places.
    spread: BTreeMap<LeaseId, SpreadDisk<M>>,
    /// Disks that become mirrored as soon as nothing of theirs is in flight, as what.
    becoming: BTreeMap<LeaseId, DiskObject>,
    /// Who is told of replicas.
    reporter: Option<Reporter>,
    completions: Vec<Completion>,
    /// Messages that make no sense, of all channels.
    malformed: Arc<Counter>,
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
            rings_doorbells,
            channels: BTreeMap::new(),
            disks: BTreeMap::new(),
            spread: BTreeMap::new(),
            becoming: BTreeMap::new(),
            reporter,
            completions: Vec::with_capacity(RECEIVE_BUDGET),
            malformed,
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
        let capacity = object.incoming.slots.min(object.outgoing.slots);
        let outbox = Vec::with_capacity(SEND_BUDGET as usize);
        self.channels.insert(object.id, Channel { data, ready: false, capacity, outbox });
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

    fn tell_ready_channels(&mut self, lease: LeaseId) {
        let Some(disk) = self.spread.get_mut(&lease) else { return };
        for id in disk.channels() {
            if self.channels.get(&id).is_some_and(|channel| channel.ready) {
                disk.channel_ready(id);
            }
        }
    }

    fn update(&mut self, object: DiskObject) {
        if let Some(disk) = self.spread.get_mut(&object.lease) {
            let lease = object.lease;
            disk.update(object);
            self.tell_ready_channels(lease);
            return;
        }
        let Some(disk) = self.disks.get_mut(&object.lease) else { return };
        let mut object = object;
        self.becoming.remove(&object.lease);
        disk.hold(!object.replicas.is_empty());
        if !object.replicas.is_empty() {
            // Until then it goes where it went.
            let channel = disk.object().route.channel;
            let same = object.replicas.iter().find(|replica| replica.route.channel == channel);
            let route = same.map_or(object.route, |replica| replica.route);
            let alone = DiskObject { route, replicas: Vec::new(), ..object.clone() };
            self.becoming.insert(object.lease, std::mem::replace(&mut object, alone));
        }
        if disk.object().route.channel != object.route.channel {
            // Another backend: what the old one has will never be answered there.
            disk.channel_restarts();
        }
        disk.update(object);
    }

    /// Makes disks mirrored, or lets them be so no longer, once nothing of theirs is in flight. True if there were any.
    fn transform(&mut self) -> bool {
        let Self { becoming, disks, spread, reporter, .. } = self;
        if becoming.is_empty() && spread.is_empty() {
            return false;
        }
        let quiet = |lease: &LeaseId| disks.get(lease).is_none_or(Disk::is_quiet);
        let ready = becoming.keys().copied().find(quiet);
        let alone: Vec<LeaseId> =
            spread.iter().filter(|(_, disk)| disk.may_be_alone()).map(|(&lease, _)| lease).collect();
        let any = ready.is_some() || !alone.is_empty();
        for lease in alone {
            if let Some(disk) = spread.remove(&lease) {
                info!(%lease, "the disk has one place now");
                disks.insert(lease, disk.alone());
            }
        }
        if let Some(lease) = ready
            && let (Some(object), Some(disk)) = (becoming.remove(&lease), disks.remove(&lease))
        {
            info!(%lease, places = object.replicas.len(), "the disk has several places now");
            let disk = MirroredDisk::instead_of(disk, object, reporter.clone());
            spread.insert(lease, SpreadDisk::Mirrored(Box::new(disk)));
            self.tell_ready_channels(lease);
        }
        any
    }

    fn remove_disk(&mut self, lease: LeaseId, sources: &mut Sources) {
        self.becoming.remove(&lease);
        let spread = self.spread.remove(&lease).map(SpreadDisk::into_disk);
        let Some(mut disk) = self.disks.remove(&lease).or(spread) else { return };
        for ring in disk.rings() {
            unwatch(ring, sources);
        }
        // The lease is gone: nothing in flight will be answered, and whoever stops a ring need not wait.
        disk.give_up_where(true, |_| true);
        disk.release_stopped();
    }

    fn start_ring(&mut self, lease: LeaseId, ring: Ring, sources: &mut Sources) {
        let Some(disk) = self.disk_mut(lease) else { return };
        if let Some(kick) = ring.kick()
            && let Err(error) = sources.add(kick, token(lease, ring.index()))
        {
            warn!(%lease, ring = ring.index(), %error, "cannot watch the ring's kick: it is served late");
        }
        disk.start_ring(ring);
    }

    fn stop_ring(&mut self, lease: LeaseId, index: u16, done: SyncSender<u16>, sources: &mut Sources) {
        let Some(disk) = self.disk_mut(lease) else {
            let _ = done.try_send(0);
            return;
        };
        if let Some(ring) = disk.rings().find(|ring| ring.index() == index) {
            unwatch(ring, sources);
        }
        disk.stop_ring(index, done);
    }

    fn scrub(&self, area: Area) -> Result<(), String> {
        let mut disks = self.disks.values().chain(self.spread.values().map(SpreadDisk::disk));
        if let Some(disk) = disks.find(|disk| disk.object().data_area.overlaps(&area)) {
            return Err(format!("{area} is in use by the disk of {}", disk.object().lease));
        }
        regions::scrub(&self.memory, area);
        Ok(())
    }

    /// Takes answers from a channel.
    fn receive(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        self.completions.clear();
        let mut taken_back = false;
        let mut of_spread = 0;
        while self.completions.len() + of_spread < RECEIVE_BUDGET
            && let Some(words) = channel.data.receive()
        {
            let Ok(completion) = Completion::decode(&words) else {
                self.malformed.add(1);
                continue;
            };
            match self.disks.get(&completion.holder.lease) {
                Some(disk) => {
                    taken_back |= disk.take_back(&completion);
                    self.completions.push(completion);
                }
                None => match self.spread.get_mut(&completion.holder.lease) {
                    Some(disk) => {
                        disk.complete(id, &completion);
                        of_spread += 1;
                    }
                    // Its lease was taken away meanwhile.
                    None => self.malformed.add(1),
                },
            }
        }
        if self.completions.is_empty() {
            return of_spread > 0;
        }
        if taken_back {
            // The invalidations of all buffers before the first read of any.
            self.memory.full_fence();
        }
        for (position, completion) in self.completions.iter().enumerate() {
            if let Some(next) = self.completions.get(position + 1)
                && let Some(disk) = self.disks.get(&next.holder.lease)
            {
                disk.prefetch(next);
            }
            if let Some(disk) = self.disks.get_mut(&completion.holder.lease) {
                disk.complete(completion);
            }
        }
        for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
            disk.unblock();
            disk.signal();
            disk.release_stopped();
        }
        true
    }

    /// Takes requests of all disks of a channel and sends them.
    fn send(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        let disks = || self.disks.values().filter(|disk| disk.object().route.channel == id);
        let (plain, outstanding) = disks().fold((0, 0), |(n, sum), disk| (n + 1, sum + disk.with_backend()));
        let spread = || self.spread.values().filter(|disk| disk.uses(id));
        let (count, outstanding) =
            spread().fold((plain, outstanding), |(n, sum), disk| (n + 1, sum + disk.with_backend(id)));
        if count == 0 {
            return false;
        }
        // Answers that we took but have not acknowledged yet still take up their ring. Were they not counted, the backend could
        // find it full, and nobody would wake it when it no longer is.
        let unacknowledged = u32::try_from(channel.data.receiver.lag()).unwrap_or(u32::MAX);
        let room = channel
            .capacity
            .saturating_sub(outstanding.saturating_add(unacknowledged))
            .min(channel.data.sender.free())
            .min(SEND_BUDGET);
        let mut moved = false;
        let mut left = room;
        for (position, disk) in
            self.disks.values_mut().filter(|disk| disk.object().route.channel == id).enumerate()
        {
            // Each its share of what is left, so that one guest cannot keep the others from being served.
            let share = left.div_ceil(count - u32::try_from(position).unwrap_or(0));
            let mut allowance = Allowance { messages: share, outbox: &mut channel.outbox };
            moved |= disk.submit(&mut allowance);
            left -= share - allowance.messages;
        }
        for (position, disk) in (plain..).zip(self.spread.values_mut().filter(|disk| disk.uses(id))) {
            let share = left.div_ceil(count - position);
            let sent = disk.send(id, share, &mut channel.outbox);
            moved |= sent > 0;
            left -= sent;
        }
        if !channel.outbox.is_empty() {
            // All data before any message that announces it.
            self.memory.store_fence();
            for words in channel.outbox.drain(..) {
                let sent = channel.data.send(words);
                debug_assert!(sent.is_ok(), "the channel had room for as many");
            }
            channel.data.publish();
        }
        for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
            disk.signal();
        }
        moved
    }
}

impl<M: Memory> Task for FrontendTask<M> {
    type Message = Message;

    fn message(&mut self, message: Message, sources: &mut Sources) {
        match message {
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
            Message::StopRing(lease, index, done) => self.stop_ring(lease, index, done, sources),
            Message::HurryRing(lease, index, reason) => {
                if let Some(disk) = self.disk_mut(lease) {
                    disk.hurry_ring(index, reason);
                }
            }
            Message::GuestMemory(lease, memory, done) => {
                if let Some(disk) = self.disk_mut(lease) {
                    disk.set_guest_memory(&memory);
                }
                let _ = done.try_send(());
            }
            Message::Tick { replica_timeout } => {
                let now = Instant::now();
                self.spread.values_mut().for_each(|disk| disk.tick(now, replica_timeout));
            }
            Message::Scrub(area, reply) => reply.send(self.scrub(area)),
        }
    }

    fn turn(&mut self) -> Progress {
        let (mut moved, mut answered) = (false, false);
        for disk in self.spread.values_mut() {
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
                info!(channel = %id, "channel is ready");
                for disk in self.disks.values_mut().filter(|disk| disk.object().route.channel == id) {
                    disk.channel_ready();
                }
                for disk in self.spread.values_mut() {
                    disk.channel_ready(id);
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
        match (answered, moved) {
            (true, _) => Progress::Answered,
            (false, true) => Progress::Busy,
            (false, false) => Progress::Idle,
        }
    }

    fn ready(&mut self, token: Token) {
        let (lease, index) = named(token);
        let disk = lease.and_then(|lease| self.disk(lease));
        if let Some(ring) = disk.and_then(|disk| disk.rings().find(|ring| ring.index() == index)) {
            ring.drain_kick();
        }
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
