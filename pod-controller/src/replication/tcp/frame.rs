//! Messages on a stream: four bytes, little-endian, say how many follow. None follow what only says that somebody is there.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// After this long without anything a connection counts as lost. Whoever has nothing to say says so in between.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(2);

/// What is taken in at once: a length that is only claimed costs nothing.
const PART_BYTES: usize = 64 << 10;

/// Reads one of at most so many bytes; more, or silence, is an error.
pub(super) async fn read(from: &mut (impl AsyncRead + Unpin), limit: usize) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    let mut filled = 0;
    while filled < length.len() {
        filled += some(from.read(&mut length[filled..])).await?;
    }
    let bytes = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if bytes > limit {
        let what = format!("a message of {bytes} bytes, more than the {limit} that are allowed");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let mut message = Vec::with_capacity(bytes.min(PART_BYTES));
    let mut rest = from.take(bytes as u64);
    while message.len() < bytes {
        message.reserve((bytes - message.len()).min(PART_BYTES));
        some(rest.read_buf(&mut message)).await?;
    }
    Ok(message)
}

/// At least one byte, in time.
async fn some(reading: impl Future<Output = io::Result<usize>>) -> io::Result<usize> {
    match tokio::time::timeout(SILENCE_MAX, reading).await {
        Ok(Ok(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(outcome) => outcome,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "nothing is heard any more")),
    }
}

/// Writes one, which is under way for certain only when the stream was flushed.
pub(super) async fn write(to: &mut (impl AsyncWrite + Unpin), message: &[u8]) -> io::Result<()> {
    let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "a message of more than 4 GiB");
    let length = u32::try_from(message.len()).map_err(too_long)?;
    to.write_all(&length.to_le_bytes()).await?;
    to.write_all(message).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_back_as_they_were() {
        let (mut here, mut there) = tokio::io::duplex(1000);
        let messages = [Vec::new(), vec![7; 3], vec![8; 200_000]];
        let sent = messages.clone();
        let sending = tokio::spawn(async move {
            for message in &sent {
                write(&mut here, message).await.expect("written");
            }
        });
        for message in &messages {
            assert!(read(&mut there, 200_000).await.expect("a message") == *message);
        }
        sending.await.expect("no panic");
        let ended = read(&mut there, 10).await.expect_err("it ended");
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_long_cut_off_or_silent_is_no_message() {
        for (sent, kind) in [
            (&[11, 0, 0, 0][..], io::ErrorKind::InvalidData),
            (&[255, 255, 255, 255], io::ErrorKind::InvalidData),
            (&[10, 0], io::ErrorKind::TimedOut),
            (&[10, 0, 0, 0, 1, 2], io::ErrorKind::TimedOut),
            (&[], io::ErrorKind::TimedOut),
        ] {
            let (mut here, mut there) = tokio::io::duplex(1000);
            here.write_all(sent).await.expect("written");
            let error = read(&mut there, 10).await.expect_err("it is none");
            assert_eq!(error.kind(), kind, "{sent:?}");
        }
    }
}
