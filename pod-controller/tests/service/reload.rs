//! A running controller that is told to read its files anew (`SIGHUP`).

use std::fs::{self, File};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::support::authority::{Authority, Pair, write};
use crate::support::network::{addresses, ask_and_stay};
use crate::support::{Pod, until};
use pod_api::client::ClientTls;
use rustix::process::{Pid, Signal, kill_process};
use rustls::{ClientConnection, StreamOwned};

struct Running {
    child: Child,
    log: PathBuf,
    address: SocketAddr,
}

impl Running {
    fn start(pod: &Pod, address: SocketAddr, arguments: &[&str]) -> Self {
        let log = pod.path("controller.log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_pod-controller"));
        command.arg("--config").arg(pod.path("controller.toml")).args(arguments).stdin(Stdio::null());
        let child = command.stderr(File::create(&log).expect("a file")).spawn().expect("it starts");
        Self { child, log, address }
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).expect("its log")
    }

    /// Sends it the signal, and waits until it has said all of this, each once more than before.
    fn reload(&mut self, words: &[&str]) {
        let before = self.said().len();
        kill_process(Pid::from_child(&self.child), Signal::HUP).expect("it runs");
        until(&format!("{words:?}"), || {
            assert_eq!(self.child.try_wait().expect("it is ours"), None, "it ended:\n{}", self.said());
            let said = self.said();
            words.iter().all(|word| said[before..].contains(word)).then_some(())
        });
    }

    /// What podctl says, and whether it worked.
    fn podctl(&self, ca: &Path, who: &[&str]) -> (bool, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_podctl"));
        command.arg("--server").arg(format!("https://{}", self.address)).arg("--ca-file").arg(ca);
        let output = command.args(["hosts", "list"]).args(who).output().expect("podctl starts");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
        // One that has ended needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A new token, and its lines for the file.
fn token(name: &str) -> (String, String) {
    let made = Command::new(env!("CARGO_BIN_EXE_podctl")).args(["token", name, "--role", "viewer"]).output();
    let made = String::from_utf8(made.expect("podctl starts").stdout).expect("text");
    let lines = format!("[[token]]{}", made.split_once("[[token]]").expect("lines").1);
    (made.lines().nth(1).expect("a token").to_owned(), lines)
}

#[test]
fn what_is_read_anew_and_what_stays_where_it_makes_no_sense() {
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let directory = pod.directory.path().to_owned();
    let listen = addresses(2);
    let host = |at: usize| listen[at].ip().to_string();
    let ours = Authority::new(&directory, "ours");
    let api = ours.issue(&directory, "api", &[&host(0)], false);
    let replica = ours.issue(&directory, "replica", &[&host(1)], false);
    let carol = ours.issue(&directory, "carol", &["carol"], false);
    let (tokens, alice_file, bob_file) = (pod.path("tokens"), pod.path("alice"), pod.path("bob"));
    let ((alice, alice_lines), (bob, bob_lines)) = (token("alice"), token("bob"));
    write(&tokens, &alice_lines);
    write(&alice_file, &alice);
    write(&bob_file, &bob);
    let files = |pair: &Pair| {
        let (certificate, key) = (pair.certificate.display(), pair.key.display());
        format!("certificate = '{certificate}'\nkey = '{key}'\n")
    };
    let ca = ours.file.display().to_string();
    let config = |lines: &str, client: &str| {
        format!(
            "listen-tcp = '{}'\ntokens = '{}'\n{lines}\n[controller.tls]\n{}client-ca = '{ca}'\n{client}\n\
             [replication]\nreplica = 0\nheartbeat-ms = 100\nelection-ms = 400\n\
             [replication.tcp]\nlisten = '{}'\naddresses = ['{}']\n{}ca = '{ca}'\n",
            listen[0],
            tokens.display(),
            files(&api),
            listen[1],
            listen[1],
            files(&replica)
        )
    };
    pod.config_with(&config("", ""));
    let mut running = Running::start(&pod, listen[0], &["--bootstrap"]);
    let trust = ours.file.clone();
    let by_token = |file: &Path| vec!["--token-file".to_owned(), file.display().to_string()];
    let by_certificate = |pair: &Pair| {
        let (certificate, key) = (pair.certificate.display().to_string(), pair.key.display().to_string());
        vec!["--cert-file".to_owned(), certificate, "--key-file".to_owned(), key]
    };
    let asks = |running: &Running, who: Vec<String>| {
        running.podctl(&trust, &who.iter().map(String::as_str).collect::<Vec<_>>())
    };
    until("it answers", || asks(&running, by_token(&alice_file)).0.then_some(()));
    assert!(!asks(&running, by_token(&bob_file)).0, "nobody knows bob");
    assert!(!asks(&running, by_certificate(&carol)).0, "nobody knows carol");

    // All that makes no sense: whoever was known is known, with what was read before.
    let rest = fs::read_to_string(pod.path("controller.toml")).expect("the configuration");
    fs::write(pod.path("controller.toml"), rest.replace("detect-ms = 5000", "detect-ms = 1"))
        .expect("written");
    let good: Vec<String> = [&api.certificate, &replica.certificate]
        .into_iter()
        .map(|path| fs::read_to_string(path).expect("a certificate"))
        .collect();
    write(&tokens, "token = 7");
    write(&api.certificate, "no certificate");
    write(&replica.certificate, "no certificate");
    let (api_path, replica_path) =
        (api.certificate.display().to_string(), replica.certificate.display().to_string());
    running.reload(&[
        "the configuration that was known stays",
        "detect-ms = 1",
        "the tokens that were known stay",
        "the certificates that were known stay",
        &api_path,
        &replica_path,
    ]);
    let (fine, said) = asks(&running, by_token(&alice_file));
    assert!(fine, "{said}");

    // All that does.
    write(&tokens, &format!("{alice_lines}{bob_lines}"));
    write(&api.certificate, &good[0]);
    write(&replica.certificate, &good[1]);
    let client = "[[controller.tls.client]]\nmatch = 'cn:carol'\nrole = 'viewer'\n";
    fs::write(
        pod.path("controller.toml"),
        rest.replace("[replication]\n", &format!("{client}[balance]\nhigh-percent = 71\n[replication]\n")),
    )
    .expect("written");
    running.reload(&["the configuration was read anew", "2 tokens are known now", &api_path, &replica_path]);
    for who in [by_token(&alice_file), by_token(&bob_file), by_certificate(&carol)] {
        let (fine, said) = asks(&running, who);
        assert!(fine, "{said}");
    }
    assert!(!running.said().contains("with a restart"), "nothing else has changed");
    assert_eq!(pod.client().balance().expect("an answer").high_percent, 71);

    // What is logged, and what cannot be changed by this.
    assert!(!running.said().contains("DEBUG"), "it is not told");
    let lines = rest.replace("detect-ms = 5000", "detect-ms = 4000\nlog = 'debug'");
    fs::write(pod.path("controller.toml"), lines).expect("written");
    running.reload(&["takes effect with a restart", "the configuration was read anew"]);
    until("more is told", || {
        asks(&running, by_token(&alice_file));
        running.said().contains("DEBUG").then_some(())
    });
    assert!(!asks(&running, by_certificate(&carol)).0, "she is not known any more");
    fs::write(
        pod.path("controller.toml"),
        rest.replace("detect-ms = 5000", "detect-ms = 5000\nlog = 'loud'"),
    )
    .expect("written");
    running.reload(&["controller.log", "the configuration that was known stays"]);
}

#[test]
fn the_audit_log_goes_on_in_a_new_file_once_the_old_one_was_moved() {
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let log = pod.path("log/audit.jsonl");
    pod.config_with(&format!("audit-log = '{}'", log.display()));
    let mut running = Running::start(&pod, addresses(1)[0], &[]);
    until("it answers", || pod.client().hosts().ok());
    // Whatever would change something is written down.
    let change = |name: &str| pod.client().delete_volume(name).expect_err("there is no such volume");
    let written = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    change("before");
    let moved = pod.path("log/audit.jsonl.1");
    fs::rename(&log, &moved).expect("renamed");
    running.reload(&["the configuration was read anew"]);
    until("a new file", || log.exists().then_some(()));
    change("after");
    assert!(written(&moved).contains("before") && !written(&moved).contains("after"), "{}", written(&moved));
    assert!(written(&log).contains("after") && !written(&log).contains("before"), "{}", written(&log));

    // Where there can be none, the old one stays.
    let moved = pod.path("log/audit.jsonl.2");
    fs::rename(&log, &moved).expect("renamed");
    fs::create_dir(&log).expect("a directory");
    running.reload(&["the audit log that was open stays"]);
    change("nowhere-else");
    assert!(written(&moved).contains("nowhere-else"), "{}", written(&moved));
}

#[test]
fn a_certificate_is_worth_nothing_any_more_on_the_connection_that_it_keeps() {
    let mut pod = Pod::new_in_file();
    pod.stop_controller();
    let directory = pod.directory.path().to_owned();
    let listen = addresses(1)[0];
    let (ours, others) = (Authority::new(&directory, "ours"), Authority::new(&directory, "others"));
    let api = ours.issue(&directory, "api", &[&listen.ip().to_string()], false);
    let carol = ours.issue(&directory, "carol", &["carol"], false);
    let clients = pod.path("clients.pem");
    let ca = |authorities: &[&Authority]| {
        let files = authorities.iter().map(|it| fs::read_to_string(&it.file).expect("an authority"));
        write(&clients, &files.collect::<String>());
    };
    ca(&[&ours]);
    let config = |client: &str| {
        pod.config_with(&format!(
            "listen-tcp = '{listen}'\n[controller.tls]\ncertificate = '{}'\nkey = '{}'\nclient-ca = '{}'\n{client}",
            api.certificate.display(),
            api.key.display(),
            clients.display()
        ));
    };
    let known = "[[controller.tls.client]]\nmatch = 'cn:carol'\nrole = 'viewer'\n";
    config(known);
    let mut running = Running::start(&pod, listen, &[]);
    until("it answers", || pod.client().hosts().ok());

    let tls = ClientTls {
        ca_file: Some(ours.file.clone()),
        cert_file: Some(carol.certificate.clone()),
        key_file: Some(carol.key.clone()),
    };
    let connect = || {
        let stream = TcpStream::connect(listen).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_mins(1))).expect("a timeout");
        let name = listen.ip().into();
        let tls = ClientConnection::new(Arc::new(tls.config().expect("good files")), name).expect("TLS");
        StreamOwned::new(tls, stream)
    };
    let mut kept = connect();
    let path = "/v1/hosts";
    assert_eq!(ask_and_stay(&mut kept, path, "").0, 200);

    let again = "the configuration was read anew";
    config("");
    running.reload(&[again, "the certificates were read anew"]);
    let (status, said) = ask_and_stay(&mut kept, path, "");
    assert!(status == 401 && said.contains("controller.tls.client"), "{said}");
    config(known);
    running.reload(&[again, "the certificates were read anew"]);
    assert_eq!(ask_and_stay(&mut kept, path, "").0, 200, "she is known again");

    // One more authority is nothing to her; without hers, she has to come anew.
    ca(&[&others, &ours]);
    assert_eq!(ask_and_stay(&mut kept, path, "").0, 200);
    ca(&[&others]);
    let (status, said) = ask_and_stay(&mut kept, path, "");
    assert!(status == 401 && said.contains("client-ca") && said.contains("connection: close"), "{said}");
    ca(&[&ours]);
    assert_eq!(ask_and_stay(&mut connect(), path, "").0, 200);
}
