//! Who asks for how much of a host, from when until when.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

/// Parts of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Parts {
    pub(super) cores: f64,
    pub(super) memory: f64,
    pub(super) ssd: f64,
    pub(super) nic: f64,
}

/// A VM that somebody asks for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Request {
    /// In days.
    pub(super) start: f64,
    /// In days; for ever if the trace does not know.
    pub(super) end: f64,
    pub(super) parts: Parts,
}

/// Kinds of VMs that are asked for: of so many among 100, the parts of a host of its smallest size.
///
/// The smallest of each kind is 1/32 of a host's cores; a VM is that 1, 2, 4 or 8 times, of 50, 25, 15 and 10 among 100. Kinds
/// differ in what they take beside cores, as those of public clouds do: without local disks, balanced, with much memory, with much
/// storage, with much network.
const KINDS: [(f64, Parts); 5] = [
    (38.0, Parts { cores: 1.0, memory: 0.9, ssd: 0.15, nic: 0.6 }),
    (27.0, Parts { cores: 1.0, memory: 0.8, ssd: 1.0, nic: 0.7 }),
    (17.0, Parts { cores: 1.0, memory: 1.6, ssd: 0.5, nic: 0.5 }),
    (10.0, Parts { cores: 1.0, memory: 0.8, ssd: 2.4, nic: 0.9 }),
    (8.0, Parts { cores: 1.0, memory: 0.6, ssd: 0.4, nic: 2.2 }),
];
const SIZES: [(f64, f64); 4] = [(50.0, 1.0), (25.0, 2.0), (15.0, 4.0), (10.0, 8.0)];
const UNIT: f64 = 1.0 / 32.0;
/// Most VMs live briefly, and most of the time belongs to those that live long: exponential, with these means in days.
const LIVES: [(f64, f64); 3] = [(60.0, 0.05), (25.0, 0.5), (15.0, 6.0)];

/// Requests for so many hosts over so many days: a Poisson process that asks for more cores than there are, so that hosts fill up.
pub(super) fn synthetic(random: &mut Random, hosts: usize, days: f64, load: f64) -> Vec<Request> {
    let mean = |table: &[(f64, f64)]| table.iter().map(|(weight, value)| weight * value).sum::<f64>() / 100.0;
    #[expect(clippy::cast_precision_loss, reason = "there are not that many hosts")]
    let per_day = load * hosts as f64 / (mean(&SIZES) * UNIT * mean(&LIVES));
    let mut requests = Vec::new();
    // As many as would live then are there from the beginning; exponential lives have no memory.
    let mut at = 0.0;
    let begun = per_day * mean(&LIVES);
    let long_first = LIVES.map(|(weight, days)| (weight * days, days));
    let begun = whole_count(begun);
    while requests.len() < begun {
        requests.push(request(random, 0.0, &long_first));
    }
    loop {
        at += random.exponential(1.0 / per_day);
        if at >= days {
            return requests;
        }
        requests.push(request(random, at, &LIVES));
    }
}

fn whole_count(number: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and not that many"
    )]
    let count = number.round().max(0.0) as usize;
    count
}

fn request(random: &mut Random, start: f64, lives: &[(f64, f64)]) -> Request {
    let Parts { cores, memory, ssd, nic } = random.pick(&KINDS);
    let unit = UNIT * random.pick(&SIZES);
    let parts = Parts { cores: cores * unit, memory: memory * unit, ssd: ssd * unit, nic: nic * unit };
    let mean = random.pick(lives);
    let end = start + random.exponential(mean);
    Request { start, end, parts }
}

/// Reads the tables `vm` and `vmType` of the Azure Traces for Packing (2020), exported with a header:
/// `sqlite3 -header -csv packing_trace_zone_a_v1.sqlite 'select * from vm' >vm.csv`, and the same of `vmType`. Types are taken as
/// they are on one kind of machine; VMs of types that it does not have are left out. What is not said is 0.
pub(super) fn azure(vms: &str, types: &str, machine: Option<&str>) -> Result<Vec<Request>> {
    let types = Table::read(types).context("the table vmType")?;
    let (id, machine_id) = (types.column("vmTypeId")?, types.column("machineId")?);
    let machine = if let Some(machine) = machine {
        machine
    } else {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        types.rows.iter().for_each(|row| *counts.entry(row[machine_id]).or_default() += 1);
        let most = counts.into_iter().max_by_key(|(_, count)| *count);
        most.context("the table vmType is empty")?.0
    };
    let fields = ["core", "memory", "ssd", "nic"].map(|name| types.column(name));
    let [core, memory, ssd, nic] = fields;
    let (core, memory, ssd, nic) = (core?, memory?, ssd?, nic?);
    let mut parts = BTreeMap::new();
    for row in types.rows.iter().filter(|row| row[machine_id] == machine) {
        let of = |column: usize| number(row[column]).map(|it| it.unwrap_or(0.0));
        let of_type = Parts { cores: of(core)?, memory: of(memory)?, ssd: of(ssd)?, nic: of(nic)? };
        parts.insert(row[id], of_type);
    }
    ensure!(!parts.is_empty(), "there is no machine {machine:?} in the table vmType");
    let vms = Table::read(vms).context("the table vm")?;
    let (id, start, end) = (vms.column("vmTypeId")?, vms.column("starttime")?, vms.column("endtime")?);
    let mut requests = Vec::new();
    for row in &vms.rows {
        let Some(parts) = parts.get(row[id]) else { continue };
        let start = number(row[start])?.context("a VM without a starttime")?;
        let end = number(row[end])?.unwrap_or(f64::INFINITY);
        if end > start {
            requests.push(Request { start: start.max(0.0), end, parts: *parts });
        }
    }
    requests.sort_by(|a, b| a.start.total_cmp(&b.start));
    ensure!(!requests.is_empty(), "no VM of the trace fits the machine {machine:?}");
    Ok(requests)
}

fn number(cell: &str) -> Result<Option<f64>> {
    if cell.is_empty() || cell.eq_ignore_ascii_case("null") {
        return Ok(None);
    }
    let value: f64 = cell.parse().with_context(|| format!("{cell:?} is no number"))?;
    ensure!(value.is_finite(), "{cell:?} is no number");
    Ok(Some(value))
}

/// Comma-separated values of numbers and plain words.
struct Table<'a> {
    header: Vec<&'a str>,
    rows: Vec<Vec<&'a str>>,
}

impl<'a> Table<'a> {
    fn read(text: &'a str) -> Result<Self> {
        let cells =
            |line: &'a str| line.split(',').map(|cell| cell.trim().trim_matches('"')).collect::<Vec<_>>();
        let mut lines = text.lines().filter(|line| !line.trim().is_empty());
        let header = cells(lines.next().context("it is empty: export it with -header")?);
        let mut rows = Vec::new();
        for (number, line) in lines.enumerate() {
            let row = cells(line);
            let (has, needs) = (row.len(), header.len());
            ensure!(has == needs, "line {} has {has} columns, not {needs}", number + 2);
            rows.push(row);
        }
        Ok(Self { header, rows })
    }

    fn column(&self, name: &str) -> Result<usize> {
        let found = self.header.iter().position(|known| known.eq_ignore_ascii_case(name));
        found.with_context(|| format!("there is no column {name}: export it with -header"))
    }
}

/// SplitMix64 (Steele et al., 2014): the same seed gives the same numbers.
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1, without 1.
    fn part(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
        let part = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        part
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.part()).ln()
    }

    /// One of a table, each as often as its weight says.
    fn pick<T: Copy>(&mut self, table: &[(f64, T)]) -> T {
        let mut left = self.part() * table.iter().map(|(weight, _)| weight).sum::<f64>();
        for (weight, value) in table {
            left -= weight;
            if left < 0.0 {
                return *value;
            }
        }
        table[table.len() - 1].1
    }

    pub(super) fn shuffle<T>(&mut self, things: &mut [T]) {
        for last in (1..things.len()).rev() {
            let at = self.next() % (last as u64 + 1);
            things.swap(last, usize::try_from(at).unwrap_or(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn azure_tables_are_read_for_one_machine() {
        let types = "id,vmTypeId,machineId,core,memory,hdd,ssd,nic\n1,0,16,0.5,0.25,0.1,,0.2\n2,0,17,1,1,,1,1\n3,7,16,0.1,0.1,,0.4,0.1\n";
        let vms = "vmId,tenantId,vmTypeId,priority,starttime,endtime\n0,1,0,0,-3.5,2.25\n1,1,7,1,1.5,\n2,1,9,1,1.5,3\n3,1,7,1,2,2\n";
        let requests = azure(vms, types, None).expect("a trace");
        assert_eq!(requests.len(), 2, "unknown types and empty lives are left out");
        assert_eq!((requests[0].start, requests[0].end), (0.0, 2.25));
        assert_eq!(requests[0].parts, Parts { cores: 0.5, memory: 0.25, ssd: 0.0, nic: 0.2 });
        assert!(requests[1].end.is_infinite());
        for (vms, types) in [
            ("", types),
            (vms, "a,b\n1,2"),
            (vms, "vmTypeId\n1,2"),
            ("vmTypeId,starttime,endtime\n0,x,1", types),
        ] {
            assert!(azure(vms, types, None).is_err(), "{vms:.20} {types:.20}");
        }
        assert!(azure(vms, types, Some("99")).is_err());
    }

    #[test]
    fn synthetic_requests_ask_for_the_load_that_is_wanted() {
        let requests = synthetic(&mut Random::new(1), 32, 10.0, 1.0);
        let asked: f64 = requests.iter().map(|it| it.parts.cores * (it.end.min(10.0) - it.start)).sum();
        assert!((0.8..1.2).contains(&(asked / 320.0)), "{asked}");
    }
}
