use std::collections::VecDeque;

use reqwest::Method;

use super::{Client, ClientError};
use crate::api::Event;

/// More than any event's text.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Events as they happen. Ends when the controller does; open it again after the last sequence number to go on.
#[derive(Debug)]
pub struct EventStream<'a> {
    client: &'a Client,
    response: reqwest::Response,
    partial: Vec<u8>,
    ready: VecDeque<Event>,
}

impl<'a> EventStream<'a> {
    pub(super) fn open(client: &'a Client, after: u64) -> Result<Self, ClientError> {
        client.runtime.block_on(async {
            let url = client.url(&["v1", "events", "stream"], &[("after", &after.to_string())]);
            let response = client.request(Method::GET, url).send().await;
            let response = response.map_err(|error| client.unreachable(&error))?;
            let response = client.refusal(response).await?;
            Ok(Self { client, response, partial: Vec::new(), ready: VecDeque::new() })
        })
    }

    fn take_lines(&mut self) -> Result<(), ClientError> {
        while let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.partial.drain(..=end).collect();
            // Of server-sent events only `data:` matters: the sequence number and the kind are in it.
            if let Some(json) = line.strip_prefix(b"data:") {
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
