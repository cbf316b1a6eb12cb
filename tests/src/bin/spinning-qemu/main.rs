//! Looks to `vmm` like a QEMU, and has vCPU threads that always want to run. For where no real one would fit, such as inside a guest.
//!
//! It takes a QEMU's `-name NAME -qmp unix:PATH`.

#![forbid(unsafe_code)]

use std::hint::spin_loop;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::channel;
use std::thread;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

/// Named as QEMU names its threads; those of the vCPUs come first.
const THREADS: [&str; 3] = ["CPU 0/TCG", "CPU 1/TCG", "worker"];
const VCPUS: usize = 2;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let monitor = words.iter().find_map(|word| word.strip_prefix("unix:"));
    let monitor = UnixListener::bind(monitor.context("-qmp unix:PATH is missing")?)?;
    let mut threads = Vec::new();
    for name in THREADS {
        let (tell, told) = channel();
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            // Nobody who does not wait for it starts it.
            let _ = tell.send(rustix::thread::gettid().as_raw_nonzero().get());
            loop {
                spin_loop();
            }
        })?;
        threads.push(told.recv()?);
    }
    for session in monitor.incoming() {
        // Whoever leaves in the midst of it has heard enough.
        let _ = serve(session?, &threads[..VCPUS]);
    }
    Ok(())
}

/// One session with its monitor.
fn serve(mut session: UnixStream, vcpus: &[i32]) -> Result<()> {
    let version = json!({"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""});
    writeln!(session, "{}", json!({"QMP": {"version": version, "capabilities": []}}))?;
    for line in BufReader::new(session.try_clone()?).lines() {
        let command: Value = serde_json::from_str(&line?)?;
        let vcpu = |(index, thread): (usize, &i32)| json!({"cpu-index": index, "thread-id": thread, "qom-path": format!("/{index}"), "target": "x86_64"});
        let answer = match command["execute"].as_str() {
            Some("qmp_capabilities") => json!({"return": {}}),
            Some("query-cpus-fast") => {
                json!({"return": vcpus.iter().enumerate().map(vcpu).collect::<Vec<_>>()})
            }
            _ => json!({"error": {"class": "CommandNotFound", "desc": "it only spins"}}),
        };
        writeln!(session, "{answer}")?;
    }
    Ok(())
}
