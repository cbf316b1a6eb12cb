//! Runs commands in a guest, through the agent that `guest/agent.sh` is.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use thiserror::Error;

/// How a command in the guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Its exit status, as a shell would say it: 128 and the signal's number for one that was killed.
    pub status: i32,
    /// What it wrote to its standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to its standard error.
    pub stderr: Vec<u8>,
}

impl Outcome {
    /// Whether the command ended with status 0.
    pub fn success(&self) -> bool {
        self.status == 0
    }

    /// Its standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Why a command could not be run in the guest, or what became of it is unknown.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The guest's port could not be reached.
    #[error("cannot reach the guest's agent at {}", path.display())]
    Unreachable {
        /// The port's socket on the host.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The agent did not answer in time.
    #[error("the guest did not answer within {after_s} s: {what}")]
    TimedOut {
        /// How long was waited.
        after_s: u64,
        /// For what.
        what: String,
    },
    /// The virtual machine is gone.
    #[error("the guest is gone: {what} was not answered")]
    Gone {
        /// What was asked.
        what: String,
    },
}

type Waiting = Arc<Mutex<HashMap<u64, Sender<Outcome>>>>;

/// How long a guest may take nothing of what it is sent before it counts as stuck.
const WRITE_TIMEOUT: Duration = Duration::from_mins(1);
/// How often the agent is greeted while the guest boots.
const GREETING_PERIOD: Duration = Duration::from_millis(200);

/// A connection to a guest's agent. Commands may run side by side, from several threads.
#[derive(Debug)]
pub struct Agent {
    writer: Mutex<UnixStream>,
    waiting: Waiting,
    next: AtomicU64,
}

/// A command that runs in the guest.
#[derive(Debug)]
pub struct Job {
    id: u64,
    what: String,
    outcome: Receiver<Outcome>,
}

impl Agent {
    /// Connects to the port's socket on the host and waits until the guest has booted and its agent answers.
    pub fn connect(path: &Path, deadline: Duration) -> Result<Self, AgentError> {
        let unreachable = |source| AgentError::Unreachable { path: path.to_owned(), source };
        let started = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(e) if started.elapsed() > deadline => return Err(unreachable(e)),
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut writer = stream.try_clone().map_err(unreachable)?;
        let mut reader = BufReader::new(stream);
        greet(&mut reader, &mut writer, started, deadline).map_err(|e| match e.kind() {
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                AgentError::TimedOut { after_s: deadline.as_secs(), what: "boot".to_owned() }
            }
            _ => unreachable(e),
        })?;
        let waiting = Waiting::default();
        let answers = Arc::clone(&waiting);
        thread::spawn(move || {
            // Ends when the virtual machine does; whoever still waits hears of it.
            let _ = read_answers(&mut reader, &answers);
            lock(&answers).clear();
        });
        Ok(Self { writer: Mutex::new(writer), waiting, next: AtomicU64::new(1) })
    }

    /// Ends the connection, so that another one can be made. What the guest has not answered yet is lost.
    pub fn disconnect(&self) {
        // One that is gone already is disconnected.
        let _ = lock(&self.writer).shutdown(Shutdown::Both);
    }

    /// Starts `command` with the guest's shell; it reads `stdin`.
    pub fn start(&self, command: &str, stdin: &[u8]) -> Result<Job, AgentError> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, outcome) = mpsc::channel();
        lock(&self.waiting).insert(id, sender);
        let mut message = format!("run {id} {} {}\n", command.len(), stdin.len()).into_bytes();
        message.extend_from_slice(command.as_bytes());
        message.extend_from_slice(stdin);
        if let Err(error) = self.send(&message, command) {
            lock(&self.waiting).remove(&id);
            return Err(error);
        }
        Ok(Job { id, what: command.to_owned(), outcome })
    }

    /// Runs `command` with the guest's shell to its end.
    pub fn run(&self, command: &str, deadline: Duration) -> Result<Outcome, AgentError> {
        let job = self.start(command, &[])?;
        match job.wait(deadline) {
            Err(error @ AgentError::TimedOut { .. }) => {
                // What nobody waits for shall not disturb what comes after it.
                let _ = self.signal(&job, "KILL");
                Err(error)
            }
            other => other,
        }
    }

    /// Sends a signal, such as `TERM`, to a command and its children.
    pub fn signal(&self, job: &Job, signal: &str) -> Result<(), AgentError> {
        self.send(format!("kill {} {signal}\n", job.id).as_bytes(), &job.what)
    }

    /// Sends the whole message. After an error the agent is of no more use: where a message that was cut off ends,
    /// its reader cannot know.
    fn send(&self, message: &[u8], what: &str) -> Result<(), AgentError> {
        let mut writer = lock(&self.writer);
        writer.write_all(message).map_err(|error| {
            // Nothing to add if it is shut already.
            let _ = writer.shutdown(Shutdown::Both);
            match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                    AgentError::TimedOut { after_s: WRITE_TIMEOUT.as_secs(), what: format!("to take {what}") }
                }
                _ => AgentError::Gone { what: what.to_owned() },
            }
        })
    }
}

impl Job {
    /// Waits until the command ends.
    pub fn wait(&self, deadline: Duration) -> Result<Outcome, AgentError> {
        self.outcome.recv_timeout(deadline).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                AgentError::TimedOut { after_s: deadline.as_secs(), what: self.what.clone() }
            }
            RecvTimeoutError::Disconnected => AgentError::Gone { what: self.what.clone() },
        })
    }

    /// How the command ended, if it has.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.try_recv().ok()
    }
}

/// Says hello until the agent does. What was said before it listened may be lost, or answered late. A guest that
/// does not boot takes nothing at all, so that neither direction may wait for ever.
fn greet(
    reader: &mut BufReader<UnixStream>,
    writer: &mut UnixStream,
    started: Instant,
    deadline: Duration,
) -> io::Result<()> {
    // Of the socket, and so of both.
    writer.set_read_timeout(Some(GREETING_PERIOD))?;
    writer.set_write_timeout(Some(GREETING_PERIOD))?;
    let mut token = 0;
    let mut unsaid = Vec::new();
    let mut line = Vec::new();
    while started.elapsed() <= deadline {
        if unsaid.is_empty() {
            token += 1;
            unsaid = format!("hello {token}\n").into_bytes();
        }
        match writer.write(&unsaid) {
            Ok(bytes) => drop(unsaid.drain(..bytes)),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            Err(e) => return Err(e),
        }
        let wanted = format!("hello {token}\n");
        while started.elapsed() <= deadline {
            match reader.read_until(b'\n', &mut line) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) if line == wanted.as_bytes() => {
                    writer.set_read_timeout(None)?;
                    writer.set_write_timeout(Some(WRITE_TIMEOUT))?;
                    return Ok(());
                }
                Ok(_) => line.clear(),
                Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e),
                Err(_) => break,
            }
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn read_answers(reader: &mut impl BufRead, waiting: &Waiting) -> io::Result<()> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let mut line = String::new();
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let mut fields = line.split_whitespace();
        if fields.next() != Some("done") {
            continue;
        }
        let mut number = || fields.next().and_then(|field| field.parse::<u64>().ok()).ok_or_else(malformed);
        let (id, status, stdout_bytes, stderr_bytes) = (number()?, number()?, number()?, number()?);
        let outcome = Outcome {
            status: i32::try_from(status).map_err(|_| malformed())?,
            stdout: read_exactly(reader, stdout_bytes)?,
            stderr: read_exactly(reader, stderr_bytes)?,
        };
        if let Some(sender) = lock(waiting).remove(&id) {
            // Nobody waits any more: no matter.
            let _ = sender.send(outcome);
        }
    }
}

fn read_exactly(reader: &mut impl BufRead, bytes: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let got = reader.take(bytes).read_to_end(&mut content)?;
    if got as u64 == bytes { Ok(content) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // What is behind these locks is whole at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_reach_whom_they_are_for() {
        let waiting = Waiting::default();
        let (first, first_outcome) = mpsc::channel();
        let (second, second_outcome) = mpsc::channel();
        lock(&waiting).insert(1, first);
        lock(&waiting).insert(2, second);
        let mut stream: &[u8] = b"hello 9\ndone 2 3 4 0\na\nb\0done 1 0 0 2\nxy";
        read_answers(&mut stream, &waiting).unwrap();
        assert_eq!(
            second_outcome.recv().unwrap(),
            Outcome { status: 3, stdout: b"a\nb\0".to_vec(), stderr: vec![] }
        );
        assert_eq!(first_outcome.recv().unwrap().stderr, b"xy");
    }

    /// A stream to a peer that takes nothing more: all there is room for is under way.
    fn blocked() -> (UnixStream, UnixStream) {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        while ours.write(&[b'x'; 4096]).is_ok() {}
        while ours.write(b"x").is_ok() {}
        ours.set_nonblocking(false).unwrap();
        (ours, theirs)
    }

    #[test]
    fn a_guest_that_takes_nothing_is_not_waited_for_beyond_the_deadline() {
        let (mut ours, _theirs) = blocked();
        let mut reader = BufReader::new(ours.try_clone().unwrap());
        let error = greet(&mut reader, &mut ours, Instant::now(), Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_guest_that_talks_without_end_is_not_listened_to_beyond_the_deadline() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let talker = thread::spawn(move || while theirs.write_all(b"hello, hello\n").is_ok() {});
        let mut reader = BufReader::new(ours.try_clone().unwrap());
        let error = greet(&mut reader, &mut ours, Instant::now(), Duration::from_millis(300)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop((ours, reader));
        talker.join().unwrap();
    }

    #[test]
    fn a_command_that_is_not_taken_fails_and_leaves_no_use_of_the_agent() {
        let (ours, theirs) = blocked();
        ours.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let agent = Agent { writer: Mutex::new(ours), waiting: Waiting::default(), next: AtomicU64::new(1) };
        assert!(matches!(agent.start("true", &[]), Err(AgentError::TimedOut { .. })));
        assert!(lock(&agent.waiting).is_empty());
        drop(theirs);
        assert!(matches!(agent.start("true", &[]), Err(AgentError::Gone { .. })));
    }

    #[test]
    fn a_cut_off_answer_is_an_error() {
        let mut stream: &[u8] = b"done 1 0 10 0\nshort";
        assert!(read_answers(&mut stream, &Waiting::default()).is_err());
        let mut stream: &[u8] = b"done one\n";
        assert!(read_answers(&mut stream, &Waiting::default()).is_err());
    }
}
