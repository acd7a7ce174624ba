//! The events of a streamed message.
//!
//! Blocks come one after the other, each with a number; a call's arguments are pieces of JSON text.
//! Usage comes twice: what the prompt cost at the beginning, what the answer cost at the end.

use std::collections::VecDeque;

use serde_json::Value;

use super::super::exchange::{Reader, malformed};
use super::super::halves;
use super::super::history::object;
use super::super::refusal::Refusal;
use super::{THINKING, text_block, typed};
use crate::agent::model::{ModelError, ModelEvent, StopReason};
use crate::protocol::sse::Event;
use crate::protocol::usage::Tokens;

/// Reads one answer.
#[derive(Default)]
pub(super) struct MessageReader {
    /// The block that is being written.
    block: Block,
    calls: usize,
    /// The blocks in order, thinking as it is to be sent back; calls have a place here alone.
    kept: Vec<Value>,
    has_thought: bool,
    usage: Usage,
    stop: Option<StopReason>,
    is_over: bool,
}

#[derive(Default)]
enum Block {
    #[default]
    None,
    Text(String),
    Thinking {
        thinking: String,
        signature: String,
    },
    Call {
        index: usize,
        /// Arguments that stood in the block's beginning and count if no piece follows.
        whole: Option<String>,
    },
}

#[derive(Default)]
struct Usage {
    input: u64,
    cache_read: u64,
    cache_creation: u64,
    output: u64,
}

impl Reader for MessageReader {
    fn take(&mut self, event: &Event, said: &mut VecDeque<ModelEvent>) -> Result<(), ModelError> {
        if event.data.trim().is_empty() {
            return Ok(());
        }
        let Some(data) = halves::object(&event.data) else {
            return Err(malformed("holds an event that is no JSON object"));
        };
        match data.get("type").and_then(Value::as_str).unwrap_or_default() {
            "message_start" => {
                let usage = data.get("message").and_then(|message| message.get("usage"));
                self.count(usage, said);
            }
            "content_block_start" => self.begin(data.get("content_block"), said),
            "content_block_delta" => self.piece(data.get("delta"), said),
            "content_block_stop" => self.end_block(said),
            "message_delta" => {
                self.count(data.get("usage"), said);
                let delta = data.get("delta").unwrap_or(&Value::Null);
                match text(delta, "stop_reason") {
                    "" => {}
                    "tool_use" => self.stop = Some(StopReason::ToolUse),
                    "max_tokens" | "model_context_window_exceeded" => {
                        self.stop = Some(StopReason::MaxTokens);
                    }
                    "refusal" => self.stop = Some(StopReason::Refusal),
                    _ => self.stop = Some(StopReason::EndTurn),
                }
            }
            "message_stop" => {
                if self.stop.is_none() {
                    return Err(malformed("ended before it said why"));
                }
                self.is_over = true;
            }
            "error" => return Err(Refusal::of_body(&data).to_error(None, None)),
            _ => {}
        }
        Ok(())
    }

    fn is_answered(&self) -> bool {
        self.stop.is_some()
    }

    fn is_over(&self) -> bool {
        self.is_over
    }

    fn finish(&mut self, said: &mut VecDeque<ModelEvent>) {
        self.end_block(said);
        if self.calls > 0 && self.has_thought {
            let mut kept = std::mem::take(&mut self.kept);
            // Where all thinking comes first, the record has the order of the rest.
            let first = kept.iter().take_while(|block| is_thought(block)).count();
            if !kept.iter().skip(first).any(is_thought) {
                kept.truncate(first);
            }
            said.push_back(ModelEvent::Kept(object(&mut [(THINKING, kept.into())])));
        }
        let stop = match self.stop {
            None | Some(StopReason::EndTurn) if self.calls > 0 => StopReason::ToolUse,
            stop => stop.unwrap_or(StopReason::EndTurn),
        };
        said.push_back(ModelEvent::Stop(stop));
    }
}

impl MessageReader {
    fn begin(&mut self, block: Option<&Value>, said: &mut VecDeque<ModelEvent>) {
        self.end_block(said);
        let Some(block) = block else {
            return;
        };
        match text(block, "type") {
            "text" => {
                self.block = Block::Text(text(block, "text").to_owned());
                say(text(block, "text"), said);
            }
            "thinking" => {
                self.block = Block::Thinking {
                    thinking: text(block, "thinking").to_owned(),
                    signature: text(block, "signature").to_owned(),
                };
                think(text(block, "thinking"), said);
            }
            // Thinking that nobody can read but the provider.
            "redacted_thinking" => {
                self.has_thought = true;
                self.kept.push(block.clone());
            }
            "tool_use" => {
                let index = self.calls;
                self.calls = self.calls.saturating_add(1);
                self.kept.push(typed("tool_use", &mut []));
                let input = block
                    .get("input")
                    .and_then(Value::as_object)
                    .filter(|input| !input.is_empty());
                self.block = Block::Call {
                    index,
                    whole: input.and_then(|input| serde_json::to_string(input).ok()),
                };
                said.push_back(ModelEvent::ToolCallStart {
                    index,
                    id: text(block, "id").to_owned(),
                    name: text(block, "name").to_owned(),
                });
            }
            // Tools of the provider's own.
            _ => {}
        }
    }

    fn piece(&mut self, delta: Option<&Value>, said: &mut VecDeque<ModelEvent>) {
        let Some(delta) = delta else {
            return;
        };
        match (text(delta, "type"), &mut self.block) {
            ("text_delta", block) => {
                if let Block::Text(held) = block {
                    held.push_str(text(delta, "text"));
                }
                say(text(delta, "text"), said);
            }
            ("thinking_delta", Block::Thinking { thinking, .. }) => {
                thinking.push_str(text(delta, "thinking"));
                think(text(delta, "thinking"), said);
            }
            ("signature_delta", Block::Thinking { signature, .. }) => {
                signature.push_str(text(delta, "signature"));
            }
            ("input_json_delta", Block::Call { index, whole }) => {
                let piece = text(delta, "partial_json");
                if !piece.is_empty() {
                    *whole = None;
                    said.push_back(ModelEvent::ToolCallDelta {
                        index: *index,
                        delta: piece.to_owned(),
                    });
                }
            }
            _ => {}
        }
    }

    fn end_block(&mut self, said: &mut VecDeque<ModelEvent>) {
        match std::mem::take(&mut self.block) {
            Block::None => {}
            Block::Text(held) => {
                let held = halves::whole(held);
                self.kept.push(text_block(&held));
            }
            Block::Thinking {
                thinking,
                signature,
            } => {
                let thinking = halves::whole(thinking);
                // Without a signature nobody takes it back.
                if !signature.is_empty() {
                    self.has_thought = true;
                    let fields =
                        &mut [(THINKING, thinking.into()), ("signature", signature.into())];
                    self.kept.push(typed(THINKING, fields));
                }
                said.push_back(ModelEvent::Reasoning {
                    content: String::new(),
                    is_complete: true,
                });
            }
            Block::Call { index, whole } => {
                if let Some(delta) = whole {
                    said.push_back(ModelEvent::ToolCallDelta { index, delta });
                }
                said.push_back(ModelEvent::ToolCallEnd { index });
            }
        }
    }

    /// Takes over the counts that are there; what the prompt cost includes what the cache gave and
    /// took.
    fn count(&mut self, usage: Option<&Value>, said: &mut VecDeque<ModelEvent>) {
        let Some(usage) = usage.filter(|usage| usage.is_object()) else {
            return;
        };
        let held = &mut self.usage;
        for (field, count) in [
            ("input_tokens", &mut held.input),
            ("cache_read_input_tokens", &mut held.cache_read),
            ("cache_creation_input_tokens", &mut held.cache_creation),
            ("output_tokens", &mut held.output),
        ] {
            if let Some(value) = usage.get(field).and_then(Value::as_u64) {
                *count = value;
            }
        }
        let prompt = held
            .input
            .saturating_add(held.cache_read)
            .saturating_add(held.cache_creation);
        said.push_back(ModelEvent::Usage(Tokens {
            prompt,
            completion: held.output,
            reasoning: 0,
            cached: held.cache_read,
            total: prompt.saturating_add(held.output),
        }));
    }
}

fn is_thought(block: &Value) -> bool {
    !matches!(text(block, "type"), "text" | "tool_use")
}

fn say(content: &str, said: &mut VecDeque<ModelEvent>) {
    if !content.is_empty() {
        said.push_back(ModelEvent::TextDelta(content.to_owned()));
    }
}

fn think(content: &str, said: &mut VecDeque<ModelEvent>) {
    if !content.is_empty() {
        said.push_back(ModelEvent::Reasoning {
            content: content.to_owned(),
            is_complete: false,
        });
    }
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}
