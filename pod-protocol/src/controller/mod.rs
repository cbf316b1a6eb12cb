//! The controller's side: one port to every endpoint of the pod.

mod event;
mod peer;
mod port;

pub use self::event::{CommandFailure, CommandId, JoinRequest, PortError, PortEvent};
pub use self::port::{ControllerPort, PortWaker};

#[cfg(test)]
mod tests;
