//! Where an etcd keeps the state.

use std::path::PathBuf;

use pod_api::client::ClientTls;
use serde::Deserialize;

use super::Config;
use crate::store::etcd::{EtcdAddress, EtcdCredentials, EtcdUser};

/// How an etcd is spoken to. The files are read anew when they change.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct EtcdSection {
    /// The authority that issued the members' certificates, as PEM.
    pub ca_file: Option<PathBuf>,
    /// The controller's certificate, as PEM, where etcd asks for one.
    pub cert_file: Option<PathBuf>,
    /// Its key, as PEM.
    pub key_file: Option<PathBuf>,
    /// Who the controller is, where etcd has users.
    pub user: Option<String>,
    /// A file whose first line is the user's password.
    pub password_file: Option<PathBuf>,
}

impl Config {
    /// The etcd that keeps the state, if there is one, and how it is spoken to.
    pub fn etcd(&self) -> Result<Option<(&EtcdAddress, EtcdCredentials)>, String> {
        let Some(address) = &self.controller.store else {
            return if self.etcd.is_some() {
                Err("etcd says how an etcd is spoken to: set controller.store to its address too".to_owned())
            } else {
                Ok(None)
            };
        };
        if self.replication.is_some() {
            return Err("controller.store and [replication] are two ways to keep the state: use one of them"
                .to_owned());
        }
        let EtcdSection { ca_file, cert_file, key_file, user, password_file } =
            self.etcd.clone().unwrap_or_default();
        if address.tls() != ca_file.is_some() {
            return Err(format!(
                "controller.store = {address}: etcds:// needs etcd.ca-file with the authority of its members, and etcd:// \
                 has no use for it"
            ));
        }
        if cert_file.is_some() != key_file.is_some() || cert_file.is_some() && !address.tls() {
            return Err("etcd.cert-file and etcd.key-file belong together, and to etcds://".to_owned());
        }
        let user = match (user, password_file) {
            (Some(name), Some(password_file)) => Some(EtcdUser { name, password_file }),
            (None, None) => None,
            _ => return Err("etcd.user and etcd.password-file belong together".to_owned()),
        };
        Ok(Some((address, EtcdCredentials { tls: ClientTls { ca_file, cert_file, key_file }, user })))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;

    fn parse(store: &str, sections: &str) -> Result<Config, String> {
        let text = format!(
            "[controller]\nstate = '/s'\n{store}\n[pool]\npath = '/p'\n[run]\ndirectory = '/run/wadi'\n{sections}"
        );
        Config::parse(&text, Path::new("controller.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn store_and_how_it_is_spoken_to_fit() {
        let (plain, tls) = ("store = 'etcd://a:1/p'", "store = 'etcds://a:1/p'");
        let ca = "[etcd]\nca-file = '/ca'\n";
        for (store, sections, word) in [
            ("store = 'http://a:1/p'", "", "etcd://HOST:2379"),
            (plain, "[replication]\nreplica = 0\n", "[replication]"),
            (tls, "", "etcd.ca-file"),
            (plain, ca, "etcd.ca-file"),
            (tls, &format!("{ca}cert-file = '/c'\n"), "belong together"),
            (plain, "[etcd]\ncert-file = '/c'\nkey-file = '/k'\n", "belong together"),
            (plain, "[etcd]\nuser = 'wadi'\n", "etcd.password-file belong together"),
            (plain, "[etcd]\npassword-file = '/p'\n", "etcd.password-file belong together"),
            ("", ca, "controller.store"),
        ] {
            let error = parse(store, sections).expect_err(store);
            assert!(error.contains(word), "{store} {sections}: {error}");
        }
        let both = format!("{ca}cert-file = '/c'\nkey-file = '/k'\n");
        let user = "[etcd]\nuser = 'wadi'\npassword-file = '/p'\n";
        for (store, sections) in [(plain, ""), (plain, user), (tls, ca), (tls, both.as_str()), ("", "")] {
            parse(store, sections).unwrap_or_else(|error| panic!("{store} {sections}: {error}"));
        }
    }
}
