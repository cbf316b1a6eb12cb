//! Labels of hosts and devices, as the API and podctl say them.

use cxl_pool::Role;
use pod_api::{Device, EndpointHealth, Host, Labels};

use crate::podctl::{run, said};
use crate::support::{Pod, nic, until};

fn labels(pairs: &[(&str, &str)]) -> Labels {
    Labels { labels: pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect() }
}

#[test]
fn hosts_and_devices_are_labelled_listed_by_labels_and_keep_them() {
    let mut pod = Pod::demo();
    let host: Host = serde_json::from_str(&said(&pod, "hosts label h2 rack=a -o json")).expect("a host");
    assert_eq!(host.labels, labels(&[("rack", "a")]).labels);
    said(&pod, "hosts label h3 rack=b");
    said(&pod, "devices label h2/nic0 tier=fast rack=a");
    said(&pod, "devices label h2/nic0 --merge tier=slow");
    said(&pod, "devices label h2/nic0 --remove rack");
    let device = pod.client().device("h2", "nic0").expect("a device");
    assert_eq!(device.labels, labels(&[("tier", "slow")]).labels);

    let named = |fields: &[(&str, &str)]| {
        let hosts = pod.client().hosts_with(fields).expect("hosts").into_iter().map(|it| it.name);
        let devices = pod.client().devices_with(fields).expect("devices").into_iter().map(|it| it.name);
        hosts.chain(devices).collect::<Vec<_>>()
    };
    assert_eq!(named(&[("label", "rack=a")]), ["h2"]);
    assert_eq!(named(&[("label", "rack")]), ["h2", "h3"]);
    assert_eq!(named(&[("label", "tier=slow")]), ["h2/nic0"]);
    assert_eq!(named(&[("label", "tier=fast")]), [""; 0]);
    let list: Vec<Device> =
        serde_json::from_str(&said(&pod, "devices list --label tier -o json")).expect("devices");
    assert_eq!(list.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["h2/nic0"]);
    for (shown, word) in [
        ("hosts list -o wide", "rack=b"),
        ("hosts get h3", "rack=b"),
        ("devices list -o wide", "tier=slow"),
        ("devices get h2/nic0", "tier=slow"),
    ] {
        let said = said(&pod, shown);
        assert!(said.contains(word), "{said}");
    }
    let refused = pod.client().hosts_with(&[("label", "=")]).expect_err("no label");
    assert_eq!(refused.status(), Some(400));

    // The host goes, and comes again; and so does the controller.
    let health = |pod: &Pod| {
        let host = pod.client().host("h2").ok()?;
        host.endpoints.iter().find(|it| it.role == "net-backend").map(|it| it.health)
    };
    pod.endpoints.remove(&(2, Role::NetBackend));
    until("the backend to leave", || health(&pod).filter(|it| *it == EndpointHealth::Gone));
    assert_eq!(pod.client().device("h2", "nic0").expect("known").labels, device.labels);
    pod.join(2, Role::NetBackend, vec![nic("nic0", false)]);
    until("the backend to come back", || health(&pod).filter(|it| *it == EndpointHealth::Joined));
    pod.stop_controller();
    pod.start_controller();
    assert_eq!(pod.client().device("h2", "nic0").expect("known").labels, device.labels);
    assert_eq!(pod.client().host("h2").expect("known").labels, host.labels);
    said(&pod, "devices label h2/nic0");
    assert!(pod.client().device("h2", "nic0").expect("known").labels.is_empty());
}

#[test]
fn labels_of_hosts_and_devices_have_versions_and_can_be_tried() {
    let pod = Pod::demo();
    let client = pod.client();
    let put = |path: &str, more: &str, query: &str| {
        let body = "{\"labels\": {\"rack\": \"a\"}}";
        let length = body.len();
        pod.raw(&format!(
            "PUT /v1/{path}/labels{query} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-type: application/json\r\n{more}content-length: {length}\r\n\r\n{body}"
        ))
    };
    for path in ["hosts/h3", "devices/h3/nic0"] {
        let version = || match path {
            "hosts/h3" => client.host("h3").expect("a host").resource_version,
            _ => client.device("h3", "nic0").expect("a device").resource_version,
        };
        let before = version();
        let tried = put(path, "", "?dry-run=true");
        assert!(tried.starts_with("HTTP/1.1 200") && tried.contains("\"rack\":\"a\""), "{tried}");
        assert_eq!(version(), before, "a trial changes nothing");
        let wrong = put(path, "if-match: \"0123456789abcdef\"\r\n", "");
        assert!(wrong.starts_with("HTTP/1.1 412"), "{wrong}");
        let done = put(path, &format!("if-match: \"{before}\"\r\nidempotency-key: {}\r\n", path.len()), "");
        assert!(done.starts_with("HTTP/1.1 200") && done.contains("etag: "), "{done}");
        let after = version();
        assert_ne!(after, before);
        // Sent again it is done already, whatever its version says.
        let again = put(path, &format!("if-match: \"{before}\"\r\nidempotency-key: {}\r\n", path.len()), "");
        assert!(again.starts_with("HTTP/1.1 200"), "{again}");
        assert_eq!(version(), after);
        assert!(put(path, &format!("if-match: \"{before}\"\r\n"), "").starts_with("HTTP/1.1 412"));
    }
    for nobody in ["hosts/h9", "devices/h3/nic9"] {
        assert!(put(nobody, "", "").starts_with("HTTP/1.1 404"));
    }
    let bad = client.label_host("h3", &labels(&[("rack", "no spaces")])).expect_err("no label");
    assert_eq!(bad.status(), Some(400));
    let refused = run(&pod, "devices label h3/nic0 a=b --if-version 0123456789abcdef");
    assert!(!refused.status.success());
    let tried = said(&pod, "--dry-run hosts label h3 other=c");
    assert!(tried.contains("other=c"), "{tried}");
    assert_eq!(client.host("h3").expect("a host").labels, labels(&[("rack", "a")]).labels);
}
