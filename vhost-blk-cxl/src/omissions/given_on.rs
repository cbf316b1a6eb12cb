//! A disk's area is given on to another host after its frontend died, with requests in flight, and left its lines anywhere: daemons scrub it
//! first, as the controller has them.

use cxl_pool::simulated::{Faults, Omission, Random, check_seeds, seeds};
use cxl_pool::{HostId, LINE_BYTES, LineOffset, Memory};
use pod_protocol::ids::PlaceId;
use pod_protocol::worker::Turned;

use super::spread::{FRONTEND, Spread, backend_host, in_sync};
use super::{T_IN, T_OUT, ToBackend, ToFrontend};

const NEXT: HostId = HostId::new(9);

/// What is not done, for what must be noticed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The frontend's host is not scrubbed.
    AtFrontend,
    /// Nor is waited for what the devices have.
    AtBackend,
}

fn run(seed: u64, missing: Missing) -> Result<(), String> {
    let mut scene = Spread::new(seed, &Omission::default(), vec![in_sync(), in_sync()]);
    let mut random = Random::new(seed);
    scene.begin();
    let places = scene.places(40);
    scene.carry_out(T_OUT, &places[..20]);
    scene.drives.iter().for_each(|drive| drive.hold(true));
    scene.offer(T_IN, &places);
    (0..random.below(400)).for_each(|_| _ = scene.turn_one());
    scene.frontend_dies();

    let (area, lease) = (scene.disk.data_area, scene.disk.lease);
    for backend in &scene.backends {
        let mut backend = backend.lock().unwrap();
        let removed = |done| ToBackend::RemoveVolume { id: PlaceId::first(lease), device: 0, done };
        let is_idle = backend.call(removed).is_some();
        if missing != Missing::AtBackend {
            let scrubbed = backend.call(|reply| ToBackend::Scrub(area, reply));
            assert_eq!(scrubbed.is_some(), is_idle, "what is in flight is waited for");
        }
    }
    if missing != Missing::AtBackend {
        scene.drives.iter().for_each(|drive| drive.hold(false));
        for backend in &scene.backends {
            let scrubbed = backend.lock().unwrap().call(|reply| ToBackend::Scrub(area, reply));
            assert_eq!(scrubbed, Some(Ok(())));
        }
    }
    if missing != Missing::AtFrontend {
        let mut frontend = Turned::new(scene.new_frontend(FRONTEND)).unwrap();
        let scrubbed = frontend.call(|reply| ToFrontend::Scrub(area, reply));
        assert_eq!(scrubbed, Some(Ok(())));
    }

    let next = scene.pool.host(NEXT);
    next.invalidate(area.start_byte(), area.bytes());
    next.full_fence();
    let bytes = usize::try_from(area.bytes()).unwrap();
    let given: Vec<u8> =
        std::iter::repeat_with(|| random.bits()).flat_map(u64::to_le_bytes).take(bytes).collect();
    next.write(area.start_byte(), &given);
    next.flush(area.start_byte(), area.bytes());
    next.full_fence();
    scene.drives.iter().for_each(|drive| drive.hold(false));
    for _ in 0..200 {
        scene.turn_backends();
    }
    // Time passes on all hosts, and their caches let go of what they have.
    for host in [FRONTEND, backend_host(0), backend_host(1)] {
        let memory = scene.pool.host(host);
        for line in 0..2 * area.lines.get() / LINE_BYTES as u64 {
            memory.load(LineOffset::new(area.start.get() - 1 - line).bytes());
        }
    }
    let mut there = vec![0; bytes];
    scene.pool.shared(area.start_byte(), &mut there);
    if there != given {
        return Err("what somebody had there before came over what is there now".to_owned());
    }
    match scene.pool.faults() {
        Faults { dirty_invalidates: 0, lost_updates: 0 } => Ok(()),
        faults => Err(format!("{faults:?}")),
    }
}

#[test]
fn nothing_of_a_dead_frontend_comes_over_who_has_its_area_next() {
    check_seeds("-p vhost-blk-cxl --lib", 40, |seed| run(seed, Missing::Nothing));
}

#[test]
fn an_area_that_is_given_on_too_early_is_noticed() {
    for missing in [Missing::AtFrontend, Missing::AtBackend] {
        let noticed = seeds(40).filter(|seed| run(*seed, missing).is_err()).count();
        assert!(noticed > 5, "noticed with {noticed} seeds only");
    }
}
