//! What must hold of a job's logs, however it went.

use std::collections::{BTreeMap, BTreeSet};

use remote_agents::protocol::ids::SessionId;
use remote_agents::store::{MessageRecord, PageLimit, Store as _};
use serde_json::{Value, json};

use crate::world::{Log, WRITER, World};

/// A session's log as it is stored.
pub fn log(world: &World, session: &SessionId) -> Log {
    let store = world.store(session);
    let last = store.session().unwrap().unwrap().last_sequence;
    let limit = PageLimit {
        chunks: usize::MAX,
        bytes: usize::MAX,
    };
    let page = store.chunks(0, last, limit).unwrap();
    page.chunks
        .into_iter()
        .map(|(sequence, json)| (sequence, serde_json::from_str(&json).unwrap()))
        .collect()
}

pub fn writer_log(world: &World) -> Log {
    log(world, &SessionId::parse(WRITER).unwrap())
}

/// The chunks of one session in somebody's log.
pub fn of<'a>(log: &'a Log, session: &'a str) -> impl Iterator<Item = &'a Value> {
    log.iter()
        .map(|(_, chunk)| chunk)
        .filter(move |chunk| chunk["agentId"] == session)
}

pub fn count(log: &Log, kind: &str) -> usize {
    log.iter()
        .filter(|(_, chunk)| chunk["type"] == kind)
        .count()
}

/// All that must hold of a job that is at rest, completed or not.
pub fn hold(world: &World) {
    let log = writer_log(world);
    each_child_chunk_stands_once(&log);
    law_of_the_step(world, &log);
    for (session, _) in world.sessions() {
        let log = self::log(world, &session);
        numbers_are_unbroken(&log);
        history_is_paired(world, &session);
        calls_end_once(&log, session.as_str());
    }
}

fn numbers_are_unbroken(log: &Log) {
    for (expected, (sequence, _)) in (1..).zip(log) {
        assert_eq!(*sequence, expected);
    }
}

fn each_child_chunk_stands_once(log: &Log) {
    let mut seen = BTreeSet::new();
    let mut origins = BTreeMap::new();
    for (sequence, chunk) in log {
        let source = &chunk["remoteSource"];
        if source.is_null() {
            assert_eq!(chunk["agentId"], WRITER, "{sequence}: {chunk}");
            assert!(chunk["origin"].is_null());
            continue;
        }
        let key = (
            source["childSessionId"].to_string(),
            source["childSequence"].as_u64().unwrap(),
        );
        assert!(seen.insert(key.clone()), "{key:?} stands twice");
        let origin = &chunk["origin"];
        assert_eq!(origin["sessionId"], chunk["agentId"], "{sequence}: {chunk}");
        let number = origin["sequence"].as_u64().unwrap();
        let last = origins.insert(origin["streamId"].to_string(), number);
        assert!(last < Some(number), "an origin's numbers go back: {chunk}");
    }
}

/// What the writer's log holds of each descendant is the descendant's own log, chunk by chunk;
/// all of it where the job was not stopped.
pub fn nothing_is_lost_on_the_way(world: &World) {
    let log = writer_log(world);
    for (session, _) in world.sessions() {
        if session.as_str() == WRITER {
            continue;
        }
        let own = self::log(world, &session);
        let own: Vec<&Value> = of(&own, session.as_str()).collect();
        let forwarded: Vec<Value> = of(&log, session.as_str())
            .map(|chunk| {
                let mut chunk = chunk.clone();
                chunk.as_object_mut().unwrap().remove("remoteSource");
                chunk.as_object_mut().unwrap().remove("origin");
                chunk
            })
            .collect();
        assert_eq!(forwarded.iter().collect::<Vec<_>>(), own, "{session}");
    }
}

/// From the stream alone, with the first checkpoint of each session as its baseline: the patches of
/// each step add up to the state of its checkpoint.
fn law_of_the_step(world: &World, log: &Log) {
    struct Document {
        state: Value,
        ordinal: u64,
        promoted: (Value, u64),
        highest: u64,
        steps: u64,
    }
    let checkpoints = world.checkpoints.borrow();
    let first = |session: &str| {
        let prefix = format!("cpv1-{session}-s0-");
        let mut found = checkpoints.iter().filter(|(id, _)| id.starts_with(&prefix));
        (*found.next().unwrap().1.state).clone()
    };
    let mut documents: BTreeMap<&str, Document> = BTreeMap::new();
    for (sequence, chunk) in log {
        let session = chunk["agentId"].as_str().unwrap();
        let document = documents.entry(session).or_insert_with(|| {
            let state = first(session);
            Document {
                promoted: (state.clone(), 0),
                state,
                ordinal: 0,
                highest: 0,
                steps: 0,
            }
        });
        match chunk["type"].as_str().unwrap() {
            "state_patch" => {
                let ordinal = chunk["patchOrdinal"].as_u64().unwrap();
                assert!(
                    ordinal > document.highest,
                    "{sequence}: an ordinal came again"
                );
                assert_eq!(chunk["patchBase"], document.ordinal, "{sequence}: {chunk}");
                let patch: json_patch::Patch =
                    serde_json::from_value(chunk["patches"].clone()).unwrap();
                json_patch::patch(&mut document.state, &patch).unwrap();
                (document.ordinal, document.highest) = (ordinal, ordinal);
            }
            "step_discarded" => {
                (document.state, document.ordinal) = document.promoted.clone();
            }
            "step_committed" => {
                let checkpoint = &checkpoints[chunk["checkpointId"].as_str().unwrap()];
                assert_eq!(document.state, *checkpoint.state, "{session} at {sequence}");
                assert_eq!(chunk["patchOrdinal"], checkpoint.patch_ordinal);
                assert_eq!(chunk["patchOrdinal"], document.ordinal);
                document.steps += 1;
                assert_eq!(chunk["stepCount"], document.steps);
                document.promoted = (document.state.clone(), document.ordinal);
            }
            _ => {}
        }
    }
}

/// Each call of a session that began ended once, and each child that it announced.
fn calls_end_once(log: &Log, session: &str) {
    let count = |start: &str, end: &str, key: &str| {
        let mut open: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        for chunk in of(log, session) {
            let kind = chunk["type"].as_str().unwrap();
            if kind == start || kind == end {
                let counts = open.entry(chunk[key].to_string()).or_default();
                *(if kind == start {
                    &mut counts.0
                } else {
                    &mut counts.1
                }) += 1;
            }
        }
        open
    };
    for (child, counts) in count("subagent_start", "subagent_end", "subSessionId") {
        assert_eq!(counts, (1, 1), "{child}");
    }
    for (call, (starts, ends)) in count("tool_start", "tool_end", "toolCallId") {
        assert_eq!(ends, 1, "{call}");
        assert!(starts <= 1, "{call}");
    }
}

/// In a session's own stream, its call's end follows the end of its child at once.
pub fn child_ends_are_followed_by_their_calls(log: &Log) {
    let mut ends = 0;
    for (at, (_, chunk)) in log.iter().enumerate() {
        if chunk["type"] == "subagent_end" {
            let next = &log[at + 1].1;
            assert_eq!(
                (&next["type"], &next["toolCallId"], &next["agentId"]),
                (&json!("tool_end"), &chunk["toolCallId"], &chunk["agentId"])
            );
            ends += 1;
        }
    }
    assert!(ends > 0);
}

/// Every call in the conversation has exactly one result, right behind the answer that made it.
fn history_is_paired(world: &World, session: &SessionId) {
    let mut open: Vec<String> = Vec::new();
    for message in world.store(session).messages().unwrap() {
        match message {
            MessageRecord::Tool { tool_call_id, .. } => {
                assert!(!open.is_empty(), "{session}: a result without a call");
                assert_eq!(open.remove(0), tool_call_id, "{session}");
            }
            MessageRecord::Assistant { tool_calls, .. } => {
                assert!(open.is_empty(), "{session}: {open:?} have no result");
                open = tool_calls.into_iter().map(|call| call.id).collect();
            }
            MessageRecord::User { .. } => assert!(open.is_empty(), "{session}: {open:?}"),
        }
    }
    assert!(open.is_empty(), "{session}: {open:?} have no result");
}

/// Every quote stands in the document that it names, and every document named is a source.
pub fn quotes_are_verbatim(report: &Value, documents: &[Value]) -> usize {
    let mut quotes = 0;
    let sources: BTreeSet<&str> = report["sources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|source| source["documentId"].as_str().unwrap())
        .collect();
    let mut named = BTreeSet::new();
    for section in report["sections"].as_array().unwrap() {
        for finding in section["findings"].as_array().unwrap() {
            let quote = finding["quote"].as_str().unwrap();
            let id = finding["documentId"].as_str().unwrap();
            let document = documents.iter().find(|document| document["id"] == id);
            let text = document.unwrap()["text"].as_str().unwrap();
            assert!(
                !quote.trim().is_empty() && text.contains(quote),
                "{id}: {quote:?}"
            );
            named.insert(id);
            quotes += 1;
        }
    }
    assert_eq!(named, sources);
    quotes
}
