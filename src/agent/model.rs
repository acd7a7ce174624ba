//! The language-model seam: a request in, a stream of events out.
//!
//! Every provider implements [`LanguageModel`]; the loop cannot tell them apart.

use std::rc::Rc;

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
    /// The provider answered something that cannot be read.
    Malformed,
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

/// The events of one answer.
pub type ModelStream = LocalBoxStream<'static, Result<ModelEvent, ModelError>>;

/// A language model that streams.
pub trait LanguageModel {
    /// The model's name, as usage is counted by.
    fn name(&self) -> &str;

    /// Asks. Dropping the stream cancels the call.
    fn stream(&self, request: ModelRequest) -> ModelStream;
}
