//! What somebody may change who is bound to a host: what concerns that one. A host that is in wrong hands moves nobody else's instances.

use axum::http::StatusCode;
use cxl_pool::HostId;
use pod_state::{Command, State};

use super::Failure;

/// The name of the host that whoever sends a request is bound to.
#[derive(Clone, Debug)]
pub(super) struct BoundTo(pub(super) String);

impl BoundTo {
    /// Refuses what does not concern the host. What is about nothing that there is is refused as it is for everybody.
    pub(super) fn allow(&self, state: &State, command: &Command) -> Result<(), Failure> {
        let own = state.host_named(&self.0);
        let is_own = |host: HostId| own == Some(host);
        let runs_here = |name: &str| state.instance_named(name).is_none_or(|it| is_own(it.host));
        let comes_here =
            |name: &str| state.instance_named(name).and_then(|it| it.incoming).is_some_and(is_own);
        let concerns = match command {
            Command::CreateInstance { host, .. } => is_own(*host),
            Command::DeleteInstance { name, .. } => runs_here(name),
            // Shares: the host's own frontends hold instances to them, so whoever has the host moves as much as he likes anyway.
            Command::SetMchannel { instance, .. } | Command::DeviceAnswered { instance, .. } => {
                runs_here(instance)
            }
            Command::PrepareMigration { name, to } => is_own(*to) || runs_here(name),
            Command::AbortMigration { name } | Command::ActivateMigration { name, .. } => {
                runs_here(name) || comes_here(name)
            }
            _ => false,
        };
        if concerns {
            return Ok(());
        }
        let detail = format!(
            "you are known here as the host {}, and this concerns another one: ask with the token or the certificate of that host, or \
             have an operator do it",
            self.0
        );
        Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", detail))
    }
}
