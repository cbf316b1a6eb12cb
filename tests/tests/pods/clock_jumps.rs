//! The time of day jumps, for each process by itself: nothing in a pod depends on it. Leases hold, guests go on, and who stands still
//! for too long is over although its clock says that no time has passed.

use std::thread;
use std::time::Duration;

use pod_api::{EndpointHealth, EventKind};
use wadi_tests::conversation::Conversation;
use wadi_tests::fio::{Job, Pattern, Report};
use wadi_tests::pod::{PodBuilder, Role};
use wadi_tests::stage::Stage;
use wadi_tests::waiting::until;

/// After how long a test pod's controller takes a daemon for silent.
const NOTICED: Duration = Duration::from_secs(1);

/// Into the future and the past, farther than anybody's patience, and before 1970.
const JUMPS: [&str; 8] = ["+1d", "-1d", "+40y", "-60y", "+1", "-1", "+3h", "-3h"];

/// What is told when somebody is taken for dead, or something has to move.
const ALARMS: [EventKind; 6] = [
    EventKind::EndpointSilent,
    EventKind::EndpointFenced,
    EventKind::EndpointGone,
    EventKind::Failover,
    EventKind::DeviceFailed,
    EventKind::Degraded,
];

#[test]
fn nothing_depends_on_the_time_of_day() {
    let mut stage = Stage::set_up_in(PodBuilder::three_hosts().own_clocks()).unwrap();
    let conversation = Conversation::begin(&stage.pod, &stage.vm).unwrap();
    let processes = [
        "controller",
        "h1-net-frontend",
        "h1-blk-frontend",
        "h2-net-backend",
        "h2-blk-backend",
        "h3-net-backend",
        "h3-blk-backend",
    ];
    let alarms = |stage: &Stage| {
        let events = stage.pod.api().events(0).unwrap().events.into_iter();
        events.filter(|it| ALARMS.contains(&it.kind)).map(|it| (it.kind, it.subject)).collect::<Vec<_>>()
    };
    let before = alarms(&stage);

    let pattern = Pattern::Random4K;
    let job = Job { disk: "vda".into(), offset_mib: 0, size_mib: 96, pattern, flush_every: 64 };
    thread::scope(|scope| {
        let vm = &stage.vm;
        let verified = scope.spawn(move || job.run(vm, Duration::from_mins(3)));
        for (round, jump) in JUMPS.iter().enumerate() {
            for (place, process) in processes.iter().enumerate() {
                // Each its own, so that any two disagree.
                let jump = if round == 0 { jump } else { JUMPS[(round + place) % JUMPS.len()] };
                stage.pod.set_clock(process, jump).unwrap();
                thread::sleep(Duration::from_millis(40));
            }
            conversation.check(&format!("after the clocks jumped for the {round}. time")).unwrap();
        }
        verified.join().unwrap().unwrap();
    });
    assert_eq!(alarms(&stage), before, "nobody was away");
    // It is their clocks that were read: something is told with a time that the controller takes for now.
    stage.pod.set_clock("controller", "+40y").unwrap();
    stage.pod.podctl(&["instances", "priority", "vm1", "101"]).unwrap();
    let events = stage.pod.api().events(0).unwrap().events;
    let [first, last] = [events.first(), events.last()].map(|it| it.unwrap().time_ms);
    assert!(last > first + 30 * 365 * 86_400_000, "{first} to {last}");

    // A controller and frontends stand still for longer than anybody is waited for, and their clocks jump meanwhile: nobody is taken for dead
    // by the one that was away itself, and those whose leases nobody else could have go on.
    stage.pod.controller().unwrap().freeze().unwrap();
    stage.pod.set_clock("controller", "-1d").unwrap();
    thread::sleep(2 * NOTICED);
    stage.pod.set_clock("controller", "+3h").unwrap();
    stage.pod.controller().unwrap().thaw().unwrap();
    until("the controller", || stage.pod.api().ready().ok());
    conversation.check("after the controller stood still").unwrap();
    assert_eq!(alarms(&stage), before, "it was the controller that was away");
    let engines = stage.pod.engines();
    for (role, [meanwhile, afterwards]) in
        [(Role::NetFrontend, ["-1d", "+40y"]), (Role::BlkFrontend, ["+1d", "-60y"])]
    {
        stage.pod.daemon("h1", role).unwrap().freeze().unwrap();
        stage.pod.set_clock(&format!("h1-{role}"), meanwhile).unwrap();
        stage.pod.wait_for_health("h1", role, EndpointHealth::Silent);
        stage.pod.set_clock(&format!("h1-{role}"), afterwards).unwrap();
        stage.pod.daemon("h1", role).unwrap().thaw().unwrap();
        stage.pod.wait_for_health("h1", role, EndpointHealth::Joined);
        conversation.check(&format!("after the {role} stood still")).unwrap();
    }
    let job = Job { disk: "vda".into(), offset_mib: 0, size_mib: 4, pattern, flush_every: 64 };
    job.run(&stage.vm, Duration::from_mins(3)).unwrap();
    assert_eq!(stage.pod.engines(), engines);

    // A daemon stands still for longer than its leases hold, and its clock goes back: it is over all the same.
    let home = stage.pod.api().instance("vm1").unwrap().nics[0].nic.clone();
    assert_eq!(home, "h2/nic0");
    stage.pod.daemon("h2", Role::NetBackend).unwrap().freeze().unwrap();
    stage.pod.set_clock("h2-net-backend", "-1d").unwrap();
    until("another NIC", || (stage.pod.api().instance("vm1").unwrap().nics[0].nic != home).then_some(()));
    conversation.check("while its backend stands still").unwrap();
    stage.pod.wake_up_to_the_end("h2", Role::NetBackend).unwrap();
    conversation.check("after its backend woke up").unwrap();

    // So does the backend of the guest's disk: nobody else could serve that, so nothing is taken from it, and it goes on where it was.
    let job = Job { disk: "vda".into(), offset_mib: 0, size_mib: 32, pattern, flush_every: 64 };
    let command = job.command();
    for [meanwhile, afterwards] in [["-1d", "+40y"], ["+1d", "-60y"]] {
        let disk = stage.vm.start(&command).unwrap();
        stage.pod.daemon("h2", Role::BlkBackend).unwrap().freeze().unwrap();
        stage.pod.set_clock("h2-blk-backend", meanwhile).unwrap();
        stage.pod.wait_for_health("h2", Role::BlkBackend, EndpointHealth::Silent);
        stage.pod.set_clock("h2-blk-backend", afterwards).unwrap();
        stage.pod.daemon("h2", Role::BlkBackend).unwrap().thaw().unwrap();
        stage.pod.wait_for_health("h2", Role::BlkBackend, EndpointHealth::Joined);
        Report::parse(&disk.finish(Duration::from_mins(3)).unwrap()).unwrap();
    }
}
