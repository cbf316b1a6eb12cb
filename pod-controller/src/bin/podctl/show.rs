//! How answers are written: as lines for people, or as what the API says.

use std::io::Write;

use pod_api::client::Client;
use serde::Serialize;

use crate::Failure;
use crate::arguments::Output;

/// Writes an answer.
pub(crate) fn show<T: Serialize>(
    out: &mut dyn Write,
    format: Output,
    answer: &T,
    table: impl FnOnce(&T) -> String,
) -> Result<(), Failure> {
    match format {
        Output::Table | Output::Wide => writeln!(out, "{}", table(answer).trim_end())?,
        Output::Json => {
            serde_json::to_writer_pretty(&mut *out, answer).map_err(std::io::Error::from)?;
            writeln!(out)?;
        }
        Output::Yaml => out.write_all(yaml(answer)?.as_bytes())?,
    }
    Ok(())
}

/// An answer as one YAML document that begins and ends with the lines of its own.
pub(crate) fn yaml<T: Serialize>(answer: &T) -> Result<String, Failure> {
    let document = serde_saphyr::to_string(answer);
    let document = document.map_err(|error| Failure::Output(std::io::Error::other(error.to_string())))?;
    Ok(format!("---\n{}\n", document.trim_end()))
}

/// Writes that something was done to which there is no answer, or would be if it was only tried.
pub(crate) fn done(
    client: &Client,
    out: &mut dyn Write,
    format: Output,
    (what, name): (&str, &str),
    (done, would): (&str, &str),
) -> Result<(), Failure> {
    let outcome = if client.is_trying_only() { would } else { done };
    match format {
        Output::Table | Output::Wide => writeln!(out, "{what} {name} {outcome}")?,
        Output::Json => writeln!(out, "{{}}")?,
        Output::Yaml => writeln!(out, "--- {{}}")?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use pod_api::{Labels, Volume, VolumeQos};

    use super::*;

    #[test]
    fn yaml_quotes_what_would_be_something_else() {
        let labels = [("answer", "no"), ("version", "1.10"), ("empty", "")];
        let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let shown = yaml(&Labels { labels }).expect("YAML");
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[..2], ["---", "labels:"], "{shown}");
        for (line, name, value) in [(2, "answer", "no"), (3, "empty", ""), (4, "version", "1.10")] {
            let quoted = [format!("  {name}: '{value}'"), format!("  {name}: \"{value}\"")];
            assert!(quoted.iter().any(|quoted| lines[line] == quoted), "{shown}");
        }
    }

    #[test]
    fn every_form_of_a_list_is_whole() {
        let volumes = [Volume {
            resource_version: String::new(),
            name: "vol0".to_owned(),
            id: 1,
            device: "h2/ssd0".to_owned(),
            start_bytes: 0,
            size_bytes: 4096,
            allocated_bytes: None,
            stripe_bytes: None,
            replicas: Vec::new(),
            qos: VolumeQos::default(),
            read_only: false,
            instance: None,
            apart: None,
            together: None,
            labels: std::collections::BTreeMap::new(),
            conditions: Vec::new(),
        }];
        let shown = |format| {
            let mut out = Vec::new();
            show(&mut out, format, &volumes, |_| "a table".to_owned()).expect("written");
            String::from_utf8(out).expect("text")
        };
        assert_eq!(shown(Output::Table), "a table\n");
        assert!(shown(Output::Yaml).contains("name: vol0"), "{}", shown(Output::Yaml));
        assert_eq!(serde_json::from_str::<Vec<Volume>>(&shown(Output::Json)).expect("JSON"), volumes);
    }
}
