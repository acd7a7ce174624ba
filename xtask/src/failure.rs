//! The one error of this program: what happened, what was seen, what to do.

use std::{fmt, io, path::Path};

/// The result of every step.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Why a step could not be done, in words for the person at the terminal.
#[derive(Debug)]
pub(crate) struct Failure {
    what: String,
    seen: String,
    remedy: String,
}

impl Failure {
    /// A failure with its cause in one sentence and what to do about it in another.
    pub(crate) fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            seen: String::new(),
            remedy: remedy.into(),
        }
    }

    /// Adds what a tool said.
    pub(crate) fn with_seen(mut self, seen: impl Into<String>) -> Self {
        self.seen = seen.into();
        self
    }

    /// A failed file operation.
    pub(crate) fn file(doing: &str, path: &Path, error: &io::Error) -> Self {
        Self::new(
            format!("could not {doing} {}: {error}", path.display()),
            "check that the folder exists, may be written and that the disk is not full",
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "error: {}", self.what)?;
        for line in self.seen.lines() {
            writeln!(out, "  | {line}")?;
        }
        write!(out, "  what to do: {}", self.remedy)
    }
}
