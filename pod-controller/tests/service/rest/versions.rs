//! Changes of what somebody else may have changed: versions of resources.

use super::*;

/// The entity tag of an answer, which is the version in its body.
fn tag(answer: &str) -> String {
    let tag = answer.lines().find_map(|line| line.strip_prefix("etag: ")).expect("a tag").to_owned();
    assert_eq!(format!("{}", body(answer)["resourceVersion"]), tag, "{answer}");
    tag
}

#[test]
fn changes_of_what_somebody_else_has_changed_are_refused() {
    let pod = Pod::demo();
    let send = |method: &str, path: &str, headers: &str, body: &str| {
        pod.raw(&request(method, path, &format!("{JSON}{headers}"), body))
    };
    let created = send("POST", "/v1/volumes", "", "{\"name\": \"vol0\", \"size\": \"4M\"}");
    let first = tag(&created);
    assert_eq!(tag(&send("GET", "/v1/volumes/vol0", "", "")), first);
    let list = |path: &str| body(&send("GET", path, "", ""))["resourceVersion"].as_str().map(str::to_owned);
    let listed = list("/v1/volumes").expect("a version");
    assert_eq!(list("/v1/volumes"), Some(listed.clone()), "nothing has changed");

    let web = "{\"labels\": {\"tier\": \"web\"}}";
    let labelled = send("PUT", "/v1/volumes/vol0/labels", &format!("if-match: {first}\r\n"), web);
    assert_eq!(status(&labelled), 200, "{labelled}");
    let second = tag(&labelled);
    assert_ne!(first, second);
    assert_ne!(list("/v1/volumes"), Some(listed));

    // Too late, in every way to say it, tried or in earnest.
    let with_version = |version: &str| format!("{{\"size\": \"8M\", \"resourceVersion\": {version}}}");
    let stale = format!("if-match: {first}\r\n");
    for (method, path, headers, text, expected) in [
        ("PUT", "/v1/volumes/vol0/labels", stale.as_str(), "{\"labels\": {}}", 412),
        ("PATCH", "/v1/volumes/vol0", &stale, "{\"size\": \"8M\"}", 412),
        ("PATCH", "/v1/volumes/vol0?dry-run=true", &stale, "{\"size\": \"8M\"}", 412),
        ("PATCH", "/v1/volumes/vol0", "", &with_version(&first), 409),
        ("PATCH", "/v1/volumes/vol0", &stale, "{\"groups\": {\"apart\": \"db\"}}", 412),
        ("DELETE", "/v1/volumes/vol0", &stale, "", 412),
        ("DELETE", "/v1/volumes/vol0", &format!("if-match: W/{second}\r\n"), "", 412),
    ] {
        let refused = problem(&send(method, path, headers, text));
        assert_eq!((refused.status, refused.kind.as_str()), (expected, "changed"), "{method} {path}");
        assert!(refused.detail.contains(second.trim_matches('"')), "{}", refused.detail);
    }
    for (method, path, headers, text, expected) in [
        ("PATCH", "/v1/volumes/vol0", format!("if-match: {second}\r\n"), with_version(&first), 400),
        ("PATCH", "/v1/volumes/vol0", String::new(), with_version("7"), 400),
        ("PATCH", "/v1/volumes/vol0", "if-match: vol0\r\n".to_owned(), with_version(&second), 400),
        ("DELETE", "/v1/volumes/vol9", "if-match: *\r\n".to_owned(), String::new(), 404),
        (
            "POST",
            "/v1/volumes",
            "if-match: *\r\n".to_owned(),
            "{\"name\": \"v\", \"size\": \"4M\"}".to_owned(),
            412,
        ),
        (
            "POST",
            "/v1/volumes",
            String::new(),
            "{\"name\": \"v\", \"size\": \"4M\", \"resourceVersion\": \"x\"}".to_owned(),
            400,
        ),
    ] {
        assert_eq!(problem(&send(method, path, &headers, &text)).status, expected, "{method} {path} {text}");
    }
    let grown = send("PATCH", "/v1/volumes/vol0", "", &with_version(&second));
    assert_eq!((status(&grown), &body(&grown)["size_bytes"]), (200, &(8 << 20).into()), "{grown}");

    // Other resources say theirs too.
    for path in ["/v1/hosts/h1", "/v1/devices/h2/nic0"] {
        let drain = format!("{path}/drain");
        let seen = tag(&send("GET", path, "", ""));
        let drained = send("PUT", &drain, &format!("if-match: \"0\", {seen}\r\n"), "");
        assert_eq!(status(&drained), 204, "{drained}");
        assert_eq!(problem(&send("DELETE", &drain, &format!("if-match: {seen}\r\n"), "")).status, 412);
        assert_eq!(status(&send("DELETE", &drain, "if-match: *\r\n", "")), 204);
    }
    let small = "/v1/instance-types/small";
    assert_eq!(problem(&send("PUT", small, "if-match: *\r\n", "{\"nics\": 1}")).status, 404, "not there yet");
    assert_eq!(status(&send("PUT", small, "", "{\"nics\": 1}")), 204);
    let seen = tag(&send("GET", small, "", ""));
    assert_eq!(status(&send("PUT", small, &format!("if-match: {seen}\r\n"), "{\"nics\": 2}")), 204);
    assert_eq!(status(&send("PUT", small, &format!("if-match: {seen}\r\n"), "{\"nics\": 3}")), 412);
}

/// The fabric as a whole, and an instance's share of it.
#[test]
fn changes_of_a_fabric_that_somebody_else_has_changed_are_refused() {
    let pod = Pod::demo();
    let send = |method: &str, path: &str, headers: &str, body: &str| {
        pod.raw(&request(method, path, &format!("{JSON}{headers}"), body))
    };
    let elements = |bytes: u64| format!("{{\"elements\": {{\"port\": {bytes}}}}}");
    let seen = tag(&send("GET", "/v1/fabric", "", ""));
    let at = format!("if-match: {seen}\r\n");
    assert_eq!(status(&send("PUT", "/v1/fabric", &at, &elements(1 << 30))), 204);
    assert_eq!(problem(&send("PUT", "/v1/fabric", &at, &elements(1 << 31))).status, 412);
    let mut whole = body(&send("GET", "/v1/fabric", "", ""));
    whole["elements"]["port"] = (1_u64 << 31).into();
    assert_eq!(
        status(&send("PUT", "/v1/fabric", "", &whole.to_string())),
        204,
        "as it was seen, but for that"
    );
    assert_eq!(
        problem(&send("PUT", "/v1/fabric", "", &whole.to_string())).status,
        409,
        "it has changed since"
    );
    pod.client().create_instance(&vm("vm1", &[]), Duration::ZERO).expect("created");
    let (share, path) = ("{\"weight\": 2, \"path\": [\"port\"]}", "/v1/mchannels/vm1");
    assert_eq!(problem(&send("PUT", path, "if-match: *\r\n", share)).status, 404, "not there yet");
    assert_eq!(status(&send("PUT", path, "", share)), 204);
    let seen = tag(&send("GET", path, "", ""));
    let listed = body(&send("GET", "/v1/mchannels", "", ""));
    assert_eq!(format!("{}", listed["mchannels"][0]["resourceVersion"]), seen);
    let at = format!("if-match: {seen}\r\n");
    assert_eq!(status(&send("PUT", path, &at, &share.replace('2', "3"))), 204);
    for (method, text) in [("PUT", share), ("DELETE", "")] {
        let refused = problem(&send(method, path, &at, text));
        assert_eq!((refused.status, refused.kind.as_str()), (412, "changed"), "{method}");
    }
    let seen = tag(&send("GET", path, "", ""));
    assert_eq!(status(&send("DELETE", path, &format!("if-match: {seen}\r\n"), "")), 204);
}
