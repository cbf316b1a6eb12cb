//! What a pool says about itself.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use cxl_pool::{
    Area, CoherenceMode, ControllerHello, Hello, Layout, LineCount, Memory, Pool, Record, Superblock,
    read_beat, regions,
};
use serde::Serialize;

use crate::size;

#[derive(Serialize)]
struct Report<'a> {
    superblock: &'a Superblock,
    map: Vec<Part>,
    controllers: Vec<Controller>,
    endpoints: Vec<Endpoint>,
    regions: Option<regions::RegionTable>,
}

#[derive(Serialize)]
struct Part {
    name: &'static str,
    start_line: u64,
    lines: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct Controller {
    replica: u16,
    term: u64,
    pid: u32,
    heartbeat: u64,
}

#[derive(Serialize)]
struct Endpoint {
    id: String,
    pid: u32,
    protocol: String,
    heartbeat: u64,
}

pub(crate) fn run(path: &Path, json: bool) -> Result<()> {
    let pool = Pool::open(path)?;
    let report = match pool.superblock().mode {
        CoherenceMode::Software => look(&pool, &pool.software()),
        CoherenceMode::Hardware => look(&pool, &pool.hardware()),
    };
    let mut out = io::stdout().lock();
    let printed = if json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from).and_then(|()| writeln!(out))
    } else {
        print(&mut out, &report)
    };
    match printed {
        // Whoever reads has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

fn look<'a, M: Memory>(pool: &'a Pool, memory: &M) -> Report<'a> {
    let layout = pool.layout();
    let controllers = layout.replicas().filter_map(|replica| {
        let hello = ControllerHello::look(memory, layout.controller(replica))?;
        let heartbeat = read_beat(memory, layout.controller_heartbeat(replica));
        Some(Controller { replica: replica.get(), term: hello.term, pid: hello.pid, heartbeat })
    });
    let endpoints = layout.endpoints().filter_map(|endpoint| {
        let hello = Hello::look(memory, layout.hello(endpoint))?;
        Some(Endpoint {
            id: endpoint.to_string(),
            pid: hello.pid,
            protocol: format!("{}.{}", hello.protocol.0, hello.protocol.1),
            heartbeat: read_beat(memory, layout.heartbeat(endpoint)),
        })
    });
    Report {
        superblock: pool.superblock(),
        map: map(layout),
        controllers: controllers.collect(),
        endpoints: endpoints.collect(),
        regions: regions::read(memory, layout).map(by_place),
    }
}

fn by_place(mut table: regions::RegionTable) -> regions::RegionTable {
    table.entries.sort_by_key(|entry| entry.area.start);
    table
}

fn map(layout: &Layout) -> Vec<Part> {
    let part = |name, area: Area| Part {
        name,
        start_line: area.start.get(),
        lines: area.lines.get(),
        bytes: area.bytes(),
    };
    let control = layout.control();
    let after = layout.superblock().end();
    let structures = Area::new(after, LineCount::new(control.end().get() - after.get()));
    vec![
        part("superblock", layout.superblock()),
        part("control structures", structures),
        part("data", layout.data()),
    ]
}

fn print(out: &mut impl Write, report: &Report<'_>) -> io::Result<()> {
    let superblock = report.superblock;
    writeln!(out, "pod        {}", superblock.uuid)?;
    writeln!(out, "layout     {}.{}", superblock.major, superblock.minor)?;
    writeln!(out, "size       {}", size::display(superblock.size_bytes))?;
    writeln!(out, "coherence  {}", superblock.mode)?;
    writeln!(
        out,
        "slots      {} hosts, {} controller replicas, {} regions",
        superblock.host_slots, superblock.replica_slots, superblock.region_slots
    )?;
    writeln!(out, "\nmap")?;
    for part in &report.map {
        let end = part.start_line + part.lines;
        let name = part.name;
        writeln!(
            out,
            "  {name:<20} lines {:>10} to {end:<10} {}",
            part.start_line,
            size::display(part.bytes)
        )?;
    }
    writeln!(out, "\ncontrollers")?;
    for controller in &report.controllers {
        let Controller { replica, term, pid, heartbeat } = controller;
        writeln!(out, "  replica {replica}, term {term}, pid {pid}, heartbeat {heartbeat}")?;
    }
    writeln!(out, "\nendpoints")?;
    for Endpoint { id, pid, protocol, heartbeat } in &report.endpoints {
        writeln!(out, "  {id:<18} pid {pid}, protocol {protocol}, heartbeat {heartbeat}")?;
    }
    writeln!(out, "\nregions")?;
    let Some(table) = &report.regions else { return writeln!(out, "  no controller has published any") };
    writeln!(out, "  as of term {}, command {}", table.version.term, table.version.index)?;
    for entry in &table.entries {
        let purpose = format!("{:?}", entry.purpose);
        let state = format!("{:?}", entry.state);
        let bytes = size::display(entry.area.bytes());
        writeln!(
            out,
            "  {:>6} {:<24} {bytes:>10} {purpose:<9} {state:<11} {}",
            entry.id, entry.area, entry.holder
        )?;
    }
    Ok(())
}
