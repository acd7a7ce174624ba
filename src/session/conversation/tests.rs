#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use serde_json::json;

use super::*;
use crate::protocol::ids::Position;
use crate::store::{ToolCall, ToolOutcome};

fn snapshot() -> SnapshotResponse {
    SnapshotResponse {
        session_id: "s".into(),
        stream_id: "st".into(),
        state: json!({"a": 1}),
        stream_sequence: Position::At(7),
        oldest_retained_sequence: 0,
        step_count: 2,
        checkpoint_id: None,
        patch_ordinal: Some(1),
        projection: None,
    }
}

fn said(text: &str) -> MessageRecord {
    MessageRecord::User { text: text.into() }
}

fn read(all: &[MessageRecord], after: u64, limit: usize) -> MessagesResponse {
    let behind = |index: u64| {
        let record = all.get(usize::try_from(index).unwrap());
        Ok(record.map(|record| (index + 1, record.clone())))
    };
    page(snapshot(), after, limit, behind).unwrap()
}

fn indices(page: &MessagesResponse) -> Vec<u64> {
    page.messages.iter().map(|message| message.index).collect()
}

#[test]
fn pages_of_every_size_hold_each_message_once() {
    let all: Vec<_> = (1..=7).map(|n| said(&format!("m{n}"))).collect();
    for limit in 1..=8 {
        let (mut after, mut seen) = (0, Vec::new());
        loop {
            let page = read(&all, after, limit);
            assert!(page.messages.len() <= limit);
            assert_eq!(page.stream_sequence, Position::At(7));
            seen.extend(indices(&page));
            match page.next {
                Some(next) => after = next,
                None => break,
            }
        }
        assert_eq!(seen, (1..=7).collect::<Vec<_>>(), "limit {limit}");
    }
    assert_eq!(indices(&read(&all, 5, 50)), [6, 7], "after is exclusive");
    let beyond = read(&all, 9, 50);
    assert_eq!((indices(&beyond), beyond.next), (vec![], None));
}

#[test]
fn a_page_ends_behind_the_message_that_is_too_much() {
    let large = "x".repeat(PAGE_BYTES / 2);
    let all = [said(&large), said(&large), said(&large), said("small")];
    let first = read(&all, 0, 50);
    assert_eq!((indices(&first), first.next), (vec![1, 2], Some(2)));
    let alone = [said(&"x".repeat(3 * PAGE_BYTES)), said("small")];
    let first = read(&alone, 0, 50);
    assert_eq!(
        (indices(&first), first.next),
        (vec![1], Some(1)),
        "one at least"
    );
}

#[test]
fn messages_are_told_in_the_words_of_the_wire() {
    let outcome = ToolOutcome {
        success: false,
        result: json!(null),
        error: Some("no".into()),
    };
    let call = ToolCall {
        id: "c".into(),
        name: "note".into(),
        arguments: json!({"q": 1}),
    };
    let all = [
        said("hello"),
        MessageRecord::Assistant {
            text: "I look.".into(),
            tool_calls: vec![call],
            cut: true,
            kept: None,
        },
        MessageRecord::Tool {
            tool_call_id: "c".into(),
            tool_name: "note".into(),
            outcome,
        },
    ];
    let mut told = read(&all, 0, 50);
    assert_eq!(
        serde_json::to_value(&told).unwrap(),
        json!({
            "sessionId": "s", "streamId": "st", "streamSequence": 7, "state": {"a": 1},
            "messages": [
                {"index": 1, "role": "user", "text": "hello"},
                {"index": 2, "role": "assistant", "text": "I look.", "cut": true,
                    "toolCalls": [{"id": "c", "name": "note", "arguments": {"q": 1}}]},
                {"index": 3, "role": "tool", "toolCallId": "c", "toolName": "note", "success": false,
                    "result": null, "error": "no"},
            ],
        })
    );
    for numbered in &mut told.messages {
        numbered.message.keep_lifecycle();
    }
    let lifecycle = serde_json::to_value(&told.messages).unwrap();
    assert_eq!(
        lifecycle[1]["toolCalls"],
        json!([{"id": "c", "name": "note"}])
    );
    assert_eq!(
        lifecycle[2],
        json!({"index": 3, "role": "tool", "toolCallId": "c", "toolName": "note", "success": false})
    );
}
