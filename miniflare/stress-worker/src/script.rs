//! The model: it follows the script that the session's latest message holds, as JSON.
//!
//! What it says depends on the script and on how far the turn is, and on nothing else, so that a
//! call which is made again is answered the same.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream;
use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::MessageRecord;
use serde::Deserialize;
use serde_json::{Value, json};
use worker::{Delay, console_log};

/// Characters of a piece in which results are told.
const PIECE: usize = 48;

pub(crate) struct Follower;

/// What a message can ask for.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Script {
    /// One answer of `chunks` numbered texts of `bytes` bytes each, `per` at once, with a wait of
    /// `every` milliseconds between; as reasoning, which is no part of the output, if asked for.
    Say {
        chunks: usize,
        per: usize,
        bytes: usize,
        #[serde(default)]
        every: u64,
        #[serde(default)]
        reasoning: bool,
    },
    /// As many steps, each with a note that takes `takes` milliseconds, and a last word.
    Steps { count: usize, takes: u64 },
    /// One step with a call of the tool that panics, `burns` milliseconds later.
    Explode { burns: u64 },
    /// One step with a call of the tool that reads bindings; then its result, as text.
    Bound { key: String, value: String },
    /// One step with all of these calls and a note beside them; then their results, as text.
    Call(Vec<Asked>),
}

/// One child: the sub-agent's name, and its message.
#[derive(Deserialize)]
struct Asked {
    agent: String,
    message: Value,
}

type Event = Result<ModelEvent, ModelError>;

impl LanguageModel for Follower {
    fn name(&self) -> &str {
        "script"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let turn: Vec<&MessageRecord> = request
            .messages
            .iter()
            .rev()
            .take_while(|message| !matches!(message, MessageRecord::User { .. }))
            .collect();
        let asked = match request.messages.iter().rev().nth(turn.len()) {
            Some(MessageRecord::User { text }) => serde_json::from_str(text).ok(),
            _ => None,
        };
        let done = turn
            .iter()
            .filter(|message| matches!(message, MessageRecord::Assistant { .. }))
            .count();
        match asked {
            None => paced(said("There is no script.".to_owned())),
            Some(Script::Say {
                chunks,
                per,
                bytes,
                every,
                reasoning,
            }) => say(chunks, per, every, move |number| {
                let text = format!("{number:.<bytes$}");
                if reasoning {
                    ModelEvent::Reasoning {
                        content: text,
                        is_complete: false,
                    }
                } else {
                    ModelEvent::TextDelta(text)
                }
            }),
            Some(Script::Steps { count, takes }) if done < count => {
                let arguments = json!({ "takes": takes });
                paced(calls([(
                    format!("call_{done}"),
                    "note".to_owned(),
                    arguments,
                )]))
            }
            Some(Script::Explode { burns }) if done == 0 => {
                let arguments = json!({ "burns": burns });
                paced(calls([(
                    "call_0".to_owned(),
                    "explode".to_owned(),
                    arguments,
                )]))
            }
            Some(Script::Bound { key, value }) if done == 0 => {
                let arguments = json!({ "key": key, "value": value });
                paced(calls([(
                    "call_0".to_owned(),
                    "bound".to_owned(),
                    arguments,
                )]))
            }
            Some(Script::Call(asked)) if done == 0 => {
                let children = (1..).zip(asked).map(|(place, asked): (usize, Asked)| {
                    let message = match asked.message {
                        Value::String(text) => text,
                        other => other.to_string(),
                    };
                    let name = format!("subagent__{}", asked.agent);
                    (format!("call_{place}"), name, json!({ "message": message }))
                });
                let note = (
                    "call_0".to_owned(),
                    "note".to_owned(),
                    json!({ "takes": 1 }),
                );
                paced(calls(std::iter::once(note).chain(children)))
            }
            Some(
                Script::Steps { .. }
                | Script::Explode { .. }
                | Script::Bound { .. }
                | Script::Call(_),
            ) => paced(said(results(&turn))),
        }
    }
}

/// The results of the turn's calls, in the order of the answer.
fn results(turn: &[&MessageRecord]) -> String {
    let results: Vec<Value> = turn
        .iter()
        .rev()
        .filter_map(|message| match message {
            MessageRecord::Tool { outcome, .. } => Some(outcome.result.clone()),
            _ => None,
        })
        .collect();
    Value::Array(results).to_string()
}

/// A text in pieces.
fn said(text: String) -> Vec<Event> {
    let characters: Vec<char> = text.chars().collect();
    characters
        .chunks(PIECE)
        .map(|piece| Ok(ModelEvent::TextDelta(piece.iter().collect())))
        .chain(ended(StopReason::EndTurn))
        .collect()
}

fn calls(calls: impl IntoIterator<Item = (String, String, Value)>) -> Vec<Event> {
    let mut events = vec![Ok(ModelEvent::TextDelta("So be it. ".to_owned()))];
    for (index, (id, name, arguments)) in calls.into_iter().enumerate() {
        events.push(Ok(ModelEvent::ToolCallStart { index, id, name }));
        let delta = arguments.to_string();
        events.push(Ok(ModelEvent::ToolCallDelta { index, delta }));
        events.push(Ok(ModelEvent::ToolCallEnd { index }));
    }
    events.extend(ended(StopReason::ToolUse));
    events
}

fn ended(reason: StopReason) -> [Event; 2] {
    let tokens = Tokens {
        prompt: 10,
        completion: 5,
        total: 15,
        ..Tokens::default()
    };
    [Ok(ModelEvent::Usage(tokens)), Ok(ModelEvent::Stop(reason))]
}

/// One event after the other, each a commit of its own; the log tells how far the answer is.
fn paced(events: Vec<Event>) -> ModelStream {
    Box::pin(stream::iter(events).then(|event| async {
        turn_over().await;
        console_log!(r#"{{"event":"said"}}"#);
        event
    }))
}

/// Numbered pieces in batches.
fn say(
    chunks: usize,
    per: usize,
    every: u64,
    piece: impl Fn(usize) -> ModelEvent + 'static,
) -> ModelStream {
    let per = per.max(1);
    let batches = (0..chunks.div_ceil(per)).map(move |batch| {
        let first = batch.saturating_mul(per);
        (first..chunks.min(first.saturating_add(per)))
            .map(|number| Ok(piece(number)))
            .collect::<Vec<Event>>()
    });
    Box::pin(
        stream::iter(batches)
            .then(move |batch| async move {
                if every > 0 {
                    Delay::from(Duration::from_millis(every)).await;
                } else {
                    turn_over().await;
                }
                stream::iter(batch)
            })
            .flatten()
            .chain(stream::iter(ended(StopReason::EndTurn))),
    )
}

/// Is not ready once.
async fn turn_over() {
    let mut turned = false;
    poll_fn(|context| {
        if std::mem::replace(&mut turned, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
