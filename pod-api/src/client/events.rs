use std::collections::VecDeque;
use std::time::{Duration, Instant};

use reqwest::Method;

use super::{Client, ClientError};
use crate::{Event, EventList};

/// More than any event's text.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Events as they happen. Ends when the controller does; open it again after the last sequence number to go on.
#[derive(Debug)]
pub struct EventStream<'a> {
    client: &'a Client,
    response: reqwest::Response,
    partial: Vec<u8>,
    ready: VecDeque<Event>,
    seen: Option<u64>,
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
            let response = client.request(Method::GET, url).send().await;
            let response = response.map_err(|error| client.unreachable(&error))?;
            let response = client.refusal(response).await?;
            Ok(Self { client, response, partial: Vec::new(), ready: VecDeque::new(), seen })
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
            let chunk = async { tokio::time::timeout(left, self.response.chunk()).await };
            match self.client.runtime.block_on(chunk) {
                Err(_) => return Ok(None),
                Ok(Ok(Some(chunk))) => {
                    self.partial.extend_from_slice(&chunk);
                    self.take_lines()?;
                }
                Ok(Ok(None)) => {
                    let (server, reason) = (self.client.server.clone(), "it ended the events".to_owned());
                    return Err(ClientError::Unreachable { server, reason });
                }
                Ok(Err(error)) => return Err(self.client.unreachable(&error)),
            }
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
            match self.client.runtime.block_on(self.response.chunk()) {
                Ok(Some(chunk)) => {
                    self.partial.extend_from_slice(&chunk);
                    if let Err(error) = self.take_lines() {
                        return Some(Err(error));
                    }
                }
                Ok(None) => return None,
                Err(error) => return Some(Err(self.client.unreachable(&error))),
            }
        }
    }
}
