//! Versions of resources: each answer with one resource says its version, and a change may say to which version it belongs, with
//! `If-Match` or in its body.

use axum::Json;
use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pod_api::{Device, Fabric, Host, Instance, InstanceType, Mchannel, Volume};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use utoipa::openapi::OpenApi;

use super::Failure;
use super::body::Body;

/// The member of a body that says to which version a change belongs.
const MEMBER: &str = "resourceVersion";
/// More than any client needs.
const VERSIONS_MAX: usize = 16;

/// What has a version.
pub(super) trait Resource: Serialize {
    fn version(&self) -> &str;
}

macro_rules! resources {
    ($($kind:ty),*) => {
        $(impl Resource for $kind {
            fn version(&self) -> &str {
                &self.resource_version
            }
        })*
    };
}

resources!(Device, Fabric, Host, Instance, InstanceType, Mchannel, Volume);

/// A resource, with its version as its entity tag.
pub(super) struct Shown<T>(pub(super) T);

impl<T: Resource> IntoResponse for Shown<T> {
    fn into_response(self) -> Response {
        let tag = HeaderValue::try_from(format!("\"{}\"", self.0.version()));
        let mut response = Json(self.0).into_response();
        // Hexadecimal digits always make a header.
        if let Ok(tag) = tag {
            response.headers_mut().insert(header::ETAG, tag);
        }
        response
    }
}

/// The JSON body of a change, and the version to which it belongs if it says one.
pub(super) struct Versioned<T>(pub(super) T, pub(super) Option<String>);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Versioned<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let (parts, body) = request.into_parts();
        let body = to_bytes(body, super::BODY_BYTES_MAX).await.map_err(|_| super::body::too_large())?;
        let (body, version) = take_version(body)?;
        let Body(change) = Body::from_request(Request::from_parts(parts, body.into()), state).await?;
        Ok(Self(change, version))
    }
}

/// The rest of a body without its version. What is no JSON is left for whoever says what is wrong with it.
fn take_version(body: Bytes) -> Result<(Bytes, Option<String>), Failure> {
    let Ok(Value::Object(mut members)) = serde_json::from_slice(&body) else { return Ok((body, None)) };
    let version = match members.remove(MEMBER) {
        None => return Ok((body, None)),
        Some(Value::String(version)) => version,
        Some(_) => return Err(Failure::invalid(format!("{MEMBER} must be text, as the resource shows it"))),
    };
    let rest = serde_json::to_vec(&members).map_err(|error| Failure::invalid(error.to_string()))?;
    Ok((rest.into(), Some(version)))
}

/// Which versions of a resource a request is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Precondition {
    /// Whatever is there.
    #[default]
    None,
    /// Something that is there already, in any version.
    Any,
    /// One of these.
    OneOf(Vec<String>),
}

impl Precondition {
    /// What `If-Match` says.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, Failure> {
        let mut versions = Vec::new();
        let wrong = || {
            Failure::invalid(format!(
                "If-Match must be *, or the ETag of what is changed with its quotes, or up to {VERSIONS_MAX} with commas between"
            ))
        };
        for value in headers.get_all(header::IF_MATCH) {
            for tag in value.to_str().map_err(|_| wrong())?.split(',').map(str::trim) {
                if tag == "*" {
                    return Ok(Self::Any);
                }
                // A weak tag never matches; that it is one is said by whoever compares it.
                let strong = tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"'));
                let weak = tag.starts_with("W/\"").then_some(tag);
                versions.push(strong.or(weak).ok_or_else(wrong)?.to_owned());
            }
        }
        match versions.len() {
            0 => Ok(Self::None),
            1..=VERSIONS_MAX => Ok(Self::OneOf(versions)),
            _ => Err(wrong()),
        }
    }

    /// With what the body says, too.
    pub(super) fn and(self, version: Option<String>) -> Result<Self, Failure> {
        match (self, version) {
            (this, None) => Ok(this),
            (Self::OneOf(versions), Some(version)) if !versions.contains(&version) => Err(Failure::new(
                StatusCode::BAD_REQUEST,
                "invalid-value",
                format!("If-Match and {MEMBER} name different versions: send one of them"),
            )),
            (_, Some(version)) => Ok(Self::OneOf(vec![version])),
        }
    }
}

/// What is made of parts (`allOf`) of which one allows nothing besides itself would allow nothing at all: such a schema becomes one.
fn join_parts(schemas: &mut Map<String, Value>) {
    let known = schemas.clone();
    for schema in schemas.values_mut() {
        let Some(parts) = schema["allOf"].as_array() else { continue };
        let parts: Vec<&Value> = parts
            .iter()
            .map(|part| {
                let name = part["$ref"].as_str().and_then(|it| it.rsplit('/').next());
                name.and_then(|name| known.get(name)).unwrap_or(part)
            })
            .collect();
        if parts.iter().all(|part| part["additionalProperties"] != Value::Bool(false)) {
            continue;
        }
        let mut whole = json!({ "type": "object", "description": schema["description"] });
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for part in parts {
            properties.extend(part["properties"].as_object().cloned().unwrap_or_default());
            required.extend(part["required"].as_array().cloned().unwrap_or_default());
        }
        whole["properties"] = properties.into();
        whole["required"] = required.into();
        *schema = whole;
    }
}

/// Describes the version in the bodies of changes, and the tag of answers.
pub(super) fn describe(description: &mut OpenApi) {
    let Ok(mut described) = serde_json::to_value(&*description) else { return };
    if let Some(schemas) = described["components"]["schemas"].as_object_mut() {
        join_parts(schemas);
    }
    let schemas = described["components"]["schemas"].clone();
    let tagged: Vec<String> = ["Device", "Fabric", "Host", "Instance", "InstanceType", "Mchannel", "Volume"]
        .map(|name| format!("#/components/schemas/{name}"))
        .into();
    let Some(paths) = described["paths"].as_object_mut() else { return };
    for operation in paths.values_mut().filter_map(Value::as_object_mut).flat_map(|it| it.iter_mut()) {
        let (method, operation) = (operation.0.clone(), operation.1);
        if let Some(responses) = operation["responses"].as_object_mut() {
            for response in responses.values_mut() {
                let schema = &response["content"]["application/json"]["schema"]["$ref"];
                if schema.as_str().is_some_and(|schema| tagged.iter().any(|it| it == schema)) {
                    response["headers"] = json!({ "ETag": {
                        "description": "The resourceVersion in quotes, for `If-Match`.", "schema": { "type": "string" }
                    } });
                }
            }
        }
        let creates = operation["operationId"].as_str().is_some_and(|id| id.starts_with("create_"));
        if method == "get" || creates {
            continue;
        }
        let schema = operation.pointer_mut("/requestBody/content/application~1json/schema");
        let Some(schema) = schema else { continue };
        let Some(name) = schema["$ref"].as_str().and_then(|it| it.rsplit('/').next()) else { continue };
        let mut inline = schemas[name].clone();
        inline["properties"][MEMBER] = json!({
            "type": "string",
            "description": "To which version of the resource the change belongs: it is refused (409) if there is another one."
        });
        *schema = inline;
    }
    if let Ok(read) = serde_json::from_value(described) {
        *description = read;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().map(|it| (header::IF_MATCH, HeaderValue::from_str(it).expect("a value"))).collect()
    }

    #[test]
    fn preconditions_are_tags_in_quotes() {
        let one_of = |tags: &[&str]| Precondition::OneOf(tags.iter().map(|it| (*it).to_owned()).collect());
        for (values, expected) in [
            (&[][..], Precondition::None),
            (&["*"], Precondition::Any),
            (&["\"a\""], one_of(&["a"])),
            (&["\"a\", \"b\"", "\"c\""], one_of(&["a", "b", "c"])),
            (&["W/\"a\""], one_of(&["W/\"a\""])),
        ] {
            assert_eq!(Precondition::of(&headers(values)).expect("good"), expected, "{values:?}");
        }
        let many = vec!["\"a\""; VERSIONS_MAX + 1].join(",");
        for bad in ["", "a", "\"a", ",", "\"a\",", "\"", many.as_str()] {
            assert!(Precondition::of(&headers(&[bad])).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn header_and_body_must_agree() {
        let header = |tags: &str| Precondition::of(&headers(&[tags])).expect("good");
        let said = |version: &str| Some(version.to_owned());
        let a = Precondition::OneOf(vec!["a".to_owned()]);
        assert_eq!(header("\"a\",\"b\"").and(said("a")).expect("both"), a);
        assert_eq!(header("*").and(said("a")).expect("both"), a);
        assert_eq!(Precondition::None.and(said("a")).expect("one"), a);
        assert_eq!(Precondition::None.and(None).expect("none"), Precondition::None);
        assert!(header("\"b\"").and(said("a")).is_err());
    }

    #[test]
    fn versions_are_taken_out_of_bodies() {
        let take = |body: &str| {
            take_version(Bytes::copy_from_slice(body.as_bytes()))
                .map(|(rest, version)| (String::from_utf8(rest.to_vec()).expect("text"), version))
        };
        let (rest, version) = take("{\"to\": \"h2\", \"resourceVersion\": \"a\"}").expect("good");
        assert_eq!((rest.as_str(), version.as_deref()), ("{\"to\":\"h2\"}", Some("a")));
        for body in ["{\"to\": \"h2\"}", "{", "", "[]", "null"] {
            assert_eq!(take(body).expect("left alone"), (body.to_owned(), None), "{body}");
        }
        assert!(take("{\"resourceVersion\": 7}").is_err());
    }
}
