//! Opening the NIC that a configuration describes.

use cxl_pool::{Memory, Pool};

use super::af_xdp::AfXdpNic;
use super::netlink::Netlink;
use super::null::NullNic;
use super::tap::TapNic;
use super::{Driver, Nic, NicConfig, NicError};

/// Opens the NIC. It receives nothing before it is started.
pub fn open<M: Memory>(config: &NicConfig, pool: &Pool, memory: &M) -> Result<Box<dyn Nic>, NicError> {
    Ok(match config.driver {
        Driver::Tap => Box::new(TapNic::open(config, pool)?),
        Driver::AfXdp => Box::new(AfXdpNic::open(config, pool)?),
        Driver::Null => Box::new(NullNic::new(config, memory.clone())),
    })
}

/// Whether the interface of a NIC is there already.
pub fn exists(config: &NicConfig) -> bool {
    Netlink::open().and_then(|mut netlink| netlink.by_name(config.interface())).is_ok()
}
