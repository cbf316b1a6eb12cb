//! Sessions with QEMU's monitor.

use std::io::{self, BufRead as _, BufReader, ErrorKind};
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

/// Reads over what comes before the greeting: of a session that ended while it was being answered, QEMU gives the rest of the
/// answer to the next one.
fn skip_to_greeting(reader: &mut BufReader<UnixStream>) -> io::Result<()> {
    const GREETING: &[u8] = b"{\"QMP\"";
    // An answer, and events that were told after it.
    const LINES_MAX: usize = 64;
    for _ in 0..LINES_MAX {
        let first = reader.fill_buf()?;
        if first.is_empty() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if first.starts_with(GREETING) || GREETING.starts_with(first) {
            return Ok(());
        }
        reader.skip_until(b'\n')?;
    }
    // The handshake says what there is instead.
    Ok(())
}

/// A session over a connection, whose other end is what `of` names, and which answers each time within `deadline`.
pub(crate) fn open(stream: UnixStream, of: &str, deadline: Duration) -> Result<Monitor, VmmError> {
    stream.set_read_timeout(Some(deadline)).map_err(|e| failed(e.into()))?;
    let mut reader = BufReader::new(stream.try_clone().map_err(|e| failed(e.into()))?);
    // The crate panics where nothing comes.
    let greeted = skip_to_greeting(&mut reader).map_err(ExecuteError::from);
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use qapi::qmp::query_status;

    use super::*;

    #[test]
    fn what_the_session_before_was_not_told_is_read_over() {
        let (ours, qemus) = UnixStream::pair().unwrap();
        let qemu = thread::spawn(move || {
            let mut asked = BufReader::new(qemus.try_clone().unwrap()).lines();
            let say = |line: &str| writeln!(&qemus, "{line}").unwrap();
            say(r#"-id": 7}, {"thread-id": 8}]}"#);
            say(r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "RESUME"}"#);
            say(
                r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}"#,
            );
            assert!(asked.next().unwrap().unwrap().contains("qmp_capabilities"));
            say(r#"{"return": {}}"#);
            assert!(asked.next().unwrap().unwrap().contains("query-status"));
            say(r#"{"return": {"status": "running", "singlestep": false, "running": true}}"#);
        });
        let mut monitor = open(ours, "a QEMU", MONITOR_DEADLINE).unwrap();
        assert!(monitor.execute(&query_status {}).unwrap().running);
        qemu.join().unwrap();
    }

    #[test]
    fn a_qemu_that_ends_before_it_greets_is_said_to_have_ended() {
        let (ours, mut qemus) = UnixStream::pair().unwrap();
        writeln!(qemus, "{{\"return\": {{}}}}").unwrap();
        drop(qemus);
        let error = open(ours, "a QEMU", MONITOR_DEADLINE).err().unwrap();
        assert!(error.to_string().contains("ended before it greeted"), "{error}");
    }
}
