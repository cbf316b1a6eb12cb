//! A controller whose state an etcd of three members keeps, which die and hang.

use std::collections::BTreeSet;

use pod_api::client::Client;

use crate::etcd::{Process, set_type};
use crate::support::etcd_cluster::{EtcdCluster, MEMBERS};
use crate::support::{Pod, until};

/// Makes a change, and once more while it is refused: etcd's members may have to agree first on who leads them.
fn change(client: &Client, name: &str) {
    until("a change", || match set_type(client, name) {
        Ok(()) => Some(()),
        Err(error) => {
            assert_eq!(error.status(), Some(503), "{error}");
            None
        }
    });
}

fn names(client: &Client) -> Option<BTreeSet<String>> {
    Some(client.instance_types().ok()?.into_iter().map(|it| it.name).collect())
}

#[test]
fn pod_goes_on_while_most_members_of_an_etcd_do() {
    let mut etcd = EtcdCluster::start();
    let store = etcd.address("wadi/pod1");
    let mut pod = Pod::new_in_file();
    let client = pod.client();
    pod.stop_controller();
    let mut process = Process::start(&pod, &["--store", &store, "--bootstrap"]);
    until("readiness", || client.ready().ok());
    let mut made = BTreeSet::new();
    let mut add = |name: String| {
        change(&client, &name);
        made.insert(name);
        assert_eq!(names(&client).expect("it answers"), made);
    };

    // Each of them, and so also the one that leads and the one that the controller speaks with.
    for member in 0..MEMBERS {
        etcd.kill(member);
        add(format!("dead{member}"));
        etcd.go_on(member);
        etcd.wait_for(member);
        etcd.hang(member);
        add(format!("hangs{member}"));
        etcd.unhang(member);
        add(format!("back{member}"));
    }
    assert!(process.runs(), "it was taken for dead");

    // Two of three: nothing can be changed, and nothing is lost.
    etcd.kill(0);
    etcd.kill(1);
    assert_eq!(set_type(&client, "unknown").expect_err("nobody keeps it").status(), Some(503));
    assert_eq!(names(&client).expect("it answers"), made);
    etcd.go_on(0);
    etcd.wait_for(2);
    until("readiness", || client.ready().ok());
    etcd.go_on(1);
    // A member may have written it down, and have it carried out when there are enough of them again.
    let there = names(&client).expect("it answers");
    assert!(there.is_superset(&made), "{there:?}");

    // Its successor finds all of it.
    process.kill();
    let _process = Process::start(&pod, &["--store", &store]);
    until("what etcd had", || names(&client).filter(|names| *names == there));
}
