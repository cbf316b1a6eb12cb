//! Moves in order between NICs that work, while somebody calls all guests: whichever backend hears of a move first, each call is heard once.

use std::thread;

use wadi_tests::frame_guest::{Caller, FrameGuest};
use wadi_tests::pod::{HostPlan, PodBuilder};
use wadi_tests::stage::rounds;
use wadi_tests::waiting::{until, wait_for};

/// How many calls may be on their way: fewer than the guest has room for.
const UNDER_WAY: u64 = 32;
/// There and back: backends are told in the order of their hosts, so each of the two would be first once.
const MOVES: u32 = 4;

#[test]
fn every_call_to_all_is_heard_once_while_a_guest_moves_from_nic_to_nic() {
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").nic("nic1"))
        .start()
        .unwrap();
    let instance = pod.create_instance("vm1", "h1", &[]).unwrap();
    let nic = &instance.nics[0];
    let mut guest = FrameGuest::connect(&nic.socket, &nic.mac);
    let mut caller = Caller::new(pod.client_namespace()).unwrap();
    caller.call_until_heard(&mut guest);
    let first = guest.calls().len();
    let mut next = caller.call().unwrap();
    let begin = next;
    let mut home = nic.nic.clone();
    for _ in 0..MOVES * rounds() {
        let to = if home == "h2/nic0" { "h3/nic1" } else { "h2/nic0" };
        thread::scope(|scope| {
            let moving = scope.spawn(|| {
                // It refuses while the NIC that was left before drains.
                until("the move to begin", || pod.api().migrate_nic("vm1", "net0", Some(to)).ok());
                pod.wait_for_nic("vm1", to).unwrap();
            });
            // Until it has moved, and for some calls more.
            let mut more = 4 * UNDER_WAY;
            while more > 0 {
                more -= u64::from(moving.is_finished());
                next = caller.call().unwrap();
                until("calls to be heard", || {
                    guest.calls().iter().max().is_some_and(|heard| heard + UNDER_WAY > next).then_some(())
                });
            }
            moving.join().unwrap();
        });
        home = to.to_owned();
    }
    wait_for("the last call", || guest.calls().contains(&next));
    // What comes over two NICs may overtake each other.
    let mut heard = guest.calls()[first..].to_vec();
    heard.sort_unstable();
    let missed: Vec<u64> = (begin..=next).filter(|it| heard.binary_search(it).is_err()).collect();
    assert!(missed.is_empty(), "{missed:?} of {} calls were not heard", next - begin + 1);
    let twice: Vec<u64> = heard.windows(2).filter(|two| two[0] == two[1]).map(|two| two[0]).collect();
    assert!(twice.is_empty(), "{twice:?} of {} calls were heard twice", next - begin + 1);
}
