//! What happened since the last user message, as turns of calls with their results.

use serde_json::{Value, json};

use super::extract;
use crate::store::{MessageRecord, ToolCall, ToolOutcome};

/// One answer of the model and what its calls came back with.
#[derive(Default)]
pub(super) struct Turn<'a> {
    pub(super) calls: Vec<(&'a ToolCall, Option<&'a ToolOutcome>)>,
}

/// The conversation since the last user message.
pub(super) struct History<'a> {
    /// The user's message: the object that it is as JSON, else `{"message": text}`.
    pub(super) user: Value,
    /// The answers since, without those that called nothing.
    pub(super) turns: Vec<Turn<'a>>,
}

impl<'a> History<'a> {
    pub(super) fn of(messages: &'a [MessageRecord]) -> Self {
        let mut user = json!({ "message": "" });
        let mut turns: Vec<Turn<'a>> = Vec::new();
        for message in messages {
            match message {
                MessageRecord::User { text } => {
                    turns.clear();
                    user = match serde_json::from_str::<Value>(text) {
                        Ok(value) if value.is_object() => value,
                        _ => json!({ "message": text }),
                    };
                }
                MessageRecord::Assistant { tool_calls, .. } if tool_calls.is_empty() => {}
                MessageRecord::Assistant { tool_calls, .. } => {
                    turns.push(Turn {
                        calls: tool_calls.iter().map(|call| (call, None)).collect(),
                    });
                }
                MessageRecord::Tool {
                    tool_call_id,
                    outcome,
                    ..
                } => {
                    let open = turns
                        .iter_mut()
                        .rev()
                        .flat_map(|turn| turn.calls.iter_mut());
                    if let Some(call) = open.into_iter().find(|(call, _)| call.id == *tool_call_id)
                    {
                        call.1 = Some(outcome);
                    }
                }
            }
        }
        Self { user, turns }
    }
}

/// What a failed call says about itself.
pub(super) fn failure_text(outcome: &ToolOutcome) -> Option<String> {
    let named = || {
        ["error", "message"]
            .iter()
            .find_map(|name| extract::find(&outcome.result, name)?.as_str())
    };
    outcome
        .error
        .as_deref()
        .or_else(|| outcome.result.as_str())
        .or_else(named)
        .map(str::to_owned)
}

/// Whether a failed call was never carried out, because the run was stopped before it.
pub(super) fn not_executed(outcome: &ToolOutcome) -> bool {
    let code = extract::find(&outcome.result, "code").and_then(Value::as_str);
    matches!(code, Some("run_interrupted" | "unpaired_on_continuation"))
}
