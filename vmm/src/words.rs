//! The words of a VMM's command line.

use std::path::Path;

/// Words, one after the other.
#[derive(Default)]
pub(crate) struct Words(pub(crate) Vec<String>);

impl Words {
    pub(crate) fn flag(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn option(&mut self, name: &str, value: &str) {
        self.0.push(name.to_owned());
        self.0.push(value.to_owned());
    }
}

/// QEMU ends a value at a comma, unless it is doubled.
pub(crate) fn escape(value: &str) -> String {
    value.replace(',', ",,")
}

pub(crate) fn socket_path(path: &Path) -> String {
    escape(&path.display().to_string())
}

/// One command line for a shell, quoted where it must be, with a line per option.
pub(crate) fn shell_line(program: &str, words: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    let quoted = |word: &str| {
        if !word.is_empty() && word.chars().all(plain) {
            word.to_owned()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    let mut line = quoted(program);
    for word in words {
        line.push_str(if word.starts_with('-') { " \\\n  " } else { " " });
        line.push_str(&quoted(word));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_lines_survive_a_shell() {
        let words: Vec<String> = ["-append", "a b", "-x", "it's"].map(str::to_owned).to_vec();
        assert_eq!(shell_line("/my qemu/q", &[]), "'/my qemu/q'");
        assert_eq!(shell_line("qemu", &words), "qemu \\\n  -append 'a b' \\\n  -x 'it'\\''s'");
    }
}
