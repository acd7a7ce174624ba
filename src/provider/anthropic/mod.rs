//! Anthropic's messages.
//!
//! Instructions, tools and the conversation are marked for the provider's cache. Thinking is asked for
//! where a program wants it. It is shown, and what led to calls is kept and sent back unchanged, as
//! the provider wants it.

mod reader;
mod schema;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use http::header::{ACCEPT, CONTENT_TYPE};
use http::{HeaderName, HeaderValue};
use serde_json::{Map, Value};

use self::reader::MessageReader;
use super::exchange::{self, Line};
use super::history::{self, NO_TEXT, object, put, string};
use super::openai::{no_address, secret};
use crate::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelPolicy, ModelRequest, ModelStream,
};
use crate::http::Request;
use crate::platform::Runtime;
use crate::store::MessageRecord;
use crate::transport::Fetch;

/// Where Anthropic's own service is.
pub(super) const ANTHROPIC: &str = "https://api.anthropic.com";

/// The version of the dialect.
const VERSION: &str = "2023-06-01";

/// Tokens of one answer, unless a program says otherwise; the provider wants a number.
const MAX_TOKENS: u32 = 8192;

/// The field of what is kept of an answer: its thinking, and where not all of it came first, its
/// blocks in order, calls as `{type: "tool_use"}` alone.
const THINKING: &str = "thinking";

/// How much a model thinks before it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thinking {
    /// As much as the model finds right; the later models alone know it.
    Adaptive,
    /// At most so many tokens, besides those of the answer; at least 1024, which is the provider's
    /// bound. The earlier models alone know it.
    Budget(u32),
}

/// A model behind an endpoint of Anthropic's messages.
#[derive(Clone)]
pub struct AnthropicModel {
    line: Line,
    url: String,
    key: HeaderValue,
    name: String,
    max_tokens: u32,
    thinking: Option<Thinking>,
    structured_output: bool,
}

impl AnthropicModel {
    /// The model `name` at `base_url`, as `https://api.anthropic.com`, with or without `/v1`.
    ///
    /// The default policy and at most 8192 tokens in an answer; no thinking, no structured output.
    ///
    /// # Errors
    /// [`ModelErrorKind::Rejected`] when the key cannot be sent in a header. The error does not repeat
    /// it.
    pub fn new(
        fetch: Rc<dyn Fetch>,
        runtime: Rc<dyn Runtime>,
        base_url: &str,
        key: &str,
        name: impl Into<String>,
    ) -> Result<Self, ModelError> {
        let base_url = base_url.trim_end_matches('/').trim_end_matches("/v1");
        Ok(Self {
            line: Line {
                fetch,
                runtime,
                policy: ModelPolicy::default(),
            },
            url: format!("{base_url}/v1/messages"),
            key: secret(key)?,
            name: name.into(),
            max_tokens: MAX_TOKENS,
            thinking: None,
            structured_output: false,
        })
    }

    /// Sets deadlines and retries. Default: [`ModelPolicy::default`].
    #[must_use]
    pub fn with_policy(mut self, policy: ModelPolicy) -> Self {
        self.line.policy = policy;
        self
    }

    /// Bounds the tokens of one answer. Default 8192.
    #[must_use]
    pub fn with_max_tokens(mut self, tokens: u32) -> Self {
        self.max_tokens = tokens;
        self
    }

    /// Has the model think before it answers. Default: it does not.
    #[must_use]
    pub fn with_thinking(mut self, thinking: Thinking) -> Self {
        self.thinking = Some(thinking);
        self
    }

    /// Holds the answers of an agent with a declared output to its schema, besides offering the tool
    /// that hands it in; the later models alone know it. A declared output with a map, a tuple, a value
    /// of any kind, or a type within itself cannot be asked for so: each question then fails with
    /// [`ModelErrorKind::Rejected`]. Default: no.
    #[must_use]
    pub fn with_structured_output(mut self) -> Self {
        self.structured_output = true;
        self
    }

    fn request(&self, asked: &ModelRequest) -> Result<Request, ModelError> {
        http::Request::post(&self.url)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, crate::protocol::sse::CONTENT_TYPE)
            .header(HeaderName::from_static("anthropic-version"), VERSION)
            .header(HeaderName::from_static("x-api-key"), &self.key)
            .body(self.body(asked)?.to_string().into())
            .map_err(|_| no_address())
    }

    fn body(&self, asked: &ModelRequest) -> Result<Value, ModelError> {
        let mut body = Map::new();
        put(&mut body, "model", string(&self.name));
        let (most, thinking) = match self.thinking.filter(|_| may_think(&asked.messages)) {
            None => (self.max_tokens, None),
            Some(Thinking::Adaptive) => (self.max_tokens, Some(typed("adaptive", &mut []))),
            Some(Thinking::Budget(tokens)) => {
                let tokens = tokens.max(1024);
                let thinking = typed("enabled", &mut [("budget_tokens", tokens.into())]);
                (self.max_tokens.saturating_add(tokens), Some(thinking))
            }
        };
        put(&mut body, "max_tokens", most.into());
        if let Some(thinking) = thinking {
            put(&mut body, THINKING, thinking);
        }
        put(&mut body, "stream", true.into());
        if !asked.instructions.trim().is_empty() {
            let system = cached(text_block(&asked.instructions));
            put(&mut body, "system", vec![system].into());
        }
        if !asked.tools.is_empty() {
            let tools = asked.tools.iter().map(|tool| {
                object(&mut [
                    ("name", string(&tool.name)),
                    ("description", string(&tool.description)),
                    (
                        "input_schema",
                        history::parameters(&tool.parameters).into_owned(),
                    ),
                ])
            });
            put(&mut body, "tools", tools.collect());
        }
        if let (true, Some(output)) = (self.structured_output, &asked.output) {
            let schema = schema::held(output).ok_or_else(beyond_words)?;
            let format = typed("json_schema", &mut [("schema", schema)]);
            put(
                &mut body,
                "output_config",
                object(&mut [("format", format)]),
            );
        }
        put(&mut body, "messages", messages(&asked.messages));
        Ok(Value::Object(body))
    }
}

impl LanguageModel for AnthropicModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let reader = Box::<MessageReader>::default();
        exchange::ask(&self.line, self.request(&request), reader)
    }

    fn policy(&self) -> ModelPolicy {
        self.line.policy.clone()
    }
}

fn beyond_words() -> ModelError {
    let said = "Anthropic cannot be held to the declared output, which has a map, a tuple, a value of \
                any kind or a type within itself; turn structured output off.";
    ModelError::new(ModelErrorKind::Rejected, said)
}

/// Whether the model may think: not in the middle of calls that it made without, as of another model.
fn may_think(records: &[MessageRecord]) -> bool {
    let is_user = |record: &&MessageRecord| matches!(record, MessageRecord::User { .. });
    records
        .iter()
        .rev()
        .take_while(|record| !is_user(record))
        .all(|record| match record {
            MessageRecord::Assistant { tool_calls, .. } => {
                tool_calls.is_empty() || !thinking(record).is_empty()
            }
            _ => true,
        })
}

/// The blocks that were kept with an answer, if it was one of this dialect.
fn thinking(record: &MessageRecord) -> &[Value] {
    let kept = match record {
        MessageRecord::Assistant { kept, .. } => kept.as_ref(),
        _ => None,
    };
    let blocks = kept.and_then(|kept| kept.get(THINKING)?.as_array());
    blocks.map_or(&[], Vec::as_slice)
}

/// A block up to which the provider may keep the request.
fn cached(mut block: Value) -> Value {
    if let Some(block) = block.as_object_mut() {
        put(block, "cache_control", typed("ephemeral", &mut []));
    }
    block
}

/// The conversation by turns: users and assistants take turns, and the results of an answer's calls
/// stand first in the turn behind it.
fn messages(records: &[MessageRecord]) -> Value {
    let mut turns: Vec<(&'static str, Vec<Value>)> = Vec::new();
    let mut say = |role: &'static str, blocks: Vec<Value>| match turns.last_mut() {
        _ if blocks.is_empty() => {}
        Some((last, held)) if *last == role => held.extend(blocks),
        _ => turns.push((role, blocks)),
    };
    for record in records {
        match record {
            MessageRecord::User { text } => say("user", vec![text_block(or_none(text))]),
            MessageRecord::Assistant {
                text, tool_calls, ..
            } => {
                let spoken = (!text.trim().is_empty()).then(|| text_block(text.trim_end()));
                let mut calls = tool_calls.iter().map(|call| {
                    let fields = &mut [
                        ("id", string(&history::call_id(&call.id))),
                        ("name", string(&history::tool_name(&call.name))),
                        ("input", history::arguments(&call.arguments).into_owned()),
                    ];
                    typed("tool_use", fields)
                });
                say("assistant", in_order(thinking(record), spoken, &mut calls));
            }
            MessageRecord::Tool {
                tool_call_id,
                outcome,
                ..
            } => {
                let fields = &mut [
                    ("tool_use_id", string(&history::call_id(tool_call_id))),
                    ("content", history::result(outcome).into()),
                    ("is_error", (!outcome.success).into()),
                ];
                say("user", vec![typed("tool_result", fields)]);
            }
        }
    }
    // An answer that is last would be one to be gone on with, which not every model takes.
    if turns.last().is_none_or(|(role, _)| *role == "assistant") {
        turns.push(("user", vec![text_block(history::GO_ON)]));
    }
    if let Some(block) = turns.last_mut().and_then(|(_, blocks)| blocks.last_mut()) {
        *block = cached(block.take());
    }
    turns
        .into_iter()
        .map(|(role, content)| object(&mut [("role", string(role)), ("content", content.into())]))
        .collect()
}

/// The blocks of an answer in the order in which they came, by what was kept of it; where nothing
/// was, the text stands before the calls.
fn in_order(
    kept: &[Value],
    mut spoken: Option<Value>,
    calls: &mut dyn Iterator<Item = Value>,
) -> Vec<Value> {
    let kind = |block: &Value| block.get("type").and_then(Value::as_str).map(str::to_owned);
    let mut blocks = Vec::new();
    for block in kept {
        match kind(block).as_deref() {
            Some("text") => {
                spoken = None;
                let text = block.get("text").and_then(Value::as_str);
                let text = text.filter(|text| !text.trim().is_empty());
                blocks.extend(text.map(|text| text_block(text.trim_end())));
            }
            // The call itself is in the record.
            Some("tool_use") => {
                blocks.extend(spoken.take());
                blocks.extend(calls.next());
            }
            _ => blocks.push(block.clone()),
        }
    }
    blocks.extend(spoken);
    blocks.extend(calls);
    blocks
}

fn text_block(text: &str) -> Value {
    typed("text", &mut [("text", string(text))])
}

/// An object of this type.
fn typed(kind: &str, fields: &mut [(&str, Value)]) -> Value {
    let mut object = object(fields);
    if let Some(object) = object.as_object_mut() {
        put(object, "type", string(kind));
    }
    object
}

fn or_none(text: &str) -> &str {
    if text.trim().is_empty() {
        NO_TEXT
    } else {
        text
    }
}
