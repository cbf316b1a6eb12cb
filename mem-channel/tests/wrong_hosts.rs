//! What hosts that are wrong do to the shares of others, whatever they publish.

use mem_channel::{
    ElementId, Host, MOST_WEIGHT, MchannelId, MchannelOptions, Measured, Node, Parameters, Record, Sums,
    TenantId, TenantOptions,
};
use proptest::prelude::*;

const LINK: ElementId = ElementId(1);
const CAPACITY: f64 = 10e9;
const K_US: f64 = 1000.0;
const TENANTS: u32 = 3;

fn a_number() -> impl Strategy<Value = f64> {
    const ODD: [f64; 7] = [0.0, -1.0, 1e-300, 1e300, f64::MAX, f64::INFINITY, f64::NAN];
    prop_oneof![proptest::sample::select(&ODD[..]), 0.0..1e12, 0.0..1000.0]
}

#[expect(clippy::cast_possible_truncation, reason = "any number will do")]
fn a_record() -> impl Strategy<Value = Record> {
    let sums = [(); 5].map(|()| a_number());
    // Of the root, of tenants, and of such that nobody else knows.
    (0..TENANTS + 3, sums, a_number(), a_number()).prop_map(|(node, sums, extra, load)| {
        let [rate, demand, max_demand, alpha, weight] = sums;
        let node = match node {
            0 => Node::Root { capacity: extra as f32, load: load as f32 },
            tenant => Node::Tenant { tenant: TenantId(tenant), weight: extra as f32 },
        };
        Record { element: LINK, node, sums: Sums { rate, demand, max_demand, alpha, weight } }
    })
}

/// What several hosts publish in a K.
fn a_round(hosts: usize) -> impl Strategy<Value = Vec<Vec<Record>>> {
    prop::collection::vec(prop::collection::vec(a_record(), 0..8), hosts)
}

/// A VM of this host.
#[derive(Clone, Copy, Debug)]
struct Vm {
    tenant: u32,
    weight: f64,
    wants: f64,
}

fn a_vm() -> impl Strategy<Value = Vm> {
    let wants = prop_oneof![Just(0.0), 1e6..20e9];
    (1..=TENANTS, 1..=1000_u32, wants).prop_map(|(tenant, weight, wants)| Vm {
        tenant,
        weight: f64::from(weight),
        wants,
    })
}

/// Moves what it wants of what it may, in a K.
fn moved(vm: &Vm, share: f64) -> Measured {
    let rate = vm.wants.min(share);
    let open = if vm.wants > 0.0 { rate / vm.wants } else { 1.0 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a K")]
    let queue_bytes = (rate * K_US / 1e6) as u64;
    Measured { elapsed_us: K_US, queue_bytes, queue_open_us: open * K_US, ..Measured::default() }
}

proptest! {
    #[test]
    fn whatever_others_publish_a_vm_is_sure_of_its_part(
        weights in prop::collection::vec(1..=1000_u32, TENANTS as usize),
        vms in prop::collection::vec(a_vm(), 1..5),
        rounds in (1..4_usize).prop_flat_map(|hosts| prop::collection::vec(a_round(hosts), 1..24)),
    ) {
        let mut host = Host::new(Parameters { t_w_us: K_US, ..Parameters::default() }).unwrap();
        host.set_element(LINK, CAPACITY).unwrap();
        for (tenant, weight) in (1..).zip(&weights) {
            host.set_tenant(TenantId(tenant), TenantOptions { weight: f64::from(*weight) }).unwrap();
        }
        let open = |vm: &Vm| {
            let (tenant, weight) = (TenantId(vm.tenant), vm.weight);
            host.open(&MchannelOptions { tenant, weight, path: vec![LINK] }).unwrap()
        };
        let ids: Vec<MchannelId> = vms.iter().map(open).collect();
        let mut shares = vec![CAPACITY; vms.len()];
        let all: f64 = weights.iter().copied().map(f64::from).sum();
        let quiet = [vec![], vec![]];
        for round in rounds.iter().map(Vec::as_slice).chain([&quiet[..]]) {
            for ((vm, id), share) in vms.iter().zip(&ids).zip(&shares) {
                host.schedule(*id, &moved(vm, *share)).unwrap();
            }
            host.sample(K_US);
            let hosts = (0..).zip(round).filter(|(_, records)| !records.is_empty());
            host.settle(hosts.clone().flat_map(|(number, records)| records.iter().map(move |it| (number, it))));
            let capacity = host.capacity(LINK).unwrap();
            prop_assert!((CAPACITY / 2.0..=CAPACITY).contains(&capacity), "{capacity}");
            let others = hosts.fold(0.0, |others, _| others + MOST_WEIGHT);
            for ((vm, id), share) in vms.iter().zip(&ids).zip(&mut shares) {
                let of_tenant = vms.iter().filter(|it| it.tenant == vm.tenant);
                let ours: f64 = of_tenant.map(|it| it.weight).sum();
                let tenant = capacity * f64::from(weights[vm.tenant as usize - 1]) / all;
                let floor = tenant * vm.weight / (ours + others);
                let decision = host.schedule(*id, &Measured::default()).unwrap();
                prop_assert!(decision.share >= floor * (1.0 - 1e-9), "{decision:?}, and not {floor}");
                prop_assert!(decision.queue_rate >= floor / 2.0 * (1.0 - 1e-9), "{decision:?}");
                *share = decision.queue_rate;
            }
        }
    }
}

/// A line like this one had everybody wait for ever.
#[test]
fn a_host_that_claims_everything_is_a_host_with_many_hungry_vms_and_no_more() {
    let mut host = Host::new(Parameters::default()).unwrap();
    host.set_element(LINK, CAPACITY).unwrap();
    host.set_tenant(TenantId(1), TenantOptions { weight: 1.0 }).unwrap();
    let id = host.open(&MchannelOptions { tenant: TenantId(1), weight: 1.0, path: vec![LINK] }).unwrap();
    let sums = Sums { rate: 1e300, demand: 1e300, max_demand: 1e300, alpha: 0.0, weight: 1e300 };
    let record = |tenant, weight| Record {
        element: LINK,
        node: Node::Tenant { tenant: TenantId(tenant), weight },
        sums,
    };
    // Some of tenants that there are not, and the same several times.
    let records = [record(1, 1e30), record(1, 1e30), record(7, 1e30), record(8, 1e30)];
    let vm = Vm { tenant: 1, weight: 1.0, wants: 20e9 };
    let mut share = CAPACITY;
    for _ in 0..20 {
        host.schedule(id, &moved(&vm, share)).unwrap();
        host.sample(K_US);
        host.settle(records.iter().map(|record| (1, record)));
        share = host.schedule(id, &Measured::default()).unwrap().share;
    }
    let sure = CAPACITY / (1.0 + MOST_WEIGHT);
    assert!(share >= sure && share < 1.01 * sure, "{share}, and not {sure}");
    // It is found out, or its board is gone.
    host.schedule(id, &moved(&vm, share)).unwrap();
    host.sample(K_US);
    host.settle([]);
    let share = host.schedule(id, &Measured::default()).unwrap().share;
    assert!(share >= CAPACITY, "{share}");
}
