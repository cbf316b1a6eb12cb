//! A switched CXL fabric, event by event: cores with a limited number of lines under way, host ports with virtual lanes, one
//! switch or two levels of them, whose ports give credits, a device behind each egress port. One event is one cache line at one place.
//!
//! What sends takes its virtual lanes in turn; a lane whose head has no credit of the link that it goes to blocks what is behind it. A link gives its
//! credits to whoever waits longest, so that they go to hosts in proportion to what these have under way (adaptive credit
//! allocation). Reads use one direction of a link, writes the other.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyhow::Result;
use mem_channel::DevLoad;
use vcpu_slicing::Phase;

use super::control::{Control, Setting, Signal};
use super::loads::Loads;
use super::parameters::Fabric;
use super::sliced::Next;
use super::topology::{Element, Topology};

pub(super) const LINE: f64 = 64.0;

/// Threads of one program: what they read or write, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    pub(super) host: usize,
    pub(super) write: bool,
    /// Lines that a thread has under way at most; a fraction means that some of the threads have one more.
    pub(super) in_flight: f64,
    /// Lines of a block: the next one begins when all of them have arrived. 1: line by line.
    pub(super) block: u32,
    pub(super) threads: u32,
    /// Through which of the egress ports.
    pub(super) egress: usize,
    /// What a core does between two lines, in ns: it asks for no more of them meanwhile.
    pub(super) pause_ns: f64,
    /// Whose it is: a number among the tenants.
    pub(super) tenant: usize,
    /// Of each thread's mchannel.
    pub(super) weight: f64,
}

/// What a program did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Bytes per ns: GB/s.
    pub(super) rate: f64,
    pub(super) latency_ns: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Line {
    thread: u32,
    host: u16,
    egress: u16,
    issued_ps: u64,
}

pub(super) struct Thread {
    pub(super) host: usize,
    pub(super) stream: usize,
    pub(super) number_in_stream: usize,
    write: bool,
    lane: usize,
    pub(super) egress: usize,
    pub(super) tenant: usize,
    pub(super) weight: f64,
    limit: u32,
    block: u32,
    block_left: u32,
    under_way: u32,
    /// From when a line has been sent by the last link until it is back.
    rest_ps: u64,
    pause_ps: u64,
    /// It asks for no line before that.
    pauses_until_ps: u64,
    pub(super) stopped: bool,
    pub(super) moved: u64,
}

/// One direction of a link: lines that wait for it, and how many more there are buffers for. A host's port has as many as its cores ask for.
struct Server {
    lanes: Vec<VecDeque<Line>>,
    next_lane: usize,
    waiting: u32,
    is_busy: bool,
    credits: u32,
    line_ps: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A link has sent a line (element, whether it is written).
    Sent(u32, bool, Line),
    /// A line is back.
    Arrived(u32, u64),
    Window(u32),
    Stop(u32),
    Sample(u32),
    /// The agents of a host report.
    Report(u32),
    /// The timer of a thread's account fires.
    Look(u32),
    /// A core has done what it does between two lines.
    GoesOn(u32),
}

pub(super) struct Simulation {
    fabric: Fabric,
    topology: Topology,
    pub(super) threads: Vec<Thread>,
    streams: usize,
    servers: Vec<[Server; 2]>,
    /// Of each element, what lines come from.
    feeders: Vec<Vec<Element>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    now_ps: u64,
    pub(super) control: Option<Control>,
    completed: Vec<(u64, u64)>,
    loads: Loads,
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive and short")]
pub(super) fn rounded_down(number: f64) -> u64 {
    number.max(0.0) as u64
}

fn ps(ns: f64) -> u64 {
    rounded_down(ns * 1000.0)
}

#[expect(clippy::cast_precision_loss, reason = "counts of a few ms")]
pub(super) fn number(count: u64) -> f64 {
    count as f64
}

fn line_ps(topology: &Topology, element: Element) -> u64 {
    ps(LINE / topology.gb_s(element))
}

impl Simulation {
    /// Over one switch.
    pub(super) fn new(fabric: &Fabric, streams: &[Stream], setting: Setting) -> Result<Self> {
        let most = |of: fn(&Stream) -> usize| streams.iter().map(|stream| of(stream) + 1).max().unwrap_or(1);
        let (hosts, egress_ports) = (most(|stream| stream.host), most(|stream| stream.egress));
        let topology = Topology::one_switch(hosts, egress_ports, fabric.link_gb_s);
        Self::over(fabric, topology, &[1.0], streams, setting)
    }

    /// `tenants`: the weight of each.
    pub(super) fn over(
        fabric: &Fabric,
        topology: Topology,
        tenants: &[f64],
        streams: &[Stream],
        setting: Setting,
    ) -> Result<Self> {
        let mut threads = Vec::new();
        for (index, stream) in streams.iter().enumerate() {
            let path = topology.path(stream.host, stream.egress);
            let on_links: u64 = path.into_iter().map(|element| line_ps(&topology, element)).sum();
            let rest_ps = ps(fabric.idle_ns).saturating_sub(on_links);
            for thread in 0..stream.threads {
                let share =
                    stream.in_flight * f64::from(thread + 1) - (stream.in_flight * f64::from(thread)).floor();
                let limit = ps(share / 1000.0);
                threads.push(Thread {
                    host: stream.host,
                    stream: index,
                    number_in_stream: thread as usize,
                    write: stream.write,
                    lane: threads.len() % fabric.lanes(),
                    egress: stream.egress,
                    tenant: stream.tenant,
                    weight: stream.weight,
                    limit: u32::try_from(limit).unwrap_or(1).max(1),
                    rest_ps,
                    pause_ps: ps(stream.pause_ns),
                    pauses_until_ps: 0,
                    block: stream.block,
                    block_left: stream.block,
                    under_way: 0,
                    stopped: false,
                    moved: 0,
                });
            }
        }
        let credits = u32::try_from(ps(fabric.credits / 1000.0)).unwrap_or(1);
        let server = |element: Element| Server {
            // An egress port sends to its device only: whatever comes first.
            lanes: vec![
                VecDeque::new();
                if topology.next(element, 0).is_some() { fabric.lanes() } else { 1 }
            ],
            next_lane: 0,
            waiting: 0,
            is_busy: false,
            credits,
            line_ps: line_ps(&topology, element),
        };
        let elements = 0..topology.elements();
        let servers = elements.clone().map(|element| [server(element), server(element)]).collect();
        let feeders = elements.map(|element| topology.feeders(element)).collect();
        let control = match setting {
            Setting::Uncontrolled => None,
            Setting::Paper | Setting::Pod(_) => {
                Some(Control::new(fabric, setting, &topology, tenants, &threads)?)
            }
        };
        let mut simulation = Self {
            fabric: *fabric,
            threads,
            streams: streams.len(),
            servers,
            feeders,
            events: BinaryHeap::new(),
            order: 0,
            now_ps: 0,
            control,
            completed: vec![(0, 0); streams.len()],
            loads: Loads::new(topology.hosts(), topology.elements(), topology.egress(0)),
            topology,
        };
        simulation.begin();
        Ok(simulation)
    }

    fn begin(&mut self) {
        for thread in 0..self.threads.len() {
            let thread = u32::try_from(thread).unwrap_or(0);
            if let Some(control) = self.control.as_ref().filter(|it| it.setting() == Setting::Paper) {
                // As the shim has them begin: a machine's threads spread over the window, whenever it was started.
                let Thread { number_in_stream, stream, .. } = self.threads[thread as usize];
                let phase = Phase::of(0, number_in_stream).of_window(ps(control.t_w_ns()));
                let started = ps(control.t_w_ns() * (self.fabric.started * number(stream as u64)).fract());
                self.at(ps(control.t_w_ns()) + phase + started, Event::Window(thread));
            }
            self.issue(thread);
        }
        if let Some(control) = &self.control {
            let k_ns = control.k_ns();
            for host in 0..self.topology.hosts() {
                let host = u32::try_from(host).unwrap_or(0);
                self.at(ps(k_ns * (1.0 + (0.3 * f64::from(host)).fract())), Event::Sample(host));
            }
        }
    }

    /// Runs for so long; what each stream did meanwhile.
    pub(super) fn run(&mut self, us: f64) -> Result<Vec<Found>> {
        self.completed = vec![(0, 0); self.streams];
        self.loads.watch();
        let end_ps = self.now_ps + ps(us * 1000.0);
        while let Some(Reverse((at_ps, _, event))) = self.events.pop() {
            if at_ps > end_ps {
                self.order += 1;
                self.events.push(Reverse((at_ps, self.order, event)));
                break;
            }
            self.now_ps = at_ps;
            self.handle(event)?;
        }
        self.now_ps = end_ps;
        let found = |(lines, latency_ps): &(u64, u64)| Found {
            rate: number(*lines) * LINE / (us * 1000.0),
            latency_ns: number(*latency_ps) / number((*lines).max(1)) / 1000.0,
        };
        Ok(self.completed.iter().map(found).collect())
    }

    /// The parts of lines, from the last run, that found the first egress port at each level of load, in the busier direction.
    pub(super) fn levels(&self) -> [f64; 4] {
        self.loads.watched()
    }

    fn at(&mut self, at_ps: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at_ps, self.order, event)));
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Sent(element, write, line) => self.sent(element as usize, write, line),
            Event::GoesOn(thread) => self.issue(thread),
            Event::Arrived(thread, issued_ps) => self.arrived(thread, issued_ps),
            Event::Window(thread) => {
                if let Some(control) = self.control.as_mut() {
                    let bytes = std::mem::take(&mut self.threads[thread as usize].moved) * 64;
                    let run_ns = control.window(thread as usize, bytes)?;
                    let t_w_ns = control.t_w_ns();
                    self.threads[thread as usize].stopped = run_ns <= 0.0;
                    if run_ns > 0.0 && run_ns < t_w_ns {
                        self.at(self.now_ps + ps(run_ns), Event::Stop(thread));
                    }
                    self.at(self.now_ps + ps(t_w_ns), Event::Window(thread));
                    self.issue(thread);
                }
            }
            Event::Stop(thread) => self.threads[thread as usize].stopped = true,
            Event::Sample(host) => {
                let overloaded = self.overloaded(host as usize);
                if let Some(control) = self.control.as_mut() {
                    let due = control.round(host as usize, &overloaded, number(self.now_ps) / 1e6)?;
                    let (k_ns, report_after_ns) = (control.k_ns(), control.report_after_ns());
                    self.at(self.now_ps + ps(k_ns), Event::Sample(host));
                    if let Some(after_ns) = report_after_ns {
                        self.at(self.now_ps + ps(after_ns), Event::Report(host));
                    }
                    for thread in due {
                        self.look(u32::try_from(thread)?);
                    }
                }
            }
            Event::Report(host) => {
                let threads = self.threads.iter_mut().enumerate();
                for (number, thread) in threads.filter(|(_, thread)| thread.host == host as usize) {
                    if let Some(control) = self.control.as_mut() {
                        control.report(number, self.now_ps / 1000, std::mem::take(&mut thread.moved) * 64);
                    }
                }
            }
            Event::Look(thread) => self.look(thread),
        }
        Ok(())
    }

    /// L of each element, as a host knows it.
    fn overloaded(&mut self, host: usize) -> Vec<f64> {
        let told = self.loads.overloaded(host);
        match self.control.as_ref().map(Control::setting) {
            Some(Setting::Pod(Signal::Probe)) => (0..told.len())
                .map(|element| f64::from(u8::from(self.probed(host, element).is_overload())))
                .collect(),
            Some(Setting::Pod(Signal::Off)) | None => vec![0.0; told.len()],
            Some(Setting::Paper | Setting::Uncontrolled) => told,
        }
    }

    /// What a host finds that looks now how long a line takes through an egress port, compared with an idle way there. A pod's frontend looks eight
    /// times, all within some µs.
    fn probed(&self, host: usize, element: Element) -> DevLoad {
        let Some(device) =
            (0..self.topology.elements()).find(|device| self.topology.egress(*device) == element)
        else {
            return DevLoad::Light;
        };
        let waits = |element: Element| {
            let server = &self.servers[element][0];
            number(u64::from(server.waiting) * server.line_ps) / 1000.0
        };
        let path = self.topology.path(host, device);
        let waited_ns: f64 = path.into_iter().map(waits).sum();
        DevLoad::of_ratio(1.0 + waited_ns / self.fabric.idle_ns)
    }

    /// Looks at a thread's account, and does what is due.
    fn look(&mut self, thread: u32) {
        let Some(control) = self.control.as_mut() else { return };
        let next = control.look(thread as usize, self.now_ps / 1000);
        self.threads[thread as usize].stopped = matches!(next, Next::Timer { sleeps: true, .. });
        if let Next::Timer { after_ns, .. } = next {
            self.at(self.now_ps + after_ns * 1000, Event::Look(thread));
        }
        self.issue(thread);
    }

    /// A link has sent a line: what is next has a buffer for it, which it was given a credit of.
    fn sent(&mut self, element: Element, write: bool, line: Line) {
        let side = usize::from(write);
        let server = &mut self.servers[element][side];
        server.is_busy = false;
        if !self.topology.is_port(element) {
            server.credits += 1;
        }
        if let Some(next) = self.topology.next(element, usize::from(line.egress)) {
            self.wait_for(next, write, line);
            self.serve(next, write);
        } else {
            let rest_ps = self.threads[line.thread as usize].rest_ps;
            self.at(self.now_ps + rest_ps, Event::Arrived(line.thread, line.issued_ps));
        }
        self.serve(element, write);
        self.give_credits(element, write);
    }

    fn wait_for(&mut self, element: Element, write: bool, line: Line) {
        let side = usize::from(write);
        let server = &mut self.servers[element][side];
        let level = self.fabric.level(server.waiting);
        let number = self.threads[line.thread as usize].lane % server.lanes.len();
        server.lanes[number].push_back(line);
        server.waiting += 1;
        self.loads.note(usize::from(line.host), element, write, level);
    }

    fn arrived(&mut self, thread: u32, issued_ps: u64) {
        let state = &mut self.threads[thread as usize];
        state.under_way -= 1;
        state.moved += 1;
        let completed = &mut self.completed[state.stream];
        completed.0 += 1;
        completed.1 += self.now_ps - issued_ps;
        if state.block_left == 0 && state.under_way == 0 {
            state.block_left = state.block;
        }
        self.issue(thread);
    }

    fn issue(&mut self, thread: u32) {
        let now_ps = self.now_ps;
        let mut goes_on = None;
        loop {
            let state = &mut self.threads[thread as usize];
            let may_issue = !state.stopped
                && now_ps >= state.pauses_until_ps
                && state.under_way < state.limit
                && (state.block_left > 0 || state.block == 1);
            if !may_issue {
                break;
            }
            state.under_way += 1;
            state.block_left = state.block_left.saturating_sub(1);
            if state.pause_ps > 0 {
                state.pauses_until_ps = now_ps + state.pause_ps;
                goes_on = Some(state.pauses_until_ps);
            }
            let short = |place: usize| u16::try_from(place).unwrap_or(u16::MAX);
            let line =
                Line { thread, host: short(state.host), egress: short(state.egress), issued_ps: now_ps };
            let (host, write) = (state.host, state.write);
            self.wait_for(host, write, line);
        }
        if let Some(at_ps) = goes_on {
            self.at(at_ps, Event::GoesOn(thread));
        }
        let Thread { host, write, .. } = self.threads[thread as usize];
        self.serve(host, write);
    }

    /// The lane whose turn it is among those whose head may go on, and when that was issued.
    fn ready(&self, element: Element, write: bool) -> Option<(u64, usize)> {
        let side = usize::from(write);
        let server = &self.servers[element][side];
        if server.is_busy || server.waiting == 0 {
            return None;
        }
        let lanes = server.lanes.len();
        let may_go = |head: &&Line| {
            self.topology
                .next(element, usize::from(head.egress))
                .is_none_or(|next| self.servers[next][side].credits > 0)
        };
        (0..lanes)
            .map(|step| (server.next_lane + step) % lanes)
            .find_map(|lane| server.lanes[lane].front().filter(may_go).map(|head| (head.issued_ps, lane)))
    }

    /// Has a link send what may go on, unless it sends.
    fn serve(&mut self, element: Element, write: bool) {
        let Some((_, number)) = self.ready(element, write) else { return };
        let side = usize::from(write);
        let server = &mut self.servers[element][side];
        let Some(line) = server.lanes[number].pop_front() else { return };
        server.waiting -= 1;
        server.next_lane = (number + 1) % server.lanes.len();
        server.is_busy = true;
        let done = self.now_ps + server.line_ps;
        if let Some(next) = self.topology.next(element, usize::from(line.egress)) {
            self.servers[next][side].credits -= 1;
        }
        self.at(done, Event::Sent(u32::try_from(element).unwrap_or(0), write, line));
    }

    /// Whoever waits longest for a credit of `element` gets it. Nobody else waits for one that there is: it would have been taken.
    fn give_credits(&mut self, element: Element, write: bool) {
        while self.servers[element][usize::from(write)].credits > 0 {
            let feeders = self.feeders[element].iter();
            let waiting =
                feeders.filter_map(|feeder| self.ready(*feeder, write).map(|(since, _)| (since, *feeder)));
            let Some((_, feeder)) = waiting.min() else { return };
            self.serve(feeder, write);
        }
    }
}
