//! Writing XML, a line for each element.

#[derive(Default)]
pub(crate) struct Xml {
    pub(crate) text: String,
    depth: usize,
}

impl Xml {
    pub(crate) fn line(&mut self, line: &str) {
        self.text.extend(std::iter::repeat_n("  ", self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    pub(crate) fn open(&mut self, line: &str) {
        self.line(line);
        self.depth += 1;
    }

    pub(crate) fn close(&mut self, line: &str) {
        self.depth -= 1;
        self.line(line);
    }
}

/// A value, for between tags or between single quotes.
pub(crate) fn text(value: &str) -> String {
    value.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('\'', "&apos;")
}
