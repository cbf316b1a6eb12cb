//! Striped volumes that are sure of something from the beginning, as the API and podctl say it.

use cxl_pool::Role;
use pod_api::{ByteSize, CreateVolume, DeviceHealth, Stripes, Volume, VolumeQos};

use crate::podctl::said;
use crate::support::{Pod, ssd, until};

#[test]
fn a_striped_volume_is_made_with_what_it_is_sure_of() {
    let mut pod = Pod::demo();
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0")]);
    until("the second SSD", || {
        pod.client().device("h3", "ssd0").ok().filter(|it| it.health == DeviceHealth::Up)
    });
    let create =
        "volumes create wide --size 64M --stripes 2 --minimum-iops 1001 --minimum-bandwidth 10M -o json";
    let tried: Volume = serde_json::from_str(&said(&pod, &format!("--dry-run {create}"))).expect("a volume");
    let made: Volume = serde_json::from_str(&said(&pod, create)).expect("a volume");
    let sure = VolumeQos {
        minimum_iops: Some(1001),
        minimum_bytes_per_second: Some(10 << 20),
        ..VolumeQos::default()
    };
    assert_eq!((tried.qos, made.qos, made.replicas.len()), (sure, sure, 2));
    assert_eq!(pod.client().volume("wide").expect("it is there").qos, sure);

    let size = ByteSize::new(64 << 20);
    let stripes = Some(Stripes { columns: 2, size: ByteSize::new(64 << 10) });
    let nothing = CreateVolume { stripes, minimum_iops: Some(0), ..CreateVolume::new("other", size) };
    let replicas = CreateVolume { stripes, replicas: 2, ..CreateVolume::new("other", size) };
    for senseless in [nothing, replicas] {
        let refused = pod.client().create_volume(&senseless).expect_err("it makes no sense");
        assert_eq!(refused.status(), Some(400), "{refused}");
    }
}
