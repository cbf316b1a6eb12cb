//! Chromium without a screen, over its debugging pipe: commands and answers are JSON, each ended by a zero byte.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Longer than anything takes on a busy machine; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
/// Without it, tests of the page are skipped where there is no browser.
const REQUIRED: &str = "WADI_REQUIRE_BROWSER";

pub(crate) struct Browser {
    process: Child,
    to: File,
    from: File,
    partial: Vec<u8>,
    ready: VecDeque<Value>,
    session: String,
    last: u64,
    complaints: Vec<String>,
    _directory: TempDir,
}

impl Browser {
    /// Nothing where there is no Chromium and nobody requires one.
    pub(crate) fn start() -> Option<Self> {
        let programs = ["/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium"];
        let Some(program) = programs.iter().find(|it| Path::new(it).exists()) else {
            assert!(std::env::var_os(REQUIRED).is_none(), "no Chromium: deploy/setup-debian.sh installs it");
            eprintln!("skipped: there is no Chromium; deploy/setup-debian.sh installs it");
            return None;
        };
        let directory = tempfile::tempdir().expect("a directory");
        let (to, from) = (directory.path().join("to"), directory.path().join("from"));
        for pipe in [&to, &from] {
            let made = Command::new("mkfifo").arg(pipe).status().expect("mkfifo starts");
            assert!(made.success());
        }
        // It reads commands from 3 and answers on 4.
        let script = "exec \"$0\" --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run \
                      --remote-debugging-pipe --user-data-dir=\"$1/profile\" about:blank 3<>\"$1/to\" 4<>\"$1/from\"";
        let log = File::create(directory.path().join("log")).expect("a log");
        let process = Command::new("sh")
            .args(["-c", script, program])
            .arg(directory.path())
            .env("HOME", directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("a shell");
        let open = |path: &Path| {
            let non_blocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            OpenOptions::new().read(true).write(true).custom_flags(non_blocking).open(path).expect("a pipe")
        };
        let mut browser = Self {
            process,
            to: open(&to),
            from: open(&from),
            partial: Vec::new(),
            ready: VecDeque::new(),
            session: String::new(),
            last: 0,
            complaints: Vec::new(),
            _directory: directory,
        };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", &attach);
        attached["sessionId"].as_str().expect("a session").clone_into(&mut browser.session);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, &json!({}));
        }
        Some(browser)
    }

    pub(crate) fn open(&mut self, address: &str) {
        let opened = self.call("Page.navigate", &json!({ "url": address }));
        assert!(opened["errorText"].is_null(), "{opened}");
        self.wait("document.readyState === 'complete'", "the page to be loaded");
    }

    /// What the system would say that its user likes: `light` or `dark`.
    pub(crate) fn prefer(&mut self, scheme: &str) {
        let feature = json!({ "name": "prefers-color-scheme", "value": scheme });
        self.call("Emulation.setEmulatedMedia", &json!({ "features": [feature] }));
    }

    /// Runs a script, and gives what it comes to as text.
    pub(crate) fn text(&mut self, script: &str) -> String {
        let asked = json!({ "expression": script, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", &asked);
        assert!(answer["exceptionDetails"].is_null(), "{script}: {answer}");
        match &answer["result"]["value"] {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }

    pub(crate) fn run(&mut self, script: &str) {
        self.text(script);
    }

    /// Until a script comes to true.
    #[track_caller]
    pub(crate) fn wait(&mut self, script: &str, what: &str) {
        let began = Instant::now();
        while self.text(script) != "true" {
            if began.elapsed() > PATIENCE {
                let page = self.text("document.body.innerText");
                panic!("waited in vain for {what}; complaints: {:?}; the page says: {page}", self.complaints);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// What the browser finds wrong with the page: scripts that throw, parts that its policy refuses.
    pub(crate) fn complaints(&self) -> Vec<String> {
        self.complaints.clone()
    }

    fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.last += 1;
        let mut command = json!({ "id": self.last, "method": method, "params": parameters });
        if !self.session.is_empty() {
            command["sessionId"] = self.session.clone().into();
        }
        let mut command = serde_json::to_vec(&command).expect("JSON");
        command.push(0);
        let deadline = Instant::now() + PATIENCE;
        let mut rest = command.as_slice();
        while !rest.is_empty() {
            match self.to.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => Self::pause(deadline, method),
                Err(error) => panic!("{method}: {error}"),
            }
        }
        loop {
            let message = self.next(deadline, method);
            if message["id"] == self.last {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            match message["method"].as_str() {
                Some("Runtime.exceptionThrown") => self.complaints.push(message["params"].to_string()),
                Some("Log.entryAdded") if message["params"]["entry"]["level"] == "error" => {
                    self.complaints.push(message["params"]["entry"].to_string());
                }
                _ => {}
            }
        }
    }

    fn next(&mut self, deadline: Instant, method: &str) -> Value {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return message;
            }
            let mut some = [0; 8 << 10];
            match self.from.read(&mut some) {
                Ok(count) => self.partial.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => Self::pause(deadline, method),
                Err(error) => panic!("{method}: {error}"),
            }
            while let Some(end) = self.partial.iter().position(|byte| *byte == 0) {
                let message: Vec<u8> = self.partial.drain(..=end).collect();
                self.ready.push_back(serde_json::from_slice(&message[..end]).expect("JSON"));
            }
        }
    }

    #[track_caller]
    fn pause(deadline: Instant, method: &str) {
        assert!(Instant::now() < deadline, "the browser did not answer {method}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Its processes end with the first of them, which ends when it is killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
