//! The load on a terminal: shown anew every moment, ordered by keys, until somebody ends it.

use std::io::{self, Read};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use pod_api::client::Client;
use tokio::signal::unix::{SignalKind, signal};

use super::screen::{Screen, Size};
use super::{Order, Picture, Pictures, text};
use crate::Failure;
use crate::arguments::Top;

/// Lines of a table that are none of its rows: its header, one before it, and how many more there are.
const LINES_AROUND: usize = 3;

/// What may happen meanwhile.
enum Happening {
    /// Somebody looked at the pod, or could not.
    Looked(Result<Picture, String>),
    Key(u8),
    Resized,
    End,
}

/// Shows it until a key or a signal ends it. That it cannot be reached at first is a failure; later it is waited for.
pub(crate) fn run(client: Client, top: &Top) -> Result<(), Failure> {
    let (sender, happenings) = mpsc::channel();
    let mut pictures = Pictures::begin(&client)?;
    watch_signals(sender.clone())?;
    let screen = Screen::open()?;
    watch_keys(sender.clone());
    let every = Duration::from_secs_f64(top.interval);
    thread::spawn(move || {
        loop {
            thread::sleep(every);
            let looked = pictures.next(&client).map_err(|failure| failure.to_string());
            if sender.send(Happening::Looked(looked)).is_err() {
                return;
            }
        }
    });
    let mut shown = Shown { picture: None, order: Order::Busiest, trouble: None };
    screen.draw("", &shown.bottom())?;
    for happening in happenings {
        match happening {
            Happening::Looked(Ok(picture)) => (shown.picture, shown.trouble) = (Some(picture), None),
            Happening::Looked(Err(why)) => shown.trouble = Some(why),
            Happening::Key(b'b') => shown.order = Order::Busiest,
            Happening::Key(b'n') => shown.order = Order::Name,
            Happening::Key(b'q') | Happening::End => break,
            Happening::Key(_) => continue,
            Happening::Resized => {}
        }
        screen.draw(&shown.text(Screen::size(), top.lines), &shown.bottom())?;
    }
    Ok(())
}

/// What is on the screen.
struct Shown {
    /// The last that was seen.
    picture: Option<Picture>,
    order: Order,
    /// Why nothing newer is seen.
    trouble: Option<String>,
}

impl Shown {
    fn text(&mut self, size: Size, lines_max: usize) -> String {
        let Some(picture) = &mut self.picture else { return String::new() };
        picture.sort(self.order);
        text(picture, lines_max.min(rows_of_table(size, picture)))
    }

    fn bottom(&self) -> String {
        if let Some(why) = &self.trouble {
            let why = why.lines().next().unwrap_or_default();
            return format!("what is shown is old; trying again: {why}");
        }
        let order = match self.order {
            Order::Busiest => "the busiest first; n: by name",
            Order::Name => "by name; b: the busiest first",
        };
        format!("{order}; q: quit")
    }
}

/// How many rows of each table there is room for.
fn rows_of_table(size: Size, picture: &Picture) -> usize {
    let tables = if picture.mchannels.is_empty() { 2 } else { 3 };
    // The first line and the last, and what is said of the fabric.
    let fabric = if picture.fabric.is_empty() { 0 } else { 2 };
    let room = size.rows.saturating_sub(2 + fabric + tables * LINES_AROUND);
    (room / tables).max(1)
}

/// Keys as they are pressed, until the terminal is gone.
fn watch_keys(sender: Sender<Happening>) {
    thread::spawn(move || {
        for key in io::stdin().lock().bytes().map_while(Result::ok) {
            if sender.send(Happening::Key(key)).is_err() {
                return;
            }
        }
    });
}

/// Signals that would end us, leaving the terminal as we have it, and that it has another size.
fn watch_signals(sender: Sender<Happening>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let caught = {
        let _entered = runtime.enter();
        let (interrupt, terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        (interrupt, terminate, signal(SignalKind::hangup())?, signal(SignalKind::window_change())?)
    };
    thread::spawn(move || {
        let (mut interrupt, mut terminate, mut hangup, mut resize) = caught;
        runtime.block_on(async move {
            loop {
                let happening = tokio::select! {
                    _ = interrupt.recv() => Happening::End,
                    _ = terminate.recv() => Happening::End,
                    _ = hangup.recv() => Happening::End,
                    _ = resize.recv() => Happening::Resized,
                };
                if sender.send(happening).is_err() {
                    return;
                }
            }
        });
    });
    Ok(())
}
