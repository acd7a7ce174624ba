//! The failures that only a call to a child can have.

use crate::error::Code;
use crate::session::CallFailure;
use crate::transport::TransportError;

impl CallFailure {
    /// The failure of a child's run, in the child's own words.
    #[must_use]
    pub fn of_child(code: Option<&str>, error: Option<&str>, detail: Option<&str>) -> Self {
        Self {
            code: code.unwrap_or(Code::ToolExecutionFailed.as_str()).into(),
            error: error.unwrap_or("The sub-agent failed.").into(),
            detail: detail.map(Into::into),
            cause: Some("child_failed".into()),
            retryable: code.and_then(Code::from_wire).is_some_and(Code::retryable),
        }
    }

    /// The child cannot be found any more.
    #[must_use]
    pub fn lost(cause: impl Into<String>) -> Self {
        Self::new(Code::SubagentLost, "The sub-agent can no longer be found.").with_cause(cause)
    }

    /// A call of the transport failed for good.
    #[must_use]
    pub fn of_transport(error: &TransportError) -> Self {
        match error {
            TransportError::Refused { envelope, .. } => Self {
                code: envelope.code.clone(),
                error: envelope.error.clone(),
                detail: envelope.detail.clone(),
                cause: Some("refused".into()),
                retryable: envelope.known_code().is_some_and(Code::retryable),
            },
            TransportError::ProjectedMount => Self::new(
                Code::NotSupported,
                "The sub-agent is reached through a projected mount; point its transport at a raw one.",
            )
            .with_cause("projected_mount"),
            TransportError::VersionUnsupported { .. } => Self::new(
                Code::VersionUnsupported,
                "The sub-agent's service speaks a later version of the protocol.",
            )
            .with_detail(error.to_string()),
            TransportError::Unreachable(_) | TransportError::Timeout(_) => {
                Self::new(Code::TransportError, "The sub-agent's service could not be reached.")
                    .with_cause("unreachable")
                    .with_detail(error.to_string())
            }
            TransportError::Malformed(_)
            | TransportError::TooLarge(_)
            | TransportError::Unexplained { .. } => {
                Self::new(Code::TransportError, "The sub-agent's service gave an answer that cannot be read.")
                    .with_cause("malformed_answer")
                    .with_detail(error.to_string())
            }
        }
    }
}
