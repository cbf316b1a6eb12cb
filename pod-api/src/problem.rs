use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The content type of a [`Problem`].
pub const PROBLEM_JSON: &str = "application/problem+json";

/// Why a request was refused (RFC 9457). Every answer that is not a success carries one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What kind of problem, as a stable word for programs, such as `volume-leased`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The HTTP status, in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What failed, on what, and what to try.
    pub detail: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}
