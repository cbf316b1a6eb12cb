use std::sync::Mutex;

use pod_protocol::volume_table::MirrorEntry;
use proptest::prelude::*;

use super::copies::VERSION_AT;
use super::*;

fn device() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("ssd");
    File::create(&path).unwrap().set_len(4 << 20).unwrap();
    (directory, path)
}

/// A drive with a cache: what was written reaches the file when it is flushed, or else as chance has it.
#[derive(Debug)]
struct Forgetful {
    file: File,
    cached: Mutex<Vec<(u64, Vec<u8>)>>,
}

impl Forgetful {
    fn over(path: &Path) -> Arc<Self> {
        let file = File::options().write(true).open(path).unwrap();
        Arc::new(Self { file, cached: Mutex::default() })
    }

    /// It loses its power: of what it has not flushed, these sectors are left.
    fn lose(&self, mut kept: impl FnMut() -> bool) {
        for (at, bytes) in self.cached.lock().unwrap().drain(..) {
            for (index, sector) in bytes.chunks(512).enumerate() {
                if kept() {
                    self.file.write_all_at(sector, at + index as u64 * 512).unwrap();
                }
            }
        }
    }
}

impl Store for Forgetful {
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.cached.lock().unwrap().push((at, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.lose(|| true);
        Ok(())
    }
}

fn table(count: u32) -> VolumeTable {
    let entry = |id: u32| VolumeEntry {
        id: VolumeId::new(id),
        name: format!("vol{id}"),
        start_bytes: u64::from(id) << 20,
        size_bytes: 1 << 20,
        deleted: id.is_multiple_of(3),
        mirror: None,
        stripe: None,
    };
    VolumeTable { volumes: (1..=count).map(entry).collect() }
}

#[test]
fn what_was_written_is_found_again() {
    let (_directory, path) = device();
    for count in [0, 1, 7, 3, 300, 0, 2] {
        let mut label = Label::open(&path).unwrap();
        label.write(&table(count)).unwrap();
        assert_eq!(*Label::inspect(&path).unwrap().table(), table(count));
    }
    let mut label = Label::open(&path).unwrap();
    assert!(matches!(label.write(&table(20_000)), Err(LabelError::TooLong { .. })));
    assert_eq!(*Label::inspect(&path).unwrap().table(), table(2), "what does not fit changes nothing");
}

#[test]
fn what_is_somebody_elses_is_left_alone() {
    let (_directory, path) = device();
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"precious", 1000).unwrap();
    assert!(matches!(Label::open(&path), Err(LabelError::Foreign { .. })));
    file.set_len(4096).unwrap();
    assert!(matches!(Label::open(&path), Err(LabelError::TooSmall { .. })));
    assert!(matches!(Label::open(&path.join("x")), Err(LabelError::Io { .. })));
    let (_directory, path) = device();
    let mut newer = format(1, &Stored { table: table(1), intent_logs: Vec::new(), identity: None }).unwrap();
    newer[VERSION_AT] = 9;
    File::options().write(true).open(&path).unwrap().write_all_at(&newer, COPY_BYTES).unwrap();
    assert!(matches!(Label::open(&path), Err(LabelError::Version { found: 9, .. })));
}

#[test]
fn a_log_of_intents_stays_where_it_is_and_begins_empty() {
    let (_directory, path) = device();
    let mut label = Label::open(&path).unwrap();
    label.write(&table(400)).unwrap();
    let given = |label: &Label| (1..=400).filter_map(|id| label.intent_log(VolumeId::new(id))).collect();
    let starts: std::collections::BTreeSet<u64> = given(&label);
    assert_eq!(starts.len(), usize::from(SLOTS));
    let in_label = |start: &u64| *start % COPY_BYTES >= TABLE_BYTES_MAX && *start < LABEL_BYTES;
    assert!(starts.iter().all(|start| in_label(start) && start % intent_log::BYTES == 0), "{starts:?}");
    // One that has none becomes mirrored: it gets another one's, and finds nothing there.
    for start in &starts {
        label.file().unwrap().write_all_at(&[7; intent_log::LENGTH], *start).unwrap();
    }
    let without = |entry: &&mut VolumeEntry| !entry.deleted && label.intent_log(entry.id).is_none();
    let mut mirrored = table(400);
    let entry = mirrored.volumes.iter_mut().find(without).unwrap();
    entry.mirror = Some(MirrorEntry { epoch: 1, number: 0, replicas: Vec::new() });
    let id = entry.id;
    label.write(&mirrored).unwrap();
    let start = label.intent_log(id).unwrap();
    let read = |label: &Label| {
        let mut bytes = [1; intent_log::LENGTH];
        label.file().unwrap().read_exact_at(&mut bytes, start).unwrap();
        bytes
    };
    assert_eq!(read(&label), [0; intent_log::LENGTH]);
    // It is kept while the volume is there, and by another process too.
    label.file().unwrap().write_all_at(&[9; intent_log::LENGTH], start).unwrap();
    let entry = mirrored.volumes.iter_mut().find(|entry| entry.id == id).unwrap();
    (entry.deleted, entry.mirror) = (true, None);
    label.write(&mirrored).unwrap();
    let mut label = Label::open(&path).unwrap();
    assert_eq!((label.intent_log(id), read(&label)), (Some(start), [9; intent_log::LENGTH]));
    mirrored.volumes.retain(|entry| entry.id != id);
    label.write(&mirrored).unwrap();
    assert_eq!(label.intent_log(id), None);
    assert_eq!(given(&label).len(), usize::from(SLOTS));
}

proptest! {
    /// Any sectors of the new table may be missing after a crash: the device has the new table or the old one.
    #[test]
    fn a_crash_leaves_one_table_or_the_other(
        counts in prop::collection::vec(0_u32..120, 1..5), kept in prop::collection::vec(any::<bool>(), 64),
    ) {
        let (_directory, path) = device();
        let (last, earlier) = counts.split_last().unwrap();
        let mut chances = kept.iter().copied().cycle();
        let mut chance = || chances.next().unwrap_or(false);
        // What was written is there, whatever is lost afterwards.
        let mut label = Label::open(&path).unwrap();
        for &count in earlier {
            let drive = Forgetful::over(&path);
            label.write_to(Arc::clone(&drive) as Arc<dyn Store>);
            label.write(&table(count)).unwrap();
            drive.lose(&mut chance);
            let found = Label::inspect(&path).unwrap();
            prop_assert_eq!(found.table(), &table(count));
        }
        // What was not is there or not.
        let drive = Forgetful::over(&path);
        label.write_to(Arc::clone(&drive) as Arc<dyn Store>);
        let old = label.table().clone();
        if let Some(new) = label.prepare(&table(*last)).unwrap() {
            for start_bytes in new.cleared {
                drive.write(&[0; intent_log::LENGTH], start_bytes).unwrap();
            }
            drive.write(&new.copy, new.sequence % 2 * COPY_BYTES).unwrap();
        }
        drive.lose(&mut chance);
        let mut found = Label::open(&path).unwrap();
        prop_assert!(*found.table() == old || *found.table() == table(*last));
        found.write(&table(99)).unwrap();
        let found = Label::inspect(&path).unwrap();
        prop_assert_eq!(found.table(), &table(99));
    }
}

#[test]
fn a_device_keeps_its_number_and_an_empty_one_in_its_place_has_another() {
    let (directory, path) = device();
    let mut label = Label::open(&path).unwrap();
    assert_eq!(label.identity(), None);
    // With a table that an earlier version wrote.
    label.write(&table(2)).unwrap();
    label.identify().unwrap();
    let number = label.identity();
    assert!(number.is_some());
    label.identify().unwrap();
    assert_eq!(label.identity(), number);
    label.write(&table(3)).unwrap();
    let mut again = Label::open(&path).unwrap();
    again.identify().unwrap();
    assert_eq!((again.identity(), again.table()), (number, &table(3)));
    std::fs::rename(&path, directory.path().join("pulled")).unwrap();
    File::create(&path).unwrap().set_len(4 << 20).unwrap();
    let mut other = Label::open(&path).unwrap();
    other.identify().unwrap();
    assert!(other.identity().is_some() && other.identity() != number);
    assert_eq!(Label::open(&path).unwrap().identity(), other.identity(), "it is on the medium");
}

/// A log that lay elsewhere would lie in a volume.
#[test]
fn a_table_with_logs_where_none_may_lie_is_none() {
    let places = |slots: [u16; 2]| {
        let place = |(volume, slot)| LogPlace { volume: VolumeId::new(volume), slot };
        (1..).zip(slots).map(place).collect::<Vec<_>>()
    };
    for (slots, is_table) in [([0, SLOTS - 1], true), ([0, SLOTS], false), ([3, 3], false)] {
        let (_directory, path) = device();
        let stored = Stored { table: table(2), intent_logs: places(slots), identity: None };
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(&format(1, &stored).unwrap(), COPY_BYTES).unwrap();
        // What a crash left of the first table ever is an empty one.
        let found = Label::inspect(&path).unwrap();
        assert_eq!(*found.table() == table(2), is_table, "{slots:?}");
    }
}

#[test]
fn a_copy_that_the_medium_does_not_give_back_leaves_the_other_one() {
    let length = usize::try_from(COPY_BYTES).unwrap();
    let copy = |sequence| {
        let stored = Stored { table: table(u32::try_from(sequence).unwrap()), ..Stored::default() };
        let mut copy = format(sequence, &stored).unwrap();
        copy.resize(length, 0);
        Ok(copy)
    };
    let bad = || Err(io::Error::from_raw_os_error(5));
    let zeros = || Ok(vec![0; length]);
    let chosen = |copies| {
        let Chosen { sequence, stored, missing } = choose(Path::new("ssd"), copies)?;
        Ok::<_, LabelError>((sequence, stored.table, missing.is_some()))
    };
    assert_eq!(chosen([copy(2), copy(3)]).unwrap(), (3, table(3), false));
    assert_eq!(chosen([copy(2), bad()]).unwrap(), (2, table(2), true));
    assert_eq!(chosen([bad(), copy(3)]).unwrap(), (3, table(3), true));
    // Where the other one says nothing, nobody knows what there was.
    for copies in [[zeros(), bad()], [bad(), zeros()], [bad(), bad()]] {
        assert!(matches!(chosen(copies), Err(LabelError::Io { .. })));
    }
    assert_eq!(chosen([zeros(), zeros()]).unwrap(), (0, VolumeTable::default(), false));
}
