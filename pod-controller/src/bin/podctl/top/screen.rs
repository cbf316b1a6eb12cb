//! A terminal whose whole screen is ours for a while, and which is as it was when we leave it.

use std::fmt::Write as _;
use std::io::{self, Write};

use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios};
use rustix::termios::{tcgetattr, tcgetwinsize, tcsetattr};

/// The other screen, and no cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
/// The cursor, and the screen of before.
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

/// How large a screen is, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The terminal, until this is dropped.
pub(super) struct Screen {
    usual: Termios,
}

impl Screen {
    /// Takes the terminal: keys come one by one and are not shown. Ctrl-C still interrupts.
    pub(super) fn open() -> io::Result<Self> {
        let usual = tcgetattr(io::stdin())?;
        let mut ours = usual.clone();
        ours.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        ours.special_codes[SpecialCodeIndex::VMIN] = 1;
        ours.special_codes[SpecialCodeIndex::VTIME] = 0;
        // A shell that stopped us would find the terminal as we have it.
        ours.special_codes[SpecialCodeIndex::VSUSP] = 0;
        let screen = Self { usual };
        tcsetattr(io::stdin(), OptionalActions::Now, &ours)?;
        write(ENTER)?;
        Ok(screen)
    }

    /// How large it is now.
    pub(super) fn size() -> Size {
        let size = tcgetwinsize(io::stdout()).ok().filter(|it| it.ws_row > 0 && it.ws_col > 0);
        let size = size.map(|it| Size { rows: it.ws_row.into(), columns: it.ws_col.into() });
        size.unwrap_or(Size { rows: 24, columns: 80 })
    }

    /// Shows a text, as much of it as there is room for, and a line at the bottom.
    #[expect(clippy::unused_self, reason = "without a screen the terminal is not prepared for it")]
    pub(super) fn draw(&self, text: &str, bottom: &str) -> io::Result<()> {
        write(&frame(text, bottom, Self::size()))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Where the terminal is gone, nothing is left to be done.
        let _ = write(LEAVE);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.usual);
    }
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// What is written over what was there before.
fn frame(text: &str, bottom: &str, size: Size) -> String {
    let cut = |line: &str| line.chars().take(size.columns).collect::<String>();
    let mut frame = String::from("\x1b[H");
    for line in text.lines().take(size.rows.saturating_sub(1)) {
        frame.push_str(&cut(line));
        frame.push_str("\x1b[K\r\n");
    }
    frame.push_str("\x1b[J");
    let _ = write!(frame, "\x1b[{};1H\x1b[7m{}\x1b[0m\x1b[K", size.rows, cut(bottom));
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_room_is_cut() {
        let size = Size { rows: 3, columns: 4 };
        let shown = frame("one\ntwo…two\nthree\nfour", "the bottom", size);
        assert_eq!(shown, "\x1b[Hone\x1b[K\r\ntwo…\x1b[K\r\n\x1b[J\x1b[3;1H\x1b[7mthe \x1b[0m\x1b[K");
        assert_eq!(
            frame("a", "b", Size { rows: 1, columns: 1 }),
            "\x1b[H\x1b[J\x1b[1;1H\x1b[7mb\x1b[0m\x1b[K"
        );
    }
}
