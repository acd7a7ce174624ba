//! The events of a streamed chat completion, whoever wrote them.
//!
//! Servers differ in what they leave out: indexes, ids, the closing `[DONE]`, usage. The older
//! models of Workers AI say `response` in place of choices. An answer is over with `[DONE]`; it is
//! whole once it has a `finish_reason`.

use std::collections::VecDeque;

use serde::de::IgnoredAny;
use serde_json::Value;

use super::super::exchange::{Reader, malformed};
use super::super::halves;
use super::super::history::object;
use super::super::refusal::Refusal;
use super::REASONING;
use crate::agent::model::{ModelError, ModelErrorKind, ModelEvent, StopReason};
use crate::protocol::sse::Event;
use crate::protocol::usage::Tokens;

/// The data of the event behind the last one.
const DONE: &str = "[DONE]";

/// Reads one answer.
#[derive(Default)]
pub(super) struct ChatReader {
    calls: Vec<OpenCall>,
    stop: Option<StopReason>,
    refused: bool,
    is_reasoning: bool,
    /// The reasoning that is to be sent back.
    kept: String,
    has_content: bool,
    /// Whether the answer comes as one document.
    is_whole: bool,
    /// Whether pieces came as such; a whole message behind them repeats them.
    has_pieces: bool,
    is_done: bool,
}

/// A call that is being written.
#[derive(Default)]
struct OpenCall {
    index: Option<u64>,
    id: String,
    name: String,
    /// Whether its start was told; until its name is known it is not.
    is_told: bool,
    /// The arguments so far.
    arguments: String,
}

impl Reader for ChatReader {
    fn take(&mut self, event: &Event, said: &mut VecDeque<ModelEvent>) -> Result<(), ModelError> {
        if event.data.trim() == DONE {
            if self.stop.is_none() && !self.has_content {
                return Err(malformed("ended before it had begun"));
            }
            self.is_done = true;
            return Ok(());
        }
        if event.data.trim().is_empty() {
            return Ok(());
        }
        let Some(data) = halves::object(&event.data) else {
            return Err(malformed("holds an event that is no JSON object"));
        };
        if event.name == "error" || data.get("error").is_some_and(|error| !error.is_null()) {
            return Err(Refusal::of_body(&data).to_error(None, None));
        }
        self.take_workers_ai(&data, said);
        if let Some(choice) = data.get("choices").and_then(|choices| choices.get(0)) {
            self.take_choice(choice, said)?;
        }
        if let Some(tokens) = data.get("usage").and_then(tokens) {
            said.push_back(ModelEvent::Usage(tokens));
        }
        Ok(())
    }

    fn is_whole(&self) -> bool {
        self.is_whole
    }

    fn is_answered(&self) -> bool {
        self.stop.is_some() || self.is_done
    }

    fn is_over(&self) -> bool {
        self.is_done
    }

    fn finish(&mut self, said: &mut VecDeque<ModelEvent>) {
        self.end_reasoning(said);
        for (index, call) in self.calls.iter_mut().enumerate() {
            call.tell(index, said);
            said.push_back(ModelEvent::ToolCallEnd { index });
        }
        let kept = halves::whole(std::mem::take(&mut self.kept));
        if !kept.is_empty() && !self.calls.is_empty() {
            said.push_back(ModelEvent::Kept(object(&mut [(REASONING, kept.into())])));
        }
        let stop = match self.stop {
            _ if self.refused => StopReason::Refusal,
            // Some servers say "stop" behind calls.
            None | Some(StopReason::EndTurn) if !self.calls.is_empty() => StopReason::ToolUse,
            None => StopReason::EndTurn,
            Some(stop) => stop,
        };
        said.push_back(ModelEvent::Stop(stop));
    }
}

impl ChatReader {
    /// Reads an answer that comes in pieces, or `is_whole`.
    pub(super) fn new(is_whole: bool) -> Self {
        Self {
            is_whole,
            ..Self::default()
        }
    }

    fn take_choice(
        &mut self,
        choice: &Value,
        said: &mut VecDeque<ModelEvent>,
    ) -> Result<(), ModelError> {
        let delta = choice.get("delta").filter(|delta| delta.is_object());
        self.has_pieces |= delta.is_some();
        let message = choice.get("message").filter(|_| !self.has_pieces);
        if let Some(delta) = delta.or(message) {
            // A gateway may give the same words under both names.
            let kept = text(delta, REASONING);
            self.kept.push_str(kept.unwrap_or_default());
            let reasoning = kept.or_else(|| text(delta, "reasoning"));
            if let Some(content) = reasoning {
                self.think(content, said);
            }
            match delta.get("content") {
                Some(Value::Array(parts)) => {
                    for part in parts {
                        self.take_part(part, said);
                    }
                }
                _ => {
                    if let Some(content) = text(delta, "content") {
                        self.say(content.to_owned(), said);
                    }
                }
            }
            if text(delta, "refusal").is_some() {
                self.has_content = true;
                self.refused = true;
            }
            self.take_calls(delta, said);
        }
        match choice.get("finish_reason").and_then(Value::as_str) {
            None | Some("" | "null") => {}
            Some("length") => self.stop = Some(StopReason::MaxTokens),
            Some("tool_calls" | "function_call") => self.stop = Some(StopReason::ToolUse),
            Some("content_filter" | "refusal") => self.stop = Some(StopReason::Refusal),
            Some("insufficient_system_resource" | "abort" | "error") => {
                return Err(ModelError::new(
                    ModelErrorKind::Unavailable,
                    "The model provider gave the answer up.",
                ));
            }
            Some(_) => self.stop = Some(StopReason::EndTurn),
        }
        Ok(())
    }

    /// A part of a content that is a list, as `{type: "text", text}`; one of thinking holds a text or
    /// parts of its own.
    fn take_part(&mut self, part: &Value, said: &mut VecDeque<ModelEvent>) {
        if let Some(content) = text(part, "text") {
            self.say(content.to_owned(), said);
        }
        match part.get("thinking") {
            Some(Value::String(content)) => self.think(content, said),
            Some(Value::Array(parts)) => {
                for content in parts.iter().filter_map(|part| text(part, "text")) {
                    self.think(content, said);
                }
            }
            _ => {}
        }
    }

    /// `{"response": …, "tool_calls": […]}` of Workers AI's older models.
    fn take_workers_ai(&mut self, data: &Value, said: &mut VecDeque<ModelEvent>) {
        match data.get("response") {
            Some(Value::String(content)) => {
                self.has_content = true;
                if !content.is_empty() {
                    self.say(content.clone(), said);
                }
            }
            // An answer that is held to a schema may be such a value, and not its text.
            Some(value @ (Value::Number(_) | Value::Object(_) | Value::Array(_))) => {
                self.say(value.to_string(), said);
            }
            _ => {}
        }
        self.take_calls(data, said);
    }

    fn take_calls(&mut self, delta: &Value, said: &mut VecDeque<ModelEvent>) {
        let calls = delta.get("tool_calls").and_then(Value::as_array);
        for call in calls.into_iter().flatten() {
            self.has_content = true;
            self.end_reasoning(said);
            self.take_call(call, said);
        }
    }

    fn take_call(&mut self, piece: &Value, said: &mut VecDeque<ModelEvent>) {
        let function = piece.get("function").unwrap_or(piece);
        let name = text(function, "name").unwrap_or_default();
        let id = text(piece, "id").unwrap_or_default();
        let index = piece.get("index").and_then(Value::as_u64);
        let arguments = match function.get("arguments") {
            Some(Value::String(delta)) => delta.clone(),
            None | Some(Value::Null) => String::new(),
            // Whole, and not as text.
            Some(arguments) => arguments.to_string(),
        };
        let is_begun = !name.is_empty() && !arguments.is_empty();
        let place = self
            .place(index, id, name)
            .filter(|place| !is_begun || self.calls.get(*place).is_none_or(OpenCall::is_open))
            .unwrap_or(self.calls.len());
        if place == self.calls.len() {
            self.calls.push(OpenCall {
                index,
                id: id.to_owned(),
                ..OpenCall::default()
            });
        }
        let Some(call) = self.calls.get_mut(place) else {
            return;
        };
        if call.name.is_empty() && !name.is_empty() {
            name.clone_into(&mut call.name);
            if call.id.is_empty() {
                id.clone_into(&mut call.id);
            }
            call.tell(place, said);
        }
        call.arguments.push_str(&arguments);
        if call.is_told && !arguments.is_empty() {
            said.push_back(ModelEvent::ToolCallDelta {
                index: place,
                delta: arguments,
            });
        }
    }

    /// The call that a piece belongs to, if it is one that was begun. A server that numbers every
    /// call 0 begins the next one with a name and another id; one without numbers begins it with a
    /// name. Another id alone begins none: there are servers that give each piece one of its own.
    fn place(&self, index: Option<u64>, id: &str, name: &str) -> Option<usize> {
        let place = match index {
            Some(_) => self.calls.iter().rposition(|call| call.index == index)?,
            None if !id.is_empty() => self.calls.iter().rposition(|call| call.id == id)?,
            None if !name.is_empty() => return None,
            None => self.calls.len().checked_sub(1)?,
        };
        let call = self.calls.get(place)?;
        let is_named = !name.is_empty() && !call.name.is_empty();
        let is_other = is_named && !id.is_empty() && !call.id.is_empty() && call.id != id;
        (!is_other).then_some(place)
    }

    fn say(&mut self, content: String, said: &mut VecDeque<ModelEvent>) {
        self.has_content = true;
        self.end_reasoning(said);
        said.push_back(ModelEvent::TextDelta(content));
    }

    fn think(&mut self, content: &str, said: &mut VecDeque<ModelEvent>) {
        self.has_content = true;
        self.is_reasoning = true;
        said.push_back(ModelEvent::Reasoning {
            content: content.to_owned(),
            is_complete: false,
        });
    }

    fn end_reasoning(&mut self, said: &mut VecDeque<ModelEvent>) {
        if std::mem::take(&mut self.is_reasoning) {
            said.push_back(ModelEvent::Reasoning {
                content: String::new(),
                is_complete: true,
            });
        }
    }
}

impl OpenCall {
    /// Tells the start, and what had come before the name.
    fn tell(&mut self, index: usize, said: &mut VecDeque<ModelEvent>) {
        if std::mem::replace(&mut self.is_told, true) {
            return;
        }
        said.push_back(ModelEvent::ToolCallStart {
            index,
            id: self.id.clone(),
            name: self.name.clone(),
        });
        if !self.arguments.is_empty() {
            let delta = self.arguments.clone();
            said.push_back(ModelEvent::ToolCallDelta { index, delta });
        }
    }

    /// Whether a piece with a name may belong to it: a server may repeat the name, but not behind
    /// arguments that are whole.
    fn is_open(&self) -> bool {
        serde_json::from_str::<IgnoredAny>(&self.arguments).is_err()
    }
}

/// A field that is a text with something in it.
fn text<'a>(value: &'a Value, field: &str) -> Option<&'a str> {
    value
        .get(field)
        .and_then(Value::as_str)
        .filter(|text| !text.is_empty())
}

/// The counts of a usage object; `None` when it is none, or says nothing.
fn tokens(usage: &Value) -> Option<Tokens> {
    let count = |path: &[&str]| {
        let found = path.iter().try_fold(usage, |value, field| value.get(field));
        found.and_then(Value::as_u64)
    };
    let prompt = count(&["prompt_tokens"]);
    let completion = count(&["completion_tokens"]);
    if prompt.is_none() && completion.is_none() {
        return None;
    }
    let (prompt, completion) = (prompt.unwrap_or(0), completion.unwrap_or(0));
    let cached = count(&["prompt_tokens_details", "cached_tokens"])
        .or_else(|| count(&["prompt_cache_hit_tokens"]));
    let reasoning = count(&["completion_tokens_details", "reasoning_tokens"]);
    Some(Tokens {
        prompt,
        completion,
        reasoning: reasoning.unwrap_or(0),
        cached: cached.unwrap_or(0),
        total: count(&["total_tokens"]).unwrap_or(prompt.saturating_add(completion)),
    })
}
