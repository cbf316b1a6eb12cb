//! Guest memory that lies in the pool, where the engines find it without a copy.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use cxl_pool::{Area, ByteOffset, CoherenceMode, GuestLock, LineCount, Memory, Pool};
use qapi::qmp;

use crate::VmmError;
use crate::monitor::{self, MONITOR_DEADLINE};

/// The object that QEMU keeps a guest's memory of a file in.
const BACKEND: &str = "memory-backend-file";
/// QEMU maps what it can by huge pages, and a DAX device in whole ones only.
pub(crate) const ALIGN_BYTES: u64 = 2 << 20;

/// The part of the pool that is leased to an instance as its guest's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolRam {
    /// The pool's file or device on this host.
    pub pool: PathBuf,
    /// The pod's name for good, which stands in the pool.
    pub uuid: String,
    /// Where in the pool it begins.
    pub start_bytes: u64,
    /// How long it is.
    pub size_bytes: u64,
}

impl PoolRam {
    /// QEMU's object for it.
    pub(crate) fn object(&self, escape: impl Fn(&Path) -> String) -> String {
        format!(
            "{BACKEND},id=ram,size={},mem-path={},offset={},align={ALIGN_BYTES},share=on",
            self.size_bytes,
            escape(&self.pool),
            self.start_bytes
        )
    }

    /// Makes it the memory of a machine that is about to start: nobody else's, and nothing in it of whoever had it before. It
    /// stays so while any process has what is returned.
    ///
    /// `confirm` asks who leases it. It may have been given up since it was leased, and be somebody else's by now; once it is locked,
    /// no host gives it up any more, so the answer holds.
    pub(crate) fn claim(
        &self,
        confirm: impl FnOnce() -> Result<(), VmmError>,
    ) -> Result<GuestLock, VmmError> {
        let refuse = |reason: String| VmmError::Spec { reason };
        let name = self.pool.display();
        let pool = Pool::open(&self.pool).map_err(|error| {
            refuse(format!("the pool at {name}: {error}; say where it is on this host with --pool"))
        })?;
        let found = pool.superblock().uuid.to_string();
        if found != self.uuid {
            return Err(refuse(format!(
                "the pool at {name} is {found}, and the instance's is {}: say where that is on this host with --pool",
                self.uuid
            )));
        }
        let area = Area::new(ByteOffset::new(self.start_bytes).line(), LineCount::covering(self.size_bytes));
        if !pool.layout().data().contains_area(&area) {
            return Err(refuse(format!("the memory of the instance lies outside of the pool at {name}")));
        }
        let lock = GuestLock::take(&self.pool, area).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => refuse(
                "another QEMU has the instance's memory: stop that first (vmm list, vmm stop)".to_owned(),
            ),
            _ => refuse(format!("cannot lock the instance's memory in {name}: {error}")),
        })?;
        confirm()?;
        match pool.superblock().mode {
            CoherenceMode::Software => wipe(&pool.software(), area),
            CoherenceMode::Hardware => wipe(&pool.hardware(), area),
        }
        Ok(lock)
    }
}

/// Whoever had the memory before may have left there what is none of the guest's business. It is written over and not punched
/// out of the file: backends have registered its pages with their kernels, and would go on with those that are gone.
fn wipe<M: Memory>(memory: &M, area: Area) {
    static ZEROS: [u8; 64 << 10] = [0; 64 << 10];
    let mut at = area.start_byte();
    let mut left = area.bytes();
    while left > 0 {
        let bytes = left.min(ZEROS.len() as u64);
        memory.write(at, &ZEROS[..usize::try_from(bytes).unwrap_or(ZEROS.len())]);
        at = at.saturating_add(bytes);
        left -= bytes;
    }
}

/// Whether this QEMU can begin in the middle of a file: it says so itself. One that cannot would give the guest the
/// beginning of the pool, and the guest would overwrite what all hosts live by.
pub(crate) fn check_offset(qemu: &Path) -> Result<(), VmmError> {
    check_offset_within(qemu, MONITOR_DEADLINE)
}

fn check_offset_within(qemu: &Path, deadline: Duration) -> Result<(), VmmError> {
    let start = |source| VmmError::Start { program: qemu.display().to_string(), source };
    // Both of its standard streams at once: a pipe has no deadline.
    let (ours, theirs) = UnixStream::pair().map_err(start)?;
    let output = OwnedFd::from(theirs.try_clone().map_err(start)?);
    let mut child = Command::new(qemu)
        .args(["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-S"])
        .args(["-qmp", "stdio"])
        .stdin(OwnedFd::from(theirs))
        .stdout(output)
        .stderr(Stdio::null())
        .spawn()
        .map_err(start)?;
    let asked = monitor::open(ours, &qemu.display().to_string(), deadline).and_then(|mut monitor| {
        let properties = qmp::qom_list_properties { typename: BACKEND.to_owned() };
        monitor.execute(&properties).map_err(monitor::failed)
    });
    // It has said what it was started for.
    let _ = child.kill();
    let _ = child.wait();
    let properties = asked?;
    if properties.iter().any(|property| property.name == "offset") {
        return Ok(());
    }
    Err(VmmError::Spec {
        reason: format!(
            "the instance's memory lies in the pool, and {} cannot begin in the middle of a file (its {BACKEND} has no \
             `offset`): use QEMU 8.1 or later, for example of Debian's backports (--qemu says where it is), or create the \
             instance without --ram",
            qemu.display()
        ),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use cxl_pool::CreateOptions;

    use super::*;

    #[test]
    fn memory_that_was_given_to_another_meanwhile_stays_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let options = CreateOptions { size_bytes: Some(16 << 20), ..CreateOptions::default() };
        let pool = Pool::create(&path, &options).unwrap();
        let area = Area::new(pool.layout().data().start, LineCount::covering(128 << 10));
        let ram = PoolRam {
            pool: path.clone(),
            uuid: pool.superblock().uuid.to_string(),
            start_bytes: area.start_byte().get(),
            size_bytes: area.bytes(),
        };
        let memory = pool.software();
        memory.write(area.start_byte(), b"another tenant's");
        let read = || {
            let mut bytes = [0; 16];
            memory.read(area.start_byte(), &mut bytes);
            bytes
        };
        let mut asked = 0;
        let refused = ram.claim(|| {
            asked += 1;
            assert!(pool.is_guest_locked(area).unwrap(), "it can be given up after the answer");
            Err(VmmError::Spec { reason: "it is another one's".to_owned() })
        });
        assert!(refused.unwrap_err().to_string().contains("another one's"));
        assert_eq!((asked, &read()), (1, b"another tenant's"));
        // A process that another test is just starting has the lock, too, until it runs its program.
        while pool.is_guest_locked(area).unwrap() {
            std::thread::yield_now();
        }
        let lock = ram.claim(|| Ok(())).unwrap();
        assert_eq!(read(), [0; 16]);
        assert!(pool.is_guest_locked(area).unwrap());
        drop(lock);
    }

    /// Asks a script in QEMU's place.
    fn ask(script: &str, deadline: Duration) -> Result<(), VmmError> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("qemu");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        loop {
            match check_offset_within(&path, deadline) {
                // A process that another test was just forking still has it open.
                Err(VmmError::Start { source, .. }) if source.kind() == io::ErrorKind::ExecutableFileBusy => {
                }
                said => return said,
            }
        }
    }

    #[test]
    fn who_is_asked_for_offset_and_says_nothing_is_not_waited_for() {
        let short = Duration::from_millis(300);
        let silent = ask("exec sleep 1000", short);
        assert!(silent.unwrap_err().to_string().contains("does not greet"));
        let greeting = r#"{"QMP": {"version": {"qemu": {"micro": 0, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}"#;
        let stuck = ask(
            &format!("echo '{greeting}'; read line; echo '{{\"return\": {{}}}}'; exec sleep 1000"),
            short,
        );
        assert!(matches!(stuck, Err(VmmError::Silent { .. })), "{stuck:?}");
        let ended = ask("exit 1", MONITOR_DEADLINE);
        assert!(ended.unwrap_err().to_string().contains("ended before it greeted"));
    }
}
