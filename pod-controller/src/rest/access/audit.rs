//! What was asked to be changed, by whom, and what became of it: one line of JSON each, appended.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::{Role, TokenError};

/// A change that somebody asked for.
#[derive(Serialize)]
pub(super) struct Entry<'a> {
    /// When it was answered, in ms since 1970.
    pub(super) time_ms: u64,
    /// The name of a token, the user of a local process, or an address.
    pub(super) who: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<Role>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from: Option<String>,
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) query: &'a str,
    /// The status of the answer.
    pub(super) status: u16,
}

pub(super) struct AuditLog {
    path: PathBuf,
    file: Mutex<File>,
}

impl AuditLog {
    /// Opens or creates the file; only its owner and group read it.
    pub(super) fn open(path: &Path) -> Result<Self, TokenError> {
        let file = OpenOptions::new().append(true).create(true).mode(0o640).open(path);
        let file = file.map_err(|source| TokenError::Io { path: path.to_owned(), source })?;
        Ok(Self { path: path.to_owned(), file: Mutex::new(file) })
    }

    /// Appends a line. What cannot be written is in our own log at least.
    pub(super) fn note(&self, entry: &Entry<'_>) {
        // Text and numbers always become JSON.
        let mut line = serde_json::to_string(entry).unwrap_or_default();
        line.push('\n');
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(line.as_bytes()) {
            tracing::error!("cannot write to {}: {error}: {}", self.path.display(), line.trim_end());
        }
    }
}
