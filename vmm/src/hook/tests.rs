use std::sync::mpsc;

use serde_json::json;

use super::domain::tests::{DISK, SOCKETS, parsed};
use super::*;
use crate::fake_controller::Controller;

const LOOK: &str = "GET /v1/instances/vm1";
const DELETE: &str = "DELETE /v1/instances/vm1";
const LONG: Duration = Duration::from_mins(1);

/// It listens on its socket, so that no frontend has to serve that.
fn domain() -> Domain {
    parsed("", &DISK.replace("<source type=", "<source mode='server' type="))
}

/// What was leased to it.
fn instance() -> (u16, String) {
    let disk = json!({
        "device": "vol0", "socket": format!("{SOCKETS}/vm1-vol0.sock"), "lease": 1, "generation": 1, "connected": false, "slot": 0,
        "volume": "vol0", "serial": "vol0", "size_bytes": 1, "block_bytes": 512, "queues": 1, "read_only": false, "ssd": "h2/ssd0",
    });
    let instance = json!({
        "name": "vm1", "id": 1, "host": "h1", "ready": true, "vmm_listens": true, "labels": {LABEL: domain().uuid},
        "nics": [], "disks": [disk],
    });
    (200, instance.to_string())
}

fn refused(status: u16, kind: &str) -> (u16, String) {
    let problem = json!({"type": kind, "title": "", "status": status, "detail": format!("it is {kind}")});
    (status, problem.to_string())
}

/// A controller that knows an instance that an earlier start has left, and refuses for these reasons, one after the other, to delete it.
fn with_leftover(reasons: &'static [(u16, &str)]) -> Controller {
    let mut reasons = reasons.iter();
    let mut is_there = true;
    Controller::start(move |request| match request {
        LOOK if is_there => instance(),
        LOOK => refused(404, "not-found"),
        DELETE => {
            if let Some((status, kind)) = reasons.next() {
                return refused(*status, kind);
            }
            is_there = false;
            (204, String::new())
        }
        _ => {
            assert!(request.starts_with("POST /v1/instances?wait="), "{request}");
            is_there = true;
            instance()
        }
    })
}

fn hook(controller: &Controller, wait: Duration, gone: Duration) -> Hook {
    let sockets = SOCKETS.into();
    Hook { client: controller.client(), host: "h1".to_owned(), sockets, wait, gone }
}

/// As while a frontend that was started anew waits for a VMM, and the controller is about to have another leader.
const USED: &[(u16, &str)] =
    &[(409, "connected"), (409, "connected"), (503, "no-leader"), (409, "connected")];

#[test]
fn frontends_may_take_longer_to_see_that_a_vmm_is_gone_than_a_domain_may_take_to_start() {
    let controller = with_leftover(USED);
    hook(&controller, Duration::ZERO, LONG).prepare(&domain()).unwrap();
    let asked = controller.asked();
    assert!(asked.last().unwrap().starts_with("POST "), "{asked:?}");

    let controller = with_leftover(USED);
    let error = hook(&controller, LONG, Duration::ZERO).prepare(&domain()).unwrap_err().to_string();
    assert!(error.contains("it is connected"), "{error}");
    assert_eq!(controller.asked(), [LOOK, LOOK, DELETE]);
}

#[test]
fn a_domain_that_has_ended_is_given_the_same_time() {
    let controller = with_leftover(USED);
    hook(&controller, Duration::ZERO, LONG).release(&domain()).unwrap();
    let asked = controller.asked();
    assert_eq!(asked.last().unwrap(), DELETE, "{asked:?}");
    // There is nothing any more.
    hook(&controller, Duration::ZERO, LONG).release(&domain()).unwrap();
    assert_eq!(controller.asked(), [LOOK]);
}

/// A controller that makes the instance, and answers so when it is given a share of the fabric. Tells of what it was given.
fn that_shares(answer: (u16, String)) -> (Controller, mpsc::Receiver<String>) {
    let (tell, told) = mpsc::channel();
    let mut is_there = false;
    let controller = Controller::listening(move |request, body| match request {
        LOOK if is_there => instance(),
        LOOK => refused(404, "not-found"),
        DELETE => {
            is_there = false;
            (204, String::new())
        }
        "PUT /v1/mchannels/vm1" => {
            assert!(is_there, "of an instance");
            tell.send(body.to_owned()).unwrap();
            answer.clone()
        }
        _ => {
            assert!(request.starts_with("POST /v1/instances?wait="), "{request}");
            is_there = true;
            instance()
        }
    });
    (controller, told)
}

#[test]
fn a_domain_brings_its_share_of_the_fabric_along() {
    let with_share = |share: &str| {
        let domain = parsed(share, &DISK.replace("<source type=", "<source mode='server' type="));
        let (controller, told) = that_shares((204, String::new()));
        hook(&controller, Duration::ZERO, LONG).prepare(&domain).unwrap();
        (controller.asked(), told.try_iter().collect::<Vec<_>>())
    };
    let (asked, told) = with_share("<wadi:mchannel weight='3' tenant='red' path='port1,pool'/>");
    assert_eq!(asked[2], "PUT /v1/mchannels/vm1", "before it may start: {asked:?}");
    let told: Vec<serde_json::Value> = told.iter().map(|told| serde_json::from_str(told).unwrap()).collect();
    assert_eq!(told, [json!({"weight": 3, "tenant": "red", "path": ["port1", "pool"]})]);
    assert!(with_share("").1.is_empty(), "who asks for none has none");
}

#[test]
fn a_share_that_cannot_be_is_said_and_nothing_stays() {
    let domain = parsed("<wadi:mchannel path='port9'/>", DISK);
    let (controller, _told) = that_shares(refused(404, "no-such-element"));
    let hook = hook(&controller, Duration::ZERO, LONG);
    let error = hook.prepare(&domain).unwrap_err().to_string();
    assert!(error.contains("it is no-such-element") && error.contains("domain web"), "{error}");
    // As libvirt does when a start was refused.
    hook.release(&domain).unwrap();
    assert_eq!(controller.asked().last().unwrap(), DELETE);
}
