//! `vmm console` on the console of a machine.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

#[test]
fn what_a_machine_answers_is_told_after_the_input_has_ended() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("console.sock");
    let machine = UnixListener::bind(&path).unwrap();
    let mut console = Command::new(env!("CARGO_BIN_EXE_vmm"))
        .arg("console")
        .arg(&path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut session, _) = machine.accept().unwrap();
    let mut input = console.stdin.take().unwrap();
    input.write_all(b"ls\n").unwrap();
    drop(input);
    let mut heard = [0; 3];
    session.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"ls\n");
    // That nothing more comes is not told to the machine, for which it would be the end of the session.
    session.set_nonblocking(true).unwrap();
    for line in 0..100 {
        let nothing = session.read(&mut heard).unwrap_err();
        assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
        // Each in one write: the kernel counts them, and takes a hundred at least whether they are read or not.
        session.write_all(format!("line {line}\n").as_bytes()).unwrap();
        std::thread::yield_now();
    }
    drop(session);
    let told = console.wait_with_output().unwrap();
    assert!(told.status.success());
    assert!(told.stdout.ends_with(b"line 99\n"), "{}", String::from_utf8_lossy(&told.stdout));
}
