//! TLS on the TCP listener, and who may reach it.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;

use super::ControllerSection;
use crate::rest::{KnownClient, TlsPolicy};

/// How the API is encrypted over TCP, and who is who by certificate.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct TlsSection {
    /// The controller's certificate and what leads from it to its authority, as PEM.
    pub certificate: PathBuf,
    /// Its key, as PEM.
    pub key: PathBuf,
    /// The authorities whose certificates say who a client is, as PEM; without it, only tokens do.
    #[serde(default)]
    pub client_ca: Option<PathBuf>,
    /// Who is who by certificate. The first that fits is meant.
    #[serde(default, rename = "client")]
    pub clients: Vec<KnownClient>,
}

impl TlsSection {
    /// What the listener needs.
    pub fn policy(&self) -> TlsPolicy {
        let Self { certificate, key, client_ca, clients } = self.clone();
        TlsPolicy { certificate, key, client_ca, clients }
    }
}

/// Whether nobody gets in whom nobody knows, and nothing is said in clear that others can hear.
pub(super) fn check(controller: &ControllerSection) -> Result<(), String> {
    let tls = controller.tls.as_ref();
    if tls.is_some() && controller.listen_tcp.given().is_none() {
        return Err("controller.tls says how TCP is encrypted: set controller.listen-tcp too".to_owned());
    }
    if let Some(tls) = tls
        && tls.client_ca.is_none()
        && !tls.clients.is_empty()
    {
        return Err(
            "controller.tls.client says who is who by certificate: set controller.tls.client-ca to the authority that issues them"
                .to_owned(),
        );
    }
    for client in tls.iter().flat_map(|tls| &tls.clients) {
        let checked = client.role.check_host(client.host.as_deref());
        checked.map_err(|reason| format!("controller.tls.client: {}: {reason}", client.by))?;
    }
    match controller.listen_tcp.given().filter(|address| !address.ip().is_loopback()) {
        Some(address) => check_far(controller, address),
        None => Ok(()),
    }
}

/// Of an address that other hosts reach.
fn check_far(controller: &ControllerSection, address: SocketAddr) -> Result<(), String> {
    if controller.tls.is_none() && !controller.plain_tcp {
        return Err(format!(
            "controller.listen-tcp = {address}: other hosts reach it, and what the API says there would not be encrypted: set \
             [controller.tls], or use a loopback address such as 127.0.0.1:8480; plain-tcp = true allows it all the same"
        ));
    }
    let by_certificate = controller.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    if controller.tokens.is_none() && !by_certificate {
        return Err(format!(
            "controller.listen-tcp = {address}: whoever reaches it might do everything: set controller.tokens or \
             controller.tls.client-ca"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use crate::rest::Role;

    const FILES: &str = "[controller.tls]\ncertificate = '/c'\nkey = '/k'\n";

    fn parse(lines: &str, sections: &str) -> Result<Config, String> {
        let text = format!(
            "[controller]\nstate = '/s'\n{lines}\n{sections}[pool]\npath = '/p'\n[run]\ndirectory = '/run/wadi'\n"
        );
        Config::parse(&text, Path::new("controller.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn other_hosts_need_encryption_and_are_asked_who_they_are() {
        let far = "listen-tcp = '0.0.0.0:80'";
        let tokens = format!("{far}\ntokens = '/t'");
        let ca = format!("{FILES}client-ca = '/ca'\n");
        for (lines, sections, word) in [
            (far, "", "[controller.tls]"),
            (tokens.as_str(), "", "plain-tcp"),
            (far, FILES, "controller.tokens"),
            (&format!("{far}\nplain-tcp = true"), "", "controller.tokens"),
            ("", FILES, "listen-tcp"),
        ] {
            let error = parse(lines, sections).expect_err(lines);
            assert!(error.contains(word), "{lines}: {error}");
        }
        for (lines, sections) in [
            (tokens.as_str(), FILES),
            (far, &ca),
            (&format!("{tokens}\nplain-tcp = true"), ""),
            ("listen-tcp = '127.0.0.1:80'", ""),
            ("listen-tcp = '[::1]:80'", FILES),
        ] {
            parse(lines, sections).unwrap_or_else(|error| panic!("{lines}: {error}"));
        }
    }

    #[test]
    fn clients_are_known_by_the_names_of_their_certificates() {
        let client = |it: &str| format!("{FILES}client-ca = '/ca'\n[[controller.tls.client]]\n{it}\n");
        let listen = "listen-tcp = '127.0.0.1:80'";
        let config = parse(listen, &client("match = 'dns:H1.pod'\nrole = 'host'")).expect("a configuration");
        let clients = config.controller.tls.expect("TLS").policy().clients;
        assert_eq!((clients[0].by.to_string().as_str(), clients[0].role), ("dns:h1.pod", Role::Host));
        parse(listen, &client("match = 'dns:h1'\nrole = 'host'\nhost = 'h1'"))
            .expect("it is bound to its host");
        for (it, word) in [
            ("match = 'h1'\nrole = 'host'", "dns:NAME"),
            ("match = 'dns:'\nrole = 'host'", "dns:NAME"),
            ("match = 'dns:h1'\nrole = 'king'", "king"),
            ("match = 'dns:h1'\nrole = 'operator'\nhost = 'h1'", "binds the role host"),
            ("role = 'host'", "match"),
        ] {
            let error = parse(listen, &client(it)).expect_err(it);
            assert!(error.contains(word), "{it}: {error}");
        }
        let error =
            parse(listen, &client("match = 'cn:a'\nrole = 'host'").replace("client-ca = '/ca'\n", ""));
        assert!(error.expect_err("no authority").contains("client-ca"));
    }
}
