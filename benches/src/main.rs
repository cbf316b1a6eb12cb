//! Benchmarks. Each measures a rival in the same run, prints a table, draws an SVG and writes JSON.

#![deny(unsafe_code)]

mod blk;
mod channel;
mod controller;
mod cores;
mod cxl_model;
mod exchange;
mod failover;
mod memchannel;
mod migration;
mod multiplex;
mod net;
mod plot;
mod replication;
mod report;
mod rest;
mod shared_window;
mod slicing;
mod stranding;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};

/// Benchmarks of Wadi's parts against their peers.
///
/// Every benchmark measures the rival in the same run, interleaved with ours, prints a table, draws its plots as SVG
/// and writes a list of {name, value, unit, rival, rival_value, ratio, goal, met} as JSON. Build with --release; two
/// free cores are needed.
#[derive(Parser)]
#[command(name = "wadi-benches", version)]
struct Cli {
    /// Where the plots and JSON files go.
    #[arg(long, global = true, default_value = "target/bench", value_name = "DIRECTORY")]
    output: PathBuf,
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Every benchmark, one after the other.
    All,
    Blk(blk::Options),
    Channel(channel::Options),
    Controller(controller::Options),
    CxlModel(cxl_model::Options),
    Memchannel(memchannel::Options),
    Exchange(exchange::Options),
    /// The other process of the exchange benchmark.
    #[command(hide = true)]
    ExchangeServer(exchange::ServerOptions),
    Replication(replication::Options),
    Rest(rest::Options),
    /// The other process of the channel benchmark.
    #[command(hide = true)]
    ChannelSender(channel::SenderOptions),
    /// Pulled cables and moves between NICs, through a whole pod.
    Failover(failover::Options),
    Migration(migration::Options),
    Multiplex(multiplex::Options),
    Net(net::Options),
    Slicing(slicing::Options),
    Stranding(stranding::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    match &cli.benchmark {
        Benchmark::All => all(&cli.output),
        Benchmark::Blk(options) => blk::run(options, &cli.output),
        Benchmark::Channel(options) => channel::run(options, &cli.output),
        Benchmark::Controller(options) => controller::run(options, &cli.output),
        Benchmark::CxlModel(options) => cxl_model::run(options, &cli.output),
        Benchmark::Memchannel(options) => memchannel::run(options, &cli.output),
        Benchmark::Exchange(options) => exchange::run(options, &cli.output),
        Benchmark::ExchangeServer(options) => exchange::serve(options),
        Benchmark::Replication(options) => replication::run(options, &cli.output),
        Benchmark::Rest(options) => rest::run(options, &cli.output),
        Benchmark::ChannelSender(options) => channel::send(options),
        Benchmark::Failover(options) => failover::run(options, &cli.output),
        Benchmark::Migration(options) => migration::run(options, &cli.output),
        Benchmark::Multiplex(options) => multiplex::run(options, &cli.output),
        Benchmark::Net(options) => net::run(options, &cli.output),
        Benchmark::Slicing(options) => slicing::run(options, &cli.output),
        Benchmark::Stranding(options) => stranding::run(options, &cli.output),
    }
}

/// Runs every benchmark. One that fails does not keep the others from being measured, which takes long; its name comes at the end.
fn all(output: &Path) -> Result<()> {
    let mut failed = Vec::new();
    let mut note = |name, outcome: Result<()>| {
        if let Err(error) = outcome {
            eprintln!("error: {name}: {error:#}");
            failed.push(name);
        }
    };
    note("channel", apart(|| channel::run(&channel::Options::default(), output)));
    note("cxl-model", cxl_model::run(&cxl_model::Options::default(), output));
    note("controller", controller::run(&controller::Options::default(), output));
    note("stranding", stranding::run(&stranding::Options::default(), output));
    note("replication", replication::run(&replication::Options::default(), output));
    note("memchannel", memchannel::run(&memchannel::Options::default(), output));
    note("exchange", apart(|| exchange::run(&exchange::Options::default(), output)));
    note("rest", apart(|| rest::run(&rest::Options::default(), output)));
    note("blk", apart(|| blk::run(&blk::Options::default(), output)));
    note("net", apart(|| net::run(&net::Options::default(), output)));
    note("multiplex", apart(|| multiplex::run(&multiplex::Options::default(), output)));
    note("slicing", slicing::run(&slicing::Options::short(), output));
    note("migration", migration::run(&migration::Options::default(), output));
    note("failover", failover::run(&failover::Options::short(), output));
    ensure!(failed.is_empty(), "{} of the benchmarks failed: {}", failed.len(), failed.join(", "));
    Ok(())
}

/// Runs a benchmark on a thread of its own: it pins itself to a core, and the next one must find both free.
fn apart(benchmark: impl FnOnce() -> Result<()> + Send) -> Result<()> {
    std::thread::scope(|scope| match scope.spawn(benchmark).join() {
        Ok(outcome) => outcome,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}
