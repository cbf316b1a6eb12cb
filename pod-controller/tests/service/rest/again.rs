//! Requests that are sent again.

use super::*;
use crate::support::ssd;
use cxl_pool::Role;
use pod_api::{DeviceHealth, InstanceTypeSpec};

#[test]
fn what_was_deleted_is_deleted_still_when_it_is_asked_for_again() {
    let mut pod = Pod::demo();
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0"), ssd("ssd1")]);
    let client = pod.client();
    until("its SSDs", || client.device("h3", "ssd1").ok().filter(|it| it.health == DeviceHealth::Up));
    for volume in ["vol0", "vol1"] {
        let body = format!("{{\"name\": \"{volume}\", \"size\": \"4M\", \"device\": \"h2/ssd0\"}}");
        assert_eq!(status(&pod.raw(&request("POST", "/v1/volumes", JSON, &body))), 201);
    }
    let mirrored = "{\"name\": \"mirrored\", \"size\": \"4M\", \"replicas\": 2}";
    assert_eq!(status(&pod.raw(&request("POST", "/v1/volumes", JSON, mirrored))), 201);
    client.set_instance_type("type0", &InstanceTypeSpec::default()).expect("set");
    client.create_instance(&vm("vm1", &["vol1"]), Duration::from_secs(30)).expect("created");
    client.create_instance(&vm("vm2", &[]), Duration::from_secs(30)).expect("created");
    client.drain_device("h2", "nic0", true).expect("drained");
    client.drain_host("h3", true).expect("drained");
    let on_h3 = client.volume("mirrored").expect("there").replicas;
    let on_h3 = on_h3.iter().find(|it| it.device.starts_with("h3/")).expect("one of both").device.clone();

    let mut done = Vec::new();
    let mut delete = |pod: &Pod, path: &str| {
        let headers = format!("if-match: *\r\nidempotency-key: {}\r\n", path.replace('/', "-"));
        let asked = request("DELETE", path, &headers, "");
        let first = status(&pod.raw(&asked));
        assert!((200..300).contains(&first), "{path}: {first}");
        done.push((asked, first));
    };
    delete(&pod, "/v1/devices/h2/nic0/drain");
    delete(&pod, "/v1/hosts/h3/drain");
    delete(&pod, "/v1/instance-types/type0");
    delete(&pod, "/v1/volumes/vol0");
    delete(&pod, &format!("/v1/volumes/mirrored/replicas/{on_h3}"));
    delete(&pod, "/v1/instances/vm1/devices/vol1");
    delete(&pod, "/v1/instances/vm2");
    for role in [Role::BlkBackend, Role::NetBackend] {
        drop(pod.endpoints.remove(&(3, role)));
    }
    until("the host to be reset", || client.reset_host("h3").ok());
    delete(&pod, "/v1/hosts/h3");

    // Whoever did not hear of it asks again, when all of it is gone.
    assert_eq!(client.host("h3").expect_err("gone").status(), Some(404));
    for (asked, first) in &done {
        assert_eq!(status(&pod.raw(asked)), *first, "{asked}");
    }
    // Under another key it is another request.
    let other = request("DELETE", "/v1/hosts/h3", "if-match: *\r\nidempotency-key: other\r\n", "");
    assert_eq!(problem(&pod.raw(&other)).status, 412);
}
