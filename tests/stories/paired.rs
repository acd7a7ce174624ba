//! Reads every history that a model is sent, as a judge of its own: each tool call is answered
//! exactly once, by the results right behind its answer, in the order of its calls.
//!
//! It panics nowhere: what it finds is noted, and whoever runs a test looks at the end.

use std::cell::{Cell, RefCell};

use remote_agents::agent::model::{ModelError, ModelErrorKind, ModelRequest};
use remote_agents::store::MessageRecord;

thread_local! {
    static BROKEN: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static READ: Cell<usize> = const { Cell::new(0) };
}

/// Reads what a model is asked.
///
/// # Errors
/// An answer for the model to give in place of its own, which is noted as well.
pub fn read(request: &ModelRequest) -> Result<(), ModelError> {
    READ.set(READ.get().saturating_add(1));
    let Err(reason) = judge(&request.messages) else {
        return Ok(());
    };
    let message = format!("a history was sent in which {reason}");
    BROKEN.with_borrow_mut(|broken| broken.push(message.clone()));
    Err(ModelError {
        kind: ModelErrorKind::Rejected,
        message,
        retry_after: None,
    })
}

/// What was wrong with the histories that were read on this thread since this was last asked.
#[allow(dead_code)] // Nobody asks in workerd: there a broken history is its story's error.
pub fn findings() -> Vec<String> {
    READ.set(0);
    BROKEN.take()
}

/// How many histories were read since then.
#[allow(dead_code)] // As above.
pub fn count() -> usize {
    READ.get()
}

/// What is wrong with a history.
///
/// # Errors
/// The first thing that is.
pub fn judge(messages: &[MessageRecord]) -> Result<(), String> {
    let mut seen: Vec<&str> = Vec::new();
    for (place, message) in messages.iter().enumerate() {
        let MessageRecord::Assistant { tool_calls, .. } = message else {
            continue;
        };
        for (call, nth) in tool_calls.iter().zip(1_usize..) {
            if seen.contains(&call.id.as_str()) {
                return Err(format!("{} is the id of two calls", call.id));
            }
            seen.push(&call.id);
            let answers = messages.iter().enumerate().filter(|(_, message)| {
                matches!(message, MessageRecord::Tool { tool_call_id, .. } if *tool_call_id == call.id)
            });
            let places: Vec<usize> = answers.map(|(place, _)| place).collect();
            if places != [place.saturating_add(nth)] {
                return Err(format!("{} is answered at {places:?}", call.id));
            }
        }
    }
    let results = messages.iter().filter_map(|message| match message {
        MessageRecord::Tool { tool_call_id, .. } => Some(tool_call_id.as_str()),
        _ => None,
    });
    match results.into_iter().find(|id| !seen.contains(id)) {
        Some(id) => Err(format!("{id} is answered and was never made")),
        None => Ok(()),
    }
}
