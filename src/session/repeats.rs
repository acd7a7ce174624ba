//! Whether the model makes the same calls over and over, and what is done about it.
//!
//! Pure. Only whole steps are compared: the calls of an answer with those of the answers before it,
//! by tool, arguments and results, back to the latest message of the user.

use serde_json::Value;

use super::CallFailure;
use crate::error::Code;
use crate::store::{MessageRecord, ToolCall, ToolOutcome};

/// The cause in the result of a call that was not made because it repeats earlier ones.
pub const REPEATED_CALL: &str = "repeated_call";

/// How an answer's calls stand to those before them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeats {
    /// Answers in a row with the same calls, each of which had the same results.
    pub same: u32,
    /// Whether the model was told so right before, and makes the same calls still.
    pub is_told: bool,
}

/// Looks back from an answer with these calls. `messages` are the conversation before it.
#[must_use]
pub fn repeats(messages: &[MessageRecord], calls: &[ToolCall]) -> Repeats {
    let mut found = Repeats::default();
    if calls.is_empty() {
        return found;
    }
    let mut results: Vec<&ToolOutcome> = Vec::new();
    let mut expected: Option<Vec<&ToolOutcome>> = None;
    for message in messages.iter().rev() {
        match message {
            MessageRecord::User { .. } => break,
            MessageRecord::Tool { outcome, .. } => results.push(outcome),
            MessageRecord::Assistant { tool_calls, .. } => {
                let present = std::mem::take(&mut results);
                if !are_same(tool_calls, calls) {
                    break;
                }
                if found.same == 0 && present.iter().all(|outcome| is_refusal(outcome)) {
                    found.is_told = true;
                } else if expected.get_or_insert_with(|| present.clone()) == &present {
                    found.same = found.same.saturating_add(1);
                } else {
                    break;
                }
            }
        }
    }
    found
}

/// The result of a call that is not made because it repeats earlier ones.
#[must_use]
pub fn repeated(same: u32) -> CallFailure {
    let sentence = format!(
        "This call was made {same} times in a row with the same result. It was not made again: do \
         something else, or answer with what there is."
    );
    CallFailure::new(Code::ToolExecutionFailed, sentence).with_cause(REPEATED_CALL)
}

fn are_same(one: &[ToolCall], other: &[ToolCall]) -> bool {
    let same = |(one, other): (&ToolCall, &ToolCall)| {
        one.name == other.name && one.arguments == other.arguments
    };
    one.len() == other.len() && one.iter().zip(other).all(same)
}

fn is_refusal(outcome: &ToolOutcome) -> bool {
    let cause = outcome.result.pointer("/metadata/helixErrorDetail/cause");
    !outcome.success && cause.and_then(Value::as_str) == Some(REPEATED_CALL)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn call(argument: u32) -> ToolCall {
        ToolCall {
            id: String::new(),
            name: "look".into(),
            arguments: json!({ "at": argument }),
        }
    }

    fn step(argument: u32, outcome: ToolOutcome) -> [MessageRecord; 2] {
        [
            MessageRecord::Assistant {
                text: String::new(),
                tool_calls: vec![call(argument)],
                cut: false,
                kept: None,
            },
            MessageRecord::Tool {
                tool_call_id: String::new(),
                tool_name: "look".into(),
                outcome,
            },
        ]
    }

    fn saw(what: u32) -> ToolOutcome {
        ToolOutcome {
            success: true,
            result: json!(what),
            error: None,
        }
    }

    #[test]
    fn only_the_same_calls_with_the_same_results_in_a_row_are_counted() {
        let refused = || repeated(2).to_outcome();
        let cases = [
            (vec![], 0, false),
            (vec![step(1, saw(1))], 1, false),
            (vec![step(1, saw(1)), step(1, saw(1))], 2, false),
            (vec![step(1, saw(2)), step(1, saw(1))], 1, false),
            (
                vec![step(1, saw(1)), step(2, saw(1)), step(1, saw(1))],
                1,
                false,
            ),
            (vec![step(1, saw(1)), step(2, saw(1))], 0, false),
            (
                vec![step(1, saw(1)), step(1, saw(1)), step(1, refused())],
                2,
                true,
            ),
            (
                vec![step(1, saw(1)), step(1, refused()), step(2, saw(1))],
                0,
                false,
            ),
        ];
        for (steps, same, is_told) in cases {
            let mut messages = steps.concat();
            assert_eq!(repeats(&messages, &[call(1)]), Repeats { same, is_told });
            messages.push(MessageRecord::User {
                text: String::new(),
            });
            assert_eq!(repeats(&messages, &[call(1)]), Repeats::default());
        }
        assert_eq!(repeats(&step(1, saw(1)), &[call(1), call(1)]).same, 0);
        assert_eq!(repeats(&[], &[]), Repeats::default());
    }
}
