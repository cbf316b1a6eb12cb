//! A single controller whose disk is full: what it answered is there, it says what to do, and nobody's devices go away.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cxl_pool::Role;

use crate::support::faulty_disk::FaultyDisk;
use crate::support::replicas::{create, names, volume};
use crate::support::{Pod, until, vm};

/// The pod's controller as a process of its own, which does not outlive a test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended needs no killing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(pod: &Pod, disk: &FaultyDisk, state: &Path) -> Running {
    pod.config();
    let log = File::options().create(true).append(true).open(pod.path("controller.log"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_pod-controller"));
    command.arg("--config").arg(pod.path("controller.toml")).stdin(Stdio::null());
    disk.lie_below(state, command.stderr(log.expect("a file")));
    Running(command.spawn().expect("the controller starts"))
}

/// Waits until it has ended by itself, and returns what it has said up to now.
fn ended(pod: &Pod, mut controller: Running) -> String {
    let status = until("the controller to end", || controller.0.try_wait().expect("it is ours"));
    assert!(!status.success(), "it ended for a reason");
    std::fs::read_to_string(pod.path("controller.log")).expect("it said something")
}

#[test]
fn a_full_disk_ends_the_controller_and_loses_nothing() {
    let mut pod = Pod::demo_in_file();
    pod.stop_controller();
    let state = pod.path("state.redb");
    let disk = FaultyDisk::compile(pod.directory.path());
    let controller = start(&pod, &disk, &state);
    until("it to answer", || names(&pod.client()));
    let answered: Vec<String> = (0..3).map(|number| format!("before-{number}")).collect();
    for name in &answered {
        create(&pod.client(), name);
    }
    let held = |pod: &Pod| {
        let held = pod.endpoint(2, Role::BlkBackend).held.lock().expect("nobody panicked");
        (held.objects.len(), held.removed)
    };
    pod.client().create_instance(&vm("vm1", &["before-0"]), Duration::from_secs(30)).expect("an instance");
    until("its disk to be served", || (held(&pod).0 > 0).then_some(()));
    let before = held(&pod);

    FaultyDisk::fault(&state, Some("full"));
    assert!(pod.client().create_volume(&volume("lost")).is_err(), "nothing was kept of it");
    let said = ended(&pod, controller);
    assert!(said.contains("No space left") && said.contains(state.to_str().expect("text")), "{said}");
    assert!(said.contains("check the directory, the permissions and the free space"), "{said}");

    // It does not begin before there is room.
    let length = said.len();
    let said = ended(&pod, start(&pod, &disk, &state));
    assert!(said[length..].contains("free space"), "{said}");
    FaultyDisk::fault(&state, None);
    let _controller = start(&pod, &disk, &state);
    let known = until("it to answer", || names(&pod.client()));
    assert!(answered.iter().all(|name| known.contains(name)), "{known:?}");
    pod.client().create_volume(&volume("after")).expect("there is room again");
    assert_eq!(held(&pod), before, "nobody let go of anything");
}
