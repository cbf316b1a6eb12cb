//! How much of a guest's memory lies in the pool: only what its vCPUs load and store there goes over the fabric.
//!
//! What QEMU has mapped says so, whoever started it and however: a mapping of the pool's file or device is of the pool.

use std::fs;
use std::os::linux::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Stat, makedev, stat};
use rustix::io::Errno;

use super::failed;
use super::watch::{LOOK_EVERY, Watch};
use crate::{RunningVm, VmmError};

/// What the kernel wants of who looks behind a mapping of another process (`map_files` in proc(5)).
const NEEDED: &str = "CAP_CHECKPOINT_RESTORE";

/// How much of a guest's memory there is, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestRam {
    /// So much of it lies in the pool, in bytes.
    pub in_pool: u64,
    /// All of it, in bytes.
    pub whole: u64,
}

impl GuestRam {
    /// Looks at the memory of `machine`, and at the pool that is there on this host.
    pub fn look(machine: &RunningVm, pool: &Path) -> Result<Self, VmmError> {
        let process = PathBuf::from(format!("/proc/{}", machine.process.pid));
        let in_pool = mapped(&process, pool)?;
        Ok(Self { in_pool, whole: machine.monitor.memory_bytes()? })
    }

    /// Watches it until that is dropped; this is known.
    pub fn watch(self, machine: &RunningVm, pool: &Path) -> Result<Watch<Self>, VmmError> {
        let (machine, pool) = (machine.clone(), PathBuf::from(pool));
        Watch::begin("guest-ram", LOOK_EVERY, self, move || Self::look(&machine, &pool))
    }

    /// Refuses to count what the vCPUs of a guest load and store of which nothing lies in the pool.
    pub fn require(self, name: &str, pool: &Path) -> Result<(), VmmError> {
        if self.in_pool > 0 {
            return Ok(());
        }
        Err(failed(format!(
            "no memory of {name} lies in the pool at {}: what its vCPUs load and store does not go over the fabric, and would be counted as \
             if it did. Create its instance with --ram, or hold its vCPUs to a number with --share PERCENT; --any-ram counts it all the same",
            pool.display()
        )))
    }

    /// What is to be said of a guest of which some memory lies elsewhere.
    pub fn warning(self, name: &str) -> Option<String> {
        (0 < self.in_pool && self.in_pool < self.whole).then(|| {
            format!(
                "{name}: {} MiB of its {} MiB of memory lie in the pool: what its vCPUs load and store in the rest, such as memory that was plugged \
                 in, is counted as traffic of the fabric, too",
                self.in_pool >> 20,
                self.whole >> 20
            )
        })
    }
}

/// How much of the pool a process has mapped, in bytes, by what its directory in `/proc` says.
fn mapped(process: &Path, pool: &Path) -> Result<u64, VmmError> {
    let file = fs::metadata(pool).map_err(|error| {
        failed(format!("the pool at {}, where the configuration has it: {error}", pool.display()))
    })?;
    let maps = process.join("maps");
    let maps = fs::read_to_string(&maps)
        .map_err(|error| failed(format!("cannot read {}: {error}", maps.display())))?;
    // A device may have another node elsewhere, and is the same one.
    let is_device = FileType::from_raw_mode(file.st_mode()) == FileType::CharacterDevice;
    let (mut bytes, mut denied) = (0, None);
    for mapping in maps.lines().filter_map(Mapping::parse) {
        if (mapping.device, mapping.inode) == (file.st_dev(), file.st_ino()) {
            bytes += mapping.bytes;
        } else if is_device {
            let node = process.join("map_files").join(mapping.range);
            match stat(&node) {
                Ok(other) if is_node_of(&other, file.st_rdev()) => bytes += mapping.bytes,
                // Another file, or it is not mapped any more.
                Ok(_) | Err(Errno::NOENT) => {}
                Err(error) => denied = Some((node, error)),
            }
        }
    }
    match denied {
        // What it has mapped by the node that the configuration names is known all the same.
        Some((node, error)) if bytes == 0 => Err(failed(format!(
            "nobody knows whether what lies at {} is of the pool: {error}; that takes the capability {NEEDED}, which \
             CapabilityBoundingSet= in wadi-slice@.service is to list",
            node.display()
        ))),
        _ => Ok(bytes),
    }
}

/// Whether a file is a node of the device with this number.
fn is_node_of(file: &Stat, device: u64) -> bool {
    FileType::from_raw_mode(file.st_mode) == FileType::CharacterDevice && file.st_rdev == device
}

/// A file that a process has mapped.
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    range: &'a str,
    bytes: u64,
    device: u64,
    inode: u64,
}

impl<'a> Mapping<'a> {
    /// By its line of `/proc/PID/maps`; none if it is of no file, or copied as soon as it is written to.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.split_whitespace();
        let (range, rights) = (fields.next()?, fields.next()?);
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (begin, end) = range.split_once('-')?;
        let bytes = hex(end)?.checked_sub(hex(begin)?)?;
        let (major, minor) = fields.nth(1)?.split_once(':')?;
        let number = |text| u32::from_str_radix(text, 16).ok();
        let device = makedev(number(major)?, number(minor)?);
        let inode = fields.next()?.parse().ok().filter(|inode| *inode != 0)?;
        rights.ends_with('s').then_some(Self { range, bytes, device, inode })
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::thread;

    use cxl_pool::{CreateOptions, Pool};
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

    use super::*;
    use crate::monitor::fake::Qemu;

    const MIB: u64 = 1 << 20;

    #[test]
    fn files_that_are_shared_are_mapped() {
        let line =
            "7f0000000000-7f0010000000 rw-s 00200000 00:1a 4711                       /dev/shm/wadi/pool";
        let expected = Mapping {
            range: "7f0000000000-7f0010000000",
            bytes: 256 * MIB,
            device: makedev(0, 0x1a),
            inode: 4711,
        };
        assert_eq!(Mapping::parse(line), Some(expected));
        for other in [
            "7f0000000000-7f0010000000 rw-p 00000000 00:00 0",
            "7f0000000000-7f0010000000 r--p 00000000 fe:00 26315   /usr/bin/qemu-system-x86_64",
            "7f0000000000-7f0010000000 rw-s 00000000 00:00 0",
            "nonsense",
            "",
        ] {
            assert_eq!(Mapping::parse(other), None, "{other}");
        }
    }

    /// A pool that is a DAX device is known by its number, by whatever node a process has mapped it: here `/dev/null` plays it, and links play what the kernel
    /// has in `map_files`.
    #[test]
    fn a_device_is_the_pool_through_any_node_and_another_one_is_not() {
        let process = tempfile::tempdir().unwrap();
        let (pool, map_files) = (Path::new("/dev/null"), process.path().join("map_files"));
        fs::create_dir(&map_files).unwrap();
        let file = fs::metadata(pool).unwrap();
        let (major, minor) = (rustix::fs::major(file.st_dev()), rustix::fs::minor(file.st_dev()));
        let regular = process.path().join("maps");
        let mappings = [
            // By the node that the configuration names, which is known without a look at `map_files`.
            ("100000-300000", "s", format!("{major:02x}:{minor:02x} {}", file.st_ino()), None),
            ("400000-800000", "s", "00:1a 4711".to_owned(), Some(pool)),
            // Another device, a file, something that is gone, and a copy of the guest's own.
            ("1000000-2000000", "s", "00:1a 4712".to_owned(), Some(Path::new("/dev/zero"))),
            ("3000000-4000000", "s", "00:1a 4713".to_owned(), Some(regular.as_path())),
            ("5000000-6000000", "s", "00:1a 4714".to_owned(), None),
            ("7000000-8000000", "p", "00:1a 4711".to_owned(), Some(pool)),
        ];
        let line = |(range, shared, file, _): &(&str, &str, String, _)| {
            format!("{range} rw-{shared} 00000000 {file} /dev/dax0.0\n")
        };
        fs::write(&regular, mappings.iter().map(line).collect::<String>()).unwrap();
        for (range, _, _, node) in &mappings {
            if let Some(node) = node {
                std::os::unix::fs::symlink(node, map_files.join(range)).unwrap();
            }
        }
        assert_eq!(mapped(process.path(), pool).unwrap(), 2 * MIB + 4 * MIB);
        // Where the pool is a file, no device is it.
        assert_eq!(mapped(process.path(), &regular).unwrap(), 0);
        assert!(mapped(&process.path().join("gone"), pool).unwrap_err().to_string().contains("maps"));
    }

    #[test]
    fn what_of_a_guests_memory_lies_in_the_pool_is_what_its_process_has_mapped_of_that() {
        let directory = tempfile::tempdir().unwrap();
        let paths = ["pool", "other"].map(|name| directory.path().join(name));
        for path in &paths {
            let options = CreateOptions { size_bytes: Some(16 * MIB), ..CreateOptions::default() };
            Pool::create(path, &options).unwrap();
        }
        // This process has the memory that a QEMU would.
        let qemu = Qemu::start(|name, _| {
            assert_eq!(name, "query-memory-size-summary");
            let (base, plugged) = (8 * MIB, 16 * MIB);
            Some(format!(r#"{{"return": {{"base-memory": {base}, "plugged-memory": {plugged}}}}}"#))
        });
        let machine = RunningVm::of_this_process(qemu.path.clone());
        let look = |path| GuestRam::look(&machine, path).unwrap();
        let [pool, other] = &paths;
        let _mapped = Pool::open(other).unwrap();
        let none = look(pool);
        assert_eq!(none, GuestRam { in_pool: 0, whole: 24 * MIB });
        let refused = none.require("vm1", pool).unwrap_err().to_string();
        assert!(refused.contains("--ram") && refused.contains("--any-ram"), "{refused}");
        assert_eq!(none.warning("vm1"), None, "it was refused, or nobody minds");
        let _guest = Pool::open(pool).unwrap();
        let part = look(pool);
        assert_eq!(part, GuestRam { in_pool: 16 * MIB, whole: 24 * MIB });
        part.require("vm1", pool).unwrap();
        assert!(part.warning("vm1").unwrap().contains("16 MiB of its 24 MiB"));
        assert_eq!(GuestRam { in_pool: 24 * MIB, ..part }.warning("vm1"), None);
        let gone = directory.path().join("gone");
        assert!(GuestRam::look(&machine, &gone).unwrap_err().to_string().contains("gone"));
    }

    /// What `look` finds in a thread that may do so much, and no more.
    fn with_capabilities<T: Send>(allowed: CapabilitySet, look: impl FnOnce() -> T + Send) -> T {
        let look = || {
            let nothing = CapabilitySet::empty();
            let sets = CapabilitySets { effective: allowed, permitted: allowed, inheritable: nothing };
            set_capabilities(None, sets).unwrap();
            look()
        };
        thread::scope(|scope| scope.spawn(look).join().unwrap())
    }

    #[test]
    fn an_agent_sees_behind_mappings_with_no_more_capabilities_than_its_unit_has() {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd/wadi-slice@.service");
        let unit = fs::read_to_string(unit).unwrap();
        let listed = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
        let named = |name: &str| CapabilitySet::from_name(name.strip_prefix("CAP_").unwrap()).unwrap();
        let listed: CapabilitySet = listed.split(' ').map(named).collect();
        if !rustix::thread::capabilities(None).unwrap().permitted.contains(listed) {
            eprintln!("not tried: whoever runs this may do less than the unit");
            return;
        }
        // Something that may do more than the agent, as a QEMU may, and this process, which maps a file.
        let mut qemu = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let other = PathBuf::from(format!("/proc/{}", qemu.id()));
        let directory = tempfile::tempdir().unwrap();
        let options = CreateOptions { size_bytes: Some(16 * MIB), ..CreateOptions::default() };
        let _mapped = Pool::create(&directory.path().join("pool"), &options).unwrap();
        let (own, device) = (Path::new("/proc/self"), Path::new("/dev/null"));
        let look = |process: &Path| mapped(process, device).map_err(|error| error.to_string());
        assert_eq!(with_capabilities(listed, || (look(&other), look(own))), (Ok(0), Ok(0)));

        let found = with_capabilities(listed.difference(named(NEEDED)), || look(own));
        assert!(matches!(&found, Err(error) if error.contains(NEEDED)), "{found:?}");
        qemu.kill().unwrap();
        qemu.wait().unwrap();
    }
}
