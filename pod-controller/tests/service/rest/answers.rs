//! That nobody gets an answer that the description does not know: whatever is sent, [`Pod::raw`] looks it up.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::support::description::{Description, Operation};

/// How an operation is answered that is asked for in this way.
fn ask(pod: &Pod, operation: &Operation, path: &str, headers: &str, body: &str) -> u16 {
    status(&pod.raw(&request(&operation.method, path, headers, body)))
}

#[test]
fn every_operation_is_described_with_the_refusals_that_it_gives() {
    let pod = Pod::demo();
    let long = "x".repeat(300_000);
    let many = "x-more: x\r\n".repeat(200);
    let mut seen: BTreeMap<u16, BTreeSet<String>> = BTreeMap::new();
    for operation in &Description::checked_in().operations {
        // A number is a name, too, and nothing has this one.
        let path = operation.path_with("7");
        let mut ask = |path: &str, headers: &str, body: &str| {
            let status = ask(&pod, operation, path, headers, body);
            seen.entry(status).or_default().insert(format!("{} {}", operation.method, operation.path));
        };
        ask(&format!("{path}?{long}"), "", "");
        ask(&path, &many, "");
        ask(&path, "no header\r\n", "");
        ask(&path, "idempotency-key: two words\r\n", "");
        ask(&operation.path_with("%ff"), "idempotency-key: two words\r\n", "");
        if operation.changes() {
            ask(&path, "idempotency-key: long\r\n", &long);
            ask(&format!("{path}?dry-run=maybe"), JSON, "{}");
            ask(&path, &format!("{JSON}if-match: \"0000000000000000\"\r\n"), "{}");
            ask(&path, JSON, "{}");
        }
        if operation.takes_body {
            ask(&path, JSON, &long);
            ask(&path, "", "{}");
            ask(&path, JSON, "{");
        }
    }
    let operations = Description::checked_in().operations.iter();
    for (status, of) in [
        (400, operations.clone().count()),
        (413, operations.clone().filter(|it| it.changes()).count()),
        (414, operations.clone().count()),
        (415, operations.clone().filter(|it| it.takes_body).count()),
        (431, operations.clone().count()),
    ] {
        assert_eq!(seen.get(&status).map_or(0, BTreeSet::len), of, "{status}: {:?}", seen.get(&status));
    }
}

#[test]
fn a_controller_that_stops_refuses_changes_as_described() {
    let pod = Pod::demo();
    let handle = pod.controller.as_ref().expect("it runs").handle.clone();
    handle.stop();
    until("the end of the controller's thread", || (!handle.is_running()).then_some(()));
    let mut refused = BTreeSet::new();
    for operation in &Description::checked_in().operations {
        let (path, method) = (operation.path_with("7"), operation.method.as_str());
        if method == "GET" && path.ends_with("/stream") {
            continue;
        }
        for body in ["{}", "{\"name\": \"vol0\", \"size\": \"4M\"}", "{\"labels\": {}}"] {
            let answer = pod.raw(&request(method, &path, JSON, body));
            if status(&answer) == 503 {
                assert_eq!(problem(&answer).kind, "stopping");
                refused.insert(format!("{method} {}", operation.path));
            }
        }
    }
    for known in
        ["GET /readyz", "POST /v1/volumes", "PUT /v1/volumes/{name}/labels", "DELETE /v1/hosts/{name}"]
    {
        assert!(refused.contains(known), "{known} is not among {refused:?}");
    }
}
