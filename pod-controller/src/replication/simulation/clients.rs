//! What is asked of the replicas, and what they answer.

use cxl_pool::simulated::Random;
use cxl_pool::{HostId, Role};
use pod_state::model::{MIB, devices_of, endpoint, join};
use pod_state::{Command, DeviceId, Groups, IdempotencyKey, InstanceType, Labels, NicWish, State};
use tokio::task::JoinHandle;

use super::node::Node;
use super::oracle::Oracle;
use crate::controller::SubmitError;

/// How many wait for an answer at most.
const WAITING_MAX: usize = 12;
/// How often the same is asked for.
const TRIES_MAX: u32 = 6;

const ROLES: [Role; 4] = [Role::NetFrontend, Role::NetBackend, Role::BlkFrontend, Role::BlkBackend];

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
    pub(super) fn is_busy(&self) -> bool {
        self.waiting.len() >= WAITING_MAX
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
        oracle: &mut Oracle,
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
                if self.is_over(&mut client, answer, oracle)? {
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
        oracle: &mut Oracle,
    ) -> Result<bool, String> {
        match answer {
            Ok(()) => {
                oracle.promised(&client.key)?;
                self.promised.push(client.key.clone());
                return Ok(true);
            }
            Err(SubmitError::Refused(refusal)) => {
                // Once it was open, an earlier try may yet be done.
                if !client.open {
                    oracle.refused(&client.key, &refusal.to_string())?;
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
            oracle.refused(&client.key, "nobody leads")?;
        }
        Ok(true)
    }
}

/// Something that a daemon or a user may want of such a pod.
pub(super) fn wish(dice: &mut Random, state: &State) -> Command {
    let number = dice.below(6);
    let host = HostId::new(u16::try_from(1 + dice.below(3)).unwrap_or(1));
    let role = ROLES[usize::try_from(dice.below(4)).unwrap_or(0)];
    let of_role = endpoint(host.get(), role);
    let (vm, vol) = (format!("vm{number}"), format!("vol{number}"));
    let nic = DeviceId { host, name: "nic0".into() };
    match dice.below(20) {
        0..=3 => {
            let incarnation = state.endpoints.get(&of_role).map_or(0, |known| known.incarnation) + 1;
            let devices = devices_of(of_role, !dice.one_in(4));
            Command::Join { endpoint: of_role, incarnation, join: join(host.get(), devices) }
        }
        4..=6 => Command::Link { device: nic, up: dice.one_in(2), reason: "carrier".to_owned() },
        7..=9 => Command::CreateVolume {
            name: vol,
            size_bytes: (1 + dice.below(4)) * MIB,
            device: None,
            replicas: if dice.one_in(3) { 2 } else { 1 },
            minimum_iops: None,
            minimum_bytes_per_second: None,
            groups: Groups::default(),
        },
        10 => Command::DeleteVolume { name: vol },
        11..=13 => Command::CreateInstance {
            name: vm,
            host,
            nics: vec![NicWish::default()],
            volumes: if dice.one_in(2) { Vec::new() } else { vec![vol] },
            instance_type: None,
            vmm_listens: false,
            ram_bytes: None,
            priority: None,
        },
        14 => Command::DeleteInstance { name: vm, force: true },
        15 => Command::MigrateNic { instance: vm, device: "net0".to_owned(), to: None },
        16 => Command::Silent { endpoint: of_role },
        17 => Command::Back { endpoint: of_role },
        18 => state.speaking(u16::from(dice.one_in(2))),
        _ => {
            Command::SetInstanceType { name: format!("type{number}"), instance_type: InstanceType::default() }
        }
    }
}
