//! What the fabric and its users are like, and where each figure comes from.

use mem_channel::{DevLoad, Parameters};

/// The parameters. The paper's system: Xeon Gold 6530, one port of eight lanes, an XConn switch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fabric {
    /// GB/s of a link and direction: a stream of stride 1 (Table 1).
    pub(super) link_gb_s: f64,
    /// A lone read, in ns (§2.3, Figure 3-b/c).
    pub(super) idle_ns: f64,
    /// A hit in the last-level cache, in ns (Figure 3-a).
    pub(super) llc_ns: f64,
    /// Virtual lanes of a host port: assumed.
    pub(super) virtual_lanes: f64,
    /// Lines that the switch's egress port has buffers for: assumed, a little more than fit one idle round trip.
    pub(super) credits: f64,
    /// Lines that a core has under way while it reads a 4 KiB block: Golden Cove's L2 has 48 entries for misses.
    pub(super) block_reads: f64,
    /// The same for writes. Fitted: 3.8 times the latency beside 4 KiB writes (Figure 4-a).
    pub(super) block_writes: f64,
    /// Threads that fill the port. Fitted: 1624.2 ns when it is full (Figure 3-b/c).
    pub(super) background: f64,
    /// Cores of a host: a socket (§2.3). Those that the contending threads leave run the program of Figures 9 and 10; each has as many threads on its own host in
    /// Figure 10.
    pub(super) cores: f64,
    /// Part of a program's lines that a full last-level cache loses. Fitted: 669.4 ns (Figure 3-a).
    pub(super) llc_lost: f64,
    /// Loads under way without prefetch: fitted to stride 8 (Table 1).
    pub(super) strided_reads: f64,
    /// Stores under way without prefetch: fill buffers of Golden Cove's L1.
    pub(super) strided_writes: f64,
    /// Lines that the prefetcher adds at stride 1; of these one in stride² is of use. Fitted to stride 2 (Table 1).
    pub(super) prefetched: f64,
    /// Instructions that a core has under way at most: Golden Cove's reorder buffer.
    pub(super) instructions: f64,
    /// Of these, what a line takes in a loop of loads: assumed.
    pub(super) load_instructions: f64,
    /// Instructions that a core retires in a ns: Golden Cove's six at 2.1 GHz.
    pub(super) retired_per_ns: f64,
    /// Threads of each program in Figure 11, at the heaviest: assumed.
    pub(super) pair_threads: f64,
    /// A response says moderate overload if it found more lines waiting than this, severe overload from a quarter more on, where hardly a buffer of the egress port is
    /// left, and optimal load from a third of it on. Chosen with control, on Bwaves alone ([`super::choice`]): three quarters of the egress port's buffers.
    pub(super) overload_lines: f64,
    /// δ, the part of responses with overload that is taken for congestion. Chosen in the same way.
    pub(super) delta: f64,
    /// What control is told that a link carries, as a part of what it does carry. Chosen in the same way. Of a link that is quite full nobody sees that
    /// more is wanted, since what is carried is never more than that, so shares grow until queues do.
    pub(super) told: f64,
    /// The windows of a program's first thread begin so much of a window after those of the program before: whenever it was started. Of the golden
    /// section no multiple comes near a whole number, so that no two of thousands of programs begin together: assumed. It is how the shim has the vCPUs
    /// of a machine begin.
    pub(super) started: f64,
    /// T_W in µs (§4.3).
    pub(super) t_w_us: f64,
    /// K in µs: not in the paper.
    pub(super) k_us: f64,
    /// g of Eq. 6: not in the paper.
    pub(super) g: f64,
    /// λ, for each second, in parts of what is told of a link: not in the paper.
    pub(super) lambda_per_s: f64,
    /// The least that capacity falls to, as a part of what is told: not in the paper, which has none.
    pub(super) least_capacity: f64,
}

impl Fabric {
    pub(super) const PAPER: Self = Self {
        link_gb_s: 22.0,
        idle_ns: 230.2,
        llc_ns: 50.1,
        virtual_lanes: 4.0,
        credits: 96.0,
        block_reads: 48.0,
        block_writes: 23.0,
        background: 20.0,
        cores: 32.0,
        llc_lost: 0.345,
        strided_reads: 11.0,
        strided_writes: 16.0,
        prefetched: 9.0,
        instructions: 512.0,
        load_instructions: 4.0,
        retired_per_ns: 6.0 * 2.1,
        pair_threads: 15.0,
        overload_lines: 72.0,
        delta: 0.5,
        told: 0.97,
        started: 0.381_966_011_250_105,
        t_w_us: 100.0,
        k_us: 500.0,
        g: 0.5,
        lambda_per_s: 100.0,
        least_capacity: 0.5,
    };

    /// What a pod has unless somebody says otherwise, and of links what its operators are advised to tell.
    pub(super) fn in_a_pod(&self) -> Self {
        let Parameters { delta, g, lambda_per_s, least_capacity, .. } = Parameters::default();
        Self { told: 0.98, t_w_us: 1000.0, k_us: 10_000.0, delta, g, lambda_per_s, least_capacity, ..*self }
    }

    /// What a response says of the load of a port where so many lines wait (DevLoad).
    pub(super) fn level(&self, waiting: u32) -> DevLoad {
        let waiting = f64::from(waiting);
        let above = [self.overload_lines / 3.0, self.overload_lines, self.overload_lines * 1.25];
        DevLoad::ALL[above.iter().filter(|lines| waiting > **lines).count()]
    }

    /// A line on a link, in ns.
    pub(super) fn line_ns(&self) -> f64 {
        super::fabric::LINE / self.link_gb_s
    }

    /// Threads of a program in Figures 9 and 10. The text does not say how many.
    pub(super) fn program_threads(&self) -> u32 {
        whole(self.cores - self.background)
    }

    pub(super) fn lanes(&self) -> usize {
        whole(self.virtual_lanes) as usize
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small positive numbers")]
pub(super) fn whole(value: f64) -> u32 {
    value.round().max(1.0) as u32
}

/// A parameter that can be changed to see what it does.
pub(super) struct Parameter {
    pub(super) name: &'static str,
    pub(super) source: &'static str,
    pub(super) of: fn(&mut Fabric) -> &mut f64,
}

/// All of them.
pub(super) const KNOWN: [Parameter; 26] = [
    Parameter { name: "link, GB/s", source: "Table 1, stride 1", of: |fabric| &mut fabric.link_gb_s },
    Parameter { name: "lone read, ns", source: "§2.3", of: |fabric| &mut fabric.idle_ns },
    Parameter { name: "hit in the cache, ns", source: "Figure 3-a", of: |fabric| &mut fabric.llc_ns },
    Parameter { name: "virtual lanes", source: "assumed", of: |fabric| &mut fabric.virtual_lanes },
    Parameter { name: "egress credits, lines", source: "assumed", of: |fabric| &mut fabric.credits },
    Parameter {
        name: "4 KiB reads under way",
        source: "Golden Cove, L2",
        of: |fabric| &mut fabric.block_reads,
    },
    Parameter {
        name: "4 KiB writes under way",
        source: "fitted to 3.8×",
        of: |fabric| &mut fabric.block_writes,
    },
    Parameter {
        name: "contending threads",
        source: "fitted to 1624.2 ns",
        of: |fabric| &mut fabric.background,
    },
    Parameter { name: "cores of a socket", source: "§2.3", of: |fabric| &mut fabric.cores },
    Parameter { name: "cache lost", source: "fitted to 13.4×", of: |fabric| &mut fabric.llc_lost },
    Parameter {
        name: "strided reads under way",
        source: "fitted to stride 8",
        of: |fabric| &mut fabric.strided_reads,
    },
    Parameter {
        name: "strided writes under way",
        source: "Golden Cove, L1",
        of: |fabric| &mut fabric.strided_writes,
    },
    Parameter { name: "prefetched lines", source: "fitted to stride 2", of: |fabric| &mut fabric.prefetched },
    Parameter {
        name: "instructions under way",
        source: "Golden Cove",
        of: |fabric| &mut fabric.instructions,
    },
    Parameter {
        name: "instructions of a load",
        source: "assumed",
        of: |fabric| &mut fabric.load_instructions,
    },
    Parameter {
        name: "instructions retired per ns",
        source: "Golden Cove, 2.1 GHz",
        of: |fabric| &mut fabric.retired_per_ns,
    },
    Parameter { name: "threads of Figure 11", source: "assumed", of: |fabric| &mut fabric.pair_threads },
    Parameter {
        name: "overload, lines",
        source: "chosen on Bwaves",
        of: |fabric| &mut fabric.overload_lines,
    },
    Parameter { name: "δ", source: "chosen on Bwaves", of: |fabric| &mut fabric.delta },
    Parameter { name: "told of a link", source: "chosen on Bwaves", of: |fabric| &mut fabric.told },
    Parameter {
        name: "windows begin apart by, T_W",
        source: "assumed, as in the shim",
        of: |fabric| &mut fabric.started,
    },
    Parameter { name: "T_W, µs", source: "§4.3", of: |fabric| &mut fabric.t_w_us },
    Parameter { name: "K, µs", source: "assumed", of: |fabric| &mut fabric.k_us },
    Parameter { name: "g", source: "assumed", of: |fabric| &mut fabric.g },
    Parameter { name: "λ, 1/s", source: "assumed", of: |fabric| &mut fabric.lambda_per_s },
    Parameter { name: "least capacity", source: "assumed", of: |fabric| &mut fabric.least_capacity },
];
