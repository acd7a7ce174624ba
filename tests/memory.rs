//! Nothing in a parent's memory grows with the length of its child's stream, and nothing in a
//! follower's with the length of what it follows.
//!
//! The streams are transports that make up their chunks as they are read, and SQLite's own memory is
//! not counted: what is counted is what the parent or the follower holds.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use peak_alloc::PeakAlloc;
use remote_agents::agent::SubAgent;
use remote_agents::agent::model::{
    LanguageModel, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::follower::{Follower, FollowerEvent};
use remote_agents::http::Body;
use remote_agents::mount::{Mount, serve};
use remote_agents::native::{LocalObjects, LocalRuntime};
use remote_agents::protocol::frame::{EndFrame, Frame};
use remote_agents::protocol::ids::{AgentType, Position, SessionId, StreamId};
use remote_agents::protocol::message::{
    ResumeRequest, SessionStatus, SnapshotResponse, StartRequest, StartResponse, StatusResponse,
    StopRequest, StopResponse, UsageResponse,
};
use remote_agents::reconstruct::Status;
use remote_agents::store::{MessageRecord, SubLocation};
use remote_agents::transport::{Call, FrameStream, Transport, TransportError};
use remote_agents::{Agent, Agents};
use serde_json::{Value, json};

#[path = "stories/paired.rs"]
#[allow(dead_code, unreachable_pub)] // It is for others too.
mod paired;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// What is counted is of the whole process, so one test counts at a time.
static COUNTING: Mutex<()> = Mutex::new(());

/// A child that says `chunks` things, a third of them in the name of grandchildren.
struct Talker {
    chunks: u64,
}

fn gone<T>() -> Result<T, TransportError> {
    Err(TransportError::Unreachable("not needed".into()))
}

impl Transport for Talker {
    fn start(&self, request: StartRequest, _: String) -> Call<'_, StartResponse> {
        let answer = StartResponse {
            session_id: request.session_id.to_string(),
            stream_id: "st_child".into(),
            run_id: None,
        };
        Box::pin(async move { Ok(answer) })
    }
    fn resume(&self, _: ResumeRequest, _: String) -> Call<'_, StartResponse> {
        Box::pin(async { gone() })
    }
    fn interrupt(&self, _: StopRequest) -> Call<'_, StopResponse> {
        Box::pin(async { gone() })
    }
    fn abort(&self, _: StopRequest) -> Call<'_, StopResponse> {
        Box::pin(async { gone() })
    }
    fn status(&self, _: &SessionId) -> Call<'_, StatusResponse> {
        Box::pin(async { gone() })
    }
    fn snapshot(&self, _: &SessionId) -> Call<'_, SnapshotResponse> {
        Box::pin(async { gone() })
    }
    fn usage(&self, _: &SessionId) -> Call<'_, UsageResponse> {
        Box::pin(async { gone() })
    }
    fn stream(
        &self,
        child: &SessionId,
        _: Position,
        _: Option<&StreamId>,
    ) -> Call<'_, FrameStream> {
        let (chunks, child) = (self.chunks, child.to_string());
        let frames = stream::iter(1..=chunks + 1).then(move |sequence| {
            let frame = frame(sequence, chunks, &child);
            async move {
                if sequence % 50 == 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Ok(frame)
            }
        });
        let frames: FrameStream = Box::pin(frames);
        Box::pin(async move { Ok(frames) })
    }
}

fn frame(sequence: u64, chunks: u64, child: &str) -> Frame {
    if sequence > chunks {
        return Frame::End(EndFrame {
            run_id: None,
            status: SessionStatus::Completed,
            output: Some(json!("done")),
            state: Some(json!({})),
            usage: Some(json!({"steps": 1})),
        });
    }
    // Some were announced long ago.
    let latest = sequence / 30;
    let back = if sequence.is_multiple_of(9) {
        latest * 9 / 10
    } else {
        0
    };
    let descendant = format!("grandchild-{}", latest - back);
    let chunk = match sequence % 3 {
        _ if latest == 0 => json!({"type": "text_delta", "agentId": child, "delta": "word "}),
        0 if sequence.is_multiple_of(30) => json!({"type": "subagent_start", "agentId": child,
            "subSessionId": format!("grandchild-{latest}"), "subAgentType": "t", "toolCallId": "g", "remote": true}),
        0 => json!({"type": "text_delta", "agentId": descendant, "delta": "word ",
            "origin": {"sessionId": descendant, "streamId": "st_g", "sequence": sequence},
            "remoteSource": {"childSessionId": descendant, "childSequence": sequence,
                "streamId": "st_g"}}),
        _ => json!({"type": "text_delta", "agentId": child, "delta": "word ", "timestamp": 1,
            "agentType": "child", "step": 1}),
    };
    Frame::Chunk {
        sequence,
        chunk: serde_json::from_value(chunk).unwrap(),
    }
}

/// Calls its sub-agent once and then says that it is done.
struct Delegator;

impl LanguageModel for Delegator {
    fn name(&self) -> &str {
        "delegator"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        paired::read(&request).unwrap();
        let called = request
            .messages
            .iter()
            .any(|message| matches!(message, MessageRecord::Tool { .. }));
        let events = if called {
            vec![
                ModelEvent::TextDelta("done".into()),
                ModelEvent::Stop(StopReason::EndTurn),
            ]
        } else {
            vec![
                ModelEvent::ToolCallStart {
                    index: 0,
                    id: "c".into(),
                    name: "subagent__talk".into(),
                },
                ModelEvent::ToolCallEnd { index: 0 },
                ModelEvent::Stop(StopReason::ToolUse),
            ]
        };
        Box::pin(stream::iter(events.into_iter().map(Ok)))
    }
}

/// The most that a parent held while it forwarded so many chunks to one reader, in bytes.
fn held(chunks: u64) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    let work = async move {
        let kind = |name: &str| AgentType::parse(name).unwrap();
        let objects = LocalObjects::new(
            1_700_000_000_000,
            Rc::new(|_, _| {}),
            Rc::new(move |_, _| {
                let sub = SubAgent::new(
                    "talk",
                    "Talks.",
                    kind("child"),
                    SubLocation::Remote,
                    Rc::new(Talker { chunks }),
                );
                let agent = Agent::new(kind("parent"), "Delegate.", Rc::new(Delegator));
                Agents::new([agent.with_sub_agent(sub)])
            }),
        );
        let mount = Mount::new("/agents").allow_unauthenticated();
        let request = |method: &str, path: &str, body: String| {
            let request = http::Request::builder().method(method).uri(path);
            request.body(Bytes::from(body)).unwrap()
        };
        let body = json!({"sessionId": "p", "message": "go"}).to_string();
        let start = request("POST", "/agents/parent/start", body);
        assert_eq!(serve(&mount, &*objects, start).await.status(), 200);
        MEMORY.reset_peak_usage();
        let before = MEMORY.current_usage();
        let path = "/agents/parent/sse?sessionId=p&fromSequence=0";
        let response = serve(&mount, &*objects, request("GET", path, String::new())).await;
        let Body::Stream(mut parts) = response.into_body() else {
            return 0;
        };
        let (mut seen, mut origins) = (0, 0);
        while let Some(part) = parts.next().await {
            let part = part.unwrap();
            let count = |name: &[u8]| part.windows(name.len()).filter(|w| *w == name).count();
            seen += count(b"\"remoteSource\"");
            origins += count(b"\"origin\"");
        }
        assert_eq!(seen, usize::try_from(chunks).unwrap(), "all are forwarded");
        assert_eq!(origins, seen, "and all with the origin that they came with");
        MEMORY.peak_usage().saturating_sub(before)
    };
    local.block_on(&runtime, async {
        tokio::task::spawn_local(work).await.unwrap()
    })
}

#[test]
fn nothing_in_the_parent_grows_with_the_length_of_the_child_s_stream() {
    let _alone = COUNTING.lock();
    let short = held(5_000);
    let long = held(100_000);
    println!("5 000 chunks: {short} bytes at most; 100 000 chunks: {long} bytes at most");
    assert!(short > 0 && long > 0);
    // The descendants that are remembered, up to their bound, are all that is more.
    assert!(
        long < short + 160 * 1024,
        "{long} bytes for 100 000 chunks, {short} bytes for 5 000"
    );
}

/// A session that says `chunks` things and has a child beside it: text, patches of both, steps.
struct Feed {
    chunks: u64,
    requests: Rc<Cell<u64>>,
}

/// The length of a step, in chunks.
const STEP: u64 = 100;

/// The chunk at `sequence` of the parent's stream.
fn said(sequence: u64) -> Value {
    // Each step has patches at its 10th, 30th, ... chunk, and the child's at its 20th, 40th, ...
    let (step, at) = (sequence / STEP, sequence % STEP);
    let patch = |agent: &str, ordinal: u64| {
        json!({"type": "state_patch", "agentId": agent, "agentType": "t", "timestamp": 1,
            "step": step + 1, "patchOrdinal": ordinal, "patchBase": ordinal - 1,
            "patches": [{"op": "replace", "path": "/n", "value": ordinal}]})
    };
    let committed = |agent: &str, ordinal: u64| {
        json!({"type": "step_committed", "agentId": agent, "agentType": "t", "timestamp": 1,
            "step": step + 1, "stepCount": step + 1, "checkpointId": "c", "patchOrdinal": ordinal})
    };
    let forwarded = |mut chunk: Value| {
        chunk["origin"] = json!({"sessionId": "child", "streamId": "st_c", "sequence": sequence});
        chunk["remoteSource"] =
            json!({"childSessionId": "child", "childSequence": sequence, "streamId": "st_c"});
        chunk
    };
    match at {
        2 if step == 0 => json!({"type": "subagent_start", "agentId": "s", "agentType": "t",
            "timestamp": 1, "step": 1, "subSessionId": "child", "subAgentType": "t",
            "toolCallId": "c", "remote": true}),
        10 | 30 | 50 | 70 | 90 => patch("s", step * 5 + at / 20 + 1),
        20 | 40 | 60 | 80 => forwarded(patch("child", step * 4 + at / 20)),
        98 => forwarded(committed("child", step * 4 + 4)),
        99 => committed("s", step * 5 + 5),
        _ if at % 2 == 0 => json!({"type": "text_delta", "agentId": "s", "delta": "word ",
            "agentType": "t", "timestamp": 1, "step": step + 1}),
        _ => forwarded(
            json!({"type": "text_delta", "agentId": "child", "delta": "word ",
            "agentType": "t", "timestamp": 1, "step": step + 1}),
        ),
    }
}

impl Feed {
    fn count(&self) {
        self.requests.set(self.requests.get() + 1);
    }
}

impl Transport for Feed {
    fn start(&self, _: StartRequest, _: String) -> Call<'_, StartResponse> {
        Box::pin(async { gone() })
    }
    fn resume(&self, _: ResumeRequest, _: String) -> Call<'_, StartResponse> {
        Box::pin(async { gone() })
    }
    fn interrupt(&self, _: StopRequest) -> Call<'_, StopResponse> {
        Box::pin(async { gone() })
    }
    fn abort(&self, _: StopRequest) -> Call<'_, StopResponse> {
        Box::pin(async { gone() })
    }
    fn status(&self, session: &SessionId) -> Call<'_, StatusResponse> {
        self.count();
        let answer = json!({"sessionId": session.as_str(), "status": "running",
            "isExecuting": true, "stepCount": 0, "updatedAt": 1});
        Box::pin(async move { Ok(serde_json::from_value(answer).unwrap()) })
    }
    fn snapshot(&self, session: &SessionId) -> Call<'_, SnapshotResponse> {
        self.count();
        let stream = if session.as_str() == "s" {
            "st_s"
        } else {
            "st_c"
        };
        // A document of some size, of which little changes.
        let answer = json!({"sessionId": session.as_str(), "streamId": stream,
            "state": {"n": 0, "text": "x".repeat(10_000)}, "streamSequence": 1,
            "oldestRetainedSequence": 0, "stepCount": 0, "patchOrdinal": 0});
        Box::pin(async move { Ok(serde_json::from_value(answer).unwrap()) })
    }
    fn usage(&self, _: &SessionId) -> Call<'_, UsageResponse> {
        Box::pin(async { gone() })
    }
    fn stream(&self, _: &SessionId, from: Position, _: Option<&StreamId>) -> Call<'_, FrameStream> {
        self.count();
        let (chunks, from) = (self.chunks, from.sequence().unwrap_or(0));
        let frames = stream::iter(from + 1..=chunks + 1).map(move |sequence| {
            Ok(if sequence > chunks {
                frame(sequence, chunks, "s")
            } else {
                let chunk = serde_json::from_value(said(sequence)).unwrap();
                Frame::Chunk { sequence, chunk }
            })
        });
        let frames: FrameStream = Box::pin(frames);
        Box::pin(async move { Ok(frames) })
    }
}

/// What following so many chunks took.
struct Took {
    /// Memory at most, in bytes.
    held: usize,
    requests: u64,
    /// The time of following and of reading the stream alone.
    times: (Duration, Duration),
}

fn followed(chunks: u64) -> Took {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    let work = async move {
        let requests = Rc::new(Cell::new(0));
        let feed: Rc<dyn Transport> = Rc::new(Feed {
            chunks,
            requests: requests.clone(),
        });
        let session = SessionId::parse("s").unwrap();
        let begun = Instant::now();
        let mut frames = feed.stream(&session, Position::At(0), None).await.unwrap();
        while frames.next().await.is_some() {}
        let plain = begun.elapsed();
        requests.set(0);

        MEMORY.reset_peak_usage();
        let before = MEMORY.current_usage();
        let begun = Instant::now();
        let clock = LocalRuntime::new(1_700_000_000_000, Rc::new(|_, _| {}));
        let mut follower = Follower::new(
            clock,
            Rc::new(move |_| feed.clone()),
            session,
            AgentType::parse("t").unwrap(),
        );
        let (mut heard, mut exact) = (0, 0);
        while let Some(event) = follower.next().await {
            match event.unwrap() {
                FollowerEvent::Chunk { .. } => heard += 1,
                FollowerEvent::Document(node) => {
                    let status = follower.nodes()[node].document.status();
                    exact += u64::from(matches!(status, Status::Exact { .. }));
                }
                _ => {}
            }
        }
        assert_eq!(heard, chunks, "every chunk once");
        assert!(exact >= 2 * (chunks / STEP), "{exact} times exact");
        Took {
            held: MEMORY.peak_usage().saturating_sub(before),
            requests: requests.get(),
            times: (begun.elapsed(), plain),
        }
    };
    local.block_on(&runtime, async {
        tokio::task::spawn_local(work).await.unwrap()
    })
}

#[test]
fn a_follower_holds_its_documents_and_asks_for_no_more_however_long_the_stream() {
    let _alone = COUNTING.lock();
    let (short, long) = (followed(10_000), followed(100_000));
    for took in [&short, &long] {
        let (follows, reads) = took.times;
        println!(
            "{} bytes at most, {} requests; {follows:?} followed, {reads:?} read alone: {:.2} times",
            took.held,
            took.requests,
            follows.as_secs_f64() / reads.as_secs_f64()
        );
    }
    // Two documents of 10 000 bytes, of which one copy is made while a patch is applied.
    assert!(short.held > 20_000, "{} bytes", short.held);
    assert!(long.held < 200_000, "{} bytes", long.held);
    assert!(long.held < short.held + 8 * 1024);
    // The root's baseline, the stream, the child's baseline, and one more at the end.
    assert_eq!(long.requests, short.requests);
    assert!(long.requests <= 9, "{} requests", long.requests);
}
