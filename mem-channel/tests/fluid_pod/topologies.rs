//! Random pods.

use proptest::prelude::*;

use super::{Kind, Topology, Vm};

const GB: f64 = 1e9;

/// What of a pod is chosen at random beside hosts, links, paths, demands and weights.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub(crate) tenants: bool,
    pub(crate) queues: bool,
    pub(crate) on_off: bool,
}

fn paths(elements: usize) -> impl Strategy<Value = Vec<usize>> {
    proptest::sample::subsequence((0..elements).collect::<Vec<_>>(), 1..=elements.min(3))
}

fn vms(shape: Shape, hosts: usize, elements: usize, tenants: usize) -> impl Strategy<Value = Vm> {
    let kind =
        prop_oneof![2 => Just(Kind::Lines), 1 => Just(Kind::Queue(4096)), 1 => Just(Kind::Queue(65536))];
    // Twice as long as it takes until shares follow, and longer.
    let on_off = prop_oneof![1 => Just(None), 1 => (100..800_u32, 100..800_u32).prop_map(Some)];
    let weight = prop::sample::select(vec![0.25, 0.5, 1.0, 2.0, 4.0]);
    let place = (0..hosts, paths(elements), 0..tenants);
    (place, 0.1..30.0_f64, weight, kind, on_off).prop_map(
        move |((host, path, tenant), demand, weight, kind, on_off)| Vm {
            weight,
            tenant: u32::try_from(tenant).unwrap(),
            kind: if shape.queues { kind } else { Kind::Lines },
            on_off: on_off.filter(|_| shape.on_off),
            ..Vm::new(host, &path, demand * GB)
        },
    )
}

/// Up to 4 hosts, 4 links, 11 VMs, and 3 tenants.
pub(crate) fn topologies(shape: Shape) -> impl Strategy<Value = Topology> {
    let links = proptest::collection::vec(5.0..30.0_f64, 1..5);
    let weights = proptest::collection::vec(prop::sample::select(vec![1.0, 2.0, 4.0]), 1..4);
    (1..5_usize, links, weights).prop_flat_map(move |(hosts, capacities, weights)| {
        let weights = if shape.tenants { weights } else { vec![1.0] };
        let vm = vms(shape, hosts, capacities.len(), weights.len());
        proptest::collection::vec(vm, 1..12).prop_map(move |vms| Topology {
            hosts,
            capacities: capacities.iter().map(|capacity| capacity * GB).collect(),
            weights: weights.clone(),
            vms,
        })
    })
}
