//! Many connections over TCP, and who of them may stay.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::access::{restart, token};
use crate::support::Pod;
use crate::support::network::ask_and_stay;
use rustix::net::{AddressFamily, SocketType};

/// As many as are served at a time.
const CROWD: usize = 1024;

/// A connection from this address of ours.
fn connect(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&socket, &SocketAddr::new(from.into(), 0)).expect("it is ours");
    rustix::net::connect(&socket, &to).expect("it listens");
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    stream
}

#[test]
fn strangers_take_no_places_from_who_is_known() {
    let mut pod = Pod::new();
    let (token, lines) = token("alice", "viewer");
    let file = pod.path("tokens");
    fs::write(&file, lines).expect("written");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).expect("a mode");
    let address = restart(&mut pod, &format!("tokens = '{}'\nrequests-per-second = 0", file.display()));
    let (crowded, quiet) = (Ipv4Addr::LOCALHOST, Ipv4Addr::new(127, 0, 0, 2));
    let known = format!("authorization: Bearer {token}\r\n");
    let mut first = connect(crowded, address);
    assert_eq!(ask_and_stay(&mut first, "/v1/hosts", &known).0, 200);

    // Half of them ask for what is for everybody.
    let crowd: Vec<TcpStream> = (0..CROWD - 1)
        .map(|number| {
            let mut stream = connect(crowded, address);
            let (path, expected) = if number % 2 == 0 { ("/v1/hosts", 401) } else { ("/", 200) };
            assert_eq!(ask_and_stay(&mut stream, path, "").0, expected);
            stream
        })
        .collect();
    for from in [quiet, crowded] {
        let mut stream = connect(from, address);
        assert_eq!(ask_and_stay(&mut stream, "/v1/hosts", &known).0, 200, "from {from}");
    }
    assert_eq!(ask_and_stay(&mut first, "/v1/hosts", &known).0, 200, "who is known stays");
    drop(crowd);
}
