//! The backend's worker: all SSDs of this host, all channels to the frontends that use them.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cxl_pool::{Area, Memory, regions};
use pod_protocol::data_channel::DataChannel;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{ChannelId, LeaseId, PlaceId};
use pod_protocol::objects::{ChannelObject, VolumeObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use tracing::{info, warn};

use super::arrivals::Arrivals;
use super::chores::Chore;
use super::hanging::Watch;
use super::in_flight::Commands;
use super::sharing::Sharing;
use super::volume::Volume;
use crate::counters::{Counter, Counters};
use crate::message::{Completion, Holder, Operation, Request, Status, WORDS, Words};
use crate::ssd::{Finished, Outcome, Ssd};

/// The timer's token; devices have those from zero.
const TIMER: Token = Token(1 << 32);

/// What the worker is told.
pub(crate) enum Message {
    /// Watch the devices.
    Start,
    /// Have this channel, in this generation, from when nothing is in flight any more on what its volumes share with their frontend.
    Channel(ChannelObject, Reply<Result<(), String>>),
    /// Have it no longer.
    RemoveChannel(ChannelId),
    /// Serve this volume, on the device of this index; answered when its requests will be accepted: a frontend that
    /// is refused in its current generation waits for the controller.
    Volume {
        object: Box<VolumeObject>,
        device: usize,
        /// Where its write-intent log begins on the device, if it has one.
        intent_log: Option<u64>,
        counters: Arc<Counters>,
        done: Reply<()>,
    },
    /// Serve it no longer; answered when its device has nothing of the lease any more, by whichever name that was given to it.
    RemoveVolume { id: PlaceId, device: usize, done: Reply<()> },
    /// Set this when a device has nothing of a lease any more.
    TellEnd { lease: LeaseId, device: usize, over: Arc<AtomicBool> },
    /// Some time has passed: look for devices that keep a command for longer than they may.
    Tick,
    /// Have a device do this, for no lease.
    Chore(Chore),
    /// Answered when nothing is in flight on an area and it was flushed.
    Scrub(Area, Reply<Result<(), String>>),
}

/// A device and what is counted about it.
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) ssd: Box<dyn Ssd>,
    pub(crate) counters: Arc<Counters>,
    /// What the controller is told of it.
    pub(crate) failed: Arc<AtomicBool>,
    /// Its driver said so.
    pub(crate) gave_up: bool,
    pub(crate) watch: Watch,
    pub(crate) sharing: Sharing,
}

/// A channel to a frontend.
pub(super) struct Channel<M: Memory> {
    pub(super) object: ChannelObject,
    /// None until the worker has opened it.
    pub(super) data: Option<DataChannel<M, WORDS>>,
    ready: bool,
    /// Requests that wait, at their volumes or for them.
    pub(super) waiting: usize,
    /// Came before their volume: a backend that restarts gets its channels first, and a frontend that waited for it
    /// sends everything at once.
    pub(super) early: Vec<Request>,
    /// Answers of this turn, and such that the frontend has left no room for.
    pub(super) outbox: VecDeque<Words>,
}

/// The worker's state.
pub(crate) struct BackendTask<M: Memory> {
    pub(super) memory: M,
    run: RunDirectory,
    /// Whether peers that sleep are to be woken.
    rings_doorbells: bool,
    pub(super) devices: Vec<Device>,
    pub(super) channels: BTreeMap<ChannelId, Channel<M>>,
    pub(super) volumes: BTreeMap<PlaceId, Volume>,
    pub(super) commands: Commands,
    pub(super) arrivals: Arrivals,
    /// Those that have yet to begin.
    pub(super) chores: VecDeque<Chore>,
    removals: Vec<(LeaseId, usize, Reply<()>)>,
    endings: Vec<(LeaseId, usize, Arc<AtomicBool>)>,
    scrubs: Vec<(Area, Reply<Result<(), String>>)>,
    pub(super) reporter: Option<Reporter>,
    /// Messages that make no sense or are about no lease of ours.
    pub(super) malformed: Arc<Counter>,
    finished: Vec<Finished>,
    started: Instant,
    /// When the first of those may go on that wait for their share.
    pub(super) due_ns: Option<u64>,
    /// Wakes the worker then.
    timer: Option<OwnedFd>,
}

impl<M: Memory> BackendTask<M> {
    pub(crate) fn new(
        memory: M,
        run: RunDirectory,
        rings_doorbells: bool,
        devices: Vec<Device>,
        reporter: Option<Reporter>,
        malformed: Arc<Counter>,
    ) -> Self {
        Self {
            memory,
            run,
            rings_doorbells,
            channels: BTreeMap::new(),
            volumes: BTreeMap::new(),
            commands: Commands::new(devices.len()),
            arrivals: Arrivals::default(),
            chores: VecDeque::new(),
            removals: Vec::new(),
            endings: Vec::new(),
            scrubs: Vec::new(),
            reporter,
            malformed,
            finished: Vec::new(),
            devices,
            started: Instant::now(),
            due_ns: None,
            timer: None,
        }
    }

    /// Since the worker began.
    pub(super) fn now_ns(&self) -> u64 {
        nanoseconds_since(self.started)
    }

    /// Makes the worker wake when a volume may go on. False if it may already.
    fn set_timer(&self) -> bool {
        let Some(timer) = &self.timer else { return self.due_ns.is_none() };
        let left = match self.due_ns {
            None => Duration::ZERO,
            Some(due) => Duration::from_nanos(due.saturating_sub(self.now_ns())),
        };
        let value =
            Itimerspec { it_interval: Timespec::default(), it_value: left.try_into().unwrap_or_default() };
        // A duration of zero turns it off.
        let set = timerfd_settime(timer, TimerfdTimerFlags::empty(), &value).is_ok();
        self.due_ns.is_none() || set && !left.is_zero()
    }

    fn channel(&mut self, object: ChannelObject, opened: Reply<Result<(), String>>) {
        let is_known = self.channels.get(&object.id).is_some_and(|known| known.object == object);
        let checked =
            DataChannel::<M, WORDS>::check(&self.memory, &object).map_err(|error| error.to_string());
        let is_new = !is_known && checked.is_ok();
        opened.send(checked);
        if !is_new {
            return;
        }
        let mut draining = 0;
        let channel = Channel {
            object,
            data: None,
            ready: false,
            waiting: 0,
            early: Vec::new(),
            outbox: VecDeque::new(),
        };
        // What waits was never begun, and its frontend sends it again. What the devices have is over before that begins.
        for (id, volume) in &mut self.volumes {
            if volume.object.channel == channel.object.id {
                volume.held.drain().for_each(drop);
                // The frontend uses the buffers of all of them again, whichever place they were begun for.
                let earlier = self.commands.of_all_devices();
                let any = self.commands.has(earlier, id.lease, volume.device);
                volume.waits_for = Some(earlier).filter(|_| any);
                draining += self.commands.of_lease(id.lease, volume.device);
            }
        }
        let ChannelObject { id, peer, generation, .. } = &channel.object;
        info!(channel = %id, %peer, generation = generation.get(), draining, "channel begins");
        self.channels.insert(channel.object.id, channel);
    }

    /// Answers those who wait for the end of something.
    fn confirm(&mut self) {
        let commands = &self.commands;
        for (_, _, done) in self.removals.extract_if(.., |it| commands.of_lease(it.0, it.1) == 0) {
            done.send(());
        }
        for (_, _, over) in self.endings.extract_if(.., |it| commands.of_lease(it.0, it.1) == 0) {
            over.store(true, Ordering::Release);
        }
        for (area, reply) in self.scrubs.extract_if(.., |(area, _)| commands.touching(area) == 0) {
            regions::scrub(&self.memory, area);
            reply.send(Ok(()));
        }
    }

    /// Opens the channel if it may be, and says whether it can be used.
    fn is_ready(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get(&id) else { return false };
        if channel.ready {
            return true;
        }
        // Once it is open, the frontend takes the memory for its own that requests of before had. A frontend that begins has
        // another area and a newer generation of its leases, so that no device keeps it waiting.
        let is_due = channel.data.is_none() && !self.is_in_use(id);
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        if is_due {
            // What the old generation's reads left in our cache is out before the frontend may use its buffers again.
            self.memory.full_fence();
            match DataChannel::open(&self.memory, &channel.object, &self.run) {
                Ok(mut data) => {
                    data.sender.set_wakeups(self.rings_doorbells);
                    channel.data = Some(data);
                }
                Err(error) => warn!(channel = %id, %error, "the channel cannot be opened"),
            }
        }
        let Some(data) = &mut channel.data else { return false };
        channel.ready = data.ready();
        if channel.ready {
            info!(channel = %id, "channel is ready");
        }
        channel.ready
    }

    /// Whether a device is working on what the frontend of this channel shares with one of its volumes.
    fn is_in_use(&self, id: ChannelId) -> bool {
        let mut volumes = self.volumes.values().map(|volume| &volume.object).filter(|it| it.channel == id);
        volumes.any(|volume| {
            let (lease, generation) = (volume.lease, volume.generation);
            // Of the guest's memory nothing tells but that, since it stays.
            let is_of_it = |holder: Holder| holder.lease == lease && holder.generation == generation;
            self.commands.touching(&volume.data_area) > 0
                || self.commands.count(|command| is_of_it(command.request.holder)) > 0
        })
    }

    /// Collects what the devices finished.
    fn reap(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        for device in &mut self.devices {
            device.ssd.reap(&mut finished);
        }
        self.look_for_failures();
        let any = !finished.is_empty();
        for &done in &finished {
            self.end(done);
        }
        if any {
            self.confirm();
        }
        finished.clear();
        self.finished = finished;
        any
    }

    /// A command ended: its data goes out of our cache, its frontend is told with the next [`BackendTask::answer`].
    fn end(&mut self, finished: Finished) {
        let Some(command) = self.commands.take(finished.id) else { return };
        if let Some(done) = command.waited_for {
            // Nobody may want to hear it any more.
            let _ = done.try_send(finished.outcome);
            return;
        }
        let request = command.request;
        let lease = request.holder.lease;
        let mut volume = None;
        for (_, place) in self.volumes.range_mut(PlaceId::all(lease)) {
            if let Some(earlier) = place.waits_for
                && !self.commands.has(earlier, lease, place.device)
            {
                place.waits_for = None;
            }
            // Under another name than when the command began, if the other place of its lease has gone since.
            if place.device == command.device {
                place.in_flight = place.in_flight.saturating_sub(1);
                volume = Some(place);
            }
        }
        if command.clears_log() {
            if let Some(volume) = volume {
                volume.log_cleared(&request, finished.outcome);
            }
            return;
        }
        let ssd = &self.devices[command.device].ssd;
        if request.operation == Operation::Read
            && !ssd.bypasses_cache()
            && !ssd.reads_past_cache(request.length_bytes)
        {
            // Whatever the outcome: the buffer goes back to the frontend.
            if request.segments == 0 {
                self.memory.flush(request.data_start(), request.length_bytes);
            }
            for segment in &command.list {
                self.memory.flush(segment.start, segment.bytes.into());
            }
        }
        self.arrivals.recycle(command.list);
        let status = match finished.outcome {
            Outcome::Done => Status::Ok,
            Outcome::Failed => Status::IoError,
            Outcome::Unsupported => Status::Unsupported,
        };
        self.devices[command.device].counters.ended(request.operation, status, request.length_bytes);
        let mut throttled_ms = 0;
        if let Some(volume) = volume {
            volume.counters.ended(request.operation, status, request.length_bytes);
            throttled_ms = volume.throttled_ms(|| nanoseconds_since(self.started));
        }
        let Some(channel) = self.channels.get_mut(&command.channel) else { return };
        if channel.object.generation == command.channel_generation {
            let bytes = if status == Status::Ok { request.length_bytes } else { 0 };
            let verifier = self.devices[command.device].ssd.write_verifier();
            let completion = request.completion(status, bytes, verifier);
            channel.outbox.push_back(Completion { throttled_ms, ..completion }.encode());
        }
    }

    /// Sends the answers.
    fn answer(&mut self) -> bool {
        if self.channels.values().all(|channel| channel.outbox.is_empty()) {
            return false;
        }
        // All data before any message that announces it.
        self.memory.store_fence();
        let mut moved = false;
        for channel in self.channels.values_mut().filter(|channel| channel.ready) {
            let Some(data) = &mut channel.data else { continue };
            let before = channel.outbox.len();
            while let Some(&words) = channel.outbox.front() {
                if data.send(words).is_err() {
                    // It has more outstanding than the ring is long; it hurts itself only.
                    break;
                }
                channel.outbox.pop_front();
            }
            if channel.outbox.len() < before {
                data.publish();
                moved = true;
            }
        }
        moved
    }
}

impl<M: Memory> Task for BackendTask<M> {
    type Message = Message;

    fn message(&mut self, message: Message, sources: &mut Sources) {
        match message {
            Message::Start => {
                for (token, device) in (0..).map(Token).zip(&self.devices) {
                    if let Some(event) = device.ssd.event()
                        && let Err(error) = sources.add(event, token)
                    {
                        warn!(ssd = device.name, %error, "cannot watch the device: its answers are seen late");
                    }
                }
                let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
                let timer = timerfd_create(TimerfdClockId::Monotonic, flags).map_err(std::io::Error::from);
                match timer.and_then(|timer| sources.add(&timer, TIMER).map(|()| timer)) {
                    Ok(timer) => self.timer = Some(timer),
                    Err(error) => warn!(%error, "no timer: volumes with limits are polled"),
                }
            }
            Message::Channel(object, opened) => self.channel(object, opened),
            Message::RemoveChannel(id) => drop(self.channels.remove(&id)),
            Message::Volume { object, device, intent_log, counters, done } => {
                self.volume(*object, device, intent_log, counters);
                self.name_areas();
                done.send(());
            }
            Message::RemoveVolume { id, device, done } => {
                self.remove_volume(id);
                self.name_areas();
                self.removals.push((id.lease, device, done));
                self.confirm();
            }
            Message::TellEnd { lease, device, over } => {
                self.endings.push((lease, device, over));
                self.confirm();
            }
            Message::Chore(chore) => self.chores.push_back(chore),
            Message::Tick => {
                // What has ended while we were the ones who hung.
                self.reap();
                self.watch_devices(Instant::now());
            }
            Message::Scrub(area, reply) => {
                let used = |volume: &&Volume| {
                    let VolumeObject { data_area, ram_area, .. } = &volume.object;
                    data_area.overlaps(&area) || ram_area.is_some_and(|ram| ram.overlaps(&area))
                };
                if let Some(volume) = self.volumes.values().find(used) {
                    reply.send(Err(format!("{area} is in use by the volume of {}", volume.object.lease)));
                } else {
                    self.scrubs.push((area, reply));
                    self.confirm();
                }
            }
        }
    }

    fn turn(&mut self) -> Progress {
        let mut moved = self.reap();
        let mut next = self.channels.first_key_value().map(|(&id, _)| id);
        while let Some(id) = next {
            if self.is_ready(id) {
                moved |= self.receive(id);
            }
            next = self.channels.range((Bound::Excluded(id), Bound::Unbounded)).next().map(|(&id, _)| id);
        }
        moved |= self.begin_chores();
        moved |= self.dispatch();
        for device in &mut self.devices {
            device.ssd.kick();
        }
        // What ended at once, such as reads from a page cache.
        moved |= self.reap();
        moved |= self.answer();
        if moved { Progress::Busy } else { Progress::Idle }
    }

    fn ready(&mut self, token: Token) {
        // A device finished something, or a volume may go on: the next turn sees to it.
        if token == TIMER
            && let Some(timer) = &self.timer
        {
            let _ = rustix::io::read(timer, &mut [0; 8]);
        }
    }

    fn awaits(&self) -> bool {
        (0..self.devices.len()).any(|device| self.commands.of_device(device) > 0)
    }

    fn prepare_sleep(&mut self) -> bool {
        let mut idle = true;
        for channel in self.channels.values_mut() {
            let Some(data) = &mut channel.data else { continue };
            // A ready() that turns true is work, and so is everything that came.
            idle &= if channel.ready { data.announce_sleep() } else { !data.ready() };
        }
        // A device that cannot wake us must be looked at.
        idle && self.set_timer()
            && self
                .devices
                .iter()
                .enumerate()
                .all(|(index, device)| device.ssd.event().is_some() || self.commands.of_device(index) == 0)
    }

    fn resume(&mut self) {
        for channel in self.channels.values_mut().filter(|channel| channel.ready) {
            if let Some(data) = &mut channel.data {
                data.wake();
            }
        }
    }
}

fn nanoseconds_since(moment: Instant) -> u64 {
    u64::try_from(moment.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
