//! Chat completions: the dialect of OpenAI, and of most servers and gateways beside it.
//!
//! Reasoning is read from `reasoning_content` and from `reasoning`, and shown. What came as
//! `reasoning_content` before calls is sent back with them, since the services that say it so, such as
//! DeepSeek, refuse a conversation without it; no other reasoning is sent back.

mod reader;
#[cfg(test)]
mod tests;

use std::rc::Rc;

use http::HeaderValue;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use serde_json::{Map, Value};

use self::reader::ChatReader;
use super::exchange::{self, Line};
use super::history::{self, object, put, string};
use crate::agent::FINISH_TOOL;
use crate::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelPolicy, ModelRequest, ModelStream, ToolSpec,
};
use crate::http::Request;
use crate::platform::Runtime;
use crate::store::MessageRecord;
use crate::transport::Fetch;

/// Where OpenAI's own service is.
pub(super) const OPENAI: &str = "https://api.openai.com/v1";

/// The field of reasoning that is sent back.
const REASONING: &str = "reasoning_content";

/// Who understands the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChatDialect {
    /// OpenAI itself: the bound of an answer has another name there.
    OpenAi,
    /// Any other service that speaks chat completions.
    Compatible,
    /// The models of Workers AI, whose messages always have a text.
    WorkersAi,
}

/// A model behind an endpoint of chat completions.
#[derive(Clone)]
pub struct OpenAiModel {
    line: Line,
    url: String,
    key: Option<HeaderValue>,
    name: String,
    dialect: ChatDialect,
    max_tokens: Option<u32>,
    structured_output: bool,
}

impl OpenAiModel {
    /// The model `name` at `base_url`, which ends in the version, as `https://api.openai.com/v1`.
    /// Without a key no credentials are sent.
    ///
    /// The default policy; no bound on an answer but the provider's; no structured output.
    ///
    /// # Errors
    /// [`ModelErrorKind::Rejected`] when the key cannot be sent in a header. The error does not
    /// repeat it.
    pub fn new(
        fetch: Rc<dyn Fetch>,
        runtime: Rc<dyn Runtime>,
        base_url: &str,
        key: Option<&str>,
        name: impl Into<String>,
    ) -> Result<Self, ModelError> {
        let key = key
            .map(|key| secret(&format!("Bearer {key}")))
            .transpose()?;
        let base_url = base_url.trim_end_matches('/');
        let dialect = if base_url == OPENAI {
            ChatDialect::OpenAi
        } else {
            ChatDialect::Compatible
        };
        Ok(Self {
            line: Line {
                fetch,
                runtime,
                policy: ModelPolicy::default(),
            },
            url: format!("{base_url}/chat/completions"),
            key,
            name: name.into(),
            dialect,
            max_tokens: None,
            structured_output: false,
        })
    }

    /// Sets deadlines and retries. Default: [`ModelPolicy::default`].
    #[must_use]
    pub fn with_policy(mut self, policy: ModelPolicy) -> Self {
        self.line.policy = policy;
        self
    }

    /// Sets who understands the requests. Default: OpenAI at its own address, else any other service.
    #[must_use]
    pub fn with_dialect(mut self, dialect: ChatDialect) -> Self {
        self.dialect = dialect;
        self
    }

    /// Bounds the tokens of one answer. Default: the provider's bound.
    #[must_use]
    pub fn with_max_tokens(mut self, tokens: u32) -> Self {
        self.max_tokens = Some(tokens);
        self
    }

    /// Holds the answers of an agent with a declared output to its schema, besides offering the tool
    /// that hands it in. Default: no, because many services refuse a request that asks for it.
    ///
    /// The models of Workers AI cannot be held to a schema and call tools, nor stream such an answer.
    /// An agent that has no tools of its own is answered there at once and whole; any other has to
    /// call a tool in each answer, so that its output comes by the one that hands it in.
    #[must_use]
    pub fn with_structured_output(mut self) -> Self {
        self.structured_output = true;
        self
    }

    fn request(&self, asked: &ModelRequest) -> Result<Request, ModelError> {
        let mut request = http::Request::post(&self.url)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, crate::protocol::sse::CONTENT_TYPE);
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, key);
        }
        request
            .body(self.body(asked).to_string().into())
            .map_err(|_| no_address())
    }

    fn body(&self, asked: &ModelRequest) -> Value {
        let mut body = Map::new();
        put(&mut body, "model", string(&self.name));
        put(&mut body, "messages", self.messages(asked).into());
        let holding = self.holding(asked);
        if !matches!(holding, Holding::Whole(_)) {
            put(&mut body, "stream", true.into());
            let usage = object(&mut [("include_usage", true.into())]);
            put(&mut body, "stream_options", usage);
            self.offer(asked, &mut body);
        }
        if let Some(tokens) = self.max_tokens {
            let name = match self.dialect {
                ChatDialect::OpenAi => "max_completion_tokens",
                ChatDialect::Compatible | ChatDialect::WorkersAi => "max_tokens",
            };
            put(&mut body, name, tokens.into());
        }
        match holding {
            Holding::None => {}
            Holding::Streamed(schema) => {
                let schema = schema.clone();
                let named = object(&mut [("name", string("output")), ("schema", schema)]);
                put(&mut body, "response_format", json_schema(named));
            }
            Holding::Whole(schema) => {
                put(&mut body, "response_format", json_schema(schema.clone()));
            }
            Holding::ByTool => put(&mut body, "tool_choice", string("required")),
        }
        Value::Object(body)
    }

    fn offer(&self, asked: &ModelRequest, body: &mut Map<String, Value>) {
        let tools = asked.tools.iter().map(|tool| {
            function(&mut [
                ("name", string(&tool.name)),
                ("description", string(&tool.description)),
                (
                    "parameters",
                    history::parameters(&tool.parameters).into_owned(),
                ),
            ])
        });
        if !asked.tools.is_empty() {
            put(body, "tools", tools.collect());
        }
    }

    /// How the answer is held to the declared output.
    fn holding<'a>(&self, asked: &'a ModelRequest) -> Holding<'a> {
        match &asked.output {
            Some(schema) if self.structured_output => {
                let is_finish = |tool: &ToolSpec| tool.name == FINISH_TOOL;
                match self.dialect {
                    ChatDialect::OpenAi | ChatDialect::Compatible => Holding::Streamed(schema),
                    ChatDialect::WorkersAi if asked.tools.iter().all(is_finish) => {
                        Holding::Whole(schema)
                    }
                    ChatDialect::WorkersAi => Holding::ByTool,
                }
            }
            _ => Holding::None,
        }
    }

    /// The conversation. A provider gets its own ids back as they were: some models read them.
    fn messages(&self, asked: &ModelRequest) -> Vec<Value> {
        let mut messages = vec![said("system", &asked.instructions)];
        let reasons = asked.messages.iter().any(|one| reasoning(one).is_some());
        for message in &*asked.messages {
            messages.push(match message {
                MessageRecord::User { text } => said("user", text),
                MessageRecord::Assistant {
                    text, tool_calls, ..
                } => {
                    // Once one answer has it, a service asks for it in each that has calls.
                    let reasoning = reasons.then(|| reasoning(message).unwrap_or_default());
                    let calls: Vec<Value> = tool_calls
                        .iter()
                        .map(|call| {
                            let arguments = history::arguments(&call.arguments).to_string();
                            let mut called = function(&mut [
                                ("name", string(&history::tool_name(&call.name))),
                                ("arguments", arguments.into()),
                            ]);
                            if let Some(called) = called.as_object_mut() {
                                put(called, "id", string(&call.id));
                            }
                            called
                        })
                        .collect();
                    let needs_text = calls.is_empty() || self.dialect == ChatDialect::WorkersAi;
                    let mut message = Map::new();
                    put(&mut message, "role", string("assistant"));
                    let content = match text.as_str() {
                        "" if !needs_text => Value::Null,
                        text => string(text),
                    };
                    put(&mut message, "content", content);
                    if !calls.is_empty() {
                        if let Some(reasoning) = reasoning {
                            put(&mut message, REASONING, string(reasoning));
                        }
                        put(&mut message, "tool_calls", calls.into());
                    }
                    Value::Object(message)
                }
                MessageRecord::Tool {
                    tool_call_id,
                    outcome,
                    ..
                } => object(&mut [
                    ("role", string("tool")),
                    ("tool_call_id", string(tool_call_id)),
                    ("content", history::result(outcome).into()),
                ]),
            });
        }
        let is_assistant =
            |message: &Value| message.get("role").is_some_and(|role| role == "assistant");
        if messages.last().is_some_and(is_assistant) {
            messages.push(said("user", history::GO_ON));
        }
        messages
    }
}

/// How an answer is held to a declared output.
enum Holding<'a> {
    None,
    /// To this schema, by pieces as any other.
    Streamed(&'a Value),
    /// To this schema, in one document.
    Whole(&'a Value),
    /// By the tools, one of which it has to call.
    ByTool,
}

fn json_schema(schema: Value) -> Value {
    object(&mut [("type", string("json_schema")), ("json_schema", schema)])
}

fn said(role: &str, text: &str) -> Value {
    object(&mut [("role", string(role)), ("content", string(text))])
}

fn function(fields: &mut [(&str, Value)]) -> Value {
    let function = object(fields);
    object(&mut [("type", string("function")), ("function", function)])
}

/// The reasoning that was kept with an answer, if it was one of this dialect.
fn reasoning(message: &MessageRecord) -> Option<&str> {
    match message {
        MessageRecord::Assistant { kept, .. } => kept.as_ref()?.get(REASONING)?.as_str(),
        _ => None,
    }
}

impl LanguageModel for OpenAiModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let is_whole = matches!(self.holding(&request), Holding::Whole(_));
        let reader = Box::new(ChatReader::new(is_whole));
        exchange::ask(&self.line, self.request(&request), reader)
    }

    fn policy(&self) -> ModelPolicy {
        self.line.policy.clone()
    }
}

/// A key as a header that no log shows.
pub(super) fn secret(text: &str) -> Result<HeaderValue, ModelError> {
    let mut value = HeaderValue::from_str(text).map_err(|_| {
        let said = "The key of the model provider cannot be sent in a header.";
        ModelError::new(ModelErrorKind::Rejected, said)
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// The address may hold a key, so it is not repeated.
pub(super) fn no_address() -> ModelError {
    let said = "The address of the model provider is malformed.";
    ModelError::new(ModelErrorKind::Rejected, said)
}
