//! `wadi-pool`: creates pools and shows what is in them.

#![forbid(unsafe_code)]

mod inspect;
mod size;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};
use cxl_pool::{CoherenceMode, CreateOptions, Pool};

/// Creates a pod's pool, and shows what is in one.
///
/// The pool is the memory that all hosts of a pod share: a DAX character device on real CXL hardware, a file
/// under /dev/shm where the "hosts" are processes of one machine. It is created once, before any daemon starts.
#[derive(Parser)]
#[command(name = "wadi-pool", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Create a pool.
    ///
    /// Examples: `wadi-pool create /dev/shm/wadi/pool --size 1G --coherence hardware`, `wadi-pool create /dev/dax0.0`
    Create(Create),
    /// Show what a pool says about itself: superblock, map, daemons, controllers and regions.
    Inspect(Inspect),
}

#[derive(Args)]
struct Create {
    /// A new file, or a DAX character device.
    path: PathBuf,
    /// The size, such as 512M, 1G or 4T: a multiple of 2M. A DAX device is used whole and needs none.
    #[arg(long, value_parser = size::parse)]
    size: Option<u64>,
    /// How hosts see each other's writes.
    #[arg(long, value_enum, default_value_t = Coherence::Software)]
    coherence: Coherence,
    /// For how many hosts there is to be room. Host ids go from 1 to this.
    #[arg(long, default_value_t = CreateOptions::default().host_slots)]
    hosts: u16,
    /// For how many controller replicas there is to be room.
    #[arg(long, default_value_t = CreateOptions::default().replica_slots)]
    replicas: u16,
    /// For how many regions there is to be room: an instance takes four to six, a NIC one. Without it one for each 256 KiB of the
    /// pool, and at least 4095.
    #[arg(long)]
    regions: Option<u32>,
    /// Do not take the memory of a file's whole size at once. It takes less then as long as little is used, but daemons end when they
    /// first use what others have taken from the file system meanwhile.
    #[arg(long)]
    sparse: bool,
    /// Replace a pool or file that is there. Stop the pod's daemons before.
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Coherence {
    /// Only after cache control instructions: CXL 2.0. Right everywhere, if slower than need be on coherent memory.
    Software,
    /// At once: CXL 3.0 back-invalidate, or all hosts on one machine.
    Hardware,
}

#[derive(Args)]
struct Inspect {
    /// The pool's file or device.
    path: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Create(create) => {
            let pool = Pool::create(
                &create.path,
                &CreateOptions {
                    size_bytes: create.size,
                    mode: match create.coherence {
                        Coherence::Software => CoherenceMode::Software,
                        Coherence::Hardware => CoherenceMode::Hardware,
                    },
                    host_slots: create.hosts,
                    replica_slots: create.replicas,
                    region_slots: create.regions,
                    reserve: !create.sparse,
                    force: create.force,
                },
            )?;
            let superblock = pool.superblock();
            println!(
                "created {}: pod {}, {}, {} for at most {} regions, {} coherence, {} hosts",
                create.path.display(),
                superblock.uuid,
                size::display(superblock.size_bytes),
                size::display(pool.layout().data().bytes()),
                superblock.region_slots,
                superblock.mode,
                superblock.host_slots,
            );
            Ok(())
        }
        Command::Inspect(inspect) => inspect::run(&inspect.path, inspect.json),
    }
}
