//! What shells offer who have the lines that podctl prints for them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::podctl::said;
use crate::support::{Pod, vm};

/// As readline does it: the function that is registered for podctl, with the words of the line.
const BASH: &str = r#"
source "$1"
function=$(complete -p podctl | sed -n 's/.* -F \([^ ]*\) .*/\1/p')
[ -n "$function" ] || exit 3
read -ra COMP_WORDS <<<"$2"
[ "${2% }" = "$2" ] || COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$2 COMP_POINT=${#2}
"$function" podctl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"#;

const FISH: &str = "source $argv[1]; complete -C $argv[2]";

/// On a terminal, since only there does it complete anything: what has become of the line after the key was pressed. It loads the file
/// then, from where functions for completion are.
const ZSH: &str = r#"
zmodload zsh/zpty
zpty -b terminal zsh -f -i
zpty -w terminal "fpath=(${(q)1:h} \$fpath); autoload -Uz compinit; compinit -u -D"
zpty -w terminal 'say-line() { print -r -- "LINE<$BUFFER>" }; zle -N say-line; bindkey "^T" say-line; print REA""DY'
zpty -r -m terminal said '*READY*'
zpty -w -n terminal "$2"$'\t\C-t'
zpty -r -m terminal said '*LINE<*>*'
print -r -- "${${said##*LINE<}%%>*}"
"#;

struct Shell<'a> {
    pod: &'a Pod,
    program: &'static str,
    arguments: &'static [&'static str],
    script: PathBuf,
}

impl<'a> Shell<'a> {
    fn new(pod: &'a Pod, program: &'static str, arguments: &'static [&'static str]) -> Self {
        let script = pod.path("completions").join(program).join("_podctl");
        std::fs::create_dir_all(script.parent().expect("a directory")).expect("made");
        std::fs::write(&script, said(pod, &format!("completion {program}"))).expect("written");
        Self { pod, program, arguments, script }
    }

    /// What it says of a line on whose last word somebody asks for more.
    fn says(&self, line: &str) -> String {
        let podctl = Path::new(env!("CARGO_BIN_EXE_podctl")).parent().expect("a directory");
        let path = format!("{}:{}", podctl.display(), std::env::var("PATH").expect("a PATH"));
        let output = Command::new("timeout")
            .args(["180", self.program])
            .args(self.arguments)
            // Bash and zsh take the word after their commands for their own name, fish does not.
            .args((self.program != "fish").then_some("shell"))
            .arg(&self.script)
            .arg(line)
            .env("PATH", path)
            .env("WADI_CONTROLLER", format!("unix:{}", self.pod.socket().display()))
            .env("TERM", "dumb")
            .output()
            .expect("timeout starts");
        let failed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && failed.is_empty(), "{}, {line:?}: {failed}", self.program);
        String::from_utf8(output.stdout).expect("text")
    }

    /// The words that it offers.
    fn offers(&self, line: &str) -> Vec<String> {
        let said = self.says(line);
        // Fish says after each word what it is; bash, of nothing, that it is empty.
        let words = said.lines().filter_map(|line| line.split('\t').next());
        words.filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }
}

/// A pod with something in it, whose shells know podctl.
fn pod() -> Pod {
    let pod = Pod::demo();
    said(&pod, "volumes create vol0 --size 4M");
    said(&pod, "types set small");
    pod.client().create_instance(&vm("vm1", &["vol0"]), Duration::from_secs(30)).expect("created");
    pod
}

const OFFERED: [(&str, &[&str]); 18] = [
    ("podctl bal", &["balance"]),
    ("podctl volumes cr", &["create"]),
    ("podctl volumes create vol0 --ap", &["--apart"]),
    ("podctl volumes create vol0 --tog", &["--together"]),
    ("podctl instances migrate-", &["migrate-nic"]),
    ("podctl top --on", &["--once"]),
    ("podctl completion z", &["zsh"]),
    ("podctl -o y", &["yaml"]),
    ("podctl hosts list --output w", &["wide"]),
    ("podctl volumes nothing-of-this", &[]),
    ("podctl hosts drain h", &["h1", "h2", "h3"]),
    ("podctl -o json instances get v", &["vm1"]),
    ("podctl explain instance v", &["vm1"]),
    ("podctl volumes move vol0 --to h", &["h2/ssd0"]),
    ("podctl types delete s", &["small"]),
    ("podctl volumes grow v", &["vol0"]),
    ("podctl volumes create v", &[]),
    // Nobody is there.
    ("podctl --server unix:/nonexistent/socket volumes grow v", &[]),
];

#[test]
fn bash_and_fish_offer_commands_options_and_names() {
    let pod = pod();
    for shell in [
        Shell::new(&pod, "bash", &["--norc", "--noprofile", "-c", BASH]),
        Shell::new(&pod, "fish", &["--no-config", "-c", FISH]),
    ] {
        for (line, offered) in OFFERED {
            assert_eq!(shell.offers(line), offered, "{}: {line:?}", shell.program);
        }
        let all = shell.offers("podctl ");
        for command in ["hosts", "devices", "volumes", "instances", "events", "controllers", "top"] {
            // By its name or by the shorter one that it has as well.
            let known = |it: &String| it == command || command.strip_suffix('s') == Some(it);
            assert!(all.iter().any(known), "{}: {command} is not among {all:?}", shell.program);
        }
    }
}

#[test]
fn zsh_completes_what_there_is_only_one_of() {
    let pod = pod();
    let shell = Shell::new(&pod, "zsh", &["-f", "-c", ZSH]);
    for (line, offered) in OFFERED {
        if let [only] = offered {
            let begun = &line[..=line.rfind(' ').expect("several words")];
            assert_eq!(shell.says(line).trim_end(), format!("{begun}{only}"), "{line:?}");
        }
    }
}
