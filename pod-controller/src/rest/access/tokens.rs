//! Tokens and roles. The file has digests of tokens only, so that reading it gives nobody anything; it is read again whenever it
//! changes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::http::Method;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::super::hex::hex;
use crate::file_stamp::FileStamp;

/// What somebody may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Look at everything.
    Viewer,
    /// Look at everything, and let instances move from host to host: what a host's VMM needs.
    Host,
    /// Everything but to say that a host is off, that a host or a device is gone for good, or that a disk's volumes are ours.
    Operator,
    /// Everything.
    Admin,
}

impl Role {
    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Host => "host",
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }

    /// Whether somebody of this role can be bound to a host.
    pub(crate) fn check_host(self, host: Option<&str>) -> Result<(), String> {
        match host {
            Some("") => Err("host = \"\" is no host's name".to_owned()),
            Some(host) if self != Self::Host => {
                Err(format!("host = {host:?} binds the role host, and not {}: leave it out", self.word()))
            }
            _ => Ok(()),
        }
    }

    /// Whether this role may send such a request.
    pub(in super::super) fn may(self, method: &Method, path: &str) -> bool {
        if matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
            return true;
        }
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        match self {
            Self::Admin => true,
            Self::Viewer => false,
            Self::Host => matches!(
                parts.as_slice(),
                ["v1", "instances", _, "migration", ..] | ["v1", "instances", _, "devices", _, "vmm"]
            ),
            // That a host is off or a device gone for good, that a disk's volumes are ours: if that is wrong, data is lost.
            Self::Operator => !matches!(
                parts.as_slice(),
                ["v1", "hosts", _]
                    | ["v1", "hosts", _, "reset"]
                    | ["v1", "devices", _, _]
                    | ["v1", "devices", _, _, "adopt"]
            ),
        }
    }
}

/// Whether such a request makes or ends an instance, or gives it its share of the fabric, as whoever is of the role `host` may where it is bound to
/// one: on that.
pub(in super::super) fn is_about_own_instance(method: &Method, path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        ["v1", "instances"] => *method == Method::POST,
        ["v1", "instances", _] => *method == Method::DELETE,
        ["v1", "mchannels", _] => *method == Method::PUT,
        _ => false,
    }
}

/// Why access cannot be guarded.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// A file cannot be read, or the log not opened.
    #[error("cannot use {}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Its contents make no sense.
    #[error("{} is no list of tokens: {reason}", path.display())]
    Invalid {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// Whose token it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) name: String,
    pub(super) role: Role,
    /// Which host it is bound to.
    pub(super) host: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Contents {
    #[serde(default)]
    token: Vec<Line>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    name: String,
    role: Role,
    #[serde(default)]
    host: Option<String>,
    sha256: String,
}

type Tokens = BTreeMap<String, Token>;

/// The file.
pub(super) struct TokenFile {
    path: PathBuf,
    known: Mutex<(FileStamp, Arc<Tokens>)>,
}

impl TokenFile {
    pub(super) fn open(path: &Path) -> Result<Self, TokenError> {
        let stamp = stamp(path)?;
        Ok(Self { path: path.to_owned(), known: Mutex::new((stamp, Arc::new(read(path)?))) })
    }

    /// Whose token this is.
    pub(super) fn find(&self, presented: &str) -> Option<Token> {
        // Looked up by its digest: how long that takes says nothing about any token.
        let digest = hex(Sha256::digest(presented.as_bytes()));
        self.tokens().get(&digest).cloned()
    }

    /// Reads the file, whether it changed or not.
    pub(super) fn reload(&self) {
        self.known().0 = FileStamp::default();
        self.tokens();
    }

    fn known(&self) -> MutexGuard<'_, (FileStamp, Arc<Tokens>)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tokens(&self) -> Arc<Tokens> {
        let mut known = self.known();
        match stamp(&self.path) {
            Ok(now) if now == known.0 => {}
            Ok(now) => match read(&self.path) {
                Ok(tokens) => {
                    tracing::info!(path = %self.path.display(), "{} tokens are known now", tokens.len());
                    *known = (now, Arc::new(tokens));
                }
                Err(error) => {
                    tracing::error!("the tokens that were known stay: {error}");
                    known.0 = now;
                }
            },
            Err(error) => {
                // Somebody who takes the file away wants nobody to get in.
                if !known.1.is_empty() {
                    tracing::error!("nobody is known by a token any more: {error}");
                    *known = (FileStamp::default(), Arc::default());
                }
            }
        }
        Arc::clone(&known.1)
    }
}

fn stamp(path: &Path) -> Result<FileStamp, TokenError> {
    FileStamp::of(path).map_err(|source| TokenError::Io { path: path.to_owned(), source })
}

fn read(path: &Path) -> Result<Tokens, TokenError> {
    let failed = |source| TokenError::Io { path: path.to_owned(), source };
    let invalid = |reason: String| TokenError::Invalid { path: path.to_owned(), reason };
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o022 != 0 {
        return Err(invalid(format!("others may write to it (mode {:o}): chmod 640", mode & 0o777)));
    }
    let text = fs::read_to_string(path).map_err(failed)?;
    let contents: Contents = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    let mut tokens = Tokens::new();
    for Line { name, role, host, sha256 } in contents.token {
        if name.is_empty() || name.len() > 63 || name.chars().any(char::is_control) {
            return Err(invalid(format!("{name:?} is no name: use 1 to 63 characters")));
        }
        role.check_host(host.as_deref()).map_err(|reason| invalid(format!("{name}: {reason}")))?;
        let digest = sha256.to_ascii_lowercase();
        if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(invalid(format!(
                "the digest of {name} is not 64 hexadecimal digits: printf %s TOKEN | sha256sum"
            )));
        }
        if tokens.insert(digest, Token { name: name.clone(), role, host }).is_some() {
            return Err(invalid(format!("{name} has the token of somebody else")));
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_may_what_they_are_for() {
        let (get, post, put, delete) = (Method::GET, Method::POST, Method::PUT, Method::DELETE);
        for (role, method, path, may) in [
            (Role::Viewer, &get, "/v1/instances", true),
            (Role::Viewer, &post, "/v1/instances", false),
            (Role::Host, &post, "/v1/instances/vm1/migration", true),
            (Role::Host, &delete, "/v1/instances/vm1/migration", true),
            (Role::Host, &post, "/v1/instances/vm1/migration/activate", true),
            (Role::Host, &delete, "/v1/instances/migration", false),
            (Role::Host, &put, "/v1/instances/vm1/devices/vol0/vmm", true),
            (Role::Host, &delete, "/v1/instances/vm1/devices/vol0", false),
            (Role::Host, &put, "/v1/hosts/h1/drain", false),
            (Role::Operator, &put, "/v1/hosts/h1/drain", true),
            (Role::Operator, &delete, "/v1/volumes/vol0", true),
            (Role::Operator, &post, "/v1/hosts/h1/reset", false),
            (Role::Operator, &post, "//v1/hosts//h1/reset/", false),
            (Role::Operator, &delete, "/v1/hosts/h1", false),
            (Role::Operator, &post, "/v1/devices/h2/ssd0/adopt", false),
            (Role::Operator, &delete, "/v1/devices/h2/ssd0", false),
            (Role::Operator, &get, "/v1/devices/h2/ssd0", true),
            (Role::Operator, &put, "/v1/devices/h2/ssd0/drain", true),
            (Role::Admin, &delete, "/v1/hosts/h1", true),
            (Role::Admin, &delete, "/v1/devices/h2/ssd0", true),
        ] {
            assert_eq!(role.may(method, path), may, "{role:?} {method} {path}");
        }
    }

    #[test]
    fn tokens_are_known_by_their_digest_and_the_file_is_read_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("tokens");
        let line = |name: &str, token: &str| {
            let digest = hex(Sha256::digest(token));
            format!("[[token]]\nname = \"{name}\"\nrole = \"operator\"\nsha256 = \"{digest}\"\n")
        };
        let write = |text: &str| {
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
        };
        write(&line("alice", "secret"));
        let file = TokenFile::open(&path).expect("tokens");
        let alice = Token { name: "alice".to_owned(), role: Role::Operator, host: None };
        assert_eq!(
            (file.find("secret"), file.find("Secret"), file.find("")),
            (Some(alice.clone()), None, None)
        );
        write(&format!("{}{}", line("alice", "secret"), line("bob", "other secret")));
        assert_eq!(file.find("other secret").expect("known now").name, "bob");
        // Others could write to it. Who has heard that, and mends it, is obeyed at once.
        fs::write(&path, line("carol", "third secret")).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).expect("a mode");
        assert_eq!((file.find("secret"), file.find("third secret")), (Some(alice.clone()), None));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
        assert_eq!((file.find("secret"), file.find("third secret").is_some()), (None, true));
        write(&line("alice", "secret"));
        assert_eq!(file.find("secret"), Some(alice.clone()));
        // What makes no sense changes nothing; a file that is gone lets nobody in.
        write("token = 7");
        assert_eq!(file.find("secret"), Some(alice));
        fs::remove_file(&path).expect("removed");
        assert_eq!(file.find("secret"), None);
        for bad in [
            "[[token]]\nname = \"\"\nrole = \"admin\"\nsha256 = \"00\"",
            "[[token]]\nname = \"a\"\nrole = \"king\"\nsha256 = \"\"",
            &line("alice", "secret").replace("sha256", "host = \"h1\"\nsha256"),
        ] {
            write(bad);
            assert!(TokenFile::open(&path).is_err(), "{bad}");
        }
        write(&format!("{}{}", line("alice", "secret"), line("bob", "secret")));
        assert!(TokenFile::open(&path).is_err(), "one token for two");
        write(&line("alice", "secret"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("a mode");
        assert!(TokenFile::open(&path).is_err(), "anybody could write to it");
    }
}
