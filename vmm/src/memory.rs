//! Memory that is plugged into a machine that runs, and unplugged from it.

use std::collections::BTreeSet;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use qapi::qmp;

use crate::VmmError;
use crate::monitor::{Monitor, connect, failed};
use crate::plug::UNPLUGGING;

/// How many times memory can be plugged in.
pub(crate) const SLOTS: usize = 16;

/// How often QEMU is asked whether a guest has let go.
const LOOK: Duration = Duration::from_millis(20);

/// Plugs so many MiB of memory into the machine whose monitor this is; it must have been started with room for them
/// ([`crate::VmSpec::memory_max_mib`]). Its guest uses them as it likes; frontends are told by QEMU.
pub fn plug_memory(monitor: &Path, mib: u32) -> Result<(), VmmError> {
    let mut monitor = of_running(monitor)?;
    let taken: BTreeSet<_> = [BACKENDS, DEVICES]
        .iter()
        .map(|path| names(&mut monitor, path))
        .collect::<Result<Vec<_>, _>>()?
        .concat()
        .into_iter()
        .collect();
    // Memory in between may have been unplugged, and somebody who was killed half-way may have left its backend.
    let names = (0..).map(|number| (device(number), backend(number)));
    let free = names.filter(|(device, backend)| !taken.contains(device) && !taken.contains(backend));
    let (device, backend) = free.into_iter().next().unwrap_or_default();
    // The frontends read and write it, so it is shared.
    let memory = qmp::MemoryBackendProperties {
        dump: None,
        host_nodes: None,
        merge: None,
        policy: None,
        prealloc: None,
        prealloc_context: None,
        prealloc_threads: None,
        reserve: None,
        share: Some(true),
        x_use_canonical_path_for_ramblock_id: None,
        size: u64::from(mib) << 20,
    };
    let memory =
        qmp::ObjectOptions::memory_backend_memfd { id: backend.clone(), memory_backend_memfd: memory.into() };
    monitor.execute(&qmp::object_add(memory)).map_err(failed)?;
    let plugged = monitor.execute(&qmp::device_add {
        bus: None,
        id: Some(device),
        driver: "pc-dimm".to_owned(),
        arguments: [("memdev".to_owned(), backend.clone().into())].into_iter().collect(),
    });
    plugged.map(drop).map_err(|error| {
        // What the guest never saw is given back.
        let _ = monitor.execute(&qmp::object_del { id: backend });
        failed(error)
    })
}

/// Unplugs what memory was plugged into the machine whose monitor this is and has the highest number, which is the last one where none was
/// unplugged before; the guest has to let go of it within `patience`. Frontends are told by QEMU. Returns how many MiB those were.
///
/// # Errors
///
/// There is none, or the guest has not let go of it. It may do so later: whoever asks again finds out.
pub fn unplug_memory(monitor: &Path, patience: Duration) -> Result<u64, VmmError> {
    let mut monitor = of_running(monitor)?;
    let there = monitor.execute(&qmp::query_memory_devices {}).map_err(failed)?;
    let last = there.into_iter().filter_map(|memory| match memory {
        qmp::MemoryDeviceInfo::dimm(qmp::PCDIMMDeviceInfoWrapper { data }) => {
            let number = data.id.as_deref()?.strip_prefix(DEVICE)?.parse::<usize>().ok()?;
            Some((number, data.size))
        }
        _ => None,
    });
    let Some((number, bytes)) = last.max() else {
        return Err(VmmError::Machine { reason: "no memory is plugged into it".to_owned() });
    };
    match monitor.execute(&qmp::device_del { id: device(number) }).map_err(failed) {
        // An older QEMU asks once, and the guest may still let go.
        Err(error) if error.to_string().contains(UNPLUGGING) => {}
        asked => drop(asked?),
    }
    let asked = Instant::now();
    while names(&mut monitor, DEVICES)?.contains(&device(number)) {
        if asked.elapsed() > patience {
            return Err(VmmError::Machine {
                reason: format!(
                    "the guest has not let go of {} ({} MiB) within {} s: something of its own lies there that cannot move. Memory that it took up \
                     with `echo online_movable > /sys/devices/system/memory/memoryN/state` can be given back; ask again once it has less to do",
                    device(number),
                    bytes >> 20,
                    patience.as_secs()
                ),
            });
        }
        thread::sleep(LOOK);
    }
    monitor.execute(&qmp::object_del { id: backend(number) }).map_err(failed)?;
    Ok(u64::try_from(bytes).unwrap_or(0) >> 20)
}

/// Where QEMU lists memory, and where devices, that of others among them.
const BACKENDS: &str = "/objects";
const DEVICES: &str = "/machine/peripheral";
/// What the name of a device begins with that is memory of ours.
const DEVICE: &str = "plugged";

fn device(number: usize) -> String {
    format!("{DEVICE}{number}")
}

fn backend(number: usize) -> String {
    format!("ram{number}")
}

fn names(monitor: &mut Monitor, path: &str) -> Result<Vec<String>, VmmError> {
    let list = monitor.execute(&qmp::qom_list { path: path.to_owned() }).map_err(failed)?;
    Ok(list.into_iter().map(|it| it.name).collect())
}

/// A session with a machine that runs already, or not at all.
fn of_running(monitor: &Path) -> Result<Monitor, VmmError> {
    connect(monitor, || true).map_err(|error| match error {
        VmmError::Monitor { reason } => VmmError::Machine {
            reason: format!("no machine is there: {reason}; vmm list shows those that run on this host"),
        },
        error => error,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::monitor::fake::Qemu;

    #[test]
    fn names_that_are_taken_are_passed_over() {
        let (tell, told) = channel();
        let qemu = Qemu::start(move |name, arguments| {
            let list = |names: &[&str]| {
                let names: Vec<_> =
                    names.iter().map(|it| format!(r#"{{"name": "{it}", "type": "child<x>"}}"#)).collect();
                Some(format!(r#"{{"return": [{}]}}"#, names.join(", ")))
            };
            match name {
                // The first was unplugged with its backend. Of the third there is but the backend.
                "qom-list" if arguments["path"] == "/objects" => list(&["ram", "ram1", "ram2"]),
                "qom-list" => list(&["port.0", "plugged1"]),
                "query-memory-devices" => Some(r#"{"return": []}"#.to_owned()),
                _ => {
                    let id = arguments["id"].as_str().unwrap().to_owned();
                    tell.send((name.to_owned(), id)).unwrap();
                    Some(r#"{"return": {}}"#.to_owned())
                }
            }
        });
        plug_memory(&qemu.path, 128).unwrap();
        let expected = [("object-add", "ram0"), ("device_add", "plugged0")];
        assert_eq!(
            told.try_iter().collect::<Vec<_>>(),
            expected.map(|(name, id)| (name.to_owned(), id.to_owned()))
        );
    }

    #[test]
    fn a_machine_that_is_not_there_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let error = plug_memory(&directory.path().join("vm1-qmp.sock"), 128).unwrap_err().to_string();
        assert!(error.contains("vm1-qmp.sock") && error.contains("vmm list"), "{error}");
    }

    #[test]
    fn a_backend_that_was_left_is_not_made_again() {
        let (tell, told) = channel();
        let qemu = Qemu::start(move |name, arguments| {
            if name == "qom-list" && arguments["path"] == "/objects" {
                return Some(r#"{"return": [{"name": "ram0", "type": "child<x>"}]}"#.to_owned());
            }
            if let Some(id) = arguments["id"].as_str() {
                tell.send(id.to_owned()).unwrap();
            }
            Some(if name.starts_with('q') { r#"{"return": []}"# } else { r#"{"return": {}}"# }.to_owned())
        });
        plug_memory(&qemu.path, 128).unwrap();
        assert_eq!(told.try_iter().collect::<Vec<_>>(), ["ram1", "plugged1"]);
    }

    /// A QEMU with two memories plugged in, whose guest lets go of one after so many looks; what it is told to do.
    fn with_two(mut looks: usize) -> (Qemu, Receiver<(String, String)>) {
        let (tell, told) = channel();
        let qemu = Qemu::start(move |name, arguments| match name {
            "query-memory-devices" => {
                let dimm = |id: &str, mib: u64| {
                    format!(
                        r#"{{"type": "dimm", "data": {{"id": "{id}", "addr": 0, "hotpluggable": true, "hotplugged": true, "memdev": "/objects/x", "node": 0, "size": {}, "slot": 0}}}}"#,
                        mib << 20
                    )
                };
                let all = [dimm("plugged0", 128), dimm("plugged1", 256), dimm("somebodys", 512)];
                Some(format!(r#"{{"return": [{}]}}"#, all.join(", ")))
            }
            "qom-list" => {
                let gone = looks == 0;
                looks = looks.saturating_sub(1);
                let last = if gone { "" } else { r#", {"name": "plugged1", "type": "child<x>"}"# };
                Some(format!(r#"{{"return": [{{"name": "plugged0", "type": "child<x>"}}{last}]}}"#))
            }
            _ => {
                tell.send((name.to_owned(), arguments["id"].as_str().unwrap().to_owned())).unwrap();
                Some(r#"{"return": {}}"#.to_owned())
            }
        });
        (qemu, told)
    }

    #[test]
    fn what_was_plugged_in_last_goes_with_its_backend_once_the_guest_has_let_go() {
        let (qemu, told) = with_two(3);
        assert_eq!(unplug_memory(&qemu.path, Duration::from_mins(1)).unwrap(), 256);
        let expected = [("device_del", "plugged1"), ("object-del", "ram1")];
        assert_eq!(
            told.try_iter().collect::<Vec<_>>(),
            expected.map(|(name, id)| (name.to_owned(), id.to_owned()))
        );
    }

    #[test]
    fn what_a_guest_keeps_stays_and_it_is_said_what_to_do() {
        let (qemu, told) = with_two(usize::MAX);
        let error = unplug_memory(&qemu.path, Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("plugged1 (256 MiB)") && error.contains("online_movable"), "{error}");
        assert_eq!(told.try_iter().count(), 1, "its backend is not removed under it");
    }

    #[test]
    fn where_nothing_is_plugged_in_there_is_nothing_to_unplug() {
        let qemu = Qemu::start(|_, _| Some(r#"{"return": []}"#.to_owned()));
        let error = unplug_memory(&qemu.path, Duration::ZERO).unwrap_err().to_string();
        assert!(error.contains("no memory is plugged into it"), "{error}");
    }
}
