//! Guest memory that lies in the pool, where the engines find it without a copy.

use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cxl_pool::{Area, ByteOffset, CoherenceMode, GuestLock, LineCount, Memory, Pool};
use qapi::{Qmp, Stream, qmp};

use crate::VmmError;

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
    pub(crate) fn claim(&self) -> Result<GuestLock, VmmError> {
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
    let start = |source| VmmError::Start { program: qemu.display().to_string(), source };
    let mut child = Command::new(qemu)
        .args([
            "-machine",
            "none",
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-S",
            "-qmp",
            "stdio",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(start)?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let asked = input.zip(output).map(|(input, output)| {
        let mut monitor = Qmp::new(Stream::new(BufReader::new(output), input));
        monitor.handshake()?;
        monitor.execute(&qmp::qom_list_properties { typename: BACKEND.to_owned() })
    });
    // It has said what it was started for.
    let _ = child.kill();
    let _ = child.wait();
    let said = |reason: String| VmmError::Monitor { reason };
    let properties = asked.ok_or_else(|| said("it has no monitor".to_owned()))?;
    let properties = properties.map_err(|error| said(error.to_string()))?;
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
