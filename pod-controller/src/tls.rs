//! Certificates and keys in files: read when they are needed first, and again when they change, so that they are renewed without a
//! restart.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use crate::file_stamp::FileStamp;

/// Why TLS cannot be spoken.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot use {} for TLS: {reason}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The files do not belong together, or cannot be used.
    #[error("cannot speak TLS with {} and {}: {source}; is that the key of that certificate?", certificate.display(), key.display())]
    Pair {
        /// Which certificate.
        certificate: PathBuf,
        /// Which key.
        key: PathBuf,
        /// What the library says.
        source: rustls::Error,
    },
}

/// What tells that files changed; nothing of one that is not there.
type Stamp = Vec<Option<FileStamp>>;
type Read<T> = dyn Fn() -> Result<T, String> + Send + Sync;

/// What is made of files, and made anew when they change.
pub(crate) struct Watched<T> {
    files: Vec<PathBuf>,
    read: Box<Read<T>>,
    known: Mutex<(Stamp, T)>,
}

impl<T: Clone> Watched<T> {
    /// Reads the files.
    pub(crate) fn open<E: fmt::Display>(
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let stamp = stamp(&files);
        let known = Mutex::new((stamp, read()?));
        let read = Box::new(move || read().map_err(|error| error.to_string()));
        Ok(Self { files, read, known })
    }

    /// As the files are now. Files that make no sense leave what was known.
    pub(crate) fn current(&self) -> T {
        let mut known = self.known();
        if stamp(&self.files) != known.0 {
            self.renew(&mut known);
        }
        known.1.clone()
    }

    /// Reads the files, whether they changed or not.
    pub(crate) fn reload(&self) {
        self.renew(&mut self.known());
    }

    fn renew(&self, known: &mut (Stamp, T)) {
        // Whatever is wrong now is told once, and tried again with the next change: a certificate and its key are seldom
        // renewed in the same moment.
        known.0 = stamp(&self.files);
        let path = self.files.first().map(|first| first.display().to_string()).unwrap_or_default();
        match (self.read)() {
            Ok(read) => {
                tracing::info!(path, "the certificates were read anew");
                known.1 = read;
            }
            Err(error) => tracing::error!("the certificates that were known stay: {error}"),
        }
    }

    fn known(&self) -> MutexGuard<'_, (Stamp, T)> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stamp(files: &[PathBuf]) -> Stamp {
    files.iter().map(|path| FileStamp::of(path).ok()).collect()
}

/// A certificate and what leads from it to its authority.
pub(crate) fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let chain = read_certificates(path)?;
    if let Some(expired) = chain.first().and_then(expired) {
        let path = path.display();
        tracing::error!("the certificate in {path} {expired}: others refuse it; put a new one in its place");
    }
    Ok(chain)
}

/// Whoever is trusted to say who somebody is.
pub(crate) fn read_authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for authority in read_certificates(path)? {
        roots.add(authority).map_err(|error| failed(path, format!("it is no authority's: {error}")))?;
    }
    Ok(roots)
}

/// A key that not everybody may read.
pub(crate) fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let mode = fs::metadata(path).map_err(|error| unreadable(path, &error))?.permissions().mode();
    if mode & 0o007 != 0 {
        return Err(failed(path, format!("everybody may use the key (mode {:o}): chmod 640", mode & 0o777)));
    }
    let pem = fs::read(path).map_err(|error| unreadable(path, &error))?;
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|error| failed(path, format!("there is no private key in it as PEM: {error}")))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = fs::read(path).map_err(|error| unreadable(path, &error))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| failed(path, format!("it is no PEM: {error}")))?;
    if certificates.is_empty() {
        let reason = "there is no certificate in it: it must begin with BEGIN CERTIFICATE".to_owned();
        return Err(failed(path, reason));
    }
    Ok(certificates)
}

/// Since or until when a certificate does not hold, if it does not hold now.
fn expired(der: &CertificateDer<'_>) -> Option<String> {
    let (_, certificate) = X509Certificate::from_der(der).ok()?;
    let validity = certificate.validity();
    let now = x509_parser::time::ASN1Time::now();
    if now > validity.not_after {
        return Some(format!("has expired on {}", validity.not_after));
    }
    (now < validity.not_before).then(|| format!("does not hold before {}", validity.not_before))
}

pub(crate) fn failed(path: &Path, reason: String) -> TlsError {
    TlsError::File { path: path.to_owned(), reason }
}

fn unreadable(path: &Path, error: &io::Error) -> TlsError {
    failed(path, format!("{error}; check the path in the configuration, and the file's permissions"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_made_secret_is_read_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("key");
        let write = |text: &str, mode: u32| {
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("a mode");
        };
        write("one", 0o640);
        let watched = Watched::open(vec![path.clone()], {
            let path = path.clone();
            move || {
                let mode = fs::metadata(&path).expect("it is there").permissions().mode();
                if mode & 0o007 != 0 {
                    return Err("chmod 640");
                }
                Ok(fs::read_to_string(&path).expect("text"))
            }
        });
        let watched = watched.expect("as it should be");
        write("another", 0o644);
        assert_eq!(watched.current(), "one", "everybody may use the other one");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("a mode");
        assert_eq!(watched.current(), "another");
    }
}
