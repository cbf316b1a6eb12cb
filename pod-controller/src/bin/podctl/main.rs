//! `podctl`: the pod at the command line. A client of the controller's API and nothing else.

mod arguments;
mod balance;
mod commands;
mod completion;
mod doctor;
#[cfg(test)]
mod documented;
mod hotplug;
mod map;
mod mchannels;
mod output;
mod said;
mod show;
mod table;
mod token;
mod top;
mod watch;
mod when;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use pod_api::client::ClientError;

use arguments::Arguments;

fn main() -> ExitCode {
    completion::answer_shell();
    let arguments = Arguments::parse();
    let mut out = std::io::stdout().lock();
    match run(&arguments, &mut out).and_then(|()| out.flush().map_err(Failure::Output)) {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads our output has read enough.
        Err(Failure::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
    #[error("{0}")]
    Usage(String),
    /// What was looked at is not as it should be. What was seen is shown.
    #[error("{0}")]
    Broken(String),
}

fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<(), Failure> {
    commands::run(arguments, out)
}
