//! What no command of ours asks of QEMU's monitor.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// Gives the monitor a command, such as `{"execute": "stop"}`, and returns what it answers. Waits while somebody else has the only
/// session.
pub fn tell(monitor: &Path, command: &Value) -> Result<Value> {
    let mut session = BufReader::new(UnixStream::connect(monitor)?);
    // Before it greets, QEMU gives the rest of an answer to a session that ended in the midst of it.
    let mut greeting = String::new();
    while !greeting.starts_with("{\"QMP\"") {
        greeting.clear();
        if session.read_line(&mut greeting)? == 0 {
            bail!("QEMU ended before it greeted who has this to say: {command}");
        }
    }
    say(&mut session, &json!({"execute": "qmp_capabilities"}))?;
    say(&mut session, command)
}

fn say(session: &mut BufReader<UnixStream>, command: &Value) -> Result<Value> {
    writeln!(session.get_mut(), "{command}")?;
    loop {
        let mut line = String::new();
        if session.read_line(&mut line)? == 0 {
            bail!("QEMU has no answer to {command}");
        }
        let mut said: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
        if let Some(answer) = said.get_mut("return") {
            return Ok(answer.take());
        }
        // Events come in between.
        if said.get("error").is_some() {
            bail!("{command}: {line}");
        }
    }
}

/// Plugs in a vCPU, by this name; the machine was started with room for it.
pub fn plug_vcpu(monitor: &Path, name: &str) -> Result<()> {
    let places = tell(monitor, &json!({"execute": "query-hotpluggable-cpus"}))?;
    let mut places = places.as_array().context("no list of vCPUs")?.iter();
    let free = places.find(|place| place.get("qom-path").is_none()).context("there is no room for a vCPU")?;
    let mut arguments = free["props"].clone();
    (arguments["driver"], arguments["id"]) = (free["type"].clone(), name.into());
    tell(monitor, &json!({"execute": "device_add", "arguments": arguments})).map(drop)
}

/// Asks the guest to let go of one.
pub fn unplug_vcpu(monitor: &Path, name: &str) -> Result<()> {
    tell(monitor, &json!({"execute": "device_del", "arguments": {"id": name}})).map(drop)
}
