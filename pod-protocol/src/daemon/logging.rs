//! Where logs go and what a panic does.

use std::io::{self, IsTerminal};
use std::panic;

use tracing_subscriber::EnvFilter;

/// Sends logs to stderr, at level `info` or as `RUST_LOG` says, as JSON if `WADI_LOG_FORMAT` is `json`. Only the first
/// call counts.
pub fn init_logging() {
    // What Raft's library tells of its inner life is for those who ask for it.
    let wanted = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info,openraft=off".to_owned());
    let filter = EnvFilter::builder()
        .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
        .parse_lossy(wanted);
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    // It fails when logs are set up already, as they may be in a test.
    let _ = match std::env::var("WADI_LOG_FORMAT").as_deref() {
        Ok("json") => builder.json().try_init(),
        _ => builder.try_init(),
    };
}

/// Lets a panic of any thread end the process at once. A daemon that lost a thread would go on holding its leases
/// without serving them.
pub fn abort_on_panic() {
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::abort();
    }));
}
