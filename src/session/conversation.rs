//! A page of the conversation beside the state that it belongs to (section 5).

use crate::error::Result;
use crate::protocol::conversation::{
    Message, MessageCall, MessagesResponse, NumberedMessage, PAGE_BYTES,
};
use crate::protocol::message::SnapshotResponse;
use crate::store::MessageRecord;

#[cfg(test)]
mod tests;

/// The page of at most `limit` messages behind `after`. `behind` gives the message right behind an
/// index; all that is read must be of one commit with the snapshot.
///
/// # Errors
/// Those of `behind`.
pub fn page(
    snapshot: SnapshotResponse,
    after: u64,
    limit: usize,
    behind: impl Fn(u64) -> Result<Option<(u64, MessageRecord)>>,
) -> Result<MessagesResponse> {
    let mut messages = Vec::new();
    let (mut bytes, mut last) = (0_usize, after);
    let mut next = None;
    while let Some((index, record)) = behind(last)? {
        if messages.len() >= limit || bytes > PAGE_BYTES {
            next = Some(last);
            break;
        }
        let message = NumberedMessage {
            index,
            message: told(record),
        };
        bytes = bytes.saturating_add(serde_json::to_vec(&message).map_or(0, |json| json.len()));
        messages.push(message);
        last = index;
    }
    Ok(MessagesResponse {
        session_id: snapshot.session_id,
        stream_id: snapshot.stream_id,
        stream_sequence: snapshot.stream_sequence,
        state: snapshot.state,
        projection: None,
        messages,
        next,
    })
}

/// A message as the wire has it.
fn told(record: MessageRecord) -> Message {
    match record {
        MessageRecord::User { text } => Message::User { text },
        MessageRecord::Assistant {
            text,
            tool_calls,
            cut,
            ..
        } => Message::Assistant {
            text,
            tool_calls: tool_calls
                .into_iter()
                .map(|call| MessageCall {
                    id: call.id,
                    name: call.name,
                    arguments: Some(call.arguments),
                })
                .collect(),
            cut,
        },
        MessageRecord::Tool {
            tool_call_id,
            tool_name,
            outcome,
        } => Message::Tool {
            tool_call_id,
            tool_name,
            success: outcome.success,
            result: Some(outcome.result),
            error: outcome.error,
        },
    }
}
