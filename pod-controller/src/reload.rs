//! What is read anew while the controller runs, when it is told to (`SIGHUP`): tokens, certificates, who is who by certificate, what
//! is done about loads, and what is logged; and the audit log is opened anew. What makes no sense leaves what was known.

use std::path::{Path, PathBuf};

use pod_protocol::daemon::set_log_level;

use crate::config::{BalanceSection, Config};
use crate::controller::Handle;
use crate::replication::Replica;
use crate::rest::{Access, KnownClient, Listeners};

type ReloadCertificates = Box<dyn Fn(&[KnownClient]) + Send + Sync>;

/// Reads anew what can be.
pub struct Reload {
    path: PathBuf,
    known: Config,
    access: Access,
    handle: Handle,
    certificates: Option<ReloadCertificates>,
    replicas: Option<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for Reload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reload").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Reload {
    /// For a controller that has been started with what this file says.
    pub fn new(
        path: &Path,
        known: &Config,
        (access, handle): (&Access, &Handle),
        listeners: &Listeners,
        replica: Option<&Replica>,
    ) -> Self {
        let certificates = listeners.reload_certificates();
        let replicas = replica.and_then(Replica::reload_certificates);
        Self {
            path: path.to_owned(),
            known: known.clone(),
            access: access.clone(),
            handle: handle.clone(),
            certificates: certificates.map(|reload| Box::new(reload) as ReloadCertificates),
            replicas: replicas.map(|reload| Box::new(reload) as Box<dyn Fn() + Send + Sync>),
        }
    }

    /// Reads everything anew, and says in the log what became of it.
    pub fn reload(&mut self) {
        let path = self.path.display();
        match Config::load(&self.path) {
            Ok(config) => {
                if shape(&config) != shape(&self.known) {
                    tracing::warn!(%path, "what has changed there but for log, tls.client and [balance] takes effect with a restart");
                }
                if let Err(error) = set_log_level(config.controller.log.as_deref()) {
                    tracing::error!("what was logged stays: {error}");
                }
                self.handle.set_balance(config.balance_policy());
                self.known.balance = config.balance;
                // What takes effect with a restart is told of each time.
                self.known.controller.log = config.controller.log;
                if let (Some(known), Some(tls)) = (&mut self.known.controller.tls, config.controller.tls) {
                    known.clients = tls.clients;
                }
                tracing::info!(%path, "the configuration was read anew");
            }
            Err(error) => tracing::error!("the configuration that was known stays: {error}"),
        }
        self.access.reload();
        if let (Some(reload), Some(tls)) = (&self.certificates, &self.known.controller.tls) {
            reload(&tls.clients);
        }
        if let Some(reload) = &self.replicas {
            reload();
        }
    }
}

/// All of a configuration but what can be changed.
fn shape(config: &Config) -> String {
    let mut config = config.clone();
    config.controller.log = None;
    config.balance = BalanceSection::default();
    if let Some(tls) = &mut config.controller.tls {
        tls.clients.clear();
    }
    format!("{config:?}")
}
