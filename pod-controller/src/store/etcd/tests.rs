use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::tests::server::Etcd;
use super::super::tests::{command, event, link, state};
use super::gateway::Range;
use super::*;
use crate::store::LOG_LEAST;

impl EtcdStore {
    pub(in crate::store) fn put_raw(&self, name: &str, value: &[u8]) {
        self.change_raw(vec![Operation::put(&self.key(name), value)]);
    }

    pub(in crate::store) fn delete_raw(&self, name: &str) {
        let key = self.key(name);
        self.change_raw(vec![Operation::delete(&key, &format!("{key}\0"))]);
    }

    fn key(&self, name: &str) -> String {
        self.link.place.log(0, 0).replace("log/0000000000000000/00000000", name)
    }

    fn change_raw(&self, success: Vec<Operation>) {
        let change = Transaction { compare: Vec::new(), success, failure: Vec::new() };
        assert!(self.link.transact(&change).expect("etcd answers").succeeded);
    }

    /// All keys, without the prefix.
    pub(in crate::store) fn names_raw(&self) -> Vec<String> {
        let (from, to) = (self.key(""), self.key("\u{7f}"));
        let found = self.link.range(&from, &to).expect("etcd answers");
        found.iter().map(|found| String::from_utf8_lossy(&found.key.0[from.len()..]).into_owned()).collect()
    }

    /// Whether a snapshot is being written.
    pub(in crate::store) fn is_writing(&self) -> bool {
        self.writing.as_ref().is_some_and(|writing| !writing.is_over())
    }

    fn get_raw(&self, name: &str) -> Vec<u8> {
        let key = gateway::Bytes(self.key(name).into_bytes());
        let range = Range { key, end: gateway::Bytes::default(), limit: gateway::Number(1) };
        let found: gateway::Ranged =
            self.link.ask("v3/kv/range", &range, std::time::Duration::from_secs(5)).expect("etcd answers");
        found.kvs[0].value.0.clone()
    }
}

/// The next change to a state, and what it leads to.
fn change(store: &mut EtcdStore, state: &mut State, number: u64, message: &str) -> Result<(), StoreError> {
    let command = command(number);
    state.apply(&command).expect("applied");
    let event = Event { message: message.to_owned(), ..event(number) };
    store.commit(&[(state.index, &command)], &[event], state)?;
    store.tidy(&Arc::new(state.clone()));
    Ok(())
}

fn begun(etcd: &Etcd) -> (EtcdStore, State) {
    let (mut store, recovered) = EtcdStore::open(&link(etcd), 0).expect("a new place");
    assert!(recovered.state.is_none());
    let state = state();
    store.begin(&state, Vec::new()).expect("written");
    (store, state)
}

#[test]
fn larger_changes_than_a_request_and_their_snapshots_are_whole() {
    let etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    let long = "y".repeat(3 << 20);
    change(&mut store, &mut state, 1, &long).expect("written");
    store.keep_snapshot(&state).expect("written");
    change(&mut store, &mut state, 2, &long).expect("written");
    drop(store);
    let (store, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(state));
    assert!(recovered.events.iter().map(|event| event.message.len()).eq([long.len(), long.len()]));
    let names = store.names_raw();
    assert!(names.iter().filter(|name| name.starts_with("snapshot/")).count() > 10, "{names:?}");
    assert!(names.iter().filter(|name| name.starts_with("log/")).count() > 10, "{names:?}");
}

#[test]
fn what_a_failed_attempt_left_is_not_taken_for_a_part() {
    let etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    store.put_raw("log/0000000000000002/00000001", b"left");
    store.put_raw("snapshot/0000000000000001/00000001", b"left");
    change(&mut store, &mut state, 1, "short").expect("written");
    store.keep_snapshot(&state).expect("written");
    change(&mut store, &mut state, 2, "short").expect("written");
    drop(store);
    let (_, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(state));
}

#[test]
fn old_changes_and_snapshots_are_removed() {
    let etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    for number in 1..=2 * LOG_LEAST + 10 {
        change(&mut store, &mut state, number, "short").expect("written");
        while store.is_writing() {
            std::thread::yield_now();
        }
    }
    let names = store.names_raw();
    assert!(names.len() < 30, "{names:?}");
}

/// Its lease is gone and another one has come: whatever it believes, it writes no more.
#[test]
fn whoever_was_taken_for_dead_writes_no_more() {
    let etcd = Etcd::start();
    let (mut first, mut state) = begun(&etcd);
    change(&mut first, &mut state, 1, "before").expect("written");
    first.delete_raw("leader");
    let (second, recovered) = EtcdStore::open(&link(&etcd), 0).expect("nobody is there");
    assert_eq!((recovered.state, recovered.term), (Some(state.clone()), 2));
    let before = state.clone();
    for message in ["short", &"y".repeat(1 << 20)] {
        let error = change(&mut first, &mut state, 2, message).expect_err("another one has come");
        assert!(matches!(error, StoreError::Etcd(EtcdError::TakenOver { .. })), "{error}");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        state = before.clone();
    }
    let loss = first.loss();
    // It hears of it by itself, since its lease has to be kept.
    let lease_lost = std::time::Instant::now();
    first.office.end_lease();
    while loss.seen().is_none() {
        assert!(lease_lost.elapsed() < std::time::Duration::from_mins(1), "it hears nothing");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop((first, second));
    let (_, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(before));
}

/// A lease that ran out while etcd was away is no loss if nobody has come.
#[test]
fn lease_that_ran_out_is_taken_anew() {
    let etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    store.office.end_lease();
    let deadline = std::time::Instant::now() + std::time::Duration::from_mins(1);
    while !store.names_raw().contains(&"leader".to_owned()) {
        assert!(std::time::Instant::now() < deadline, "it is not taken");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert!(store.loss().seen().is_none());
    change(&mut store, &mut state, 1, "after").expect("written");
}

#[test]
fn damage_anywhere_gives_an_error() {
    let etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    for number in 1..=3 {
        change(&mut store, &mut state, number, "short").expect("written");
        if number == 1 {
            store.keep_snapshot(&state).expect("written");
        }
    }
    let names: Vec<String> = store.names_raw().into_iter().filter(|name| name != "leader").collect();
    assert_eq!(names.len(), 5, "{names:?}");
    let good: Vec<Vec<u8>> = names.iter().map(|name| store.get_raw(name)).collect();
    let (mut terms, mut store) = (store.head.term, Some(store));
    for (name, good) in names.iter().zip(&good) {
        for wrong in [None, Some(Vec::new()), Some([good.as_slice(), b"x"].concat())] {
            let last = store.take().expect("it opened");
            match &wrong {
                None => last.delete_raw(name),
                Some(wrong) => last.put_raw(name, wrong),
            }
            drop(last);
            match EtcdStore::open(&link(&etcd), 0) {
                Err(error) => {
                    assert!(matches!(error, StoreError::Etcd(EtcdError::Damaged { .. })), "{name}: {error}");
                }
                // Without a head there is nothing: the controller refuses that unless it is to begin.
                Ok((_, recovered)) if name == "head" => assert!(recovered.state.is_none()),
                // The head says of the term too.
                Ok((_, recovered)) => {
                    assert!(name == "term" && wrong.is_none(), "{name} with {wrong:?} is taken");
                    assert!(recovered.term > terms, "{} after {terms}", recovered.term);
                }
            }
            let probe = link(&etcd);
            let put = vec![Operation::put(
                &probe.place.log(0, 0).replace("log/0000000000000000/00000000", name),
                good,
            )];
            probe
                .transact(&Transaction { compare: Vec::new(), success: put, failure: Vec::new() })
                .expect("mended");
            let (whole, recovered) = EtcdStore::open(&probe, 0).expect("it opens");
            assert_eq!(recovered.state.as_ref(), Some(&state));
            terms = whole.head.term;
            store = Some(whole);
        }
    }
}

/// Whatever was acknowledged while etcd was killed again and again is there, and nothing twice.
#[test]
fn acknowledged_changes_survive_the_death_of_etcd() {
    let mut etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    let mut number = 0;
    for round in 0_u64..5 {
        for _ in 0..=round * 3 {
            number += 1;
            change(&mut store, &mut state, number, "kept").expect("written");
        }
        etcd.kill();
        let mut lost = state.clone();
        let error = change(&mut store, &mut lost, number + 1, "lost").expect_err("nobody is there");
        assert!(matches!(error, StoreError::Etcd(EtcdError::Away { .. })), "{error}");
        assert!(store.link.reach().is_err());
        assert!(etcd.go_on());
        let link = Arc::clone(&store.link);
        drop(store);
        let (again, recovered) = EtcdStore::open(&link, 0).expect("etcd is there again");
        assert!(recovered.term > round + 1);
        assert_eq!(recovered.state.as_ref(), Some(&state), "round {round}");
        assert!(recovered.events.iter().map(|event| event.sequence).eq(1..=number));
        store = again;
    }
}

/// Etcd dies while changes are under way, which are sent again until it is back.
#[test]
fn changes_under_way_when_etcd_dies_are_made_once() {
    let mut etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    for round in 1..=5 {
        let changing = std::thread::spawn(move || {
            let mut made = 0;
            for number in 1..=60 {
                change(&mut store, &mut state, round * 1000 + number, "kept").expect("etcd is back soon");
                made += 1;
            }
            (store, state, made)
        });
        etcd.kill();
        assert!(etcd.go_on());
        let made;
        (store, state, made) = changing.join().expect("changes");
        assert_eq!(made, 60);
    }
    drop(store);
    let (_, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(state));
    assert_eq!(recovered.events.len(), 300);
}

/// Carries bytes between a controller and etcd, and loses an answer, or all of them, when it is told to.
struct Lossy {
    port: u16,
    lose: Arc<AtomicBool>,
    lose_all: Arc<AtomicBool>,
}

impl Lossy {
    fn before(etcd: &Etcd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let (to, lose, lose_all) = (etcd.port(), Arc::default(), Arc::default());
        let lossy = Self { port, lose: Arc::clone(&lose), lose_all: Arc::clone(&lose_all) };
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server = TcpStream::connect(("127.0.0.1", to)).expect("etcd accepts");
                let (mut from_client, mut to_server) =
                    (client.try_clone().expect("cloned"), server.try_clone().expect("cloned"));
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from_client, &mut to_server);
                    let _ = to_server.shutdown(Shutdown::Both);
                });
                let (lose, lose_all) = (Arc::clone(&lose), Arc::clone(&lose_all));
                std::thread::spawn(move || {
                    let (mut from_server, mut to_client) = (server, client);
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from_server.read(&mut bytes) {
                        let is_kept = lose.swap(false, Ordering::AcqRel) || lose_all.load(Ordering::Acquire);
                        if is_kept || to_client.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to_client.shutdown(Shutdown::Both);
                });
            }
        });
        lossy
    }

    fn link(&self) -> Arc<EtcdLink> {
        // The first member is not there: others are asked.
        let address = format!("etcd://127.0.0.1:1,127.0.0.1:{}/wadi/pod1", self.port);
        let address = address.parse().expect("an address");
        Arc::new(EtcdLink::new(&address, &EtcdCredentials::default()).expect("a link"))
    }
}

/// Nobody else has come: the next change follows the snapshot.
#[test]
fn snapshot_whose_answers_are_all_lost_ends_no_term_of_office() {
    let etcd = Etcd::start();
    let lossy = Lossy::before(&etcd);
    let (mut store, _) = EtcdStore::open(&lossy.link(), 0).expect("a new place");
    let mut state = state();
    store.begin(&state, Vec::new()).expect("written");
    change(&mut store, &mut state, 1, "before").expect("written");
    lossy.lose_all.store(true, Ordering::Release);
    let error = store.keep_snapshot(&state).expect_err("no answer comes");
    assert!(matches!(error, StoreError::Etcd(EtcdError::Away { open: true, .. })), "{error}");
    lossy.lose_all.store(false, Ordering::Release);
    assert_eq!(store.head.snapshot, None);
    for number in 2..=3 {
        change(&mut store, &mut state, number, "after").expect("written");
    }
    assert!(store.head.snapshot.is_some(), "it was kept");
    drop(store);
    let (_, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(state));
}

/// What is still under way of it when the next change is made comes too late.
#[test]
fn snapshot_of_which_nothing_arrived_is_followed_by_changes() {
    let etcd = Etcd::start();
    let (mut store, mut state) = begun(&etcd);
    let snapshot = Some(Snapshot { number: 1, sequence: 1, parts: 1 });
    store.open = Some(Head { snapshot, ..store.head.clone() });
    let before = store.revision;
    store.settle().expect("etcd answers");
    assert!(store.open.is_none() && store.revision > before);
    change(&mut store, &mut state, 1, "after").expect("written");
    drop(store);
    let (_, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(state));
}

#[test]
fn change_whose_answer_is_lost_is_made_once() {
    let etcd = Etcd::start();
    let lossy = Lossy::before(&etcd);
    let (mut store, _) = EtcdStore::open(&lossy.link(), 0).expect("a new place");
    let mut state = state();
    store.begin(&state, Vec::new()).expect("written");
    for number in 1..=20 {
        lossy.lose.store(true, Ordering::Release);
        change(&mut store, &mut state, number, "once").expect("written");
        assert!(!lossy.lose.load(Ordering::Acquire), "an answer was lost");
    }
    assert_eq!(store.head.sequence, 21);
    drop(store);
    let (_, recovered) = EtcdStore::open(&link(&etcd), 0).expect("it opens");
    assert_eq!(recovered.state, Some(state));
}

/// Answers the first so many requests with what no etcd says, and the others not at all.
fn no_etcd(answers: usize) -> Arc<EtcdLink> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("its address").port();
    std::thread::spawn(move || {
        let mut silent = Vec::new();
        for (number, client) in listener.incoming().enumerate() {
            let mut client = client.expect("a client");
            if number >= answers {
                silent.push(client);
                continue;
            }
            let answer = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(answer);
            // Closed with something unread, it would reset the connection, and the answer might be lost.
            let _ = client.shutdown(Shutdown::Write);
            let _ = std::io::copy(&mut client, &mut std::io::sink());
        }
    });
    let address = format!("etcd://127.0.0.1:{port}/wadi/pod1").parse().expect("an address");
    Arc::new(EtcdLink::new(&address, &EtcdCredentials::default()).expect("a link"))
}

#[test]
fn what_is_no_etcd_is_told_apart() {
    let error = EtcdStore::open(&no_etcd(usize::MAX), 0).expect_err("it is no etcd").to_string();
    assert!(error.contains("it is no etcd, or older than 3.4"), "{error}");
}

/// The last attempt has what time is left, which may be none: that it gets no answer in it is not what is wrong.
#[test]
fn attempt_without_time_hides_no_reason() {
    let error = no_etcd(1).reach().expect_err("it is no etcd").to_string();
    assert!(error.contains("it is no etcd, or older than 3.4"), "{error}");
}
