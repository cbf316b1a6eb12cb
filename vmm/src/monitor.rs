//! Sessions with QEMU's monitor.

use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use qapi::{ExecuteError, Qmp, Stream};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::VmmError;

pub(crate) type Monitor = Qmp<Stream<Answers, UnixStream>>;

/// How long QEMU may take to open its monitor, and to answer.
pub(crate) const MONITOR_DEADLINE: Duration = Duration::from_secs(10);

/// How long an answer may be: many times the longest one, which describes all that a QEMU knows. What is longer is of a QEMU that wants our memory.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Of a command in a session: QEMU refused it, or did not answer.
pub(crate) fn failed(error: ExecuteError) -> VmmError {
    let reason = error.to_string();
    match error {
        ExecuteError::Qapi(_) => VmmError::Monitor { reason },
        ExecuteError::Io(io) if matches!(io.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            VmmError::Silent { reason: "it hangs, or is busy for long".to_owned() }
        }
        ExecuteError::Io(_) => VmmError::Silent { reason },
    }
}

/// A new session. Waits for a QEMU that is just starting, unless `over` says that it has ended.
pub(crate) fn connect(path: &Path, over: impl FnMut() -> bool) -> Result<Monitor, VmmError> {
    connect_within(path, MONITOR_DEADLINE, over)
}

fn connect_within(
    path: &Path,
    deadline: Duration,
    mut over: impl FnMut() -> bool,
) -> Result<Monitor, VmmError> {
    let started = Instant::now();
    let of = path.display().to_string();
    let stream = loop {
        match reach(path, deadline) {
            Ok(stream) => break stream,
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Err(no_greeting(&of)),
            Err(e) if started.elapsed() > deadline || over() => {
                return Err(VmmError::Monitor { reason: format!("{of}: {e}") });
            }
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    open(stream, &of, deadline)
}

/// Connects. A QEMU lets few wait for a session, and one more would wait for ever, though those before have long gone: this one waits
/// until the deadline.
fn reach(path: &Path, deadline: Duration) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // That is for connecting, too.
    set_socket_timeout(&socket, Timeout::Send, Some(deadline))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn no_greeting(of: &str) -> VmmError {
    VmmError::Silent {
        reason: format!("{of} does not greet: QEMU hangs, or somebody else has the only session"),
    }
}

/// What QEMU answers, a line at a time. What it tells of by itself is left out: nobody here waits for that, and a QEMU that is newer than the
/// crate tells of things that the crate cannot read, and would take for no answer at all.
pub(crate) struct Answers {
    reader: BufReader<Timed>,
    line: Vec<u8>,
    /// How much of the line was read.
    read: usize,
    deadline: Duration,
}

impl Answers {
    fn next_line(&mut self) -> io::Result<()> {
        self.reader.get_mut().until = Instant::now() + self.deadline;
        loop {
            self.line.clear();
            self.read = 0;
            if let Err(error) = self.read_line() {
                self.line.clear();
                return Err(error);
            }
            if !is_event(&self.line) {
                return Ok(());
            }
        }
    }

    fn read_line(&mut self) -> io::Result<()> {
        // What has come already is read without a look at the clock.
        self.reader.get_ref().left()?;
        let bytes = self.reader.by_ref().take(ANSWER_BYTES_MAX).read_until(b'\n', &mut self.line)?;
        if bytes as u64 == ANSWER_BYTES_MAX && !self.line.ends_with(b"\n") {
            let reason = format!("an answer of more than {} MiB", ANSWER_BYTES_MAX >> 20);
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
        Ok(())
    }
}

/// What is read until one point in time, however little comes at once.
struct Timed {
    stream: UnixStream,
    until: Instant,
}

impl Timed {
    /// How much time there is left; there is some.
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Timed {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(into)
    }
}

fn is_event(line: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Line {
        event: Option<IgnoredAny>,
    }
    serde_json::from_slice::<Line>(line).is_ok_and(|line| line.event.is_some())
}

impl Read for Answers {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let there = self.fill_buf()?;
        let bytes = there.len().min(into.len());
        into[..bytes].copy_from_slice(&there[..bytes]);
        self.consume(bytes);
        Ok(bytes)
    }
}

impl BufRead for Answers {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.read == self.line.len() {
            self.next_line()?;
        }
        Ok(&self.line[self.read..])
    }

    fn consume(&mut self, bytes: usize) {
        self.read = self.line.len().min(self.read + bytes);
    }
}

/// Reads over what comes before the greeting: of a session that ended while it was being answered, QEMU gives the rest of the
/// answer to the next one.
fn skip_to_greeting(reader: &mut BufReader<Timed>) -> io::Result<()> {
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
    let reading = stream.try_clone().map_err(|e| failed(e.into()))?;
    let mut reader = BufReader::new(Timed { stream: reading, until: Instant::now() + deadline });
    // The crate panics where nothing comes.
    let greeted = skip_to_greeting(&mut reader).map_err(ExecuteError::from);
    let answers = Answers { reader, line: Vec::new(), read: 0, deadline };
    let mut monitor = Qmp::new(Stream::new(answers, stream));
    greeted.and_then(|()| monitor.handshake()).map_err(|error| match error {
        ExecuteError::Io(io) if matches!(io.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            no_greeting(of)
        }
        ExecuteError::Io(io) if io.kind() == ErrorKind::UnexpectedEof => {
            VmmError::Monitor { reason: format!("{of}: QEMU ended before it greeted") }
        }
        _ => failed(error),
    })?;
    Ok(monitor)
}

#[cfg(test)]
pub(crate) mod fake {
    //! A QEMU that answers as a test wants.

    use std::io::Write as _;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::sync::mpsc::{Receiver, channel};

    use serde_json::Value;

    use super::*;

    const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}"#;

    /// One whose monitor is a socket. It ends with the process of the tests.
    pub(crate) struct Qemu {
        pub(crate) path: PathBuf,
        asked: Receiver<String>,
        _directory: tempfile::TempDir,
    }

    impl Qemu {
        /// Answers commands by their names and arguments, in one session after the other. Where it says none, the session ends; where it
        /// says an empty word, it goes on without an answer.
        pub(crate) fn start(mut answer: impl FnMut(&str, &Value) -> Option<String> + Send + 'static) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("qmp.sock");
            let listener = UnixListener::bind(&path).unwrap();
            let (tell, asked) = channel();
            thread::spawn(move || {
                for session in listener.incoming() {
                    serve(&session.unwrap(), &mut answer, &mut |name| drop(tell.send(name)));
                }
            });
            Self { path, asked, _directory: directory }
        }

        /// The commands so far, but for those that begin a session.
        pub(crate) fn asked(&self) -> Vec<String> {
            self.asked.try_iter().collect()
        }
    }

    /// Serves one session.
    pub(crate) fn serve(
        session: &UnixStream,
        answer: &mut impl FnMut(&str, &Value) -> Option<String>,
        told: &mut impl FnMut(String),
    ) {
        let mut say: &UnixStream = session;
        if writeln!(say, "{GREETING}").is_err() {
            return;
        }
        for line in BufReader::new(session.try_clone().unwrap()).lines() {
            let Ok(line) = line else { return };
            let command: Value = serde_json::from_str(&line).unwrap();
            let name = command["execute"].as_str().unwrap();
            let said = if name == "qmp_capabilities" {
                Some(r#"{"return": {}}"#.to_owned())
            } else {
                told(name.to_owned());
                answer(name, &command["arguments"])
            };
            let Some(said) = said else { return };
            if said.is_empty() {
                continue;
            }
            if writeln!(say, "{said}").is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use qapi::qmp::query_status;

    use super::*;

    #[test]
    fn what_happens_meanwhile_is_no_answer() {
        let qemu = fake::Qemu::start(|name, _| {
            assert_eq!(name, "query-status");
            let status = r#"{"return": {"status": "running", "singlestep": false, "running": true}}"#;
            // Of QEMU 10, and of none yet.
            let events = [
                r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "NETDEV_VHOST_USER_CONNECTED", "data": {"netdev-id": "host-net0", "chardev-id": "wadi-net0"}}"#,
                r#"{"timestamp": {"seconds": 1, "microseconds": 3}, "event": "SOMETHING_NEW"}"#,
            ];
            Some([&events[..], &[status]].concat().join("\n"))
        });
        let mut monitor = connect(&qemu.path, || true).unwrap();
        for _ in 0..2 {
            assert!(monitor.execute(&query_status {}).unwrap().running);
        }
    }

    #[test]
    fn a_qemu_that_lets_nobody_in_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qmp.sock");
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // As QEMU does.
        rustix::net::listen(&socket, 1).unwrap();
        // They gave up, and it has not seen them yet: it hangs.
        let (done, ended) = std::sync::mpsc::channel();
        thread::spawn(move || {
            for _ in 0..4 {
                let error = connect_within(&path, Duration::from_millis(50), || true).err();
                done.send(error.map(|error| error.to_string())).unwrap();
            }
        });
        for _ in 0..4 {
            let error = ended.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
            assert!(error.contains("does not greet"), "{error}");
        }
    }

    /// What comes of asking one that says the same again and again, after it has greeted or before.
    fn ask_one_that_repeats(word: &'static [u8], times: usize, greets: bool, deadline: Duration) -> VmmError {
        let (ours, qemus) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            let repeat = || drop((0..times).try_for_each(|_| (&qemus).write_all(word)));
            if greets {
                fake::serve(&qemus, &mut |_, _| None, &mut |_| repeat());
            } else {
                repeat();
            }
        });
        let (tell, told) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let asked = open(ours, "a QEMU", deadline);
            let asked = asked.and_then(|mut monitor| monitor.execute(&query_status {}).map_err(failed));
            tell.send(asked.unwrap_err()).unwrap();
        });
        told.recv_timeout(Duration::from_secs(30)).expect("it listens for ever")
    }

    #[test]
    fn a_qemu_that_goes_on_for_ever_is_not_listened_to_for_ever() {
        let short = Duration::from_millis(200);
        for greets in [false, true] {
            // A byte at a time, and whole lines of which none is an answer.
            for word in [&b" "[..], b"{\"event\": \"SOMETHING_NEW\"}\n"] {
                let error = ask_one_that_repeats(word, usize::MAX, greets, short);
                assert!(matches!(error, VmmError::Silent { .. }), "{greets} {word:?}: {error:?}");
            }
        }
    }

    #[test]
    fn a_qemu_that_wants_all_memory_does_not_get_it() {
        static BLANK: [u8; 1 << 20] = [b' '; 1 << 20];
        let error = ask_one_that_repeats(&BLANK, 64, true, MONITOR_DEADLINE);
        assert!(matches!(error, VmmError::Silent { .. }), "{error:?}");
        assert!(error.to_string().contains("more than 16 MiB"), "{error}");
    }

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
