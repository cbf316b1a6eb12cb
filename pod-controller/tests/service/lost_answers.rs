//! `podctl` where the controller does not answer as it does on a good day.

use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::support::Pod;

/// What becomes of an answer.
#[derive(Clone)]
enum Fate {
    /// It arrives.
    Arrives,
    /// The connection ends without it.
    Lost,
    /// This arrives in its place; whether what was asked for is done before says the flag.
    Replaced(String, bool),
}

/// Stands between a client and a controller.
struct Between {
    socket: PathBuf,
    /// What was asked, with all of its head.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Between {
    /// Treats the answers so, one after the other, and lets all others arrive.
    fn new(pod: &Pod, fates: Vec<Fate>) -> Self {
        let (socket, controller) = (pod.path("between.sock"), pod.socket());
        let listener = UnixListener::bind(&socket).expect("a socket");
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard = Arc::clone(&asked);
        // It ends with the test's process.
        thread::spawn(move || {
            let mut fates = fates.into_iter();
            for near in listener.incoming().flatten() {
                let request = request(&near);
                heard.lock().expect("no panic").push(request.clone());
                let fate = fates.next().unwrap_or(Fate::Arrives);
                let answer = match fate {
                    Fate::Replaced(answer, false) => answer,
                    Fate::Replaced(answer, true) => {
                        passed_on(&controller, &request);
                        answer
                    }
                    Fate::Lost => {
                        passed_on(&controller, &request);
                        String::new()
                    }
                    Fate::Arrives => passed_on(&controller, &request),
                };
                let mut near = near;
                // Who has gone does not hear it.
                let _ = near.write_all(answer.as_bytes());
                let _ = near.shutdown(Shutdown::Both);
            }
        });
        Self { socket, asked }
    }

    fn podctl(&self, arguments: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_podctl"));
        command.arg("--server").arg(format!("unix:{}", self.socket.display()));
        command.args(arguments.split_whitespace()).output().expect("podctl starts")
    }

    /// The keys of the requests that change something, in their order.
    fn keys(&self) -> Vec<Option<String>> {
        let asked = self.asked.lock().expect("no panic");
        let changes = asked.iter().filter(|request| !request.starts_with("GET "));
        let key = |request: &String| {
            let mut lines = request.lines();
            lines.find_map(|line| line.strip_prefix("idempotency-key: ")).map(str::to_owned)
        };
        changes.map(key).collect()
    }
}

/// A whole request: its head, and as much body as that says.
fn request(stream: &UnixStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut request = String::new();
    while !request.ends_with("\r\n\r\n") && reader.read_line(&mut request).expect("a line") > 0 {}
    let length = request.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().expect("a number"))];
    reader.read_exact(&mut body).expect("a body");
    request.push_str(&String::from_utf8(body).expect("text"));
    request
}

/// What the controller says to that.
fn passed_on(controller: &Path, request: &str) -> String {
    let ask = || -> io::Result<String> {
        let mut stream = UnixStream::connect(controller)?;
        stream.write_all(request.replacen("\r\n", "\r\nconnection: close\r\n", 1).as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    ask().expect("the controller answers")
}

fn json(status: &str, kind: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
}

/// An answer that leaves open what became of the request.
fn unavailable(kind: &str) -> String {
    let body = format!(
        "{{\"type\": \"{kind}\", \"title\": \"Service Unavailable\", \"status\": 503, \"detail\": \"it says {kind}\"}}"
    );
    json("503 Service Unavailable", "application/problem+json", &body)
}

#[track_caller]
fn fine(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

#[test]
fn a_change_whose_answer_is_lost_is_asked_for_again_and_made_once() {
    let pod = Pod::demo();
    let fates = [
        Fate::Lost,
        Fate::Replaced(unavailable("outcome-unknown"), true),
        Fate::Replaced(unavailable("no-leader"), false),
        Fate::Arrives,
        Fate::Arrives,
        Fate::Replaced(unavailable("store-away"), false),
    ];
    let between = Between::new(&pod, fates.to_vec());
    // Made once: a second one of this name would be refused.
    assert!(fine(&between.podctl("volumes create vol0 --size 4M")).contains("vol0"));
    fine(&between.podctl("volumes create vol1 --size 4M"));
    let refused = between.podctl("volumes delete vol1");
    assert!(!refused.status.success(), "what is sure is not asked again");
    let keys = between.keys();
    let [first, rest @ ..] = keys.as_slice() else { panic!("{keys:?}") };
    assert!(first.is_some() && rest[..3].iter().all(|key| key == first), "{keys:?}");
    assert!(rest.len() == 5 && rest[3].is_some() && rest[3] != *first, "{keys:?}");
    let volumes = pod.client().volumes().expect("a list");
    assert_eq!(volumes.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["vol0", "vol1"]);
    // What only looks needs no key.
    fine(&between.podctl("volumes list"));
    let asked = between.asked.lock().expect("no panic");
    assert!(!asked.last().expect("a request").contains("idempotency-key"));
}

#[test]
fn events_that_are_not_kept_any_more_are_missed_aloud() {
    let pod = Pod::new();
    let event = "{\"sequence\": 200, \"time_ms\": 0, \"kind\": \"link-down\", \"subject\": \"h2/nic0\", \"message\": \"m\"}";
    let list = format!("{{\"events\": [{event}], \"first\": 200}}");
    let canned = || Fate::Replaced(json("200 OK", "application/json", &list), false);
    let between = Between::new(&pod, vec![canned(), canned(), canned()]);
    let said = |arguments: &str| {
        let output = between.podctl(arguments);
        assert!(fine(&output).contains("link-down"));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let missed = said("events --after 20");
    assert!(missed.contains("21 to 199") && missed.contains("not kept"), "{missed}");
    assert_eq!(said("events --after 199"), "");
    assert_eq!(said("events"), "", "nobody has asked for earlier ones");
}
