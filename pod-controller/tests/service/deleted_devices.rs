//! Devices that their hosts do not have any more, as podctl deletes them.

use cxl_pool::Role;
use pod_api::DeviceHealth;

use crate::podctl::{run, said};
use crate::support::{Pod, ssd, until};

#[test]
fn a_device_that_was_pulled_is_deleted_with_its_data_if_that_is_said() {
    let mut pod = Pod::demo();
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0"), ssd("ssd1")]);
    until("the SSDs", || pod.client().device("h3", "ssd1").ok().filter(|it| it.health == DeviceHealth::Up));
    said(&pod, "volumes create data --size 64M --device h3/ssd1");
    let fails = |pod: &Pod, arguments: &str| {
        let refused = run(pod, arguments);
        assert!(!refused.status.success(), "{arguments}");
        String::from_utf8_lossy(&refused.stderr).into_owned()
    };
    let told = fails(&pod, "devices delete h3/ssd1 --lose-data");
    assert!(told.contains("counts as there") && told.contains("configuration"), "{told}");

    drop(pod.endpoints.remove(&(3, Role::BlkBackend)));
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0")]);
    until("it to be away", || {
        pod.client().device("h3", "ssd1").ok().filter(|it| it.health == DeviceHealth::Away)
    });
    until("its host to be back", || {
        pod.client().device("h3", "ssd0").ok().filter(|it| it.health == DeviceHealth::Up)
    });
    let told = fails(&pod, "devices delete h3/ssd1");
    assert!(told.contains("volume data") && told.contains("--lose-data"), "{told}");
    said(&pod, "devices delete h3/ssd1 --lose-data --dry-run");
    assert!(pod.client().device("h3", "ssd1").is_ok(), "it was only tried");
    said(&pod, "devices delete h3/ssd1 --lose-data");
    assert_eq!(pod.client().device("h3", "ssd1").expect_err("gone").status(), Some(404));
    assert_eq!(pod.client().volume("data").expect_err("lost").status(), Some(404));
    assert_eq!(pod.client().device("h3", "ssd0").expect("the other").health, DeviceHealth::Up);
}
