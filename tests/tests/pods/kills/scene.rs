//! A pod with the instance to which things happen, and its neighbour.

use std::os::unix::process::ExitStatusExt as _;
use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::client::Client;
use pod_api::{CreateInstance, DeviceHealth, Instance, NicRequest};
use vmm::{MigrationSpeed, VmmError};
use wadi_tests::conversation::Conversation;
use wadi_tests::pod::{GUEST_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, Role, VmShape, WaitingVm};

use super::neighbour::{self, Neighbour};

const SHAPE: VmShape = VmShape { memory_mib: 192, cpus: 1 };
/// Longer than anything takes; only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long who has ended stays away.
const AWAY: Duration = Duration::from_millis(200);
/// How much of the guest's memory QEMU copies per second: slowly enough for somebody to be killed meanwhile.
const COPIED_PER_SECOND: u64 = 128 << 20;
const SIGABRT: i32 = 6;
const MAC: &str = "02:00:00:77:00:02";
const HOME: &str = "h2/nic0";
const BACKUP: &str = "h3/nic1";
const NEIGHBOURS: &str = "h4/nic2";

/// What goes on when somebody ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The instance is created.
    Creation,
    /// Its guest boots.
    Boot,
    /// It is in use.
    Traffic,
    /// The cable of its NIC was pulled.
    Failover,
    /// It moves to another NIC.
    NicMove,
    /// Its guest moves to another host.
    Migration,
}

/// Who ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Victim {
    /// The instance's VMM.
    Qemu,
    /// The frontend of its host.
    Frontend,
    /// The frontend of the host to which it moves.
    FrontendThere,
    /// The backend of its NIC.
    Backend,
    /// The backend of the backup NIC.
    Backup,
    Controller,
}

/// How somebody ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// By `kill -9`.
    Killed,
    /// Told to stop, as when it is upgraded. A VMM is killed all the same.
    InOrder,
}

impl Victim {
    /// Those on whom a guest's network hangs wherever it is. A VMM is missing at one stage, so it comes first where each gets one.
    pub(crate) const OF_EVERY_ROUND: &[Self] = &[Self::Qemu, Self::Frontend, Self::Backend, Self::Controller];
}

impl Stage {
    pub(crate) const ALL: &[Self] =
        &[Self::Creation, Self::Boot, Self::Traffic, Self::Failover, Self::NicMove, Self::Migration];

    pub(crate) fn victims(self) -> &'static [Victim] {
        use Victim::{Backend, Backup, Controller, Frontend, FrontendThere, Qemu};
        match self {
            // It has no VMM yet.
            Self::Creation => &[Frontend, Backend, Backup, Controller],
            Self::Migration => &[Qemu, Frontend, FrontendThere, Backend, Backup, Controller],
            _ => &[Qemu, Frontend, Backend, Backup, Controller],
        }
    }

    /// For how long it lasts, about.
    pub(crate) fn longest_ms(self) -> u64 {
        match self {
            Self::Creation | Self::Failover => 30,
            Self::NicMove => 100,
            Self::Boot | Self::Migration => 1500,
            Self::Traffic => 200,
        }
    }
}

pub(crate) struct Scene {
    // The machine and whoever talks with it go before the pod.
    conversation: Option<Conversation>,
    vm: Option<PodVm>,
    neighbour: Neighbour,
    guest: Guest,
    instance: Instance,
    pod: Pod,
    /// How who has its turn now ends.
    end: End,
}

impl Scene {
    pub(crate) fn set_up() -> Self {
        let guest = Guest::ensure(&mut Silent).unwrap();
        let pod = PodBuilder::new()
            .host(HostPlan::new("h1").vms())
            .host(HostPlan::new("h2").nic("nic0"))
            .host(HostPlan::new("h3").vms().backup_nic("nic1"))
            .host(HostPlan::new("h4").nic("nic2"))
            .start()
            .unwrap();
        let other = pod.create_instance("vm2", "h1", &[]).unwrap();
        if other.nics[0].nic != NEIGHBOURS {
            pod.api().migrate_nic("vm2", "net0", Some(NEIGHBOURS)).unwrap();
            pod.wait_for_nic("vm2", NEIGHBOURS).unwrap();
        }
        let neighbour = Neighbour::start(&pod, &other);
        let instance = create(pod.api());
        let mut scene =
            Self { conversation: None, vm: None, neighbour, guest, instance, pod, end: End::Killed };
        scene.boot(&[], Duration::ZERO);
        scene.go_home();
        scene
    }

    /// Plays one stage, in which these end, and checks what became of everybody.
    pub(crate) fn play(&mut self, stage: Stage, victims: &[Victim], end: End, moment: Duration) {
        self.end = end;
        // Who loses its frontend cannot receive meanwhile.
        let rests = victims.iter().any(|it| matches!(it, Victim::Frontend | Victim::FrontendThere));
        let before = neighbour::dropped(&self.pod);
        if rests {
            self.neighbour.rest();
        }
        match stage {
            Stage::Creation => self.create(victims, moment),
            Stage::Boot => {
                self.conversation = None;
                self.vm = None;
                self.boot(victims, moment);
            }
            Stage::Traffic => {
                thread::sleep(moment);
                self.kill_and_restart(victims);
            }
            Stage::Failover => self.fail_over(victims, moment),
            Stage::NicMove => {
                let [_, other] = self.nics();
                eventually("the instance moves to another NIC", || {
                    let asked = self.pod.api().migrate_nic("vm1", "net0", Some(&other));
                    asked.map_err(|error| error.to_string())
                });
                thread::sleep(moment);
                self.kill_and_restart(victims);
            }
            Stage::Migration => self.migrate(victims, moment),
        }
        if rests {
            self.neighbour.go_on();
        }
        let when = format!("after {victims:?} were {end:?} at {stage:?}");
        if let Some(conversation) = &self.conversation {
            conversation.check(&when).unwrap();
        }
        if self.vm.is_none() {
            self.boot(&[], Duration::ZERO);
        }
        self.go_home();
        self.neighbour.check(&when);
        self.conversation.as_ref().unwrap().check("back at home").unwrap();
        // What was sent to it while its guest had no frontend. Of a guest that does not receive nobody knows what it accepts, so a large packet
        // may have been on its way.
        let excused: &[&str] = if rests {
            &["no-guest-queue", "no-guest-buffers", "channel-full", "receive-share", "receiver-offloads"]
        } else {
            &[]
        };
        let mut dropped = neighbour::dropped(&self.pod);
        dropped.retain(|series, count| {
            before.get(series) != Some(count) && !excused.iter().any(|reason| series.contains(reason))
        });
        assert!(dropped.is_empty(), "{when}, the neighbour's packets were dropped: {dropped:?}");
    }

    /// The neighbour has lost nothing.
    pub(crate) fn end(self) {
        self.neighbour.check("at the end");
    }

    fn kill_and_restart(&mut self, victims: &[Victim]) {
        let [active, _] = self.nics();
        self.kill(victims, &active);
        thread::sleep(AWAY);
        self.restart(victims, &active);
    }

    /// The other host with VMs.
    fn other_host(&self) -> &'static str {
        if self.instance.host == "h1" { "h3" } else { "h1" }
    }

    /// The daemon that a victim is, if it is one, when the instance's NIC is `active`.
    fn daemon(&self, victim: Victim, active: &str) -> Option<(String, Role)> {
        let host = |nic: &str| nic.split('/').next().unwrap().to_owned();
        match victim {
            Victim::Frontend => Some((self.instance.host.clone(), Role::NetFrontend)),
            Victim::FrontendThere => Some((self.other_host().to_owned(), Role::NetFrontend)),
            // The neighbour's NIC is the neighbour's: where both use it, the home's backend dies.
            Victim::Backend if active == NEIGHBOURS => Some((host(HOME), Role::NetBackend)),
            Victim::Backend => Some((host(active), Role::NetBackend)),
            Victim::Backup if active == BACKUP => Some((host(HOME), Role::NetBackend)),
            Victim::Backup => Some((host(BACKUP), Role::NetBackend)),
            Victim::Qemu | Victim::Controller => None,
        }
    }

    fn kill(&mut self, victims: &[Victim], active: &str) {
        for &victim in victims {
            let process = match self.daemon(victim, active) {
                Some((host, role)) => Some(self.pod.daemon(&host, role).unwrap()),
                None if victim == Victim::Controller => Some(self.pod.controller().unwrap()),
                None => None,
            };
            if let Some(process) = process {
                match self.end {
                    End::Killed => process.kill().unwrap(),
                    End::InOrder => assert!(process.stop().unwrap().success()),
                }
            } else {
                self.conversation = None;
                // As kill -9 does it.
                self.vm = None;
            }
        }
    }

    fn restart(&mut self, victims: &[Victim], active: &str) {
        if victims.contains(&Victim::Controller) {
            self.pod.start_controller().unwrap();
        }
        for (host, role) in
            victims.iter().filter_map(|&victim| self.daemon(victim, active)).collect::<Vec<_>>()
        {
            self.pod.start_daemon(&host, role).unwrap();
        }
        eventually("all daemons joined", || {
            self.pod.wait_until_joined().map_err(|error| format!("{error:#}"))
        });
    }

    /// The instance's NIC, and the one to which it may move.
    fn nics(&self) -> [String; 2] {
        let now = eventually("the instance is known", || {
            self.pod.api().instance("vm1").map_err(|error| error.to_string())
        });
        let now = now.nics[0].nic.clone();
        let other = if now == HOME { BACKUP } else { HOME };
        [now, other.to_owned()]
    }

    /// All NICs work, none is held, and the instance's is the one where it began.
    fn go_home(&mut self) {
        eventually("every NIC is up", || {
            let devices = self.pod.api().devices().map_err(|error| error.to_string())?;
            if devices.iter().all(|device| device.health == DeviceHealth::Up) {
                Ok(())
            } else {
                Err(format!("{devices:?}"))
            }
        });
        for (host, nic) in [("h2", "nic0"), ("h3", "nic1")] {
            // It may be that it is not held.
            let _ = self.pod.api().release_link(host, nic);
        }
        let mut asked = String::new();
        eventually("the instance is at home", || {
            let nic = self.pod.api().instance("vm1").map_err(|error| error.to_string())?.nics[0].clone();
            if nic.nic == HOME {
                return Ok(());
            }
            if let Err(error) = self.pod.api().migrate_nic("vm1", "net0", Some(HOME)) {
                asked = error.to_string();
            }
            Err(format!("{nic:?}; {asked}"))
        });
    }

    fn create(&mut self, victims: &[Victim], moment: Duration) {
        self.conversation = None;
        self.vm = None;
        let active = HOME.to_owned();
        let socket = self.pod.directory().join("run/controller.sock");
        eventually("the instance is deleted", || {
            self.pod.api().delete_instance_by_force("vm1").map_err(|error| error.to_string())
        });
        let creation = thread::spawn(move || create(&Client::unix(&socket).unwrap()));
        thread::sleep(moment);
        self.kill(victims, &active);
        thread::sleep(AWAY);
        self.restart(victims, &active);
        self.instance = creation.join().unwrap();
    }

    fn boot(&mut self, victims: &[Victim], moment: Duration) {
        let [active, _] = self.nics();
        self.instance = self.pod.api().instance("vm1").unwrap();
        let mut waiting = Some(self.begin());
        if !victims.is_empty() {
            thread::sleep(moment);
            if victims.contains(&Victim::Qemu) {
                // As kill -9 does it.
                waiting = None;
            }
            self.kill(victims, &active);
            thread::sleep(AWAY);
            self.restart(victims, &active);
        }
        let vm = waiting.unwrap_or_else(|| self.begin()).arrived().unwrap();
        vm.exec(&format!("ip address add {GUEST_ADDRESS}/24 dev eth0 && ip link set eth0 up")).unwrap();
        self.meet(vm);
    }

    fn begin(&self) -> WaitingVm {
        self.pod.begin_to_boot(&self.instance, &self.guest, SHAPE).unwrap()
    }

    fn meet(&mut self, vm: PodVm) {
        self.conversation = Some(Conversation::begin(&self.pod, &vm).unwrap());
        self.vm = Some(vm);
    }

    fn fail_over(&mut self, victims: &[Victim], moment: Duration) {
        let [active, _] = self.nics();
        let (host, nic) = active.split_once('/').unwrap();
        self.pod.pull_cable(host, nic).unwrap();
        thread::sleep(moment);
        self.kill(victims, &active);
        thread::sleep(AWAY);
        if victims.contains(&Victim::Controller) {
            self.pod.start_controller().unwrap();
        }
        for (host, role) in
            victims.iter().filter_map(|&victim| self.daemon(victim, &active)).collect::<Vec<_>>()
        {
            self.pod.start_daemon(&host, role).unwrap();
        }
        eventually("the instance has another NIC", || {
            let nic = self.pod.api().instance("vm1").map_err(|error| error.to_string())?.nics[0].nic.clone();
            if nic == active { Err(nic) } else { Ok(()) }
        });
        if let Some(conversation) = &self.conversation {
            conversation.check("with the cable pulled").unwrap();
        }
        self.pod.plug_cable(host, nic).unwrap();
        eventually("all daemons joined", || {
            self.pod.wait_until_joined().map_err(|error| format!("{error:#}"))
        });
    }

    /// To the other host with frontends. Whoever dies, the guest is in one place afterwards, or in none if its VMM died.
    fn migrate(&mut self, victims: &[Victim], moment: Duration) {
        let [active, _] = self.nics();
        let there = self.other_host();
        let moving = self.pod.api().migrate_instance("vm1", there).unwrap();
        let uri = format!("unix:{}", self.pod.directory().join(format!("to-{there}.sock")).display());
        let waiting = self.pod.await_guest(&moving, &self.guest, SHAPE, &uri).unwrap();
        let monitor = self.vm.as_mut().unwrap().qemu().spec().monitor_socket();
        let speed = MigrationSpeed { bytes_per_second: COPIED_PER_SECOND, ..MigrationSpeed::default() };
        let copying = thread::spawn(move || vmm::migrate(&monitor, &uri, speed));
        thread::sleep(moment);
        self.kill(victims, &active);
        thread::sleep(AWAY);
        self.restart(victims, &active);
        let copied = copying.join().unwrap();
        eprintln!("QEMU says: {copied:?}");
        if matches!(
            copied,
            Err(VmmError::Monitor { .. } | VmmError::Silent { .. } | VmmError::Undecided { .. })
        ) && let Some(vm) = &mut self.vm
        {
            // QEMU calls abort() where a backend dies at the moment at which it is told to log, as any backend's QEMU does.
            let status =
                eventually("QEMU is gone", || vm.qemu().exited().ok_or_else(|| "it runs".to_owned()));
            assert_eq!(status.signal(), Some(SIGABRT), "{status}");
            assert!(victims.contains(&Victim::Frontend), "{victims:?}");
            self.conversation = None;
            self.vm = None;
        }
        let moved = copied.is_ok();
        let mut told = String::new();
        self.instance = eventually("the move has an end", || {
            let instance = self.pod.api().instance("vm1").map_err(|error| error.to_string())?;
            if instance.migration.is_none() {
                return Ok(instance);
            }
            let answer = if moved {
                self.pod.api().activate_migration("vm1", victims.contains(&Victim::Qemu))
            } else {
                self.pod.api().abort_migration("vm1")
            };
            if let Err(error) = answer {
                told = error.to_string();
            }
            Err(format!("{instance:?}; {told}"))
        });
        assert_eq!(self.instance.host == there, moved, "{:?}", self.instance);
        if victims.contains(&Victim::Qemu) {
            // Where the guest is by now, or would have been, is not known to us.
            self.conversation = None;
            self.vm = None;
        } else if moved {
            self.vm = None;
            self.vm = Some(waiting.arrived().unwrap());
        }
    }
}

/// Creates the instance, whoever has to be asked again.
fn create(client: &Client) -> Instance {
    let request = CreateInstance {
        name: "vm1".to_owned(),
        host: "h1".to_owned(),
        // The same each time: the client knows its neighbours for half a minute.
        nics: vec![NicRequest { mac: Some(MAC.to_owned()), ..NicRequest::default() }],
        ..CreateInstance::default()
    };
    eventually("the instance is ready", || {
        let created = client.create_instance(&request, Duration::from_secs(5));
        let instance = created.or_else(|error| client.instance("vm1").map_err(|_| error));
        let instance = instance.map_err(|error| error.to_string())?;
        if instance.ready { Ok(instance) } else { Err(format!("{:?}", instance.waiting_for)) }
    })
}

/// Tries until it comes to be.
pub(crate) fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) => assert!(began.elapsed() < PATIENCE, "it never was so that {what}: {error}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}
