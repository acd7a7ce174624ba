//! Nothing in a parent's memory grows with the length of its child's stream.
//!
//! The child is a transport that makes up its chunks as they are read, and SQLite's own memory is
//! not counted: what is counted is what the parent holds.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, missing_docs)]

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use peak_alloc::PeakAlloc;
use remote_agents::agent::SubAgent;
use remote_agents::agent::model::{
    LanguageModel, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::http::Body;
use remote_agents::mount::{Mount, serve};
use remote_agents::native::LocalObjects;
use remote_agents::protocol::frame::{EndFrame, Frame};
use remote_agents::protocol::ids::{AgentType, Position, SessionId, StreamId};
use remote_agents::protocol::message::{
    ResumeRequest, SessionStatus, SnapshotResponse, StartRequest, StartResponse, StatusResponse,
    StopRequest, StopResponse, UsageResponse,
};
use remote_agents::store::{MessageRecord, SubLocation};
use remote_agents::transport::{Call, FrameStream, Transport, TransportError};
use remote_agents::{Agent, Agents};
use serde_json::json;

#[path = "stories/paired.rs"]
#[allow(dead_code, unreachable_pub)] // It is for others too.
mod paired;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

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
