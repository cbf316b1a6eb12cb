//! What is asked of the replicas, and what they answer.

use cxl_pool::simulated::Random;
use pod_state::{Command, IdempotencyKey, InstanceType, Labels, State};
use tokio::task::JoinHandle;

use super::node::Node;
use super::storage::Witness;
use crate::controller::SubmitError;
use crate::simulation::faults::Around;

/// How often the same is asked for.
const TRIES_MAX: u32 = 6;

/// One that asked for something, and of whom.
#[derive(Debug)]
struct Client {
    key: String,
    command: Command,
    tries: u32,
    /// It asks again, with the same key, until it knows.
    persists: bool,
    /// What it asked for may have been done, for all it was told.
    open: bool,
    asks: Option<Asks>,
}

#[derive(Debug)]
struct Asks {
    replica: usize,
    life: u64,
    answer: JoinHandle<Result<(), SubmitError>>,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Clients {
    waiting: Vec<Client>,
    asked: u64,
    pub(super) promised: Vec<String>,
    pub(super) open: u64,
    pub(super) refused: u64,
}

impl Clients {
    /// How many wait for an answer.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Another one asks for something.
    pub(super) fn ask(&mut self, asked: Command, persists: bool) {
        self.asked += 1;
        let key = format!("request {}", self.asked);
        let named = IdempotencyKey { key: key.clone(), digest: format!("{asked:?}") };
        let command = Command::Request {
            key: Some(named),
            labels: Labels::default(),
            expected: None,
            asked: Box::new(asked),
        };
        self.waiting.push(Client { key, command, tries: 0, persists, open: false, asks: None });
    }

    /// Those who have an answer hear it, those whose replica is gone look for another one. Says what they heard.
    pub(super) fn hear(
        &mut self,
        nodes: &[Node],
        dice: &mut Random,
        witness: &Witness,
    ) -> Result<Vec<String>, String> {
        let mut told = Vec::new();
        let mut waiting = Vec::new();
        for mut client in std::mem::take(&mut self.waiting) {
            let answer = match client.asks.take() {
                Some(asks) => {
                    let life = nodes[asks.replica].life.as_ref();
                    match life.filter(|_| nodes[asks.replica].lives == asks.life) {
                        Some(life) if asks.answer.is_finished() => {
                            Some(life.runtime.block_on(asks.answer).unwrap_or(Err(SubmitError::Unknown)))
                        }
                        Some(_) => {
                            client.asks = Some(asks);
                            waiting.push(client);
                            continue;
                        }
                        None => Some(Err(SubmitError::Unknown)),
                    }
                }
                None => None,
            };
            if let Some(answer) = answer {
                told.push(format!(
                    "{}: {}",
                    client.key,
                    answer.as_ref().map_or_else(ToString::to_string, |()| "done".into())
                ));
                if self.is_over(&mut client, answer, witness)? {
                    continue;
                }
            }
            let chosen = usize::try_from(dice.below(nodes.len() as u64)).unwrap_or(0);
            let alive = nodes[chosen].life.as_ref().filter(|_| dice.one_in(3) || client.tries == 0);
            if let Some(life) = alive {
                client.tries += 1;
                let answer = life.submit(client.command.clone());
                client.asks = Some(Asks { replica: chosen, life: nodes[chosen].lives, answer });
            }
            waiting.push(client);
        }
        self.waiting = waiting;
        Ok(told)
    }

    /// Whether a client asks no more after this answer.
    fn is_over(
        &mut self,
        client: &mut Client,
        answer: Result<(), SubmitError>,
        witness: &Witness,
    ) -> Result<bool, String> {
        match answer {
            Ok(()) => {
                witness.oracle().promised(&client.key)?;
                self.promised.push(client.key.clone());
                return Ok(true);
            }
            Err(SubmitError::Refused(refusal)) => {
                // Once it was open, an earlier try may yet be done.
                if !client.open {
                    witness.oracle().refused(&client.key, &refusal.to_string())?;
                }
                self.refused += 1;
                return Ok(true);
            }
            Err(SubmitError::NoLeader) => {}
            Err(_) => {
                self.open += u64::from(!client.open);
                client.open = true;
            }
        }
        if client.persists && client.tries < TRIES_MAX {
            return Ok(false);
        }
        if !client.open {
            witness.oracle().refused(&client.key, "nobody leads")?;
        }
        Ok(true)
    }
}

/// Something that a user may want of such a pod.
pub(super) fn wish(mut around: Around<'_>, state: &State) -> Command {
    match around.dice.below(14) {
        0 => state.speaking(u16::from(around.dice.once_in(2))),
        1 => {
            let name = format!("type{}", around.dice.below(around.names));
            Command::SetInstanceType { name, instance_type: InstanceType::default() }
        }
        _ => match around.wish() {
            // Until it is done the host may have its power again.
            Command::ResetHost { name } => Command::DeleteHost { name },
            wish => wish,
        },
    }
}
