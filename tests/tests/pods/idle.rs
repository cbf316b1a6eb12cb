//! An idle pod costs next to nothing. What users are promised, 2 % of a core, depends on the core, on who else has it, and on how programs
//! were compiled, and so is nothing to judge here; how often a daemon wakes, and that none of them waits without sleeping, is.

use std::thread;
use std::time::{Duration, Instant};

use wadi_tests::process::Daemon;
use wadi_tests::stage::Stage;

/// In a second. To see whether others live, to say what it does and to be fenced in time, a daemon wakes a good hundred times in a second.
/// Who looks for work without being told of it does so thousands of times.
const WAKEUPS_MAX: f64 = 400.0;
/// Of a core: whoever waits without sleeping has all of one, or what others leave of it.
const SHARE_MAX: f64 = 0.25;
const WATCHED: Duration = Duration::from_secs(10);

struct Used {
    wakeups: u64,
    cpu: Duration,
}

impl Used {
    fn by(daemon: &mut Daemon) -> Self {
        Self { wakeups: daemon.wakeups().unwrap(), cpu: daemon.cpu_time().unwrap() }
    }
}

#[test]
fn idle_daemons_use_next_to_nothing() {
    let mut stage = Stage::set_up().unwrap();
    // Traffic before, so that everything has been awake once.
    stage
        .vm
        .exec("dd if=/dev/vda of=/dev/null bs=1M count=64 2>/dev/null && ping -c 3 -q 10.77.0.1")
        .unwrap();
    let (before, began) = (stage.pod.processes().map(Used::by).collect::<Vec<_>>(), Instant::now());
    thread::sleep(WATCHED);
    let after = stage.pod.processes().map(Used::by).collect::<Vec<_>>();
    let seconds = began.elapsed().as_secs_f64();
    let mut busy = Vec::new();
    for ((daemon, before), after) in stage.pod.processes().zip(before).zip(after) {
        #[expect(clippy::cast_precision_loss, reason = "few in some seconds")]
        let wakeups = after.wakeups.saturating_sub(before.wakeups) as f64 / seconds;
        let share = after.cpu.saturating_sub(before.cpu).as_secs_f64() / seconds;
        let said = format!(
            "{}: woken {wakeups:.0} times in a second, {:.2} % of a core",
            daemon.name(),
            share * 100.0
        );
        eprintln!("{said}");
        if wakeups > WAKEUPS_MAX || share > SHARE_MAX {
            busy.push(said);
        }
    }
    assert!(busy.is_empty(), "not idle: {busy:?}");
}
