//! An instance moves to another host: what its frontends are told, and when.

use std::time::Duration;

use crate::support::{Pod, until, vm};
use cxl_pool::Role;
use pod_api::CreateVolume;
use pod_protocol::ids::LeaseId;
use pod_protocol::objects::{Object, ObjectId};
use pod_protocol::reports::Report;

const WAIT: Duration = Duration::from_secs(10);

/// Of the devices for guests at a host's frontends: whether they are incoming, in the order net, block.
fn incoming(pod: &Pod, host: u16) -> Vec<bool> {
    let of = |role| pod.endpoint(host, role).objects().into_values();
    let devices = of(Role::NetFrontend).chain(of(Role::BlkFrontend));
    let incoming = devices.filter_map(|object| match object {
        Object::Port(port) => Some(port.incoming),
        Object::Disk(disk) => Some(disk.incoming),
        _ => None,
    });
    incoming.collect()
}

/// The frontends of a host say what VMMs do with all devices there.
pub(crate) fn report(pod: &Pod, host: u16, connected: bool, running: bool) {
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        let leases: Vec<LeaseId> = pod
            .endpoint(host, role)
            .objects()
            .into_keys()
            .filter_map(|id| match id {
                ObjectId::Port(lease) | ObjectId::Disk(lease) => Some(lease),
                _ => None,
            })
            .collect();
        for lease in leases {
            let report =
                Report::Attachment { lease, connected, running, write_through: false, untold: false };
            pod.endpoint(host, role).reporter.report(report);
        }
    }
}

/// A pod with an instance whose VM runs on h1, and frontends on h2 too.
fn running() -> Pod {
    let mut pod = Pod::demo();
    pod.join(2, Role::NetFrontend, Vec::new());
    pod.join(2, Role::BlkFrontend, Vec::new());
    let client = pod.client();
    let size = "8M".parse().expect("a size");
    client.create_volume(&CreateVolume::new("vol0", size)).expect("created");
    let instance = client.create_instance(&vm("vm1", &["vol0"]), WAIT).expect("created");
    assert!(instance.ready && instance.migration.is_none());
    until("both frontends", || {
        let host = client.host("h2").ok()?;
        (host.endpoints.len() == 4).then_some(())
    });
    report(&pod, 1, true, true);
    until("its VMM", || {
        client.instance("vm1").ok().filter(|it| it.disks[0].connected && it.nics[0].connected)
    });
    pod
}

#[test]
fn leases_follow_a_guest_also_past_a_restart_of_the_controller() {
    let mut pod = running();
    let client = pod.client();
    let moving = client.migrate_instance("vm1", "h2").expect("prepared");
    let migration = moving.migration.expect("it moves");
    assert!(migration.ready, "{:?}", migration.waiting_for);
    assert_eq!(incoming(&pod, 2), [true, true]);
    assert_eq!(incoming(&pod, 1), [false, false]);
    let sockets: Vec<&str> = migration.devices.iter().map(|device| device.socket.as_str()).collect();
    assert!(sockets[0].ends_with("/vm1-net0-h2.sock") && sockets[1].ends_with("/vm1-vol0-h2.sock"));
    assert_eq!(client.migrate_instance("vm1", "h2").expect_err("it does already").status(), Some(409));
    assert_eq!(client.activate_migration("vm1", false).expect_err("it runs here").status(), Some(409));
    report(&pod, 2, true, false);
    let both =
        || client.instance("vm1").ok()?.migration.filter(|it| it.devices.iter().all(|it| it.connected));
    until("the VMM there", both);

    pod.stop_controller();
    pod.start_controller();
    let client = pod.client();
    until("the move to go on", || client.instance("vm1").ok()?.migration.filter(|it| it.ready));
    report(&pod, 1, true, false);
    report(&pod, 2, true, true);
    let moved = until("the leases to follow", || {
        client.instance("vm1").ok().filter(|it| it.host == "h2" && it.migration.is_none() && it.ready)
    });
    assert_eq!(moved.nics[0].socket, sockets[0]);
    assert_eq!((moved.nics[0].generation, moved.disks[0].generation), (2, 2));
    until("the other side to be told", || (incoming(&pod, 2) == [false, false]).then_some(()));
    until("this side to be told", || incoming(&pod, 1).is_empty().then_some(()));
    let kinds: Vec<&str> =
        client.events(0).expect("events").events.into_iter().map(|event| event.kind.word()).collect();
    assert!(kinds.contains(&"migration-prepared") && kinds.contains(&"instance-migrated"), "{kinds:?}");
}

#[test]
fn a_move_is_given_up_or_forced() {
    let pod = running();
    let client = pod.client();
    assert_eq!(client.abort_migration("vm1").expect_err("it does not move").status(), Some(404));
    assert_eq!(client.migrate_instance("vm1", "h9").expect_err("no such host").status(), Some(404));
    assert_eq!(client.migrate_instance("vm1", "h1").expect_err("it is there").status(), Some(400));
    assert_eq!(client.migrate_instance("vm1", "h3").expect_err("no frontend there").status(), Some(409));
    client.migrate_instance("vm1", "h2").expect("prepared");
    client.abort_migration("vm1").expect("given up");
    assert!(client.instance("vm1").expect("there").migration.is_none());
    until("the other side to be told", || incoming(&pod, 2).is_empty().then_some(()));
    assert_eq!(incoming(&pod, 1), [false, false]);

    client.migrate_instance("vm1", "h2").expect("prepared");
    client.activate_migration("vm1", true).expect("by force");
    assert_eq!(client.instance("vm1").expect("there").host, "h2");
    until("both sides to be told", || (incoming(&pod, 2) == [false, false]).then_some(()));
    until("this side to be told", || incoming(&pod, 1).is_empty().then_some(()));
}
