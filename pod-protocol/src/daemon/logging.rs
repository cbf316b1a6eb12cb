//! Where logs go and what a panic does.

use std::io::{self, IsTerminal};
use std::panic;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;

/// Takes another filter in place of the one that there is.
type Replace = Box<dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync>;

static REPLACE: OnceLock<Replace> = OnceLock::new();

/// Text that does not say what is logged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} does not say what is logged: use error, warn, info, debug or trace, or one for each part, such as info,pod_controller=debug ({reason})"
)]
pub struct LogLevelError {
    text: String,
    reason: String,
}

/// Sends logs to stderr, at level `info` or as `RUST_LOG` says, as JSON if `WADI_LOG_FORMAT` is `json`. Only the first
/// call counts.
pub fn init_logging() {
    let filter = filter_of_the_environment();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    let failed = |error: tracing_subscriber::reload::Error| error.to_string();
    // It fails when logs are set up already, as they may be in a test.
    let replace: Option<Replace> = if std::env::var("WADI_LOG_FORMAT").is_ok_and(|format| format == "json") {
        let builder = builder.json().with_filter_reloading();
        let handle = builder.reload_handle();
        let begun = builder.try_init().ok();
        begun.map(|()| Box::new(move |filter| handle.reload(filter).map_err(failed)) as Replace)
    } else {
        let builder = builder.with_filter_reloading();
        let handle = builder.reload_handle();
        let begun = builder.try_init().ok();
        begun.map(|()| Box::new(move |filter| handle.reload(filter).map_err(failed)) as Replace)
    };
    if let Some(replace) = replace {
        // It is set up once.
        let _ = REPLACE.set(replace);
    }
}

/// From now on, logs what this says (`debug`, `info,pod_controller=debug`); without it, what the environment said at the start.
pub fn set_log_level(level: Option<&str>) -> Result<(), LogLevelError> {
    let filter = match level {
        Some(text) => parse(text)?,
        None => filter_of_the_environment(),
    };
    match REPLACE.get() {
        Some(replace) => {
            let text = level.unwrap_or_default().to_owned();
            replace(filter).map_err(|reason| LogLevelError { text, reason })
        }
        // Somebody else has set logs up.
        None => Ok(()),
    }
}

/// Whether text says what is logged.
pub fn check_log_level(text: &str) -> Result<(), LogLevelError> {
    parse(text).map(|_| ())
}

fn parse(text: &str) -> Result<EnvFilter, LogLevelError> {
    let wrong = |reason: String| LogLevelError { text: text.chars().take(200).collect(), reason };
    // A word alone would be the name of a part, of which everything is logged.
    let words = text.split(',').map(str::trim).filter(|word| !word.contains('='));
    for word in words {
        if word.is_empty() {
            return Err(wrong("a part is empty".to_owned()));
        }
        word.parse::<tracing::level_filters::LevelFilter>()
            .map_err(|error| wrong(format!("{word:?}: {error}")))?;
    }
    // What Raft's library tells of its inner life is for those who ask for it.
    let whole = if text.contains("openraft") { text.to_owned() } else { format!("{text},openraft=off") };
    EnvFilter::try_new(whole).map_err(|error| wrong(error.to_string()))
}

fn filter_of_the_environment() -> EnvFilter {
    // As above.
    let wanted = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info,openraft=off".to_owned());
    EnvFilter::builder()
        .with_default_directive(tracing::level_filters::LevelFilter::INFO.into())
        .parse_lossy(wanted)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_words_or_one_for_each_part() {
        for text in ["info", "DEBUG", "off", "warn,pod_controller=debug", "info,openraft=info"] {
            check_log_level(text).expect(text);
        }
        for text in ["", "loud", "info,", "info,pod_controller=loud", "pod_controller", "=", "7"] {
            assert!(check_log_level(text).is_err(), "{text:?}");
        }
    }
}
