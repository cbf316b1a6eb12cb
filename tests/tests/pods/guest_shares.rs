//! Virtual machines whose fio and iperf3 share a path of the fabric, judged by the bytes that their queues were let move and by
//! the time for which those were held back.

use std::thread;
use std::time::{Duration, Instant};

use guest_images::{Guest, Silent};
use pod_api::{Fabric, Mchannel, MchannelSpec};
use wadi_tests::boards::{Boards, Judged};
use wadi_tests::iperf;
use wadi_tests::pod::{CLIENT_ADDRESS, HostPlan, Pod, PodBuilder, PodVm, VmShape};
use wadi_tests::steady::{converge, judge, near, undisturbed};
use wadi_tests::waiting::wait_for;

/// What the path carries, in bytes/s: little, so that emulated guests want more than it.
const CAPACITY: u64 = 20_000_000;
const CARRIES: f64 = 20_000_000.0;
/// T_W and K.
const WINDOW_US: u32 = 10_000;
const SAMPLE_US: u32 = 50_000;
const SMALL: VmShape = VmShape { memory_mib: 256, cpus: 1 };
const VOLUME_BYTES: u64 = 64 << 20;
/// Instance, host, weight, address.
const VMS: [(&str, &str, u32, &str); 3] =
    [("vm1", "h1", 1, "10.77.0.2"), ("vm2", "h2", 3, "10.77.0.3"), ("vm3", "h2", 1, "10.77.0.4")];
/// Counters come every 100 ms: that is 2 % of a window at most.
const WINDOW: Duration = Duration::from_secs(5);
/// How long shares may take until they are as they should be, on a machine that does much else.
const PATIENCE: Duration = Duration::from_mins(2);

/// Reads its disk for ever, as fast as it may.
const HUNGRY_DISK: &str = "fio --name=hungry --filename=/dev/vda --direct=1 --ioengine=libaio --rw=read --bs=64k \
                           --iodepth=8 --time_based --runtime=3600 --output-format=json";

/// Reads in bursts with pauses between them, as somebody would who looks for the edges of windows: of 10 ms each, in which it may move 40 kB. A second
/// each of bursts that are as large as one window allows, as two, and as six, in every window or so, in every other, and in some.
const CHEAT: &str = "while :; do for burst in '40k 9' '80k 19' '240k 9' '240k 55'; do set -- $burst; \
                     fio --name=cheat --filename=/dev/vda --direct=1 --ioengine=libaio --rw=read --bs=$1 --iodepth=2 \
                     --thinktime=$2ms --thinktime_blocks=1 --time_based --runtime=1 >/dev/null || exit; done; done";

/// For how long a cheat is watched.
const CHEATED: Duration = Duration::from_secs(20);

/// Sends 1 MB/s for a second, then nothing for another: far below the share of its VM.
fn on_and_off() -> String {
    format!(
        "while iperf3 --client {CLIENT_ADDRESS} --udp --bitrate 8M --time 1 >/dev/null; do sleep 1; done; false"
    )
}

fn mchannels(pod: &Pod) -> [Mchannel; 3] {
    VMS.map(|(name, ..)| pod.api().mchannel(name).unwrap())
}

/// What each moved in a window, in bytes/s.
fn look(pod: &Pod) -> Vec<f64> {
    look_while(pod, || thread::sleep(WINDOW)).0
}

/// What each moved while something else was done, in bytes/s, and what came of that.
fn look_while<T>(pod: &Pod, something: impl FnOnce() -> T) -> (Vec<f64>, T) {
    let (before, began) = (mchannels(pod), Instant::now());
    let outcome = something();
    let (after, seconds) = (mchannels(pod), began.elapsed().as_secs_f64());
    #[allow(clippy::cast_precision_loss)]
    let rate = |bytes: u64| bytes as f64 / seconds;
    (before.iter().zip(&after).map(|(before, after)| rate(after.bytes - before.bytes)).collect(), outcome)
}

/// For how long each was held back, in ms.
fn held(pod: &Pod) -> [u64; 3] {
    mchannels(pod).map(|it| it.held_ms)
}

/// What each should move, where the last one moves what it wants.
fn rest_by_weight(rates: &[f64]) -> Vec<f64> {
    let rest = CARRIES - rates[2];
    vec![rest / 4.0, rest * 3.0 / 4.0, rates[2]]
}

#[test]
fn fio_and_iperf3_of_three_guests_share_a_path() {
    let guest = Guest::ensure(&mut Silent).unwrap();
    let pod = PodBuilder::new()
        .host(HostPlan::new("h1").vms())
        .host(HostPlan::new("h2").vms())
        .host(HostPlan::new("h3").nic("nic0").ssd("ssd0", "256M"))
        .start()
        .unwrap();
    let elements = [("pool".to_owned(), CAPACITY)].into();
    let fabric = Fabric { window_us: WINDOW_US, sample_us: SAMPLE_US, elements, ..Fabric::default() };
    pod.api().set_fabric(&fabric).unwrap();
    let instances = VMS.map(|(name, host, weight, _)| {
        let volume = format!("{name}-disk");
        let instance = pod.create_instance(name, host, &[(&volume, VOLUME_BYTES, None)]).unwrap();
        let spec = MchannelSpec { weight, tenant: "default".to_owned(), path: vec!["pool".to_owned()] };
        pod.api().set_mchannel(name, &spec).unwrap();
        instance
    });
    let waiting = instances.each_ref().map(|instance| pod.begin_to_boot(instance, &guest, SMALL).unwrap());
    let vms: [PodVm; 3] = waiting.map(|vm| vm.arrived().unwrap());
    for (vm, (.., address)) in vms.iter().zip(VMS) {
        vm.exec(&format!("ip address add {address}/24 dev eth0 && ip link set eth0 up")).unwrap();
    }
    let server = iperf::Server::start(&pod).unwrap();

    // One that comes and goes wants less than its share: it gets that and never waits. The others divide the rest by weight.
    let disks = [0, 1].map(|place| vms[place].start(HUNGRY_DISK).unwrap());
    let modest = vms[2].start(&on_and_off()).unwrap();
    let what = "the rest is divided 1:3";
    converge(
        what,
        PATIENCE,
        || look(&pod),
        |rates| {
            rates[2] > 0.0
                && rates.iter().zip(rest_by_weight(rates)).all(|(rate, expected)| near(*rate, expected))
        },
    );
    // Who stood still with the host for a while makes up for it at once, which is more than its share for that moment.
    let times_held = || {
        let before = held(&pod);
        judge(what, PATIENCE, CARRIES, || look(&pod), rest_by_weight);
        let after = held(&pod);
        std::array::from_fn(|place| after[place] - before[place])
    };
    let held = undisturbed("below its share an instance is not held back", times_held, |held: &[u64; 3]| {
        held[2] == 0
    });
    assert!(held[0] > 0 && held[1] > 0, "the others are: {held:?}");
    assert!(modest.outcome().is_none(), "iperf3 has ended: {:?}", modest.outcome());
    modest.signal("KILL").unwrap();
    drop(modest);
    // The last one ends within its second.
    wait_for("iperf3 to end", || !vms[2].run("pidof iperf3", Duration::from_secs(10)).unwrap().success());

    // A stream that wants all it can get has its share, as disks have theirs.
    let stream = vms[2].start(&iperf::command(iperf::Way::Out, 600)).unwrap();
    judge(
        "1:3:1",
        PATIENCE,
        CARRIES,
        || look(&pod),
        |_| [1.0, 3.0, 1.0].map(|weight| CARRIES * weight / 5.0).to_vec(),
    );
    for job in disks.iter().chain([&stream]) {
        assert!(job.outcome().is_none(), "it has ended: {:?}", job.outcome());
    }

    // Nor has anybody more than that who bursts at the edges of windows, and who does not has no less.
    let [hungry, honest] = disks;
    vms[0].run("killall fio", Duration::from_secs(10)).unwrap();
    wait_for("fio to end", || hungry.outcome().is_some());
    let cheat = vms[0].start(CHEAT).unwrap();
    who_cheats_gains_nothing(&pod);
    for job in [&honest, &stream, &cheat] {
        assert!(job.outcome().is_none(), "it has ended: {:?}", job.outcome());
    }
    cheat.signal("KILL").unwrap();
    drop(cheat);
    // The last one ends within its second.
    wait_for("the cheat to end", || !vms[0].run("pidof fio", Duration::from_secs(10)).unwrap().success());

    // What is said of tenants, of paths and of capacity holds soon, for guests that go on. Each of two tenants has a half: one of them is vm2's alone, whatever its weight.
    let hungry = vms[0].start(HUNGRY_DISK).unwrap();
    let becomes = |what: &str, shares: [f64; 3]| {
        converge(
            what,
            PATIENCE,
            || look(&pod),
            |rates| rates.iter().zip(shares).all(|(rate, share)| near(*rate, share)),
        );
    };
    pod.podctl(&["mchannel", "fabric", "--tenant", "red=1"]).unwrap();
    pod.podctl(&["mchannel", "set", "vm2", "--weight", "3", "--tenant", "red", "--path", "pool"]).unwrap();
    becomes("vm2 belongs to another tenant", [0.25, 0.5, 0.25].map(|part| part * CARRIES));
    // The stream also has to pass through what carries less than its share; its tenant's other guest has what it leaves.
    pod.podctl(&["mchannel", "fabric", "--element", "pool=16000000", "--element", "port=2000000"]).unwrap();
    pod.podctl(&["mchannel", "set", "vm3", "--weight", "1", "--path", "port,pool"]).unwrap();
    becomes("less is there, and vm3 takes another path", [6e6, 8e6, 2e6]);
    for job in [&hungry, &honest, &stream] {
        assert!(job.outcome().is_none(), "it has ended: {:?}", job.outcome());
    }
    drop(server);
}

/// The first one does; what others cannot take while they stand still, it may have.
fn who_cheats_gains_nothing(pod: &Pod) {
    let shares = [1.0, 3.0, 1.0].map(|weight| CARRIES * weight / 5.0);
    let boards = Boards::find(&pod.pool_path()).unwrap();
    let watch = || boards.watch(CHEATED, f64::from(WINDOW_US), f64::from(SAMPLE_US)).unwrap();
    undisturbed(
        "who cheats has its share, and others theirs",
        || {
            let (rates, judged) = look_while(pod, watch);
            no_k_has_more_than_the_bound_allows(&judged);
            rates
        },
        |rates| {
            let mut honest_ones = rates[1..].iter().zip(&shares[1..]);
            rates[0] > 0.2 * shares[0]
                && rates[0] <= 1.05 * shares[0]
                && honest_ones.all(|(rate, share)| *rate >= 0.95 * share)
        },
    );
}

/// §4.5, by what the frontends counted in each K of theirs: w·α·K·(1 + 2·T_W/K).
fn no_k_has_more_than_the_bound_allows(judged: &[Judged]) {
    let part = |it: &Judged| it.counted.rate / it.most;
    let most = judged.iter().max_by(|a, b| part(a).total_cmp(&part(b)));
    let most = most.expect("frontends publish every K");
    eprintln!("{} K of frontends; the nearest to its bound: {most:.3?}", judged.len());
    let expected = 3 * CHEATED.as_micros() / u128::from(SAMPLE_US);
    assert!(judged.len() as u128 > expected / 2, "only {} K of {expected} were seen", judged.len());
    assert!(part(most) <= 1.0, "a K has more than the bound allows: {most:?}");
}
