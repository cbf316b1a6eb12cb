//! How long it takes to show all of a pod, as the API's lists and each scrape of its metrics do.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use pod_controller::view::{PoolFacts, View};
use pod_protocol::protocol::Spoken;
use pod_state::State;

/// How often each list is made.
const ROUNDS: usize = 5;

/// The least that it takes to list the hosts, the devices and the volumes of a pod, in ms.
pub(super) fn measure(state: &State) -> Result<[f64; 3]> {
    let view = View::new(state, PoolFacts::outside(Path::new("pool")), PathBuf::from("sockets"));
    let (telemetry, spoken) = (BTreeMap::new(), Spoken::nowhere());
    let hosts = least(|| view.hosts((&telemetry, &spoken), Instant::now()).len());
    let devices = least(|| view.devices(&telemetry).len());
    let volumes = least(|| view.volumes(&telemetry).len());
    let there = [state.hosts.len(), state.devices.len(), state.volumes.len()];
    let shown = [hosts, devices, volumes];
    ensure!(shown.map(|(count, _)| count) == there, "what is shown is not what is there");
    Ok(shown.map(|(_, ms)| ms))
}

fn least(list: impl Fn() -> usize) -> (usize, f64) {
    let mut least = f64::INFINITY;
    let mut count = 0;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        count = black_box(list());
        least = least.min(start.elapsed().as_secs_f64() * 1e3);
    }
    (count, least)
}
