//! What was asked to be changed, by whom, and what became of it; and who was not let in. One line of JSON each, appended.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::Value;

use super::refusals::{Refusals, Verdict};
use super::{Role, TokenError};

/// The most characters of what somebody sent who was not let in.
const REFUSED_CHARS_MAX: usize = 200;

/// A change that somebody asked for, or a request that was refused.
#[derive(Serialize)]
pub(super) struct Entry<'a> {
    /// When it was answered, or ended without, in ms since 1970.
    pub(super) time_ms: u64,
    /// The name of a token, the names of a certificate, the user of a local process, or an address.
    pub(super) who: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<Role>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) from: Option<String>,
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) query: &'a str,
    /// What was sent with it, or the beginning of that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) asked: Option<&'a Value>,
    /// The status of the answer; nothing if whoever asked was not there any more to hear it.
    pub(super) status: Option<u16>,
}

/// That more was refused than is told of.
#[derive(Serialize)]
struct Untold<'a> {
    time_ms: u64,
    from: &'a str,
    /// So many requests more were refused.
    refusals_not_told_of: u64,
}

/// The file to which lines are appended.
struct Lines {
    file: File,
    /// Whether the last one may not be there as a whole.
    torn: bool,
}

pub(super) struct AuditLog {
    path: PathBuf,
    file: Mutex<Lines>,
    refusals: Mutex<Refusals>,
}

impl AuditLog {
    /// Opens or creates the file and its directory; only their owner and group read them.
    pub(super) fn open(path: &Path) -> Result<Self, TokenError> {
        let file = append_to(path).map_err(|source| TokenError::Io { path: path.to_owned(), source })?;
        Ok(Self {
            path: path.to_owned(),
            file: Mutex::new(Lines { file, torn: false }),
            refusals: Mutex::default(),
        })
    }

    /// Goes on in a new file if the old one was moved away. If there can be none, it goes on in the old one.
    pub(super) fn reopen(&self) {
        match append_to(&self.path) {
            Ok(file) => *self.file() = Lines { file, torn: false },
            Err(error) => tracing::error!(
                "the audit log that was open stays: cannot open {}: {error}",
                self.path.display()
            ),
        }
    }

    /// Appends a line. What cannot be written is in our own log at least.
    pub(super) fn note(&self, entry: &Entry<'_>) {
        self.append(entry);
    }

    /// Appends a line about a request that was refused, unless there were many of its origin lately: then a line says
    /// later how many more there were.
    pub(super) fn note_refusal(self: &Arc<Self>, origin: &str, entry: &Entry<'_>) {
        let verdict = self.refusals().take(origin, Instant::now());
        match verdict {
            Verdict::Tell => {
                // A method may be any word, of any length.
                let (method, path, query) = (cut(entry.method), cut(entry.path), cut(entry.query));
                self.append(&Entry { method, path, query, from: entry.from.clone(), ..*entry });
            }
            Verdict::Count(None) => {}
            Verdict::Count(Some(due)) => {
                // Whoever has the log closed does not wait for it.
                let log = Arc::downgrade(self);
                tokio::spawn(async move {
                    tokio::time::sleep_until(due.into()).await;
                    if let Some(log) = log.upgrade() {
                        let over = log.refusals().over(Instant::now());
                        log.sum_up(&over);
                    }
                });
            }
        }
    }

    fn sum_up(&self, untold: &[(String, u64)]) {
        for (from, untold) in untold {
            self.append(&Untold { time_ms: now_ms(), from, refusals_not_told_of: *untold });
        }
    }

    fn append(&self, entry: &impl Serialize) {
        // Text and numbers always become JSON.
        let line = serde_json::to_string(entry).unwrap_or_default();
        let mut lines = self.file();
        // What is left of a line for which there was no room does not take the next one with it.
        let before = if lines.torn { "\n" } else { "" };
        let written = lines.file.write_all(format!("{before}{line}\n").as_bytes());
        lines.torn = written.is_err();
        if let Err(error) = written {
            tracing::error!("cannot write to {}: {error}: {line}", self.path.display());
        }
    }

    /// As when there was no room for the last line.
    #[cfg(test)]
    pub(super) fn tear(&self) {
        self.file().torn = true;
    }

    fn file(&self) -> MutexGuard<'_, Lines> {
        self.file.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refusals(&self) -> MutexGuard<'_, Refusals> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AuditLog {
    /// What has yet to be told is told now.
    fn drop(&mut self) {
        let untold = self.refusals().all();
        self.sum_up(&untold);
    }
}

fn append_to(path: &Path) -> io::Result<File> {
    if let Some(directory) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o750).create(directory)?;
    }
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// The time of day, in ms since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The beginning of a text.
fn cut(text: &str) -> &str {
    text.char_indices().nth(REFUSED_CHARS_MAX).map_or(text, |(end, _)| text.get(..end).unwrap_or(text))
}
