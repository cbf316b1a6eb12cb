//! Volumes that lie apart from others, or with them, as the API and podctl say it.

use std::time::Duration;

use cxl_pool::Role;
use pod_api::{
    ByteSize, CandidatePart, ChangeVolume, ConditionKind, CreateVolume, DeviceHealth, Explanation, Volume,
    VolumeGroups,
};

use crate::podctl::{run, said};
use crate::support::{Pod, ssd, until, vm};

/// The demo's pod with an SSD on h3 too.
fn pod() -> Pod {
    let mut pod = Pod::demo();
    pod.join(3, Role::BlkBackend, vec![ssd("ssd0")]);
    until("the second SSD", || {
        pod.client().device("h3", "ssd0").ok().filter(|it| it.health == DeviceHealth::Up)
    });
    pod
}

fn volume(pod: &Pod, arguments: &str) -> Volume {
    serde_json::from_str(&said(pod, &format!("volumes {arguments} -o json"))).expect("a volume")
}

#[test]
fn volumes_are_created_apart_and_explained() {
    let pod = pod();
    let data = volume(&pod, "create data --size 64M --device h3/ssd0 --apart db");
    assert_eq!((data.apart.as_deref(), data.together), (Some("db"), None));
    // There is more room on h2; there would be enough on h3.
    said(&pod, "volumes create filler --size 512M --device h2/ssd0");
    let tried = volume(&pod, "create log --size 64M --apart db --dry-run");
    assert_eq!(tried.device, "h2/ssd0");
    let log = volume(&pod, "create log --size 64M --apart db --near h3");
    assert_eq!(log.device, "h2/ssd0", "near only as far as it may be");
    assert_eq!(volume(&pod, "get log"), log);
    let refused = run(&pod, "volumes create third --size 64M --apart db");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && told.contains("2 hosts that others of the group db lie on"),
        "{told}"
    );
    let named = CreateVolume {
        device: Some("h2/ssd0".to_owned()),
        apart: Some("db".to_owned()),
        ..CreateVolume::new("third", ByteSize::new(1 << 20))
    };
    let refused = pod.client().create_volume(&named).expect_err("another one lies there");
    assert_eq!(refused.status(), Some(409));
    let nameless = CreateVolume { apart: Some(String::new()), ..named };
    assert_eq!(pod.client().create_volume(&nameless).expect_err("no name").status(), Some(400));

    pod.client().create_instance(&vm("vm1", &["data"]), Duration::from_secs(30)).expect("created");
    let refused = run(&pod, "volumes move data --to h2/ssd0");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && told.contains("group db lies on an SSD of h2"), "{told}");
    let explained: Explanation =
        serde_json::from_str(&said(&pod, "explain instance vm1 -o json")).expect("an explanation");
    let disk = explained.devices.iter().find(|it| it.device == "data").expect("a disk");
    assert!(disk.rule.contains("apart") && disk.rule.contains("together"), "{}", disk.rule);
    let other = disk.candidates.iter().find(|it| it.name == "h2/ssd0").expect("the other SSD");
    assert_eq!(other.part, CandidatePart::Excluded);
    assert!(other.notes.iter().any(|it| it.starts_with("log of the group db")), "{:?}", other.notes);
}

#[test]
fn volumes_are_created_together_and_explained() {
    let pod = pod();
    volume(&pod, "create first --size 512M --device h3/ssd0 --together app");
    let second = volume(&pod, "create second --size 64M --together app");
    assert_eq!((second.device.as_str(), second.together.as_deref()), ("h3/ssd0", Some("app")));
    let near = volume(&pod, "create near --size 64M --together app --near h2");
    assert_eq!(near.device, "h3/ssd0", "with the others first");
    let large = volume(&pod, "create large --size 600M --together app");
    assert_eq!(large.device, "h2/ssd0", "there is no room with the others");
    pod.client().create_instance(&vm("vm1", &["large"]), Duration::from_secs(30)).expect("created");
    let explained = said(&pod, "explain instance vm1");
    assert!(
        explained.contains("first of the group app, which is to be together, lies on its host"),
        "{explained}"
    );
}

#[test]
fn groups_of_a_volume_are_changed_while_it_lies_where_it_does() {
    let pod = pod();
    for name in ["data", "log"] {
        volume(&pod, &format!("create {name} --size 64M --device h2/ssd0"));
    }
    let placed = |volume: &Volume| {
        let placed = volume.conditions.iter().find(|it| it.kind == ConditionKind::Placed);
        placed.map(|it| (it.status, it.message.clone()))
    };
    let data = volume(&pod, "group data --apart db");
    assert_eq!((data.apart.as_deref(), placed(&data)), (Some("db"), Some((true, String::new()))));
    let tried = volume(&pod, "group log --apart db --dry-run");
    assert_eq!(tried.apart.as_deref(), Some("db"));
    assert_eq!(volume(&pod, "get log").apart, None, "it was only tried");
    let log = volume(&pod, "group log --apart db");
    let against = "data of the group db, which is to be apart, lies on h2 as well".to_owned();
    assert_eq!((log.device.as_str(), placed(&log)), ("h2/ssd0", Some((false, against))));
    pod.client().create_instance(&vm("vm1", &["log"]), Duration::from_secs(30)).expect("created");
    let explained = said(&pod, "explain instance vm1");
    assert!(
        explained.contains("data of the group db, which is to be apart, lies on its host"),
        "{explained}"
    );

    let other = VolumeGroups { together: Some("app".to_owned()), apart: None };
    let change = ChangeVolume { groups: Some(other), ..ChangeVolume::default() };
    let log = pod.client().change_volume("log", &change).expect("changed");
    assert_eq!((log.apart.as_deref(), log.together.as_deref()), (None, Some("app")));
    let log = volume(&pod, "group log");
    assert_eq!((log.together.as_deref(), placed(&log)), (None, None));
}
