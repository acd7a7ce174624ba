//! The offline model: a deterministic, extractive policy follower behind the same seam as any
//! provider.
//!
//! It reads the numbered procedure in the instructions, works out from the conversation which
//! steps are done, makes the next step's calls and fills their arguments with what it finds in the
//! conversation. It knows no agent and no tool, and writes nothing that it did not read, apart
//! from a few connective words. It uses no clock, no randomness and no I/O.

mod extract;
mod fill;
mod history;
mod policy;
mod procedure;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::task::Poll;

use futures::stream::{self, StreamExt as _};

use super::model::{LanguageModel, ModelEvent, ModelRequest, ModelStream, StopReason};
use crate::protocol::usage::Tokens;
use crate::store::MessageRecord;
use policy::Answer;

/// Bytes that count as one token.
const BYTES_PER_TOKEN: usize = 4;

/// A piece of a streamed text is at least this long, in bytes, where the text is long enough.
const SMALLEST_PIECE: usize = 24;

/// A text is streamed in about this many pieces at most.
const MOST_PIECES: usize = 24;

/// Events that are handed out before the thread is given away again.
const EVENTS_PER_TURN: usize = 4;

/// A language model that needs no provider: it follows the instructions' numbered steps and
/// answers with extracts. Its name is `offline`.
#[derive(Clone, Copy, Debug, Default)]
pub struct OfflineModel;

impl OfflineModel {
    /// The model. All of them are alike.
    #[must_use]
    pub fn new() -> Self {
        Self
    }
}

impl LanguageModel for OfflineModel {
    fn name(&self) -> &str {
        "offline"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let mut request = Some(request);
        let mut events = VecDeque::new();
        let mut before_turn = 0;
        // Whoever shares the thread gets a turn every few events, as between the packets of a
        // network, and the request is not even read before the first turn is given away.
        stream::poll_fn(move |context| {
            if before_turn == 0 {
                before_turn = EVENTS_PER_TURN;
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            before_turn -= 1;
            if let Some(request) = request.take() {
                events = events_of(&request, &policy::answer(&request));
            }
            Poll::Ready(events.pop_front().map(Ok))
        })
        .boxed_local()
    }
}

fn events_of(request: &ModelRequest, answer: &Answer) -> VecDeque<ModelEvent> {
    let mut events = VecDeque::new();
    let mut written = answer.text.len();
    events.extend(pieces(&answer.text).into_iter().map(ModelEvent::TextDelta));
    let before: usize = request.messages.iter().map(calls_in).sum();
    for (index, (name, arguments)) in answer.calls.iter().enumerate() {
        let id = format!("call_{}", before.saturating_add(index).saturating_add(1));
        let text = arguments.to_string();
        written = written
            .saturating_add(name.len())
            .saturating_add(text.len());
        events.push_back(ModelEvent::ToolCallStart {
            index,
            id,
            name: name.clone(),
        });
        events.extend(
            pieces(&text)
                .into_iter()
                .map(|delta| ModelEvent::ToolCallDelta { index, delta }),
        );
        events.push_back(ModelEvent::ToolCallEnd { index });
    }
    let (prompt, completion) = (tokens(bytes_of(request)), tokens(written));
    let total = prompt.saturating_add(completion);
    events.push_back(ModelEvent::Usage(Tokens {
        prompt,
        completion,
        total,
        ..Tokens::default()
    }));
    let stop = if answer.calls.is_empty() {
        StopReason::EndTurn
    } else {
        StopReason::ToolUse
    };
    events.push_back(ModelEvent::Stop(stop));
    events
}

fn calls_in(message: &MessageRecord) -> usize {
    match message {
        MessageRecord::Assistant { tool_calls, .. } => tool_calls.len(),
        MessageRecord::User { .. } | MessageRecord::Tool { .. } => 0,
    }
}

/// Cuts a text at character boundaries into at least two pieces, if it has two characters.
fn pieces(text: &str) -> Vec<String> {
    let size = SMALLEST_PIECE
        .max(text.len() / MOST_PIECES)
        .min(text.len().div_ceil(2))
        .max(1);
    let mut pieces: Vec<String> = Vec::new();
    let mut piece = String::new();
    for c in text.chars() {
        if !piece.is_empty() && piece.len().saturating_add(c.len_utf8()) > size {
            pieces.push(std::mem::take(&mut piece));
        }
        piece.push(c);
    }
    if !piece.is_empty() {
        pieces.push(piece);
    }
    pieces
}

fn tokens(bytes: usize) -> u64 {
    u64::try_from(bytes.div_ceil(BYTES_PER_TOKEN)).unwrap_or(u64::MAX)
}

fn bytes_of(request: &ModelRequest) -> usize {
    let messages = request.messages.iter().map(json_length).sum::<usize>();
    let tools = request
        .tools
        .iter()
        .map(|tool| tool.name.len() + tool.description.len() + json_length(&tool.parameters))
        .sum::<usize>();
    request
        .instructions
        .len()
        .saturating_add(messages)
        .saturating_add(tools)
}

fn json_length(value: &impl serde::Serialize) -> usize {
    serde_json::to_string(value).map_or(0, |text| text.len())
}
