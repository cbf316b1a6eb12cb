//! `podctl top` on a terminal: a pseudo-terminal that `script` makes, whose size `stty` changes.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cxl_pool::Role;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Pod, until, vm};

/// The last thing that is written of a picture.
const END_OF_FRAME: &str = "\x1b[0m\x1b[K";

/// Somebody at a terminal who looks at the load.
struct Terminal {
    child: Child,
    keys: Option<ChildStdin>,
    written: Arc<Mutex<Vec<u8>>>,
    reader: Option<JoinHandle<()>>,
    directory: PathBuf,
}

impl Terminal {
    fn open(pod: &Pod, name: &str) -> Self {
        let directory = pod.path(name);
        fs::create_dir(&directory).expect("a directory");
        let at = directory.display();
        // What the terminal is like before and after is what stty reads back from it. Ctrl-C is for all that run at it.
        let script = format!(
            "#!/bin/sh\ncd {at}\ntrap : INT\nstty rows 40 cols 120\ntty >tty\nstty -g >before\n\
             sh -c 'echo $$ >pid; exec {podctl} --server unix:{socket} top --interval 0.1'\n\
             echo $? >status\nstty -g >after\n",
            podctl = env!("CARGO_BIN_EXE_podctl"),
            socket = pod.socket().display(),
        );
        let file = directory.join("session");
        fs::write(&file, script).expect("written");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a mode");
        let mut child = Command::new("script")
            .arg("-qefc")
            .arg(&file)
            .arg("/dev/null")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script is there");
        let (keys, mut screen) = (child.stdin.take(), child.stdout.take().expect("piped"));
        let written: Arc<Mutex<Vec<u8>>> = Arc::default();
        let reader = std::thread::spawn({
            let written = Arc::clone(&written);
            move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = screen.read(&mut bytes) {
                    written.lock().expect("no panic").extend_from_slice(&bytes[..count]);
                }
            }
        });
        Self { child, keys, written, reader: Some(reader), directory }
    }

    fn all(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().expect("no panic")).into_owned()
    }

    /// The lines of the last whole picture, the one at the bottom last.
    fn picture(&self) -> Option<Vec<String>> {
        let all = self.all();
        let frame = all.rsplit("\x1b[H").find(|frame| frame.contains(END_OF_FRAME))?;
        let (body, rest) = frame.split_once("\x1b[J")?;
        let bottom = rest.split_once("\x1b[7m")?.1.split_once(END_OF_FRAME)?.0;
        // The terminal makes its own of the ends of lines.
        let lines = body.split("\x1b[K").map(|line| line.trim_matches(['\r', '\n']).to_owned());
        let lines = lines.filter(|line| !line.is_empty());
        Some(lines.chain([bottom.to_owned()]).collect())
    }

    /// Waits for a picture like this.
    fn shows(&self, what: &str, is_it: impl Fn(&[String]) -> bool) -> Vec<String> {
        until(&format!("{what} on the terminal"), || self.picture().filter(|lines| is_it(lines)))
    }

    fn press(&mut self, keys: &str) {
        let input = self.keys.as_mut().expect("it is open");
        input.write_all(keys.as_bytes()).and_then(|()| input.flush()).expect("it reads");
    }

    fn resize(&self, rows: usize, columns: usize) {
        let tty = self.file("tty");
        let mut stty = Command::new("stty");
        stty.args(["-F", &tty, "rows", &rows.to_string(), "cols", &columns.to_string()]);
        assert!(stty.status().expect("stty is there").success());
    }

    fn file(&self, name: &str) -> String {
        let path = self.directory.join(name);
        let text = until(name, || fs::read_to_string(&path).ok().filter(|text| text.ends_with('\n')));
        text.trim_end().to_owned()
    }

    fn kill(&self, signal: Signal) {
        let pid = self.file("pid").parse().ok().and_then(Pid::from_raw).expect("a process");
        kill_process(pid, signal).expect("it runs");
    }

    /// What it ended with, when the terminal is as it was before.
    fn ended(mut self) -> String {
        let status = self.file("status");
        assert_eq!(self.file("before"), self.file("after"), "the terminal is another one");
        until("the session to end", || self.child.try_wait().expect("it is ours"));
        self.reader.take().expect("it reads").join().expect("it ends");
        let all = self.all();
        let after = all.rsplit_once(END_OF_FRAME).expect("a picture").1;
        assert!(after.contains("\x1b[?25h") && after.contains("\x1b[?1049l"), "{after:?}");
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A test that failed says what there was to see, and leaves nobody behind.
        if std::thread::panicking() {
            eprintln!("on the terminal: {:?}", self.all());
        }
        drop(self.keys.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn pod() -> Pod {
    let pod = Pod::demo();
    for name in ["vm1", "vm2"] {
        pod.client().create_instance(&vm(name, &[]), Duration::from_secs(30)).expect("created");
    }
    // By its name it is the last NIC.
    pod.endpoint(3, Role::NetBackend).held.lock().expect("no panic").receives = 1 << 20;
    pod
}

/// Whether of two things the first is above the second.
fn is_above(lines: &[String], first: &str, second: &str) -> bool {
    let line = |name: &str| lines.iter().position(|line| line.starts_with(name));
    line(first).zip(line(second)).is_some_and(|(first, second)| first < second)
}

fn bottom(lines: &[String]) -> &str {
    lines.last().map_or("", String::as_str)
}

#[test]
fn the_screen_shows_the_pod_and_obeys_keys() {
    let pod = pod();
    let mut terminal = Terminal::open(&pod, "terminal");
    let busiest = terminal.shows("the busiest first", |it| is_above(it, "h3/nic0", "h2/nic0"));
    let text = busiest.join("\n");
    assert!(text.contains("3 hosts, 3 devices, 2 instances"), "{text}");
    assert!(is_above(&busiest, "vm1", "vm2") && !text.contains("-0"), "{text}");
    let told = bottom(&busiest);
    assert!(told.contains("n: by name") && told.contains("q: quit"), "{told}");
    terminal.press("n");
    let named = terminal.shows("everything by name", |it| is_above(it, "h2/nic0", "h3/nic0"));
    assert!(bottom(&named).contains("b: the busiest first"), "{named:?}");
    terminal.press("xb");
    terminal.shows("the busiest first again", |it| is_above(it, "h3/nic0", "h2/nic0"));
    terminal.press("q");
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn the_screen_fits_a_terminal_of_another_size() {
    let pod = pod();
    let mut terminal = Terminal::open(&pod, "terminal");
    let wide = terminal.shows("all columns", |it| it.iter().any(|line| line.ends_with("REQUESTS/S")));
    assert!(wide.iter().any(|line| line.chars().count() > 60), "{wide:?}");
    terminal.resize(12, 30);
    let small = terminal.shows("a small picture", |it| it.iter().all(|line| line.chars().count() <= 30));
    assert!(small.len() <= 12, "{small:?}");
    // There is room for one or two rows of each table.
    assert!(small.iter().any(|line| line.starts_with("vm1")), "{small:?}");
    assert!(small.iter().any(|line| line.starts_with('…')), "{small:?}");
    terminal.resize(60, 150);
    terminal.shows("all of it again", |it| {
        it.iter().any(|line| line.ends_with("REQUESTS/S")) && it.iter().any(|line| line.starts_with("vm2"))
    });
    terminal.press("q");
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn a_controller_that_is_away_is_waited_for() {
    let mut pod = pod();
    let mut terminal = Terminal::open(&pod, "terminal");
    terminal.shows("an instance", |it| it.iter().any(|line| line.starts_with("vm1")));
    pod.stop_controller();
    let old = terminal.shows("that it is away", |it| bottom(it).contains("trying again"));
    assert!(old.iter().any(|line| line.starts_with("vm1")), "what was seen last stays: {old:?}");
    pod.start_controller();
    terminal.shows("that it is back", |it| {
        bottom(it).contains("q: quit") && it.iter().any(|line| line.starts_with("vm1"))
    });
    terminal.press("q");
    assert_eq!(terminal.ended(), "0");
}

#[test]
fn whoever_ends_it_finds_the_terminal_as_it_was() {
    let pod = pod();
    for how in ["ctrl-c", "sigint", "sigterm", "sighup"] {
        let mut terminal = Terminal::open(&pod, how);
        terminal.shows("an instance", |it| it.iter().any(|line| line.starts_with("vm1")));
        match how {
            "ctrl-c" => terminal.press("\x03"),
            "sigint" => terminal.kill(Signal::INT),
            "sigterm" => terminal.kill(Signal::TERM),
            _ => terminal.kill(Signal::HUP),
        }
        assert_eq!(terminal.ended(), "0", "{how}");
    }
}

#[test]
fn a_terminal_is_left_alone_where_there_is_no_controller() {
    let mut pod = Pod::new();
    pod.stop_controller();
    let terminal = Terminal::open(&pod, "terminal");
    assert_eq!(terminal.file("status"), "1");
    assert_eq!(terminal.file("before"), terminal.file("after"));
    assert!(!terminal.all().contains("\x1b[?1049h"), "{:?}", terminal.all());
}
