//! Sessions with QEMU's monitor.

use std::io::{BufRead as _, BufReader, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use qapi::{ExecuteError, Qmp, Stream};

use crate::VmmError;

pub(crate) type Monitor = Qmp<Stream<BufReader<UnixStream>, UnixStream>>;

/// How long QEMU may take to open its monitor, and to answer.
pub(crate) const MONITOR_DEADLINE: Duration = Duration::from_secs(10);

#[expect(clippy::needless_pass_by_value, reason = "to be named where errors are mapped")]
pub(crate) fn failed(error: ExecuteError) -> VmmError {
    VmmError::Monitor { reason: error.to_string() }
}

/// A new session. Waits for a QEMU that is just starting, unless `over` says that it has ended.
pub(crate) fn connect(path: &Path, mut over: impl FnMut() -> bool) -> Result<Monitor, VmmError> {
    let started = Instant::now();
    let stream = loop {
        match UnixStream::connect(path) {
            Ok(stream) => break stream,
            Err(e) if started.elapsed() > MONITOR_DEADLINE || over() => {
                return Err(VmmError::Monitor { reason: format!("{}: {e}", path.display()) });
            }
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    open(stream, &path.display().to_string(), MONITOR_DEADLINE)
}

/// A session over a connection, whose other end is what `of` names, and which answers each time within `deadline`.
pub(crate) fn open(stream: UnixStream, of: &str, deadline: Duration) -> Result<Monitor, VmmError> {
    stream.set_read_timeout(Some(deadline)).map_err(|e| failed(e.into()))?;
    let mut reader = BufReader::new(stream.try_clone().map_err(|e| failed(e.into()))?);
    // The crate panics where nothing comes.
    let greeted = reader.fill_buf().map_err(ExecuteError::from).and_then(|first| match first {
        [] => Err(ExecuteError::Io(ErrorKind::UnexpectedEof.into())),
        _ => Ok(()),
    });
    let mut monitor = Qmp::new(Stream::new(reader, stream));
    greeted.and_then(|()| monitor.handshake()).map_err(|error| match error {
        ExecuteError::Io(io) if matches!(io.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            VmmError::Monitor {
                reason: format!("{of} does not greet: QEMU hangs, or somebody else has the only session"),
            }
        }
        ExecuteError::Io(io) if io.kind() == ErrorKind::UnexpectedEof => {
            VmmError::Monitor { reason: format!("{of}: QEMU ended before it greeted") }
        }
        _ => failed(error),
    })?;
    Ok(monitor)
}
