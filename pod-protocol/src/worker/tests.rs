use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use cxl_channel::RingPlacement;
use cxl_pool::simulated::check_seeds;
use cxl_pool::{
    Area, EndpointId, FenceLine, Generation, HostId, LineCount, LineOffset, Memory, Record, Role,
};
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::data_channel::{DataChannel, NET_WORDS};
use crate::ids::ChannelId;
use crate::objects::{ChannelObject, Engine};
use crate::testing::{PATIENCE, TestPod};

fn config(wakeup: Wakeup) -> WorkerConfig {
    WorkerConfig { wakeup, busy_poll: Duration::ZERO, poll_in_flight: Duration::ZERO, cpu: None, fence: None }
}

/// Waits until something holds; a test whose patience ends has failed.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not in time");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A task that counts what happens to it.
#[derive(Default)]
struct Counts {
    turns: AtomicU64,
    sleeps: AtomicU64,
    ready: AtomicU64,
    /// Work that arrives without waking anyone.
    work: AtomicBool,
    worked: AtomicU64,
    /// Somebody has in hand what it has begun.
    awaits: AtomicBool,
}

struct Counting {
    counts: Arc<Counts>,
    heard: Vec<(usize, u64)>,
    watched: Option<Arc<OwnedFd>>,
}

enum Message {
    Number(usize, u64),
    Heard(Reply<Vec<(usize, u64)>>),
    Forget(Reply<()>),
    Watch(Arc<OwnedFd>, Reply<()>),
    Unwatch(Reply<()>),
}

impl Task for Counting {
    type Message = Message;

    fn message(&mut self, message: Message, sources: &mut Sources) {
        match message {
            Message::Number(from, number) => self.heard.push((from, number)),
            Message::Heard(reply) => reply.send(std::mem::take(&mut self.heard)),
            Message::Forget(reply) => drop(reply),
            Message::Watch(fd, reply) => {
                sources.add(&fd, Token(7)).expect("watched");
                self.watched = Some(fd);
                reply.send(());
            }
            Message::Unwatch(reply) => {
                sources.remove(self.watched.take().expect("watched")).expect("was watched");
                reply.send(());
            }
        }
    }

    fn turn(&mut self) -> Progress {
        self.counts.turns.fetch_add(1, Ordering::SeqCst);
        if self.counts.work.swap(false, Ordering::SeqCst) {
            self.counts.worked.fetch_add(1, Ordering::SeqCst);
            return Progress::Busy;
        }
        Progress::Idle
    }

    fn ready(&mut self, token: Token) {
        assert_eq!(token, Token(7));
        self.counts.ready.fetch_add(1, Ordering::SeqCst);
        let _ = rustix::io::read(self.watched.as_ref().expect("watched"), &mut [0; 8]);
    }

    fn awaits(&self) -> bool {
        self.counts.awaits.load(Ordering::SeqCst)
    }

    fn prepare_sleep(&mut self) -> bool {
        self.counts.sleeps.fetch_add(1, Ordering::SeqCst);
        !self.counts.work.load(Ordering::SeqCst)
    }

    fn resume(&mut self) {}
}

fn counting(config: WorkerConfig) -> (Arc<Counts>, WorkerHandle<Message>) {
    let counts = Arc::new(Counts::default());
    let task = Counting { counts: Arc::clone(&counts), heard: Vec::new(), watched: None };
    (counts, Worker::spawn("counting", config, None, task).expect("started"))
}

/// An eventfd, as a queue's kick.
fn kick() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("created"))
}

#[test]
fn messages_of_each_sender_arrive_in_order() {
    let (_, handle) = counting(config(Wakeup::Socket));
    let senders: Vec<_> = (0..3)
        .map(|sender| {
            let handle = handle.clone();
            thread::spawn(move || {
                for number in 0..1000 {
                    handle.send(Message::Number(sender, number)).expect("it lives");
                }
            })
        })
        .collect();
    for sender in senders {
        sender.join().expect("no panic");
    }
    let heard = handle.call(Message::Heard).expect("it lives");
    for sender in 0..3 {
        let numbers: Vec<u64> =
            heard.iter().filter(|(from, _)| *from == sender).map(|(_, number)| *number).collect();
        assert_eq!(numbers, (0..1000).collect::<Vec<_>>());
    }
}

#[test]
fn what_others_have_in_hand_is_polled_for() {
    let config = WorkerConfig { poll_in_flight: PATIENCE, ..config(Wakeup::Socket) };
    let (counts, handle) = counting(config);
    until("the first sleep", || counts.sleeps.load(Ordering::SeqCst) > 0);
    counts.awaits.store(true, Ordering::SeqCst);
    // It is awake when it answers.
    handle.call(Message::Heard).expect("it lives");
    let (sleeps, turns) = (counts.sleeps.load(Ordering::SeqCst), counts.turns.load(Ordering::SeqCst));
    until("turns", || counts.turns.load(Ordering::SeqCst) > turns + 1000);
    assert_eq!(counts.sleeps.load(Ordering::SeqCst), sleeps, "it slept");
    counts.awaits.store(false, Ordering::SeqCst);
    until("a sleep", || counts.sleeps.load(Ordering::SeqCst) > sleeps);
}

#[test]
fn idle_worker_with_doorbells_takes_no_turns() {
    let (counts, handle) = counting(config(Wakeup::Socket));
    until("the first sleep", || counts.sleeps.load(Ordering::SeqCst) > 0);
    // A message that is answered proves that it has slept and woken; then it goes back to sleep.
    handle.call(Message::Heard).expect("it lives");
    thread::sleep(Duration::from_millis(50));
    let (turns, sleeps) = (counts.turns.load(Ordering::SeqCst), counts.sleeps.load(Ordering::SeqCst));
    thread::sleep(Duration::from_millis(300));
    assert_eq!(counts.turns.load(Ordering::SeqCst), turns);
    assert_eq!(counts.sleeps.load(Ordering::SeqCst), sleeps);
}

#[test]
fn worker_without_doorbells_finds_work_by_itself() {
    let (counts, _handle) = counting(config(Wakeup::Poll));
    for round in 1..=20 {
        counts.work.store(true, Ordering::SeqCst);
        until("work", || counts.worked.load(Ordering::SeqCst) == round);
    }
}

#[test]
fn pinned_worker_never_sleeps() {
    let (counts, handle) = counting(WorkerConfig { cpu: Some(0), ..config(Wakeup::Socket) });
    counts.work.store(true, Ordering::SeqCst);
    until("work", || counts.worked.load(Ordering::SeqCst) == 1);
    handle.call(Message::Heard).expect("it lives");
    assert_eq!(counts.sleeps.load(Ordering::SeqCst), 0);
}

#[test]
fn worker_pinned_to_a_core_that_does_not_exist_works() {
    let (_, handle) = counting(WorkerConfig { cpu: Some(1 << 40), ..config(Wakeup::Socket) });
    handle.call(Message::Heard).expect("it lives");
}

#[test]
fn readable_descriptor_wakes_until_it_is_removed() {
    for wakeup in [Wakeup::Socket, Wakeup::Poll] {
        let (counts, handle) = counting(config(wakeup));
        let fd = kick();
        handle.call(|reply| Message::Watch(Arc::clone(&fd), reply)).expect("it lives");
        for round in 1..=100 {
            rustix::io::write(&fd, &1_u64.to_ne_bytes()).expect("written");
            until("the kick", || counts.ready.load(Ordering::SeqCst) >= round);
        }
        handle.call(Message::Unwatch).expect("it lives");
        let before = counts.ready.load(Ordering::SeqCst);
        rustix::io::write(&fd, &1_u64.to_ne_bytes()).expect("written");
        handle.call(Message::Heard).expect("it lives");
        assert_eq!(counts.ready.load(Ordering::SeqCst), before);
    }
}

#[test]
fn reserved_token_is_refused() {
    let mut sources = Sources::new().expect("created");
    assert!(sources.add(kick(), Token(u64::MAX)).is_err());
}

#[test]
fn callers_of_a_worker_that_ended_are_told() {
    let (_, handle) = counting(config(Wakeup::Socket));
    assert_eq!(handle.call(Message::Forget), Err(WorkerGone), "the answer was dropped");
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let handle = handle.clone();
            thread::spawn(move || while handle.call(Message::Heard).is_ok() {})
        })
        .collect();
    handle.stop();
    for caller in callers {
        caller.join().expect("no panic");
    }
    assert!(handle.is_gone());
    assert_eq!(handle.send(Message::Number(0, 0)), Err(WorkerGone));
    handle.stop();
}

#[test]
fn fenced_worker_ends() {
    let pod = TestPod::simulated(1);
    let memory = pod.memory(HostId::new(1));
    let at = LineOffset::new(1024);
    let fence = Fence::new(memory, [at], Duration::from_millis(20), (7, LineOffset::new(1026)));
    // The line is the controller's, on a host of its own.
    let controller = pod.memory(HostId::new(2));
    let raise = |generation| {
        FenceLine { generation, term: 1, incarnation: 7 }.publish(&controller, at);
        controller.full_fence();
    };
    raise(4);
    fence.granted(4);
    let (counts, handle) =
        counting(WorkerConfig { fence: Some(fence.clone()), cpu: Some(0), ..config(Wakeup::Socket) });
    until("turns", || counts.turns.load(Ordering::SeqCst) > 0);
    // Nobody else looks at the line: the worker must do so itself.
    raise(5);
    until("its end", || handle.is_gone());
    assert!(fence.check().is_err());
    let turns = counts.turns.load(Ordering::SeqCst);
    assert_eq!(handle.call(Message::Heard), Err(WorkerGone));
    assert_eq!(counts.turns.load(Ordering::SeqCst), turns);
}

#[test]
fn worker_that_stood_still_turns_once_everything_was_heard() {
    let pod = TestPod::simulated(1);
    let (line, hello) = (LineOffset::new(1024), LineOffset::new(1026));
    let limit = Duration::from_millis(20);
    let fence = Fence::new(pod.memory(HostId::new(1)), [line], limit, (7, hello));
    // There is a control thread.
    fence.heard_everything();
    let (counts, handle) = counting(WorkerConfig { fence: Some(fence.clone()), ..config(Wakeup::Socket) });
    until("sleep", || counts.sleeps.load(Ordering::SeqCst) > 0);
    // It sleeps, and nobody looks at the line.
    thread::sleep(2 * limit);
    counts.work.store(true, Ordering::SeqCst);
    let woken = Instant::now();
    for number in 0..3 {
        handle.send(Message::Number(0, number)).expect("it lives");
        assert_eq!(handle.call(Message::Heard), Ok(vec![(0, number)]), "what it is told, it obeys");
    }
    let worked = counts.worked.load(Ordering::SeqCst);
    assert!(worked == 0 || woken.elapsed() > Duration::from_millis(500), "it did not wait");
    until("work", || {
        fence.heard_everything();
        counts.worked.load(Ordering::SeqCst) == 1
    });
    handle.stop();
}

/// One end of a ping-pong: answers each message with the next number until the last.
struct Player<M: Memory> {
    channel: DataChannel<M, NET_WORDS>,
    serves: bool,
    last: u64,
    done: mpsc::Sender<()>,
}

impl<M: Memory> Task for Player<M> {
    type Message = ();

    fn message(&mut self, (): (), _: &mut Sources) {}

    fn turn(&mut self) -> Progress {
        if !self.channel.ready() {
            return Progress::Idle;
        }
        let next = if std::mem::take(&mut self.serves) {
            1
        } else {
            match self.channel.receive() {
                Some([number, _]) => number + 1,
                None => return Progress::Idle,
            }
        };
        if next > self.last {
            let _ = self.done.send(());
        }
        if next <= self.last + 1 {
            self.channel.send([next, 0]).expect("one message at a time fits");
            self.channel.publish();
        }
        Progress::Busy
    }

    fn ready(&mut self, _: Token) {}

    fn prepare_sleep(&mut self) -> bool {
        self.channel.announce_sleep()
    }

    fn resume(&mut self) {
        self.channel.wake();
    }
}

/// Two workers that sleep after each message: if one wake-up is ever lost, both sleep forever.
fn ping_pong<M: Memory>(pod: &TestPod<M>, wakeup: Wakeup, last: u64) {
    let run = pod.run_directory().with_wakeup(wakeup);
    run.prepare().expect("created");
    let hosts = [HostId::new(1), HostId::new(2)];
    let ends = hosts.map(|host| EndpointId::new(host, Role::NetFrontend));
    let slots = 64;
    let lines = LineCount::new(1024);
    let rings = [0, 1].map(|ring| {
        let area =
            Area::new(pod.layout.data().start.saturating_add(LineCount::new(ring * lines.get())), lines);
        RingPlacement { start: area.start, slots }
    });
    let (done, is_done) = mpsc::channel();
    let players: Vec<_> = [0, 1]
        .map(|side| {
            let object = ChannelObject {
                id: ChannelId::new(1),
                engine: Engine::Net,
                peer: ends[1 - side],
                generation: Generation::new(1),
                outgoing: rings[side],
                incoming: rings[1 - side],
                receives: None,
            };
            let listener = DoorbellListener::bind(&run.data_doorbell(ends[side])).expect("bound");
            let channel = DataChannel::open(&pod.memory(hosts[side]), &object, &run).expect("placed well");
            let task = Player { channel, serves: side == 0, last, done: done.clone() };
            Worker::spawn("player", config(wakeup), listener, task).expect("started")
        })
        .into();
    is_done.recv_timeout(PATIENCE).expect("no wake-up is lost");
    for player in players {
        player.stop();
    }
}

#[test]
fn no_wakeup_is_lost_over_a_real_pool() {
    let rounds = std::env::var("WADI_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(1);
    for _ in 0..rounds {
        ping_pong(&TestPod::real(), Wakeup::Socket, 20_000);
    }
}

#[test]
fn no_wakeup_is_lost_over_simulated_memory() {
    check_seeds("-p pod-protocol --lib", 5, |seed| {
        ping_pong(&TestPod::simulated(seed), Wakeup::Socket, 500);
        Ok(())
    });
}

#[test]
fn no_message_is_lost_without_doorbells() {
    ping_pong(&TestPod::real(), Wakeup::Poll, 1000);
}
