//! A network daemon stands still with frames in its hands, somebody else goes on in its place, and then it runs again: nothing of what it
//! held is sent, and no guest hears anything twice.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use pod_api::{DeviceHealth, EndpointHealth, Nic};
use wadi_tests::arrivals::Arrivals;
use wadi_tests::frame_guest::{Caller, FrameGuest, frames_in_pool};
use wadi_tests::pod::{HostPlan, Pod, PodBuilder, Role};
use wadi_tests::stage::rounds;
use wadi_tests::waiting::until;

/// How many frames somebody holds.
const HELD: u64 = 40;
/// Where the numbers of frames begin that are never to be sent.
const HELD_BACK: u64 = 1 << 40;
/// For how long a backend keeps frames that find no wire.
const KEPT: Duration = Duration::from_secs(1);

fn connect(nic: &Nic) -> FrameGuest {
    FrameGuest::connect(&nic.socket, &nic.mac)
}

/// The NIC of an instance.
fn nic_of(pod: &Pod, instance: &str) -> String {
    pod.api().instance(instance).unwrap().nics[0].nic.clone()
}

/// Where the frames of a backend are that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Held {
    /// In the pool, and the backend has not seen them.
    InThePool,
    /// The backend has taken them, and waits for its wire.
    InItsHands,
}

/// Two guests of a pod whose controller stands still.
struct Guests<'a> {
    guest: &'a mut FrameGuest,
    /// Of the same host and NIC.
    neighbour: &'a mut FrameGuest,
    /// What the guest has told its neighbour.
    told: &'a mut u64,
}

impl Guests<'_> {
    /// Has the guest tell its neighbour something. Whatever it sent before, the backend has taken when this returns.
    fn tell(&mut self) {
        *self.told += 1;
        self.guest.tell(self.neighbour.mac(), *self.told);
        until("what the neighbour is told", || {
            (self.neighbour.told().last() == Some(self.told)).then_some(())
        });
    }

    /// Has a backend take frames that it cannot send, and stand still meanwhile. False if that took so long that it waits for its wire no
    /// longer, and drops them.
    fn hold(&mut self, pod: &mut Pod, (host, nic): (&str, &str), numbers: Range<u64>) -> bool {
        let began = Instant::now();
        let downs = |pod: &mut Pod| {
            let said = pod.daemon(host, Role::NetBackend).unwrap().said();
            said.lines().filter(|line| line.contains("link changed") && line.contains("up=false")).count()
        };
        let before = downs(pod);
        pod.pull_cable(host, nic).unwrap();
        until("the backend to notice", || (downs(pod) > before).then_some(()));
        numbers.for_each(|number| self.guest.send(number));
        self.tell();
        pod.daemon(host, Role::NetBackend).unwrap().freeze().unwrap();
        let is_held = began.elapsed() < KEPT;
        pod.plug_cable(host, nic).unwrap();
        is_held
    }
}

#[test]
fn what_an_old_backend_holds_is_neither_sent_nor_heard() {
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").backup_nic("nic1"))
        .start()
        .unwrap();
    let [one, other] = ["vm1", "vm2"].map(|name| pod.create_instance(name, "h1", &[]).unwrap());
    let (mut guest, mut neighbour) = (connect(&one.nics[0]), connect(&other.nics[0]));
    let mac = guest.mac().bytes();
    let mut client = Caller::new(pod.client_namespace()).unwrap();
    let mut told = 0;
    let mut next = 0;
    for held in [Held::InThePool, Held::InItsHands].repeat(2 * rounds() as usize) {
        client.call_until_heard(&mut guest);
        let home = nic_of(&pod, "vm1");
        assert_eq!(nic_of(&pod, "vm2"), home, "one backend for both");
        let (host, nic) = home.split_once('/').unwrap();
        let numbers = next..next + HELD;
        next = numbers.end + 1;
        let arrivals = Arrivals::listen_from(pod.client_namespace(), numbers.start).unwrap();
        // It loses its leases only when enough is waiting for it.
        pod.controller().unwrap().freeze().unwrap();
        let mut guests = Guests { guest: &mut guest, neighbour: &mut neighbour, told: &mut told };
        let holds = match held {
            Held::InThePool => {
                pod.daemon(host, Role::NetBackend).unwrap().freeze().unwrap();
                numbers.clone().for_each(|number| guest.send(number));
                until("the guest's frames in the pool", || {
                    let found = frames_in_pool(&pod, guest.mac()).unwrap();
                    numbers.clone().all(|it| found.contains(&it)).then_some(())
                });
                true
            }
            Held::InItsHands => guests.hold(&mut pod, (host, nic), numbers.clone()),
        };
        // They wait at its NIC, and at the other one nobody is there yet.
        let missed: Vec<u64> = (0..HELD).map(|_| client.call().unwrap()).collect();
        pod.controller().unwrap().thaw().unwrap();
        until("another NIC", || (nic_of(&pod, "vm1") != home && nic_of(&pod, "vm2") != home).then_some(()));
        let health = until("the backend to be missed", || {
            let health = pod.health(host, Role::NetBackend).unwrap();
            (health != EndpointHealth::Joined).then_some(health)
        });
        if !holds {
            eprintln!("this machine is too slow: the backend has dropped what it held");
        }
        if holds {
            // The frontend has sent them another way.
            arrivals.expect(mac, numbers.end).unwrap();
        }
        client.call_until_heard(&mut guest);
        // What lay at the other NIC when its backend was told, and had not been looked at yet, has been delivered from there.
        let missed: Vec<u64> = missed.into_iter().filter(|number| !guest.calls().contains(number)).collect();
        if health == EndpointHealth::Fenced {
            pod.wake_up_to_the_end(host, Role::NetBackend).unwrap();
        } else {
            pod.daemon(host, Role::NetBackend).unwrap().thaw().unwrap();
            pod.wait_for_health(host, Role::NetBackend, EndpointHealth::Joined);
        }
        if holds {
            guest.send(numbers.end);
            arrivals.expect(mac, numbers.end + 1).unwrap();
        }
        client.call_until_heard(&mut guest);
        let calls = guest.calls();
        assert!(missed.iter().all(|number| !calls.contains(number)), "it delivered when it woke up");
        assert_eq!(
            calls.iter().collect::<BTreeSet<_>>().len(),
            calls.len(),
            "it delivered what another one had"
        );
        if health == EndpointHealth::Fenced {
            pod.start_daemon(host, Role::NetBackend).unwrap();
        }
        // In many rounds its link comes and goes too often to be trusted.
        until("the NIC to be there", || match pod.api().device(host, nic).unwrap().health {
            DeviceHealth::Up => Some(()),
            DeviceHealth::Held => {
                pod.api().release_link(host, nic).unwrap();
                None
            }
            _ => None,
        });
        pod.wait_until_joined().unwrap();
    }
}

#[test]
fn what_an_old_frontend_holds_is_neither_sent_nor_heard() {
    let mut pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").nic("nic0"))
        .host(HostPlan::new("h3").vms())
        .start()
        .unwrap();
    let [one, other] = ["vm1", "vm2"].map(|name| pod.create_instance(name, "h1", &[]).unwrap());
    // The second one stays, and so does the channel between its host and the NIC.
    let [mut old, mut neighbour] = [&one, &other].map(|instance| connect(&instance.nics[0]));
    let mac = one.nics[0].mac.clone();
    let bytes = old.mac().bytes();
    let mut client = Caller::new(pod.client_namespace()).unwrap();
    let arrivals = Arrivals::listen(pod.client_namespace()).unwrap();
    let mut next = 0;
    for (from, to) in [("h1", "h3"), ("h3", "h1")].repeat(rounds() as usize) {
        client.call_until_heard(&mut old);
        let socket = pod.api().instance("vm1").unwrap().nics[0].socket.clone();
        (next..next + HELD).for_each(|number| old.send(number));
        next += HELD;
        arrivals.expect(bytes, next).unwrap();
        let pid = pod.daemon(from, Role::NetFrontend).unwrap().pid();
        pod.daemon(from, Role::NetFrontend).unwrap().freeze().unwrap();
        // Of what the guest sends, nobody has seen anything; and what it is called is in its frontend's channel.
        (0..HELD).for_each(|number| old.send(HELD_BACK + number));
        let before = old.calls().to_vec();
        client.call().unwrap();
        pod.wait_for_health(from, Role::NetFrontend, EndpointHealth::Silent);

        let migration = pod.move_by_force("vm1", to).unwrap();
        let mut new = FrameGuest::connect(&migration.devices[0].socket, &mac);
        client.call_until_heard(&mut new);
        (next..next + HELD).for_each(|number| new.send(number));
        next += HELD;
        arrivals.expect(bytes, next).unwrap();
        pod.daemon(from, Role::NetFrontend).unwrap().thaw().unwrap();
        // It hears of it in the end, and lets go. Nobody took anything from the daemon itself, which goes on.
        until("the old NIC to be gone", || (!Path::new(&socket).exists()).then_some(()));
        pod.wait_for_health(from, Role::NetFrontend, EndpointHealth::Joined);
        assert_eq!(pod.daemon(from, Role::NetFrontend).unwrap().pid(), pid);
        assert!(pod.daemon(from, Role::NetFrontend).unwrap().running());
        new.send(next);
        next += 1;
        arrivals.expect(bytes, next).unwrap();
        client.call_until_heard(&mut new);
        client.call_until_heard(&mut neighbour);
        assert_eq!(old.calls(), before, "it heard something when it was gone");
        // Room where it was, for its way back.
        until("room where it was", || pod.api().migrate_instance("vm1", from).ok());
        pod.api().abort_migration("vm1").unwrap();
        old = new;
    }
}
