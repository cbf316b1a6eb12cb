//! Connections of tests, and a network between replicas that can be cut.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

/// How often it is looked whether the network was cut.
const LOOK_EVERY: Duration = Duration::from_millis(5);
const PORT: u16 = 8490;

/// Loopback addresses that are nobody else's: of this process, and of the next one who asks.
pub(crate) fn addresses(count: u8) -> Vec<SocketAddr> {
    static NEXT: AtomicU8 = AtomicU8::new(10);
    let first = NEXT.fetch_add(count, Ordering::Relaxed);
    let [.., high, low] = std::process::id().to_be_bytes();
    // Not of the network of 127.0.0.1.
    let address = |last| SocketAddr::new(Ipv4Addr::new(127, high | 128, low, last).into(), PORT);
    (first..first + count).map(address).collect()
}

/// Asks for a path, and leaves the connection open: the status, and the answer. `lines` are more of the request's head.
pub(crate) fn ask_and_stay<S: io::Read + io::Write>(
    stream: &mut S,
    path: &str,
    lines: &str,
) -> (u16, String) {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = Vec::new();
    let body = loop {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("an answer");
        answer.push(byte[0]);
        if answer.ends_with(b"\r\n\r\n") {
            break answer.len();
        }
    };
    let head = String::from_utf8_lossy(&answer).into_owned();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length: usize = length.and_then(|it| it.parse().ok()).expect("a length");
    answer.resize(body + length, 0);
    stream.read_exact(&mut answer[body..]).expect("a body");
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, String::from_utf8_lossy(&answer).into_owned())
}

/// Leads from one address to another one, and holds everything back while it is cut.
pub(crate) struct Wire {
    cut: Arc<AtomicBool>,
}

impl Wire {
    pub(crate) fn new(from: SocketAddr, to: SocketAddr) -> Self {
        let listener = TcpListener::bind(from).expect("an address of its own");
        let cut = Arc::new(AtomicBool::new(false));
        let wire = Self { cut: Arc::clone(&cut) };
        // It ends with the test's process.
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let cut = Arc::clone(&cut);
                thread::spawn(move || {
                    while cut.load(Ordering::Relaxed) {
                        thread::sleep(LOOK_EVERY);
                    }
                    // Nobody is there, so nobody is to be seen here.
                    let Ok(far) = TcpStream::connect(to) else { return };
                    let (near_too, far_too) =
                        (near.try_clone().expect("a handle"), far.try_clone().expect("it"));
                    let back = Arc::clone(&cut);
                    thread::spawn(move || carry(far_too, near_too, &back));
                    carry(near, far, &cut);
                });
            }
        });
        wire
    }

    pub(crate) fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, cut: &AtomicBool) {
    let mut bytes = [0; 16 << 10];
    from.set_read_timeout(Some(LOOK_EVERY)).expect("a timeout");
    loop {
        match from.read(&mut bytes) {
            Ok(count) if count > 0 => {
                while cut.load(Ordering::Relaxed) {
                    thread::sleep(LOOK_EVERY);
                }
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Ok(_) | Err(_) => break,
        }
    }
    // Either may be gone already.
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}
