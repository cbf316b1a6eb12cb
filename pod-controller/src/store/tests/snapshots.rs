//! Snapshots that are written while more is committed.

use pod_protocol::protocol::Protocol;

use super::*;

/// A pod that speaks what this release does.
fn state_of_now() -> State {
    let options = Options { protocol_minor: Protocol::CURRENT.minor, ..state().options };
    State::new(options)
}

/// A new place with a state, and so many commits.
fn begun(place: &Place, state: &mut State, commits: std::ops::RangeInclusive<u64>) -> Kept {
    let (mut store, _) = place.open().expect("a new place");
    if let Kept::File(store) = &mut store {
        // So that any snapshot is in parts.
        store.part_bytes = 64;
    }
    store.begin(state).expect("written");
    commit(&mut store, state, commits);
    store
}

fn commit(store: &mut Kept, state: &mut State, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        let command = command(number);
        state.apply(&command).expect("applied");
        store.commit(number, &command, 1, state).expect("written");
    }
}

#[test]
fn a_log_that_outgrew_its_state_is_replaced_while_more_is_committed() {
    for place in Place::both() {
        let mut state = state_of_now();
        let mut store = begun(&place, &mut state, 1..=LOG_LEAST - 1);
        assert!(store.logged() as u64 >= LOG_LEAST - 1, "it is short");
        commit(&mut store, &mut state, LOG_LEAST..=LOG_LEAST + 20);
        store.wait_written();
        // Whoever writes to etcd says with the next change where the snapshot is.
        commit(&mut store, &mut state, LOG_LEAST + 21..=LOG_LEAST + 21);
        assert!(store.logged() <= 22, "{} are left", store.logged());
        drop(store);
        let (mut store, recovered) = place.open().expect("it opens");
        assert_eq!(recovered.state.as_ref(), Some(&state));
        commit(&mut store, &mut state, 1000..=1000 + LOG_LEAST);
        store.wait_written();
        drop(store);
        assert_eq!(place.open().expect("it opens").1.state, Some(state), "after another one");
    }
}

/// What follows from a commit does not wait until the state is written.
#[test]
fn a_commit_does_not_write_the_state() {
    for place in Place::both() {
        let mut state = state_of_now();
        let (mut store, _) = place.open().expect("a new place");
        store.begin(&state).expect("written");
        for number in 1..=LOG_LEAST * 2 {
            let command = command(number);
            state.apply(&command).expect("applied");
            let (commands, events) = ([(state.index, &command)], [event(number)]);
            match &mut store {
                Kept::File(store) => store.commit(&commands, &events, 1, &state, None).expect("written"),
                Kept::Etcd(store) => store.commit(&commands, &events, &state).expect("written"),
            }
        }
        assert!(store.logged() as u64 >= LOG_LEAST * 2, "it was written before effects go out");
        drop(store);
        assert_eq!(place.open().expect("it opens").1.state, Some(state));
    }
}

/// Whatever was written of one when the process ended, the log has what the last whole one has not.
#[test]
fn a_snapshot_that_was_not_finished_is_as_if_it_had_not_been_begun() {
    for place in Place::both() {
        let mut state = state_of_now();
        for round in 0..5_u64 {
            let (mut store, recovered) = place.open().expect("it opens");
            match recovered.state {
                None => store.begin(&state).expect("written"),
                Some(recovered) => assert_eq!(recovered, state, "round {round}"),
            }
            if let Kept::File(store) = &mut store {
                store.part_bytes = 64;
            }
            commit(&mut store, &mut state, round * 1000 + 1..=round * 1000 + LOG_LEAST);
            // It is ended wherever it is.
            drop(store);
        }
        assert_eq!(place.open().expect("it opens").1.state, Some(state));
    }
}

#[test]
fn a_part_that_is_missing_or_wrong_is_damage() {
    for wrong in [None, Some(b"x")] {
        let (place, _directory) = file();
        let mut state = state_of_now();
        let mut store = begun(&place, &mut state, 1..=LOG_LEAST);
        store.wait_written();
        commit(&mut store, &mut state, 1000..=1000);
        let Kept::File(file) = &store else { panic!("it is a file") };
        parts::spoil(&file.database, wrong.map(<[u8; 1]>::as_slice));
        drop(store);
        let Err(error) = place.open() else { panic!("it opens with {wrong:?}") };
        assert!(is_damage(&error), "{error}");
    }
}

/// A version that knows snapshots in one piece only says so, and what is kept for it is in one piece.
#[test]
fn what_an_older_version_may_have_to_read_is_in_one_piece() {
    let (place, _directory) = file();
    let format = |store: &Kept| {
        let Kept::File(store) = store else { panic!("it is a file") };
        let format = store.database.read(|transaction| {
            Ok(transaction.open_table(NUMBERS)?.get("format")?.map(|format| format.value()))
        });
        format.expect("readable")
    };
    let mut state = state_of_now();
    let mut store = begun(&place, &mut state, 1..=LOG_LEAST);
    store.wait_written();
    assert_eq!(format(&store), Some(FORMAT_IN_PARTS));
    let lower = Command::Configure { options: Options { protocol_minor: 0, ..state.options.clone() } };
    assert!(lower.may_lower_protocol());
    state.apply(&lower).expect("applied");
    store.commit(1000, &lower, 1, &state).expect("written");
    assert_eq!((format(&store), store.logged()), (Some(FORMAT), 0));
    commit(&mut store, &mut state, 1001..=1000 + LOG_LEAST);
    store.wait_written();
    assert_eq!(format(&store), Some(FORMAT), "it speaks the older minor");
    drop(store);
    assert_eq!(place.open().expect("it opens").1.state, Some(state));
}
