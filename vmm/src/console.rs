//! A terminal on a machine's serial console.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

/// Ctrl-]: leaves the console, as in telnet.
const LEAVE: u8 = 0x1d;

/// Connects this terminal to a console's socket until Ctrl-] or the end of the machine. Where the standard input is none, what the machine
/// says is still told when that has come to its end.
pub fn attach(socket: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    let mut output = stream.try_clone()?;
    let raw = Raw::enter()?;
    let is_terminal = raw.usual.is_some();
    thread::spawn(move || {
        let mut buffer = [0; 256];
        loop {
            match io::stdin().read(&mut buffer) {
                // Not even our side is shut down: QEMU takes that for the end of the whole connection.
                Ok(0) if !is_terminal => return,
                Ok(0) | Err(_) => break,
                Ok(bytes) => {
                    if buffer[..bytes].contains(&LEAVE) || output.write_all(&buffer[..bytes]).is_err() {
                        break;
                    }
                }
            }
        }
        // Ends the loop below.
        let _ = output.shutdown(std::net::Shutdown::Both);
    });
    let mut buffer = [0; 4096];
    while let bytes @ 1.. = stream.read(&mut buffer)? {
        io::stdout().write_all(&buffer[..bytes])?;
        io::stdout().flush()?;
    }
    Ok(())
}

/// The terminal's usual state, put back at the end.
struct Raw {
    usual: Option<Termios>,
}

impl Raw {
    fn enter() -> io::Result<Self> {
        if !isatty(io::stdin()) {
            return Ok(Self { usual: None });
        }
        let usual = tcgetattr(io::stdin())?;
        let mut raw = usual.clone();
        raw.make_raw();
        tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { usual: Some(usual) })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if let Some(usual) = &self.usual {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, usual);
        }
    }
}
