//! Lists: pages of them, and what is asked for by labels.

use std::collections::BTreeMap;

use super::Failure;
use super::hex::hex;

/// The most things of a page.
const PAGE_MAX: usize = 10_000;

/// Which part of a list.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a> {
    /// How many things at most; all that there are unless given.
    pub(super) limit: Option<usize>,
    /// What the page before said.
    pub(super) token: Option<&'a str>,
}

impl Page<'_> {
    /// The page, and how to ask for the next one. `key` is different for each thing and does not change. What comes and goes
    /// meanwhile may be seen or not; everything else is seen once.
    pub(super) fn of<T>(
        self,
        things: Vec<T>,
        key: impl Fn(&T) -> String,
    ) -> Result<(Vec<T>, Option<String>), Failure> {
        let limit = match self.limit {
            None => usize::MAX,
            Some(limit) if (1..=PAGE_MAX).contains(&limit) => limit,
            Some(limit) => {
                return Err(Failure::invalid(format!(
                    "limit={limit} is no size of a page: use 1 to {PAGE_MAX}"
                )));
            }
        };
        let after = self.token.map(read_token).transpose()?;
        let keyed = things.into_iter().map(|it| (key(&it), it));
        let keyed = keyed.filter(|(key, _)| after.as_ref().is_none_or(|after| key > after));
        let mut keyed: Vec<(String, T)> = keyed.collect();
        let more = keyed.len() > limit;
        if more {
            // What is on later pages need not be in order.
            keyed.select_nth_unstable_by(limit, |a, b| a.0.cmp(&b.0));
            keyed.truncate(limit);
        }
        keyed.sort_by(|a, b| a.0.cmp(&b.0));
        let next = keyed.last().filter(|_| more).map(|(key, _)| token(key));
        Ok((keyed.into_iter().map(|(_, thing)| thing).collect(), next))
    }
}

fn token(key: &str) -> String {
    hex(key.bytes())
}

fn read_token(token: &str) -> Result<String, Failure> {
    let digits = token.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.map(byte).collect();
    let key = bytes.filter(|it| !it.is_empty()).and_then(|bytes| String::from_utf8(bytes).ok());
    key.ok_or_else(|| Failure::invalid("continue must be what the page before said: begin without it"))
}

/// What is asked of labels, as `name=value,name=value`: all of it must hold. A name alone asks for any value.
pub(super) struct Selector<'a>(Vec<(&'a str, Option<&'a str>)>);

impl<'a> Selector<'a> {
    pub(super) fn parse(text: Option<&'a str>) -> Result<Self, Failure> {
        let mut wanted = Vec::new();
        for pair in text.into_iter().flat_map(|text| text.split(',')) {
            let (name, value) = match pair.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (pair, None),
            };
            if name.is_empty() || value.is_some_and(|value| value.contains('=')) {
                return Err(Failure::invalid(
                    "label must be name=value, or several with commas between them",
                ));
            }
            wanted.push((name, value));
        }
        Ok(Self(wanted))
    }

    pub(super) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(name, value)| {
            labels.get(*name).is_some_and(|known| value.is_none_or(|value| known == value))
        })
    }
}

/// Whether a field is what was asked for, if anything was.
pub(super) fn is(asked: Option<&String>, field: &str) -> bool {
    asked.is_none_or(|asked| asked == field)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(limit: usize, token: Option<&str>, things: &[&str]) -> (Vec<String>, Option<String>) {
        let things = things.iter().map(|it| (*it).to_owned()).collect();
        Page { limit: Some(limit), token }.of(things, Clone::clone).expect("a page")
    }

    #[test]
    fn pages_show_everything_once_although_things_come_and_go() {
        let (first, token) = page(2, None, &["b", "a", "d", "c"]);
        assert_eq!(first, ["a", "b"]);
        // The last of that page went, one before it came, and one after it.
        let (second, last) = page(9, token.as_deref(), &["a", "aa", "bb", "c", "d"]);
        assert_eq!((second, last), (vec!["bb".to_owned(), "c".to_owned(), "d".to_owned()], None));
        assert_eq!(page(4, None, &["a", "b"]).1, None);
        assert_eq!(page(2, None, &["a", "b"]).1, None, "a full page may be the last");
    }

    #[test]
    fn what_is_no_page_is_refused() {
        for (limit, token) in
            [(0, None), (PAGE_MAX + 1, None), (1, Some("")), (1, Some("zz")), (1, Some("ff")), (1, Some("é"))]
        {
            let page = Page { limit: Some(limit), token };
            assert!(page.of(vec!["a"], |it| (*it).to_owned()).is_err(), "{limit} {token:?}");
        }
    }

    #[test]
    fn labels_are_selected_by_name_and_value() {
        let labels = [("tier", "web"), ("env", "")].map(|(a, b)| (a.to_owned(), b.to_owned())).into();
        for (text, expected) in [
            ("tier=web", true),
            ("tier", true),
            ("tier=web,env=", true),
            ("tier=db", false),
            ("tier=web,x", false),
        ] {
            assert_eq!(Selector::parse(Some(text)).expect("good").matches(&labels), expected, "{text}");
        }
        assert!(Selector::parse(None).expect("good").matches(&BTreeMap::new()));
        for bad in ["", "=", "a,", "a=b=c"] {
            assert!(Selector::parse(Some(bad)).is_err(), "{bad:?}");
        }
    }
}
