use cxl_pool::{EndpointId, Generation, Role};
use pod_protocol::ids::{ChannelId, RegionId};
use pod_protocol::objects::Engine;
use serde::{Deserialize, Serialize};

/// A pair of rings between a frontend and a backend, shared by all leases that join the two.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Channel {
    /// Its number, which stays through restarts of either side.
    pub id: ChannelId,
    /// The frontend.
    pub frontend: EndpointId,
    /// The backend.
    pub backend: EndpointId,
    /// Grows each time the rings are made.
    pub generation: Generation,
    /// The rings, once they were made.
    pub rings: Option<Rings>,
}

/// The rings of one generation of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rings {
    /// From the frontend to the backend.
    pub to_backend: RegionId,
    /// From the backend to the frontend.
    pub to_frontend: RegionId,
    /// How many slots each has.
    pub slots: u32,
    /// The life of the frontend that they were made for.
    pub frontend_incarnation: u64,
    /// The life of the backend that they were made for.
    pub backend_incarnation: u64,
}

impl Channel {
    /// Which messages it carries.
    pub const fn engine(&self) -> Engine {
        match self.frontend.role {
            Role::BlkFrontend => Engine::Blk,
            _ => Engine::Net,
        }
    }
}
