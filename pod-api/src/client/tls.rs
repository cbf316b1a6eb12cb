//! The client's side of TLS: whom it trusts, and who it is.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use rustls::client::WantsClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    AlertDescription, CertificateError, ClientConfig, ConfigBuilder, InvalidMessage, RootCertStore,
};

use super::{CONTROLLER, ClientError};

/// Whom a client trusts over `https`, and who it is.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// The authority that issued the controller's certificate, as PEM; needed for https
    #[arg(long, global = true, env = "WADI_CA_FILE", help_heading = CONTROLLER, value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Your certificate, as PEM, for a controller that knows you by it
    #[arg(long, global = true, env = "WADI_CERT_FILE", help_heading = CONTROLLER, value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,
    /// The key of your certificate, as PEM
    #[arg(long, global = true, env = "WADI_KEY_FILE", help_heading = CONTROLLER, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
}

impl ClientTls {
    /// The library's configuration.
    pub fn config(&self) -> Result<ClientConfig, ClientError> {
        let failed = |reason: String| ClientError::SetUp(io::Error::other(reason));
        let Some(ca) = &self.ca_file else {
            return Err(failed(
                "https needs to know whom to trust: say --ca-file with the authority of the controller"
                    .to_owned(),
            ));
        };
        let mut roots = RootCertStore::empty();
        for authority in read_certificates(ca)? {
            let added = roots.add(authority);
            added.map_err(|error| failed(format!("{} is no authority's: {error}", ca.display())))?;
        }
        let builder = trusting(roots)?;
        match (&self.cert_file, &self.key_file) {
            (Some(certificate), Some(key)) => {
                let secret = PrivateKeyDer::from_pem_file(key)
                    .map_err(|error| failed(format!("cannot use the key in {}: {error}", key.display())))?;
                builder.with_client_auth_cert(read_certificates(certificate)?, secret).map_err(|error| {
                    let (certificate, key) = (certificate.display(), key.display());
                    failed(format!("{certificate} and {key} do not belong together: {error}"))
                })
            }
            _ => Ok(builder.with_no_client_auth()),
        }
    }

    /// The library's configuration for connections without TLS.
    pub fn trusting_nobody() -> Result<ClientConfig, ClientError> {
        Ok(trusting(RootCertStore::empty())?.with_no_client_auth())
    }
}

fn trusting(roots: RootCertStore) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>, ClientError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| ClientError::SetUp(io::Error::other(error)))?;
    Ok(builder.with_root_certificates(roots))
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ClientError> {
    let failed = |reason: String| {
        ClientError::SetUp(io::Error::other(format!("cannot use {}: {reason}", path.display())))
    };
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.map_err(|error| failed(error.to_string()))?;
    if certificates.is_empty() {
        return Err(failed("there is no certificate in it".to_owned()));
    }
    Ok(certificates)
}

/// What went wrong with TLS, and what to do, if that is what went wrong.
pub(super) fn explain(error: &(dyn Error + 'static)) -> Option<String> {
    if let Some(found) = error.downcast_ref() {
        return Some(advice(found));
    }
    // An I/O error does not name what it carries as its source, but that one's source.
    let carried = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let carried = carried.and_then(|inner| explain(inner));
    carried.or_else(|| error.source().and_then(explain))
}

fn advice(error: &rustls::Error) -> String {
    use rustls::Error as Tls;
    let what_to_do = match error {
        Tls::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "its certificate has expired, or the clock here is wrong: have the controller's certificate renewed"
        }
        Tls::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => {
            "its certificate is for another name: use a name that is in it, or have one issued for this name"
        }
        Tls::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "its certificate is of an authority that --ca-file does not have: use the file of the authority that issued it"
        }
        Tls::AlertReceived(AlertDescription::CertificateExpired) => {
            "it refuses our certificate, which has expired: renew the one of --cert-file"
        }
        Tls::AlertReceived(
            AlertDescription::UnknownCA
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::DecryptError
            | AlertDescription::UnsupportedCertificate,
        ) => {
            "it refuses our certificate: --cert-file must be of an authority that controller.tls.client-ca has, and be made for clients"
        }
        Tls::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "it does not speak TLS there: write http:// instead of https://"
        }
        _ => return format!("TLS failed: {error}"),
    };
    format!("{what_to_do} ({error})")
}
