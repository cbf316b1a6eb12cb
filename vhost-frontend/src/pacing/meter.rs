use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cxl_pool::{Area, Memory};
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{FabricObject, MchannelObject};
use pod_protocol::telemetry::MchannelTelemetry;

use super::plan::{Metered, Plan, Said, free};
use super::round::{Exchange, Exchanges, rounded};
use super::{Pacing, Waker};

/// After so many K in which nothing moved and nothing waited, the meter sleeps until something does.
const SILENT_AFTER_KS: f64 = 50.0;

/// Measures what devices move, and decides with the rest of the pod how much they may. See the [module](super).
pub struct Meter {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
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
    all: BTreeMap<LeaseId, Metered>,
    /// When the last K ended.
    last_us: f64,
    /// When something moved or waited last.
    active_us: f64,
}

impl Meter {
    /// Measures nothing yet, and has no thread.
    pub fn new<M: Memory>(memory: M) -> Self {
        let work = Work {
            pool_bytes: memory.size_bytes(),
            open: Box::new(move |plan| Box::new(Exchange::new(memory.clone(), plan))),
            plan: None,
            exchange: None,
            all: BTreeMap::new(),
            last_us: 0.0,
            active_us: 0.0,
        };
        let shared = Shared { waker: Waker::new(), stopping: AtomicBool::new(false), work: Mutex::new(work) };
        Self { shared: Arc::new(shared), thread: None }
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
                plan.become_(fabric).map_err(|error| wrong(&error))?;
                for metered in all.values_mut() {
                    plan.note_most(metered);
                }
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
    }

    /// Measures a device and holds it to its share, once there is a fabric to share.
    pub fn measure(&mut self, object: MchannelObject) -> Arc<Pacing> {
        let mut work = self.shared.lock();
        let Work { plan, all, .. } = &mut *work;
        let metered = all.entry(object.lease).or_insert_with(|| Metered {
            object: object.clone(),
            pacing: Pacing::new(Arc::clone(&self.shared.waker), 1000.0),
            id: None,
            most: f64::INFINITY,
            bytes: 0,
            held_us: 0.0,
            elsewhere: Vec::new(),
            said: Said::default(),
        });
        let known = metered.id.is_some() && metered.object == object;
        if let Some(plan) = plan.as_mut().filter(|_| !known) {
            let weight_only = MchannelObject { weight: object.weight, ..metered.object.clone() } == object;
            metered.object = object;
            if let Some(id) = metered.id.filter(|_| weight_only) {
                // It is open, and its estimates stay good.
                let _ = plan.host.set_weight(id, f64::from(metered.object.weight));
            } else {
                plan.close(metered);
                plan.open(metered);
            }
        } else if !known {
            metered.object = object;
        }
        let pacing = Arc::clone(&metered.pacing);
        drop(work);
        self.shared.waker.wake();
        pacing
    }

    /// Measures a device no longer. It may move what it likes.
    pub fn forget(&mut self, lease: LeaseId) {
        let mut work = self.shared.lock();
        let Work { plan, all, .. } = &mut *work;
        let Some(mut metered) = all.remove(&lease) else { return };
        match plan {
            Some(plan) => plan.close(&mut metered),
            None => free(&mut metered),
        }
    }

    /// What holds a device to its share, if it is measured.
    pub fn pacing(&self, lease: LeaseId) -> Option<Arc<Pacing>> {
        self.shared.lock().all.get(&lease).map(|metered| Arc::clone(&metered.pacing))
    }

    /// Whether it writes there.
    pub fn uses(&self, area: Area) -> bool {
        self.shared.lock().exchange.as_ref().is_some_and(|exchange| exchange.uses(area))
    }

    /// What was measured and decided.
    pub fn telemetry(&self) -> Vec<MchannelTelemetry> {
        let now_us = self.shared.waker.now_us();
        let work = self.shared.lock();
        let of = |(lease, metered): (&LeaseId, &Metered)| {
            let (bytes, messages) = metered.pacing.moved();
            MchannelTelemetry {
                lease: Some(*lease),
                bytes,
                messages,
                held_us: super::whole(metered.pacing.held_us(now_us)),
                rate: rounded(metered.said.rate),
                demand: rounded(metered.said.demand),
                share: metered.said.share.map(rounded),
                limit: metered.said.limit.map(rounded),
            }
        };
        work.all.iter().map(of).collect()
    }

    /// Writes nothing any more, and lets all move what they like.
    pub fn stop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends after the round that it is in, and has nothing to tell.
            let _ = thread.join();
        }
        self.share_nothing();
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

impl Work {
    /// Does what is due. Returns when to come again; nothing: when woken.
    fn turn(&mut self, waker: &Waker) -> Option<Duration> {
        let now_us = waker.now_us();
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
        Some(micros(k_us - (waker.now_us() - now_us)))
    }
}

/// Whether anything moved or waited since the last round.
fn moved_since(all: &BTreeMap<LeaseId, Metered>, now_us: f64) -> bool {
    all.values().any(|metered| {
        metered.pacing.moved().0 != metered.bytes || metered.pacing.held_us(now_us) > metered.held_us
    })
}
