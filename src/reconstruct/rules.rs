//! The rules of section 6 by name, so that a test can take one of them away.
//!
//! In what is shipped every rule holds and nothing of this is left: [`Rules`] is empty, and
//! [`Rules::hold`] is a constant. The model in `tests/model/` removes each rule in turn and looks for
//! what goes wrong.

#[cfg(not(test))]
use crate::mutants::{self, Mutant};

/// One rule of section 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Place: a chunk without `remoteSource` is the read session's own, if its `agentId` says so and
    /// it has no `origin`.
    OwnStream,
    /// Place: an `origin` tells the place before the `remoteSource` does.
    OriginFirst,
    /// Place: a stamp that names another session than the chunk's `agentId` gives no place.
    Emitter,

    /// A chunk concerns the document of its `agentId` alone.
    Agent,
    /// The session's own stream is heard once: what was read before is left alone.
    OwnOnce,
    /// So is a forwarded chunk whose place is not above the highest that was seen.
    ForwardedOnce,
    /// Without ordinals, a place that is missing makes the document stale.
    NoHole,
    /// Without ordinals, what a resync skipped is missing from a baseline below it.
    ResyncHole,
    /// Nothing of another stream is applied.
    SameStream,
    /// A run, a patch, a step or a resync on another stream is a trigger.
    NewStream,
    /// A stream that a snapshot asked for since has left behind is over.
    PastStream,
    /// Another stream's places are counted anew.
    FreshPlaces,
    /// What the baseline covers is left alone.
    Covered,
    /// Against a baseline without a position nothing is applied.
    Unpinned,
    /// A baseline without a position is the last state only of a session that has ended.
    FinalEnded,
    /// A last state stays until the session is heard to go on: no snapshot is newer.
    FinalStays,
    /// The steps that led to a last state ask for nothing when they are read again.
    FinalCalm,
    /// A session that goes on after its end is a trigger.
    Reopened,
    /// A patch without a place makes the document stale.
    Unplaced,
    /// An unplaced patch without an ordinal is not a numbering session's.
    UnplacedStreamer,
    /// `step_discarded` is a trigger.
    Discarded,
    /// `stream_resync` is a trigger.
    Resync,
    /// TRUNCATED is a trigger.
    Truncated,
    /// While stale, patches are dropped.
    StaleDrops,
    /// A step that ends while the document is stale does not make it exact.
    StaleCommit,
    /// A patch without an ordinal is not a numbering session's.
    Streamer,
    /// A patch whose ordinal is not above the document's is dropped.
    Ordinal,
    /// A patch on another base than the document's ordinal makes it stale.
    Base,
    /// A patch that does not apply makes it stale.
    Applies,
    /// A step whose ordinal is not the document's makes it stale.
    CommitOrdinal,
    /// What a trigger voided is not read again.
    Voided,
    /// A trigger asks for a snapshot at once.
    TriggerAsks,
    /// What is missing asks once between two boundaries.
    AskOnce,
    /// A boundary that comes while a snapshot is under way asks for another.
    AskAgain,
    /// `step_committed` is a boundary for what is stale.
    StepBoundary,
    /// `step_committed` and a new run are boundaries for what has no position.
    UnpinnedBoundary,
    /// `subagent_end` is a boundary.
    CallBoundary,
    /// The end of the stream is a boundary.
    EndBoundary,
    /// A step that ends well lets what is missing later ask again.
    AskAnew,
    /// A snapshot of another session is no baseline.
    OwnBaseline,

    /// Filter: nothing is applied without a baseline.
    FilterBaseline,
    /// Filter: nothing is applied that has no place.
    FilterPlace,
    /// Filter: nothing is applied on a baseline without a position.
    FilterPosition,
    /// Filter: nothing of another stream is applied.
    FilterStream,
    /// Filter: what the baseline covers is known.
    FilterCovered,
    /// Filter: what was applied is known.
    FilterOnce,
    /// Filter: a nested descendant is told once.
    FilterLatch,
    /// Filter: a baseline without a position is told once for each baseline.
    FilterRearm,
}

#[cfg(test)]
impl Rule {
    /// Every rule.
    pub(super) const ALL: [Self; 48] = [
        Self::OwnStream,
        Self::OriginFirst,
        Self::Emitter,
        Self::Agent,
        Self::OwnOnce,
        Self::ForwardedOnce,
        Self::NoHole,
        Self::ResyncHole,
        Self::SameStream,
        Self::NewStream,
        Self::PastStream,
        Self::FreshPlaces,
        Self::Covered,
        Self::Unpinned,
        Self::FinalEnded,
        Self::FinalStays,
        Self::FinalCalm,
        Self::Reopened,
        Self::Unplaced,
        Self::UnplacedStreamer,
        Self::Discarded,
        Self::Resync,
        Self::Truncated,
        Self::StaleDrops,
        Self::StaleCommit,
        Self::Streamer,
        Self::Ordinal,
        Self::Base,
        Self::Applies,
        Self::CommitOrdinal,
        Self::Voided,
        Self::TriggerAsks,
        Self::AskOnce,
        Self::AskAgain,
        Self::StepBoundary,
        Self::UnpinnedBoundary,
        Self::CallBoundary,
        Self::EndBoundary,
        Self::AskAnew,
        Self::OwnBaseline,
        Self::FilterBaseline,
        Self::FilterPlace,
        Self::FilterPosition,
        Self::FilterStream,
        Self::FilterCovered,
        Self::FilterOnce,
        Self::FilterLatch,
        Self::FilterRearm,
    ];
}

/// Which rules hold: all of them, but for a test's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rules {
    #[cfg(test)]
    without: Option<Rule>,
}

impl Rules {
    /// Whether this rule holds.
    #[cfg(not(test))]
    #[expect(clippy::unused_self)]
    pub(super) fn hold(self, rule: Rule) -> bool {
        let doubts = matches!(rule, Rule::Base | Rule::CommitOrdinal);
        !(doubts && mutants::lacks(Mutant::WhenInDoubt))
    }

    /// Whether this rule holds.
    #[cfg(test)]
    pub(super) fn hold(self, rule: Rule) -> bool {
        self.without != Some(rule)
    }

    /// All rules but this one.
    #[cfg(test)]
    pub(super) fn without(rule: Rule) -> Self {
        Self {
            without: Some(rule),
        }
    }
}
