//! What controller and endpoints tell each other, and frontends and agents of vCPUs.

use std::fmt::Debug;

use cxl_pool::{Area, EndpointId, LineCount, LineOffset};
use pod_protocol::answer::Answer;
use pod_protocol::commands::Command;
use pod_protocol::objects::Object;
use pod_protocol::reports::Report;
use pod_protocol::vcpus::{FromAgent, MESSAGE_BYTES_MAX, ToAgent};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// JSON of a command or a report; or the text of an endpoint's name.
pub fn control(data: &[u8]) {
    if let Some(Command::Apply { object, .. }) = survives::<Command>(data) {
        let _ = object.id().to_string();
        if let Object::Channel(channel) = &object {
            let area = Area::new(LineOffset::new(4096), LineCount::new(1 << 20));
            for (ring, words) in [(channel.outgoing, 2), (channel.incoming, 8)] {
                if ring.check(words, area).is_ok() {
                    assert!(area.contains_area(&ring.area(words)));
                }
            }
        }
    }
    survives::<Report>(data);
    survives::<Answer>(data);
    if let Some(name) = std::str::from_utf8(data).ok().and_then(|text| text.parse::<EndpointId>().ok()) {
        assert_eq!(name.to_string().parse().ok(), Some(name));
    }
}

/// JSON of what an agent of vCPUs says to a frontend, or hears from it.
pub fn vcpus(data: &[u8]) {
    // Nothing longer gets as far as this.
    let data = data.get(..MESSAGE_BYTES_MAX).unwrap_or(data);
    survives::<FromAgent>(data);
    if let Some(ToAgent::Order(order)) = survives(data) {
        let part = order.part();
        assert!((0.0..=1.0).contains(&part), "{part} of a window");
        assert!(part > 0.0 || order.run_ns == 0);
    }
}

/// What can be read can be written, and is then the same.
fn survives<T: DeserializeOwned + Serialize + PartialEq + Debug>(data: &[u8]) -> Option<T> {
    let value: T = serde_json::from_slice(data).ok()?;
    let again = serde_json::to_vec(&value).expect("plain data");
    assert_eq!(serde_json::from_slice::<T>(&again).ok().as_ref(), Some(&value));
    Some(value)
}
