//! A TCP connection to a guest, over which a message is always under way.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::pod::{GUEST_ADDRESS, Pod, PodVm};

const PORT: u16 = 7000;
const MESSAGE_BYTES: usize = 4096;
/// Longer than anything takes, retransmission timers included; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);

#[derive(Debug, Default)]
struct State {
    exchanged: AtomicU64,
    failure: Mutex<Option<String>>,
}

impl State {
    fn failure(&self) -> MutexGuard<'_, Option<String>> {
        // It is put in whole, whoever panicked.
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropping it ends it.
#[derive(Debug)]
pub struct Conversation {
    stream: TcpStream,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

impl Conversation {
    /// With a guest that has just been booted.
    pub fn begin(pod: &Pod, vm: &PodVm) -> Result<Self> {
        Self::begin_at(GUEST_ADDRESS, pod, vm)
    }

    /// With one that was booted at another address.
    pub fn begin_at(address: &str, pod: &Pod, vm: &PodVm) -> Result<Self> {
        vm.exec(&format!("(while :; do nc -l -p {PORT} -e cat; done) > /dev/null 2>&1 < /dev/null &"))?;
        let began = Instant::now();
        let address: SocketAddr = format!("{address}:{PORT}").parse()?;
        let stream = loop {
            match pod
                .client_namespace()
                .inside(|| TcpStream::connect_timeout(&address, Duration::from_secs(10)))
            {
                Ok(stream) => break stream,
                // The guest's shell takes a moment to listen.
                Err(error) if began.elapsed() > PATIENCE => bail!("no connection to the guest: {error:#}"),
                Err(_) => {}
            }
            thread::sleep(Duration::from_millis(20));
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let state = Arc::new(State::default());
        let (shared, own) = (Arc::clone(&state), stream.try_clone()?);
        let thread = thread::spawn(move || converse(own, &shared));
        Ok(Self { stream, state, thread: Some(thread) })
    }

    /// It goes on: what the guest sends back is what it was sent.
    pub fn check(&self, when: &str) -> Result<()> {
        let before = self.state.exchanged.load(Ordering::Relaxed);
        let began = Instant::now();
        // The second one was sent after this began.
        while self.state.exchanged.load(Ordering::Relaxed) < before + 2 {
            if let Some(failure) = &*self.state.failure() {
                bail!("{when}, the instance's connection broke: {failure}");
            }
            if began.elapsed() > PATIENCE {
                bail!("{when}, the instance's connection does not go on");
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn converse(mut stream: TcpStream, state: &State) {
    for number in 0_u64.. {
        let message: Vec<u8> = number.to_le_bytes().into_iter().cycle().take(MESSAGE_BYTES).collect();
        let mut answer = vec![0; MESSAGE_BYTES];
        let exchanged = stream.write_all(&message).and_then(|()| stream.read_exact(&mut answer));
        let failure = match exchanged {
            Ok(()) if answer == message => None,
            Ok(()) => Some(format!("message {number} came back changed")),
            Err(error) => Some(error.to_string()),
        };
        if failure.is_some() {
            *state.failure() = failure;
            return;
        }
        state.exchanged.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(1));
    }
}
