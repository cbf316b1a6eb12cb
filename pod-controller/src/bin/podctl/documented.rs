//! Command lines in the documentation are ones that podctl takes.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Parser;

use crate::arguments::Arguments;

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let docs = fs::read_dir(root.join("docs")).expect("the documentation");
    let docs = docs.map(|entry| entry.expect("an entry").path());
    let docs = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    docs.chain([root.join("README.md")]).collect()
}

/// The command lines of a document, which are indented, or between fences, without what is said about them.
fn commands(text: &str) -> Vec<String> {
    let mut is_fenced = false;
    let mut commands = Vec::new();
    for line in text.lines() {
        let (indent, rest) = line.split_at(line.len() - line.trim_start().len());
        if rest.starts_with("```") {
            is_fenced = !is_fenced;
        } else if rest.starts_with("podctl ") && (is_fenced || indent.len() >= 4) {
            let command = rest.split_once(" #").map_or(rest, |(command, _)| command);
            commands.push(command.trim_end().to_owned());
        }
    }
    commands
}

/// A word for which each reader has another one, such as `NAME` or `…`: what is made of it depends on that.
fn has_placeholder(command: &str) -> bool {
    let is_placeholder = |word: &str| {
        word.contains(['…', '<', '[']) || word.len() > 1 && word.bytes().all(|it| it.is_ascii_uppercase())
    };
    command.split([' ', '=', '/']).any(is_placeholder)
}

#[test]
fn command_lines_of_the_documentation_are_taken() {
    let mut tried = 0;
    for path in documents() {
        let text = fs::read_to_string(&path).expect("text");
        for command in commands(&text) {
            if has_placeholder(&command) {
                println!("{}: not tried for its placeholder: {command}", path.display());
                continue;
            }
            if let Err(error) = Arguments::try_parse_from(command.split_whitespace()) {
                panic!("{}: {command}\n{error}", path.display());
            }
            tried += 1;
        }
    }
    assert!(tried > 40, "{tried} command lines were found");
}

#[test]
fn command_lines_are_told_from_prose_and_placeholders_from_names() {
    let text = "podctl hosts list is prose\n\n    podctl hosts list   # so is this\n```\npodctl pool\n```\n";
    assert_eq!(commands(text), ["podctl hosts list", "podctl pool"]);
    assert!(has_placeholder("podctl events --after NUMBER") && has_placeholder("podctl hosts get …"));
    assert!(!has_placeholder("podctl volumes create vol0 --size 8G"));
}
