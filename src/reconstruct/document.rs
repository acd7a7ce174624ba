//! One session's state as an observer rebuilds it.
//!
//! A document is told baselines, chunks and ends, and says what it is: exact at a step, within one,
//! stale, or final. It never guesses: what cannot be aligned makes it stale, and it asks for a new
//! snapshot at once, then at the session's next boundary, one at a time. It holds the state and a
//! few numbers, however long the stream. Implements section 6.

use serde::Deserialize as _;
use serde_json::Value;

use super::place::{Place, Reading, place};
use super::rules::{Rule, Rules};
use crate::protocol::chunk::{ChunkBody, PatchOperation, RawChunk};
use crate::protocol::frame::Frame;
use crate::protocol::ids::{Position, Sequence};
use crate::protocol::message::{SessionStatus, SnapshotResponse};
use crate::session::patch;

/// What a document's state is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// No baseline yet, or one without a position: no patch is applied to it.
    Unpinned,
    /// The state equals the session's committed state after this many steps.
    Exact {
        /// Committed steps.
        step: u64,
    },
    /// Patches of a step under way are in it. Between tools that write the same key it may differ
    /// from what the step will commit.
    InStep,
    /// It stands still until a new snapshot comes.
    Stale(Stale),
    /// The session's last state: its run has ended.
    Final,
}

/// Why a document is stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stale {
    /// A step was discarded after the baseline.
    Discarded,
    /// The session, or a forwarder in its name, asked for it.
    Resync,
    /// Part of the log is gone.
    Truncated,
    /// The session has another stream than the baseline's.
    NewStream,
    /// A patch was made on top of one that was not seen.
    Gap,
    /// A patch does not apply.
    Diverged,
    /// The patches come without a place in the session's own stream.
    NestedDescendant,
    /// The session goes on after its end.
    Reopened,
}

/// What a chunk did to a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing: it is of another session, known already, or no business of the state's.
    Nothing,
    /// A patch was applied.
    Patched,
    /// The status changed.
    Status,
}

/// A session's state, rebuilt from a baseline and a stream: the session's own, or any ancestor's.
#[derive(Clone, Debug)]
pub struct Document {
    rules: Rules,
    session: String,
    stream: Option<String>,
    state: Value,
    status: Status,
    /// The projection that the baseline came through; `None` for the session's own state.
    projection: Option<String>,
    /// The last patch in the state; `None` where the producer numbers none.
    ordinal: Option<u64>,
    /// What the baseline covers of the session's own stream.
    covered: Sequence,
    /// The highest place of a forwarded chunk that was seen.
    highest: Sequence,
    /// How far the session's own stream was followed without a gap since the baseline.
    read: Sequence,
    /// The highest place of a trigger: what lies before it may be void.
    voided: Sequence,
    /// The baseline's own position.
    pinned: Sequence,
    /// The highest place of a resync: what lies before it may be missing.
    missing: Sequence,
    /// Another stream that a chunk was read of, until a snapshot tells which is the newer.
    foreign: Option<String>,
    /// The stream that is known to be over.
    past: Option<String>,
    ended: bool,
    request: Request,
}

/// Where the asking for a snapshot stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// Not asked, and may be at once.
    Idle,
    /// Wanted.
    Wanted,
    /// Under way; `again` when something came meanwhile that it may not cover.
    UnderWay { again: bool },
    /// One was taken since the last boundary for something that was missing, or none could be
    /// taken; the next one waits for a boundary.
    Spent,
}

impl Document {
    /// A document without a baseline; it wants one.
    #[must_use]
    pub fn new(session: impl Into<String>) -> Self {
        Self {
            rules: Rules::default(),
            session: session.into(),
            stream: None,
            state: Value::Null,
            status: Status::Unpinned,
            projection: None,
            ordinal: None,
            covered: 0,
            highest: 0,
            read: 0,
            voided: 0,
            pinned: 0,
            missing: 0,
            foreign: None,
            past: None,
            ended: false,
            request: Request::Wanted,
        }
    }

    /// The session whose state this is.
    #[must_use]
    pub fn session(&self) -> &str {
        &self.session
    }

    /// The state; `null` before the first baseline.
    #[must_use]
    pub fn state(&self) -> &Value {
        &self.state
    }

    /// What the state is.
    #[must_use]
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Where the session's own stream is to be attached, exclusive: at the baseline's position, or
    /// at a later trigger's. None while there is no baseline with a position.
    #[must_use]
    pub fn attach_at(&self) -> Position {
        match self.status {
            Status::Unpinned | Status::Final => Position::None,
            _ => Position::At(self.covered),
        }
    }

    /// Whether a snapshot is to be taken now. It counts as under way from here on: give it to
    /// [`Self::baseline`], or say [`Self::no_snapshot`].
    #[must_use]
    pub fn take_request(&mut self) -> bool {
        let wanted = self.request == Request::Wanted;
        if wanted {
            self.request = Request::UnderWay { again: false };
        }
        wanted
    }

    /// A snapshot could not be taken: the next one is asked for at a boundary.
    pub fn no_snapshot(&mut self) {
        if let Request::UnderWay { again } = self.request {
            self.request = if again {
                Request::Wanted
            } else {
                Request::Spent
            };
        }
    }

    /// Takes a snapshot as the new baseline; one of another session is ignored. `ended` tells that
    /// the session was completed or failed before the snapshot was read.
    pub fn baseline(&mut self, snapshot: &SnapshotResponse, ended: bool) {
        if snapshot.session_id != self.session && self.rules.hold(Rule::OwnBaseline) {
            return;
        }
        let again = matches!(self.request, Request::UnderWay { again: true })
            && self.rules.hold(Rule::AskAgain);
        // Where something was missing once it may be missing again: that waits for a boundary.
        let missing = matches!(
            self.status,
            Status::Stale(Stale::Gap | Stale::Diverged | Stale::NestedDescendant)
        ) && self.rules.hold(Rule::AskOnce);
        self.request = match (again, missing) {
            (true, _) => Request::Wanted,
            (false, true) => Request::Spent,
            (false, false) => Request::Idle,
        };
        let is_same_stream = self.stream.as_deref() == Some(&snapshot.stream_id);
        if is_same_stream && self.status == Status::Final && self.rules.hold(Rule::FinalStays) {
            // It was read before the end came, or says the same.
            return;
        }
        // It was asked for after the other stream's chunk was read, so it tells which is the newer.
        let foreign = self.foreign.take_if(|_| !again);
        self.past = foreign
            .filter(|foreign| *foreign != snapshot.stream_id)
            .or_else(|| self.past.take());
        if !is_same_stream {
            self.past = self
                .stream
                .replace(snapshot.stream_id.clone())
                .or(self.past.take());
            if self.rules.hold(Rule::FreshPlaces) {
                self.highest = 0;
                self.read = 0;
                self.voided = 0;
                self.missing = 0;
            }
        }
        self.state = snapshot.state.clone();
        self.projection.clone_from(&snapshot.projection);
        self.ordinal = snapshot.patch_ordinal;
        self.status = match snapshot.stream_sequence {
            Position::At(sequence) => {
                self.ended = false;
                self.pinned = sequence;
                // What a trigger voided is never read again.
                self.covered = if self.rules.hold(Rule::Voided) {
                    sequence.max(self.voided)
                } else {
                    sequence
                };
                self.read = self.covered;
                Status::Exact {
                    step: snapshot.step_count,
                }
            }
            // One that was under way when the end came may be older.
            Position::None if ended || (self.ended && !again) => Status::Final,
            Position::None if !self.rules.hold(Rule::FinalEnded) => Status::Final,
            Position::None => Status::Unpinned,
        };
    }

    /// Takes a chunk in that was read at `sequence` of a stream: the session's own or an ancestor's.
    pub fn observe(&mut self, reading: Reading<'_>, sequence: Sequence, chunk: &RawChunk) -> Heard {
        if chunk.kind() == "subagent_end"
            && chunk.text("subSessionId") == Some(self.session.as_str())
            && self.rules.hold(Rule::CallBoundary)
        {
            return self.boundary();
        }
        if chunk.agent_id() != Some(self.session.as_str()) && self.rules.hold(Rule::Agent) {
            return Heard::Nothing;
        }
        let Some(place) = place(self.rules, reading, sequence, chunk) else {
            return self.observe_unplaced(chunk);
        };
        if self.stream.as_deref() != Some(&place.stream) {
            return self.observe_placed(&place, chunk);
        }
        if !place.forwarded {
            // Between two baselines the session's own stream only goes forward.
            if place.sequence <= self.read && self.rules.hold(Rule::OwnOnce) {
                return Heard::Nothing;
            }
            self.read = place.sequence;
            return self.observe_placed(&place, chunk);
        }
        if place.sequence <= self.highest && self.rules.hold(Rule::ForwardedOnce) {
            return Heard::Nothing;
        }
        self.highest = place.sequence;
        // Where patches are not numbered, the places of the chunks are: a forwarder passes on all
        // that it reads, so one that is missing between the baseline and here was missed, or came
        // while the document was stale.
        let follows = matches!(self.status, Status::Exact { .. } | Status::InStep);
        if self.ordinal.is_none() && follows && place.sequence > self.covered {
            if self.rules.hold(Rule::NoHole) && place.sequence > self.read.saturating_add(1) {
                self.stale(Stale::Gap);
            } else {
                self.read = place.sequence;
            }
        }
        self.observe_placed(&place, chunk)
    }

    /// Takes a terminal frame of the session's own stream in.
    pub fn observe_end(&mut self, frame: &Frame) -> Heard {
        match frame {
            Frame::End(_) if !self.rules.hold(Rule::EndBoundary) => Heard::Nothing,
            Frame::End(end) if end.status != SessionStatus::Completed => self.boundary(),
            Frame::End(end) => {
                self.ended = true;
                match &end.state {
                    Some(state) => {
                        self.state = state.clone();
                        self.status = Status::Final;
                        self.request = Request::Spent;
                        Heard::Status
                    }
                    None => self.ask(),
                }
            }
            Frame::Error(error) if error.code == "TRUNCATED" => {
                self.trigger(Rule::Truncated, Stale::Truncated, 0)
            }
            Frame::Error(error) if error.recoverable => Heard::Nothing,
            Frame::Error(_) => {
                self.ended = true;
                self.ask()
            }
            Frame::Chunk { .. } | Frame::CaughtUp { .. } => Heard::Nothing,
        }
    }

    /// The stream that was read is over, or the session's call is: a document that is not exact
    /// asks for a snapshot.
    pub fn boundary(&mut self) -> Heard {
        match self.request {
            Request::UnderWay { .. } => self.request = Request::UnderWay { again: true },
            Request::Wanted => {}
            Request::Idle | Request::Spent => self.request = Request::Wanted,
        }
        Heard::Nothing
    }

    fn observe_placed(&mut self, place: &Place, chunk: &RawChunk) -> Heard {
        let kind = chunk.kind();
        if self.stream.as_deref() != Some(&place.stream) && self.rules.hold(Rule::SameStream) {
            // Another life of the session; nothing of it fits on this baseline.
            let new = matches!(
                kind,
                "run_started" | "run_resumed" | "state_patch" | "step_committed" | "stream_resync"
            );
            if self.past.as_deref() == Some(&place.stream) && self.rules.hold(Rule::PastStream) {
                return Heard::Nothing;
            }
            return match self.stream {
                Some(_) if new && self.status != Status::Stale(Stale::NewStream) => {
                    self.foreign = Some(place.stream.clone());
                    self.trigger(Rule::NewStream, Stale::NewStream, 0)
                }
                _ => Heard::Nothing,
            };
        }
        match self.status {
            Status::Unpinned | Status::Final if self.rules.hold(Rule::Unpinned) => {
                return self.observe_unpinned(place, kind);
            }
            _ if place.sequence <= self.covered && self.rules.hold(Rule::Covered) => {
                return Heard::Nothing;
            }
            _ => {}
        }
        let follows = matches!(self.status, Status::Exact { .. } | Status::InStep);
        // Ordinals tell what a resync skipped. Without them, what came before it may be missing
        // from every baseline of before it.
        let misses = self.ordinal.is_none()
            && self.projection.is_none()
            && follows
            && self.pinned < self.missing;
        match kind {
            "state_patch" if misses => self.stale(Stale::Gap),
            "step_committed" if misses => {
                self.stale(Stale::Gap);
                self.ask()
            }
            "state_patch" => self.patch(chunk),
            "step_committed" => self.committed(place, chunk),
            // What an entry has changed of the state, a projected stream does not tell.
            "run_resumed" if self.projection.is_some() => {
                self.trigger(Rule::Reopened, Stale::Reopened, place.sequence)
            }
            "step_discarded" if self.projection.is_some() => Heard::Nothing,
            "step_discarded" => self.trigger(Rule::Discarded, Stale::Discarded, place.sequence),
            "stream_resync" => {
                if self.rules.hold(Rule::ResyncHole) {
                    self.missing = self.missing.max(place.sequence);
                }
                self.trigger(Rule::Resync, Stale::Resync, place.sequence)
            }
            _ => Heard::Nothing,
        }
    }

    /// Against a baseline without a position nothing is applied: what it holds cannot be known.
    fn observe_unpinned(&mut self, place: &Place, kind: &str) -> Heard {
        match kind {
            "run_started" | "run_resumed" if self.status == Status::Final => {
                self.ended = false;
                self.trigger(Rule::Reopened, Stale::Reopened, place.sequence)
            }
            // A last state stays until the session goes on; what led to it is read in every replay.
            "step_committed"
                if self.status == Status::Final && self.rules.hold(Rule::FinalCalm) =>
            {
                Heard::Nothing
            }
            "step_committed" | "run_started" | "run_resumed"
                if self.rules.hold(Rule::UnpinnedBoundary) =>
            {
                self.boundary()
            }
            _ => Heard::Nothing,
        }
    }

    /// A chunk of the session whose place in its own stream nobody tells.
    fn observe_unplaced(&mut self, chunk: &RawChunk) -> Heard {
        match (chunk.kind(), &self.status) {
            (_, Status::Unpinned | Status::Final) => Heard::Nothing,
            // Patches that the producer numbers are told apart from others by their number.
            ("state_patch", _)
                if self.ordinal.is_some()
                    && !chunk.0.contains_key("patchOrdinal")
                    && self.rules.hold(Rule::UnplacedStreamer) =>
            {
                Heard::Nothing
            }
            // No snapshot would make the next one alignable: only a boundary is worth another.
            ("state_patch" | "step_discarded" | "stream_resync", status)
                if *status != Status::Stale(Stale::NestedDescendant)
                    && self.rules.hold(Rule::Unplaced) =>
            {
                self.status = Status::Stale(Stale::NestedDescendant);
                Heard::Status
            }
            ("step_committed", Status::Stale(_)) => self.boundary(),
            _ => Heard::Nothing,
        }
    }

    fn patch(&mut self, chunk: &RawChunk) -> Heard {
        if matches!(self.status, Status::Stale(_)) && self.rules.hold(Rule::StaleDrops) {
            return Heard::Nothing;
        }
        let Ok(ChunkBody::StatePatch {
            patches,
            patch_ordinal,
            patch_base,
        }) = chunk.decode().map(|chunk| chunk.body)
        else {
            return self.stale(Stale::Diverged);
        };
        // It is of the session's own state, and a projection is another view of it.
        if self.projection.is_some() && (self.ordinal.is_none() || patch_ordinal.is_some()) {
            return self.stale(Stale::Gap);
        }
        let Some(own) = self.ordinal else {
            return self.apply(&patches, None);
        };
        match (patch_ordinal, patch_base) {
            // A numbering session's patch without a number is a custom streamer's.
            (None, _) if self.rules.hold(Rule::Streamer) => Heard::Nothing,
            (Some(new), _) if new <= own && self.rules.hold(Rule::Ordinal) => Heard::Nothing,
            (_, base) if base == Some(own) || !self.rules.hold(Rule::Base) => {
                self.apply(&patches, patch_ordinal)
            }
            _ => self.stale(Stale::Gap),
        }
    }

    fn apply(&mut self, patches: &[PatchOperation], ordinal: Option<u64>) -> Heard {
        match patch::apply(&self.state, patches) {
            Ok(state) => {
                self.state = state;
                self.ordinal = ordinal.or(self.ordinal);
                self.status = Status::InStep;
                Heard::Patched
            }
            Err(_) if self.rules.hold(Rule::Applies) => self.stale(Stale::Diverged),
            Err(_) => Heard::Nothing,
        }
    }

    fn committed(&mut self, place: &Place, chunk: &RawChunk) -> Heard {
        if matches!(self.status, Status::Stale(_)) && self.rules.hold(Rule::StaleCommit) {
            return if self.rules.hold(Rule::StepBoundary) {
                self.boundary()
            } else {
                Heard::Nothing
            };
        }
        let told = |field| chunk.0.get(field).and_then(Value::as_u64);
        let step = told("stepCount").unwrap_or_default();
        if self.request == Request::Spent && self.rules.hold(Rule::AskAnew) {
            self.request = Request::Idle;
        }
        let ordinal = told("patchOrdinal");
        if self.projection.is_some() {
            // Only the mount of the session itself tells what a step changed.
            if !place.forwarded && chunk.0.contains_key("projection") {
                return self.live(place, chunk, step);
            }
            // Without that, a step that changed nothing is known by its ordinal alone.
            if ordinal.is_none() || ordinal != self.ordinal {
                return self.stale(Stale::Gap);
            }
        } else if self.ordinal.is_some()
            && ordinal.is_some_and(|told| Some(told) != self.ordinal)
            && self.rules.hold(Rule::CommitOrdinal)
        {
            return self.stale(Stale::Gap);
        }
        self.status = Status::Exact { step };
        Heard::Status
    }

    /// A step that tells what it changed in the projection.
    fn live(&mut self, place: &Place, chunk: &RawChunk, step: u64) -> Heard {
        let same = chunk.text("projection") == self.projection.as_deref();
        let patches = match chunk.0.get("patches") {
            Some(patches @ Value::Array(_)) if same && !chunk.0.contains_key("resync") => patches,
            _ => return self.trigger(Rule::Resync, Stale::Resync, place.sequence),
        };
        let follows = Status::Exact {
            step: step.saturating_sub(1),
        };
        if step == 0 || self.status != follows {
            return self.stale(Stale::Gap);
        }
        let applied = Vec::<PatchOperation>::deserialize(patches)
            .map(|patches| patch::apply(&self.state, &patches));
        let Ok(Ok(state)) = applied else {
            return self.stale(Stale::Diverged);
        };
        self.state = state;
        self.ordinal = chunk.0.get("patchOrdinal").and_then(Value::as_u64);
        self.status = Status::Exact { step };
        Heard::Patched
    }

    /// A trigger voids what was applied: a snapshot is wanted at once, whatever was asked before.
    fn trigger(&mut self, rule: Rule, why: Stale, at: Sequence) -> Heard {
        if !self.rules.hold(rule) {
            return Heard::Nothing;
        }
        if !self.rules.hold(Rule::TriggerAsks) {
            return self.stale(why);
        }
        // Through a projection only whole steps are applied, and a step is never void: an earlier
        // snapshot that arrives now is gone on from where it stands.
        if self.projection.is_none() {
            self.voided = self.voided.max(at);
        }
        self.status = Status::Stale(why);
        self.ask()
    }

    fn ask(&mut self) -> Heard {
        self.boundary();
        Heard::Status
    }

    /// Something is missing: a snapshot is wanted, but not a second one before the next boundary.
    fn stale(&mut self, why: Stale) -> Heard {
        self.status = Status::Stale(why);
        if self.request == Request::Idle {
            self.request = Request::Wanted;
        }
        Heard::Status
    }

    /// A document without one of its rules.
    #[cfg(test)]
    pub(super) fn without(session: impl Into<String>, rule: Rule) -> Self {
        Self {
            rules: Rules::without(rule),
            ..Self::new(session)
        }
    }

    /// Whether a snapshot is to be taken now.
    #[cfg(test)]
    pub(super) fn wants(&self) -> bool {
        self.request == Request::Wanted
    }

    /// The stream of the baseline.
    #[cfg(test)]
    pub(super) fn stream_id(&self) -> Option<&str> {
        self.stream.as_deref()
    }

    /// The highest place of a trigger.
    #[cfg(test)]
    pub(super) fn voided(&self) -> Sequence {
        self.voided
    }

    /// How far the session's stream was heard.
    #[cfg(test)]
    pub(super) fn seen(&self) -> Sequence {
        self.read.max(self.highest)
    }

    /// Whether a snapshot is wanted or under way.
    #[cfg(test)]
    pub(super) fn waits(&self) -> bool {
        matches!(self.request, Request::Wanted | Request::UnderWay { .. })
    }
}
