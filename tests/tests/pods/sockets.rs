//! A guest's socket path that is taken: whoever has it keeps it, and the controller says what is in the way.

use std::fs;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use pod_api::{ByteSize, CreateInstance, CreateVolume, NicRequest};
use wadi_tests::pod::PodBuilder;

#[test]
fn taken_socket_paths_are_refused_and_left_alone() {
    let pod = PodBuilder::three_hosts().start().unwrap();
    let sockets = pod.directory().join("run/sockets");
    fs::create_dir_all(&sockets).unwrap();
    let create = |name: &str| {
        pod.api().create_volume(&CreateVolume::new(format!("{name}-vol"), ByteSize::new(1 << 26))).unwrap();
        let request = CreateInstance {
            name: name.to_owned(),
            host: "h1".to_owned(),
            nics: vec![NicRequest::default()],
            volumes: vec![format!("{name}-vol")],
            ..CreateInstance::default()
        };
        pod.api().create_instance(&request, Duration::from_secs(2)).unwrap()
    };

    // Where do they go? The first instance tells.
    let free = create("free");
    assert!(free.ready, "{free:?}");
    let (net, disk) = (free.nics[0].socket.clone(), free.disks[0].socket.clone());

    // One path is a file of somebody's, the other a socket on which somebody listens.
    let net = net.replace("free", "taken");
    let disk = disk.replace("free", "taken");
    fs::write(&net, "mine").unwrap();
    let listener = UnixListener::bind(&disk).unwrap();
    let taken = create("taken");
    assert!(!taken.ready, "{taken:?}");
    let waits = taken.waiting_for.join("; ");
    assert!(!waits.is_empty());
    let events = pod.api().events(0).unwrap().events;
    let said: Vec<_> = events.iter().map(|event| event.message.as_str()).chain([waits.as_str()]).collect();
    let said = said.join("\n");
    assert!(said.contains(&net) && said.contains(&disk), "{said}");
    assert_eq!(fs::read_to_string(&net).unwrap(), "mine");
    assert!(std::os::unix::net::UnixStream::connect(&disk).is_ok());
    drop(listener);
}
