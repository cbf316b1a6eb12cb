//! The backend's worker: all SSDs of this host, all channels to the frontends that use them.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cxl_pool::{Area, Memory};
use pod_protocol::data_channel::DataChannel;
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::{ChannelId, LeaseGeneration, LeaseId};
use pod_protocol::objects::{ChannelObject, VolumeObject};
use pod_protocol::reports::Report;
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::worker::{Progress, Reply, Sources, Task, Token};
use tracing::{error, info, warn};

use super::check::{Rejected, check};
use super::in_flight::{Commands, InFlight};
use crate::counters::{Counter, Counters};
use crate::message::{Operation, Request, Status, WORDS, Words};
use crate::ssd::{Command, Finished, Outcome, Ssd};

/// Requests taken from a channel per turn.
const RECEIVE_BUDGET: usize = 64;

/// What the worker is told.
pub(crate) enum Message {
    /// Watch the devices.
    Start,
    /// Have this channel, in this generation; answered when nothing of an earlier one is in flight any more.
    Channel(ChannelObject, Reply<Result<(), String>>),
    /// Have it no longer.
    RemoveChannel(ChannelId),
    /// Serve this volume, on the device of this index; answered when its requests will be accepted: a frontend that
    /// is refused in its current generation waits for the controller.
    Volume { object: Box<VolumeObject>, device: usize, counters: Arc<Counters>, done: Reply<()> },
    /// Serve it no longer; answered when nothing of it is in flight.
    RemoveVolume(LeaseId, Reply<()>),
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
}

struct Volume {
    object: VolumeObject,
    device: usize,
    counters: Arc<Counters>,
    /// Requests of its earlier generation that the device still works on.
    draining: usize,
}

/// A channel to a frontend.
struct Channel<M: Memory> {
    object: ChannelObject,
    /// None while requests of an earlier generation are being worked on: the frontend sends nothing before we accepted
    /// the new one.
    data: Option<DataChannel<M, WORDS>>,
    /// Waits for that.
    opened: Option<Reply<Result<(), String>>>,
    ready: bool,
    /// Requests of earlier generations that the devices still work on.
    draining: usize,
    /// Taken from the channel, but the device had no room, or the volume is being drained.
    held: VecDeque<Request>,
    /// Came before their volume: a backend that restarts gets its channels first, and a frontend that waited for it
    /// sends everything at once.
    early: Vec<Request>,
    /// Answers of this turn, and such that the frontend has left no room for.
    outbox: VecDeque<Words>,
}

/// The worker's state.
pub(crate) struct BackendTask<M: Memory> {
    memory: M,
    run: RunDirectory,
    /// Whether peers that sleep are to be woken.
    rings_doorbells: bool,
    devices: Vec<Device>,
    channels: BTreeMap<ChannelId, Channel<M>>,
    volumes: BTreeMap<LeaseId, Volume>,
    commands: Commands,
    removals: Vec<(LeaseId, Reply<()>)>,
    scrubs: Vec<(Area, Reply<Result<(), String>>)>,
    reporter: Option<Reporter>,
    /// Messages that make no sense or are about no lease of ours.
    malformed: Arc<Counter>,
    finished: Vec<Finished>,
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
            devices,
            channels: BTreeMap::new(),
            volumes: BTreeMap::new(),
            commands: Commands::new(),
            removals: Vec::new(),
            scrubs: Vec::new(),
            reporter,
            malformed,
            finished: Vec::new(),
        }
    }

    fn channel(&mut self, object: ChannelObject, opened: Reply<Result<(), String>>) {
        if let Some(known) = self.channels.get_mut(&object.id).filter(|known| known.object == object) {
            if known.data.is_some() {
                opened.send(Ok(()));
            } else {
                // Asked again while it drains.
                known.opened = Some(opened);
            }
            return;
        }
        let draining = self.commands.count(|command| command.channel == object.id);
        info!(channel = %object.id, peer = %object.peer, generation = object.generation.get(), draining, "channel begins");
        let channel = Channel {
            object,
            data: None,
            opened: Some(opened),
            ready: false,
            draining,
            held: VecDeque::with_capacity(RECEIVE_BUDGET),
            early: Vec::new(),
            outbox: VecDeque::new(),
        };
        // What the old one held was never begun, and its frontend sends it again.
        self.channels.insert(channel.object.id, channel);
    }

    fn volume(&mut self, object: VolumeObject, device: usize, counters: Arc<Counters>) {
        let lease = object.lease;
        let draining = match self.volumes.get(&lease) {
            Some(old) if old.object.generation == object.generation && old.device == device => old.draining,
            _ => self.commands.of_lease(lease),
        };
        let volume = Volume { object, device, counters, draining };
        for channel in self.channels.values_mut() {
            for request in channel.early.extract_if(.., |request| request.holder.lease == lease) {
                if reads_buffer_of(&request, &volume.object) {
                    self.memory.invalidate(request.data_start(), request.length_bytes);
                }
                channel.held.push_back(request);
            }
        }
        self.volumes.insert(lease, volume);
        self.memory.full_fence();
    }

    fn remove_volume(&mut self, lease: LeaseId) {
        self.volumes.remove(&lease);
        for channel in self.channels.values_mut() {
            for request in channel.early.extract_if(.., |request| request.holder.lease == lease) {
                channel.outbox.push_back(request.not_done(Status::Refused).encode());
            }
        }
    }

    /// Answers those who wait for the end of something.
    fn confirm(&mut self) {
        let commands = &self.commands;
        for (_, reply) in self.removals.extract_if(.., |(lease, _)| commands.of_lease(*lease) == 0) {
            reply.send(());
        }
        for (area, reply) in self.scrubs.extract_if(.., |(area, _)| commands.touching(area) == 0) {
            self.memory.flush(area.start_byte(), area.bytes());
            self.memory.full_fence();
            reply.send(Ok(()));
        }
    }

    /// Opens the channel if it may be, and says whether it can be used.
    fn is_ready(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        if channel.ready {
            return true;
        }
        if channel.draining > 0 {
            return false;
        }
        if let Some(opened) = channel.opened.take() {
            // What the old generation's reads left in our cache is out before the frontend may use its buffers again.
            self.memory.full_fence();
            match DataChannel::open(&self.memory, &channel.object, &self.run) {
                Ok(mut data) => {
                    data.sender.set_wakeups(self.rings_doorbells);
                    channel.data = Some(data);
                    opened.send(Ok(()));
                }
                Err(error) => opened.send(Err(error.to_string())),
            }
        }
        let Some(data) = &mut channel.data else { return false };
        channel.ready = data.ready();
        if channel.ready {
            info!(channel = %id, "channel is ready");
        }
        channel.ready
    }

    /// Takes requests from a channel and passes them to the devices.
    fn receive(&mut self, id: ChannelId) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return false };
        let Some(data) = &mut channel.data else { return false };
        let mut to_read = false;
        let held_before = channel.held.len();
        // A frontend that takes no answers, or a device that takes no commands, is not asked for more.
        while channel.held.len() < RECEIVE_BUDGET
            && channel.outbox.is_empty()
            && let Some(words) = data.receive()
        {
            match Request::decode(&words) {
                Ok(request) => {
                    let volume = self.volumes.get(&request.holder.lease);
                    if volume.is_some_and(|volume| {
                        reads_buffer_of(&request, &volume.object)
                            && !self.devices[volume.device].ssd.bypasses_cache()
                    }) {
                        self.memory.invalidate(request.data_start(), request.length_bytes);
                        to_read = true;
                    }
                    channel.held.push_back(request);
                }
                Err(_) => self.malformed.add(1),
            }
        }
        if to_read {
            // The invalidations of all buffers before the device reads any.
            self.memory.full_fence();
        }
        let taken = channel.held.len() > held_before;
        let mut begun = false;
        while let Some(request) = self.channels.get(&id).and_then(|channel| channel.held.front().copied()) {
            if !self.begin(id, &request) {
                break;
            }
            begun = true;
            if let Some(channel) = self.channels.get_mut(&id) {
                channel.held.pop_front();
            }
        }
        taken || begun
    }

    /// Begins a request, or answers it. False if it has to wait.
    fn begin(&mut self, id: ChannelId, request: &Request) -> bool {
        let Some(channel) = self.channels.get_mut(&id) else { return true };
        let volume = self.volumes.get(&request.holder.lease).filter(|volume| volume.object.channel == id);
        let serves = volume.map(|volume| volume.object.generation);
        if serves.is_none_or(|serves| is_newer(request.holder.generation, serves))
            && channel.early.len() < channel.object.outgoing.slots as usize
        {
            channel.early.push(*request);
            return true;
        }
        let Some(volume) = volume else {
            self.malformed.add(1);
            channel.outbox.push_back(request.not_done(Status::Refused).encode());
            return true;
        };
        if volume.object.generation != request.holder.generation {
            volume.counters.stale.add(1);
            channel.outbox.push_back(request.not_done(Status::Refused).encode());
            return true;
        }
        if volume.draining > 0 {
            return false;
        }
        let device = &mut self.devices[volume.device];
        let offset_bytes = match check(request, &volume.object, device.ssd.geometry()) {
            Ok(offset) => offset,
            Err(Rejected(status)) => {
                volume.counters.refused();
                channel.outbox.push_back(request.not_done(status).encode());
                return true;
            }
        };
        let Some(command) = self.commands.next_id() else { return false };
        let command = Command {
            id: command,
            operation: request.operation,
            force_unit_access: request.force_unit_access,
            may_unmap: request.may_unmap,
            offset_bytes,
            length_bytes: request.length_bytes,
            data: request.data_start(),
        };
        if device.ssd.submit(command).is_err() {
            return false;
        }
        self.commands.enter(InFlight {
            request: *request,
            device: volume.device,
            channel: id,
            channel_generation: channel.object.generation,
        });
        true
    }

    /// Collects what the devices finished.
    fn reap(&mut self) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        for device in &mut self.devices {
            device.ssd.reap(&mut finished);
            if let Some(reason) = device.ssd.failure()
                && !device.failed.swap(true, Ordering::Relaxed)
            {
                error!(ssd = device.name, reason, "the device failed");
                if let Some(reporter) = &self.reporter {
                    reporter.report(Report::DeviceFailed {
                        device: device.name.clone(),
                        reason: reason.to_owned(),
                    });
                }
            }
        }
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
        let request = command.request;
        if request.operation == Operation::Read && !self.devices[command.device].ssd.bypasses_cache() {
            // Whatever the outcome: the buffer goes back to the frontend.
            self.memory.flush(request.data_start(), request.length_bytes);
        }
        let status = match finished.outcome {
            Outcome::Done => Status::Ok,
            Outcome::Failed => Status::IoError,
            Outcome::Unsupported => Status::Unsupported,
        };
        self.devices[command.device].counters.ended(request.operation, status, request.length_bytes);
        if let Some(volume) = self.volumes.get_mut(&request.holder.lease) {
            volume.counters.ended(request.operation, status, request.length_bytes);
            if volume.object.generation != request.holder.generation {
                volume.draining = volume.draining.saturating_sub(1);
            }
        }
        let Some(channel) = self.channels.get_mut(&command.channel) else { return };
        if channel.object.generation == command.channel_generation {
            let bytes = if status == Status::Ok { request.length_bytes } else { 0 };
            let verifier = self.devices[command.device].ssd.write_verifier();
            channel.outbox.push_back(request.completion(status, bytes, verifier).encode());
        } else {
            channel.draining = channel.draining.saturating_sub(1);
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
            }
            Message::Channel(object, opened) => self.channel(object, opened),
            Message::RemoveChannel(id) => drop(self.channels.remove(&id)),
            Message::Volume { object, device, counters, done } => {
                self.volume(*object, device, counters);
                done.send(());
            }
            Message::RemoveVolume(lease, reply) => {
                self.remove_volume(lease);
                self.removals.push((lease, reply));
                self.confirm();
            }
            Message::Scrub(area, reply) => {
                if let Some(volume) =
                    self.volumes.values().find(|volume| volume.object.data_area.overlaps(&area))
                {
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
        for device in &mut self.devices {
            device.ssd.kick();
        }
        // What ended at once, such as reads from a page cache.
        moved |= self.reap();
        moved |= self.answer();
        if moved { Progress::Busy } else { Progress::Idle }
    }

    fn ready(&mut self, _token: Token) {
        // A device finished something: the next turn collects it.
    }

    fn prepare_sleep(&mut self) -> bool {
        let mut idle = true;
        for channel in self.channels.values_mut() {
            let Some(data) = &mut channel.data else { continue };
            // A ready() that turns true is work, and so is everything that came.
            idle &= if channel.ready { data.announce_sleep() } else { !data.ready() };
        }
        // A device that cannot wake us must be looked at.
        idle && self.devices.iter().enumerate().all(|(index, device)| {
            device.ssd.event().is_some() || self.commands.count(|command| command.device == index) == 0
        })
    }

    fn resume(&mut self) {
        for channel in self.channels.values_mut().filter(|channel| channel.ready) {
            if let Some(data) = &mut channel.data {
                data.wake();
            }
        }
    }
}

/// Whether a request makes the device read its buffer, and the buffer is where it may be.
fn reads_buffer_of(request: &Request, volume: &VolumeObject) -> bool {
    request.operation == Operation::Write
        && volume.may_hold(request.data_start(), request.data_lines().bytes())
}

/// Whether a lease's generation follows another. They wrap around, but never lie far apart.
fn is_newer(generation: LeaseGeneration, than: LeaseGeneration) -> bool {
    let ahead = generation.get().wrapping_sub(than.get());
    (1..=i16::MAX.unsigned_abs()).contains(&ahead)
}
