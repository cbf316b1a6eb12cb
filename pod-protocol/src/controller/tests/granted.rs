//! Endpoints that are connected, without threads.

use super::*;
use crate::testing::damage;

/// Endpoints that were granted, as their ends of the connections.
fn granted(
    pod: &TestPod<SimulatedMemory>,
    clock: &mut Clock,
    endpoints: [EndpointId; 2],
) -> [Link<SimulatedMemory>; 2] {
    clock.after(0);
    for beat in [0, 1] {
        for endpoint in endpoints {
            let memory = pod.memory(endpoint.host);
            Hello { incarnation: 7, pid: 1, protocol: Protocol::CURRENT.into(), started_unix_ms: 0 }
                .publish(&memory, pod.layout.hello(endpoint));
            write_beat(&memory, pod.layout.heartbeat(endpoint), beat);
            memory.full_fence();
        }
        clock.after(20);
    }
    endpoints.map(|endpoint| connect(pod, clock, endpoint))
}

/// The endpoint's end of a new connection.
fn connect(pod: &TestPod<SimulatedMemory>, clock: &mut Clock, endpoint: EndpointId) -> Link<SimulatedMemory> {
    clock.port.grant(endpoint).expect("it lives");
    let memory = pod.memory(endpoint.host);
    let grant = Grant::look(&memory, pod.layout.grant(REPLICA, endpoint)).expect("visible");
    let mut link = Link::open(
        &memory,
        pod.layout.ring_from_endpoint(REPLICA, endpoint),
        pod.layout.ring_to_endpoint(REPLICA, endpoint),
        grant.control_generation,
        Doorbell::connect(&pod.run_directory().controller_doorbell(REPLICA)),
        Protocol::CURRENT,
    );
    let deadline = Instant::now() + PATIENCE;
    while !link.ready() {
        assert!(Instant::now() < deadline, "no connection was made");
        clock.after(1);
    }
    link
}

#[test]
fn an_endpoint_that_says_much_keeps_no_other_from_being_heard() {
    let pod = TestPod::simulated(9);
    let mut clock = Clock::new(&pod);
    let endpoints = [Role::NetFrontend, Role::NetBackend].map(|role| EndpointId::new(BACKEND.host, role));
    let [mut talker, mut other] = granted(&pod, &mut clock, endpoints);
    let report = Report::Link { device: "nic0".into(), up: true, reason: "carrier".into() };
    for _ in 0..100 {
        talker.notify(&report).expect("room");
    }
    other.notify(&report).expect("room");
    for link in [&mut talker, &mut other] {
        link.flush();
    }
    // All that was said is in the rings.
    for endpoint in endpoints {
        pod.memory(endpoint.host).full_fence();
    }
    let mut heard = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while heard.len() < 101 {
        assert!(Instant::now() < deadline, "{} were heard", heard.len());
        heard.extend(clock.port.poll(clock.now).map(|event| event.endpoint()));
    }
    let before = heard.iter().position(|endpoint| *endpoint == endpoints[1]).expect("it was heard");
    assert!(before < 100, "it was heard after all of them");
}

#[test]
fn grant_after_a_damaged_one_has_a_newer_generation_than_the_rings_had() {
    let pod = TestPod::simulated(10);
    let mut clock = Clock::new(&pod);
    let endpoints = [Role::NetFrontend, Role::NetBackend].map(|role| EndpointId::new(BACKEND.host, role));
    granted(&pod, &mut clock, endpoints);
    let [_, endpoint] = endpoints;
    let look = || {
        let memory = pod.memory(endpoint.host);
        Grant::look(&memory, pod.layout.grant(REPLICA, endpoint)).map(|grant| grant.control_generation)
    };
    clock.port.grant(endpoint).expect("it lives");
    let before = look().expect("visible");
    // A controller that dies while it writes one leaves it like this.
    let memory = pod.memory(CONTROLLER_HOST);
    damage(&memory, pod.layout.grant(REPLICA, endpoint));
    assert_eq!(look(), None);
    clock.port.grant(endpoint).expect("it lives");
    assert!(look().expect("visible") > before);
}

/// It may not be kept yet, and whoever hears it must not hear it later than that.
#[test]
fn what_is_queued_is_heard_once_it_is_let_out_and_not_before() {
    let pod = TestPod::simulated(12);
    let mut clock = Clock::new(&pod);
    let endpoints = [Role::NetFrontend, Role::NetBackend].map(|role| EndpointId::new(BACKEND.host, role));
    let [mut frontend, mut backend] = granted(&pod, &mut clock, endpoints);
    let hears = |link: &mut Link<SimulatedMemory>| {
        pod.memory(CONTROLLER_HOST).full_fence();
        matches!(link.poll(Instant::now()), Some(Incoming::Request { .. }))
    };
    for endpoint in endpoints {
        clock.port.send(endpoint, &Command::Synced { version: Version::default() });
    }
    assert!(!hears(&mut frontend) && !hears(&mut backend), "nothing is let out yet");
    clock.port.let_hear(BACKEND);
    assert!(hears(&mut backend), "it is there for whoever looks");
    assert!(!hears(&mut frontend), "that was not for this one");
    clock.after(1);
    assert!(hears(&mut frontend), "what nobody let out goes at the next look");
}

#[test]
fn answer_to_the_join_of_an_older_connection_is_for_nobody() {
    let pod = TestPod::simulated(11);
    let mut clock = Clock::new(&pod);
    let endpoints = [Role::NetFrontend, Role::NetBackend].map(|role| EndpointId::new(BACKEND.host, role));
    let [_, mut older] = granted(&pod, &mut clock, endpoints);
    let deadline = Instant::now() + PATIENCE;
    let asks = |link: &mut Link<SimulatedMemory>, clock: &mut Clock| {
        let join = Report::Join(crate::testing::join());
        link.request(&join, clock.now + PATIENCE).expect("room");
        loop {
            assert!(Instant::now() < deadline, "nobody hears it");
            link.flush();
            let joined = clock.after(1).into_iter().find_map(|event| match event {
                PortEvent::Joined { request, .. } => Some(request),
                _ => None,
            });
            if let Some(request) = joined {
                return request;
            }
        }
    };
    let before = asks(&mut older, &mut clock);
    let mut newer = connect(&pod, &mut clock, BACKEND);
    let request = asks(&mut newer, &mut clock);
    clock.port.answer(before, Err("too late".to_owned()));
    clock.port.answer(request, Ok(()));
    let answer = loop {
        assert!(Instant::now() < deadline, "there is no answer");
        clock.after(1);
        if let Some(answer) = newer.poll(clock.now) {
            break answer;
        }
    };
    let Incoming::Response { payload, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(decode::<Answer>(&payload), Ok(Ok(())));
}
