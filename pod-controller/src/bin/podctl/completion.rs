//! What a shell offers for the word that somebody is typing: commands and options, and the names of what is in the pod.
//!
//! A shell has a few lines of ours that call `podctl` again with the words of the line. Scripts that say all words beforehand know no
//! names, and fish's does not find the values of options.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::sync::mpsc;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory, FromArgMatches};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use pod_api::DeviceKind;
use pod_api::client::{Client, ClientError, Credentials, Server};

use crate::arguments::Arguments;

/// Set by our lines in a shell, to its name.
const VARIABLE: &str = "PODCTL_COMPLETE";
/// Whoever pressed a key does not wait longer for a controller.
const PATIENCE: Duration = Duration::from_secs(2);

/// Zsh loads a file of completions when it first needs it, as a function, which has to answer by itself then.
const ZSH_ASKS_AT_ONCE: &str = "\n[[ $funcstack[1] != _podctl ]] || _clap_dynamic_completer_podctl\n";

/// Writes the lines for a shell.
pub(crate) fn script(shell: clap_complete::Shell, out: &mut dyn Write) -> io::Result<()> {
    let shells = Shells::builtins();
    let shell =
        shells.completer(&shell.to_string()).ok_or_else(|| io::Error::other("a shell unknown here"))?;
    shell.write_registration(VARIABLE, "podctl", "podctl", "podctl", out)?;
    if shell.is("zsh") {
        out.write_all(ZSH_ASKS_AT_ONCE.as_bytes())?;
    }
    Ok(())
}

/// If a shell asks: answers, and ends the process.
pub(crate) fn answer_shell() {
    CompleteEnv::with_factory(|| knowing_names(Arguments::command(), "")).var(VARIABLE).complete();
}

/// What there are names of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    Host,
    /// NICs and SSDs.
    Device,
    Nic,
    Ssd,
    Volume,
    Instance,
    InstanceType,
}

impl Named {
    /// What an argument of a command names, if that is there already.
    fn by(group: &str, command: &str, argument: &str) -> Option<Self> {
        Some(match (group, command, argument) {
            (_, "create", "name") => return None,
            ("hosts", _, "name") | ("instances" | "devices", _, "host") | ("instances", "migrate", "to") => {
                Self::Host
            }
            ("volumes", _, "near") => Self::Host,
            ("devices", "fail-back" | "release", "name") | ("instances", "migrate-nic", "to") => Self::Nic,
            ("devices", "adopt", "name") | ("volumes", _, "device" | "from" | "to") => Self::Ssd,
            ("devices", _, "name") | ("instances", "list", "device") => Self::Device,
            ("volumes", _, "name") | ("instances", _, "volume" | "volumes") => Self::Volume,
            ("instances" | "explain", _, "name") | ("mchannel" | "volumes", _, "instance") => Self::Instance,
            ("types", _, "name") | (_, _, "instance_type") => Self::InstanceType,
            _ => return None,
        })
    }

    /// All names.
    fn of(self, client: &Client) -> Result<Vec<String>, ClientError> {
        Ok(match self {
            Self::Host => client.hosts()?.into_iter().map(|host| host.name).collect(),
            Self::Device | Self::Nic | Self::Ssd => {
                let is_asked_for = |kind: &DeviceKind| match self {
                    Self::Nic => matches!(kind, DeviceKind::Nic { .. }),
                    Self::Ssd => matches!(kind, DeviceKind::Ssd { .. }),
                    _ => true,
                };
                let devices = client.devices()?.into_iter().filter(|device| is_asked_for(&device.kind));
                devices.map(|device| device.name).collect()
            }
            Self::Volume => client.volumes()?.into_iter().map(|volume| volume.name).collect(),
            Self::Instance => client.instances()?.into_iter().map(|instance| instance.name).collect(),
            Self::InstanceType => client.instance_types()?.into_iter().map(|it| it.name).collect(),
        })
    }

    /// Those that begin as the word does. None if there is no controller to ask: a shell shows no errors here.
    fn candidates(self, word: &OsStr) -> Vec<CompletionCandidate> {
        let Some(begun) = word.to_str().map(str::to_owned) else { return Vec::new() };
        let (sender, answer) = mpsc::channel();
        std::thread::spawn(move || {
            let names = client().and_then(|client| self.of(&client).ok()).unwrap_or_default();
            // Nobody listens if it took too long.
            let _ = sender.send(names);
        });
        let names = answer.recv_timeout(PATIENCE).unwrap_or_default();
        names.into_iter().filter(|name| name.starts_with(&begun)).map(CompletionCandidate::new).collect()
    }
}

/// The command with completers at all arguments that name something.
fn knowing_names(command: Command, group: &str) -> Command {
    let name = command.get_name().to_owned();
    let completes = |argument: Arg| match Named::by(group, &name, argument.get_id().as_str()) {
        Some(named) => argument.add(ArgValueCompleter::new(move |word: &OsStr| named.candidates(word))),
        None => argument,
    };
    let command = command.mut_args(completes);
    command.mut_subcommands(|within| knowing_names(within, &name))
}

/// The client that the line would have so far: with its options where they are said already.
fn client() -> Option<Client> {
    let words = std::env::args_os().skip_while(|word| word != "--").skip(1);
    let line = Arguments::command().ignore_errors(true).try_get_matches_from(words).ok()?;
    Credentials::from_arg_matches(&line).ok()?.client(line.get_one::<Server>("server")?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All positional arguments called `name`, and what is named by them.
    fn named(command: &Command, group: &str, into: &mut Vec<(String, Option<Named>)>) {
        let name = command.get_name();
        for argument in
            command.get_positionals().filter(|it| it.get_id() == "name" || it.get_id() == "instance")
        {
            into.push((format!("{group} {name}"), Named::by(group, name, argument.get_id().as_str())));
        }
        command.get_subcommands().for_each(|within| named(within, name, into));
    }

    #[test]
    fn commands_know_what_they_are_given_the_name_of() {
        let mut all = Vec::new();
        named(&Arguments::command(), "", &mut all);
        let unknown: Vec<&str> =
            all.iter().filter(|(_, named)| named.is_none()).map(|(command, _)| command.as_str()).collect();
        // What is to be made has no name yet.
        assert_eq!(unknown, ["volumes create", "instances create", "podctl token"]);
        for (command, expected) in [
            ("hosts drain", Named::Host),
            ("devices release", Named::Nic),
            ("devices drain", Named::Device),
            ("volumes grow", Named::Volume),
            ("instances delete", Named::Instance),
            ("types get", Named::InstanceType),
            ("explain instance", Named::Instance),
            ("mchannel set", Named::Instance),
        ] {
            let found = all.iter().find(|(known, _)| known == command);
            assert_eq!(found.and_then(|(_, named)| *named), Some(expected), "{command}");
        }
    }
}
