//! Where sockets, doorbells and locks lie. One place that knows the names, so that both ends agree on them.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use cxl_pool::{EndpointId, HostId, ReplicaId};
use uuid::Uuid;

use crate::config::Wakeup;
use crate::daemon::close_to_others;
use crate::ids::InstanceId;

/// A UNIX socket's path has this many bytes at most, its final zero not counted.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// The run directory of a pod's hosts that share a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDirectory {
    root: PathBuf,
    wakeup: Wakeup,
}

/// A run directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunDirectoryError {
    /// A directory cannot be created.
    #[error("cannot create the directory {}; create it, or set another run directory", path.display())]
    Create {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The directory of lock files lets others in.
    #[error(
        "others may open what is in {}, and so keep this host's daemons from starting, and it cannot be closed to them; \
         set another run directory", path.display()
    )]
    Open {
        /// Which one.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Sockets below it would have names that the kernel refuses.
    #[error(
        "the run directory {} is too long for socket names by {excess} bytes: use a shorter one",
        path.display()
    )]
    TooLong {
        /// Which one.
        path: PathBuf,
        /// By how much.
        excess: usize,
    },
}

impl RunDirectory {
    /// The run directory at this path, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into(), wakeup: Wakeup::Socket }
    }

    /// The same, for daemons that wait in this way: where they poll, no worker waits for the doorbells of its channels.
    #[must_use]
    pub fn with_wakeup(self, wakeup: Wakeup) -> Self {
        Self { wakeup, ..self }
    }

    /// How daemons wait for what comes over channels.
    pub fn wakeup(&self) -> Wakeup {
        self.wakeup
    }

    /// Creates what is missing of it.
    pub fn prepare(&self) -> Result<(), RunDirectoryError> {
        let longest = self.doorbells().join("h65535-blk-frontend-control.sock");
        let excess = longest.as_os_str().len().saturating_sub(SOCKET_PATH_BYTES_MAX);
        if excess > 0 {
            return Err(RunDirectoryError::TooLong { path: self.root.clone(), excess });
        }
        let directories =
            [self.sockets(), self.doorbells(), self.locks(), self.vcpus(), self.root.join("memory-failures")];
        for path in directories {
            fs::create_dir_all(&path).map_err(|source| RunDirectoryError::Create { path, source })?;
        }
        // The run directory itself lets VMMs in that are somebody else's, and may be hostile.
        let path = self.locks();
        File::open(&path)
            .and_then(|directory| close_to_others(&directory))
            .map_err(|source| RunDirectoryError::Open { path, source })
    }

    /// The directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the vhost-user sockets for VMMs lie.
    pub fn sockets(&self) -> PathBuf {
        self.root.join("sockets")
    }

    /// Where doorbells lie.
    pub fn doorbells(&self) -> PathBuf {
        self.root.join("doorbells")
    }

    /// Where lock files lie.
    pub fn locks(&self) -> PathBuf {
        self.root.join("locks")
    }

    /// Where the sockets for agents that hold vCPUs lie.
    pub fn vcpus(&self) -> PathBuf {
        self.root.join("vcpus")
    }

    /// Where a frontend hears of the vCPUs of its VMs.
    pub fn vcpu_socket(&self, endpoint: EndpointId) -> PathBuf {
        self.vcpus().join(format!("{}-{}.sock", endpoint.host, endpoint.role))
    }

    /// The lock that keeps an agent that holds the vCPUs of an instance unique on this kernel.
    pub fn vcpu_lock(&self, instance: &str) -> PathBuf {
        // A machine that was found may be called anything.
        self.locks().join(format!("vcpus-{}.lock", plain(instance)))
    }

    /// What the queues of an instance may move together, at all frontends of a host. Only they may open it.
    pub fn byte_budget(&self, host: HostId, instance: InstanceId) -> PathBuf {
        self.locks().join(format!("{host}-instance-{}.budget", instance.get()))
    }

    /// The doorbell of an endpoint's control thread.
    pub fn control_doorbell(&self, endpoint: EndpointId) -> PathBuf {
        self.doorbells().join(format!("{}-{}-control.sock", endpoint.host, endpoint.role))
    }

    /// The doorbell of an endpoint's worker.
    pub fn data_doorbell(&self, endpoint: EndpointId) -> PathBuf {
        self.doorbells().join(format!("{}-{}-data.sock", endpoint.host, endpoint.role))
    }

    /// The doorbell of a controller replica.
    pub fn controller_doorbell(&self, replica: ReplicaId) -> PathBuf {
        self.doorbells().join(format!("controller-{}.sock", replica.get()))
    }

    /// The doorbell that other controller replicas ring.
    pub fn replica_doorbell(&self, replica: ReplicaId) -> PathBuf {
        self.doorbells().join(format!("replica-{}.sock", replica.get()))
    }

    /// The lock that keeps a controller replica unique on this kernel, whether it leads or not.
    pub fn replica_lock(&self, replica: ReplicaId) -> PathBuf {
        self.locks().join(format!("replica-{}.lock", replica.get()))
    }

    /// The lock that keeps an endpoint unique on this kernel.
    pub fn endpoint_lock(&self, endpoint: EndpointId) -> PathBuf {
        self.locks().join(format!("{}-{}.lock", endpoint.host, endpoint.role))
    }

    /// Where an endpoint writes down which parts of this pool it could not read.
    pub fn memory_failures(&self, pool: Uuid, endpoint: EndpointId) -> PathBuf {
        self.root.join("memory-failures").join(format!("{pool}-{}-{}", endpoint.host, endpoint.role))
    }

    /// Where a host's backend writes down that this SSD lost writes although the host was not started anew. Others, who may not open
    /// what is there, cannot take it away.
    pub fn lost_writes(&self, host: HostId, ssd: &str) -> PathBuf {
        self.locks().join(format!("{host}-ssd-{}.lost", plain(ssd)))
    }

    /// The lock that keeps the controller unique on this kernel that a replica is while it leads.
    pub fn controller_lock(&self, replica: ReplicaId) -> PathBuf {
        self.locks().join(format!("controller-{}.lock", replica.get()))
    }
}

/// A name as a part of a file's.
fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn too_long_directory_is_refused_before_anything_is_created() {
        let temporary = tempfile::tempdir().expect("a directory");
        let root = temporary.path().join("x".repeat(100));
        assert!(matches!(
            RunDirectory::new(&root).prepare(),
            Err(RunDirectoryError::TooLong { excess, .. }) if excess > 0
        ));
        assert!(!root.exists());
    }

    #[test]
    fn prepare_can_be_repeated() {
        let temporary = tempfile::tempdir().expect("a directory");
        let run = RunDirectory::new(temporary.path().join("run"));
        run.prepare().expect("created");
        run.prepare().expect("still there");
        assert!(run.sockets().is_dir() && run.doorbells().is_dir() && run.locks().is_dir());
    }

    #[test]
    fn others_reach_the_sockets_and_not_the_locks() {
        let temporary = tempfile::tempdir().expect("a directory");
        let run = RunDirectory::new(temporary.path().join("run"));
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        for directory in [run.locks(), run.sockets()] {
            fs::create_dir_all(&directory).expect("created");
            fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).expect("its owner's");
        }
        run.prepare().expect("usable");
        assert_eq!((mode(&run.locks()), mode(&run.sockets())), (0o700, 0o755));
        fs::remove_dir(run.locks()).expect("empty");
        run.prepare().expect("usable");
        assert_eq!(mode(&run.locks()), 0o700);
    }

    #[test]
    fn directory_under_a_file_is_refused() {
        let temporary = tempfile::NamedTempFile::new().expect("a file");
        let refused = RunDirectory::new(temporary.path()).prepare().expect_err("not a directory");
        assert!(refused.to_string().contains("cannot create"), "{refused}");
    }
}
