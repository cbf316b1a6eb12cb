//! Memory that is plugged into a running virtual machine.

use std::collections::BTreeSet;
use std::path::Path;

use qapi::qmp;

use crate::VmmError;
use crate::monitor::{connect, failed};

/// How many times memory can be plugged in.
pub(crate) const SLOTS: usize = 16;

/// Plugs so many MiB of memory into the machine whose monitor this is; it must have been started with room for them
/// ([`crate::VmSpec::memory_max_mib`]). Its guest uses them as it likes; frontends are told by QEMU.
pub fn plug_memory(monitor: &Path, mib: u32) -> Result<(), VmmError> {
    // It runs already, or not at all.
    let mut monitor = connect(monitor, || true).map_err(|error| match error {
        VmmError::Monitor { reason } => VmmError::Machine {
            reason: format!("no machine is there: {reason}; vmm list shows those that run on this host"),
        },
        error => error,
    })?;
    let mut taken = BTreeSet::new();
    for path in ["/objects", "/machine/peripheral"] {
        let list = qmp::qom_list { path: path.to_owned() };
        taken.extend(monitor.execute(&list).map_err(failed)?.into_iter().map(|it| it.name));
    }
    // Memory in between may have been unplugged, and somebody who was killed half-way may have left its backend.
    let names = (0..).map(|number: usize| (format!("plugged{number}"), format!("ram{number}")));
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

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
}
