//! Daemons that stand still, and what becomes of what they had.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use pod_api::{EndpointHealth, Migration};

use super::{Pod, Role};
use crate::waiting::until;

/// Of a daemon that was fenced.
const FENCED: i32 = 75;
/// Longer than a daemon takes that finds out that it is over.
const PATIENCE: Duration = Duration::from_secs(30);

impl Pod {
    /// How a daemon looks from the controller.
    pub fn health(&self, host: &str, role: Role) -> Result<EndpointHealth> {
        let hosts = self.api().hosts()?;
        let endpoints = hosts.iter().filter(|it| it.name == host).flat_map(|it| &it.endpoints);
        let its = endpoints.filter(|it| it.role == role.to_string()).map(|it| it.health).next();
        its.with_context(|| format!("the controller knows no {role} of {host}"))
    }

    /// Waits until a daemon looks so from the controller.
    ///
    /// # Panics
    /// When it does not for a minute.
    pub fn wait_for_health(&self, host: &str, role: Role, health: EndpointHealth) {
        until(&format!("{host} {role} to be {health:?}"), || {
            (self.health(host, role).ok()? == health).then_some(())
        });
    }

    /// Lets a daemon run again that was fenced while it stood still, and waits until it has found that out and ended.
    pub fn wake_up_to_the_end(&mut self, host: &str, role: Role) -> Result<()> {
        let daemon = self.daemon(host, role)?;
        daemon.thaw()?;
        let status = daemon.wait(PATIENCE)?;
        if status.code() != Some(FENCED) {
            bail!("{host} {role} was fenced, and ended with {status}");
        }
        Ok(())
    }

    /// Moves an instance to a host although the one that it leaves says nothing. Returns the move as it was prepared, with the sockets of
    /// the devices there.
    pub fn move_by_force(&self, instance: &str, to: &str) -> Result<Migration> {
        let migration = self.api().migrate_instance(instance, to)?.migration.context("it does not move")?;
        if !migration.ready {
            bail!("{instance} cannot move to {to}: {migration:?}");
        }
        self.api().activate_migration(instance, true)?;
        let moved = self.api().instance(instance)?;
        if moved.host != to || moved.migration.is_some() {
            bail!("{instance} did not move to {to}: {moved:?}");
        }
        Ok(migration)
    }
}
