use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cxl_pool::{Area, EndpointId, Memory};
use mem_channel::ElementId;
use pod_protocol::ids::{InstanceId, LeaseId};
use pod_protocol::objects::{ElementObject, FabricObject, MchannelObject};
use pod_protocol::run_directory::RunDirectory;
use pod_protocol::telemetry::{ElementTelemetry, MchannelTelemetry, VcpuTelemetry};
use pod_protocol::vcpus::{Hello, Link, Report, ToAgent, VERSION};

use super::agents::{Agents, Host};
use super::metered::{Metered, Moves, Part};
use super::plan::Plan;
use super::round::{Exchange, Exchanges, rounded};
use super::vcpus::Vcpus;
use super::vm_budget::VmBudget;
use super::{Pacing, Waker, as_f64, whole};

/// After so many K in which nothing moved and nothing waited, the meter sleeps until something does.
const SILENT_AFTER_KS: f64 = 50.0;

/// Measures what devices move, and decides with the rest of the pod how much they may. See the [module](super).
pub struct Meter {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    agents: Option<Agents>,
    /// Where the byte budgets of VMs lie that have devices at both frontends of this host.
    budgets: Option<(RunDirectory, EndpointId)>,
}

pub(super) struct Shared {
    waker: Arc<Waker>,
    stopping: AtomicBool,
    work: Mutex<Work>,
}

/// Takes over the boards of a plan.
type OpenExchange = dyn Fn(&Plan) -> Box<dyn Exchanges> + Send;

struct Work {
    pool_bytes: u64,
    open: Box<OpenExchange>,
    plan: Option<Plan>,
    exchange: Option<Box<dyn Exchanges>>,
    all: BTreeMap<Part, Metered>,
    /// When the last K ended.
    last_us: f64,
    /// When something moved or waited last.
    active_us: f64,
}

impl Meter {
    /// Measures nothing yet, and has no thread.
    pub fn new<M: Memory>(memory: M) -> Self {
        let now_us = Waker::now_us();
        let work = Work {
            pool_bytes: memory.size_bytes(),
            open: Box::new(move |plan| Box::new(Exchange::new(memory.clone(), plan))),
            plan: None,
            exchange: None,
            all: BTreeMap::new(),
            last_us: now_us,
            active_us: now_us,
        };
        let shared = Shared { waker: Waker::new(), stopping: AtomicBool::new(false), work: Mutex::new(work) };
        Self { shared: Arc::new(shared), thread: None, agents: None, budgets: None }
    }

    /// It is this frontend of its host: listens to the agents of vCPUs, until it stops, and has VMs with devices at the other frontend too move with both what
    /// they may move together. To be called before anything is measured.
    pub fn join_host(&mut self, run: &RunDirectory, endpoint: EndpointId) -> io::Result<()> {
        self.agents = Some(Agents::listen(&run.vcpu_socket(endpoint), Arc::clone(&self.shared))?);
        self.budgets = Some((run.clone(), endpoint));
        Ok(())
    }

    /// Shares this fabric from now on.
    pub fn share(&mut self, fabric: FabricObject) -> Result<(), String> {
        let wrong = |what: &dyn std::fmt::Display| format!("the fabric cannot be shared: {what}");
        for area in [fabric.sums, fabric.vms].into_iter().chain(fabric.peers.iter().map(|peer| peer.sums)) {
            self.check(area)?;
        }
        fabric.sibling.map_or(Ok(()), |area| self.check(area))?;
        let mut work = self.shared.lock();
        let Work { open, plan, exchange, all, .. } = &mut *work;
        match plan {
            Some(plan) if plan.may_become(&fabric) => {
                plan.become_(fabric, all).map_err(|error| wrong(&error))?;
            }
            _ => {
                let mut new = Plan::new(fabric).map_err(|error| wrong(&error))?;
                for metered in all.values_mut() {
                    new.open(metered);
                }
                *plan = Some(new);
            }
        }
        if let Some(plan) = plan {
            match exchange {
                Some(exchange) if exchange.fits(plan) => exchange.follow(plan),
                _ => *exchange = Some(open(plan)),
            }
        }
        drop(work);
        self.begin().map_err(|error| wrong(&error))?;
        self.shared.waker.wake();
        Ok(())
    }

    /// Shares nothing any more: all may move what they like.
    pub fn share_nothing(&mut self) {
        let mut work = self.shared.lock();
        let Work { plan, exchange, all, .. } = &mut *work;
        if let Some(plan) = plan {
            plan.close_all(all);
        }
        (*plan, *exchange) = (None, None);
        work.dismiss_where("the bandwidth of the fabric is not shared out any more", |_, _| true);
    }

    /// Measures a device and holds it to its share, once there is a fabric to share.
    pub fn measure(&mut self, object: MchannelObject) -> Arc<Pacing> {
        let mut work = self.shared.lock();
        let Work { plan, all, .. } = &mut *work;
        let other = all.values().filter(|it| it.object.instance == object.instance).find_map(Metered::pacing);
        let vm = other.map_or_else(|| self.budget(&object), |other| Arc::clone(&other.vm));
        let new = || Pacing::new(Arc::clone(&self.shared.waker), Arc::clone(&vm), 1000.0);
        let metered =
            all.entry(Part::Device(object.lease)).or_insert_with(|| Metered::device(object.clone(), new()));
        // A device has queues.
        let pacing = metered.pacing().map_or_else(new, Arc::clone);
        take_over(plan, metered, object.clone());
        if let Some(vcpus) = all.get_mut(&Part::Vcpus(object.instance)) {
            let lease = vcpus.object.lease;
            take_over(plan, vcpus, MchannelObject { lease, ..object });
        }
        drop(work);
        self.shared.waker.wake();
        pacing
    }

    /// Measures a device no longer. It may move what it likes.
    pub fn forget(&mut self, lease: LeaseId) {
        let mut work = self.shared.lock();
        let Some(metered) = work.remove(Part::Device(lease)) else { return };
        let instance = metered.object.instance;
        let has_another =
            |(part, it): (&Part, &Metered)| matches!(part, Part::Device(_)) && it.object.instance == instance;
        if !work.all.iter().any(has_another) {
            let reason = format!(
                "{} has no share of the fabric here any more: see podctl mchannel set",
                metered.object.name
            );
            work.dismiss_where(&reason, |it, _| it.object.instance == instance);
        }
        drop(work);
        // What is left of the VM may move more.
        self.shared.waker.wake();
    }

    /// What the devices of a VM may move together, of which this is the first one here.
    fn budget(&self, object: &MchannelObject) -> Arc<VmBudget> {
        let Some((run, endpoint)) = &self.budgets else { return Arc::default() };
        let path = run.byte_budget(endpoint.host, object.instance);
        let budget = VmBudget::shared(&path, endpoint.role, Waker::now_us()).unwrap_or_else(|error| {
            let vm = &object.name;
            tracing::warn!(%error, vm, "it may move more than its share for a moment if it bursts at both frontends at once");
            VmBudget::default()
        });
        Arc::new(budget)
    }

    /// What holds a device to its share, if it is measured.
    pub fn pacing(&self, lease: LeaseId) -> Option<Arc<Pacing>> {
        self.shared.lock().all.get(&Part::Device(lease))?.pacing().map(Arc::clone)
    }

    /// Whether it writes there.
    pub fn uses(&self, area: Area) -> bool {
        self.shared.lock().exchange.as_ref().is_some_and(|exchange| exchange.uses(area))
    }

    /// What was measured and decided.
    pub fn telemetry(&self) -> Vec<MchannelTelemetry> {
        let now_us = Waker::now_us();
        let work = self.shared.lock();
        let of = |(part, metered): (&Part, &Metered)| {
            let (Part::Device(lease), Moves::Queues(queues)) = (part, &metered.moves) else { return None };
            let (bytes, messages) = queues.pacing.moved();
            Some(MchannelTelemetry {
                lease: Some(*lease),
                bytes,
                messages,
                held_us: whole(queues.pacing.held_us(now_us)),
                rate: rounded(metered.said.rate),
                demand: rounded(metered.said.demand),
                share: metered.said.share.map(rounded),
                limit: metered.said.limit.map(rounded),
            })
        };
        work.all.iter().filter_map(of).collect()
    }

    /// What was measured and decided of vCPUs.
    pub fn vcpus(&self) -> Vec<VcpuTelemetry> {
        let work = self.shared.lock();
        let of = |(part, metered): (&Part, &Metered)| {
            let (Part::Vcpus(instance), Moves::Vcpus(vcpus)) = (part, &metered.moves) else { return None };
            // One that has not reported yet makes no window.
            let window_ns = vcpus.window_us.saturating_mul(1000);
            Some(VcpuTelemetry {
                instance: Some(*instance),
                bytes: vcpus.bytes,
                slept_us: vcpus.slept_us,
                rate: rounded(metered.said.rate),
                demand: rounded(metered.said.demand),
                share: metered.said.share.map(rounded),
                run_ns: rounded(as_f64(window_ns) * vcpus.part()),
                window_ns,
            })
        };
        work.all.iter().filter_map(of).collect()
    }

    /// How loaded the elements of the fabric are that it looks at.
    pub fn elements(&self) -> Vec<ElementTelemetry> {
        let work = self.shared.lock();
        let (Some(plan), Some(exchange)) = (&work.plan, &work.exchange) else { return Vec::new() };
        let of = |it: &ElementObject| {
            let level = exchange.level(it.element)?;
            let capacity = plan.host.capacity(ElementId(it.element)).map_or(0, rounded);
            Some(ElementTelemetry { element: it.element, level: Some(level.number()), capacity })
        };
        plan.fabric.elements.iter().filter_map(of).collect()
    }

    /// Writes nothing any more, and lets all move what they like.
    pub fn stop(&mut self) {
        self.agents = None;
        self.shared.stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends after the round that it is in, and has nothing to tell.
            let _ = thread.join();
        }
        self.share_nothing();
    }

    /// What its threads have.
    #[cfg(test)]
    pub(super) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    fn check(&self, area: Area) -> Result<(), String> {
        let bytes = self.shared.lock().pool_bytes;
        let end = area.start_byte().checked_add(area.bytes());
        if area.lines.get() > 0 && end.is_some_and(|end| end.get() <= bytes) {
            Ok(())
        } else {
            Err(format!("{area} lie outside of the pool, or are none"))
        }
    }

    fn begin(&mut self) -> io::Result<()> {
        if self.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name("mchannels".to_owned()).spawn(move || shared.run())?;
            self.shared.waker.is_thread(thread.thread().clone());
            self.thread = Some(thread);
        }
        Ok(())
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        while !self.stopping.load(Ordering::Acquire) {
            let pause = self.lock().turn(&self.waker);
            match pause {
                Some(pause) => thread::park_timeout(pause),
                None => thread::park(),
            }
        }
    }
}

impl Host for Arc<Shared> {
    fn enter(&self, hello: &Hello, number: u64, link: &Arc<Link>) -> Result<InstanceId, String> {
        let entered = self.lock().enter(hello, number, link);
        self.waker.wake();
        entered
    }

    fn report(&self, vm: InstanceId, number: u64, report: &Report) -> Result<(), String> {
        let mut work = self.lock();
        let metered = work.all.get_mut(&Part::Vcpus(vm));
        let reported = match metered.map(|metered| &mut metered.moves) {
            Some(Moves::Vcpus(vcpus)) if vcpus.is_of(number) => vcpus.report(report),
            _ => return Err("nothing is known of these vCPUs any more".to_owned()),
        };
        if reported.is_err() {
            work.remove(Part::Vcpus(vm));
        }
        reported
    }

    fn leave(&self, vm: InstanceId, number: u64) {
        let is_its = |it: &Metered| matches!(&it.moves, Moves::Vcpus(vcpus) if vcpus.is_of(number));
        let mut work = self.lock();
        if work.all.get(&Part::Vcpus(vm)).is_some_and(is_its) {
            work.remove(Part::Vcpus(vm));
        }
    }
}

/// Has `plan` take over what is said of it now.
fn take_over(plan: &mut Option<Plan>, metered: &mut Metered, object: MchannelObject) {
    match plan {
        Some(plan) => plan.change(metered, object),
        None => metered.object = object,
    }
}

impl Work {
    /// An agent has come for the vCPUs of an instance that has devices here.
    fn enter(&mut self, hello: &Hello, number: u64, link: &Arc<Link>) -> Result<InstanceId, String> {
        let name = &hello.instance;
        if hello.version != VERSION {
            return Err(format!(
                "it speaks version {}, and this frontend {VERSION}: install the same release of both",
                hello.version
            ));
        }
        let Some(plan) = &self.plan else {
            return Err(
                "the bandwidth of the fabric is not shared out: see podctl mchannel fabric".to_owned()
            );
        };
        let sample_us = f64::from(plan.fabric.sample_us);
        let its = |it: &&Metered| it.pacing().is_some() && it.id.is_some() && &it.object.name == name;
        let Some(object) = self.all.values().find(its).map(|it| it.object.clone()) else {
            return Err(format!(
                "{name} has no device here with a share of the fabric: see podctl mchannel set {name}"
            ));
        };
        let instance = object.instance;
        let part = Part::Vcpus(instance);
        if let Some(Metered { moves: Moves::Vcpus(other), .. }) = self.all.get(&part) {
            if !other.is_silent(sample_us) {
                return Err(format!(
                    "process {} holds the vCPUs of {name} already: end that first",
                    other.process()
                ));
            }
            self.dismiss_where("another agent has come in the meantime", |it, _| {
                it.object.instance == instance
            });
        }
        // Before an order can be given.
        link.send(&ToAgent::Welcome).map_err(|error| error.to_string())?;
        let vcpus = Vcpus::new(Box::new(Arc::clone(link)), (number, hello.process), hello.holds);
        let mut metered = Metered::vcpus(object, vcpus);
        if let Some(plan) = &mut self.plan {
            plan.open(&mut metered);
        }
        self.all.insert(part, metered);
        Ok(instance)
    }

    /// Measures something no longer. It may move what it likes.
    fn remove(&mut self, part: Part) -> Option<Metered> {
        let mut metered = self.all.remove(&part)?;
        match &mut self.plan {
            Some(plan) => plan.close(&mut metered),
            None => metered.free(),
        }
        Some(metered)
    }

    /// Sends agents away.
    fn dismiss_where(&mut self, reason: &str, leaves: impl Fn(&Metered, &Vcpus) -> bool) {
        let of = |(part, metered): (&Part, &Metered)| match &metered.moves {
            Moves::Vcpus(vcpus) if leaves(metered, vcpus) => Some(*part),
            _ => None,
        };
        let parts: Vec<Part> = self.all.iter().filter_map(of).collect();
        for part in parts {
            if let Some(Metered { moves: Moves::Vcpus(vcpus), .. }) = self.remove(part) {
                vcpus.dismiss(reason);
            }
        }
    }

    /// Does what is due. Returns when to come again; nothing: when woken.
    fn turn(&mut self, waker: &Waker) -> Option<Duration> {
        let now_us = Waker::now_us();
        if let Some(plan) = &self.plan {
            let sample_us = f64::from(plan.fabric.sample_us);
            self.dismiss_where("nothing was heard of it for too long", |_, it| it.is_silent(sample_us));
        }
        let (Some(plan), Some(exchange)) = (&mut self.plan, &mut self.exchange) else {
            waker.fall_silent();
            return None;
        };
        let k_us = f64::from(plan.fabric.sample_us);
        let micros = |us: f64| Duration::from_secs_f64(us.max(1.0) / 1e6);
        let elapsed_us = now_us - self.last_us;
        if elapsed_us < k_us * 0.95 {
            return Some(micros(k_us - elapsed_us));
        }
        self.last_us = now_us;
        if moved_since(&self.all, now_us) {
            self.active_us = now_us;
        }
        exchange.round(plan, &mut self.all, elapsed_us, now_us);
        if now_us - self.active_us > SILENT_AFTER_KS * k_us {
            waker.fall_silent();
            if !moved_since(&self.all, now_us) {
                return None;
            }
            waker.wake();
        }
        Some(micros(k_us - (Waker::now_us() - now_us)))
    }
}

/// Whether anything moved or waited since the last round.
fn moved_since(all: &BTreeMap<Part, Metered>, now_us: f64) -> bool {
    all.values().any(|metered| metered.moved_since(now_us))
}
