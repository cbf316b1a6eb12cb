//! What the API says of itself in `docs/openapi.json`, to hold its answers against.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::Value;

/// One operation: its method, and its path with the names of parameters in braces.
pub(crate) struct Operation {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) takes_body: bool,
    answers: Value,
}

impl Operation {
    pub(crate) fn changes(&self) -> bool {
        self.method != "GET"
    }

    /// Its path with this in place of every parameter.
    pub(crate) fn path_with(&self, value: &str) -> String {
        let part = |part: &str| if part.starts_with('{') { value.to_owned() } else { part.to_owned() };
        self.path.split('/').map(part).collect::<Vec<_>>().join("/")
    }

    fn is_at(&self, path: &str) -> bool {
        let (mine, asked): (Vec<&str>, Vec<&str>) =
            (self.path.split('/').collect(), path.split('/').collect());
        let fits =
            |(mine, asked): (&&str, &&str)| mine == asked || mine.starts_with('{') && !asked.is_empty();
        mine.len() == asked.len() && mine.iter().zip(&asked).all(fits)
    }
}

pub(crate) struct Description {
    pub(crate) operations: Vec<Operation>,
}

impl Description {
    /// The one that is checked in. A test of its own sees that it is the one that is served.
    pub(crate) fn checked_in() -> &'static Self {
        static READ: OnceLock<Description> = OnceLock::new();
        READ.get_or_init(|| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
            let text = std::fs::read_to_string(path).expect("docs/openapi.json");
            let described: Value = serde_json::from_str(&text).expect("JSON");
            let mut operations = Vec::new();
            for (path, methods) in described["paths"].as_object().expect("paths") {
                for (method, operation) in methods.as_object().expect("operations") {
                    operations.push(Operation {
                        method: method.to_uppercase(),
                        path: path.clone(),
                        takes_body: operation["requestBody"].is_object(),
                        answers: operation["responses"].clone(),
                    });
                }
            }
            Self { operations }
        })
    }

    /// That an operation says that it may be answered so.
    #[track_caller]
    pub(crate) fn assert_has(&self, method: &str, path: &str, status: u16) {
        let operation = self.find(method, path).unwrap_or_else(|| panic!("{method} {path} is not described"));
        let answers = operation.answers.as_object().expect("answers");
        let known: BTreeSet<&str> = answers.keys().map(String::as_str).collect();
        assert!(
            known.contains(status.to_string().as_str()),
            "{status} is no answer that {method} {} is described with: {known:?}",
            operation.path
        );
    }

    /// That a request, if it is for an operation, may be answered like this, and in this form.
    #[track_caller]
    pub(crate) fn assert_allows(&self, request: &str, answer: &str) {
        let mut words = request.split([' ', '\r']);
        let (Some(method), Some(address)) = (words.next(), words.next()) else { return };
        let path = address.split('?').next().unwrap_or(address);
        let Some(operation) = self.find(method, path) else { return };
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("{method} {path}: no HTTP: {answer:?}"));
        self.assert_has(method, path, status);
        let head = answer.split("\r\n\r\n").next().unwrap_or(answer);
        let header =
            |line: &'_ str| line.to_ascii_lowercase().strip_prefix("content-type: ").map(str::to_owned);
        let said = head.lines().find_map(header);
        let said = said.as_deref().and_then(|kind| kind.split(';').next());
        let content = &operation.answers[status.to_string()]["content"];
        match said {
            Some(kind) => {
                assert!(content[kind].is_object(), "{method} {path}: {status} is not {kind}: {content}");
            }
            None => assert!(content.is_null(), "{method} {path}: {status} has no {content}"),
        }
    }

    fn find(&self, method: &str, path: &str) -> Option<&Operation> {
        self.operations.iter().find(|it| it.method == method && it.is_at(path))
    }
}
