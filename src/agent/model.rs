//! The language-model seam: a request in, a stream of events out.
//!
//! Every provider implements [`LanguageModel`]; the loop cannot tell them apart.

use std::rc::Rc;
use std::time::Duration;

use futures::stream::LocalBoxStream;
use serde_json::Value;

use crate::protocol::usage::Tokens;
use crate::store::MessageRecord;

/// What a model is asked.
#[derive(Clone, Debug)]
pub struct ModelRequest {
    /// The agent's instructions (the system prompt).
    pub instructions: Rc<str>,
    /// The conversation; every tool call in it has exactly one result.
    pub messages: Rc<[MessageRecord]>,
    /// The tools that the model may call.
    pub tools: Rc<[ToolSpec]>,
    /// The JSON Schema of the declared output, for a provider that can be held to one. An agent takes
    /// its output from the tool that hands it in as well as from an answer that is such JSON.
    pub output: Option<Value>,
}

/// A tool as the model sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSpec {
    /// Its name.
    pub name: String,
    /// What it does and when to use it.
    pub description: String,
    /// The JSON Schema of its arguments, an object schema.
    pub parameters: Value,
}

/// One event of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelEvent {
    /// More text.
    TextDelta(String),
    /// More reasoning.
    Reasoning {
        /// The reasoning text.
        content: String,
        /// Whether this ends it.
        is_complete: bool,
    },
    /// A tool call begins. `index` tells parallel calls apart.
    ToolCallStart {
        /// The call's place in the answer, from 0.
        index: usize,
        /// The provider's id of the call.
        id: String,
        /// The tool's name.
        name: String,
    },
    /// More of a call's arguments, as JSON text cut anywhere.
    ToolCallDelta {
        /// The call's place.
        index: usize,
        /// The piece.
        delta: String,
    },
    /// A call's arguments are complete.
    ToolCallEnd {
        /// The call's place.
        index: usize,
    },
    /// What the provider wants back unchanged with this answer in later requests, such as the reasoning
    /// that led to its calls; the last one counts. It is stored with the answer, and nobody else is
    /// shown it. Whoever reads it tells by its fields whether it is its own.
    Kept(Value),
    /// What the call to the model cost; the last one counts.
    Usage(Tokens),
    /// The answer is complete. The last event.
    Stop(StopReason),
}

/// Why a model stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// It said all it had to say.
    EndTurn,
    /// It waits for the results of its calls.
    ToolUse,
    /// It reached the provider's limit of output.
    MaxTokens,
    /// It refused to answer.
    Refusal,
}

/// What kind of failure a model call had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelErrorKind {
    /// The provider could not be reached, timed out or broke off; may be tried again.
    Unavailable,
    /// The provider asked to slow down; may be tried again after a while.
    RateLimited,
    /// The conversation does not fit the model's context.
    ContextOverflow,
    /// The request was refused: wrong key, unknown model, malformed request.
    Rejected,
    /// The provider answered something that cannot be read; may be tried again.
    Malformed,
}

impl ModelErrorKind {
    /// Whether the same question may be answered when it is asked again.
    #[must_use]
    pub fn may_pass(self) -> bool {
        matches!(
            self,
            Self::Unavailable | Self::RateLimited | Self::Malformed
        )
    }
}

/// A failed model call. Its text repeats neither a key nor a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ModelError {
    /// What kind.
    pub kind: ModelErrorKind,
    /// One sentence.
    pub message: String,
    /// Seconds to wait, where the provider said so.
    pub retry_after: Option<u32>,
}

impl ModelError {
    /// A failure of this kind, told by one sentence of our own.
    #[must_use]
    pub fn new(kind: ModelErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            retry_after: None,
        }
    }
}

/// Deadlines and retries of the calls to a model.
///
/// A provider's client keeps the deadlines, whoever drives the session the retries. An attempt that
/// misses a deadline has failed as unavailable, and may be made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPolicy {
    /// From the question to the head of the answer. Default 60 s: a server that loads its model
    /// first says nothing until then. An answer that was asked for whole has the time of a silence.
    pub connect_timeout: Duration,
    /// Silence in the middle of an answer; a comment or a ping ends it. Default 120 s: some providers
    /// say nothing while their model reasons.
    pub idle_timeout: Duration,
    /// One attempt as a whole. Default 10 minutes.
    pub total_timeout: Duration,
    /// The waits before the attempts after the first one of a step; there are as many more attempts
    /// as there are waits. Default 1 s, 2 s, 4 s.
    pub retry_waits: Vec<Duration>,
    /// The longest `Retry-After` that is waited for. A provider that asks for more fails the run,
    /// which can be resumed. Default 2 minutes.
    pub longest_wait: Duration,
}

impl Default for ModelPolicy {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(120),
            total_timeout: Duration::from_secs(600),
            retry_waits: [1, 2, 4].map(Duration::from_secs).into(),
            longest_wait: Duration::from_secs(120),
        }
    }
}

/// The events of one answer.
pub type ModelStream = LocalBoxStream<'static, Result<ModelEvent, ModelError>>;

/// A language model that streams.
pub trait LanguageModel {
    /// The model's name, as usage is counted by.
    fn name(&self) -> &str;

    /// Asks. Dropping the stream cancels the call.
    fn stream(&self, request: ModelRequest) -> ModelStream;

    /// Its deadlines, and how often a step is tried. Default: [`ModelPolicy::default`].
    fn policy(&self) -> ModelPolicy {
        ModelPolicy::default()
    }
}
