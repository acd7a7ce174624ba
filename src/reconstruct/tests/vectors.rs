//! Scripts of what documents were told and what they said, in a file that any other implementation
//! of the document is put through as well.

use std::ops::Deref;

use serde::Deserialize as _;
use serde_json::{Value, json};

use super::sentences::{PARENT, append, committed, forwarded, snapshot};
use super::world::{Observer, World};
use super::{projected, steps};
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::Frame;
use crate::protocol::ids::Position;
use crate::protocol::message::SnapshotResponse;
use crate::reconstruct::{Document, Heard, Reading, Stale, Status};

/// A document that may write down what it is told and what it is afterwards.
pub(super) struct Recorded {
    document: Document,
    pub(super) script: Option<Vec<Value>>,
}

impl Deref for Recorded {
    type Target = Document;

    fn deref(&self) -> &Document {
        &self.document
    }
}

impl Recorded {
    pub(super) fn new(session: &str, writes: bool) -> Self {
        Self {
            document: Document::new(session),
            script: writes.then(Vec::new),
        }
    }

    pub(super) fn take_request(&mut self) -> bool {
        let wanted = self.document.take_request();
        if wanted {
            self.note(|| json!({"op": "request"}));
        }
        wanted
    }

    pub(super) fn baseline(&mut self, snapshot: &SnapshotResponse, ended: bool) {
        self.document.baseline(snapshot, ended);
        self.note(|| json!({"op": "baseline", "snapshot": snapshot, "ended": ended}));
    }

    pub(super) fn observe(
        &mut self,
        reading: Reading<'_>,
        sequence: u64,
        chunk: &RawChunk,
    ) -> Heard {
        let heard = self.document.observe(reading, sequence, chunk);
        self.note(|| {
            let stream = json!({"session": reading.session, "stream": reading.stream});
            json!({"op": "chunk", "reading": stream, "sequence": sequence, "chunk": chunk})
        });
        heard
    }

    pub(super) fn observe_end(&mut self, frame: &Frame) {
        self.document.observe_end(frame);
        if let Frame::End(end) = frame {
            self.note(|| json!({"op": "end", "end": end}));
        }
    }

    pub(super) fn boundary(&mut self) {
        self.document.boundary();
        self.note(|| json!({"op": "boundary"}));
    }

    fn note(&mut self, entry: impl FnOnce() -> Value) {
        if let Some(script) = &mut self.script {
            let mut entry = entry();
            entry["then"] = said(&self.document);
            script.push(entry);
        }
    }
}

/// What a document says of itself.
fn said(document: &Document) -> Value {
    let status = match document.status() {
        Status::Unpinned => json!({"kind": "unpinned"}),
        Status::Exact { step } => json!({"kind": "exact", "step": step}),
        Status::InStep => json!({"kind": "in_step"}),
        Status::Stale(why) => json!({"kind": "stale", "reason": reason(*why)}),
        Status::Final => json!({"kind": "final"}),
    };
    json!({
        "status": status,
        "state": document.state(),
        "attachAt": document.attach_at(),
        "wants": document.clone().take_request(),
    })
}

fn reason(why: Stale) -> &'static str {
    match why {
        Stale::Discarded => "discarded",
        Stale::Resync => "resync",
        Stale::Truncated => "truncated",
        Stale::NewStream => "new_stream",
        Stale::Gap => "gap",
        Stale::Diverged => "diverged",
        Stale::NestedDescendant => "nested_descendant",
        Stale::Reopened => "reopened",
    }
}

/// What random trees do not come to: another life, a resync, a snapshot later than the end.
fn stories() -> Vec<(&'static str, Recorded)> {
    let begin = || {
        let mut document = Recorded::new("s", true);
        document.take_request();
        document.baseline(&snapshot(json!({"list": []}), Position::At(1), 0, 0), false);
        document
    };
    let resync = json!({"type": "stream_resync", "agentId": "s", "agentType": "t",
        "timestamp": 1, "step": 1, "reason": "child_truncated"});

    let mut late = begin();
    late.boundary();
    late.take_request();
    let completed = json!({"runId": null, "status": "completed", "state": {"list": [1]}});
    late.observe_end(&Frame::End(serde_json::from_value(completed).unwrap()));
    late.baseline(&snapshot(json!({"list": []}), Position::At(1), 0, 0), false);
    late.observe(PARENT, 9, &forwarded(committed(1, 1), 3));

    let mut lives = begin();
    let mut second = snapshot(json!({"list": [7]}), Position::At(1), 0, 1);
    second.stream_id = "st_second".into();
    let mut other = forwarded(resync.clone(), 0);
    other.0["origin"]["streamId"] = json!("st_second");
    lives.observe(PARENT, 7, &other);
    lives.take_request();
    lives.baseline(&second, false);
    lives.observe(PARENT, 8, &forwarded(append(1, 1, 0), 2));

    let mut past = Recorded::new("s", true);
    past.take_request();
    past.baseline(&second, false);
    past.observe(PARENT, 7, &forwarded(append(1, 1, 0), 2));
    past.take_request();
    past.baseline(&second, false);
    past.observe(PARENT, 8, &forwarded(append(2, 2, 1), 3));

    let mut hole = Recorded::new("s", true);
    let mut bare = snapshot(json!({"list": []}), Position::At(1), 0, 0);
    bare.patch_ordinal = None;
    hole.take_request();
    hole.baseline(&bare, false);
    hole.observe(PARENT, 7, &forwarded(resync, 2));
    hole.take_request();
    hole.baseline(&bare, false);
    hole.observe(PARENT, 8, &forwarded(committed(1, 1), 3));
    hole.take_request();
    bare.stream_sequence = Position::At(3);
    hole.baseline(&bare, false);
    hole.observe(PARENT, 9, &forwarded(committed(2, 1), 4));
    vec![
        ("a snapshot later than the end", late),
        ("another life", lives),
        ("a life that is over", past),
        ("what a resync skipped", hole),
    ]
}

/// Scripts of random trees: each document of each observer.
fn scripts() -> Value {
    let mut scripts: Vec<Value> = stories()
        .into_iter()
        .map(|(name, story)| json!({"name": name, "session": "s", "events": story.script}))
        .collect();
    for seed in 1..=5u64 {
        let stamped = seed % 3 != 0;
        let mut world = World::new(seed, stamped);
        let mut observers: Vec<Observer> = Vec::new();
        while !world.is_over() {
            world.tick();
            if observers.is_empty() {
                let root = usize::try_from(world.random.below(2)).unwrap();
                observers.push(Observer::new(&mut world, root, true));
            }
            for observer in &mut observers {
                observer.tick(&mut world);
            }
        }
        for mut observer in observers {
            observer.finish(&mut world);
            for document in observer.documents {
                scripts.push(json!({
                    "name": format!("tree {seed}, session {}", document.session()),
                    "session": document.session(),
                    "events": document.script,
                }));
            }
        }
    }
    scripts.extend((1..=3).flat_map(projected::scripts));
    scripts.extend(steps::doubts());
    json!({
        "about": "What a document of one session is told, and what it is after each event. `request` takes its wish for a snapshot.",
        "scripts": scripts,
    })
}

#[test]
fn the_vectors_are_what_a_document_says() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/vectors/reconstruct.json"
    );
    if std::env::var_os("WRITE_VECTORS").is_some() {
        std::fs::write(path, scripts().to_string() + "\n").unwrap();
    }
    let vectors: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut events = 0;
    for script in vectors["scripts"].as_array().unwrap() {
        let mut document = Document::new(script["session"].as_str().unwrap());
        for (at, event) in script["events"].as_array().unwrap().iter().enumerate() {
            let place = format!("{} event {at}: {event}", script["name"]);
            match event["op"].as_str().unwrap() {
                "request" => assert!(document.take_request(), "{place}"),
                "baseline" => {
                    let snapshot = SnapshotResponse::deserialize(&event["snapshot"]).unwrap();
                    document.baseline(&snapshot, event["ended"].as_bool().unwrap());
                }
                "chunk" => {
                    let reading = Reading {
                        session: event["reading"]["session"].as_str().unwrap(),
                        stream: event["reading"]["stream"].as_str().unwrap(),
                    };
                    let chunk = RawChunk::deserialize(&event["chunk"]).unwrap();
                    document.observe(reading, event["sequence"].as_u64().unwrap(), &chunk);
                }
                "end" => {
                    let end = serde_json::from_value(event["end"].clone()).unwrap();
                    document.observe_end(&Frame::End(end));
                }
                "boundary" => drop(document.boundary()),
                other => panic!("{other}"),
            }
            assert_eq!(said(&document), event["then"], "{place}");
            events += 1;
        }
    }
    assert!(events > 1_000, "{events} events");
}
