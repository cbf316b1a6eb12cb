//! The frontend of a mirrored or striped volume, on one of the hosts between which its guest moves.

use cxl_channel::RingPlacement;
use cxl_channel::doorbell::DoorbellListener;
use cxl_pool::simulated::{SimulatedMemory, SimulatedPool};
use cxl_pool::{Area, HostId, LineCount, LineOffset, Role};
use pod_protocol::endpoint::Reporter;
use pod_protocol::ids::ChannelId;
use pod_protocol::run_directory::RunDirectory;
use vhost_blk_cxl::frontend::Frontend;

use super::drives::Drives;
use super::mirror::{RING_LINES, RINGS};
use super::{Pod, endpoint};

const DATA_BYTES: u64 = 8 << 20;

/// A host whose frontend serves the volume's guest, or will.
pub(super) struct Side {
    pub(super) host: u16,
    pub(super) reporter: Reporter,
    pub(super) data_area: Area,
    pub(super) socket: String,
    pub(super) generations: Vec<u32>,
    pub(super) rings: Vec<[RingPlacement; 2]>,
}

impl Side {
    /// There is room for the areas of two.
    pub(super) fn new(host: u16, place: u64, backends: usize) -> Self {
        let lines = LineCount::covering(DATA_BYTES);
        Self {
            host,
            reporter: Reporter::new().unwrap(),
            data_area: Area::new(LineOffset::new(RINGS + RING_LINES + place * lines.get()), lines),
            socket: format!("vm0-vol0-{host}.sock"),
            generations: vec![0; backends],
            rings: Vec::new(),
        }
    }

    pub(super) fn channel(&self, index: usize) -> ChannelId {
        ChannelId::new(u32::from(self.host) * 8 + index as u32)
    }

    pub(super) fn start(&self, pool: &SimulatedPool, drives: &Drives, run: &RunDirectory) -> Frontend {
        let bell =
            DoorbellListener::bind(&run.data_doorbell(endpoint(self.host, Role::BlkFrontend))).unwrap();
        let worker = Pod::<SimulatedMemory>::worker();
        let (bell, reporter) = (Some(bell), Some(self.reporter.clone()));
        match drives {
            Drives::Ram => {
                let memory = pool.host(HostId::new(self.host));
                Frontend::start(memory, run.clone(), worker, bell, reporter, None).unwrap()
            }
            Drives::Files { pool, .. } => {
                Frontend::start(pool.hardware(), run.clone(), worker, bell, reporter, None).unwrap()
            }
        }
    }
}
