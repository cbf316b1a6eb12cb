//! Who the controller is to an etcd with users.
//!
//! etcd gives whoever knows a password a token, which it forgets after some minutes without a request, or when it restarts.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::gateway::Silence;

/// Where one logs in.
pub(super) const PATH: &str = "v3/auth/authenticate";

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUser {
    /// The name.
    pub name: String,
    /// The file with the password, without what stands behind the first line. It is read whenever etcd asks for it.
    pub password_file: PathBuf,
}

/// A user, and the token that etcd knows it by.
pub(super) struct Login {
    user: EtcdUser,
    token: Mutex<Option<Arc<str>>>,
}

/// What etcd is asked for a token with.
#[derive(Serialize)]
pub(super) struct Authenticate<'a> {
    name: &'a str,
    password: String,
}

#[derive(Deserialize)]
pub(super) struct Authenticated {
    pub(super) token: String,
}

impl Login {
    pub(super) fn new(user: EtcdUser) -> Self {
        Self { user, token: Mutex::default() }
    }

    /// What is said with each request, once etcd has asked who one is.
    pub(super) fn token(&self) -> Option<Arc<str>> {
        self.known().clone()
    }

    pub(super) fn learn(&self, token: &str) {
        *self.known() = Some(token.into());
    }

    /// Name and password, as they are now.
    pub(super) fn question(&self) -> Result<Authenticate<'_>, Silence> {
        let EtcdUser { name, password_file } = &self.user;
        let text = std::fs::read_to_string(password_file).map_err(|error| {
            Silence::for_good(format!(
                "cannot read the password of {name} in {}: {error}",
                password_file.display()
            ))
        })?;
        let password = text.lines().next().unwrap_or_default().to_owned();
        Ok(Authenticate { name, password })
    }

    fn known(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What it knows is nobody else's business.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).finish_non_exhaustive()
    }
}
