//! `vmm slice --share fair`: the loop from what vCPUs load and store to how long they may run.
//!
//! Once in each sampling period K of the pod, a frontend of this host says for how long they may run. 0.9 K later, so that it is
//! there when the next K ends, it is told what they loaded and stored under that order.
//!
//! A frontend that dies may be replaced: for as long as the other hosts count what it said last, they are held as it said last, and no
//! other one is told of them, or they would be counted twice.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use cxl_pool::{EndpointId, Role};
use pod_protocol::config::HostConfig;
use pod_protocol::daemon::{LockFile, StopSignal};
use pod_protocol::vcpus::{FromAgent, Link, LinkError, Order, Report, ToAgent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm::RunningVm;
use vmm::slicing::{self, Choice, Counter, Duty, GuestRam, HOLDS_FOR, RunTimes, VcpuThreads, WakeUp, Watch};

use crate::frontends::{Frontends, Search};
use crate::print;
use crate::slice::{Slice, chosen, table, until_it_begins};
use crate::uncounted::Uncounted;

/// When in a K a report goes out.
const REPORT_AT: f64 = 0.9;
/// How often a frontend is looked for.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// How often the one is that may be replaced.
const TRY_THE_SAME: Duration = Duration::from_millis(100);
/// For so many K other hosts count what a frontend said that is no more.
const COUNTED_KS: u32 = 10;
/// K, until a frontend says what it is: no frontend minds too few reports for so short a while.
const SAMPLE: Duration = Duration::from_millis(200);
/// When the first report goes out.
const FIRST_REPORT: Duration = Duration::from_millis(10);
/// For so long the processor may have no answer before that is said, and its frontend is left.
const UNCOUNTED: Duration = Duration::from_secs(3);
/// Orders that differ by less are not worth saying to an actuator.
const SAME: f64 = 0.002;

/// Holds the vCPUs until it is told to stop, or the machine ends.
pub(crate) fn hold(asked: &Slice, machine: &RunningVm, stop: &StopSignal) -> Result<()> {
    let Some(mut agent) =
        until_it_begins(stop, || asked.wait && machine.process.runs(), || begin(asked, machine))?
    else {
        return Ok(());
    };
    let limit = asked.seconds.map(Duration::from_secs);
    let ended = agent.run(stop, limit);
    let usage = agent.choice.actuator.usage();
    // Whatever happened, they run freely again, and nothing is counted.
    drop(agent);
    print(&table(&usage?))?;
    ended
}

/// Begins with what is asked for and there.
fn begin<'a>(asked: &Slice, machine: &'a RunningVm) -> Result<Agent<'a>> {
    let resctrl = slicing::Resctrl::open(&asked.resctrl)?;
    let config = HostConfig::load(&asked.config)?;
    let run = config.run_directory();
    let roles = [Role::BlkFrontend, Role::NetFrontend];
    let sockets = roles.map(|role| run.vcpu_socket(EndpointId::new(config.host.id, role)));
    // Each frontend would take another agent.
    let alone = LockFile::acquire(&run.vcpu_lock(&machine.name))
        .with_context(|| format!("nobody else may hold the vCPUs of {}: end that first", machine.name))?;
    let choice = slicing::choose(machine, asked.actuator, asked.share)?;
    let frontends = Frontends::new(sockets.to_vec(), &machine.name, choice.actuator.holds());
    let threads = VcpuThreads::look(machine)?;
    let ram = if asked.any_ram { None } else { ram_in_pool(machine, &config.pool.path)? };
    let cost = WakeUp::measure();
    let connected = frontends.connect()?;
    let counter = resctrl.count(&machine.name, &threads)?;
    print(&format!(
        "{}; its share of the fabric, as {} counts\n",
        chosen(machine, &choice),
        asked.resctrl.display()
    ))?;
    let found = Found { frontends, connected, choice, counter, threads, ram };
    Agent::new(machine, found, cost, asked.window.map(Duration::from_micros), alone)
}

/// Sees that the machine has memory in the pool. Returns who looks whether all of it lies there, unless that was said already.
fn ram_in_pool(machine: &RunningVm, pool: &Path) -> Result<Option<Watch<GuestRam>>> {
    let ram = GuestRam::look(machine, pool)?;
    ram.require(&machine.name, pool)?;
    match ram.warning(&machine.name) {
        Some(warning) => {
            eprintln!("{warning}");
            Ok(None)
        }
        None => Ok(Some(ram.watch(machine, pool)?)),
    }
}

/// What it begins with.
struct Found {
    frontends: Frontends,
    /// Which of them, and how.
    connected: (usize, Link),
    choice: Choice,
    counter: Counter,
    threads: Vec<u32>,
    ram: Option<Watch<GuestRam>>,
}

struct Agent<'a> {
    machine: &'a RunningVm,
    frontends: Frontends,
    choice: Choice,
    counter: Counter,
    times: RunTimes,
    threads: Vec<u32>,
    changes: VcpuThreads,
    /// Whether memory comes that lies elsewhere than in the pool; nobody looks once that was said.
    ram: Option<Watch<GuestRam>>,
    /// The window that was asked for, and the shortest that is worth it on this host.
    window: Option<Duration>,
    shortest: Duration,
    /// What a wake-up costs, until it was told what that makes of the windows.
    cost: Option<WakeUp>,
    /// The window that is used, as it was ordered and as the actuator makes it.
    wanted: Duration,
    used: Duration,
    /// T_R/T_W, and when the actuator was told.
    part: f64,
    set_at: Instant,
    /// Whether they were held all the time since the last report.
    held: bool,
    /// The last K of which was said that it is too short for the actuator.
    too_short: Option<Duration>,
    uncounted: Uncounted,
    link: Option<Link>,
    /// While there is none.
    search: Option<Search>,
    /// The last one did not go, but sent this agent away, or was left.
    refused: bool,
    /// Whose socket that is, or was, and until when no other one is told.
    frontend: usize,
    same_until: Instant,
    /// K.
    sample: Duration,
    report_at: Instant,
    /// Until when the last order is good.
    holds_until: Instant,
    /// When to look for a frontend again.
    try_at: Instant,
    /// When the processor had an answer last, and whether the frontend was left because it has none.
    counted_at: Instant,
    is_blind: bool,
    _alone: LockFile,
}

impl<'a> Agent<'a> {
    fn new(
        machine: &'a RunningVm,
        found: Found,
        cost: WakeUp,
        window: Option<Duration>,
        alone: LockFile,
    ) -> Result<Self> {
        let Found { frontends, connected: (frontend, link), choice, counter, threads, ram } = found;
        let times = RunTimes::begin(&threads, &choice.actuator.usage()?);
        let now = Instant::now();
        Ok(Self {
            machine,
            frontends,
            choice,
            counter,
            times,
            changes: VcpuThreads::watch(machine, threads.clone())?,
            ram,
            window,
            shortest: cost.window(),
            cost: Some(cost),
            wanted: Duration::ZERO,
            used: Duration::ZERO,
            part: 1.0,
            set_at: now,
            held: false,
            too_short: None,
            uncounted: Uncounted::default(),
            link: Some(link),
            search: None,
            refused: false,
            frontend,
            same_until: now,
            sample: SAMPLE,
            report_at: now + FIRST_REPORT,
            holds_until: now,
            try_at: now,
            counted_at: now,
            is_blind: false,
            threads,
            _alone: alone,
        })
    }

    fn run(&mut self, stop: &StopSignal, limit: Option<Duration>) -> Result<()> {
        let began = Instant::now();
        while !stop.is_set() && limit.is_none_or(|limit| began.elapsed() < limit) {
            self.wait(stop);
            self.listen()?;
            let now = Instant::now();
            if now >= self.holds_until && self.part < 1.0 {
                self.set(1.0)?;
            }
            if now >= self.report_at {
                self.report()?;
            }
            if now.saturating_duration_since(self.set_at) >= HOLDS_FOR / 10 {
                if self.part < 1.0 {
                    self.set(self.part)?;
                } else {
                    // Who runs freely costs nothing.
                    self.set_at = now;
                }
                if !self.machine.process.runs() {
                    return Ok(());
                }
                if let Some(threads) = self.changes.changed() {
                    self.follow(threads)?;
                }
                let ram = self.ram.as_ref().and_then(Watch::changed);
                if let Some(warning) = ram.and_then(|ram| ram.warning(&self.machine.name)) {
                    eprintln!("{warning}");
                    self.ram = None;
                }
            }
            if self.link.is_none() && !self.is_blind {
                self.look_for_a_frontend(now);
            }
        }
        Ok(())
    }

    /// The one that was there before, as long as it is counted on; then any. Orders are renewed while one has yet to answer.
    fn look_for_a_frontend(&mut self, now: Instant) {
        let mut search = match self.search.take() {
            Some(search) => search,
            None if now < self.try_at => return,
            None if now < self.same_until => {
                self.try_at = now + TRY_THE_SAME;
                self.frontends.search_at(self.frontend)
            }
            None => {
                self.try_at = now + TRY_AGAIN;
                self.frontends.search()
            }
        };
        match self.frontends.go_on(&mut search) {
            Ok(None) => self.search = Some(search),
            Ok(Some((frontend, link))) => {
                (self.frontend, self.link) = (frontend, Some(link));
                // It has yet to find out what to order.
                self.holds_until = Instant::now() + self.good_for();
            }
            // It is tried again.
            Err(_) => {}
        }
    }

    /// Waits until somebody says something, or something is due.
    fn wait(&self, stop: &StopSignal) {
        let asked = self.search.as_ref().and_then(Search::waits_for);
        let due = self.report_at.min(self.set_at + HOLDS_FOR / 10);
        let due = asked.map_or(due, |(_, until)| due.min(until));
        let timeout = Timespec::try_from(due.saturating_duration_since(Instant::now())).ok();
        let mut watched = vec![PollFd::new(stop, PollFlags::IN)];
        let links = self.link.iter().chain(asked.map(|(link, _)| link));
        watched.extend(links.map(|link| PollFd::new(link, PollFlags::IN)));
        // An interruption leads to another look; nothing else can go wrong with descriptors of our own.
        let _ = poll(&mut watched, timeout.as_ref());
    }

    /// Does what the frontend says. Only its last word counts.
    fn listen(&mut self) -> Result<()> {
        let mut last = None;
        let ended = loop {
            let Some(link) = &self.link else { break None };
            match link.receive::<ToAgent>() {
                Ok(Some(ToAgent::Order(order))) => last = Some(order),
                Ok(Some(ToAgent::Welcome)) => {}
                Ok(None) => break None,
                Ok(Some(ToAgent::Refused { reason })) => break Some((reason, Duration::ZERO)),
                // It may be replaced, and what it said last is good for a while.
                Err(LinkError::Closed) => break Some(("the frontend is gone".to_owned(), self.good_for())),
                Err(error) => break Some((format!("{:#}", anyhow::Error::from(error)), self.good_for())),
            }
        };
        if let Some(order) = last {
            self.obey(&order)?;
        }
        if let Some((reason, good_for)) = ended {
            let now = Instant::now();
            self.refused = good_for.is_zero();
            let until_then = match good_for.as_millis() {
                0 => "run freely until a frontend says otherwise".to_owned(),
                ms => format!("are held for {ms} ms as it said last, if no other one says otherwise"),
            };
            eprintln!("{}: {reason}; its vCPUs {until_then}", self.machine.name);
            self.link = None;
            self.uncounted.frontend_is_gone();
            self.try_at = now + TRY_THE_SAME;
            (self.same_until, self.holds_until) = (now + good_for, now + good_for);
        }
        Ok(())
    }

    /// How long the last word of a frontend that is gone is good for.
    fn good_for(&self) -> Duration {
        HOLDS_FOR.max(self.sample * COUNTED_KS)
    }

    fn obey(&mut self, order: &Order) -> Result<()> {
        let now = Instant::now();
        self.uncounted.were_counted();
        self.sample = Duration::from_micros(order.sample_us);
        self.report_at = now + self.sample.mul_f64(REPORT_AT);
        self.holds_until = now + HOLDS_FOR.max(self.sample * 3);
        let window = Duration::from_nanos(order.window_ns);
        self.wanted = self.window.unwrap_or_else(|| window.max(self.shortest));
        // An earlier frontend does not know that nobody is held.
        let part = if self.choice.actuator.holds() { order.part() } else { 1.0 };
        let is_same = (part >= 1.0) == (self.part >= 1.0) && (part - self.part).abs() <= SAME * self.part;
        if is_same { Ok(()) } else { self.set(part) }
    }

    /// Has the vCPUs run for this part of their time.
    fn set(&mut self, part: f64) -> Result<()> {
        let duty = if part >= 1.0 { Duty::FULL } else { slicing::duty(part, self.wanted) };
        let used = self.choice.actuator.set(duty)?;
        if part < 1.0
            && let Some(cost) = self.cost.take()
        {
            print(&format!("{}: {}\n", self.machine.name, cost.describe(used)))?;
        }
        self.warn_of_short_samples(part);
        // Who is free has no window.
        self.used = if part < 1.0 { used } else { self.wanted };
        self.held &= part < 1.0;
        (self.part, self.set_at) = (part, Instant::now());
        Ok(())
    }

    /// Says if shares follow from less time than the actuator needs to be exact.
    fn warn_of_short_samples(&mut self, part: f64) {
        let (needs, sample) = (self.choice.actuator.exact_over(), self.sample);
        if part >= 1.0 || sample >= needs || self.too_short == Some(sample) {
            return;
        }
        self.too_short = Some(sample);
        eprintln!(
            "{}: shares follow from what vCPUs move in {} ms, and {} holds them exactly over {} ms only: it may move half as much again as \
             its share; use the shim, or podctl mchannel fabric --sample-us {}",
            self.machine.name,
            sample.as_millis(),
            self.choice.actuator.name(),
            needs.as_millis(),
            needs.as_micros()
        );
    }

    /// Tells what they did since the last time.
    fn report(&mut self) -> Result<()> {
        // If no order comes, because the frontend was late, too: that is no reason to be silent.
        self.report_at = Instant::now() + self.sample;
        let Some(bytes) = self.counter.take()? else { return self.report_nothing() };
        self.counted_at = Instant::now();
        if std::mem::take(&mut self.is_blind) {
            self.try_at = self.counted_at;
        }
        let usage = self.choice.actuator.usage()?;
        let ran = self.times.take(&self.threads, &usage, self.held);
        self.held = self.part < 1.0;
        // What they do while no frontend wants to know is nobody's concern.
        if self.link.is_some() || !self.refused {
            self.uncounted.add(&Report {
                elapsed_us: us(ran.elapsed),
                bytes,
                run_us: us(ran.run),
                slept_us: us(ran.slept),
                window_us: us(self.used),
            });
        }
        self.tell();
        Ok(())
    }

    /// The processor has no answer. For a while its frontend only hears that the agent is there, since the next answer is about that time, too;
    /// after that the vCPUs run freely, and no frontend is to believe that it knows what they do.
    fn report_nothing(&mut self) -> Result<()> {
        if self.counted_at.elapsed() < UNCOUNTED {
            self.uncounted.add(&Report { window_us: us(self.used), ..Report::default() });
            self.tell();
            return Ok(());
        }
        if std::mem::replace(&mut self.is_blind, true) {
            return Ok(());
        }
        eprintln!(
            "{}: the processor does not say what its vCPUs load and store (`Unavailable` or `Unassigned` in mon_data; of the latter, see \
             mbm_assign_mode in info/L3_MON): they run freely, beside all shares, until it does",
            self.machine.name
        );
        (self.link, self.search, self.refused) = (None, None, true);
        self.uncounted = Uncounted::default();
        self.same_until = Instant::now();
        if self.part < 1.0 { self.set(1.0) } else { Ok(()) }
    }

    /// Tells the frontend what it does not know yet.
    fn tell(&mut self) {
        if let Some(link) = &self.link
            // What is wrong with it, the next look at what it says will show.
            && matches!(link.send(&FromAgent::Report(self.uncounted.untold())), Ok(true))
        {
            self.uncounted.were_told();
        }
    }

    /// vCPUs have come or gone.
    fn follow(&mut self, threads: Vec<u32>) -> Result<()> {
        self.counter.follow(&threads)?;
        self.choice.actuator.follow(&threads)?;
        // Who has just come is held from now on.
        self.set(self.part)?;
        self.threads = threads;
        self.held = false;
        Ok(())
    }
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
