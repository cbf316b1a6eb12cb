//! A QEMU that is asked for so much at once that its main thread allocates all the time, while its vCPUs are put to sleep at any moment.

use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

/// Of one session QEMU takes so many questions before it has answered the first.
const IN_FLIGHT: usize = 8;
/// How often it is asked for so many answers at least, and at most.
const ROUNDS: usize = 20;
const ROUNDS_MOST: usize = 2000;
/// Only a QEMU that stands still takes so long.
const ANSWER: Duration = Duration::from_mins(2);
/// An answer has thousands of parts.
const PARTS: usize = 500;

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Storm {
    /// How many answers there were.
    pub answers: usize,
    /// How often each vCPU was put to sleep while QEMU was at work on some.
    pub sleeps: u64,
}

/// Has QEMU describe its monitor, 8 times at once, again and again, until each vCPU was put to sleep `sleeps` times while it did. `slept` says how often
/// the one was that was put to sleep least. Who returns has all answers, and each is whole.
pub fn storm(monitor: &Path, sleeps: u64, slept: impl Fn() -> u64) -> Result<Storm> {
    let session = UnixStream::connect(monitor)?;
    session.set_read_timeout(Some(ANSWER))?;
    let mut answers = BufReader::new(session.try_clone()?);
    let ask = |command: &Value| writeln!(&session, "{command}").context("QEMU is not there any more");
    ask(&json!({"execute": "qmp_capabilities", "id": "begin"}))?;
    answer(&mut answers, &json!("begin"))?;
    let mut came = Storm { answers: 0, sleeps: 0 };
    for round in 0..ROUNDS_MOST {
        if round >= ROUNDS && came.sleeps >= sleeps {
            return Ok(came);
        }
        let before = slept();
        for number in 0..IN_FLIGHT {
            ask(&json!({"execute": "query-qmp-schema", "id": number}))?;
        }
        for number in 0..IN_FLIGHT {
            let schema = answer(&mut answers, &json!(number))?;
            let parts = schema.as_array().map_or(0, Vec::len);
            ensure!(parts > PARTS, "an answer of {parts} parts");
            came.answers += 1;
        }
        came.sleeps += slept() - before;
    }
    ensure!(came.sleeps >= sleeps, "hardly anybody was put to sleep meanwhile: {came:?}");
    Ok(came)
}

/// What QEMU answers to the question with this id. What it tells of besides is left out.
fn answer(answers: &mut impl BufRead, id: &Value) -> Result<Value> {
    loop {
        let mut line = String::new();
        answers.read_line(&mut line).context("QEMU does not answer")?;
        let mut said: Value = serde_json::from_str(&line).with_context(|| format!("no answer: {line:?}"))?;
        if said.get("id") == Some(id) {
            return Ok(said.get_mut("return").with_context(|| format!("refused: {line}"))?.take());
        }
        ensure!(said.get("event").is_some() || said.get("QMP").is_some(), "an answer to nobody: {line}");
    }
}
