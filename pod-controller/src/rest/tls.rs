//! TLS on the TCP listener. The files are read again when they change, so that certificates are renewed without a restart; a client
//! that has no certificate of a known authority must bring a token.

mod certificate;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::connection;
pub(super) use certificate::{Certificate, Identity};
pub use certificate::{CertificateName, KnownClient, ParseCertificateNameError};

/// How long a client may take for its handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The first byte of every TLS connection.
const HANDSHAKE_RECORD: u8 = 0x16;
/// How often it is told that a handshake failed.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// What is configured of TLS.
#[derive(Clone, Debug)]
pub struct TlsPolicy {
    /// The controller's certificate and what leads from it to its authority, as PEM.
    pub certificate: PathBuf,
    /// Its key, as PEM.
    pub key: PathBuf,
    /// The authorities whose certificates say who a client is, as PEM; none: only tokens do.
    pub client_ca: Option<PathBuf>,
    /// Who is who by certificate.
    pub clients: Vec<KnownClient>,
}

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

/// What tells that files changed: when they did, their lengths and numbers; nothing of one that is not there.
type Stamp = Vec<Option<(i64, i64, u64, u64)>>;

/// The server's side of TLS.
pub(super) struct Tls {
    policy: TlsPolicy,
    known: Mutex<(Stamp, Arc<ServerConfig>)>,
    told: Mutex<Option<Instant>>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    pub(super) fn open(policy: TlsPolicy) -> Result<Self, TlsError> {
        let stamp = stamp(&policy);
        let config = Arc::new(read(&policy)?);
        Ok(Self { policy, known: Mutex::new((stamp, config)), told: Mutex::default() })
    }

    /// The certificates as they are now. Files that make no sense leave those that were known.
    fn config(&self) -> Arc<ServerConfig> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamp(&self.policy);
        if now != known.0 {
            // Whatever is wrong now is told once, and tried again with the next change: a certificate and its key are seldom
            // renewed in the same moment.
            known.0 = now;
            match read(&self.policy) {
                Ok(config) => {
                    tracing::info!(path = %self.policy.certificate.display(), "the certificates were read anew");
                    known.1 = Arc::new(config);
                }
                Err(error) => tracing::error!("the certificates that were known stay: {error}"),
            }
        }
        Arc::clone(&known.1)
    }

    /// Shakes hands with a client, and says who it is by its certificate if it has one. Nothing if it does not get that far: then it
    /// was told why, as far as it can be told.
    pub(super) async fn greet(
        &self,
        mut stream: TcpStream,
    ) -> Option<(TlsStream<TcpStream>, Option<Arc<Certificate>>)> {
        let greeted = tokio::time::timeout(HANDSHAKE_TIMEOUT, async {
            let mut first = [0];
            if stream.peek(&mut first).await? == 1 && first[0] != HANDSHAKE_RECORD {
                let detail = "here the API speaks TLS: write https:// instead of http://";
                let refusal = connection::refusal(StatusCode::BAD_REQUEST, detail.to_owned());
                stream.write_all(&refusal).await?;
                // Closed with something unread, the answer would be lost on its way.
                stream.shutdown().await?;
                let mut rest = [0; 4096];
                while tokio::io::AsyncReadExt::read(&mut stream, &mut rest).await? > 0 {}
                return Ok(None);
            }
            TlsAcceptor::from(self.config()).accept(stream).await.map(Some)
        });
        match greeted.await {
            Ok(Ok(Some(stream))) => {
                let presented = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
                let certificate = presented.map(|der| Arc::new(Certificate::read(der, &self.policy.clients)));
                Some((stream, certificate))
            }
            Ok(Ok(None)) => None,
            Ok(Err(error)) => {
                self.tell(&error.to_string());
                None
            }
            Err(_) => {
                self.tell("it was not done in time");
                None
            }
        }
    }

    /// Whoever reaches the port can make handshakes fail: not all of it is told.
    fn tell(&self, reason: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_none_or(|at| at.elapsed() >= TOLD_EVERY) {
            *told = Some(Instant::now());
            tracing::info!("a client's TLS handshake failed: {reason}");
        }
    }
}

fn stamp(policy: &TlsPolicy) -> Stamp {
    let files = [Some(&policy.certificate), Some(&policy.key), policy.client_ca.as_ref()];
    let stamp = |path: &PathBuf| {
        let it = fs::metadata(path).ok()?;
        Some((it.mtime(), it.mtime_nsec(), it.len(), it.ino()))
    };
    files.into_iter().flatten().map(stamp).collect()
}

fn read(policy: &TlsPolicy) -> Result<ServerConfig, TlsError> {
    let pair =
        |source| TlsError::Pair { certificate: policy.certificate.clone(), key: policy.key.clone(), source };
    let chain = read_certificates(&policy.certificate)?;
    let expires = chain.first().and_then(|first| certificate::expired(first));
    if let Some(expired) = expires {
        let path = policy.certificate.display();
        tracing::error!("the certificate in {path} {expired}: clients refuse it; put a new one in its place");
    }
    let key = read_key(&policy.key)?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(pair)?;
    let builder = match &policy.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let failed = |reason: String| TlsError::File { path: path.clone(), reason };
            let mut roots = RootCertStore::empty();
            for authority in read_certificates(path)? {
                roots.add(authority).map_err(|error| failed(format!("it is no authority's: {error}")))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = verifier.allow_unauthenticated().build();
            builder.with_client_cert_verifier(verifier.map_err(|error| failed(error.to_string()))?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Who resumed a session would be who he was when it began, whatever has become of his certificate.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |reason: String| TlsError::File { path: path.to_owned(), reason };
    let pem = fs::read(path).map_err(|error| failed(unreadable(&error)))?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let certificates = certificates.map_err(|error| failed(format!("it is no PEM: {error}")))?;
    if certificates.is_empty() {
        return Err(failed("there is no certificate in it: it must begin with BEGIN CERTIFICATE".to_owned()));
    }
    Ok(certificates)
}

fn read_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let failed = |reason: String| TlsError::File { path: path.to_owned(), reason };
    let mode = fs::metadata(path).map_err(|error| failed(unreadable(&error)))?.permissions().mode();
    if mode & 0o007 != 0 {
        return Err(failed(format!("everybody may use the key (mode {:o}): chmod 640", mode & 0o777)));
    }
    let pem = fs::read(path).map_err(|error| failed(unreadable(&error)))?;
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|error| failed(format!("there is no private key in it as PEM: {error}")))
}

fn unreadable(error: &io::Error) -> String {
    format!("{error}; check controller.tls in the configuration, and the file's permissions")
}

#[cfg(test)]
mod tests;
