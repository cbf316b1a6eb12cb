//! §4.5 for what queues move, whatever it is: random traffic both ways, of several devices of a VM.

use std::sync::Arc;

use proptest::prelude::*;

use super::vm_budget::VmBudget;
use super::{Pacer, Pacing, Waker, Way, as_f64};

/// The longest packet, its header included.
const LONGEST_BYTES: u64 = 65_562;
/// Pieces are whole cache lines.
const LINE_BYTES: u64 = 64;

/// Devices of one VM, and what each of them has yet to move, by way.
struct Vm {
    pacers: Vec<Pacer>,
    left: Vec<[u64; 2]>,
    /// When, and how much.
    moved: Vec<(f64, u64)>,
    now_us: f64,
}

impl Vm {
    fn new(devices: usize, rate: f64, window_us: f64) -> Self {
        let (waker, vm) = (Waker::new(), Arc::<VmBudget>::default());
        let device = || {
            let pacing = Pacing::new(Arc::clone(&waker), Arc::clone(&vm), window_us);
            pacing.limit(rate);
            pacing.limit_together(rate, devices, 0.0);
            Pacer::begin_at(pacing, 0.5, 0.0)
        };
        let pacers: Vec<Pacer> = (0..devices).map(|_| device()).collect();
        Self { left: vec![[0; 2]; devices], pacers, moved: Vec::new(), now_us: 0.0 }
    }

    /// Moves all that may be moved now, as the engines do: what is long in pieces.
    fn turn(&mut self) {
        for (pacer, left) in self.pacers.iter_mut().zip(&mut self.left) {
            pacer.look_at(self.now_us);
            for way in [Way::Asked, Way::Unasked] {
                let left = &mut left[way as usize];
                while *left > 0 {
                    let whole_lines = pacer.at_once_bytes() / LINE_BYTES * LINE_BYTES;
                    let piece = whole_lines.max(LINE_BYTES).min(*left);
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
        let mut vm = Vm::new(devices, rate, window_us);
        for (device, is_asked, bytes, pause) in asked {
            vm.now_us += pause * pause * pause * window_us;
            vm.left[device % devices][usize::from(is_asked)] += bytes;
            vm.turn();
        }
        let bound = 2.0 * rate * window_us / 1e6;
        let found = vm.excess(rate);
        prop_assert!(found <= bound + 1.0, "{found} bytes more than w·α·K, where {bound} may be");
    }
}

#[test]
fn who_always_wants_more_gets_all_of_a_share_one_way_and_what_it_is_sure_of_both_ways() {
    const WINDOW_US: f64 = 1000.0;
    // Of packets that take several windows, and of ones that take none.
    for (rate, devices) in [(5e6, 1), (5e6, 3), (1e9, 1), (1e9, 3)] {
        for ways in [&[Way::Asked][..], &[Way::Unasked], &[Way::Asked, Way::Unasked]] {
            let mut vm = Vm::new(devices, rate, WINDOW_US);
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
