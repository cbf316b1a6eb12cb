//! What can be wrong with a pool, and what to do about it.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a pool could not be created or opened. Every message says what to do next.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// There is nothing at the path.
    #[error(
        "there is no pool at {path}: create it once per pod with `wadi-pool create {path} --size 1G`, or correct \
         the path", path = path.display()
    )]
    Missing {
        /// Where.
        path: PathBuf,
    },
    /// The directory that the pool should be created in is not there.
    #[error("the directory of {path} does not exist: create it first with `mkdir -p`", path = path.display())]
    DirectoryMissing {
        /// The pool's path.
        path: PathBuf,
    },
    /// Something is already at the path.
    #[error(
        "{path} already exists: use it as it is (`wadi-pool inspect {path}`), or replace it with --force once no \
         daemon uses it", path = path.display()
    )]
    Exists {
        /// Where.
        path: PathBuf,
    },
    /// Neither a regular file nor a DAX character device.
    #[error(
        "{path} is neither a regular file nor a DAX character device: give the path of a file on /dev/shm or \
         hugetlbfs, or a device such as /dev/dax0.0", path = path.display()
    )]
    UnsupportedFile {
        /// Where.
        path: PathBuf,
    },
    /// The magic is wrong.
    #[error(
        "{path} is not a pool: it does not begin with a pool's superblock; correct the path, or make a pool of it \
         with `wadi-pool create {path} --force`, which destroys what is there", path = path.display()
    )]
    NotAPool {
        /// Where.
        path: PathBuf,
    },
    /// Too short for what its superblock says, or for a superblock at all.
    #[error(
        "{path} is truncated: it has {actual_bytes} bytes where the pool needs {expected_bytes}; stop the pod's \
         daemons and create the pool anew with `wadi-pool create {path} --force`", path = path.display()
    )]
    Truncated {
        /// Where.
        path: PathBuf,
        /// What is there.
        actual_bytes: u64,
        /// What should be there.
        expected_bytes: u64,
    },
    /// Longer than its superblock says.
    #[error(
        "{path} has {actual_bytes} bytes but its superblock says {expected_bytes}: it was resized or copied from \
         elsewhere; create the pool anew with `wadi-pool create {path} --force`", path = path.display()
    )]
    SizeMismatch {
        /// Where.
        path: PathBuf,
        /// What is there.
        actual_bytes: u64,
        /// What the superblock says.
        expected_bytes: u64,
    },
    /// Laid out in another way than this program knows.
    #[error(
        "{path} has layout version {found}, this program knows {known}.x: run the release that created the pool, or \
         stop the whole pod and create the pool anew with `wadi-pool create {path} --force`", path = path.display()
    )]
    MajorVersion {
        /// Where.
        path: PathBuf,
        /// The pool's version, as `major.minor`.
        found: String,
        /// The major version that this program knows.
        known: u16,
    },
    /// Of a release that is not the next one.
    #[error(
        "{path} has layout version {found}, this program knows {known} and works with the next minor version: upgrade this \
         host to a release that knows the one before {found} first", path = path.display()
    )]
    MinorVersion {
        /// Where.
        path: PathBuf,
        /// The pool's version, as `major.minor`.
        found: String,
        /// The version that this program knows, as `major.minor`.
        known: String,
    },
    /// The superblock's checksum does not match.
    #[error(
        "the superblock of {path} has a bad checksum: it was overwritten; find out by whom, then create the pool \
         anew with `wadi-pool create {path} --force`", path = path.display()
    )]
    Checksum {
        /// Where.
        path: PathBuf,
    },
    /// The checksum matches but a field makes no sense.
    #[error(
        "the superblock of {path} says {field} = {value}, which this program does not know: run the release that \
         created the pool, or create it anew with `wadi-pool create {path} --force`", path = path.display()
    )]
    Field {
        /// Where.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// What it holds.
        value: u64,
    },
    /// The size asked for is too small or odd.
    #[error(
        "a pool of {size_bytes} bytes for {host_slots} hosts cannot be: give a multiple of 2 MiB (2097152) and at \
         least {least_bytes} bytes"
    )]
    Size {
        /// What was asked for.
        size_bytes: u64,
        /// For how many hosts.
        host_slots: u16,
        /// The least that works.
        least_bytes: u64,
    },
    /// The number of hosts, replicas or regions asked for is out of range.
    #[error("{what} must be from {least} to {most}, not {value}")]
    Slots {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        value: u32,
        /// The least that works.
        least: u32,
        /// The most that works.
        most: u32,
    },
    /// The file system has less room than the pool needs.
    #[error(
        "the file system of {path} has {available_bytes} bytes left, the pool needs {size_bytes}: choose a smaller \
         --size, or make room (for /dev/shm: `mount -o remount,size=… /dev/shm`)", path = path.display()
    )]
    NoSpace {
        /// Where.
        path: PathBuf,
        /// What is left.
        available_bytes: u64,
        /// What is needed.
        size_bytes: u64,
    },
    /// An operating system call failed.
    #[error(
        "cannot {operation} {path}{advice}", path = path.display(),
        advice = if source.kind() == io::ErrorKind::PermissionDenied { " (run as a user who may read and write it)" } else { "" }
    )]
    Io {
        /// What failed, as in "cannot … PATH".
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
