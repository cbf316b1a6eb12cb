//! The processor: the instructions that channels live by, and the cores that workers want for themselves.

use std::thread::available_parallelism;

use pod_protocol::config::HostConfig;

use super::{Finding, Machine};

/// The instructions, and what their absence costs.
const INSTRUCTIONS: [(&str, &str); 3] = [
    (
        "clflushopt",
        "lines are given up one after the other, with CLFLUSH: channels in software coherence are slow",
    ),
    ("clwb", "lines that are written back leave the cache as well, and are fetched again"),
    ("avx512f", "messages are not written as whole lines: channels in hardware coherence are slower"),
];

pub(super) fn examine(machine: &Machine) -> Vec<Finding> {
    let Some(cpuinfo) = machine.read("/proc/cpuinfo") else {
        return vec![Finding::poor("processor", "/proc/cpuinfo cannot be read", "mount /proc")];
    };
    let field = |name: &str| {
        cpuinfo.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    let model = field("model name").unwrap_or_else(|| "unknown".to_owned());
    let mut findings = vec![Finding::good("processor", model)];
    let flags = field("flags").unwrap_or_default();
    for (name, cost) in INSTRUCTIONS {
        findings.push(if flags.split_whitespace().any(|flag| flag == name) {
            Finding::good(name, "there")
        } else {
            let advice = "use a processor that has it; a VM needs it passed through (-cpu host)";
            Finding::poor(name, format!("missing: {cost}"), advice)
        });
    }
    findings
}

pub(super) fn examine_cores(host: &HostConfig) -> Vec<Finding> {
    let count = available_parallelism().map_or(1, usize::from);
    cores(host, count)
}

fn cores(host: &HostConfig, count: usize) -> Vec<Finding> {
    let wishes = [
        ("net.frontend-cpu", host.net.frontend_cpu),
        ("net.backend-cpu", host.net.backend_cpu),
        ("blk.frontend-cpu", host.blk.frontend_cpu),
        ("blk.backend-cpu", host.blk.backend_cpu),
    ];
    let mut findings = Vec::new();
    for (position, (key, cpu)) in wishes.iter().enumerate() {
        let Some(cpu) = cpu else { continue };
        let other = wishes[..position].iter().find(|(_, other)| other.as_ref() == Some(cpu));
        findings.push(match other {
            _ if *cpu >= count => {
                let found = format!("{cpu}, but this host has {count} of them");
                Finding::broken(key, found, format!("name one from 0 to {}, or none", count - 1))
            }
            Some((other, _)) => {
                let found = format!("{cpu}, as {other}: two workers that never sleep share a core");
                Finding::poor(key, found, "give each a core of its own, or none")
            }
            None => Finding::good(key, cpu.to_string()),
        });
    }
    findings
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Verdict;
    use super::super::tests::machine;
    use super::*;

    #[test]
    fn missing_instructions_are_named() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu clflushopt\n";
        let (_directory, machine) = machine(&[("/proc/cpuinfo", cpuinfo)]);
        let findings = examine(&machine);
        let verdicts: Vec<_> = findings.iter().map(|it| (it.subject.as_str(), it.verdict)).collect();
        let expected = [
            ("processor", Verdict::Good),
            ("clflushopt", Verdict::Good),
            ("clwb", Verdict::Poor),
            ("avx512f", Verdict::Poor),
        ];
        assert_eq!(verdicts, expected);
    }

    #[test]
    fn cores_that_are_not_there_or_shared_are_found() {
        let text = "[host]\nid = 1\nname = 'h1'\n[pool]\npath = '/p'\n[net]\nfrontend-cpu = 1\nbackend-cpu = 1\n\
                    [blk]\nfrontend-cpu = 4\n";
        let host = HostConfig::parse(text, Path::new("host.toml")).expect("a configuration");
        let verdicts: Vec<_> = cores(&host, 4).into_iter().map(|finding| finding.verdict).collect();
        assert_eq!(verdicts, [Verdict::Good, Verdict::Poor, Verdict::Broken]);
    }
}
