//! The guide's filter: which patches of a stream belong on which baseline.
//!
//! Rules 3 and 4 for producers that stamp no `origin` (and for those that do, where it is the better
//! stamp). It holds one small record for each session that it was given a baseline of, and nothing
//! for any other, however long the stream.

use std::collections::BTreeMap;

use super::place::{Reading, place};
use super::rules::{Rule, Rules};
use crate::protocol::chunk::RawChunk;
use crate::protocol::ids::{Position, Sequence};
use crate::protocol::message::SnapshotResponse;

/// Why a session's patches cannot be aligned with its baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unalignable {
    /// A descendant's patch came through a stream between, stamped in another sequence space. No
    /// snapshot mends that; take one at the session's `subagent_end`, or at the end of the stream.
    NestedDescendant,
    /// The baseline has no position. A later snapshot with one mends it.
    UnpinnedBaseline,
}

/// What is to be done with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Apply it to the document of its `agentId`.
    Apply,
    /// Not a patch, or of a session without a baseline here: nothing to apply.
    Pass,
    /// The baseline contains it, or it was applied before.
    Known,
    /// It cannot be aligned: leave the document as it is. `first` when this session is told so for
    /// the first time since its baseline was set (for [`Unalignable::NestedDescendant`], ever).
    Suppress {
        /// Why.
        why: Unalignable,
        /// Whether it is news.
        first: bool,
    },
}

/// Says which patches may be applied. See the module's text for its memory.
#[derive(Clone, Debug, Default)]
pub struct PatchFilter {
    rules: Rules,
    sessions: BTreeMap<String, Tracked>,
}

#[derive(Clone, Debug)]
struct Tracked {
    stream: String,
    position: Position,
    /// The highest place that was applied, in the session's own stream.
    applied: Sequence,
    nested: bool,
    unpinned_told: bool,
}

impl PatchFilter {
    /// A filter that knows no session.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets a session's baseline. Of the session whose stream is read, attach at the baseline's own
    /// position: the filter cannot see a wrong cursor.
    pub fn baseline(&mut self, snapshot: &SnapshotResponse) {
        let before = self.sessions.get(&snapshot.session_id);
        let same_stream = before.filter(|before| before.stream == snapshot.stream_id);
        let tracked = Tracked {
            stream: snapshot.stream_id.clone(),
            position: snapshot.stream_sequence,
            applied: same_stream.map_or(0, |before| before.applied),
            nested: before.is_some_and(|before| before.nested),
            unpinned_told: before.is_some_and(|before| before.unpinned_told)
                && !self.rules.hold(Rule::FilterRearm),
        };
        self.sessions.insert(snapshot.session_id.clone(), tracked);
    }

    /// Forgets a session.
    pub fn forget(&mut self, session: &str) {
        self.sessions.remove(session);
    }

    /// Whether the chunk that was read at `sequence` is a patch to be applied.
    pub fn judge(&mut self, reading: Reading<'_>, sequence: Sequence, chunk: &RawChunk) -> Verdict {
        if chunk.kind() != "state_patch" {
            return Verdict::Pass;
        }
        let rules = self.rules;
        let tracked = chunk
            .agent_id()
            .and_then(|agent| self.sessions.get_mut(agent));
        let Some(tracked) = tracked else {
            return if rules.hold(Rule::FilterBaseline) {
                Verdict::Pass
            } else {
                Verdict::Apply
            };
        };
        let Some(place) = place(rules, reading, sequence, chunk) else {
            if !rules.hold(Rule::FilterPlace) {
                return Verdict::Apply;
            }
            let latched = std::mem::replace(&mut tracked.nested, true);
            let why = Unalignable::NestedDescendant;
            let first = !(latched && rules.hold(Rule::FilterLatch));
            return Verdict::Suppress { why, first };
        };
        let baseline = match tracked.position {
            // A position says nothing of another stream: what is baked in cannot be known.
            Position::At(at)
                if place.stream == tracked.stream || !rules.hold(Rule::FilterStream) =>
            {
                at
            }
            Position::None if !rules.hold(Rule::FilterPosition) => 0,
            Position::At(_) | Position::None => {
                let first = !std::mem::replace(&mut tracked.unpinned_told, true);
                let why = Unalignable::UnpinnedBaseline;
                return Verdict::Suppress { why, first };
            }
        };
        let covered = place.sequence <= baseline && rules.hold(Rule::FilterCovered);
        let applied = place.forwarded && place.sequence <= tracked.applied;
        if covered || (applied && rules.hold(Rule::FilterOnce)) {
            return Verdict::Known;
        }
        tracked.applied = tracked.applied.max(place.sequence);
        Verdict::Apply
    }

    /// A filter without one of its rules.
    #[cfg(test)]
    pub(super) fn without(rule: Rule) -> Self {
        Self {
            rules: Rules::without(rule),
            ..Self::default()
        }
    }
}
