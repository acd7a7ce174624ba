//! What every client of a model provider is put through, against scripted endpoints.
//!
//! The same list is run natively (`tests/it/providers.rs`) and inside of workerd
//! (`miniflare/contract-worker`). The endpoints are those of `miniflare/providers/endpoints.mjs`; a
//! case asks for its scene with the last words of the user. A case panics nowhere: what does not
//! hold is its error.

use std::fmt::Debug;
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelPolicy, ModelRequest, StopReason,
    ToolSpec,
};
use remote_agents::platform::Runtime;
use remote_agents::protocol::usage::Tokens;
use remote_agents::provider::{AnthropicModel, ChatDialect, OpenAiModel};
use remote_agents::store::{MessageRecord, ToolCall, ToolOutcome};
use remote_agents::transport::Fetch;
use serde_json::{Value, json};

/// What a scene of ours says.
const WORDS: &str = "Größe 日本語 👩‍👩‍👧‍👦 naïve";

/// What no error may repeat: the provider's words, the key, the prompt.
const CANARIES: [&str; 3] = [
    "canary-of-the-provider",
    "canary-of-the-key",
    "canary-of-the-prompt",
];

/// The clients.
pub const CLIENTS: [Client; 3] = [Client::OpenAi, Client::Anthropic, Client::WorkersAi];

/// A client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    OpenAi,
    Anthropic,
    WorkersAi,
}

impl Client {
    /// The client of this name.
    pub fn named(name: &str) -> Option<Self> {
        CLIENTS.into_iter().find(|client| client.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Anthropic => "anthropic",
            Self::WorkersAi => "workers-ai",
        }
    }
}

/// Where the endpoints are, and how they are reached.
#[derive(Clone)]
pub struct Endpoints {
    /// Over the network.
    pub fetch: Rc<dyn Fetch>,
    /// By a binding of Workers AI; natively over the network, too.
    pub workers_ai: Rc<dyn Fetch>,
    pub runtime: Rc<dyn Runtime>,
    pub aimock: String,
    pub raw: String,
}

/// Which of the servers plays a case.
#[derive(Clone, Copy)]
enum Server {
    Aimock,
    Raw,
}

/// A case.
pub struct Case {
    /// What it shows, and of whom it is asked.
    pub name: &'static str,
    server: Server,
    scene: &'static str,
    holds: fn(&Heard) -> Result<(), String>,
}

/// What an answer was.
#[derive(Debug, Default)]
pub struct Heard {
    client: Option<Client>,
    text: String,
    pieces: usize,
    reasoning: String,
    calls: Vec<(String, String, String)>,
    ended: usize,
    deltas: usize,
    usage: Option<Tokens>,
    stop: Option<StopReason>,
    error: Option<ModelError>,
}

/// Runs a case.
pub async fn run(case: &Case, client: Client, endpoints: &Endpoints) -> Result<(), String> {
    let heard = hear(case, client, endpoints).await?;
    (case.holds)(&heard).map_err(|what| format!("{what}; heard {heard:?}"))?;
    if let Some(error) = &heard.error {
        let said = format!("{error} {error:?}");
        if let Some(canary) = CANARIES.iter().find(|canary| said.contains(**canary)) {
            return Err(format!("the error repeats {canary}: {said}"));
        }
    }
    Ok(())
}

async fn hear(case: &Case, client: Client, endpoints: &Endpoints) -> Result<Heard, String> {
    let model = model(case, client, endpoints).map_err(|error| error.message)?;
    let mut events = model.stream(question(case.scene));
    let mut heard = Heard {
        client: Some(client),
        ..Heard::default()
    };
    while let Some(event) = events.next().await {
        if heard.error.is_some() || heard.stop.is_some() {
            return Err(format!("an event behind the end: {event:?}"));
        }
        match event {
            Ok(ModelEvent::TextDelta(text)) => {
                heard.pieces += 1;
                heard.text.push_str(&text);
            }
            Ok(ModelEvent::Reasoning { content, .. }) => heard.reasoning.push_str(&content),
            Ok(ModelEvent::ToolCallStart { index, id, name }) => {
                same(index, heard.calls.len(), "the index of a call")?;
                heard.calls.push((id, name, String::new()));
            }
            Ok(ModelEvent::ToolCallDelta { index, delta }) => {
                heard.deltas += 1;
                let call = heard.calls.get_mut(index).ok_or("arguments of no call")?;
                call.2.push_str(&delta);
            }
            Ok(ModelEvent::ToolCallEnd { .. }) => heard.ended += 1,
            Ok(ModelEvent::Kept(_)) => {}
            Ok(ModelEvent::Usage(tokens)) => heard.usage = Some(tokens),
            Ok(ModelEvent::Stop(reason)) => heard.stop = Some(reason),
            Err(error) => heard.error = Some(error),
        }
    }
    Ok(heard)
}

fn model(
    case: &Case,
    client: Client,
    endpoints: &Endpoints,
) -> Result<Rc<dyn LanguageModel>, ModelError> {
    let host = match case.server {
        Server::Aimock => &endpoints.aimock,
        Server::Raw => &endpoints.raw,
    };
    let runtime = endpoints.runtime.clone();
    // The deadlines of the scenes that are silent; of others a slow machine must not miss one.
    let policy = match case.scene {
        "silence" => ModelPolicy {
            connect_timeout: Duration::from_millis(300),
            ..ModelPolicy::default()
        },
        "stall" | "late end" => ModelPolicy {
            idle_timeout: Duration::from_millis(700),
            ..ModelPolicy::default()
        },
        _ => ModelPolicy::default(),
    };
    let url = format!("{host}/v1");
    // The binding of Workers AI in the tests takes an address as the name of a model.
    let name = if client == Client::WorkersAi {
        url.as_str()
    } else {
        "m-1"
    };
    let key = "canary-of-the-key";
    let fetch = endpoints.fetch.clone();
    let chat = match client {
        Client::Anthropic => {
            let model = AnthropicModel::new(fetch, runtime, &url, key, name)?.with_policy(policy);
            return Ok(if is_held(case.scene) {
                Rc::new(model.with_structured_output())
            } else {
                Rc::new(model)
            });
        }
        Client::OpenAi => OpenAiModel::new(fetch, runtime, &url, Some(key), name)?,
        Client::WorkersAi => {
            OpenAiModel::new(endpoints.workers_ai.clone(), runtime, &url, None, name)?
                .with_dialect(ChatDialect::WorkersAi)
        }
    };
    let chat = chat.with_policy(policy);
    Ok(if is_held(case.scene) {
        Rc::new(chat.with_structured_output())
    } else {
        Rc::new(chat)
    })
}

/// Whether a scene is asked by an agent with a declared output, to which its provider is to be held.
fn is_held(scene: &str) -> bool {
    scene.starts_with("held")
}

/// A conversation in which two calls were made and answered.
fn question(scene: &str) -> ModelRequest {
    let call = |id: &str| ToolCall {
        id: id.into(),
        name: "search".into(),
        arguments: json!({"query": "tide"}),
    };
    let result = |id: &str, success: bool| MessageRecord::Tool {
        tool_call_id: id.into(),
        tool_name: "search".into(),
        outcome: ToolOutcome {
            success,
            result: json!({"found": []}),
            error: (!success).then(|| "It failed.".into()),
        },
    };
    let tool = |name: &str, parameters: Value| ToolSpec {
        name: name.into(),
        description: "Does it.".into(),
        parameters,
    };
    let query = json!({"type": "object", "properties": {"query": {"type": "string"}}});
    let output = json!({
        "type": "object",
        "properties": {"depth": {"type": "integer", "format": "uint32", "minimum": 0}},
        "required": ["depth"],
    });
    let tools = match scene {
        "held with tools" => vec![tool("search", query), tool("finish", output.clone())],
        _ if is_held(scene) => vec![tool("finish", output.clone())],
        _ => vec![tool("search", query)],
    };
    ModelRequest {
        instructions: "canary-of-the-prompt".into(),
        messages: vec![
            MessageRecord::User {
                text: "What is a tide?".into(),
            },
            MessageRecord::Assistant {
                text: "I look it up.".into(),
                tool_calls: vec![call("c1"), call("c2")],
                cut: false,
                kept: None,
            },
            result("c1", true),
            result("c2", false),
            MessageRecord::User { text: scene.into() },
        ]
        .into(),
        tools: tools.into(),
        output: is_held(scene).then_some(output),
    }
}

fn same<T: PartialEq + Debug>(found: T, wanted: T, what: &str) -> Result<(), String> {
    if found == wanted {
        return Ok(());
    }
    Err(format!("{what}: {found:?} and not {wanted:?}"))
}

fn all(held: bool, what: &str) -> Result<(), String> {
    if held { Ok(()) } else { Err(what.to_owned()) }
}

impl Heard {
    fn failed(&self, kind: ModelErrorKind) -> Result<(), String> {
        same(
            self.error.as_ref().map(|error| error.kind),
            Some(kind),
            "the failure",
        )
    }

    /// What a scene of ours says when it comes through whole.
    fn is_whole(&self) -> Result<(), String> {
        same(self.error.clone(), None, "the failure")?;
        same(self.text.as_str(), WORDS, "the text")?;
        same(self.reasoning.as_str(), "Größer 🤔", "the reasoning")?;
        same(self.stop, Some(StopReason::EndTurn), "the reason")?;
        let usage = self.usage.ok_or("no usage")?;
        let reasoning = if self.client == Some(Client::Anthropic) {
            0
        } else {
            4
        };
        let wanted = Tokens {
            prompt: 30,
            completion: 9,
            reasoning,
            cached: 20,
            total: 39,
        };
        same(usage, wanted, "the usage")
    }

    /// The declared output, said as text or handed in by the one call.
    fn hands_in(&self) -> Result<(), String> {
        same(self.error.clone(), None, "the failure")?;
        let (output, stop) = match &self.calls[..] {
            [] => (serde_json::from_str(&self.text).ok(), StopReason::EndTurn),
            [(_, name, _)] if name == "finish" => (self.arguments(0), StopReason::ToolUse),
            _ => return Err("other calls".into()),
        };
        same(output, Some(json!({"depth": 3})), "the output")?;
        same(self.stop, Some(stop), "the reason")?;
        all(self.usage.is_some_and(|usage| usage.total > 0), "the usage")
    }

    fn arguments(&self, at: usize) -> Option<Value> {
        serde_json::from_str(&self.calls.get(at)?.2).ok()
    }
}

const fn aimock(
    name: &'static str,
    scene: &'static str,
    holds: fn(&Heard) -> Result<(), String>,
) -> Case {
    Case {
        name,
        server: Server::Aimock,
        scene,
        holds,
    }
}

const fn raw(
    name: &'static str,
    scene: &'static str,
    holds: fn(&Heard) -> Result<(), String>,
) -> Case {
    Case {
        name,
        server: Server::Raw,
        scene,
        holds,
    }
}

use ModelErrorKind::{ContextOverflow, Malformed, RateLimited, Rejected, Unavailable};

/// The list.
pub static CASES: &[Case] = &[
    aimock("text comes in pieces, with its usage", "text", |heard| {
        same(
            heard.text.as_str(),
            "The sea rises twice a day.",
            "the text",
        )?;
        all(heard.pieces > 3, "in pieces")?;
        same(heard.stop, Some(StopReason::EndTurn), "the reason")?;
        let usage = heard.usage.ok_or("no usage")?;
        same(
            (usage.prompt, usage.completion, usage.total),
            (11, 7, 18),
            "the usage",
        )
    }),
    aimock("reasoning is told apart from text", "reasoning", |heard| {
        same(
            heard.reasoning.as_str(),
            "Let me think about tides.",
            "the reasoning",
        )?;
        same(heard.text.as_str(), "Yes.", "the text")
    }),
    aimock(
        "arguments that come in pieces are put together",
        "call",
        |heard| {
            all(heard.deltas > 5, "in pieces")?;
            same((heard.calls.len(), heard.ended), (1, 1), "the calls")?;
            same(
                heard.arguments(0),
                Some(json!({"query": "Größe 日本 and tides"})),
                "the arguments",
            )?;
            same(
                heard.calls.first().map(|call| call.1.as_str()),
                Some("search"),
                "the name",
            )?;
            same(heard.stop, Some(StopReason::ToolUse), "the reason")
        },
    ),
    aimock("parallel calls are told apart", "calls", |heard| {
        same((heard.calls.len(), heard.ended), (2, 2), "the calls")?;
        same(
            heard.arguments(0),
            Some(json!({"query": "Größe 日本 and tides"})),
            "the first",
        )?;
        same(heard.arguments(1), Some(json!({"n": 1})), "the second")?;
        let ids: Vec<&str> = heard.calls.iter().map(|call| call.0.as_str()).collect();
        same(ids, vec!["call_a", "call_b"], "the ids")?;
        same(heard.text.as_str(), "Both.", "the text")
    }),
    aimock("the bound of an answer is a reason", "long", |heard| {
        same(heard.stop, Some(StopReason::MaxTokens), "the reason")
    }),
    aimock("an answer that is cut has failed", "cut", |heard| {
        heard.failed(Unavailable)
    }),
    aimock("an overflow of the context is known", "overflow", |heard| {
        heard.failed(ContextOverflow)
    }),
    aimock("a rate limit says how long to wait", "slow down", |heard| {
        heard.failed(RateLimited)?;
        same(
            heard.error.as_ref().and_then(|error| error.retry_after),
            Some(7),
            "the wait",
        )
    }),
    aimock("status 400", "status 400", |heard| heard.failed(Rejected)),
    aimock("status 401", "status 401", |heard| heard.failed(Rejected)),
    aimock("status 402", "status 402", |heard| heard.failed(Rejected)),
    aimock("status 403", "status 403", |heard| heard.failed(Rejected)),
    aimock("status 404", "status 404", |heard| heard.failed(Rejected)),
    aimock("status 408", "status 408", |heard| {
        heard.failed(Unavailable)
    }),
    aimock("status 413", "status 413", |heard| {
        heard.failed(ContextOverflow)
    }),
    aimock("status 422", "status 422", |heard| heard.failed(Rejected)),
    aimock("status 429", "status 429", |heard| {
        heard.failed(RateLimited)
    }),
    aimock("status 500", "status 500", |heard| {
        heard.failed(Unavailable)
    }),
    aimock("status 502", "status 502", |heard| {
        heard.failed(Unavailable)
    }),
    aimock("status 503", "status 503", |heard| {
        heard.failed(Unavailable)
    }),
    aimock("status 504", "status 504", |heard| {
        heard.failed(Unavailable)
    }),
    aimock("status 529", "status 529", |heard| {
        heard.failed(Unavailable)
    }),
    raw(
        "bytes that come one by one, with usage of a cache and of reasoning",
        "split",
        Heard::is_whole,
    ),
    raw(
        "lines that end with CRLF, byte by byte",
        "split CRLF",
        Heard::is_whole,
    ),
    raw(
        "lines and events that nobody knows are passed over",
        "garbage lines",
        Heard::is_whole,
    ),
    raw(
        "an answer whose closing event never comes is whole",
        "late end",
        Heard::is_whole,
    ),
    raw("a refusal is a reason", "refusal", |heard| {
        same(heard.stop, Some(StopReason::Refusal), "the reason")
    }),
    raw(
        "an event that is no JSON is no answer",
        "garbage",
        |heard| {
            same(heard.text.as_str(), "kept", "what was said before it")?;
            heard.failed(Malformed)
        },
    ),
    raw("bytes that are no text are no answer", "bytes", |heard| {
        heard.failed(Malformed)
    }),
    raw("a page is no answer", "page", |heard| {
        heard.failed(Malformed)
    }),
    raw(
        "a connection that breaks in the middle has failed",
        "cut",
        |heard| {
            same(heard.text.as_str(), "kept", "what was said before it")?;
            heard.failed(Unavailable)
        },
    ),
    raw("a body that ends too early has failed", "short", |heard| {
        same(heard.text.as_str(), "kept", "what was said before it")?;
        heard.failed(Unavailable)
    }),
    raw(
        "a silence in the middle ends at its deadline",
        "stall",
        |heard| {
            same(heard.text.as_str(), "kept", "what was said before it")?;
            heard.failed(Unavailable)
        },
    ),
    raw(
        "a silence before the answer ends at its deadline",
        "silence",
        |heard| heard.failed(Unavailable),
    ),
    raw(
        "an overload in the middle has failed",
        "overloaded",
        |heard| heard.failed(Unavailable),
    ),
    raw("a wait may be a date", "date", |heard| {
        heard.failed(Unavailable)?;
        let wait = heard.error.as_ref().and_then(|error| error.retry_after);
        all(
            wait.is_some_and(|wait| wait > 3000),
            "an hour, less what the test took",
        )
    }),
    raw(
        "a declared output is what the provider is held to",
        "held",
        Heard::hands_in,
    ),
    raw(
        "an agent with tools hands in what it is held to as well",
        "held with tools",
        Heard::hands_in,
    ),
    raw(
        "an output to which the model could not be held is none",
        "held in vain",
        |heard| heard.failed(Malformed),
    ),
    raw("a redirect is not followed", "moved", |heard| {
        heard.failed(Rejected)
    }),
];
