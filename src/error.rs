//! The one error type, and the one table from code to HTTP status and retry rule.
//!
//! Implements section 2 of the wire contract. A message is one short sentence that is safe to show
//! to an end user; `detail` is for developers. Neither may ever hold a credential or a prompt.

use std::borrow::Cow;
use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $wire:literal, $status:literal, $retry:literal;)*) => {
        /// What went wrong, as a stable code that crosses the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code { $($(#[$doc])* $name,)* }

        impl Code {
            /// Every code, in the order of the contract's table.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The wire spelling.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $wire,)* }
            }

            /// The HTTP status that an answer with this code carries.
            #[must_use]
            pub fn status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }

            /// Whether the same request may succeed when it is sent again unchanged.
            #[must_use]
            pub fn retryable(self) -> bool {
                match self { $(Self::$name => $retry,)* }
            }

            /// The code with this wire spelling, if this version knows it.
            #[must_use]
            pub fn from_wire(text: &str) -> Option<Self> {
                match text { $($wire => Some(Self::$name),)* _ => None }
            }
        }
    };
}

codes! {
    /// A field of the request is missing, malformed or out of range.
    ValidationError = "VALIDATION_ERROR", 400, false;
    /// The peer speaks a later major version of the contract.
    VersionUnsupported = "VERSION_UNSUPPORTED", 400, false;
    /// No or wrong credentials.
    Unauthorized = "UNAUTHORIZED", 401, false;
    /// Unknown path, agent type or session; they cannot be told apart.
    NotFound = "NOT_FOUND", 404, false;
    /// The route is known but this producer does not serve it.
    FeatureUnavailable = "FEATURE_UNAVAILABLE", 404, false;
    /// The path is known, the method is not; `Allow` names the right one.
    MethodNotAllowed = "METHOD_NOT_ALLOWED", 405, false;
    /// The session has a run already: attach to it.
    AlreadyRunning = "ALREADY_RUNNING", 409, false;
    /// The session has ended already: attach to read its end.
    AlreadyCompleted = "ALREADY_COMPLETED", 409, false;
    /// The idempotency key was used with another body.
    IdempotencyConflict = "IDEMPOTENCY_CONFLICT", 409, false;
    /// A new message has to wait until the session's run or child has ended.
    StateAlreadyRunning = "state_already_running", 409, true;
    /// The session belongs to another parent, or to another life of it.
    ChildSessionTaken = "state_child_session_taken", 409, false;
    /// The body is larger than the mount allows.
    PayloadTooLarge = "PAYLOAD_TOO_LARGE", 413, false;
    /// Too many requests; `Retry-After` says when to come back.
    RateLimited = "RATE_LIMITED", 429, true;
    /// A defect of this service.
    Internal = "INTERNAL", 500, false;
    /// The service cannot take more work now.
    Overloaded = "OVERLOADED", 503, true;
    /// The object behind the mount, or the network, failed on the way.
    TransportError = "transport_error", 503, true;
    /// The cursor is outside what the log still holds.
    Truncated = "TRUNCATED", 410, false;
    /// A remote child that its parent can no longer find.
    SubagentLost = "framework_subagent_lost", 500, false;
    /// The framework does not support what was asked for.
    NotSupported = "framework_not_supported", 500, false;
    /// A call that was closed because the conversation went on without it.
    UnpairedOnContinuation = "unpaired_on_continuation", 500, false;
    /// The run was interrupted; it can be resumed.
    RunInterrupted = "run_interrupted", 500, false;
    /// The run was aborted; this is final.
    RunAborted = "run_aborted", 500, false;
    /// A time limit passed.
    RunTimeout = "run_timeout", 500, false;
    /// The run was restarted too often without getting anywhere.
    RunAttemptsExhausted = "run_attempts_exhausted", 500, false;
    /// The model provider failed.
    ProviderError = "provider_error", 502, true;
    /// The model provider asked to slow down.
    ProviderRateLimited = "provider_rate_limited", 429, true;
    /// A tool failed.
    ToolExecutionFailed = "tool_execution_failed", 500, false;
    /// An output does not have the shape that was declared for it.
    OutputValidationFailed = "output_validation_failed", 500, false;
    /// A remote child waits for its client, which cannot cross services yet.
    ClientToolUnsupported = "client-tool-unsupported", 500, false;
    /// The producer says "running" but nothing executes the session.
    ProducerDead = "producer-dead", 500, false;
    /// A stored row cannot be read; the message names table, key and reason.
    InvalidStoredState = "invalid_stored_state", 500, false;
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure with a stable code. See [`Code`] for what each one means.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// The stable code.
    pub code: Code,
    /// One short sentence, safe to show to an end user.
    pub message: Cow<'static, str>,
    /// More for developers; never a secret.
    pub detail: Option<String>,
    /// The request field that is at fault, as a dotted path.
    pub field: Option<String>,
    /// The stream to attach to, where the code says to attach.
    pub stream_id: Option<String>,
    /// The run to attach to, where the code says to attach.
    pub run_id: Option<String>,
    /// The methods that the path allows, for `Allow`.
    pub allow: Option<&'static str>,
    /// Seconds until another try makes sense, for `Retry-After`.
    pub retry_after: Option<u32>,
}

/// A result with the crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error with this code and message.
    #[must_use]
    pub fn new(code: Code, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            code,
            message: message.into(),
            detail: None,
            field: None,
            stream_id: None,
            run_id: None,
            allow: None,
            retry_after: None,
        }
    }

    /// A 400 that names the field at fault.
    #[must_use]
    pub fn invalid(field: impl Into<String>, message: impl Into<Cow<'static, str>>) -> Self {
        let mut error = Self::new(Code::ValidationError, message);
        error.field = Some(field.into());
        error
    }

    /// The 404 that unknown paths, types and sessions share.
    #[must_use]
    pub fn not_found() -> Self {
        Self::new(Code::NotFound, "Not found.")
    }

    /// A defect of this service, with a detail for developers.
    #[must_use]
    pub fn internal(detail: impl Into<String>) -> Self {
        Self::new(Code::Internal, "Something went wrong in this service.").with_detail(detail)
    }

    /// Adds a detail for developers.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Adds the stream and run to attach to.
    #[must_use]
    pub fn with_run(mut self, stream_id: impl Into<String>, run_id: Option<String>) -> Self {
        self.stream_id = Some(stream_id.into());
        self.run_id = run_id;
        self
    }

    /// The HTTP status of an answer that carries this error.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.code.status()
    }
}
