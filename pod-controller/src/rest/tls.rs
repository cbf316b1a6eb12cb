//! TLS on the TCP listener. The files are read again when they change, so that certificates are renewed without a restart; a client
//! that has no certificate of a known authority must bring a token. Who somebody is by certificate is looked up for each request: a
//! connection lasts longer than what is known.

mod certificate;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use rustls::ServerConfig;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::connection;
pub use crate::tls::TlsError;
use crate::tls::{self, Watched};
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

/// The server's side of TLS.
pub(super) struct Tls {
    policy: TlsPolicy,
    known: Watched<Arc<Known>>,
    /// Who is who by certificate.
    clients: Mutex<Arc<[KnownClient]>>,
    told: Mutex<Option<Instant>>,
}

/// What was made of the files.
struct Known {
    config: Arc<ServerConfig>,
    /// Who verifies clients' certificates, if that is asked for.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Tls {
    /// Reads the files.
    pub(super) fn open(policy: TlsPolicy) -> Result<Self, TlsError> {
        let files = [Some(&policy.certificate), Some(&policy.key), policy.client_ca.as_ref()];
        let files = files.into_iter().flatten().cloned().collect();
        let known = Watched::open(files, {
            let policy = policy.clone();
            move || read(&policy).map(Arc::new)
        })?;
        let clients = Mutex::new(policy.clients.as_slice().into());
        Ok(Self { policy, known, clients, told: Mutex::default() })
    }

    /// Reads the files, whether they changed or not. From now on these are who is who by certificate.
    pub(super) fn reload(&self, clients: &[KnownClient]) {
        *self.clients.lock().unwrap_or_else(PoisonError::into_inner) = clients.into();
        self.known.reload();
    }

    fn clients(&self) -> Arc<[KnownClient]> {
        Arc::clone(&self.clients.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Shakes hands with a client, and says who it is by its certificate if it has one. Nothing if it does not get that far: then it
    /// was told why, as far as it can be told.
    pub(super) async fn greet(
        self: &Arc<Self>,
        mut stream: TcpStream,
    ) -> Option<(TlsStream<TcpStream>, Option<Arc<Certificate>>)> {
        let known = self.known.current();
        let acceptor = TlsAcceptor::from(Arc::clone(&known.config));
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
            acceptor.accept(stream).await.map(Some)
        });
        match greeted.await {
            Ok(Ok(Some(stream))) => {
                let presented = stream.get_ref().1.peer_certificates();
                let certificate = presented.and_then(|chain| Certificate::read(chain, self, known));
                Some((stream, certificate.map(Arc::new)))
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

fn read(policy: &TlsPolicy) -> Result<Known, TlsError> {
    let pair =
        |source| TlsError::Pair { certificate: policy.certificate.clone(), key: policy.key.clone(), source };
    let (chain, key) = (tls::read_chain(&policy.certificate)?, tls::read_key(&policy.key)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(pair)?;
    let verifier: Option<Arc<dyn ClientCertVerifier>> = match &policy.client_ca {
        None => None,
        Some(path) => {
            let roots = Arc::new(tls::read_authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider);
            let verifier = verifier.allow_unauthenticated().build();
            Some(verifier.map_err(|error| tls::failed(path, error.to_string()))?)
        }
    };
    let builder = match &verifier {
        None => builder.with_no_client_auth(),
        Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
    };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Who resumed a session would be who he was when it began, whatever has become of his certificate.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Known { config: Arc::new(config), verifier })
}

#[cfg(test)]
mod tests;
