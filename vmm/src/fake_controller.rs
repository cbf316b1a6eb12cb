//! A controller that answers as a test wants.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use pod_api::client::Client;
use tempfile::TempDir;

/// One that listens on a socket. It ends with the process of the tests.
pub(crate) struct Controller {
    path: PathBuf,
    asked: Receiver<String>,
    _directory: TempDir,
}

impl Controller {
    /// Answers requests, such as `GET /v1/instances/vm1`, with a status and a text; status 0 is no answer at all.
    pub(crate) fn start(mut answer: impl FnMut(&str) -> (u16, String) + Send + 'static) -> Self {
        Self::listening(move |request, _| answer(request))
    }

    /// As [`Controller::start`], for who looks at the bodies of requests as well.
    pub(crate) fn listening(mut answer: impl FnMut(&str, &str) -> (u16, String) + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("controller.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (tell, asked) = channel();
        thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = BufReader::new(client.unwrap());
                let mut request = String::new();
                client.read_line(&mut request).unwrap();
                let request = request.rsplit_once(' ').unwrap().0;
                let mut body = Vec::new();
                let mut header = String::from("-");
                while !header.trim().is_empty() {
                    header.clear();
                    client.read_line(&mut header).unwrap();
                    if let Some(length) = header.to_lowercase().strip_prefix("content-length:") {
                        body.resize(length.trim().parse().unwrap(), 0);
                    }
                }
                client.read_exact(&mut body).unwrap();
                let (status, said) = answer(request, &String::from_utf8(body).unwrap());
                // Before who has asked can go on, and look. Nobody may want to know.
                let _ = tell.send(request.to_owned());
                if status != 0 {
                    let length = said.len();
                    let head =
                        format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {length}");
                    write!(client.get_mut(), "{head}\r\n\r\n{said}").unwrap();
                }
            }
        });
        Self { path, asked, _directory: directory }
    }

    /// Asks it.
    pub(crate) fn client(&self) -> Client {
        Client::unix(&self.path).unwrap()
    }

    /// The requests so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.try_iter().collect()
    }
}
