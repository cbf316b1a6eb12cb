use super::*;

fn attach(volume: &str) -> Command {
    Command::AttachDevice { instance: "vm1".to_owned(), nic: None, volume: Some(volume.to_owned()) }
}

fn attach_nic() -> Command {
    Command::AttachDevice { instance: "vm1".to_owned(), nic: Some(Box::default()), volume: None }
}

fn detach(device: &str, force: bool) -> Command {
    Command::DetachDevice { instance: "vm1".to_owned(), device: device.to_owned(), force }
}

fn answer(device: &str, plugged: bool, refused: Option<&str>) -> Command {
    let refused = refused.map(str::to_owned);
    Command::DeviceAnswered { instance: "vm1".to_owned(), device: device.to_owned(), plugged, refused }
}

fn connected(lease: LeaseId, connected: bool) -> Command {
    let endpoint = BLK_FRONTEND;
    Command::Attachment {
        endpoint,
        lease,
        connected,
        running: connected,
        write_through: false,
        untold: false,
    }
}

fn devices(state: &State) -> Vec<&str> {
    let instance = state.instance_named("vm1").expect("it is there");
    let leases = instance.nics.iter().chain(&instance.disks);
    leases.map(|id| state.leases[id].device.as_str()).collect()
}

fn lease<'a>(state: &'a State, device: &str) -> &'a Lease {
    state.leases.values().find(|lease| lease.device == device).expect("it is leased")
}

#[test]
fn devices_come_and_their_names_are_free() {
    let mut state = pod_with_vm();
    must(&mut state, &volume("vol1", 16));
    let effects = must(&mut state, &attach("vol1"));
    assert_eq!(kinds(&effects), [EventKind::DeviceAttached]);
    must(&mut state, &attach_nic());
    assert_eq!(devices(&state), ["net0", "net1", "vol0", "vol1"]);
    assert!(lease(&state, "net1").area.is_some(), "the frontend has all that it needs");
    must(&mut state, &detach("net0", false));
    must(&mut state, &attach_nic());
    assert_eq!(devices(&state), ["net1", "net0", "vol0", "vol1"]);
    let mut named = Box::new(NicWish { device: Some("net1".to_owned()), ..NicWish::default() });
    let attach = |nic| Command::AttachDevice { instance: "vm1".to_owned(), nic: Some(nic), volume: None };
    assert_eq!(refused(&mut state, &attach(named.clone())).kind, RefusalKind::Exists);
    named.device = Some("../net".to_owned());
    assert_eq!(refused(&mut state, &attach(named.clone())).kind, RefusalKind::InvalidName);
    named.device = Some("uplink".to_owned());
    must(&mut state, &attach(named));
    assert_eq!(devices(&state), ["net1", "net0", "uplink", "vol0", "vol1"]);
}

#[test]
fn a_device_keeps_its_slot_whatever_comes_and_goes() {
    let mut state = pod_with_vm();
    must(&mut state, &volume("vol1", 16));
    let slot = |state: &State, device: &str| state.slot_of(lease(state, device));
    assert_eq!((slot(&state, "net0"), slot(&state, "vol0")), (0, 1));
    must(&mut state, &attach("vol1"));
    must(&mut state, &attach_nic());
    assert_eq!((slot(&state, "vol1"), slot(&state, "net1")), (2, 3));
    must(&mut state, &detach("vol0", false));
    assert_eq!((slot(&state, "vol1"), slot(&state, "net1")), (2, 3));
    must(&mut state, &attach("vol0"));
    assert_eq!(slot(&state, "vol0"), 1);
    // Leases of an earlier controller, which knew of no slots, get what is left.
    for name in ["net0", "vol1"] {
        let id = lease(&state, name).id;
        state.leases.get_mut(&id).expect("it is leased").slot = None;
    }
    assert_eq!((slot(&state, "net0"), slot(&state, "vol1")), (0, 2));
    must(&mut state, &attach_nic());
    assert_eq!(slot(&state, "net2"), 4);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut state = pod_with_vm();
    assert_eq!(refused(&mut state, &attach("vol0")).kind, RefusalKind::Leased);
    assert_eq!(refused(&mut state, &attach("vol9")).kind, RefusalKind::NotFound);
    let both = Command::AttachDevice {
        instance: "vm1".to_owned(),
        nic: Some(Box::default()),
        volume: Some("vol0".to_owned()),
    };
    assert_eq!(refused(&mut state, &both).kind, RefusalKind::InvalidValue);
    assert_eq!(refused(&mut state, &detach("vol9", true)).kind, RefusalKind::NotFound);
    for _ in 1..create::NICS_MAX {
        must(&mut state, &attach_nic());
    }
    let refusal = refused(&mut state, &attach_nic());
    assert!(refusal.detail.contains("8 NICs"), "{refusal}");
}

#[test]
fn a_device_in_use_leaves_when_its_vmm_has_let_go() {
    let mut state = pod_with_vm();
    let id = disk_lease(&state).id;
    must(&mut state, &connected(id, true));
    assert_eq!(kinds(&must(&mut state, &detach("vol0", false))), [EventKind::DeviceLeaving]);
    assert!(lease(&state, "vol0").leaving);
    let effects = must(&mut state, &connected(id, false));
    assert_eq!(kinds(&effects), [EventKind::Detached, EventKind::DeviceDetached]);
    assert_eq!(devices(&state), ["net0"]);
    must(&mut state, &attach("vol0"));
}

#[test]
fn a_guest_that_keeps_a_device_is_told_of_and_can_be_asked_again() {
    let mut state = pod_with_vm();
    let id = disk_lease(&state).id;
    must(&mut state, &connected(id, true));
    must(&mut state, &detach("vol0", false));
    let effects = must(&mut state, &answer("vol0", true, Some("the guest keeps it")));
    assert_eq!(kinds(&effects), [EventKind::DeviceRefused]);
    assert_eq!(kinds(&must(&mut state, &answer("vol0", true, Some("the guest keeps it")))), []);
    must(&mut state, &detach("vol0", false));
    assert_eq!((lease(&state, "vol0").leaving, &lease(&state, "vol0").refused), (true, &None));
    must(&mut state, &detach("vol0", true));
    assert_eq!(devices(&state), ["net0"]);
}

#[test]
fn a_frontend_that_starts_anew_takes_no_device_away() {
    let mut state = pod_with_vm();
    let id = disk_lease(&state).id;
    must(&mut state, &connected(id, true));
    must(&mut state, &answer("vol0", true, None));
    join_as(&mut state, BLK_FRONTEND, 2);
    assert!(!lease(&state, "vol0").connected);
    // Its VMM is about to connect again.
    assert_eq!(kinds(&must(&mut state, &detach("vol0", false))), [EventKind::DeviceLeaving]);
    must(&mut state, &connected(id, true));
    assert_eq!(devices(&state), ["net0", "vol0"]);
    must(&mut state, &connected(id, false));
    assert_eq!(devices(&state), ["net0"]);
}

#[test]
fn a_device_leaves_by_the_word_of_its_vmm_while_the_frontend_is_away() {
    let mut state = pod_with_vm();
    let id = disk_lease(&state).id;
    must(&mut state, &connected(id, true));
    must(&mut state, &answer("vol0", true, None));
    must(&mut state, &detach("vol0", false));
    join_as(&mut state, BLK_FRONTEND, 2);
    assert_eq!(kinds(&must(&mut state, &answer("vol0", false, None))), [EventKind::DeviceDetached]);
    assert_eq!(devices(&state), ["net0"]);
    // One that is not to leave stays, whatever the VMM says.
    must(&mut state, &attach("vol0"));
    must(&mut state, &answer("vol0", false, Some("no port is free")));
    assert_eq!(devices(&state), ["net0", "vol0"]);
}

#[test]
fn nothing_comes_or_goes_while_an_instance_moves() {
    let mut state = pod_with_vm();
    must(&mut state, &volume("vol1", 16));
    for role in [Role::NetFrontend, Role::BlkFrontend] {
        join_as(&mut state, EndpointId::new(HostId::new(3), role), 1);
    }
    let prepare = Command::PrepareMigration { name: "vm1".to_owned(), to: HostId::new(3) };
    let id = disk_lease(&state).id;
    must(&mut state, &connected(id, true));
    must(&mut state, &detach("vol0", false));
    assert_eq!(refused(&mut state, &prepare).kind, RefusalKind::Busy);
    must(&mut state, &connected(id, false));
    must(&mut state, &answer("net0", true, None));
    must(&mut state, &attach("vol0"));
    let refusal = refused(&mut state, &prepare);
    assert!(refusal.kind == RefusalKind::Busy && refusal.detail.contains("vol0 is not plugged"), "{refusal}");
    must(&mut state, &answer("vol0", true, None));
    must(&mut state, &prepare);
    assert_eq!(refused(&mut state, &attach("vol1")).kind, RefusalKind::Busy);
    assert_eq!(refused(&mut state, &detach("net0", true)).kind, RefusalKind::Busy);
}
