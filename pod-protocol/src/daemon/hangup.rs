//! Being told to read something anew.

use std::io;
use std::path::Path;

use signal_hook::consts::SIGHUP;
use signal_hook::iterator::Signals;

use super::set_log_level;
use crate::config::{ConfigError, HostConfig};

impl HostConfig {
    /// Reads the file of a daemon on this host, and logs what it says. `SIGHUP` has it read anew, from now on: what is logged
    /// takes effect at once, and for all else that has changed the log asks for a restart.
    pub fn load_and_follow(path: &Path) -> Result<Self, ConfigError> {
        let config = Self::load(path)?;
        set_level(&config);
        let (mut known, path) = (config.clone(), path.to_owned());
        let watched = on_hangup(move || reload(&mut known, &path));
        if let Err(error) = watched {
            tracing::warn!("SIGHUP ends this daemon, since it cannot be handled: {error}");
        }
        Ok(config)
    }
}

/// Does something whenever the process is told to with `SIGHUP`, on a thread of its own.
fn on_hangup(mut act: impl FnMut() + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new([SIGHUP])?;
    std::thread::Builder::new()
        .name("hangup".to_owned())
        .spawn(move || signals.forever().for_each(|_| act()))
        .map(drop)
}

fn reload(known: &mut HostConfig, path: &Path) {
    match HostConfig::load(path) {
        Ok(config) => {
            set_level(&config);
            known.host.log.clone_from(&config.host.log);
            if config != *known {
                tracing::warn!(path = %path.display(), "what has changed there but for host.log takes effect with a restart");
            }
            tracing::info!(path = %path.display(), "the configuration was read anew");
        }
        Err(error) => tracing::error!("the configuration that was known stays: {error}"),
    }
}

fn set_level(config: &HostConfig) {
    // It was checked when it was read.
    if let Err(error) = set_log_level(config.host.log.as_deref()) {
        tracing::error!("what was logged stays: {error}");
    }
}
