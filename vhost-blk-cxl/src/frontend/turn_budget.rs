//! How much is done for one disk in a turn of the worker, while all others of its host wait.
//!
//! Requests are counted elsewhere, but they are not alike: a chain may have a thousand descriptors, and one that breaks the rules is walked
//! twice; a write may have megabytes to be copied. No guest that uses its disk comes near the first limit: requests of 128 KiB in pages take
//! 34 descriptors each.

/// Descriptors that are looked at, and what a request takes beyond them.
const DESCRIPTORS: u32 = 8192;
/// Bytes that are copied, and what a request takes beyond them.
pub(super) const BYTES: u64 = 2 << 20;

/// In descriptors: what is looked at for the end of a chain that breaks the rules, at most.
const MALFORMED_COST: u32 = 4096;
/// In descriptors: what a request costs that is answered at once. Of what goes to a backend there are never many in a turn.
const ANSWERED_COST: u32 = 128;

/// What is left in this turn.
#[derive(Debug, Default)]
pub(super) struct TurnBudget {
    descriptors: u32,
    bytes: u64,
}

impl TurnBudget {
    /// What a turn begins with.
    pub(super) fn whole() -> Self {
        Self { descriptors: DESCRIPTORS, bytes: BYTES }
    }

    /// Whether anything more may be begun.
    #[inline]
    pub(super) fn is_left(&self) -> bool {
        self.descriptors > 0 && self.bytes > 0
    }

    /// A chain was walked.
    #[inline]
    pub(super) fn walked(&mut self, descriptors: u16) {
        self.descriptors = self.descriptors.saturating_sub(descriptors.into());
    }

    /// So was one that breaks the rules.
    pub(super) fn malformed(&mut self, descriptors: u16) {
        self.walked(descriptors);
        self.descriptors = self.descriptors.saturating_sub(MALFORMED_COST);
    }

    /// It was answered without a backend.
    pub(super) fn answered(&mut self) {
        self.descriptors = self.descriptors.saturating_sub(ANSWERED_COST);
    }

    /// Data were copied.
    #[inline]
    pub(super) fn copied(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
    use cxl_pool::{Area, HostId, LineCount, LineOffset};
    use pod_protocol::objects::DiskObject;
    use vhost_frontend::StopReason;
    use vhost_frontend::mock::{MockGuest, Piece};
    use virtio_bindings::bindings::virtio_config::VIRTIO_F_VERSION_1;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::frontend::disk::{Allowance, Disk};
    use crate::omissions::objects;

    const QUEUES: u16 = 4;
    const SIZE: u16 = 1024;
    /// As often as a chain is in a ring.
    const EACH: u16 = 32;
    const T_OUT: u32 = 1;
    const T_GET_ID: u32 = 8;
    /// Nobody knows it.
    const T_NONE: u32 = 99;

    struct Scene {
        disk: Disk<SimulatedMemory>,
        guest: MockGuest,
    }

    impl Scene {
        /// A guest that has made the same request many times, in all of its queues.
        fn new(kind: u32, data: &[Piece]) -> Self {
            Self::with(kind, data, EACH)
        }

        /// The same, so many times. Those of different queues do not meet.
        fn with(kind: u32, data: &[Piece], each: u16) -> Self {
            let pool = SimulatedPool::new(1, 16 << 20);
            let area = |start| Area::new(LineOffset::new(start), LineCount::covering(8 << 20));
            let (object, _) = objects(area(4096), area(4096));
            let object = DiskObject { queues: QUEUES, size_bytes: 1 << 30, ram_area: None, ..object };
            let memory = pool.host(HostId::new(1));
            let mut disk = Disk::new(memory, object, Arc::default(), Arc::default(), None);
            let mut guest = MockGuest::new(16 << 20, QUEUES, SIZE);
            let memory = guest.memory().clone();
            for queue in 0..QUEUES {
                let at = guest.data_start() + u64::from(queue) * 128;
                let mut header = kind.to_le_bytes().to_vec();
                header.extend([0; 4]);
                header.extend((u64::from(queue) * 8192).to_le_bytes());
                memory.write_slice(&header, GuestAddress(at)).unwrap();
                let mut pieces = vec![Piece { address: at, bytes: 16, writable: false }];
                let start = guest.data_start();
                pieces.extend(data.iter().map(|piece| Piece { address: start + piece.address, ..*piece }));
                pieces.push(Piece { address: at + 64, bytes: 1, writable: true });
                disk.start_ring(guest.device_ring(queue, 1 << VIRTIO_F_VERSION_1));
                let head = guest.offer_silently(queue.into(), &pieces);
                (1..each).for_each(|_| guest.ring(queue.into()).publish(&memory, head));
            }
            Self { disk, guest }
        }

        /// A piece of data behind all headers and statuses.
        fn piece(bytes: u32, writable: bool) -> Piece {
            Piece { address: 1 << 20, bytes, writable }
        }

        /// How many requests of each queue were answered.
        fn answered(&mut self) -> Vec<u16> {
            let index = |queue: u16| self.guest.ring(queue.into()).used_ring() + 2;
            let places: Vec<u64> = (0..QUEUES).map(index).collect();
            places.into_iter().map(|at| self.guest.memory().read_obj(GuestAddress(at)).unwrap()).collect()
        }

        /// One turn. Returns how many requests were answered in it, and how many sent.
        fn turn(&mut self) -> (u16, usize) {
            let before: u16 = self.answered().iter().sum();
            let mut outbox = Vec::new();
            let mut allowance = Allowance { messages: 64, more: true, outbox: &mut outbox };
            assert!(self.disk.submit(&mut allowance), "there is more to do");
            (self.answered().iter().sum::<u16>() - before, outbox.len())
        }

        /// So many turns at least, in which all is answered.
        fn all_are_answered_in(&mut self, turns: u16) {
            let most = (QUEUES * EACH).div_ceil(turns);
            let (mut left, mut first) = (QUEUES * EACH, 0);
            while left > 0 {
                let (answered, _) = self.turn();
                assert!((1..=most).contains(&answered), "{answered} in a turn");
                left -= answered;
                first += 1;
                if first == usize::from(QUEUES) {
                    assert!(self.answered().iter().all(|answered| *answered > 0), "{:?}", self.answered());
                }
            }
        }
    }

    #[test]
    fn chains_of_many_descriptors_take_many_turns() {
        let mut data = vec![Scene::piece(0, true); 900];
        data.push(Scene::piece(20, true));
        Scene::new(T_GET_ID, &data).all_are_answered_in(QUEUES * EACH / 10);
    }

    #[test]
    fn so_do_those_that_break_the_rules() {
        let mut data = vec![Scene::piece(0, true); 900];
        data.push(Piece { address: 1 << 60, bytes: 1, writable: true });
        Scene::new(T_GET_ID, &data).all_are_answered_in(QUEUES * EACH / 2);
    }

    #[test]
    fn so_do_many_that_are_answered_at_once() {
        Scene::new(T_GET_ID, &[Scene::piece(20, true)]).all_are_answered_in(2);
        Scene::new(T_NONE, &[]).all_are_answered_in(2);
    }

    /// As many as a ring has, each of them short.
    #[test]
    fn so_do_those_of_a_predecessor_that_are_refused() {
        let mut scene = Scene::with(T_GET_ID, &[Scene::piece(20, true)], 1);
        let pieces = [
            Piece { address: scene.guest.data_start(), bytes: 16, writable: false },
            Scene::piece(20, true),
            Piece { address: scene.guest.data_start() + 64, bytes: 1, writable: true },
        ];
        let mut heads: Vec<u16> = (0..300).map(|_| scene.guest.offer_silently(0, &pieces)).collect();
        // The first of the scene.
        heads.insert(0, 0);
        scene.disk.start_ring(scene.guest.device_ring_owing(0, 1 << VIRTIO_F_VERSION_1, &heads));
        let (done, stopped) = std::sync::mpsc::sync_channel(1);
        scene.disk.stop_ring(0, StopReason::Requested, done);
        scene.disk.hurry_ring(0, StopReason::Requested);
        let (mut answered, mut turns) = (0, 0);
        while answered < heads.len() {
            assert!(stopped.try_recv().is_err(), "{answered} were answered");
            assert!(scene.disk.refuse_owed(), "there is more to do");
            let now = usize::from(scene.answered()[0]);
            assert!((1..=65).contains(&(now - answered)), "{} in a turn", now - answered);
            (answered, turns) = (now, turns + 1);
        }
        assert!(turns > 4);
        assert_eq!(stopped.try_recv(), Ok(301));
        assert!(!scene.disk.refuse_owed());
        let status: u8 = scene.guest.memory().read_obj(GuestAddress(scene.guest.data_start() + 64)).unwrap();
        assert_eq!(status, 1);
    }

    #[test]
    fn what_is_copied_in_a_turn_is_bounded_and_many_small_requests_go_at_once() {
        let mut scene = Scene::with(T_OUT, &[Scene::piece(3 << 19, false)], 1);
        assert_eq!([scene.turn(), scene.turn()], [(0, 2), (0, 2)]);
        let mut budget = TurnBudget::whole();
        for _ in 0..64 {
            assert!(budget.is_left());
            budget.walked(34);
            budget.copied(4096);
        }
        assert!(budget.is_left());
        budget.copied(BYTES);
        assert!(!budget.is_left());
    }
}
