//! Asking libvirt, by its `virsh`.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::VmmError;

/// What `virsh` says of itself when libvirt's daemon is away, or goes away while it is asked; and libvirt when it waits for something else
/// that it does with the domain.
const AWAY: [&str; 5] = [
    "failed to connect to the hypervisor",
    "End of file while",
    "client socket is closed",
    "Disconnected from",
    "cannot acquire state change lock",
];

/// What `virsh` prints, which may read `input` as /dev/stdin. It gives up a daemon of libvirt's that says nothing at all for 30 s. An error is
/// [`VmmError::Silent`] where nobody knows what came of it.
pub(crate) fn virsh(uri: Option<&str>, words: &[&str], input: &str) -> Result<String, VmmError> {
    let mut command = Command::new("virsh");
    if let Some(uri) = uri {
        command.args(["--connect", uri]);
    }
    let failed = |source| VmmError::Start { program: "virsh".to_owned(), source };
    let mut child = command
        .args(words)
        // What it says is read here, too.
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut to) = child.stdin.take() {
        // If it does not read on, it says why.
        let _ = to.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    if !output.status.success() {
        return Err(refused(words[0], &String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn refused(command: &str, said: &str) -> VmmError {
    let reason = format!("virsh {command}: {}", said.trim());
    if AWAY.iter().any(|it| said.contains(it)) {
        VmmError::Silent { reason }
    } else {
        VmmError::Monitor { reason }
    }
}

/// Asks QEMU's monitor through libvirt.
pub(crate) fn ask(
    domain: &str,
    uri: Option<&str>,
    command: &str,
    arguments: Option<Value>,
) -> Result<Value, VmmError> {
    let mut asked = json!({"execute": command});
    if let Some(arguments) = arguments {
        asked["arguments"] = arguments;
    }
    let text = virsh(uri, &["qemu-monitor-command", domain, &asked.to_string()], "")?;
    let mut answer: Value = serde_json::from_str(&text).map_err(|error| odd(&error))?;
    match answer.get_mut("return") {
        Some(value) => Ok(value.take()),
        None => Err(VmmError::Monitor { reason: format!("{command}: {}", text.trim()) }),
    }
}

pub(crate) fn odd(error: &serde_json::Error) -> VmmError {
    VmmError::Monitor { reason: format!("an answer that cannot be read: {error}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_is_away_has_refused_nothing() {
        let away = "error: failed to connect to the hypervisor\nerror: Failed to connect socket to '/run/libvirt/libvirt-sock'";
        assert!(matches!(refused("attach-device", away), VmmError::Silent { .. }));
        let ended = "error: Disconnected from qemu:///system due to end of file\nerror: End of file while reading data: Input/output error";
        assert!(matches!(refused("attach-device", ended), VmmError::Silent { .. }));
        let refused = refused("attach-device", "error: internal error: No more available PCI slots\n");
        assert!(
            matches!(&refused, VmmError::Monitor { reason } if reason.ends_with("PCI slots")),
            "{refused}"
        );
    }
}
