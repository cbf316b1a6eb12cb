//! One end of a conversation, whatever carries it.

use anyhow::Result;

/// An end that asks, or answers. Requests are answered in the order in which they were asked.
pub(crate) trait End {
    /// Asks. Reaches the peer after [`flush`](Self::flush) at the latest; nothing waits for the answer.
    fn ask(&mut self, payload: &[u8]) -> Result<()>;

    /// The next answer, if it has come.
    fn answer(&mut self) -> Result<Option<Vec<u8>>>;

    /// Answers a request with what it asked; says what that was, if there was one.
    fn serve(&mut self) -> Result<Option<Vec<u8>>>;

    /// Lets the peer see what was said.
    fn flush(&mut self) -> Result<()>;

    /// There was nothing to do: waits, or comes back at once to look again.
    fn wait(&mut self) -> Result<()>;
}
