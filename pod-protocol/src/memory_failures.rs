//! What a daemon does about memory of the pool that cannot be read: it ends when it meets some, with a note of where, and its next
//! life tells the controller when it joins, before it is given anything.

use cxl_pool::{Area, EndpointId, Pool, PoolError, Role, poison};

use crate::config::HostConfig;
use crate::run_directory::RunDirectoryError;

/// Failures cannot be watched for or read back.
#[derive(Debug, thiserror::Error)]
pub enum MemoryFailuresError {
    /// The run directory cannot be made.
    #[error(transparent)]
    RunDirectory(#[from] RunDirectoryError),
    /// The pool, or the record.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// From here on the daemon ends as [`poison`] describes when the pool fails.
pub fn watch(pool: &Pool, config: &HostConfig, role: Role) -> Result<(), MemoryFailuresError> {
    let run = config.run_directory();
    run.prepare()?;
    let record = run.memory_failures(pool.superblock().uuid, EndpointId::new(config.host.id, role));
    Ok(poison::watch(pool, &config.pool.path, Some(&record))?)
}

/// What earlier lives of this endpoint noted about this pool.
pub fn recorded(pool: &Pool, config: &HostConfig, role: Role) -> Result<Vec<Area>, MemoryFailuresError> {
    let endpoint = EndpointId::new(config.host.id, role);
    Ok(poison::recorded(&config.run_directory().memory_failures(pool.superblock().uuid, endpoint))?)
}
