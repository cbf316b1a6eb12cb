use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::{Extension, Json};
use pod_api::{Event, EventKind, EventList, Problem};
use serde::Deserialize;
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::IntoParams;

use super::Failure;
use super::access::Standing;
use super::body::Asked;
use super::list::is;
use crate::controller::Handle;

/// The most events of one answer.
const LIMIT_MAX: usize = 10_000;
/// How many events a stream takes from the journal at a time.
const STREAM_BATCH: usize = 256;
/// How long an event is waited for that is not known here yet: a replica that lags catches up in less, and one that was restored from a
/// backup never had it.
const AHEAD_MAX: Duration = Duration::from_secs(5);
/// How often a stream without events says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsQuery {
    /// Only events after this sequence number.
    #[serde(default)]
    after: Option<u64>,
    /// At most this many, 1 to 10000; 10000 unless given.
    #[serde(default)]
    limit: Option<usize>,
    /// Only events of this kind.
    #[serde(default)]
    kind: Option<EventKind>,
    /// Only what happened to this: `h2`, `h2/nic0`, the name of an instance or volume.
    #[serde(default)]
    subject: Option<String>,
}

/// Recent events, oldest first.
#[utoipa::path(
    get, path = "/v1/events", operation_id = "list_events", tag = "events", params(EventsQuery),
    responses(
        (status = 200, body = EventList),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 410, description = "there is no such event, as after a restore from a backup", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn list(
    State(handle): State<Handle>,
    Asked(query): Asked<EventsQuery>,
) -> Result<Json<EventList>, Failure> {
    let limit = query.limit.unwrap_or(LIMIT_MAX);
    if !(1..=LIMIT_MAX).contains(&limit) {
        return Err(Failure::invalid(format!("limit={limit} is no number of events: use 1 to {LIMIT_MAX}")));
    }
    let after = query.after.unwrap_or(0);
    is_there(&handle, after).await?;
    let mut list = handle.journal().after(after, usize::MAX);
    list.events.retain(|event| {
        query.kind.is_none_or(|kind| event.kind == kind) && is(query.subject.as_ref(), &event.subject)
    });
    list.events.truncate(limit);
    Ok(Json(list))
}

/// Which events to begin with.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct StreamQuery {
    /// Begin after this sequence number; 0 for all that are kept, and with the next event unless given. `Last-Event-ID` says the
    /// same.
    #[serde(default)]
    after: Option<u64>,
    /// Only events of this kind. Of others only the `id` is told now and then, so that a client goes on after them.
    #[serde(default)]
    kind: Option<EventKind>,
    /// Only what happened to this: `h2`, `h2/nic0`, the name of an instance or volume.
    #[serde(default)]
    subject: Option<String>,
}

/// Events as they happen, as server-sent events: `id` is the sequence number, `event` the kind, `data` the event.
#[utoipa::path(
    get, path = "/v1/events/stream", operation_id = "stream_events", tag = "events", params(StreamQuery),
    responses(
        (status = 200, description = "events, for as long as the client listens and may", body = String, content_type = "text/event-stream"),
        (status = 400, body = Problem, content_type = "application/problem+json"),
        (status = 410, description = "events after that one are not kept any more, or there is no such event", body = Problem, content_type = "application/problem+json"),
    )
)]
pub(super) async fn stream(
    State(handle): State<Handle>,
    Asked(query): Asked<StreamQuery>,
    standing: Option<Extension<Standing>>,
    headers: HeaderMap,
) -> Result<Sse<impl Stream<Item = Result<sse::Event, Infallible>>>, Failure> {
    // A browser that connects again sends where it was; that is newer than what stands in the address.
    let after = match headers.get("last-event-id") {
        Some(value) => {
            let number = value.to_str().ok().and_then(|text| text.parse().ok());
            number.ok_or_else(|| Failure::invalid("Last-Event-ID must be the number of an event"))?
        }
        None => query.after.unwrap_or_else(|| handle.journal().last()),
    };
    is_there(&handle, after).await?;
    // From the beginning is from whatever is kept; after an event is after that one, or not at all.
    let after = match (after, handle.journal().after(after, 0).first) {
        (0, first) => first.saturating_sub(1),
        (after, first) if after.saturating_add(1) < first => {
            let detail = format!(
                "events before {first} are not kept any more, so what came after {after} cannot all be told: read what \
                 there is anew, then follow without Last-Event-ID"
            );
            return Err(Failure::new(StatusCode::GONE, "events-gone", detail));
        }
        (after, _) => after,
    };
    let news = handle.journal().follow();
    let StreamQuery { kind, subject, .. } = query;
    let standing = standing.map(|Extension(standing)| standing);
    let follower = Follower { handle, news, kind, subject, after, standing, ready: VecDeque::new() };
    Ok(Sse::new(follower.stream()).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

/// Refuses to go on after an event that there is not: whoever has seen it would wait until others have its number and those before it,
/// and never hear of them.
async fn is_there(handle: &Handle, event: u64) -> Result<(), Failure> {
    let mut news = handle.journal().follow();
    if tokio::time::timeout(AHEAD_MAX, news.wait_for(|last| *last >= event)).await.is_ok() {
        return Ok(());
    }
    let last = handle.journal().last();
    let detail = format!(
        "there is no event {event}: the last one is {last}, as after a restore from a backup. Read what there is anew, then follow \
         without Last-Event-ID"
    );
    Err(Failure::new(StatusCode::GONE, "events-gone", detail))
}

struct Follower {
    handle: Handle,
    news: watch::Receiver<u64>,
    kind: Option<EventKind>,
    subject: Option<String>,
    after: u64,
    /// Of a client who had to say who he is.
    standing: Option<Standing>,
    ready: VecDeque<Event>,
}

/// What a stream tells.
enum Told {
    Event(Event),
    /// Up to this one there was nothing that was asked for.
    Passed(u64),
}

impl Follower {
    fn stream(mut self) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        // The channel is as long as one event: a client that does not read stops us here, not the controller.
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            loop {
                let told = tokio::select! {
                    told = tokio::time::timeout(KEEP_ALIVE, self.next()) => told,
                    () = sender.closed() => break,
                };
                // Whoever is not known any more hears nothing more.
                if self.standing.as_ref().is_some_and(|standing| !standing.holds()) {
                    break;
                }
                let told = match told {
                    Ok(Some(told)) => told,
                    Ok(None) => break,
                    Err(_) => continue,
                };
                if sender.send(Ok(show(&told))).await.is_err() {
                    break;
                }
            }
        });
        ReceiverStream::new(receiver)
    }

    fn wants(&self, event: &Event) -> bool {
        self.kind.is_none_or(|kind| event.kind == kind) && is(self.subject.as_ref(), &event.subject)
    }

    async fn next(&mut self) -> Option<Told> {
        loop {
            let before = self.after;
            while let Some(event) = self.ready.pop_front() {
                self.after = event.sequence;
                if self.wants(&event) {
                    return Some(Told::Event(event));
                }
            }
            if self.after > before {
                return Some(Told::Passed(self.after));
            }
            // Seen before it is read: what is added after that wakes us again.
            self.news.mark_unchanged();
            let list = self.handle.journal().after(self.after, STREAM_BATCH);
            // A client that is so slow has missed some: it learns that when it asks to go on.
            if list.first > self.after.saturating_add(1) {
                return None;
            }
            self.ready = list.events.into();
            if self.ready.is_empty() {
                self.news.changed().await.ok()?;
            }
        }
    }
}

fn show(told: &Told) -> sse::Event {
    let event = match told {
        Told::Event(event) => event,
        Told::Passed(last) => return sse::Event::default().id(last.to_string()),
    };
    let shown = sse::Event::default().id(event.sequence.to_string()).event(event.kind.word());
    // An event of plain text and numbers always becomes JSON.
    shown.clone().json_data(event).unwrap_or(shown)
}
