//! What a host and its CXL link cost, in ns, and where each figure comes from.

/// The parameters. Those of the paper's system where it is known: Xeon 8592+, eight lanes, a pool that is not coherent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Link {
    /// A load from local DRAM: Emerald Rapids, as Liu et al. (ASPLOS '25) give it, whom the paper cites for the next figure.
    pub(crate) dram_ns: f64,
    /// How much longer a load from CXL takes: 2.15 there, 2.29 on the paper's other host (Oasis, §2.3).
    pub(crate) cxl_ratio: f64,
    /// Bytes per ns and direction: eight lanes of 4 GB/s, of which 92 % can be used (Oasis, §2.3).
    pub(crate) bytes_per_ns: f64,
    /// Lines that a core can have under way: the fill buffers of Golden Cove's L1 data cache.
    pub(crate) fill_buffers: f64,
    /// Stores that can wait to reach the cache: Golden Cove's store buffer.
    pub(crate) store_buffer: f64,
    /// From CLWB to its end as MFENCE sees it, in times of a load: 170 ns over 130 ns, measured on the DRAM of an EPYC.
    pub(crate) write_back_ratio: f64,
    /// How long after the one before a CLFLUSHOPT of a row ends, as MFENCE sees it: measured on the same EPYC.
    pub(crate) streamed_ns: f64,
    /// What a CLWB or a CLFLUSHOPT, of a line that is cached or not, keeps the core from going on: half a cycle at 3.9 GHz, by
    /// LLVM's scheduling model of Sapphire Rapids, which has the same core. In a row of 16 on the same EPYC it is 0.1 to 0.4 ns.
    pub(crate) issue_ns: f64,
    /// The same of a prefetch: a third of a cycle.
    pub(crate) prefetch_ns: f64,
    /// MFENCE with nothing to wait for: 33 cycles at 3.9 GHz.
    pub(crate) fence_ns: f64,
    /// PAUSE after a look in vain, as Intel asks of a loop that waits and as our workers do it: 140 cycles at 3.9 GHz, by the
    /// same model.
    pub(crate) pause_ns: f64,
    /// Reading the clock, once for each message on each side: RDTSC, 18 cycles at 3.9 GHz, by the same model.
    pub(crate) clock_ns: f64,
    /// A call that sends or looks for one message, all in the L1 cache: measured with this very code, on the same EPYC.
    pub(crate) call_ns: f64,
    /// From CLFLUSHOPT to its end as MFENCE sees it. Fitted: the bypass variant reaches 3.0 M messages/s.
    pub(crate) invalidate_ns: f64,
    /// From CLWB until the other host's loads see the line. Fitted: a lone message takes 0.6 µs.
    pub(crate) write_ns: f64,
}

impl Link {
    /// What is known before anything is fitted.
    pub(crate) const SOURCED: Self = Self {
        dram_ns: 111.0,
        cxl_ratio: 2.15,
        bytes_per_ns: 8.0 * 4.0 * 0.92,
        fill_buffers: 16.0,
        store_buffer: 112.0,
        write_back_ratio: 170.0 / 130.0,
        streamed_ns: 2.8,
        issue_ns: 0.5 / 3.9,
        prefetch_ns: 1.0 / 3.0 / 3.9,
        fence_ns: 33.0 / 3.9,
        pause_ns: 140.0 / 3.9,
        clock_ns: 18.0 / 3.9,
        call_ns: 3.0,
        invalidate_ns: 0.0,
        write_ns: 0.0,
    };

    /// The paper's other host, before anything is fitted.
    pub(crate) const OTHER_HOST: Self = Self { cxl_ratio: 2.29, ..Self::SOURCED };

    /// A load from the pool.
    pub(crate) fn load_ns(&self) -> f64 {
        self.dram_ns * self.cxl_ratio
    }

    /// How long a line keeps the link busy.
    pub(crate) fn transfer_ns(&self) -> f64 {
        64.0 / self.bytes_per_ns
    }
}

/// A parameter that can be changed to see what it does.
pub(crate) struct Parameter {
    pub(crate) name: &'static str,
    pub(crate) slug: &'static str,
    pub(crate) fitted: bool,
    pub(crate) of: fn(&mut Link) -> &mut f64,
}

/// All of them. The latency of DRAM and its ratio only occur as a product, so one stands for both.
pub(crate) const PARAMETERS: [Parameter; 14] = [
    Parameter { name: "latency of a load", slug: "load", fitted: false, of: |link| &mut link.cxl_ratio },
    Parameter { name: "bandwidth", slug: "bandwidth", fitted: false, of: |link| &mut link.bytes_per_ns },
    Parameter {
        name: "fill buffers",
        slug: "fill-buffers",
        fitted: false,
        of: |link| &mut link.fill_buffers,
    },
    Parameter {
        name: "store buffer",
        slug: "store-buffer",
        fitted: false,
        of: |link| &mut link.store_buffer,
    },
    Parameter {
        name: "CLWB to its end",
        slug: "write-back",
        fitted: false,
        of: |link| &mut link.write_back_ratio,
    },
    Parameter {
        name: "next CLFLUSHOPT of a row",
        slug: "streamed",
        fitted: false,
        of: |link| &mut link.streamed_ns,
    },
    Parameter {
        name: "issuing CLFLUSHOPT, CLWB",
        slug: "issue",
        fitted: false,
        of: |link| &mut link.issue_ns,
    },
    Parameter {
        name: "issuing a prefetch",
        slug: "prefetch",
        fitted: false,
        of: |link| &mut link.prefetch_ns,
    },
    Parameter { name: "MFENCE", slug: "fence", fitted: false, of: |link| &mut link.fence_ns },
    Parameter { name: "PAUSE", slug: "pause", fitted: false, of: |link| &mut link.pause_ns },
    Parameter { name: "reading the clock", slug: "clock", fitted: false, of: |link| &mut link.clock_ns },
    Parameter { name: "a call", slug: "call", fitted: false, of: |link| &mut link.call_ns },
    Parameter {
        name: "CLFLUSHOPT to its end",
        slug: "invalidate",
        fitted: true,
        of: |link| &mut link.invalidate_ns,
    },
    Parameter { name: "CLWB until it is seen", slug: "write", fitted: true, of: |link| &mut link.write_ns },
];
