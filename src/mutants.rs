//! Rules that the simulator takes away one at a time, to see that it misses each.
//!
//! Without the feature `mutants`, which nothing that is deployed has, every rule holds and nothing
//! of this is compiled.

#[cfg(feature = "mutants")]
use std::cell::Cell;

/// A rule that may be taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mutant {
    /// A cursor is exclusive.
    CursorIsExclusive,
    /// Forwarded chunks and the cursor that covers them are one commit.
    CursorWithChunks,
    /// A document applies a patch only on top of its base, and is exact only at its own ordinal.
    WhenInDoubt,
    /// A call that has its result is not run again.
    FinishedStays,
    /// A running session has a watchdog.
    Watchdog,
    /// A start that is sent again begins the same child.
    StartKeepsItsChild,
    /// A model call is counted by its answer's commit alone.
    CountedByAnswer,
    /// A snapshot is of the latest checkpoint.
    SnapshotIsCommitted,
    /// A run that has ended is not stopped any more.
    EndedStays,
    /// A stop pairs the calls that are open.
    StopPairs,
    /// A reader that goes away cancels nothing.
    ReadersCancelNothing,
    /// A stop interrupts the child.
    StopInterrupts,
    /// A projected mount shows state through its projection.
    Projects,
    /// A dropped write is taken back.
    TakesBack,
    /// A session that is read follows its log.
    SequenceFollowsLog,
    /// Readers are told of a chunk once its commit is durable.
    PublishedOnceDurable,
    /// No ordinal of a patch is used twice.
    OrdinalsOnce,
    /// A trim leaves what follows the snapshot of a session that goes on.
    TrimKeepsSnapshot,
    /// Readers are told of a trim once it is durable.
    TrimOnceDurable,
    /// A stream is of one life of its session.
    StreamIsOneLife,
    /// No run begins without its watchdog.
    BegunIsWatched,
    /// A deletion leaves nothing.
    DeletionIsWhole,
    /// Nothing panics.
    NothingPanics,
}

impl Mutant {
    /// All of them.
    pub const ALL: [Self; 23] = [
        Self::CursorIsExclusive,
        Self::CursorWithChunks,
        Self::WhenInDoubt,
        Self::FinishedStays,
        Self::Watchdog,
        Self::StartKeepsItsChild,
        Self::CountedByAnswer,
        Self::SnapshotIsCommitted,
        Self::EndedStays,
        Self::StopPairs,
        Self::ReadersCancelNothing,
        Self::StopInterrupts,
        Self::Projects,
        Self::TakesBack,
        Self::SequenceFollowsLog,
        Self::PublishedOnceDurable,
        Self::OrdinalsOnce,
        Self::TrimKeepsSnapshot,
        Self::TrimOnceDurable,
        Self::StreamIsOneLife,
        Self::BegunIsWatched,
        Self::DeletionIsWhole,
        Self::NothingPanics,
    ];
}

#[cfg(feature = "mutants")]
thread_local! {
    static TAKEN: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Takes a rule away on this thread, or gives it back.
#[cfg(feature = "mutants")]
pub fn take(rule: Option<Mutant>) {
    TAKEN.set(rule);
}

/// Whether this rule is taken away.
#[cfg(feature = "mutants")]
#[must_use]
pub fn lacks(rule: Mutant) -> bool {
    TAKEN.get() == Some(rule)
}

/// Whether this rule is taken away: none is.
#[cfg(not(feature = "mutants"))]
pub(crate) const fn lacks(_: Mutant) -> bool {
    false
}
