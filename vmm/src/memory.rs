//! Memory that is plugged into a running virtual machine.

use std::path::Path;

use qapi::qmp;

use crate::VmmError;
use crate::monitor::{connect, failed};

/// How many times memory can be plugged in.
pub(crate) const SLOTS: usize = 16;

/// Plugs so many MiB of memory into the machine whose monitor this is; it must have been started with room for them
/// ([`crate::VmSpec::memory_max_mib`]). Its guest uses them as it likes; frontends are told by QEMU.
pub fn plug_memory(monitor: &Path, mib: u32) -> Result<(), VmmError> {
    let mut monitor = connect(monitor, || false)?;
    let there = monitor.execute(&qmp::query_memory_devices {}).map_err(failed)?.len();
    let (device, backend) = (format!("plugged{there}"), format!("ram{there}"));
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
