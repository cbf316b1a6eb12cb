//! What every daemon's `main` needs once: logs, signals, readiness, locks, exit statuses.
//!
//! ```no_run
//! use std::process::ExitCode;
//! use pod_protocol::daemon::{self, Exit};
//!
//! fn main() -> ExitCode {
//!     daemon::run(|stop| -> Result<Exit, std::io::Error> {
//!         daemon::notify_ready();
//!         stop.wait();
//!         Ok(Exit::Stopped)
//!     })
//! }
//! ```

mod exit;
mod hangup;
mod lock;
mod logging;
mod notify;
mod stop;

use std::error::Error;
use std::io;
use std::process::ExitCode;

pub use self::exit::{Exit, print_error};
pub use self::lock::{LockError, LockFile, close_to_others, open_lock};
pub use self::logging::{LogLevelError, abort_on_panic, check_log_level, init_logging, set_log_level};
pub use self::notify::notify_ready;
pub use self::stop::StopSignal;

/// Runs a daemon: sets up logs and signals, calls the body, and turns its outcome into an exit status with, for an
/// error, one line on stderr with all its causes.
pub fn run<E: Into<Box<dyn Error + Send + Sync>>>(
    body: impl FnOnce(&StopSignal) -> Result<Exit, E>,
) -> ExitCode {
    init_logging();
    abort_on_panic();
    let stop = match StopSignal::on_signals() {
        Ok(stop) => stop,
        Err(error) => {
            let what = format!("cannot handle signals: {error}");
            return print_error(&io::Error::new(error.kind(), what));
        }
    };
    match body(&stop) {
        Ok(exit) => exit.into(),
        Err(error) => print_error(&*error.into()),
    }
}
