//! `/sse`: replay from a cursor in pages, then follow, then the terminal frame.
//!
//! A reader is a cursor and nothing else: it re-reads the log, so one that does not read costs
//! nothing that grows, and dropping its stream forgets it. Implements section 4.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::{Either, LocalBoxFuture, select};
use futures::stream;

use super::publish::{Attendance, Life, Mark, Publisher};
use super::routes::Way;
use super::{Producer, neighbours};
use crate::agent::MAX_READERS;
use crate::error::{Code, Error, Result};
use crate::http::{Body, BodyError, Response, answer};
use crate::mutants::{self, Mutant};
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::header;
use crate::protocol::ids::{AgentType, Sequence, Timestamp};
use crate::protocol::message::SessionStatus;
use crate::protocol::request::SseQuery;
use crate::protocol::sse;
use crate::store::{PageLimit, Terminal};

/// A page of a replay: large enough that a page is one cheap body part.
const PAGE: PageLimit = PageLimit {
    chunks: 1_000,
    bytes: 112 * 1024,
};

/// About the size of a chunk's event, to begin with.
const A_CHUNK: usize = 288;

/// Silence after which a comment is sent; it is also how a vanished reader is found.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// When a reader that was one too many may come back.
const RETRY_AFTER_SECONDS: u32 = 5;

/// How often a reader over the bound looks for room before it is refused, and how long between.
const ROOM_LOOKS: u32 = 20;
const ROOM_LOOK: Duration = Duration::from_millis(25);

/// Readers are asked whether they are there no more often than this, in milliseconds.
const ROOM_PING_MS: u64 = 200;

struct Reader {
    producer: Rc<Producer>,
    /// Of the life that the reader came to: another life of the id is none of its business.
    publisher: Rc<Publisher>,
    cursor: Sequence,
    /// The newest sequence when the reader came: what is above it is live.
    head: Sequence,
    /// Whether the states on either side of a step are told.
    neighbours: bool,
    stage: Stage,
    /// When the reader was last told something.
    told_at: Timestamp,
    /// The timer of the silence. It outlives many parts: setting one for each would cost more than
    /// the part.
    silence: Option<LocalBoxFuture<'static, ()>>,
    _attendance: Attendance,
}

enum Stage {
    /// Nothing is sent yet: the first part makes the headers leave.
    Opening,
    /// The cursor cannot be served.
    Truncated(ErrorFrame),
    Replaying,
    /// `caught-up` is sent.
    Following,
    Done,
}

impl Producer {
    /// Answers `/sse` for an existing session of this object. `neighbours` is for a mount alone: each
    /// step's states are told before its end.
    pub(super) async fn sse(
        self: &Rc<Self>,
        way: &Way,
        query: SseQuery,
        neighbours: bool,
    ) -> Result<Response> {
        let (status, agent_type) = self
            .read(|session| (session.record.status, session.record.agent_type.clone()))?
            .ok_or_else(Error::not_found)?;
        let most = self.most_readers(&agent_type, way);
        self.make_room(most).await?;
        // An execution that lives here has its watchdog: arming it for each reader would cost each
        // of them a write to the disk.
        if status == SessionStatus::Running && !self.is_executing() {
            self.kick().await?;
        }
        // Read after the wait: the session may have been deleted in it.
        self.expect(way, &query.session_id)?;
        let (record, position) = self
            .read(|session| (session.record.clone(), query.from.sequence()))?
            .ok_or_else(Error::not_found)?;
        let publisher = self.publisher();
        self.expect_room(most)?;
        let truncated = ErrorFrame {
            run_id: None,
            code: Code::Truncated.as_str().into(),
            error:
                "The position is outside what the log holds; read the snapshot and attach there."
                    .into(),
            detail: None,
            recoverable: false,
            floor: Some(record.floor),
            stream_id: Some(record.stream_id.to_string()),
        };
        let foreign = query
            .stream_id
            .as_deref()
            .is_some_and(|id| id != record.stream_id.as_str())
            && !mutants::lacks(Mutant::StreamIsOneLife);
        let (cursor, stage) = match position {
            _ if foreign => (0, Stage::Truncated(truncated)),
            Some(from) if from > record.last_sequence || below_floor(from, record.floor) => {
                (0, Stage::Truncated(truncated))
            }
            Some(from) if mutants::lacks(Mutant::CursorIsExclusive) => {
                (from.saturating_sub(1), Stage::Opening)
            }
            Some(from) => (from, Stage::Opening),
            None => {
                let run = self.store.run(record.run_id.as_str())?;
                let start = run.map_or(0, |run| run.start_sequence);
                (start.max(record.floor.saturating_sub(1)), Stage::Opening)
            }
        };
        let reader = Reader {
            producer: self.clone(),
            cursor,
            head: record.last_sequence,
            neighbours,
            stage,
            told_at: self.now(),
            silence: None,
            _attendance: publisher.attend(),
            publisher,
        };
        let parts = stream::unfold(reader, |mut reader| async move {
            let part = reader.next().await?;
            Some((part, reader))
        });
        let mut response = answer(200, "text/event-stream", Body::Stream(Box::pin(parts)));
        let headers = response.headers_mut();
        headers.insert(
            http::header::CACHE_CONTROL,
            http::HeaderValue::from_static("no-cache, no-transform"),
        );
        if let Ok(id) = http::HeaderValue::from_str(record.stream_id.as_str()) {
            headers.insert(header::STREAM, id);
        }
        Ok(response)
    }
}

impl Producer {
    /// Waits a moment for room where there is none: readers that left without a word are noticed
    /// when they are written to.
    async fn make_room(&self, most: usize) -> Result<()> {
        for _ in 0..ROOM_LOOKS {
            if self.expect_room(most).is_ok() {
                return Ok(());
            }
            self.publisher().ping(self.now(), ROOM_PING_MS);
            self.runtime.sleep(ROOM_LOOK).await;
        }
        self.expect_room(most)
    }

    fn most_readers(&self, agent_type: &AgentType, way: &Way) -> usize {
        let agent = self.agents.find(agent_type.as_str());
        let most = agent.map_or(MAX_READERS, |agent| agent.max_readers);
        most.min(way.inside.limits.max_readers)
    }

    /// Refuses a reader that would be one too many.
    fn expect_room(&self, most: usize) -> Result<()> {
        if self.publisher().readers() < most {
            return Ok(());
        }
        let mut refused = Error::new(
            Code::RateLimited,
            "The session has as many readers as it takes; come back later.",
        );
        refused.retry_after = Some(RETRY_AFTER_SECONDS);
        Err(refused)
    }
}

/// Whether the chunk after `from` is not kept any more.
fn below_floor(from: Sequence, floor: Sequence) -> bool {
    from.saturating_add(1) < floor
}

impl Reader {
    async fn next(&mut self) -> Option<Result<Bytes, BodyError>> {
        let part = self.part().await;
        self.told_at = self.producer.now();
        match part {
            Ok(part) => part.map(Ok),
            Err(error) => {
                self.stage = Stage::Done;
                // The reader is told that this is no end: attaching again may go on.
                let frame = Frame::Error(ErrorFrame {
                    run_id: None,
                    code: error.code.as_str().into(),
                    error: error.message.to_string(),
                    detail: None,
                    recoverable: true,
                    floor: None,
                    stream_id: None,
                });
                Some(
                    sse::encode_frame(&frame)
                        .map(Bytes::from)
                        .map_err(|e| BodyError(e.to_string())),
                )
            }
        }
    }

    async fn part(&mut self) -> Result<Option<Bytes>> {
        if matches!(self.stage, Stage::Opening) {
            self.stage = Stage::Replaying;
            return Ok(Some(sse::encode_comment("open").into()));
        }
        if let Stage::Truncated(frame) = &self.stage {
            let text = sse::encode_frame(&Frame::Error(frame.clone()))?;
            self.stage = Stage::Done;
            return Ok(Some(text.into()));
        }
        if matches!(self.stage, Stage::Done) {
            return Ok(None);
        }
        loop {
            let mark = self.publisher.durable();
            match self.publisher.life() {
                Life::Present => {}
                Life::Leaving => {
                    if self.silent_until_changed(mark).await {
                        return Ok(Some(sse::encode_comment("ping").into()));
                    }
                    continue;
                }
                Life::Unknown => {
                    return Err(Error::internal(
                        "the deletion of the session may have failed",
                    ));
                }
                Life::Over => {
                    self.stage = Stage::Done;
                    return Ok(Some(sse::encode_frame(&gone())?.into()));
                }
            }
            // A session that never stops writing is caught up with all the same.
            let replayed = matches!(self.stage, Stage::Replaying) && self.cursor >= self.head;
            if !replayed && let Some(page) = self.page(mark)? {
                return Ok(Some(page));
            }
            // What is not durable yet is not told, a settled run included.
            if let Some(end) = self.terminal(mark.last)? {
                self.stage = Stage::Done;
                return Ok(Some(end.into()));
            }
            if replayed {
                self.stage = Stage::Following;
                let frame = sse::encode_frame(&Frame::CaughtUp {
                    sequence: self.cursor,
                })?;
                return Ok(Some(frame.into()));
            }
            if self.silent_until_changed(mark).await {
                return Ok(Some(sse::encode_comment("ping").into()));
            }
        }
    }

    /// Waits until something has become durable since `mark`; true once the silence was long, or
    /// when readers are asked whether they are there.
    async fn silent_until_changed(&mut self, mark: Mark) -> bool {
        let Self {
            producer,
            publisher,
            told_at,
            silence,
            ..
        } = self;
        let pings = publisher.pings();
        let mut changed = pin!(publisher.changed(mark));
        loop {
            let timer = silence.get_or_insert_with(|| producer.runtime.sleep(KEEP_ALIVE));
            if let Either::Left(_) = select(changed.as_mut(), timer).await {
                return publisher.pings() != pings && publisher.durable() == mark;
            }
            // The timer may have been set for an earlier part.
            let quiet = Duration::from_millis(producer.now().saturating_sub(*told_at));
            let left = KEEP_ALIVE.saturating_sub(quiet);
            *silence = (!left.is_zero()).then(|| producer.runtime.sleep(left));
            if left.is_zero() {
                return true;
            }
        }
    }

    /// The next page up to what is durable, encoded; the floor is checked again for each. None as
    /// well where the log was trimmed past the cursor and that is not durable: it may come back.
    fn page(&mut self, mark: Mark) -> Result<Option<Bytes>> {
        let durable = mark.last;
        if self.cursor >= durable {
            return Ok(None);
        }
        let (floor, checkpoint) = self
            .producer
            .read(|session| (session.record.floor, session.checkpoint.stream_sequence))?
            .ok_or_else(Error::not_found)?;
        let is_durable = below_floor(self.cursor, mark.floor);
        if below_floor(self.cursor, floor)
            && !is_durable
            && !mutants::lacks(Mutant::TrimOnceDurable)
        {
            return Ok(None);
        }
        if below_floor(self.cursor, floor) {
            let stream_id = self
                .producer
                .read(|session| session.record.stream_id.to_string())?;
            self.stage = Stage::Done;
            let frame = sse::encode_frame(&Frame::Error(ErrorFrame {
                run_id: None,
                code: Code::Truncated.as_str().into(),
                error: "The log was trimmed while it was read; read the snapshot and attach there."
                    .into(),
                detail: None,
                recoverable: false,
                floor: Some(if is_durable { mark.floor } else { floor }),
                stream_id,
            }))?;
            return Ok(Some(frame.into()));
        }
        let before = self.cursor;
        let marked = self.neighbours && checkpoint > before;
        let (told, until) = if marked {
            self.up_to_a_step(durable)?
        } else if let Some((events, last)) = self.publisher.tail(before) {
            self.cursor = last;
            return Ok(Some(events));
        } else {
            (None, durable)
        };
        let mut last = before;
        let mut text = told.unwrap_or_default();
        text.reserve(self.capacity(until));
        let mut is_whole = true;
        let store = &self.producer.store;
        store.each_chunk(before, until, PAGE, &mut |sequence, chunk| {
            is_whole &= sequence == last.saturating_add(1);
            last = sequence;
            sse::encode_line(&mut text, sequence, chunk);
        })?;
        if !is_whole {
            return Err(
                Error::new(Code::InvalidStoredState, "Chunks of the log are missing.")
                    .with_detail(format!("after sequence {before}")),
            );
        }
        self.cursor = last;
        Ok((last > before).then(|| text.into()))
    }

    /// How far the next page goes where steps have an event in front: up to the next checkpoint's
    /// chunk, or that chunk alone with what is told before it.
    fn up_to_a_step(&self, durable: Sequence) -> Result<(Option<String>, Sequence)> {
        let store = &*self.producer.store;
        let next = store.checkpoint_after(self.cursor)?;
        Ok(match next.filter(|next| *next <= durable) {
            None => (None, durable),
            Some(next) if next.saturating_sub(1) > self.cursor => (None, next.saturating_sub(1)),
            Some(next) => (neighbours::event(store, next)?, next),
        })
    }

    /// About the size of the next page.
    fn capacity(&self, durable: Sequence) -> usize {
        let chunks = usize::try_from(durable.saturating_sub(self.cursor)).unwrap_or(usize::MAX);
        let about = chunks.saturating_mul(A_CHUNK);
        about.min(PAGE.bytes.saturating_add(PAGE.bytes / 2))
    }

    /// The terminal frame of the latest run, once everything before it was sent and is durable.
    fn terminal(&self, durable: Sequence) -> Result<Option<String>> {
        let settled = self.publisher.is_settled();
        // Every reader asks after every commit, so a running session costs no copy.
        let ended = self.producer.read(|session| {
            let record = &session.record;
            let ended = record.status != SessionStatus::Running
                && record.last_sequence == self.cursor
                && durable >= self.cursor
                && settled;
            ended.then(|| record.run_id.clone())
        })?;
        let Some(run_id) = ended.ok_or_else(Error::not_found)? else {
            return Ok(None);
        };
        let run = self.producer.store.run(run_id.as_str())?;
        let Some(terminal) = run.and_then(|run| run.terminal) else {
            return Err(Producer::stored_missing("terminal frame", &run_id));
        };
        Ok(Some(sse::encode_frame(&terminal_frame(
            run_id.to_string(),
            terminal,
        ))?))
    }
}

/// The frame that the readers of a deleted session get.
fn gone() -> Frame {
    Frame::Error(ErrorFrame {
        run_id: None,
        code: Code::NotFound.as_str().into(),
        error: "The session was deleted.".into(),
        detail: None,
        recoverable: false,
        floor: None,
        stream_id: None,
    })
}

/// The frame that a settled run's readers get.
fn terminal_frame(run_id: String, terminal: Terminal) -> Frame {
    match terminal.failure {
        Some(failure) => Frame::Error(ErrorFrame {
            run_id: Some(run_id),
            code: failure.code,
            error: failure.error,
            detail: failure.detail,
            recoverable: false,
            floor: None,
            stream_id: None,
        }),
        None => Frame::End(EndFrame {
            run_id: Some(run_id),
            status: terminal.status,
            output: terminal.output,
            state: terminal.state,
            usage: terminal
                .usage
                .and_then(|usage| serde_json::to_value(usage).ok()),
        }),
    }
}
