//! Finding a machine that somebody else has started.

use std::path::PathBuf;

use crate::machine::CONTROL_VARIABLE;
use crate::{MonitorAddress, Origin, Process, RunningVm, VcpuThread, VmmError};

/// Finds the machine that the QEMU with this process id runs: its monitor by QEMU's command line, its vCPUs by the monitor.
/// `name` replaces the name that QEMU was given.
pub fn attach_process(pid: u32, name: Option<&str>) -> Result<(RunningVm, Vec<VcpuThread>), VmmError> {
    let refuse = |reason: String| VmmError::Machine { reason };
    let process = Process::with_id(pid).ok_or_else(|| refuse(format!("there is no process {pid}")))?;
    let words = process
        .command_line()
        .map_err(|error| refuse(format!("the command line of process {pid} cannot be read: {error}")))?;
    let line = CommandLine::parse(&words);
    let monitor = line.monitor.ok_or_else(|| {
        let how = if line.domain {
            "libvirt has its only session: use `vmm attach --domain`"
        } else {
            "start it with -qmp unix:PATH,server=on,wait=off"
        };
        refuse(format!("process {pid} has no monitor socket on its command line; {how}"))
    })?;
    let monitor = MonitorAddress::Socket { path: process.directory().join(monitor) };
    let name = name.map(str::to_owned).or(line.name).unwrap_or_else(|| format!("qemu-{pid}"));
    found(name, process, monitor)
}

/// Finds the machine of a libvirt domain, through `virsh`.
pub fn attach_domain(
    domain: &str,
    uri: Option<&str>,
    name: Option<&str>,
) -> Result<(RunningVm, Vec<VcpuThread>), VmmError> {
    let monitor = MonitorAddress::Domain { domain: domain.to_owned(), uri: uri.map(str::to_owned) };
    let process = monitor.vcpus()?.first().and_then(|vcpu| Process::of_thread(vcpu.thread_id));
    // libvirt may speak of another host, and there may be a thread with that id here, too.
    let named = monitor.machine_name()?;
    let is_its_qemu = |process: &Process| {
        process.command_line().is_ok_and(|words| CommandLine::parse(&words).name == Some(named))
    };
    let process = process.filter(is_its_qemu).ok_or_else(|| VmmError::Machine {
        reason: format!("the threads of domain {domain} are not on this host: run it where the domain runs"),
    })?;
    found(name.unwrap_or(domain).to_owned(), process, monitor)
}

fn found(
    name: String,
    process: Process,
    monitor: MonitorAddress,
) -> Result<(RunningVm, Vec<VcpuThread>), VmmError> {
    let vcpu_control = process.environment(CONTROL_VARIABLE).map(|path| process.directory().join(path));
    let machine =
        RunningVm { name, process, origin: Origin::Attached, monitor, vcpu_control, files: Vec::new() };
    let vcpus = machine.vcpus()?;
    Ok((machine, vcpus))
}

/// What QEMU's command line says of the machine.
#[derive(Debug, Default, PartialEq, Eq)]
struct CommandLine {
    name: Option<String>,
    monitor: Option<PathBuf>,
    /// libvirt started it.
    domain: bool,
}

impl CommandLine {
    fn parse(words: &[String]) -> Self {
        let mut line = Self::default();
        let mut sockets: Vec<(String, String)> = Vec::new();
        let mut controls: Vec<String> = Vec::new();
        for pair in words.windows(2) {
            let [option, value] = pair else { continue };
            let Some(option) = option.strip_prefix('-') else { continue };
            let values = Values::parse(value);
            match option.strip_prefix('-').unwrap_or(option) {
                "name" => line.name = values.get("guest").or_else(|| values.first()).map(str::to_owned),
                "qmp" | "qmp-pretty" => {
                    let path = values.first().and_then(|first| first.strip_prefix("unix:"));
                    line.monitor = line.monitor.take().or_else(|| path.map(PathBuf::from));
                }
                "chardev" if values.first() == Some("socket") => match (values.get("id"), values.get("path"))
                {
                    (Some(id), Some(path)) => sockets.push((id.to_owned(), path.to_owned())),
                    (Some("charmonitor"), None) => line.domain = true,
                    _ => {}
                },
                "mon" if values.get("mode") == Some("control") => {
                    controls.extend(values.get("chardev").or_else(|| values.first()).map(str::to_owned));
                }
                _ => {}
            }
        }
        let of_control = sockets.into_iter().find(|(id, _)| controls.contains(id));
        line.monitor = line.monitor.or_else(|| of_control.map(|(_, path)| path.into()));
        line
    }
}

/// A list such as `socket,id=monitor,path=/run/a,,b.sock`: a doubled comma is one of the value.
struct Values(Vec<String>);

impl Values {
    fn parse(text: &str) -> Self {
        let mut values = vec![String::new()];
        let mut characters = text.chars().peekable();
        while let Some(character) = characters.next() {
            if character == ',' && characters.next_if_eq(&',').is_none() {
                values.push(String::new());
            } else if let Some(value) = values.last_mut() {
                value.push(character);
            }
        }
        Self(values)
    }

    /// The first value, if it has no key.
    fn first(&self) -> Option<&str> {
        self.0.first().map(String::as_str).filter(|value| !value.contains('='))
    }

    fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find_map(|value| value.strip_prefix(key)?.strip_prefix('='))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;
    use crate::{QemuVersion, VmSpec};

    fn parsed(line: &str) -> CommandLine {
        CommandLine::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn our_own_machines_are_found() {
        let spec = VmSpec { directory: "/run/a,b".into(), ..spec() };
        let line = CommandLine::parse(&spec.arguments(QemuVersion { major: 7, minor: 2 }));
        assert_eq!(line.monitor, Some(spec.monitor_socket()));
        assert_eq!(line.name.as_deref(), Some("vm1"));
    }

    #[test]
    fn monitors_are_given_in_several_ways() {
        let line =
            parsed("qemu -name guest=a,debug-threads=on -qmp unix:/tmp/q.sock,server=on,wait=off -m 64");
        assert_eq!((line.name.as_deref(), line.monitor), (Some("a"), Some("/tmp/q.sock".into())));
        let line = parsed("qemu --chardev socket,path=m.sock,id=m,server=on --mon m,mode=control");
        assert_eq!((line.name, line.monitor), (None, Some("m.sock".into())));
        let line = parsed("qemu -name a -L name x -qmp unix:/tmp/q.sock,server=on");
        assert_eq!((line.name.as_deref(), line.monitor), (Some("a"), Some("/tmp/q.sock".into())));
        // One for people is none for programs.
        let line =
            parsed("qemu -chardev socket,id=m,path=m.sock,server=on -mon chardev=m -qmp tcp:localhost:4");
        assert_eq!(line, CommandLine::default());
    }

    #[test]
    fn libvirts_domains_are_known() {
        let line = parsed(
            "qemu -name guest=d,debug-threads=on -chardev socket,id=charmonitor,fd=22,server=on,wait=off \
             -mon chardev=charmonitor,id=monitor,mode=control",
        );
        assert_eq!(line, CommandLine { name: Some("d".to_owned()), monitor: None, domain: true });
    }

    #[test]
    fn a_process_without_a_monitor_is_refused() {
        let error = attach_process(std::process::id(), None).unwrap_err().to_string();
        assert!(error.contains("no monitor socket") && error.contains("-qmp"), "{error}");
        assert!(attach_process(u32::MAX, None).unwrap_err().to_string().contains("no process"));
    }
}
