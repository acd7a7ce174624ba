//! What a call comes to: the checked output, the child's state within its bound, the rollup.
//!
//! Implements the folding rules of section 7. A fold that cannot be had is skipped with a warning;
//! it never fails the call.

use std::io;

use serde::Deserialize as _;
use serde_json::Value;

use crate::agent::Shape;
use crate::error::Code;
use crate::protocol::request::too_deep;
use crate::protocol::usage::{RollupOrigin, UsageRollup};
use crate::session::CallFailure;
use crate::store::{SubStatus, ToolOutcome};

/// How deep a rollup may nest: four levels for each generation, far more than a tree has.
const ROLLUP_DEPTH: usize = 80;

/// What a call came to, for the session that made it to commit together with the tool's result.
#[derive(Clone, Debug, PartialEq)]
pub struct CallOutcome {
    /// Whether the child completed with a valid output.
    pub success: bool,
    /// What the model reads: the output, or the failed result.
    pub result: Value,
    /// The failure.
    pub error: Option<CallFailure>,
    /// The output, when the call succeeded.
    pub output: Option<Value>,
    /// The child's final state, where it was to be had and within the fold's bound.
    pub child_state: Option<Value>,
    /// The child's rollup and where it came from.
    pub usage: Option<(UsageRollup, RollupOrigin)>,
    /// How the ref stands from now on: completed or failed; stopping when the child may be at work
    /// and could not be told to stop, so that a later reconcile tries again.
    pub status: SubStatus,
}

impl CallOutcome {
    /// A failed call that has nothing to fold: one that was never sent, for instance.
    #[must_use]
    pub fn failed(failure: CallFailure) -> Self {
        Self::new(Err(failure), None, None)
    }

    pub(super) fn new(
        verdict: Result<Value, CallFailure>,
        child_state: Option<Value>,
        usage: Option<(UsageRollup, RollupOrigin)>,
    ) -> Self {
        match verdict {
            Ok(output) => Self {
                success: true,
                result: output.clone(),
                error: None,
                output: Some(output),
                child_state,
                usage,
                status: SubStatus::Completed,
            },
            Err(failure) => Self {
                success: false,
                result: failure.to_result(),
                error: Some(failure),
                output: None,
                child_state,
                usage,
                status: SubStatus::Failed,
            },
        }
    }

    /// The outcome as the call's tool result.
    #[must_use]
    pub fn to_tool_outcome(&self) -> ToolOutcome {
        ToolOutcome {
            success: self.success,
            result: self.result.clone(),
            error: self.error.as_ref().map(|failure| failure.error.clone()),
        }
    }
}

/// The message to a child: the call's `message` when that is its only field and a text, else the
/// whole input as compact JSON.
#[must_use]
pub fn message_for(input: &Value) -> String {
    match input.as_object() {
        Some(fields) if fields.len() == 1 => match fields.get("message") {
            Some(Value::String(message)) => message.clone(),
            _ => input.to_string(),
        },
        _ => input.to_string(),
    }
}

/// Holds a completed child's output to the declared shape.
pub(super) fn checked_output(
    output: Option<Value>,
    shape: Option<&Shape>,
) -> Result<Value, CallFailure> {
    let output = output.unwrap_or(Value::Null);
    match shape.map(|shape| shape.check(&output)) {
        None | Some(Ok(())) => Ok(output),
        Some(Err(problem)) => Err(CallFailure::new(
            Code::OutputValidationFailed,
            "The sub-agent's output does not have its declared shape.",
        )
        .with_cause("output_shape")
        .with_detail(problem)),
    }
}

/// Holds a child's state to the fold's bound, in bytes of JSON.
///
/// # Errors
/// The warning to log when it is over.
pub(super) fn bounded_state(state: Value, limit: usize) -> Result<Value, String> {
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, &state) {
        Ok(()) if count.0 <= limit => Ok(state),
        Ok(()) => Err(format!(
            "the child's state has {} bytes, the fold takes {limit}: its fold is skipped",
            count.0
        )),
        Err(e) => Err(format!(
            "the child's state cannot be measured ({e}): its fold is skipped"
        )),
    }
}

/// Reads a rollup that came over the wire.
///
/// # Errors
/// The warning to log when it is malformed.
pub(crate) fn rollup(value: &Value) -> Result<UsageRollup, String> {
    let skipped = || "the child's rollup is malformed: its fold is skipped".to_owned();
    // A derived reader would take an array for an object without fields. What is nested too deeply
    // could not be read again from the rollups and frames that it becomes a part of.
    if !value.is_object() || too_deep(value, ROLLUP_DEPTH) {
        return Err(skipped());
    }
    // The reader's own message could quote the content, and this one reaches logs.
    UsageRollup::deserialize(value).map_err(|_| skipped())
}

/// Counts what is written instead of keeping it.
struct Count(usize);

impl io::Write for Count {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.0 = self.0.saturating_add(buffer.len());
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
