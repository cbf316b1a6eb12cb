//! What one host tells the others, and what it makes of what they tell: numbers that can be computed by hand.

use mem_channel::{
    Decision, ElementId, Host, MchannelId, MchannelOptions, Measured, MemChannelError, Node, Parameters,
    Record, Sums, TenantId, TenantOptions,
};

const LINK: ElementId = ElementId(1);
const CAPACITY: f64 = 10e9;
const RED: TenantId = TenantId(1);
const BLUE: TenantId = TenantId(2);
const T_W_US: f64 = 100.0;
const K_US: f64 = 1000.0;

/// A host with a link, and two tenants of these weights.
fn host(red: f64, blue: f64) -> Host {
    let mut host = Host::new(Parameters { least_capacity: 0.01, ..Parameters::default() }).unwrap();
    host.set_element(LINK, CAPACITY).unwrap();
    host.set_tenant(RED, TenantOptions { weight: red }).unwrap();
    host.set_tenant(BLUE, TenantOptions { weight: blue }).unwrap();
    host
}

fn open(host: &mut Host, tenant: TenantId, weight: f64) -> MchannelId {
    host.open(&MchannelOptions { tenant, weight, path: vec![LINK] }).unwrap()
}

fn window(host: &mut Host, id: MchannelId, measured: &Measured) -> Decision {
    host.schedule(id, measured).unwrap()
}

/// One K in which its vCPUs always run, and move so much.
fn sample_lines(host: &mut Host, id: MchannelId, bytes_per_s: f64) -> Decision {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a window")]
    let line_bytes = (bytes_per_s * T_W_US / 1e6) as u64;
    let measured = Measured {
        elapsed_us: T_W_US,
        run_us: T_W_US,
        line_bytes,
        queue_open_us: T_W_US,
        ..Measured::default()
    };
    (0..10).map(|_| window(host, id, &measured)).last().unwrap()
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-6 * expected.abs().max(1.0), "{found}, not {expected}");
}

fn of(records: &[Record], tenant: Option<TenantId>) -> Option<&Sums> {
    let found = records.iter().find(|record| match record.node {
        Node::Root { .. } => tenant.is_none(),
        Node::Tenant { tenant: it, .. } => tenant == Some(it),
    });
    found.map(|record| &record.sums)
}

fn weight_of(records: &[Record], wanted: TenantId) -> Option<f32> {
    records.iter().find_map(|record| match record.node {
        Node::Tenant { tenant, weight } if tenant == wanted => Some(weight),
        _ => None,
    })
}

#[test]
fn a_host_tells_the_sums_of_each_tenant_and_of_all() {
    let mut host = host(2.0, 1.0);
    let red = [open(&mut host, RED, 4.0), open(&mut host, RED, 1.0)];
    let blue = open(&mut host, BLUE, 1.0);
    for (id, rate) in [(red[0], 8e9), (red[1], 1e9), (blue, 3e9)] {
        sample_lines(&mut host, id, rate);
    }
    let records = host.sample(K_US).to_vec();
    for (tenant, rate, max_demand, weight) in
        [(None, 12e9, 4.5e9, 3.0), (Some(RED), 9e9, 2e9, 5.0), (Some(BLUE), 3e9, 3e9, 1.0)]
    {
        let sums = of(&records, tenant).unwrap();
        near(sums.rate, rate);
        near(sums.demand, rate);
        near(sums.max_demand, max_demand);
        near(sums.weight, weight);
        near(sums.alpha, max_demand);
    }
}

/// Of r_c, which line 14 sums, a part is from before; and of what moved now, a part comes later.
#[test]
fn what_moved_in_a_k_is_told_as_a_whole_and_once() {
    let mut host = host(1.0, 1.0);
    let id = open(&mut host, RED, 1.0);
    for moved in [8e9, 0.0, 4e9] {
        sample_lines(&mut host, id, moved);
        near(of(host.sample(K_US), None).unwrap().rate, moved);
    }
}

#[test]
fn of_a_vm_that_others_measure_too_a_host_tells_its_part() {
    let mut host = host(1.0, 1.0);
    let id = open(&mut host, RED, 4.0);
    let mut measured = Measured {
        elapsed_us: T_W_US,
        run_us: T_W_US,
        line_bytes: 100_000,
        queue_open_us: T_W_US,
        demand_elsewhere: 3e9,
        ..Measured::default()
    };
    window(&mut host, id, &measured);
    let sums = *of(host.sample(T_W_US), Some(RED)).unwrap();
    near(sums.demand, 1e9);
    near(sums.max_demand, 1e9);
    near(sums.weight, 1.0);
    // Nobody wants more than the link carries, whatever he says.
    for (elsewhere, whole) in [(1e15, 11e9), (-5.0, 1e9), (f64::NAN, 1e9)] {
        measured.demand_elsewhere = elsewhere;
        window(&mut host, id, &measured);
        near(of(host.sample(T_W_US), Some(RED)).unwrap().max_demand, whole / 4.0);
    }
}

#[test]
fn who_wants_less_than_a_line_has_no_part_and_who_just_begins_has() {
    let mut host = host(1.0, 1.0);
    let id = open(&mut host, RED, 1.0);
    let measured = Measured {
        elapsed_us: K_US,
        run_us: K_US,
        line_bytes: 32,
        queue_open_us: K_US,
        ..Measured::default()
    };
    window(&mut host, id, &measured);
    let sums = *of(host.sample(K_US), Some(RED)).unwrap();
    near(sums.rate, 32e3);
    assert!(sums.weight <= 0.0 && sums.demand <= 0.0, "{sums:?}");
    // What it moved it wanted, though its average lags behind.
    sample_lines(&mut host, id, 8e9);
    near(of(host.sample(K_US), Some(RED)).unwrap().demand, 8e9);
}

#[test]
fn windows_that_are_late_count_for_as_long_as_they_are() {
    let rate = |windows: u32, length_us: f64| {
        let mut host = host(1.0, 1.0);
        let id = open(&mut host, RED, 1.0);
        let first = Measured { elapsed_us: T_W_US, line_bytes: 100_000, ..Measured::default() };
        window(&mut host, id, &first);
        let idle = Measured { elapsed_us: length_us, ..Measured::default() };
        (0..windows).map(|_| window(&mut host, id, &idle).rate).last().unwrap()
    };
    near(rate(10, T_W_US), 1e9 / std::f64::consts::E);
    near(rate(1, K_US), 1e9 / std::f64::consts::E);
}

#[test]
fn what_queues_want_is_what_they_move_while_they_are_open_and_never_more_than_fits() {
    let mut host = host(1.0, 1.0);
    host.set_element(LINK, 4e9).unwrap();
    let demand = |host: &mut Host, open_us: f64| {
        let id = open(host, RED, 1.0);
        let queue_bytes = 50_000;
        let measured =
            Measured { elapsed_us: T_W_US, queue_bytes, queue_open_us: open_us, ..Measured::default() };
        let decision = window(host, id, &measured);
        near(decision.rate, 5e8);
        decision.demand
    };
    near(demand(&mut host, 50.0), 1e9);
    near(demand(&mut host, 1.0), 4e9);
    near(demand(&mut host, 0.0), 4e9);
    // The link was made wider.
    let id = open(&mut host, RED, 1.0);
    host.set_element(LINK, 6e9).unwrap();
    let burst = Measured { elapsed_us: T_W_US, queue_bytes: 50_000, ..Measured::default() };
    near(window(&mut host, id, &burst).demand, 6e9);
}

#[test]
fn tenants_divide_a_link_by_their_weights() {
    let mut host = host(1.0, 1.0);
    let ids = [open(&mut host, RED, 1.0), open(&mut host, BLUE, 1.0)];
    host.set_tenant(RED, TenantOptions { weight: 2.0 }).unwrap();
    for id in ids {
        sample_lines(&mut host, id, 20e9);
    }
    let records = host.sample(K_US);
    assert_eq!((weight_of(records, RED), weight_of(records, BLUE)), (Some(2.0), Some(1.0)));
    host.settle([]);
    // α = max(D/w)·C/F = 20·10/40, and each tenant's VM has all that the tenant has.
    near(host.share(LINK).unwrap().alpha, 5e9);
    near(host.tenant_share(LINK, RED).unwrap().alpha, 10e9);
    near(host.tenant_share(LINK, BLUE).unwrap().alpha, 5e9);
    near(sample_lines(&mut host, ids[0], 20e9).share, 10e9);
}

#[test]
fn nobody_is_held_any_more_once_the_share_is_what_the_hungriest_wants() {
    let mut host = host(4.0, 1.0);
    let ids = [open(&mut host, RED, 1.0), open(&mut host, BLUE, 1.0)];
    let mut sample = |run_us: f64| {
        for (id, demand) in ids.into_iter().zip([8e9, 2.5e9]) {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a window")]
            let line_bytes = (demand * run_us / 1e6) as u64;
            let measured = Measured { elapsed_us: T_W_US, run_us, line_bytes, ..Measured::default() };
            for _ in 0..10 {
                window(&mut host, id, &measured);
            }
        }
        host.sample(K_US);
        host.settle([]);
        host.share(LINK).unwrap()
    };
    let share = sample(T_W_US);
    assert!(share.congested);
    near(share.alpha, 2.5e9 * 10.0 / 10.5);
    // Red wants 2 for each of its parts.
    let share = sample(T_W_US / 2.0);
    assert!(!share.congested);
    near(share.alpha, 2.5e9);
}

#[test]
fn what_a_vm_loads_and_what_its_queues_move_is_one_share() {
    let mut host = host(1.0, 1.0);
    let ids = [open(&mut host, RED, 1.0), open(&mut host, RED, 1.0)];
    let both = Measured {
        elapsed_us: T_W_US,
        run_us: T_W_US,
        line_bytes: 1_000_000,
        queue_bytes: 500_000,
        queue_open_us: T_W_US,
        ..Measured::default()
    };
    for id in ids {
        window(&mut host, id, &both);
    }
    host.sample(T_W_US);
    host.settle([]);
    let decision = window(&mut host, ids[0], &both);
    near(decision.share, 5e9);
    near(decision.queue_rate, 2.5e9);
    // Of 10 GB/s, which is what it would load and store.
    near(decision.t_r_us, T_W_US / 4.0);
}

#[test]
fn what_other_hosts_see_of_a_link_counts() {
    let mut host = host(1.0, 1.0);
    let root = |capacity, load, sums| Record { element: LINK, node: Node::Root { capacity, load }, sums };
    host.sample(K_US);
    host.settle([(1, &root(6e9, 1.0, Sums::default())), (2, &root(4e9, 0.0, Sums::default()))]);
    // Half way to the mean of 5, and half of that, since one of them is overloaded.
    near(host.capacity(LINK).unwrap(), 3.75e9);
}

#[test]
fn a_tenant_that_wants_nothing_has_no_part() {
    let mut host = host(1.0, 1.0);
    let id = open(&mut host, RED, 1.0);
    sample_lines(&mut host, id, 20e9);
    host.sample(K_US);
    let idle = Node::Tenant { tenant: BLUE, weight: 100.0 };
    let root = Node::Root { capacity: 10e9, load: 0.0 };
    // Somebody who had next to no share moved much: what is left of α is C/Σw.
    let sums = Sums { rate: 1e12, alpha: 1.0, ..Sums::default() };
    let records = [(idle, Sums::default()), (root, sums)];
    let records = records.map(|(node, sums)| Record { element: LINK, node, sums });
    host.settle(records.iter().map(|record| (1, record)));
    near(host.share(LINK).unwrap().alpha, 10e9);
}

#[test]
fn who_is_closed_is_gone() {
    let mut host = host(1.0, 1.0);
    let (old, other) = (open(&mut host, RED, 1.0), open(&mut host, BLUE, 1.0));
    assert_eq!(host.sample(K_US).len(), 3);
    host.close(old).unwrap();
    assert!(of(host.sample(K_US), Some(RED)).is_none());
    let new = open(&mut host, RED, 1.0);
    // It has the place of the old one.
    for error in [
        host.schedule(old, &Measured::default()).unwrap_err(),
        host.set_weight(old, 2.0).unwrap_err(),
        host.close(old).unwrap_err(),
    ] {
        assert_eq!(error, MemChannelError::UnknownMchannel(old));
    }
    for id in [new, other] {
        host.close(id).unwrap();
    }
    assert_eq!(host.sample(K_US).len(), 0);
}

#[test]
fn a_host_tells_of_elements_that_it_uses_or_looks_at() {
    let (other, third) = (ElementId(2), ElementId(3));
    let mut host = host(1.0, 1.0);
    host.set_element(other, CAPACITY).unwrap();
    host.set_element(third, CAPACITY).unwrap();
    let told = |host: &mut Host| -> Vec<ElementId> {
        host.sample(K_US).iter().map(|record| record.element).collect()
    };
    assert_eq!(told(&mut host), []);
    let id = host.open(&MchannelOptions { tenant: RED, weight: 1.0, path: vec![other] }).unwrap();
    assert_eq!(told(&mut host), [other, other]);
    // The load of a device is seen where it is, whoever uses it.
    host.observe(third, 0.5).unwrap();
    assert_eq!(told(&mut host), [other, other, third]);
    assert_eq!(told(&mut host), [other, other]);
    host.close(id).unwrap();
    assert_eq!(told(&mut host), []);
}

#[test]
fn elements_and_tenants_go_and_what_is_known_of_the_others_stays() {
    let (before, after) = (ElementId(0), ElementId(2));
    let mut host = Host::new(Parameters::default()).unwrap();
    for element in [before, LINK, after] {
        host.set_element(element, CAPACITY).unwrap();
    }
    for tenant in [RED, BLUE] {
        host.set_tenant(tenant, TenantOptions { weight: 1.0 }).unwrap();
    }
    // At each of them red was first.
    let path = || vec![before, LINK, after];
    let red = host.open(&MchannelOptions { tenant: RED, weight: 1.0, path: path() }).unwrap();
    let blue = host.open(&MchannelOptions { tenant: BLUE, weight: 1.0, path: vec![LINK, after] }).unwrap();
    let other = host.open(&MchannelOptions { tenant: BLUE, weight: 3.0, path: vec![after] }).unwrap();
    for id in [red, blue, other] {
        sample_lines(&mut host, id, 20e9);
    }
    assert_eq!(host.remove_element(before), Err(MemChannelError::ElementInUse(before)));
    assert_eq!(host.remove_tenant(RED), Err(MemChannelError::TenantInUse(RED)));
    host.close(red).unwrap();
    host.remove_element(before).unwrap();
    host.remove_tenant(RED).unwrap();
    assert_eq!(host.remove_element(before), Err(MemChannelError::UnknownElement(before)));
    assert_eq!(host.remove_tenant(RED), Err(MemChannelError::UnknownTenant(RED)));
    let records = host.sample(K_US).to_vec();
    host.settle([]);
    let told: Vec<ElementId> = records.iter().map(|record| record.element).collect();
    assert_eq!(told, [LINK, LINK, after, after]);
    near(records[3].sums.rate, 40e9);
    // Those that are left still know what they want, and their places: the one has no more than its part of the last link, the other the rest.
    near(host.share(LINK).unwrap().alpha, 10e9);
    near(sample_lines(&mut host, blue, 20e9).demand, 20e9);
    near(sample_lines(&mut host, other, 20e9).share, 3.0 * sample_lines(&mut host, blue, 20e9).share);
    // Numbers that were given up may come back.
    host.set_element(before, CAPACITY).unwrap();
    host.set_tenant(RED, TenantOptions { weight: 1.0 }).unwrap();
    host.open(&MchannelOptions { tenant: RED, weight: 1.0, path: path() }).unwrap();
    assert_eq!(host.sample(K_US).len(), 8);
}

/// Lines 3–4 of the listing divide the other way round.
#[test]
fn rate_is_over_the_window_and_demand_over_the_time_run() {
    let mut host = host(1.0, 1.0);
    let id = open(&mut host, RED, 1.0);
    let measured =
        Measured { elapsed_us: T_W_US, run_us: T_W_US / 4.0, line_bytes: 64_000, ..Measured::default() };
    let decision = window(&mut host, id, &measured);
    near(decision.rate, 640e6);
    near(decision.demand, 2560e6);
    // The same of what queues move, which may move while their budget lasts.
    let id = open(&mut host, RED, 1.0);
    let (line_bytes, queue_bytes) = (0, 64_000);
    let measured = Measured { line_bytes, queue_bytes, queue_open_us: T_W_US / 4.0, ..measured };
    let decision = window(&mut host, id, &measured);
    near(decision.rate, 640e6);
    near(decision.demand, 2560e6);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut host = host(1.0, 1.0);
    let mut refused = |path: Vec<ElementId>, tenant, weight| {
        host.open(&MchannelOptions { tenant, weight, path }).unwrap_err()
    };
    assert_eq!(refused(vec![LINK, LINK], RED, 1.0), MemChannelError::Path(2));
    assert_eq!(refused(vec![], RED, 1.0), MemChannelError::Path(0));
    assert_eq!(refused(vec![LINK, ElementId(9)], RED, 1.0), MemChannelError::UnknownElement(ElementId(9)));
    assert_eq!(refused(vec![LINK], TenantId(9), 1.0), MemChannelError::UnknownTenant(TenantId(9)));
    assert!(matches!(refused(vec![LINK], RED, f64::NAN), MemChannelError::Parameter { .. }));
    let reserved = TenantId(u32::MAX);
    let error = host.set_tenant(reserved, TenantOptions { weight: 1.0 }).unwrap_err();
    assert_eq!(error, MemChannelError::ReservedTenant(reserved));
    assert_eq!(host.sample(K_US).len(), 0, "nobody was let in");
    for wrong in [
        Parameters { k_us: 99.0, ..Parameters::default() },
        Parameters { delta: 1.0, ..Parameters::default() },
        Parameters { delta: 0.0, ..Parameters::default() },
        Parameters { g: 0.0, ..Parameters::default() },
        Parameters { g: 1.5, ..Parameters::default() },
        Parameters { t_r_min_us: 101.0, ..Parameters::default() },
        Parameters { t_w_us: f64::NAN, ..Parameters::default() },
        Parameters { lambda_per_s: 0.0, ..Parameters::default() },
        Parameters { least_capacity: 0.0, ..Parameters::default() },
    ] {
        assert!(matches!(Host::new(wrong), Err(MemChannelError::Parameter { .. })), "{wrong:?}");
    }
}
