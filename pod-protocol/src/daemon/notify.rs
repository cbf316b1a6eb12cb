//! Telling whoever started us that we are ready.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Logs "ready", and tells a supervisor that set `NOTIFY_SOCKET`, as systemd does.
pub fn notify_ready() {
    tracing::info!("ready");
    if let Some(socket) = std::env::var_os("NOTIFY_SOCKET")
        && let Err(error) = notify(&socket, b"READY=1")
    {
        tracing::warn!(?socket, %error, "cannot tell the supervisor");
    }
}

fn notify(socket: &OsStr, state: &[u8]) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state, &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn supervisor_is_told_by_path_and_by_abstract_name() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("notify");
        let name = format!("wadi-notify-test-{}", std::process::id());
        let abstract_address = SocketAddr::from_abstract_name(&name).expect("short");
        let listeners = [
            (path.clone().into_os_string(), UnixDatagram::bind(&path).expect("bound")),
            (format!("@{name}").into(), UnixDatagram::bind_addr(&abstract_address).expect("bound")),
        ];
        for (socket, listener) in listeners {
            notify(&socket, b"READY=1").expect("someone listens");
            let mut heard = [0; 16];
            let length = listener.recv(&mut heard).expect("a datagram");
            assert_eq!(&heard[..length], b"READY=1");
        }
    }

    #[test]
    fn missing_supervisor_is_an_error_not_a_hang() {
        assert!(notify(OsStr::new("/nonexistent/notify"), b"READY=1").is_err());
    }
}
