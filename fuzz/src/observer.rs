//! Observers and forwarders of a stream that another service tells.

use remote_agents::dispatch::Forwarder;
use remote_agents::protocol::chunk::RawChunk;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{SessionId, StreamId};
use remote_agents::protocol::message::SnapshotResponse;
use remote_agents::protocol::sse::{Decoded, Decoder};
use remote_agents::reconstruct::{Document, PatchFilter, Reading, Status, Verdict};
use serde_json::Value;

use super::input::{choice, values};
use super::reference::depth;

const READING: Reading<'static> = Reading {
    session: "s",
    stream: "st",
};

pub(crate) fn observer(data: &[u8]) {
    let (ended, rest) = choice(data, 2);
    let [snapshot, stream, again] = values::<3>(rest);
    let baseline: Option<SnapshotResponse> = serde_json::from_slice(snapshot).ok();
    let again: Option<SnapshotResponse> = serde_json::from_slice(again).ok();
    let mut documents = ["s", "c"].map(Document::new);
    let mut filter = PatchFilter::new();
    if let Some(snapshot) = &baseline {
        filter.baseline(snapshot);
        for document in &mut documents {
            assert!(document.take_request(), "a new document wants a snapshot");
            document.baseline(snapshot, ended == 1);
        }
    }
    let mut forwarder = Forwarder::new(SessionId::parse("s").unwrap());
    let mut decoder = Decoder::new();
    decoder.push(stream);
    while let Ok(Some(decoded)) = decoder.poll() {
        let Decoded::Frame(frame) = decoded else {
            continue;
        };
        if let Frame::Chunk { sequence, chunk } = &frame {
            let verdict = filter.judge(READING, *sequence, chunk);
            assert!(verdict != Verdict::Apply || chunk.kind() == "state_patch");
            for document in &mut documents {
                heard(document, *sequence, chunk);
            }
            forwarded(&mut forwarder, *sequence, chunk);
        } else {
            for document in &mut documents {
                document.observe_end(&frame);
            }
        }
        for document in &mut documents {
            if document.take_request() {
                match &again {
                    Some(snapshot) => document.baseline(snapshot, false),
                    None => document.no_snapshot(),
                }
            }
        }
    }
}

/// Takes a chunk in. The state changes by an applied patch alone, and stays within bounds.
fn heard(document: &mut Document, sequence: u64, chunk: &RawChunk) {
    let before = document.clone();
    let heard = document.observe(READING, sequence, chunk);
    if document.state() != before.state() {
        let session = document.session();
        assert_eq!(chunk.agent_id(), Some(session), "by another session");
        let is_known = matches!(document.status(), Status::InStep | Status::Exact { .. });
        assert!(is_known, "{heard:?} made {:?}", document.status());
        let is_step = matches!(chunk.kind(), "state_patch" | "step_committed");
        assert!(is_step, "by {}", chunk.kind());
    }
    let deepest = depth(before.state()).max(127);
    assert!(depth(document.state()) <= deepest);
}

/// A forwarded chunk says where it came from, and nothing that the forwarder was not told.
fn forwarded(forwarder: &mut Forwarder, sequence: u64, chunk: &RawChunk) {
    let stream = StreamId::parse("st").unwrap();
    let stamped = forwarder.stamp(&stream, sequence, chunk.clone(), &|_| Ok(false));
    let text = stamped.expect("a chunk that was read can be stamped").json;
    let read: Value = serde_json::from_str(&text).unwrap();
    let read: RawChunk = serde_json::from_value(read).unwrap();
    let source = read.remote_source().expect("it is stamped");
    assert_eq!(
        (source.child_sequence, source.child_session_id.as_str()),
        (sequence, "s")
    );
    assert_eq!(read.kind(), chunk.kind());
    assert_eq!(read.agent_id(), chunk.agent_id());
}
