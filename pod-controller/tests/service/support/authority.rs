//! Certificates for tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// An authority, and what it issues.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub(crate) file: PathBuf,
}

/// A certificate's file and its key's.
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Authority {
    pub(crate) fn new(directory: &Path, name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let file = directory.join(format!("{name}.pem"));
        fs::write(&file, params.self_signed(&key).expect("a certificate").pem()).expect("written");
        Self { issuer: Issuer::new(params, key), file }
    }

    /// For these names, of which the first is the common name too. One that has expired did so in 2020.
    pub(crate) fn issue(&self, directory: &Path, file: &str, names: &[&str], expired: bool) -> Pair {
        let names: Vec<String> = names.iter().map(|it| (*it).to_owned()).collect();
        let mut params = CertificateParams::new(names.clone()).expect("parameters");
        params.distinguished_name.push(DnType::CommonName, names[0].as_str());
        if expired {
            params.not_before = rcgen::date_time_ymd(2019, 1, 1);
            params.not_after = rcgen::date_time_ymd(2020, 1, 1);
        }
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let pair = Pair {
            certificate: directory.join(format!("{file}.pem")),
            key: directory.join(format!("{file}.key")),
        };
        // The key first: until both are there, the controller keeps what it had.
        write(&pair.key, &key.serialize_pem());
        write(&pair.certificate, &certificate.pem());
        pair
    }
}

/// As a whole, and the key for nobody else.
pub(crate) fn write(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).expect("written");
    fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).expect("a mode");
    fs::rename(&new, path).expect("renamed");
}
