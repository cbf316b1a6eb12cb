//! The table of volumes on the disk of another program, which is read and written by commands.

use std::os::unix::fs::FileExt;

use cxl_pool::{HardwareMemory, Pool};
use pod_protocol::endpoint::Handler;
use pod_protocol::ids::VolumeId;
use pod_protocol::objects::{Object, TableObject};
use pod_protocol::volume_table::{VolumeEntry, VolumeTable};
use vhost_blk_cxl::ssd::{LABEL_BYTES, Label, Ssd, VhostUserSsd};

use crate::pod::{Pod, eventually};
use crate::vhost_user_ssd::{MIB, Target, connect, pool};

fn entry(id: VolumeId, name: &str, start_bytes: u64) -> VolumeEntry {
    VolumeEntry {
        id,
        name: name.to_owned(),
        start_bytes,
        size_bytes: MIB,
        deleted: false,
        mirror: None,
        stripe: None,
    }
}

/// A disk as a backend finds it, and its table.
fn opened(target: &Target, pool: &Pool) -> (VhostUserSsd, Label) {
    let mut ssd = connect(target, pool);
    let (found, scratch) = ssd.read_beginning(LABEL_BYTES).expect("another program's").unwrap();
    (ssd, Label::of_commands(&target.socket, found, scratch).unwrap())
}

fn apply(pod: &mut Pod<HardwareMemory>, volumes: Vec<VolumeEntry>) {
    let object = TableObject { ssd: "ssd0".to_owned(), table: VolumeTable { volumes } };
    let backend = pod.backend.as_mut().unwrap();
    eventually(|| backend.apply(Object::Table(object.clone())).is_ok());
}

fn start(ssd: VhostUserSsd, label: Label, pool: &Pool) -> Pod<HardwareMemory> {
    let mut pod = Pod::new(pool.hardware(), pool.hardware(), pool.layout().data().start);
    pod.start_backend(Box::new(ssd));
    pod.backend.as_mut().unwrap().keep_tables(vec![("ssd0".to_owned(), label)]);
    pod
}

/// Of a pod that began before there were tables on such disks: its volume begins where the table would lie, and has nothing there yet.
#[test]
fn no_table_is_written_over_a_volume_that_is_in_its_place() {
    let target = Target::start(4 * MIB, ",writable=on");
    let pool = pool();
    let (ssd, label) = opened(&target, &pool);
    let mut pod = start(ssd, label, &pool);
    pod.volume.start_bytes = 0;
    pod.volume.size_bytes = MIB;
    let volume = pod.volume.volume;
    apply(&mut pod, vec![entry(volume, "tenant", 0), entry(VolumeId::new(77), "other", 2 * MIB)]);
    pod.backend.as_mut().unwrap().apply(Object::Volume(pod.volume.clone())).unwrap();
    let mut found = vec![1; 4 * MIB as usize];
    target.file.read_exact_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|&byte| byte == 0), "the volume is as it was");
}

#[test]
fn a_table_is_written_in_whole_blocks_and_read_again() {
    for block in [512, 4096] {
        let target = Target::start(4 * MIB, &format!(",writable=on,logical-block-size={block}"));
        let pool = pool();
        let mut identities = Vec::new();
        for names in [&["one", "two"][..], &["one"], &[]] {
            let (ssd, label) = opened(&target, &pool);
            identities.extend(label.identity());
            let mut pod = start(ssd, label, &pool);
            let volumes: Vec<_> = (1..)
                .zip(names)
                .map(|(place, name)| entry(VolumeId::new(place), name, u64::from(place) * MIB))
                .collect();
            apply(&mut pod, volumes.clone());
            let found = Label::inspect(&target.beside("disk")).unwrap();
            assert_eq!(found.table().volumes, volumes, "{block}");
        }
        assert!(identities.len() == 2 && identities[0] == identities[1], "{identities:?}");
    }
}
