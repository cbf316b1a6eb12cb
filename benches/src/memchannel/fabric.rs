//! A switched CXL fabric, event by event: cores with a limited number of lines under way, host ports with virtual lanes, a
//! switch whose egress ports give credits, a device behind each of them. One event is one cache line at one place.
//!
//! Host ports take their virtual lanes in turn; a lane whose head has no credit of the egress port that it goes to blocks what is behind it. An egress port gives its
//! credits to whoever waits longest, so that they go to hosts in proportion to what these have under way (adaptive credit
//! allocation). Reads use one direction of a link, writes the other.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyhow::Result;
use mem_channel::DevLoad;
use vcpu_slicing::Phase;

use super::control::Control;
use super::parameters::Fabric;

pub(super) const LINE: f64 = 64.0;

/// The windows of a program's first thread begin so much of a window after those of the program before: whenever it was started.
const STARTED: f64 = 0.37;

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
    /// Through which of the switch's egress ports.
    pub(super) egress: usize,
    /// What a core does between two lines, in ns: it asks for no more of them meanwhile.
    pub(super) pause_ns: f64,
}

/// What a program did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Bytes per ns: GB/s.
    pub(super) rate: f64,
    pub(super) latency_ns: f64,
}

#[derive(Clone, Copy)]
struct Line {
    thread: u32,
    issued_ps: u64,
}

pub(super) struct Thread {
    pub(super) host: usize,
    stream: usize,
    number_in_stream: usize,
    write: bool,
    lane: usize,
    pub(super) egress: usize,
    limit: u32,
    block: u32,
    block_left: u32,
    under_way: u32,
    pause_ps: u64,
    /// It asks for no line before that.
    pauses_until_ps: u64,
    pub(super) stopped: bool,
    pub(super) moved: u64,
}

/// One direction of a link.
#[derive(Default)]
struct Server {
    lanes: Vec<VecDeque<Line>>,
    next_lane: usize,
    waiting: u32,
    busy: bool,
    /// Lines that arrived since the last look, by the level of load that they found.
    found: [u64; 4],
}

/// One direction of an egress port: lines, and how many more the switch has buffers for.
#[derive(Default)]
struct Egress {
    server: Server,
    credits: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A host port has sent a line (host, direction, thread, when issued).
    PortDone(u32, bool, u32, u64),
    /// An egress port has.
    EgressDone(usize, bool, u32, u64),
    /// A line is back.
    Arrived(u32, u64),
    Window(u32),
    Stop(u32),
    Sample(u32),
    /// A core has done what it does between two lines.
    GoesOn(u32),
}

pub(super) struct Simulation {
    fabric: Fabric,
    pub(super) threads: Vec<Thread>,
    streams: usize,
    ports: Vec<[Server; 2]>,
    egress: Vec<[Egress; 2]>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    now_ps: u64,
    control: Option<Control>,
    completed: Vec<(u64, u64)>,
    /// Of the first egress port: lines that arrived by the level of load that they found, in the busier direction.
    levels: [[u64; 4]; 2],
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive and short")]
fn ps(ns: f64) -> u64 {
    (ns * 1000.0).max(0.0) as u64
}

#[expect(clippy::cast_precision_loss, reason = "counts of a few ms")]
pub(super) fn number(count: u64) -> f64 {
    count as f64
}

impl Simulation {
    pub(super) fn new(fabric: &Fabric, streams: &[Stream], controlled: bool) -> Result<Self> {
        let mut threads = Vec::new();
        for (index, stream) in streams.iter().enumerate() {
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
                    limit: u32::try_from(limit).unwrap_or(1).max(1),
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
        let hosts = streams.iter().map(|stream| stream.host + 1).max().unwrap_or(1);
        let server = |lanes: usize| Server { lanes: vec![VecDeque::new(); lanes], ..Server::default() };
        let ports = (0..hosts).map(|_| [server(fabric.lanes()), server(fabric.lanes())]).collect();
        let credits = u32::try_from(ps(fabric.credits / 1000.0)).unwrap_or(1);
        let egress_ports = streams.iter().map(|stream| stream.egress + 1).max().unwrap_or(1);
        let egress = || Egress { server: server(1), credits };
        let egress = (0..egress_ports).map(|_| [egress(), egress()]).collect::<Vec<_>>();
        let control =
            if controlled { Some(Control::new(fabric, &threads, hosts, egress_ports)?) } else { None };
        let mut simulation = Self {
            fabric: *fabric,
            threads,
            streams: streams.len(),
            ports,
            egress,
            events: BinaryHeap::new(),
            order: 0,
            now_ps: 0,
            control,
            completed: vec![(0, 0); streams.len()],
            levels: [[0; 4]; 2],
        };
        simulation.begin();
        Ok(simulation)
    }

    fn begin(&mut self) {
        for thread in 0..self.threads.len() {
            let thread = u32::try_from(thread).unwrap_or(0);
            if let Some(control) = &self.control {
                // As the shim has them begin: a machine's threads spread over the window, whenever it was started.
                let Thread { number_in_stream, stream, .. } = self.threads[thread as usize];
                let phase = Phase::of(number_in_stream).of_window(ps(control.t_w_ns()));
                let started = ps(control.t_w_ns() * STARTED * number(stream as u64));
                self.at(ps(control.t_w_ns()) + phase + started, Event::Window(thread));
            }
            self.issue(thread);
        }
        if let Some(control) = &self.control {
            let k_ns = control.k_ns();
            for host in 0..self.ports.len() {
                let host = u32::try_from(host).unwrap_or(0);
                self.at(ps(k_ns * (1.0 + 0.3 * f64::from(host))), Event::Sample(host));
            }
        }
    }

    /// Runs for so long; what each stream did meanwhile.
    pub(super) fn run(&mut self, us: f64) -> Result<Vec<Found>> {
        self.completed = vec![(0, 0); self.streams];
        self.levels = [[0; 4]; 2];
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
        let busier =
            if sum(&self.levels[0]) >= sum(&self.levels[1]) { self.levels[0] } else { self.levels[1] };
        busier.map(|lines| number(lines) / number(sum(&busier).max(1)))
    }

    fn at(&mut self, at_ps: u64, event: Event) {
        self.order += 1;
        self.events.push(Reverse((at_ps, self.order, event)));
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::PortDone(host, write, thread, issued_ps) => {
                self.ports[host as usize][usize::from(write)].busy = false;
                let place = self.threads[thread as usize].egress;
                let egress = &mut self.egress[place][usize::from(write)].server;
                let level = self.fabric.level(egress.waiting);
                egress.found[usize::from(level.number())] += 1;
                if place == 0 {
                    self.levels[usize::from(write)][usize::from(level.number())] += 1;
                }
                egress.lanes[0].push_back(Line { thread, issued_ps });
                egress.waiting += 1;
                self.serve_egress(place, write);
                self.serve_ports(write);
            }
            Event::EgressDone(place, write, thread, issued_ps) => {
                let egress = &mut self.egress[place][usize::from(write)];
                egress.server.busy = false;
                egress.credits += 1;
                let rest = ps(self.fabric.idle_ns) - ps(2.0 * self.fabric.line_ns());
                self.at(self.now_ps + rest, Event::Arrived(thread, issued_ps));
                self.serve_egress(place, write);
                self.serve_ports(write);
            }
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
                let port = overloaded(&mut self.ports[host as usize]);
                let seen = |[reads, writes]: &mut [Egress; 2]| {
                    overloaded_part(&mut reads.server).max(overloaded_part(&mut writes.server))
                };
                let egress: Vec<f64> = self.egress.iter_mut().map(seen).collect();
                if let Some(control) = self.control.as_mut() {
                    control.sample(host as usize, port, &egress, number(self.now_ps) / 1e6)?;
                    let k_ns = control.k_ns();
                    self.at(self.now_ps + ps(k_ns), Event::Sample(host));
                }
            }
        }
        Ok(())
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
        let state = &mut self.threads[thread as usize];
        let (host, write, lane) = (state.host, state.write, state.lane);
        let mut issued = false;
        let mut goes_on = None;
        while !state.stopped
            && self.now_ps >= state.pauses_until_ps
            && state.under_way < state.limit
            && (state.block_left > 0 || state.block == 1)
        {
            state.under_way += 1;
            state.block_left = state.block_left.saturating_sub(1);
            let port = &mut self.ports[host][usize::from(write)];
            port.found[usize::from(self.fabric.level(port.waiting).number())] += 1;
            port.lanes[lane].push_back(Line { thread, issued_ps: self.now_ps });
            port.waiting += 1;
            issued = true;
            if state.pause_ps > 0 {
                state.pauses_until_ps = self.now_ps + state.pause_ps;
                goes_on = Some(state.pauses_until_ps);
            }
        }
        if let Some(at_ps) = goes_on {
            self.at(at_ps, Event::GoesOn(thread));
        }
        if issued {
            self.serve_ports(write);
        }
    }

    /// Gives credits to the ports that can use one, the longest waiting first.
    fn serve_ports(&mut self, write: bool) {
        let side = usize::from(write);
        loop {
            let mut best: Option<(u64, usize, usize)> = None;
            for (host, port) in self.ports.iter().enumerate() {
                let server = &port[side];
                if server.busy || server.waiting == 0 {
                    continue;
                }
                let lanes = server.lanes.len();
                let mut turn = (0..lanes).map(|step| (server.next_lane + step) % lanes);
                let may_go = |head: &&Line| {
                    let place = self.threads[head.thread as usize].egress;
                    self.egress[place][side].credits > 0
                };
                let Some((lane, head)) =
                    turn.find_map(|lane| server.lanes[lane].front().filter(may_go).map(|head| (lane, head)))
                else {
                    continue;
                };
                if best.is_none_or(|(since, _, _)| head.issued_ps < since) {
                    best = Some((head.issued_ps, host, lane));
                }
            }
            let Some((_, host, lane)) = best else { return };
            let server = &mut self.ports[host][side];
            let Some(first) = server.lanes[lane].pop_front() else { return };
            server.waiting -= 1;
            server.next_lane = (lane + 1) % server.lanes.len();
            server.busy = true;
            self.egress[self.threads[first.thread as usize].egress][side].credits -= 1;
            let done = self.now_ps + ps(self.fabric.line_ns());
            let host = u32::try_from(host).unwrap_or(0);
            self.at(done, Event::PortDone(host, write, first.thread, first.issued_ps));
        }
    }

    fn serve_egress(&mut self, place: usize, write: bool) {
        let server = &mut self.egress[place][usize::from(write)].server;
        if server.busy {
            return;
        }
        let Some(line) = server.lanes[0].pop_front() else { return };
        server.waiting -= 1;
        server.busy = true;
        let done = self.now_ps + ps(self.fabric.line_ns());
        self.at(done, Event::EgressDone(place, write, line.thread, line.issued_ps));
    }
}

/// The part of lines that found moderate or severe overload, in the worse direction, since the last call.
fn overloaded([reads, writes]: &mut [Server; 2]) -> f64 {
    overloaded_part(reads).max(overloaded_part(writes))
}

fn overloaded_part(server: &mut Server) -> f64 {
    let found = std::mem::take(&mut server.found);
    let over =
        DevLoad::ALL.into_iter().zip(found).filter(|(level, _)| level.is_overload()).map(|(_, lines)| lines);
    number(over.sum()) / number(sum(&found).max(1))
}

fn sum(lines: &[u64; 4]) -> u64 {
    lines.iter().sum()
}
