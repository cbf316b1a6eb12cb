//! Instances' shares of the fabric, and how loaded that is.

use super::{Page, count, count_us, seconds};
use crate::controller::Handle;
use crate::view::run_ratio;

pub(super) fn add(page: &mut Page, handle: &Handle) {
    let bytes = page.totals(
        "mchannel_bytes",
        "Bytes that an instance's device, or its vCPUs, moved to and from the pool",
    );
    let messages = page.totals("mchannel_messages", "Requests and packets of an instance's device");
    let held = page.second_totals(
        "mchannel_held_seconds",
        "For how long an instance's device had something to move and might not",
    );
    let rate = page.gauges("mchannel_rate_bytes_per_second", "What an instance moves to and from the pool");
    let demand = page.gauges("mchannel_demand_bytes_per_second", "What it would, if nothing held it back");
    let share = page.gauges(
        "mchannel_share_bytes_per_second",
        "What it may, by its weight; absent while that is no limit",
    );
    let run = page.fractions("mchannel_run_ratio", "How much of the time it may go on: T_R of T_W");
    let slept = page.second_totals(
        "mchannel_vcpu_slept_seconds",
        "For how long an instance's vCPUs were put to sleep, summed over them",
    );
    let vcpu_rate =
        page.gauges("mchannel_vcpu_rate_bytes_per_second", "What an instance's vCPUs load and store");
    let vcpu_demand =
        page.gauges("mchannel_vcpu_demand_bytes_per_second", "What they would, if they were never stopped");
    let vcpu_run =
        page.fractions("mchannel_vcpu_run_seconds", "How much of a window an instance's vCPUs may run: T_R");
    let vcpu_window = page.fractions("mchannel_vcpu_window_seconds", "The window: T_W");
    let uncounted = page.gauges(
        "mchannel_vcpus_uncounted",
        "Whether an instance runs with memory in the pool and nobody counts what its vCPUs load and store there",
    );
    let capacity =
        page.gauges("fabric_capacity_bytes_per_second", "What an element of the fabric carries at most");
    let estimated = page
        .gauges("fabric_estimated_bytes_per_second", "What an element with a signal is taken to carry now");
    let level = page
        .gauges("fabric_load_level", "How loaded it is: 0 light, 1 optimal, 2 moderate, 3 severe overload");
    let (view, telemetry) = (handle.view(), handle.telemetry());
    for (name, load) in view.loads(&telemetry) {
        let labels = vec![("element", name)];
        estimated.get_or_create(&labels).set(load.capacity);
        if let Some(seen) = load.level {
            level.get_or_create(&labels).set(seen.number().into());
        }
    }
    for (name, element) in &view.state.fabric.elements {
        capacity.get_or_create(&vec![("element", name.clone())]).set(element.bytes_per_second);
    }
    for it in view.mchannels(&telemetry) {
        let labels = vec![("instance", it.instance), ("tenant", it.tenant)];
        rate.get_or_create(&labels).set(it.rate);
        demand.get_or_create(&labels).set(it.demand);
        run.get_or_create(&labels).set(run_ratio(it.share, it.demand));
        uncounted.get_or_create(&labels).set(it.vcpus_uncounted.into());
        if let Some(bytes) = it.share {
            share.get_or_create(&labels).set(bytes);
        }
        if let Some(vcpus) = it.vcpus {
            vcpu_rate.get_or_create(&labels).set(vcpus.rate);
            vcpu_demand.get_or_create(&labels).set(vcpus.demand);
            vcpu_run.get_or_create(&labels).set(seconds(vcpus.run_us));
            vcpu_window.get_or_create(&labels).set(seconds(vcpus.window_us));
        }
    }
    for (endpoint, sample) in telemetry {
        for counted in &sample.telemetry.mchannels {
            let Some(lease) = counted.lease.and_then(|lease| view.state.leases.get(&lease)) else { continue };
            let Some(instance) = view.state.instances.get(&lease.instance) else { continue };
            let labels = vec![
                ("instance", instance.name.clone()),
                ("device", lease.device.clone()),
                ("endpoint", view.state.endpoint_name(endpoint)),
            ];
            count(&bytes, &labels, counted.bytes);
            count(&messages, &labels, counted.messages);
            count_us(&held, &labels, counted.held_us);
        }
        for counted in &sample.telemetry.vcpus {
            let instance = counted.instance.and_then(|id| view.state.instances.get(&id));
            let Some(instance) = instance else { continue };
            let labels = vec![
                ("instance", instance.name.clone()),
                // Devices have a host's name in front.
                ("device", "vcpus".to_owned()),
                ("endpoint", view.state.endpoint_name(endpoint)),
            ];
            count(&bytes, &labels, counted.bytes);
            count_us(&slept, &labels, counted.slept_us);
        }
    }
}
