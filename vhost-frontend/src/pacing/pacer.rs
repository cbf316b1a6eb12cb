use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mem_channel::ByteBudget;

use super::{Pacing, Waker, as_f64, whole};

/// What waits is tried again after so long.
const LONGEST_WAIT_S: f64 = 0.01;

/// In which way bytes come to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The guest asks for it: what it sends, and all that disks do.
    Asked,
    /// Others decide: what a guest receives.
    Unasked,
}

/// Holds one device to its share of the fabric. It belongs to the engine's worker.
///
/// What the guest asks for and what it receives have one budget. Each is sure of half of it while there is both: others cannot silence a guest by sending to
/// it, nor does one that always sends hear nothing any more.
#[derive(Debug)]
pub struct Pacer {
    pacing: Arc<Pacing>,
    budget: ByteBudget,
    rate: u64,
    sure_rate: u64,
    window_us: u64,
    now_us: f64,
    /// By [`Way`].
    lanes: [Lane; 2],
    /// The part of the device's that each way is sure of.
    part: f64,
    /// Something was counted since the last look.
    counted: bool,
}

/// What goes one way.
#[derive(Clone, Copy, Debug)]
struct Lane {
    /// What it may move of its device's budget whatever goes the other way.
    own: ByteBudget,
    /// What it may move whatever other devices of its VM do. Without that a device whose long packets have to wait would get nothing
    /// beside one that takes what its VM may move as soon as it is there.
    sure: ByteBudget,
    /// The length of what has to wait.
    refused: Option<u64>,
}

impl Pacer {
    /// Of a device of which all is asked for. Nothing is saved up yet.
    pub fn new(pacing: Arc<Pacing>) -> Self {
        Self::begin_at(pacing, 1.0, Waker::now_us())
    }

    /// Of a device that receives as well. Nothing is saved up yet.
    pub fn of_both_ways(pacing: Arc<Pacing>) -> Self {
        Self::begin_at(pacing, 0.5, Waker::now_us())
    }

    /// Nothing is saved up at this time.
    pub(super) fn begin_at(pacing: Arc<Pacing>, part: f64, now_us: f64) -> Self {
        let window_us = pacing.window_us.load(Ordering::Relaxed);
        let unlimited = f64::INFINITY.to_bits();
        let budget = ByteBudget::new(f64::from_bits(window_us), now_us);
        let lanes = [Lane { own: budget, sure: budget, refused: None }; 2];
        let (rate, sure_rate) = (unlimited, unlimited);
        Self { pacing, budget, rate, sure_rate, window_us, now_us, lanes, part, counted: false }
    }

    /// Looks at the clock, and at what the meter decided: once per turn. A meter that sleeps learns of the turn before: a
    /// fence for each message would cost more than all else here, and what moved is answered, so there is another turn.
    pub fn look(&mut self) {
        if std::mem::take(&mut self.counted) {
            self.pacing.waker.moved();
        }
        self.look_at(Waker::now_us());
    }

    /// Looks at what the meter decided, at this time.
    pub(super) fn look_at(&mut self, now_us: f64) {
        self.now_us = now_us;
        let window_us = self.pacing.window_us.load(Ordering::Relaxed);
        if window_us != self.window_us {
            self.window_us = window_us;
            self.budget = ByteBudget::new(f64::from_bits(window_us), now_us);
            for lane in &mut self.lanes {
                (lane.own, lane.sure) = (self.budget, self.budget);
            }
            (self.rate, self.sure_rate) = (f64::INFINITY.to_bits(), f64::INFINITY.to_bits());
        }
        let part = self.part;
        let rate = self.pacing.rate.load(Ordering::Relaxed);
        if rate != self.rate {
            self.rate = rate;
            self.budget.set_rate(f64::from_bits(rate), now_us);
            self.lanes.iter_mut().for_each(|lane| lane.own.set_rate(f64::from_bits(rate) * part, now_us));
        }
        let sure_rate = self.pacing.sure.load(Ordering::Relaxed);
        if sure_rate != self.sure_rate {
            self.sure_rate = sure_rate;
            self.lanes
                .iter_mut()
                .for_each(|lane| lane.sure.set_rate(f64::from_bits(sure_rate) * part, now_us));
        }
    }

    /// Whether so many bytes of a request or packet may be moved now. If not, move none of what goes this way until [`Pacer::wait`] has passed.
    ///
    /// Together with what other devices of the VM move on this host that is at most w·α·K·(1 + 2·T_W/K) in any interval K, as long as α stays and nothing is
    /// longer than [`Pacer::at_once_bytes`]; and one message more where some are.
    #[inline]
    pub fn admit(&mut self, way: Way, bytes: u64) -> bool {
        let now_us = self.now_us;
        let own = &mut self.lanes[way as usize].own;
        let is_own = own.has_room(bytes, now_us)
            && (is_saved_up(own.rate(), bytes, self.window_us) || self.budget.has_room(0, now_us));
        if !(is_own || self.budget.has_room(bytes, now_us)) || !self.vm_admits(way, bytes) {
            self.lanes[way as usize].refused = Some(bytes);
            self.pacing.hold(now_us);
            return false;
        }
        self.budget.take(bytes, now_us);
        let lane = &mut self.lanes[way as usize];
        if is_own {
            lane.own.take(bytes, now_us);
        }
        lane.refused = None;
        if self.lanes.iter().all(|lane| lane.refused.is_none()) {
            self.pacing.release(now_us);
        }
        self.count(bytes, 1);
        true
    }

    /// The most that may be asked for at once, in bytes: what is saved up in a T_W of what is sure. A longer message passes
    /// when so much is there and nothing is owed, and is paid back: one such message is beyond the bound, so it is to be moved in several pieces. [`u64::MAX`] while nothing is limited.
    #[inline]
    pub fn at_once_bytes(&self) -> u64 {
        let [Lane { own, sure, .. }, _] = &self.lanes;
        let rate = if self.is_free() { own.rate() } else { own.rate().min(sure.rate()) };
        whole(rate * f64::from_bits(self.window_us) / 1e6)
    }

    /// Whether its VM may move so many bytes more here; if so, they are taken from what it may.
    #[inline]
    fn vm_admits(&mut self, way: Way, bytes: u64) -> bool {
        if self.is_free() {
            return true;
        }
        let (vm, window_us) = (&self.pacing.vm, f64::from_bits(self.window_us));
        let sure = &mut self.lanes[way as usize].sure;
        if sure.has_room(bytes, self.now_us) {
            // What is longer than what is saved up of that goes into debt, and the next one that does waits until this is paid back, whichever device it is
            // of: several in debt together would be beyond the bound by several messages.
            let is_taken = if is_saved_up(sure.rate(), bytes, self.window_us) {
                vm.force(bytes, window_us, self.now_us);
                true
            } else {
                vm.lend(bytes, window_us, self.now_us)
            };
            if is_taken {
                sure.take(bytes, self.now_us);
                return true;
            }
        }
        vm.admit(bytes, window_us, self.now_us)
    }

    /// Whether no other device has a part in what it may move.
    #[inline]
    fn is_free(&self) -> bool {
        self.budget.rate().is_infinite() || self.pacing.vm.is_free()
    }

    /// After what time so many bytes may be taken, in µs.
    fn wait_us(&self, lane: &Lane, bytes: u64) -> f64 {
        let now_us = self.now_us;
        let after_debts = |lane: &ByteBudget, debts: &dyn Fn() -> f64| {
            let wait = lane.wait_us(bytes, now_us);
            if is_saved_up(lane.rate(), bytes, self.window_us) { wait } else { wait.max(debts()) }
        };
        let own = after_debts(&lane.own, &|| self.budget.wait_us(0, now_us));
        let own = self.budget.wait_us(bytes, now_us).min(own);
        if self.is_free() {
            return own;
        }
        let (vm, window_us) = (&self.pacing.vm, f64::from_bits(self.window_us));
        let sure = after_debts(&lane.sure, &|| vm.wait_us(0, window_us, now_us));
        own.max(vm.wait_us(bytes, window_us, now_us).min(sure))
    }

    #[inline]
    fn count(&mut self, bytes: u64, messages: u64) {
        self.pacing.count(bytes, messages);
        self.counted = true;
    }

    /// Whether what was refused last of what goes this way would be refused now.
    #[inline]
    pub fn is_held(&self, way: Way) -> bool {
        let lane = &self.lanes[way as usize];
        lane.refused.is_some_and(|bytes| self.wait_us(lane, bytes) > 0.0)
    }

    /// When to try again what was refused, if anything was. Soon, however small the share is: it may grow.
    pub fn wait(&self) -> Option<Duration> {
        let waits = self.lanes.iter().filter_map(|lane| Some(self.wait_us(lane, lane.refused?)));
        let wait_us = waits.reduce(f64::min)?;
        Some(Duration::from_secs_f64((wait_us / 1e6).clamp(1e-6, LONGEST_WAIT_S)))
    }

    /// The wait is over, or what waited is gone.
    pub fn resume(&mut self) {
        self.look();
        self.lanes.iter_mut().for_each(|lane| lane.refused = None);
        self.pacing.release(self.now_us);
    }
}

/// Whether so many bytes are ever saved up in a T_W at this rate.
#[inline]
fn is_saved_up(rate: f64, bytes: u64, window_us: u64) -> bool {
    as_f64(bytes) <= rate * f64::from_bits(window_us) / 1e6
}

impl Drop for Pacer {
    fn drop(&mut self) {
        if self.counted {
            self.pacing.waker.moved();
        }
        self.pacing.release(Waker::now_us());
    }
}

#[cfg(test)]
mod tests {
    use std::thread::sleep;

    use super::super::VmBudget;
    use super::*;

    fn paced(rate: f64) -> (Arc<Pacing>, Pacer) {
        // A window that no delay of a test outlasts.
        let pacing = Pacing::new(Waker::new(), Arc::default(), 1e9);
        pacing.limit(rate);
        let pacer = Pacer::new(Arc::clone(&pacing));
        (pacing, pacer)
    }

    #[test]
    fn what_is_admitted_is_counted_and_what_waits_says_for_how_long() {
        // 1000 s of 1 byte/s may be saved up, and are.
        let (pacing, mut pacer) = paced(1.0);
        pacer.look();
        assert!(pacer.admit(Way::Asked, 600) && pacer.admit(Way::Asked, 400));
        assert_eq!(pacing.moved(), (1000, 2));
        assert_eq!(pacer.wait(), None);
        assert!(!pacer.admit(Way::Asked, 900));
        assert_eq!(pacer.wait(), Some(Duration::from_millis(10)), "not 900 s: it may get more");
        assert!(pacer.is_held(Way::Asked));
        assert_eq!(pacing.moved(), (1000, 2));
    }

    #[test]
    fn time_held_back_is_told_and_ends_with_the_wait() {
        let (pacing, mut pacer) = paced(1.0);
        pacer.look();
        assert!(pacer.admit(Way::Asked, 1000) && !pacer.admit(Way::Asked, 900));
        let began_us = pacer.now_us;
        sleep(Duration::from_millis(2));
        let later_us = Waker::now_us();
        assert!((pacing.held_us(later_us) - (later_us - began_us)).abs() <= 1.0);
        pacer.resume();
        let held_us = pacing.held_us(Waker::now_us());
        assert!(held_us >= 1999.0);
        sleep(Duration::from_millis(1));
        assert!((pacing.held_us(Waker::now_us()) - held_us).abs() < 1e-6);
        assert!(pacer.wait().is_none() && !pacer.is_held(Way::Asked));
    }

    #[test]
    fn a_new_share_and_a_new_window_hold_at_the_next_look() {
        let (pacing, mut pacer) = paced(1.0);
        pacer.look();
        assert!(pacer.admit(Way::Asked, 1000) && !pacer.admit(Way::Asked, 1));
        pacing.limit(f64::INFINITY);
        pacer.look();
        assert!(pacer.admit(Way::Asked, 1 << 40));
        pacing.limit(1e6);
        pacing.set_window(1000.0);
        pacer.look();
        assert!(pacer.admit(Way::Asked, 1000) && !pacer.admit(Way::Asked, 1000), "1 ms of 1 MB/s");
        assert!(as_f64(pacing.moved().0) > 1e12);
    }

    #[test]
    fn a_meter_that_sleeps_is_woken_by_the_turn_after_something_moved() {
        let (pacing, mut pacer) = paced(f64::INFINITY);
        let is_silent = || pacing.waker.silent.load(Ordering::Relaxed);
        pacing.waker.fall_silent();
        pacer.look();
        assert!(is_silent(), "nothing moved");
        for way in [Way::Asked, Way::Unasked] {
            pacing.waker.fall_silent();
            assert!(pacer.admit(way, 1));
            pacer.look();
            assert!(!is_silent());
            pacing.waker.fall_silent();
            pacer.look();
            assert!(is_silent(), "it was told once");
        }
    }

    #[test]
    fn devices_of_a_vm_have_one_budget_together_and_each_a_part_that_is_its_own() {
        let (waker, vm) = (Waker::new(), Arc::<VmBudget>::default());
        let device = || {
            let pacing = Pacing::new(Arc::clone(&waker), Arc::clone(&vm), 1000.0);
            // 100 kB, which is all that the VM may move.
            pacing.limit(1e8);
            pacing.limit_together(1e8, 4, 0.0);
            Pacer::begin_at(pacing, 1.0, 0.0)
        };
        let mut devices = [device(), device(), device(), device()];
        let mut take = |device: usize, bytes: u64, now_us: f64| {
            devices[device].look_at(now_us);
            let taken =
                (0..1000).take_while(|_| devices[device].admit(Way::Asked, bytes)).count() as u64 * bytes;
            (taken, devices[device].wait().map(|wait| wait.as_micros()))
        };
        assert_eq!(take(0, 1000, 1e6), (100_000, Some(10)));
        assert_eq!(take(1, 1000, 1e6).0, 25_000, "what is its own");
        // The first one takes what there is at each moment, and long packets of another pass all the same.
        let mut passed = 0;
        for step in 0..1000 {
            let now_us = 1e6 + f64::from(step) * 100.0;
            take(0, 1000, now_us);
            passed += take(2, 65_536, now_us).0;
        }
        assert!(as_f64(passed) >= 0.2 * 1e7, "{passed} of 10 MB");
    }

    #[test]
    fn each_way_is_sure_of_half_and_has_all_that_the_other_one_leaves() {
        for way in [Way::Asked, Way::Unasked] {
            let other = if way == Way::Asked { Way::Unasked } else { Way::Asked };
            let (pacing, _) = paced(1.0);
            let mut pacer = Pacer::of_both_ways(Arc::clone(&pacing));
            pacer.look();
            let mut take = |way, most: u64| (0..most).take_while(|_| pacer.admit(way, 10)).count();
            assert_eq!(take(way, 1000), 100, "all that is saved up");
            assert_eq!(take(other, 1000), 50, "what is its own");
            assert_eq!(pacing.moved(), (1500, 150));
            assert!(pacer.is_held(way) && pacer.is_held(other));
        }
    }

    #[test]
    fn one_way_that_goes_on_does_not_end_the_wait_of_the_other() {
        let (pacing, _) = paced(1.0);
        let mut pacer = Pacer::of_both_ways(Arc::clone(&pacing));
        pacer.look();
        while pacer.admit(Way::Unasked, 100) {}
        assert!(pacer.admit(Way::Asked, 100));
        assert_ne!(pacing.held_since_us.load(Ordering::Relaxed), 0);
        assert!(pacer.wait().is_some());
        pacer.resume();
        assert_eq!((pacing.held_since_us.load(Ordering::Relaxed), pacer.wait()), (0, None));
    }
}
