//! How much of its log a session keeps.
//!
//! A pure rule: from the policy, the session, what the log holds and the time to a new floor. It
//! drops whole stretches of the log, the oldest first, and never what a reader of the snapshot
//! needs: the floor stays at or below the latest checkpoint's position while the session is not
//! terminal, unless a hard cap forces it further; then `/snapshot` has no position until the next
//! promote. Section 4 of the contract.

use std::time::Duration;

use super::{Session, Transition};
use crate::mutants::{self, Mutant};
use crate::protocol::ids::{RunId, Sequence, Timestamp, millis};
use crate::protocol::message::SessionStatus;
use crate::store::{LogSpan, LogStats, Write};

/// How many stretches of the log are looked at, and so dropped at most, in one commit.
pub const SPANS_AT_ONCE: usize = 4_096;

/// How much of its log a session keeps. By default all of it.
///
/// The first three are promises to readers: at least that much is kept, and what is older goes as
/// soon as one of them allows it, at the end of a step or of a run. The hard cap is a promise to
/// the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Keep at least this many of the newest chunks. Default: no limit.
    pub max_chunks: Option<u64>,
    /// Keep at least this many bytes of the newest chunks. Default: no limit.
    pub max_bytes: Option<u64>,
    /// Keep what is younger than this. Default: no limit.
    pub max_age: Option<Duration>,
    /// Never keep more bytes than this, even if a step that is under way loses its beginning. The
    /// newest commit is kept whatever its size. Default: no cap.
    pub hard_max_bytes: Option<u64>,
}

impl Retention {
    /// Whether the whole log is kept for ever.
    #[must_use]
    pub fn keeps_all(&self) -> bool {
        *self == Self::default()
    }

    /// Keeps at least this many of the newest chunks.
    #[must_use]
    pub fn with_max_chunks(mut self, chunks: u64) -> Self {
        self.max_chunks = Some(chunks);
        self
    }

    /// Keeps at least this many bytes of the newest chunks.
    #[must_use]
    pub fn with_max_bytes(mut self, bytes: u64) -> Self {
        self.max_bytes = Some(bytes);
        self
    }

    /// Keeps what is younger than this.
    #[must_use]
    pub fn with_max_age(mut self, age: Duration) -> Self {
        self.max_age = Some(age);
        self
    }

    /// Never keeps more bytes than this.
    #[must_use]
    pub fn with_hard_max_bytes(mut self, bytes: u64) -> Self {
        self.hard_max_bytes = Some(bytes);
        self
    }

    fn expires(&self, span: &LogSpan) -> Option<Timestamp> {
        let age = millis(self.max_age?);
        Some(span.committed_at.saturating_add(age))
    }
}

/// The floor to which the log may be trimmed now, if that is above the present one. `stats` holds
/// the log as it will be with the commit that trims it.
#[must_use]
pub fn retention(
    policy: &Retention,
    session: &Session,
    stats: &LogStats,
    now: Timestamp,
) -> Option<Sequence> {
    let highest = highest_floor(session, stats);
    let mut left = stats.bytes;
    let mut floor = 0;
    for span in &stats.front {
        let next = span.last.saturating_add(1);
        if next > stats.newest {
            break;
        }
        let without = left.saturating_sub(span.bytes);
        let is_enough = |kept: u64, wanted: Option<u64>| wanted.is_some_and(|max| kept >= max);
        let may_go = is_enough(stats.newest.saturating_sub(span.last), policy.max_chunks)
            || is_enough(without, policy.max_bytes)
            || policy.expires(span).is_some_and(|at| at <= now);
        let must_go = policy.hard_max_bytes.is_some_and(|cap| left > cap);
        if !(must_go || (may_go && next <= highest)) {
            break;
        }
        left = without;
        floor = next;
    }
    (floor > session.record.floor.max(stats.oldest)).then_some(floor)
}

/// When the next stretch of the log grows too old, if an age is set and it may go then.
#[must_use]
pub fn next_expiry(policy: &Retention, session: &Session, stats: &LogStats) -> Option<Timestamp> {
    let span = stats.front.first()?;
    let next = span.last.saturating_add(1);
    if next > stats.newest || next > highest_floor(session, stats) {
        return None;
    }
    policy.expires(span)
}

fn highest_floor(session: &Session, stats: &LogStats) -> Sequence {
    if session.record.status.is_terminal() || mutants::lacks(Mutant::TrimKeepsSnapshot) {
        stats.newest
    } else {
        session.checkpoint.stream_sequence
    }
}

impl Session {
    /// Trims the log of a session at rest in a commit of its own.
    #[must_use]
    pub fn trim(&self, floor: Sequence) -> Transition {
        // Nothing of the session changes but its floor: `updated_at` stays.
        let mut draft = super::Draft::new(self, self.record.updated_at);
        draft.session.record.floor = floor;
        draft.write(Write::Trim { floor });
        draft.done()
    }
}

impl Transition {
    /// The run and the status, if the commit settles a run.
    #[must_use]
    pub fn settles(&self) -> Option<(&RunId, SessionStatus)> {
        self.commit.writes.iter().find_map(|write| match write {
            Write::Run(run) => Some((&run.run_id, run.terminal.as_ref()?.status)),
            _ => None,
        })
    }

    /// The same transition with a trim of the log in its commit.
    #[must_use]
    pub fn trimmed(mut self, floor: Sequence) -> Self {
        self.next.record.floor = floor;
        let mut told = false;
        for write in &mut self.commit.writes {
            if let Write::Session(record) = write {
                record.floor = floor;
                told = true;
            }
        }
        if !told {
            let record = self.next.record.clone();
            self.commit.writes.insert(0, Write::Session(record));
        }
        self.commit.writes.push(Write::Trim { floor });
        self
    }

    /// What the log will hold once the commit is done, `stats` being what it holds now.
    #[must_use]
    pub fn log_afterwards(&self, mut stats: LogStats) -> LogStats {
        for write in &self.commit.writes {
            if let Some((first, chunks)) = write.chunks() {
                let size = |chunk: &String| u64::try_from(chunk.len()).unwrap_or(u64::MAX);
                let sizes = chunks.iter().map(|chunk| size(chunk).saturating_add(1));
                stats.bytes = sizes.fold(stats.bytes, u64::saturating_add);
                let count = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
                stats.newest = first.saturating_add(count).saturating_sub(1);
                if stats.oldest == 0 {
                    stats.oldest = first;
                }
            }
        }
        stats
    }

    /// Whether the commit ends a step or a run, or opens one.
    #[must_use]
    pub fn is_boundary(&self) -> bool {
        let has = |write: &Write| matches!(write, Write::Checkpoint(_) | Write::Run(_));
        self.commit.writes.iter().any(has)
    }
}

#[cfg(test)]
mod tests;
