//! The packaged observer: it reads the baselines, attaches, follows the tree, takes new snapshots
//! when a document wants one, and reconnects.
//!
//! It decides nothing about a state: that is [`reconstruct`](crate::reconstruct)'s. It holds a
//! document for each session of the tree and nothing else that grows, however long the stream. It
//! implements the observer's side of section 6 over any [`Transport`].

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::future::{Either, LocalBoxFuture, select};
use futures::stream::FuturesUnordered;

use crate::platform::Runtime;
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::ids::{AgentType, Position, Sequence, SessionId, StreamId};
use crate::reconstruct::{Document, Heard, Reading};
use crate::transport::{FrameStream, Transport, TransportError};

mod baseline;
mod descendants;
mod reading;

use reading::Arrival;

/// Sessions of a tree that are followed at most; chunks of others are passed on all the same.
const MOST_NODES: usize = 1024;

/// How often a snapshot is tried again before its document waits for the next boundary.
const SNAPSHOT_RETRIES: u32 = 4;

/// The longest wait that doubling comes to.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// Finds the way to sessions of an agent type. One that leads to a projected mount must take
/// answers of any mount.
pub type Routes = Rc<dyn Fn(&AgentType) -> Rc<dyn Transport>>;

/// One session of the tree.
#[derive(Clone, Debug)]
pub struct Node {
    /// The session.
    pub session: SessionId,
    /// Its agent type.
    pub agent_type: AgentType,
    /// The session that called it; the root has none.
    pub parent: Option<String>,
    /// The call that made it.
    pub tool_call_id: Option<String>,
    /// Whether it lives in another service than its parent.
    pub remote: bool,
    /// Whether its call succeeded; none while the call is open.
    pub succeeded: Option<bool>,
    /// Its state.
    pub document: Document,
}

/// What a follower tells, in order. Nodes are named by their place in [`Follower::nodes`].
#[derive(Clone, Debug, PartialEq)]
pub enum FollowerEvent {
    /// A session was announced.
    Node(usize),
    /// A document has another state or status.
    Document(usize),
    /// A chunk of the stream; its `agentId` says whose.
    Chunk {
        /// Its sequence in the followed stream.
        sequence: Sequence,
        /// The chunk.
        chunk: RawChunk,
    },
    /// The session's id has begun another life: the root alone is left of the tree, and the new
    /// stream is read from what it holds.
    Restarted,
    /// The replay is done.
    CaughtUp,
    /// The stream was dropped and is opened again after the wait.
    Reconnecting {
        /// Why.
        error: TransportError,
        /// The wait.
        wait: Duration,
    },
    /// The tree could not be read: sessions that were announced in a part of the log that is no
    /// longer kept are missing until they are heard of.
    NoTree {
        /// Why.
        error: TransportError,
    },
    /// A snapshot could not be read; the document stays as it is until its next boundary.
    NoSnapshot {
        /// Whose.
        node: usize,
        /// Why.
        error: TransportError,
    },
    /// The run ended, paused or was interrupted. Nothing follows.
    End(EndFrame),
    /// The run failed. Nothing follows.
    Failed(ErrorFrame),
}

/// Where the replay of a follower begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Replay {
    /// With the whole log that is kept: the tree and everything that was said in it.
    #[default]
    Log,
    /// At the baseline: what is announced from there on.
    Baseline,
}

/// Follows one session and the tree below it.
pub struct Follower {
    runtime: Rc<dyn Runtime>,
    routes: Routes,
    from: Replay,
    backoff: Duration,
    snapshots_at_once: usize,
    nodes: Vec<Node>,
    places: BTreeMap<String, usize>,
    cursor: Position,
    stream: Option<StreamId>,
    frames: Option<FrameStream>,
    reading: FuturesUnordered<LocalBoxFuture<'static, Arrival>>,
    /// Whether the log may have announced sessions in what it no longer holds.
    wants_tree: bool,
    told: VecDeque<FollowerEvent>,
    last: Option<FollowerEvent>,
    failures: u32,
    /// How often the log was found trimmed; a read of the root from before does not count.
    truncations: u64,
    phase: Phase,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first baseline is still to be read.
    New,
    /// Attached, or to be attached.
    Following,
    /// Nothing follows.
    Over,
}

impl Follower {
    /// A follower of `session`. It begins to read at the first [`Self::next`].
    #[must_use]
    pub fn new(
        runtime: Rc<dyn Runtime>,
        routes: Routes,
        session: SessionId,
        agent_type: AgentType,
    ) -> Self {
        let mut follower = Self {
            runtime,
            routes,
            from: Replay::default(),
            backoff: Duration::from_millis(500),
            snapshots_at_once: 4,
            nodes: Vec::new(),
            places: BTreeMap::new(),
            cursor: Position::None,
            stream: None,
            frames: None,
            reading: FuturesUnordered::new(),
            wants_tree: false,
            told: VecDeque::new(),
            last: None,
            failures: 0,
            truncations: 0,
            phase: Phase::New,
        };
        follower.add(session, agent_type, None, None, false);
        follower
    }

    /// Sets where the replay begins. Default: with the whole log.
    #[must_use]
    pub fn with_replay(mut self, from: Replay) -> Self {
        self.from = from;
        self
    }

    /// Sets the first wait before the stream is opened again; it doubles up to ten seconds.
    /// Default: 500 ms.
    #[must_use]
    pub fn with_backoff(mut self, backoff: Duration) -> Self {
        self.backoff = backoff;
        self
    }

    /// Sets how many snapshots are read at once. Default: 4.
    #[must_use]
    pub fn with_snapshots_at_once(mut self, many: usize) -> Self {
        self.snapshots_at_once = many.max(1);
        self
    }

    /// The sessions of the tree, parents before children; the root is the first.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The next event; `None` once the run has ended and everything was told. Dropping the future
    /// loses nothing.
    ///
    /// # Errors
    /// What refuses the session for good: `NOT_FOUND`, missing credentials, another major version.
    pub async fn next(&mut self) -> Option<Result<FollowerEvent, TransportError>> {
        loop {
            if let Some(event) = self.told.pop_front() {
                return Some(Ok(event));
            }
            match self.phase {
                Phase::Over => return None,
                Phase::New => {
                    if let Err(error) = self.first_baseline().await {
                        self.phase = Phase::Over;
                        return Some(Err(error));
                    }
                }
                Phase::Following => {
                    if let Err(error) = self.advance().await {
                        self.phase = Phase::Over;
                        return Some(Err(error));
                    }
                }
            }
        }
    }

    /// Without the first baseline there is nothing to follow.
    async fn first_baseline(&mut self) -> Result<(), TransportError> {
        let read = self.read(0).await;
        let (snapshot, ended) = read.result?;
        if let Some(root) = self.nodes.first_mut() {
            root.document.baseline(&snapshot, ended);
            self.cursor = root.document.attach_at();
        }
        if self.from == Replay::Log {
            self.read_from_floor(snapshot.oldest_retained_sequence);
            self.mind_hole(&snapshot);
        }
        self.stream = StreamId::parse(&snapshot.stream_id).ok();
        self.phase = Phase::Following;
        self.told
            .extend([FollowerEvent::Node(0), FollowerEvent::Document(0)]);
        Ok(())
    }

    /// One thing happens: a stream is attached, a frame comes, a snapshot comes.
    async fn advance(&mut self) -> Result<(), TransportError> {
        self.ask();
        if let Some(last) = self.last.take_if(|_| self.reading.is_empty()) {
            self.told.push_back(last);
            self.phase = Phase::Over;
            return Ok(());
        }
        if self.last.is_some() {
            if let Some(read) = self.reading.next().await {
                self.arrived(read);
            }
            return Ok(());
        }
        let Some(frames) = &mut self.frames else {
            return self.attach().await;
        };
        if self.reading.is_empty() {
            let frame = frames.next().await;
            return self.heard(frame).await;
        }
        // Snapshots first: they are few, and a log that is read without a pause would keep them out.
        match select(self.reading.next(), frames.next()).await {
            Either::Left((read, _)) => {
                if let Some(read) = read {
                    self.arrived(read);
                }
                Ok(())
            }
            Either::Right((frame, _)) => self.heard(frame).await,
        }
    }

    async fn attach(&mut self) -> Result<(), TransportError> {
        let Some(root) = self.nodes.first() else {
            return Ok(());
        };
        let transport = (self.routes)(&root.agent_type);
        let session = root.session.clone();
        match transport
            .stream(&session, self.cursor, self.stream.as_ref())
            .await
        {
            Ok(frames) => {
                self.frames = Some(frames);
                Ok(())
            }
            Err(error) => self.dropped(error).await,
        }
    }

    /// The stream is gone; it is opened again after a while, unless the refusal is for good.
    async fn dropped(&mut self, error: TransportError) -> Result<(), TransportError> {
        self.frames = None;
        if !error.may_pass() {
            return Err(error);
        }
        let wait = wait(self.backoff, self.failures, &error);
        self.failures = self.failures.saturating_add(1);
        self.told
            .push_back(FollowerEvent::Reconnecting { error, wait });
        self.runtime.sleep(wait).await;
        Ok(())
    }

    async fn heard(
        &mut self,
        frame: Option<Result<Frame, TransportError>>,
    ) -> Result<(), TransportError> {
        let ended = || TransportError::Unreachable("the stream ended without its end".into());
        let frame = match frame.unwrap_or_else(|| Err(ended())) {
            Ok(frame) => frame,
            Err(error) => return self.dropped(error).await,
        };
        match frame {
            Frame::Error(error) if error.recoverable => {
                let error = TransportError::Unreachable(error.error);
                return self.dropped(error).await;
            }
            Frame::Error(error) if error.code == "TRUNCATED" => return self.truncated(error).await,
            Frame::Chunk { sequence, chunk } => {
                self.failures = 0;
                self.chunk(sequence, chunk);
            }
            Frame::CaughtUp { .. } => {
                self.failures = 0;
                self.told.push_back(FollowerEvent::CaughtUp);
            }
            Frame::End(_) | Frame::Error(_) => self.over(frame),
        }
        Ok(())
    }

    fn chunk(&mut self, sequence: Sequence, chunk: RawChunk) {
        if self.cursor.sequence().is_none_or(|read| read < sequence) {
            self.cursor = Position::At(sequence);
        }
        let child = chunk.text("subSessionId").map(str::to_owned);
        let announced = match chunk.kind() {
            "subagent_start" => child.as_deref().and_then(|id| self.announced(id, &chunk)),
            "subagent_end" => {
                let succeeded = chunk.0.get("success").and_then(serde_json::Value::as_bool);
                let place = child.as_deref().and_then(|id| self.places.get(id));
                if let Some(node) = place.and_then(|place| self.nodes.get_mut(*place)) {
                    node.succeeded = Some(succeeded == Some(true));
                }
                None
            }
            _ => None,
        };
        let mut changed = Vec::new();
        let own = chunk.agent_id().map(str::to_owned);
        let concerned = own
            .iter()
            .chain(child.iter().filter(|id| Some(*id) != own.as_ref()));
        let places: Vec<usize> = concerned
            .filter_map(|id| self.places.get(id).copied())
            .collect();
        for place in places {
            if self.observe(place, sequence, &chunk) != Heard::Nothing {
                changed.push(FollowerEvent::Document(place));
            }
        }
        self.told
            .push_back(FollowerEvent::Chunk { sequence, chunk });
        self.told.extend(announced.map(FollowerEvent::Node));
        self.told.extend(changed);
    }

    fn observe(&mut self, place: usize, sequence: Sequence, chunk: &RawChunk) -> Heard {
        let Some(root) = self.nodes.first().map(|root| root.session.clone()) else {
            return Heard::Nothing;
        };
        let reading = Reading {
            session: root.as_str(),
            stream: self.stream.as_ref().map_or("", StreamId::as_str),
        };
        match self.nodes.get_mut(place) {
            Some(node) => node.document.observe(reading, sequence, chunk),
            None => Heard::Nothing,
        }
    }

    /// A node for a session that a chunk announces, if it is news and its names can be read.
    fn announced(&mut self, id: &str, chunk: &RawChunk) -> Option<usize> {
        if self.places.contains_key(id) || self.nodes.len() >= MOST_NODES {
            return None;
        }
        let session = SessionId::parse(id).ok()?;
        let agent_type = AgentType::parse(chunk.text("subAgentType")?).ok()?;
        let parent = chunk.agent_id().map(str::to_owned);
        let call = chunk.text("toolCallId").map(str::to_owned);
        let remote = chunk.0.get("remote").and_then(serde_json::Value::as_bool);
        Some(self.add(session, agent_type, parent, call, remote == Some(true)))
    }

    fn add(
        &mut self,
        session: SessionId,
        agent_type: AgentType,
        parent: Option<String>,
        tool_call_id: Option<String>,
        remote: bool,
    ) -> usize {
        let place = self.nodes.len();
        self.places.insert(session.to_string(), place);
        self.nodes.push(Node {
            document: Document::new(session.as_str()),
            session,
            agent_type,
            parent,
            tool_call_id,
            remote,
            succeeded: None,
        });
        place
    }

    /// The run has ended: each document that is not the last one is read once more.
    fn over(&mut self, frame: Frame) {
        self.frames = None;
        let (root, others) = self.nodes.split_at_mut(1);
        for root in root {
            root.document.observe_end(&frame);
        }
        for node in others {
            if *node.document.status() != crate::reconstruct::Status::Final {
                node.document.boundary();
            }
        }
        self.told.push_back(FollowerEvent::Document(0));
        self.last = match frame {
            Frame::End(end) => Some(FollowerEvent::End(end)),
            Frame::Error(error) => Some(FollowerEvent::Failed(error)),
            Frame::Chunk { .. } | Frame::CaughtUp { .. } => None,
        };
    }

    /// The cursor is not in the log any more: a new baseline, and on from what the log still holds,
    /// which may announce sessions. A document leaves alone what it has or what is void.
    async fn truncated(&mut self, error: ErrorFrame) -> Result<(), TransportError> {
        self.frames = None;
        // A read of the root that is under way may be older than what is told here.
        self.truncations = self.truncations.wrapping_add(1);
        let told = match (error.floor, error.stream_id.clone()) {
            (Some(floor), Some(stream)) => Some((stream, floor)),
            _ => None,
        };
        if let Some(root) = self.nodes.first_mut() {
            root.document.no_snapshot();
            root.document.observe_end(&Frame::Error(error));
        }
        self.told.push_back(FollowerEvent::Document(0));
        if let Some(before) = self.failures.checked_sub(1) {
            self.runtime.sleep(doubled(self.backoff, before)).await;
        }
        self.failures = self.failures.saturating_add(1);
        let (snapshot, ended) = match self.read(0).await.result {
            Ok(read) => read,
            Err(error) => return self.dropped(error).await,
        };
        if let Some(root) = self.nodes.first_mut() {
            let _ = root.document.take_request();
            root.document.baseline(&snapshot, ended);
        }
        if self.is_another_life(&snapshot) {
            self.restart(&snapshot);
        }
        let floor = told
            .filter(|(stream, _)| *stream == snapshot.stream_id)
            .map_or(0, |(_, floor)| floor)
            .max(snapshot.oldest_retained_sequence);
        self.read_from_floor(floor);
        self.mind_hole(&snapshot);
        self.told.push_back(FollowerEvent::Document(0));
        Ok(())
    }
}

fn wait(backoff: Duration, failures: u32, error: &TransportError) -> Duration {
    let asked = error.retry_after().map_or(0, u64::from);
    doubled(backoff, failures).max(Duration::from_secs(asked))
}

fn doubled(backoff: Duration, failures: u32) -> Duration {
    let doubled = backoff.saturating_mul(2u32.saturating_pow(failures));
    doubled.min(LONGEST_WAIT)
}
