//! Who is a replica: whose certificate the replicas' authority has issued, for the host where it is known to be.

use std::path::Path;
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{ClientConfig, ServerConfig};

use crate::config::{ReplicaAddress, TcpSection};
use crate::tls::{self, TlsError, Watched};

/// Both sides of TLS.
#[derive(Clone)]
pub(super) struct Sides {
    pub(super) server: Arc<ServerConfig>,
    pub(super) client: Arc<ClientConfig>,
}

/// The certificates, as they are now.
pub(in super::super) struct Trust(Watched<Sides>);

impl Trust {
    /// Reads the files.
    pub(in super::super) fn open(section: &TcpSection) -> Result<Self, TlsError> {
        let files = vec![section.certificate.clone(), section.key.clone(), section.ca.clone()];
        let section = section.clone();
        let watched = Watched::open(files, move || read(&section.certificate, &section.key, &section.ca))?;
        Ok(Self(watched))
    }

    /// Reads the files, whether they changed or not.
    pub(in super::super) fn reload(&self) {
        self.0.reload();
    }

    pub(super) fn sides(&self) -> Sides {
        self.0.current()
    }
}

fn read(certificate: &Path, key: &Path, ca: &Path) -> Result<Sides, TlsError> {
    let pair = |source| TlsError::Pair { certificate: certificate.to_owned(), key: key.to_owned(), source };
    let (chain, secret) = (tls::read_chain(certificate)?, tls::read_key(key)?);
    let roots = Arc::new(tls::read_authorities(ca)?);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let verifier = verifier.build().map_err(|error| tls::failed(ca, error.to_string()))?;
    // Nobody speaks to replicas but replicas.
    let versions = &[&rustls::version::TLS13];
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_protocol_versions(versions).map_err(pair)?;
    let builder = builder.with_client_cert_verifier(verifier);
    let mut server = builder.with_single_cert(chain.clone(), secret.clone_key()).map_err(pair)?;
    // Each connection shows certificates anew.
    server.session_storage = Arc::new(NoServerSessionStorage {});
    server.send_tls13_tickets = 0;
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_protocol_versions(versions).map_err(pair)?;
    let builder = builder.with_root_certificates(roots);
    let mut client = builder.with_client_auth_cert(chain, secret).map_err(pair)?;
    client.resumption = Resumption::disabled();
    Ok(Sides { server: Arc::new(server), client: Arc::new(client) })
}

/// The name that the certificate of whoever is there has to have.
pub(super) fn name(address: &ReplicaAddress) -> Result<ServerName<'static>, String> {
    let host = address.host().to_owned();
    ServerName::try_from(host).map_err(|error| format!("{} is no host: {error}", address.host()))
}

/// Whether a certificate, which an authority was found for, is for this host.
pub(super) fn check_name(certificate: &CertificateDer<'_>, address: &ReplicaAddress) -> Result<(), String> {
    let wrong = |error: rustls::Error| {
        format!(
            "its certificate is not for {}, where it is in replication.tcp.addresses: have one issued with that name ({error})",
            address.host()
        )
    };
    let parsed = ParsedCertificate::try_from(certificate).map_err(wrong)?;
    verify_server_name(&parsed, &name(address)?).map_err(wrong)
}
