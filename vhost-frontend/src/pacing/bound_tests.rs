//! §4.5 for what queues move, whatever it is: random traffic both ways, of several devices of a VM.

use std::sync::Arc;

use proptest::prelude::*;

use super::vm_budget::VmBudget;
use super::{Pacer, Pacing, Waker, Way, as_f64};

/// The longest packet, its header included.
const LONGEST_BYTES: u64 = 65_562;
/// Pieces of packets are whole cache lines.
const LINE_BYTES: u64 = 64;
/// Steps of a disk's requests are whole blocks.
const BLOCK_BYTES: u64 = 4096;

/// Devices of one VM, and what each of them has yet to move, by way.
struct Vm {
    /// What pieces are made of: none is shorter.
    unit_bytes: u64,
    pacings: Vec<Arc<Pacing>>,
    pacers: Vec<Pacer>,
    left: Vec<[u64; 2]>,
    /// When, and how much.
    moved: Vec<(f64, u64)>,
    now_us: f64,
}

impl Vm {
    fn with_nics(devices: usize, rate: f64, window_us: f64) -> Self {
        Self::new(devices, rate, window_us, (0.5, LINE_BYTES))
    }

    fn with_disks(devices: usize, rate: f64, window_us: f64) -> Self {
        Self::new(devices, rate, window_us, (1.0, BLOCK_BYTES))
    }

    fn new(devices: usize, rate: f64, window_us: f64, (part, unit_bytes): (f64, u64)) -> Self {
        let (waker, vm) = (Waker::new(), Arc::<VmBudget>::default());
        let device = || {
            let pacing = Pacing::new(Arc::clone(&waker), Arc::clone(&vm), window_us);
            pacing.limit(rate);
            pacing.limit_together(rate, devices, 0.0);
            pacing
        };
        let pacings: Vec<_> = (0..devices).map(|_| device()).collect();
        let pacers = pacings.iter().map(|pacing| Pacer::begin_at(Arc::clone(pacing), part, 0.0)).collect();
        Self { unit_bytes, pacings, pacers, left: vec![[0; 2]; devices], moved: Vec::new(), now_us: 0.0 }
    }

    /// Moves all that may be moved now, as the engines do: what is long in pieces.
    fn turn(&mut self) {
        for (pacer, left) in self.pacers.iter_mut().zip(&mut self.left) {
            pacer.look_at(self.now_us);
            for way in [Way::Asked, Way::Unasked] {
                let left = &mut left[way as usize];
                while *left > 0 {
                    let whole_units = pacer.at_once_bytes() / self.unit_bytes * self.unit_bytes;
                    let piece = whole_units.max(self.unit_bytes).min(*left);
                    if !pacer.admit(way, piece) {
                        break;
                    }
                    *left -= piece;
                    self.moved.push((self.now_us, piece));
                }
            }
        }
    }

    /// The most that any interval has beyond w·α·K, in bytes.
    fn excess(&self, rate: f64) -> f64 {
        let (mut most, mut open, mut last_us) = (0.0_f64, 0.0_f64, 0.0);
        for (at_us, bytes) in &self.moved {
            open = (open - rate * (at_us - last_us) / 1e6).max(0.0) + as_f64(*bytes);
            (most, last_us) = (most.max(open), *at_us);
        }
        most
    }
}

proptest! {
    #[test]
    fn no_interval_has_more_bytes_both_ways_than_the_bound_allows(
        devices in 1..5_usize,
        // From where the longest packet is far more than twice what is saved up.
        rate in prop_oneof![5.2e6..1e8_f64, 1e8..2e9_f64],
        window_us in prop_oneof![Just(100.0), 100.0..10_000.0_f64],
        asked in prop::collection::vec((0_usize..4, any::<bool>(), 1..=LONGEST_BYTES, 0.0..2.0_f64), 1..300),
    ) {
        let mut vm = Vm::with_nics(devices, rate, window_us);
        for (device, is_asked, bytes, pause) in asked {
            vm.now_us += pause * pause * pause * window_us;
            vm.left[device % devices][usize::from(is_asked)] += bytes;
            vm.turn();
        }
        let bound = 2.0 * rate * window_us / 1e6;
        let found = vm.excess(rate);
        prop_assert!(found <= bound + 1.0, "{found} bytes more than w·α·K, where {bound} may be");
    }

    /// Where a block is more than what is saved up of a share, it goes into debt by one block at most, however many devices burst together.
    #[test]
    fn steps_longer_than_a_window_exceed_the_bound_by_one_of_them_at_most(
        devices in 1..6_usize,
        rate in prop_oneof![5e4..4e6_f64, 4e6..1e8_f64],
        window_us in prop_oneof![Just(1000.0), 100.0..10_000.0_f64],
        asked in prop::collection::vec((0_usize..6, 1_u64..64, 0.0..2.0_f64), 1..200),
    ) {
        let mut vm = Vm::with_disks(devices, rate, window_us);
        for (device, blocks, pause) in asked {
            vm.now_us += pause * pause * pause * as_f64(BLOCK_BYTES) / rate * 1e6;
            vm.left[device % devices][Way::Asked as usize] += blocks * BLOCK_BYTES;
            vm.turn();
        }
        let saved = rate * window_us / 1e6;
        let step = if saved / as_f64(devices as u64) < as_f64(BLOCK_BYTES) { as_f64(BLOCK_BYTES) } else { 0.0 };
        let (found, bound) = (vm.excess(rate), 2.0 * saved + step);
        prop_assert!(found <= bound + 1.0, "{found} bytes more than w·α·K, where {bound} may be");
    }
}

#[test]
fn disks_whose_steps_are_longer_than_a_window_have_equal_parts_of_all_of_a_share() {
    for (rate, devices) in [(5e5, 1), (5e5, 2), (5e5, 5), (3e6, 4)] {
        let mut vm = Vm::with_disks(devices, rate, 1000.0);
        for _ in 0..100_000 {
            vm.now_us += 50.0;
            vm.left.iter_mut().for_each(|left| left[Way::Asked as usize] = 16 * BLOCK_BYTES);
            vm.turn();
        }
        let each = rate * vm.now_us / 1e6 / as_f64(devices as u64);
        for pacing in &vm.pacings {
            let moved = as_f64(pacing.moved().0);
            assert!((0.9..1.1).contains(&(moved / each)), "{moved} of {each} bytes of {devices} at {rate}");
        }
    }
}

#[test]
fn who_always_wants_more_gets_all_of_a_share_one_way_and_what_it_is_sure_of_both_ways() {
    const WINDOW_US: f64 = 1000.0;
    // Of packets that take several windows, and of ones that take none.
    for (rate, devices) in [(5e6, 1), (5e6, 3), (1e9, 1), (1e9, 3)] {
        for ways in [&[Way::Asked][..], &[Way::Unasked], &[Way::Asked, Way::Unasked]] {
            let mut vm = Vm::with_nics(devices, rate, WINDOW_US);
            let mut by_way = [0.0; 2];
            for _ in 0..20_000 {
                vm.now_us += 50.0;
                for way in ways {
                    vm.left[0][*way as usize] += LONGEST_BYTES;
                }
                let before = vm.left[0];
                vm.turn();
                for way in ways {
                    by_way[*way as usize] += as_f64(before[*way as usize] - vm.left[0][*way as usize]);
                }
            }
            // Beside the other way a way is sure of half of what its device is sure of.
            let parts = if ways.len() > 1 { 2 * devices } else { 1 };
            let each = rate * vm.now_us / 1e6 / as_f64(parts as u64);
            for way in ways {
                let moved = by_way[*way as usize];
                // What is left of a window is not worth a whole piece.
                assert!(moved >= 0.9 * each, "{moved} of {each} bytes of {devices} devices at {rate}");
            }
        }
    }
}
