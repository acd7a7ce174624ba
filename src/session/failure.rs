//! Why a call failed, and the shape in which the model and the log read it.
//!
//! Implements the failed tool result of section 2. A sentence here is safe to show; nothing of a
//! request's content or credentials may enter.

use serde_json::{Value, json};

use crate::error::Code;
use crate::store::{Failure, ToolOutcome};

/// A call's failure. The code is text because a child's producer may know codes that we do not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallFailure {
    /// The stable code, in its wire spelling.
    pub code: String,
    /// One short sentence.
    pub error: String,
    /// More for developers.
    pub detail: Option<String>,
    /// What brought it about, as a stable word; `null` in the result when there is none.
    pub cause: Option<String>,
    /// Whether the same call may succeed when it is made again.
    pub retryable: bool,
}

impl CallFailure {
    /// A failure with one of our codes; whether it is retryable follows from the code.
    #[must_use]
    pub fn new(code: Code, error: impl Into<String>) -> Self {
        Self {
            code: code.as_str().into(),
            error: error.into(),
            detail: None,
            cause: None,
            retryable: code.retryable(),
        }
    }

    /// Says whether the same call may succeed when it is made again, where the code does not tell.
    #[must_use]
    pub fn retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_cause(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// Adds a detail for developers.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// The kind of failure, for those who branch on kinds rather than codes.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match Code::from_wire(&self.code) {
            Some(
                Code::SubagentLost
                | Code::NotSupported
                | Code::UnpairedOnContinuation
                | Code::ClientToolUnsupported
                | Code::ProducerDead
                | Code::ChildSessionTaken,
            ) => "framework",
            Some(
                Code::RunInterrupted
                | Code::RunAborted
                | Code::RunTimeout
                | Code::RunAttemptsExhausted,
            ) => "run",
            Some(Code::ProviderError | Code::ProviderRateLimited) => "provider",
            Some(Code::OutputValidationFailed | Code::ValidationError) => "validation",
            Some(
                Code::TransportError
                | Code::Overloaded
                | Code::RateLimited
                | Code::VersionUnsupported,
            ) => "transport",
            _ => "tool",
        }
    }

    /// The tool result that the model reads.
    #[must_use]
    pub fn to_result(&self) -> Value {
        json!({
            "error": self.error,
            "metadata": {"helixErrorDetail": {
                "code": self.code,
                "category": self.category(),
                "retryable": self.retryable,
                "cause": self.cause,
            }},
        })
    }

    /// The failure as a tool's outcome.
    #[must_use]
    pub fn to_outcome(&self) -> ToolOutcome {
        ToolOutcome {
            success: false,
            result: self.to_result(),
            error: Some(self.error.clone()),
        }
    }
}

impl From<&CallFailure> for Failure {
    fn from(failure: &CallFailure) -> Self {
        Self {
            code: failure.code.clone(),
            error: failure.error.clone(),
            detail: failure.detail.clone(),
        }
    }
}
