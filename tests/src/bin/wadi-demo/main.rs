//! `wadi-demo`: an unmodified VM works through a NIC and an SSD of other hosts, and through the loss of that NIC.

#![forbid(unsafe_code)]

mod narrator;
mod steps;
mod summary;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use wadi_tests::runner;

use narrator::Narrator;

/// Brings up a pod of three hosts on this machine and shows what it does. Everything is removed afterwards.
#[derive(Parser)]
#[command(name = "wadi-demo", version)]
struct Arguments {
    /// Leave the pod up and say how to look around in it; also KEEP=1.
    #[arg(long)]
    keep: bool,
    /// Only bring up the pod and boot the VM, and leave them up.
    #[arg(long)]
    up: bool,
    /// Remove pods that were left up, and do nothing else.
    #[arg(long, conflicts_with = "keep")]
    remove: bool,
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.remove {
        let removed = runner::sweep(true);
        println!("{removed} removed");
        return Ok(());
    }
    let keep = arguments.keep
        || arguments.up
        || std::env::var_os("KEEP").is_some_and(|value| !value.is_empty() && value != "0");
    if !rustix::process::geteuid().is_root() {
        // Not make: it would have root build, who may have no cargo. And sudo hands no KEEP on.
        let program = std::env::current_exe()?;
        let option = if arguments.up {
            " --up"
        } else if keep {
            " --keep"
        } else {
            ""
        };
        anyhow::bail!(
            "this makes network namespaces and so needs root: run sudo {}{option}",
            program.display()
        );
    }
    runner::remove_on_signals()?;
    let mut narrator = Narrator::new();
    steps::run(&mut narrator, keep, arguments.up)
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // Whatever failed did so because the pod went away under it; the signal's thread ends this process.
        Err(_) if runner::interrupted() => loop {
            std::thread::park();
        },
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
