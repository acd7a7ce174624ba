#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use futures::stream;
use serde_json::json;

mod endings;

use super::*;
use crate::error::Code;
use crate::protocol::frame::EndFrame;
use crate::protocol::ids::{AgentType, Position};
use crate::protocol::message::{
    ErrorEnvelope, ParentRef, SessionStatus, SnapshotResponse, StartResponse, StatusResponse,
    StopResponse, UsageResponse,
};
use crate::store::{SubLocation, SubRemote};
use crate::transport::testing::{EPOCH, TestRuntime};
use crate::transport::{Call, RetryPolicy, Transport};

const CHILD: &str = "p-remote-c";
const MINUTE: u64 = 60_000;

type Log = Rc<RefCell<Vec<String>>>;

/// The parent: refs and log in memory, every write in one list together with the transport's calls.
struct Parent {
    log: Log,
    runtime: Rc<TestRuntime>,
    stop: StopSignal,
    child: RefCell<Option<SubSessionRecord>>,
    chunks: RefCell<Vec<Value>>,
    commits: Cell<usize>,
    notes: RefCell<Vec<String>>,
    /// Refuses the n-th forward from now on, counted from 0.
    refuse_forward: Cell<Option<usize>>,
}

impl CallHost for Parent {
    fn runtime(&self) -> Rc<dyn Runtime> {
        self.runtime.clone()
    }

    fn stop(&self) -> StopSignal {
        self.stop.clone()
    }

    fn child(&self, id: &SessionId) -> Result<Option<SubSessionRecord>> {
        assert_eq!(id.as_str(), CHILD);
        Ok(self.child.borrow().clone())
    }

    fn open(&self, record: SubSessionRecord) -> Result<()> {
        self.log.borrow_mut().push("open".into());
        assert!(
            self.child.borrow_mut().replace(record).is_none(),
            "opened twice"
        );
        Ok(())
    }

    fn attached(&self, _: &SessionId, stream: &StreamId) -> Result<()> {
        self.log.borrow_mut().push(format!("attached {stream}"));
        let mut child = self.child.borrow_mut();
        child.as_mut().unwrap().remote = Some(SubRemote {
            stream_id: stream.clone(),
            last_sequence: 0,
        });
        Ok(())
    }

    fn forward(
        &self,
        _: &SessionId,
        stream: &StreamId,
        through: Sequence,
        chunks: Vec<String>,
    ) -> Result<()> {
        if self
            .refuse_forward
            .get()
            .is_some_and(|n| n <= self.commits.get())
        {
            return Err(Error::internal("the session is at another epoch"));
        }
        self.commits.set(self.commits.get() + 1);
        let mut child = self.child.borrow_mut();
        let remote = child.as_mut().unwrap().remote.as_mut().unwrap();
        *remote = SubRemote {
            stream_id: stream.clone(),
            last_sequence: through,
        };
        self.chunks.borrow_mut().extend(
            chunks
                .iter()
                .map(|text| serde_json::from_str::<Value>(text).unwrap()),
        );
        Ok(())
    }

    fn announced(&self, child: &SessionId, session_id: &str) -> Result<bool> {
        Ok(self.chunks.borrow().iter().any(|chunk| {
            chunk["subSessionId"] == json!(session_id)
                && chunk["remoteSource"]["childSessionId"] == json!(child)
        }))
    }

    fn note(&self, _: &SessionId, message: &str) {
        self.notes.borrow_mut().push(message.into());
    }
}

/// What a stream does next: wait so many milliseconds, then say this.
type Frames = Vec<(u64, Result<Frame, TransportError>)>;

/// A child by script: each kind of call takes its next answer; `None` hangs for ever.
#[derive(Default)]
struct Child {
    log: Log,
    starts: RefCell<VecDeque<Option<Result<StartResponse, TransportError>>>>,
    start_delay: Cell<u64>,
    resumes: RefCell<VecDeque<Result<StartResponse, TransportError>>>,
    streams: RefCell<VecDeque<Frames>>,
    statuses: RefCell<VecDeque<Option<Result<StatusResponse, TransportError>>>>,
    interrupts: RefCell<VecDeque<Option<Result<StopResponse, TransportError>>>>,
    dropped_streams: Rc<Cell<usize>>,
}

impl Child {
    fn say(&self, what: impl Into<String>) {
        self.log.borrow_mut().push(what.into());
    }
}

async fn scripted<T>(
    answer: Option<Option<Result<T, TransportError>>>,
) -> Result<T, TransportError> {
    match answer.expect("a call beyond the script") {
        Some(answer) => answer,
        None => std::future::pending().await,
    }
}

/// Counts when the stream that holds it is dropped.
struct Held(Rc<Cell<usize>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

impl Transport for Child {
    fn start(&self, request: StartRequest, key: String) -> Call<'_, StartResponse> {
        self.say(format!("start {} {key}", request.session_id));
        let answer = self.starts.borrow_mut().pop_front();
        let delay = Duration::from_millis(self.start_delay.get());
        Box::pin(async move {
            tokio::time::sleep(delay).await;
            scripted(answer).await
        })
    }

    fn resume(&self, request: ResumeRequest, key: String) -> Call<'_, StartResponse> {
        self.say(format!("resume {:?} {key}", request.mode.unwrap()));
        assert!(request.parent.is_some());
        let answer = self.resumes.borrow_mut().pop_front();
        Box::pin(scripted(Some(answer)))
    }

    fn interrupt(&self, request: StopRequest) -> Call<'_, StopResponse> {
        self.say(format!("interrupt {}", request.reason.unwrap()));
        let answer = self.interrupts.borrow_mut().pop_front();
        Box::pin(scripted(answer))
    }

    fn abort(&self, _: StopRequest) -> Call<'_, StopResponse> {
        panic!("a dispatch never aborts")
    }

    fn status(&self, _: &SessionId) -> Call<'_, StatusResponse> {
        self.say("status");
        let answer = self.statuses.borrow_mut().pop_front();
        Box::pin(scripted(answer))
    }

    fn snapshot(&self, session: &SessionId) -> Call<'_, SnapshotResponse> {
        self.say("snapshot");
        let answer = json!({"sessionId": session, "streamId": "st_1", "state": {"phase": "done"},
            "streamSequence": -1, "oldestRetainedSequence": 0, "stepCount": 1});
        Box::pin(async move { Ok(serde_json::from_value(answer).unwrap()) })
    }

    fn usage(&self, session: &SessionId) -> Call<'_, UsageResponse> {
        self.say("usage");
        let answer = UsageResponse {
            session_id: session.to_string(),
            rollup: json!({"steps": 7}),
        };
        Box::pin(async move { Ok(answer) })
    }

    fn stream(
        &self,
        _: &SessionId,
        from: Position,
        stream: Option<&StreamId>,
    ) -> Call<'_, FrameStream> {
        self.say(format!("sse {from} {}", stream.unwrap()));
        let interrupted = self
            .log
            .borrow()
            .iter()
            .any(|line| line.starts_with("interrupt"));
        let frames = self.streams.borrow_mut().pop_front();
        if frames.is_none() && interrupted {
            // The attach that waits for a stopped child's end, where the script has no end for it.
            return Box::pin(async { Err(TransportError::Unreachable("gone".into())) });
        }
        let frames = frames.expect("an attach beyond the script");
        let held = Held(self.dropped_streams.clone());
        Box::pin(async move {
            let frames: FrameStream = Box::pin(stream::unfold(
                (frames.into_iter(), held),
                |mut state| async move {
                    let (delay, frame) = state.0.next()?;
                    if delay > 0 {
                        tokio::time::sleep(Duration::from_millis(delay)).await;
                    }
                    Some((frame, state))
                },
            ));
            Ok(frames)
        })
    }
}

/// A parent and a child, and the terms of their call.
struct World {
    parent: Rc<Parent>,
    child: Rc<Child>,
    resume_dead_producer: bool,
}

impl World {
    fn new(streams: impl IntoIterator<Item = Frames>) -> Self {
        let log = Log::default();
        let parent = Parent {
            log: log.clone(),
            runtime: Rc::new(TestRuntime::new()),
            stop: StopSignal::default(),
            child: RefCell::default(),
            chunks: RefCell::default(),
            commits: Cell::default(),
            notes: RefCell::default(),
            refuse_forward: Cell::default(),
        };
        let child = Child {
            log,
            streams: RefCell::new(streams.into_iter().collect()),
            ..Child::default()
        };
        child.starts.borrow_mut().push_back(Some(Ok(started())));
        Self {
            parent: Rc::new(parent),
            child: Rc::new(child),
            resume_dead_producer: false,
        }
    }

    async fn call(&self) -> Result<CallOutcome> {
        let planner = AgentType::parse("planner").unwrap();
        let mut sub = SubAgent::new(
            "research",
            "…",
            planner,
            SubLocation::Remote,
            self.child.clone(),
        );
        sub.resume_dead_producer = self.resume_dead_producer;
        let session = SessionId::parse(CHILD).unwrap();
        let parent = ParentRef {
            session_id: SessionId::parse("p").unwrap(),
            stream_id: StreamId::parse("st_p").unwrap(),
            tool_call_id: "c".into(),
        };
        let request = StartRequest {
            session_id: session,
            agent_type: None,
            message: "go".into(),
            state: None,
            metadata: None,
            user_id: None,
            tags: None,
            parent: Some(parent),
        };
        let spec = CallSpec {
            tool_call_id: "c".into(),
            request,
            deadline: self.parent.runtime.now() + 15 * MINUTE,
        };
        run_call(self.parent.clone(), Rc::new(sub), spec).await
    }

    async fn outcome(&self) -> CallOutcome {
        self.call().await.unwrap()
    }

    /// Runs the call and sets the stop after so many milliseconds.
    async fn stopped_after(&self, delay: u64) -> CallOutcome {
        let stop = self.parent.stop.clone();
        let timer = async move {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            stop.set();
        };
        futures::future::join(self.outcome(), timer).await.0
    }

    fn log(&self) -> Vec<String> {
        self.parent.log.borrow().clone()
    }

    fn forwarded(&self) -> Vec<u64> {
        let chunks = self.parent.chunks.borrow();
        chunks
            .iter()
            .map(|chunk| chunk["remoteSource"]["childSequence"].as_u64().unwrap())
            .collect()
    }

    fn code(outcome: &CallOutcome) -> &str {
        &outcome.error.as_ref().unwrap().code
    }
}

fn started() -> StartResponse {
    StartResponse {
        session_id: CHILD.into(),
        stream_id: "st_1".into(),
        run_id: None,
    }
}

fn chunk(sequence: u64) -> (u64, Result<Frame, TransportError>) {
    let chunk = json!({"type": "text_delta", "delta": "x", "agentId": CHILD});
    (
        0,
        Ok(Frame::Chunk {
            sequence,
            chunk: serde_json::from_value(chunk).unwrap(),
        }),
    )
}

fn completed() -> (u64, Result<Frame, TransportError>) {
    let end = EndFrame {
        run_id: None,
        status: SessionStatus::Completed,
        output: Some(json!("done")),
        state: Some(json!({})),
        usage: Some(json!({"steps": 1})),
    };
    (0, Ok(Frame::End(end)))
}

fn reset() -> (u64, Result<Frame, TransportError>) {
    (0, Err(TransportError::Unreachable("reset".into())))
}

/// A frame that never comes.
fn hang() -> (u64, Result<Frame, TransportError>) {
    (1000 * 60 * MINUTE, completed().1)
}

fn after(
    delay: u64,
    frame: (u64, Result<Frame, TransportError>),
) -> (u64, Result<Frame, TransportError>) {
    (delay, frame.1)
}

fn status(
    status: SessionStatus,
    is_executing: bool,
) -> Option<Result<StatusResponse, TransportError>> {
    let answer = json!({"sessionId": CHILD, "status": status, "isExecuting": is_executing, "streamId": "st_1"});
    Some(Ok(serde_json::from_value(answer).unwrap()))
}

fn stop_answer() -> Option<Result<StopResponse, TransportError>> {
    Some(Ok(StopResponse {
        session_id: CHILD.into(),
        status: SessionStatus::Interrupted,
        accepted: true,
    }))
}

fn refused(status: u16, code: &str) -> TransportError {
    let envelope = ErrorEnvelope {
        code: code.into(),
        error: "No.".into(),
        detail: None,
        retryable: None,
        stream_id: None,
        run_id: None,
        field: None,
    };
    TransportError::Refused {
        status,
        envelope: Box::new(envelope),
        retry_after: None,
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_goes_from_ref_to_outcome_in_order() {
    let world = World::new([vec![chunk(1), chunk(2), after(10, chunk(3)), completed()]]);
    let outcome = world.outcome().await;
    assert_eq!((outcome.success, outcome.result), (true, json!("done")));
    assert_eq!(
        world.log(),
        [
            "open",
            "start p-remote-c start:p-remote-c",
            "attached st_1",
            "sse 0 st_1"
        ]
    );
    assert_eq!(world.forwarded(), [1, 2, 3]);
    // What is there already shares a commit; what comes later has its own.
    assert_eq!(world.parent.commits.get(), 2);
    let record = world.parent.child.borrow().clone().unwrap();
    assert_eq!(
        (record.tool_call_id.as_str(), record.deadline),
        ("c", EPOCH + 15 * MINUTE)
    );
    assert_eq!(
        (record.status, record.location),
        (SubStatus::Running, SubLocation::Remote)
    );
    assert_eq!(record.remote.unwrap().last_sequence, 3);
    let chunk = world.parent.chunks.borrow()[2].clone();
    assert_eq!(
        chunk["remoteSource"],
        json!({"childSessionId": CHILD, "childSequence": 3, "streamId": "st_1"})
    );
    assert_eq!(
        chunk["origin"],
        json!({"sessionId": CHILD, "streamId": "st_1", "sequence": 3})
    );
    assert_eq!(chunk["agentId"], json!(CHILD));
    assert_eq!(world.child.dropped_streams.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_long_stream_is_committed_in_bounded_batches() {
    let frames = (1..=1000).map(chunk).chain([completed()]).collect();
    let world = World::new([frames]);
    assert!(world.outcome().await.success);
    assert_eq!(world.forwarded(), (1..=1000).collect::<Vec<_>>());
    assert_eq!(
        world.parent.commits.get(),
        1000_usize.div_ceil(BATCH_FRAMES)
    );

    // Large chunks are bounded by bytes: each batch ends with the chunk that takes it over.
    let big = |sequence| {
        let chunk = json!({"type": "text_delta", "delta": "x".repeat(100_000), "agentId": CHILD});
        (
            0,
            Ok(Frame::Chunk {
                sequence,
                chunk: serde_json::from_value(chunk).unwrap(),
            }),
        )
    };
    let world = World::new([(1..=9).map(big).chain([completed()]).collect()]);
    assert!(world.outcome().await.success);
    assert_eq!(world.parent.commits.get(), 3);
}

#[tokio::test(start_paused = true)]
async fn case_01_a_stream_cut_at_every_chunk_is_forwarded_once() {
    for cut in 0..=6_u64 {
        for overlap in [false, true] {
            let first = (1..=cut).map(chunk).chain([reset()]).collect();
            let from = if overlap { 1 } else { cut + 1 };
            let second = (from..=6).map(chunk).chain([completed()]).collect();
            let world = World::new([first, second]);
            assert!(world.outcome().await.success, "cut after {cut}");
            assert_eq!(world.forwarded(), [1, 2, 3, 4, 5, 6], "cut after {cut}");
            assert_eq!(world.log().last().unwrap(), &format!("sse {cut} st_1"));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn case_43_a_stream_without_a_terminal_frame_is_attached_again() {
    let world = World::new([vec![chunk(1)], vec![], vec![chunk(2), completed()]]);
    assert!(world.outcome().await.success);
    assert_eq!(world.forwarded(), [1, 2]);
    assert_eq!(world.log()[3..], ["sse 0 st_1", "sse 1 st_1", "sse 1 st_1"]);
    // One base, then sixteen, each a tenth longer by chance.
    assert_eq!(world.parent.runtime.elapsed(), 550 + 8800);
}

#[tokio::test(start_paused = true)]
async fn case_07_a_parent_that_was_killed_goes_on_from_its_cursor() {
    let world = World::new([vec![chunk(4), completed()]]);
    *world.parent.child.borrow_mut() = Some(SubSessionRecord {
        remote: Some(SubRemote {
            stream_id: StreamId::parse("st_1").unwrap(),
            last_sequence: 3,
        }),
        ..stored_ref()
    });
    assert!(world.outcome().await.success);
    assert_eq!(world.log(), ["sse 3 st_1"]);
    assert_eq!(world.forwarded(), [4]);

    // Killed between the ref and the start's answer: the same start again, under the same key.
    let world = World::new([vec![completed()]]);
    *world.parent.child.borrow_mut() = Some(stored_ref());
    assert!(world.outcome().await.success);
    assert_eq!(world.log()[0], "start p-remote-c start:p-remote-c");
}

fn stored_ref() -> SubSessionRecord {
    SubSessionRecord {
        sub_session_id: SessionId::parse(CHILD).unwrap(),
        agent_type: AgentType::parse("planner").unwrap(),
        tool_call_id: "c".into(),
        location: SubLocation::Remote,
        status: SubStatus::Running,
        remote: None,
        deadline: EPOCH + 2 * MINUTE,
        created_at: EPOCH,
    }
}
