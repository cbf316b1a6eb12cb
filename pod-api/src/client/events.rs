use std::collections::VecDeque;
use std::time::{Duration, Instant};

use reqwest::Method;

use super::request::REQUEST_TIMEOUT;
use super::{Client, ClientError};
use crate::{Event, EventList};

/// More than any event's text.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// For how long nothing may be heard: a controller that lives says so every 15 s.
const SILENCE_MAX: Duration = Duration::from_secs(45);

/// Events as they happen. Ends when the controller does, and fails when nothing is heard of it for 45 s, as where its host has lost
/// power; open it again after the last sequence number to go on.
#[derive(Debug)]
pub struct EventStream<'a> {
    client: &'a Client,
    response: reqwest::Response,
    partial: Vec<u8>,
    ready: VecDeque<Event>,
    seen: Option<u64>,
    /// For how long nothing was heard while somebody waited.
    waited: Duration,
    silence_max: Duration,
}

impl Client {
    /// Events after a sequence number; 0 for all that are kept.
    pub fn events(&self, after: u64) -> Result<EventList, ClientError> {
        self.events_with(after, &[])
    }

    /// Those of them with all of these fields, such as `("kind", "failover")`.
    pub fn events_with(&self, after: u64, fields: &[(&str, &str)]) -> Result<EventList, ClientError> {
        let after = after.to_string();
        let fields: Vec<(&str, &str)> = fields.iter().copied().chain([("after", after.as_str())]).collect();
        self.call::<(), _>(Method::GET, &["v1", "events"], &fields, None)
    }

    /// Follows events after a sequence number, for as long as the controller lives.
    pub fn follow_events(&self, after: u64) -> Result<EventStream<'_>, ClientError> {
        self.follow_events_with(after, &[])
    }

    /// Those of them with all of these fields, such as `("kind", "failover")`.
    pub fn follow_events_with(
        &self,
        after: u64,
        fields: &[(&str, &str)],
    ) -> Result<EventStream<'_>, ClientError> {
        EventStream::open(self, Some(after), fields)
    }

    /// Follows what happens from now on, for as long as the controller lives.
    pub fn follow_new_events(&self) -> Result<EventStream<'_>, ClientError> {
        EventStream::open(self, None, &[])
    }
}

impl<'a> EventStream<'a> {
    /// Events after this one, or from now on, with these fields.
    pub(super) fn open(
        client: &'a Client,
        seen: Option<u64>,
        fields: &[(&str, &str)],
    ) -> Result<Self, ClientError> {
        client.runtime.block_on(async {
            let after = seen.map(|after| after.to_string());
            let after = after.iter().map(|after| ("after", after.as_str()));
            let query: Vec<(&str, &str)> = fields.iter().copied().chain(after).collect();
            let url = client.url(&["v1", "events", "stream"], &query);
            // What comes after the head may take for ever.
            let answer = tokio::time::timeout(REQUEST_TIMEOUT, client.request(Method::GET, url).send()).await;
            let response = answer.map_err(|_| client.silent(REQUEST_TIMEOUT))?;
            let response = client.refusal(response.map_err(|error| client.unreachable(&error))?).await?;
            Ok(Self {
                client,
                response,
                partial: Vec::new(),
                ready: VecDeque::new(),
                seen,
                waited: Duration::ZERO,
                silence_max: SILENCE_MAX,
            })
        })
    }

    /// After which event to go on: none that was asked for is missed then.
    pub fn seen(&self) -> Option<u64> {
        match self.ready.front() {
            Some(next) => Some(next.sequence.saturating_sub(1)),
            None => self.seen,
        }
    }

    /// The next event, or nothing if none happens for so long. Fails once the controller goes away.
    pub fn next_within(&mut self, limit: Duration) -> Result<Option<Event>, ClientError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(Some(event));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.hear(left)? {
                Heard::Something => {}
                Heard::Nothing => return Ok(None),
                Heard::End => {
                    let (server, reason) = (self.client.server.clone(), "it ended the events".to_owned());
                    return Err(ClientError::Unreachable { server, reason });
                }
            }
        }
    }

    /// Waits for what is said next, for so long at most.
    fn hear(&mut self, limit: Duration) -> Result<Heard, ClientError> {
        let patience = self.silence_max.saturating_sub(self.waited);
        let limit = limit.min(patience);
        let since = Instant::now();
        let chunk = async { tokio::time::timeout(limit, self.response.chunk()).await };
        match self.client.runtime.block_on(chunk) {
            Err(_) if limit == patience => Err(self.client.silent(self.silence_max)),
            Err(_) => {
                self.waited += since.elapsed();
                Ok(Heard::Nothing)
            }
            Ok(Ok(Some(chunk))) => {
                self.waited = Duration::ZERO;
                self.partial.extend_from_slice(&chunk);
                self.take_lines()?;
                Ok(Heard::Something)
            }
            Ok(Ok(None)) => Ok(Heard::End),
            Ok(Err(error)) => Err(self.client.unreachable(&error)),
        }
    }

    fn take_lines(&mut self) -> Result<(), ClientError> {
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            // Of server-sent events `data:` has the sequence number and the kind in it; events that were not asked for have an `id:` only.
            if let Some(id) = line.strip_prefix(b"id:") {
                let number = std::str::from_utf8(id).ok().and_then(|id| id.trim().parse().ok());
                self.seen = number.or(self.seen);
            } else if let Some(json) = line.strip_prefix(b"data:") {
                let event = serde_json::from_slice(json).map_err(|error| self.garbled(error.to_string()))?;
                self.ready.push_back(event);
            }
        }
        if self.partial.len() > LINE_BYTES_MAX {
            return Err(self.garbled("an event longer than 64 KiB".to_owned()));
        }
        Ok(())
    }

    fn garbled(&self, reason: String) -> ClientError {
        ClientError::Garbled { server: self.client.server.clone(), reason }
    }
}

impl Iterator for EventStream<'_> {
    type Item = Result<Event, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(Ok(event));
            }
            match self.hear(Duration::MAX) {
                Ok(Heard::Something | Heard::Nothing) => {}
                Ok(Heard::End) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

/// What became of waiting.
enum Heard {
    Something,
    /// In time.
    Nothing,
    End,
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// A controller whose host loses power after it has told one event: its connections stay as they are, for as long as the test runs.
    fn dies_after_an_event() -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut asked = [0; 4096];
            let _ = stream.read(&mut asked).expect("a request");
            let event = "{\"sequence\":7,\"time_ms\":0,\"kind\":\"link-up\",\"subject\":\"h2/nic0\",\"message\":\"\"}";
            let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
            write!(stream, "{head}:\n\nid: 7\ndata: {event}\n\n").expect("somebody listens");
            // Until whoever listens has given up.
            while stream.read(&mut asked).is_ok_and(|bytes| bytes > 0) {}
        });
        let server = format!("http://{address}").parse().expect("a server");
        Client::new(server).expect("a client")
    }

    #[test]
    fn a_controller_that_says_nothing_any_more_is_given_up() {
        let within = |stream: &mut EventStream<'_>| {
            stream.next_within(Duration::from_mins(1)).map(|event| event.is_some())
        };
        let next = |stream: &mut EventStream<'_>| stream.next().expect("it has not ended").map(|_| true);
        for follow in [within as fn(&mut EventStream<'_>) -> Result<bool, ClientError>, next] {
            let client = dies_after_an_event();
            let mut stream = client.follow_events(0).expect("it answers");
            stream.silence_max = Duration::from_millis(300);
            assert!(follow(&mut stream).expect("an event"));
            let error = follow(&mut stream).expect_err("nothing is heard").to_string();
            assert!(error.contains("nothing was heard"), "{error}");
            assert_eq!(stream.seen(), Some(7), "after which to go on");
        }
    }
}
