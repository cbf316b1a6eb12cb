//! Requests that are misspelt.

use super::*;
use crate::support::description::Description;
use pod_api::InstanceTypeSpec;

#[test]
fn a_dry_run_that_is_misspelt_changes_nothing() {
    let pod = Pod::demo();
    let client = pod.client();
    for volume in ["vol0", "vol1"] {
        let body = format!("{{\"name\": \"{volume}\", \"size\": \"4M\"}}");
        assert_eq!(status(&pod.raw(&request("POST", "/v1/volumes", JSON, &body))), 201);
    }
    client.set_instance_type("type0", &InstanceTypeSpec::default()).expect("set");
    client.create_instance(&vm("vm1", &["vol1"]), Duration::from_secs(30)).expect("created");
    let versions = || {
        [
            "volumes/vol0",
            "volumes/vol1",
            "instance-types/type0",
            "instances/vm1",
            "hosts/h3",
            "devices/h2/nic0",
        ]
        .map(|path| {
            let shown = pod.raw(&request("GET", &format!("/v1/{path}"), "", ""));
            body(&shown)["resourceVersion"].as_str().map(str::to_owned)
        })
    };
    let before = versions();
    assert!(before.iter().all(Option::is_some), "{before:?}");
    let refused = |method: &str, path: &str, text: &str| {
        for query in
            ["dry_run=true", "dryrun", "Dry-Run=true", "dry-run=true&wait_ms=1", "dry-run=false&dry-run=true"]
        {
            let answer = pod.raw(&request(method, &format!("{path}?{query}"), JSON, text));
            let problem = problem(&answer);
            assert_eq!(
                (problem.status, problem.kind.as_str()),
                (400, "invalid-query"),
                "{method} {path}?{query}"
            );
        }
    };
    // What is there, and every way to change what is not.
    for (method, path) in [
        ("DELETE", "/v1/volumes/vol0"),
        ("DELETE", "/v1/instance-types/type0"),
        ("DELETE", "/v1/instances/vm1"),
        ("PUT", "/v1/hosts/h3/drain"),
        ("PUT", "/v1/devices/h2/nic0/drain"),
    ] {
        refused(method, path, "");
    }
    for operation in Description::checked_in().operations.iter().filter(|it| it.changes()) {
        refused(&operation.method, &operation.path_with("0"), if operation.takes_body { "{}" } else { "" });
    }
    assert_eq!(versions(), before);

    // However it is encoded, it is what it says.
    for query in ["dry-run=true", "dry%2Drun=tru%65", "&dry-run=true&"] {
        assert_eq!(status(&pod.raw(&request("DELETE", &format!("/v1/volumes/vol0?{query}"), "", ""))), 204);
    }
    assert_eq!(
        status(&pod.raw(&request("DELETE", "/v1/instances/vm1?force=true&dry-run=true", "", ""))),
        204
    );
    assert_eq!(versions(), before);
}
