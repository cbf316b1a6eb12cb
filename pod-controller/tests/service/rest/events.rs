//! Events, and what is there when one hears of them.

use super::*;

#[test]
fn who_hears_of_an_event_finds_what_came_of_it() {
    let pod = Pod::demo();
    let (begin, asked) = mpsc::channel();
    let drainer = pod.client();
    let drainer = thread::spawn(move || {
        for drain in asked {
            drainer.drain_device("h2", "nic0", drain).expect("it exists");
        }
    });
    // Nearer to the controller than any client: what stands between the two is too short for a request.
    let handle = &pod.controller.as_ref().expect("it runs").handle;
    for round in 0..200 {
        let drain = round % 2 == 0;
        let last = handle.journal().last();
        begin.send(drain).expect("it listens");
        let started = Instant::now();
        while handle.journal().last() == last {
            assert!(started.elapsed() < Duration::from_mins(1), "it is never told");
            std::hint::spin_loop();
        }
        let device = handle.view().device("h2/nic0", &BTreeMap::new()).expect("it exists");
        let schedulable = device.conditions.iter().find(|it| it.kind == ConditionKind::Schedulable);
        assert_eq!(schedulable.map(|it| it.status), Some(!drain), "round {round}");
    }
    drop(begin);
    drainer.join().expect("it drained");
}

#[test]
fn events_are_gone_when_they_are_and_conditions_say_what_is_missing() {
    let mut pod = Pod::demo_in_file();
    let client = pod.client();
    let instance = client.create_instance(&vm("vm1", &[]), Duration::from_secs(30)).expect("created");
    let holds = |conditions: &[Condition], kind| {
        conditions.iter().find(|it| it.kind == kind).map(|it| it.status).expect("it is told")
    };
    assert!(holds(&instance.conditions, ConditionKind::Ready), "{instance:?}");
    assert!(!holds(&instance.conditions, ConditionKind::Connected));
    assert!(holds(&instance.conditions, ConditionKind::Redundant));
    client.drain_device("h2", "nic0", true).expect("it exists");
    let device = client.device("h2", "nic0").expect("it exists");
    assert!(holds(&device.conditions, ConditionKind::Ready));
    assert!(!holds(&device.conditions, ConditionKind::Schedulable), "{device:?}");
    let drained = client.events(0).expect("a list");
    let path = "/v1/events?kind=drain-begun&subject=h2/nic0";
    assert_eq!(body(&pod.raw(&request("GET", path, "", "")))["events"].as_array().map(Vec::len), Some(1));

    let last = drained.events.last().expect("some").sequence;
    assert_eq!(drained.last, last);
    let none = client.events_with(0, &[("kind", "host-deleted")]).expect("a list");
    assert!(none.events.is_empty() && none.last >= last, "where to go on is known without one: {none:?}");
    client.drain_device("h2", "nic0", false).expect("it exists");
    let mut follower = client.follow_events(last).expect("that one is kept");
    assert_eq!(follower.next().expect("an event").expect("whole").kind, EventKind::DrainEnded);
    drop(follower);

    // Of a stream that is asked for some only, and from where it went on, also past what it did not tell.
    let path = "/v1/events/stream?after=0&kind=drain-ended&subject=h2/nic0";
    let streamed = pod.raw_until(&request("GET", path, "", ""), "event: drain-ended");
    let told = streamed.lines().filter(|line| line.starts_with("event: ")).collect::<Vec<_>>();
    assert_eq!(told, ["event: drain-ended"], "{streamed}");
    let path = "/v1/events/stream?after=0&subject=nobody";
    let seen = client.events(0).expect("a list").events.last().expect("some").sequence;
    pod.raw_until(&request("GET", path, "", ""), &format!("id: {seen}\n"));

    // It is what browsers ask for when they go on, and says which event comes next.
    let ended = "event: drain-ended";
    let path = "/v1/events/stream?after=0";
    let streamed = pod.raw_until(&request("GET", path, &format!("last-event-id: {last}\r\n"), ""), ended);
    let told: Vec<_> = streamed.lines().filter(|line| line.starts_with("event: ")).collect();
    assert_eq!(told, [ended], "not what came before, whatever the address says: {streamed}");

    // As after very many events: what was before the last one is not kept.
    pod.stop_controller();
    {
        let (mut store, known) = Store::open(&pod.path("state.redb")).expect("the state");
        let event = Event { sequence: 20_000, ..drained.events[0].clone() };
        store.commit(&[], &[event], 20_000, &known.state.expect("a state"), None).expect("kept");
    }
    pod.start_controller();
    let after = |id: &str| request("GET", "/v1/events/stream", &format!("last-event-id: {id}\r\n"), "");
    let gone = problem(&pod.raw(&after("19998")));
    assert_eq!((gone.status, gone.kind.as_str()), (410, "events-gone"));
    assert_eq!(pod.client().follow_events(17).expect_err("gone").status(), Some(410));
    for kept in ["0", "19999", "20000"] {
        assert_eq!(status(&pod.raw_head(&after(kept))), 200, "{kept}");
    }
    let never = problem(&pod.raw(&after(&u64::MAX.to_string())));
    assert_eq!((never.status, never.kind.as_str()), (410, "events-gone"));
    assert!(never.detail.contains(&format!("there is no event {}", u64::MAX)), "{never:?}");
}
