//! Tells readers how far the log may be read: up to what is durable.
//!
//! Commits are counted as they happen; one durability barrier at a time covers all that happened
//! before it, and readers wake once it has passed. What the newest commits said is kept encoded, a
//! bounded piece for all readers together, so that those at the tail need not read the log again.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

use crate::error::Result;
use crate::mutants::{self, Mutant};
use crate::platform::{Level, Line, ObjectRuntime};
use crate::protocol::ids::{Sequence, Timestamp};
use crate::protocol::sse;
use crate::store::Commit;

/// The most that is kept of the newest commits, in encoded bytes.
const TAIL_BYTES: usize = 128 * 1024;

/// How often readers are asked whether they are there before it is believed, and how long that is
/// believed, in milliseconds: whoever knocks at a session that is full must not make it write to all
/// its readers again and again.
const PINGS_IN_A_ROW: u32 = 3;
const BELIEVED_MS: u64 = 5_000;

pub(super) struct Publisher {
    runtime: Rc<dyn ObjectRuntime>,
    committed: Cell<Mark>,
    durable: Cell<Mark>,
    syncing: Cell<bool>,
    waiting: RefCell<BTreeMap<u64, Waker>>,
    places: Cell<u64>,
    readers: Cell<usize>,
    /// How often the readers were asked whether they are still there, and when last.
    pings: Cell<(u64, Timestamp)>,
    /// How many of the latest pings none has left after.
    vain_pings: Cell<u32>,
    life: Cell<Life>,
    tail: RefCell<Tail>,
    /// Who goes on in the very moment in which all is durable.
    #[cfg(feature = "bench")]
    next: RefCell<Option<Box<dyn FnOnce()>>>,
}

/// How far a log goes, as of some commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    /// Its newest sequence.
    pub(super) last: Sequence,
    /// Its floor: where it begins.
    pub(super) floor: Sequence,
    /// Counts commits: one without chunks counts too, because it may have settled the run.
    commits: u64,
}

/// How the life of the session stands that a publisher belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// It is there.
    Present,
    /// It is deleted, which is not durable yet: nothing can be read and nothing is told.
    Leaving,
    /// It is gone.
    Over,
    /// Nobody knows whether its deletion is durable.
    Unknown,
}

/// The newest commits' chunks as they go over the wire, without a gap.
#[derive(Default)]
struct Tail {
    batches: VecDeque<Batch>,
    bytes: usize,
}

/// The chunks of one commit.
struct Batch {
    first: Sequence,
    last: Sequence,
    events: Bytes,
}

/// Somebody who reads; while there is none, nothing is kept for readers.
pub(super) struct Attendance(Rc<Publisher>);

impl Drop for Attendance {
    fn drop(&mut self) {
        let left = self.0.readers.get().saturating_sub(1);
        self.0.readers.set(left);
        self.0.vain_pings.set(0);
        if left == 0 {
            self.0.tail.take();
        }
    }
}

impl Publisher {
    pub(super) fn new(runtime: Rc<dyn ObjectRuntime>) -> Rc<Self> {
        Rc::new(Self {
            runtime,
            committed: Cell::default(),
            durable: Cell::default(),
            syncing: Cell::new(false),
            waiting: RefCell::default(),
            places: Cell::new(0),
            readers: Cell::new(0),
            pings: Cell::new((0, 0)),
            vain_pings: Cell::new(0),
            life: Cell::new(Life::Present),
            tail: RefCell::default(),
            #[cfg(feature = "bench")]
            next: RefCell::default(),
        })
    }

    /// Somebody reads from now on, until the answer is dropped.
    pub(super) fn attend(self: &Rc<Self>) -> Attendance {
        self.readers.set(self.readers.get().saturating_add(1));
        Attendance(self.clone())
    }

    /// How many read now.
    pub(super) fn readers(&self) -> usize {
        self.readers.get()
    }

    /// Has every reader written to, so that those that left quietly are noticed: a connection that
    /// was closed at its other end alone tells so at the next write. Not more often than `every`
    /// milliseconds, and not for a while after a few times in a row with nobody gone.
    pub(super) fn ping(&self, now: Timestamp, every: u64) {
        let (count, last) = self.pings.get();
        let since = now.saturating_sub(last);
        if since >= BELIEVED_MS {
            self.vain_pings.set(0);
        }
        let vain = self.vain_pings.get();
        if count == 0 || (since >= every && vain < PINGS_IN_A_ROW) {
            self.pings.set((count.wrapping_add(1), now));
            self.vain_pings.set(vain.saturating_add(1));
            self.wake();
        }
    }

    /// How often the readers were asked whether they are still there.
    pub(super) fn pings(&self) -> u64 {
        self.pings.get().0
    }

    /// How the life that is told of stands.
    pub(super) fn life(&self) -> Life {
        self.life.get()
    }

    /// The session is deleted: readers wait until they are told so.
    pub(super) fn leave(&self) {
        self.life.set(Life::Leaving);
    }

    /// The deletion is durable: readers are told that there is no more. Or nobody knows whether it is:
    /// they are told to come again.
    pub(super) fn close(&self, is_durable: bool) {
        self.life.set(if is_durable {
            Life::Over
        } else {
            Life::Unknown
        });
        self.wake();
    }

    /// A commit happened; the log goes from `floor` to `last` now.
    pub(super) fn said(self: &Rc<Self>, (floor, last): (Sequence, Sequence), commit: &Commit) {
        if self.readers.get() > 0 {
            let mut tail = self.tail.borrow_mut();
            for write in &commit.writes {
                if let Some((first, chunks)) = write.chunks() {
                    tail.push(first, chunks);
                }
            }
        }
        self.committed((floor, last));
    }

    /// As [`Self::said`], for commits whose chunks nobody can be waiting for.
    pub(super) fn committed(self: &Rc<Self>, (floor, last): (Sequence, Sequence)) {
        self.tail.borrow_mut().keep_to(last);
        let commits = self.committed.get().commits.wrapping_add(1);
        self.committed.set(Mark {
            last,
            floor,
            commits,
        });
        if !self.syncing.replace(true) {
            self.sync();
        }
    }

    /// Waits for what was committed so far to be durable; one barrier at a time.
    fn sync(self: &Rc<Self>) {
        let covered = self.committed.get();
        if mutants::lacks(Mutant::PublishedOnceDurable) {
            return self.synced(covered, Ok(()));
        }
        let this = self.clone();
        let told = move |outcome| this.synced(covered, outcome);
        self.runtime.once_durable(Box::new(told));
    }

    fn synced(self: &Rc<Self>, covered: Mark, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.runtime.tell(&Line {
                level: Level::Error,
                event: "sync_failed",
                session: None,
                fields: &[("error", &error.message)],
            });
            self.syncing.set(false);
            return;
        }
        self.durable.set(covered);
        // The next barrier is on its way before anybody is told of this one.
        if self.committed.get() == covered {
            self.syncing.set(false);
        } else {
            self.sync();
        }
        self.wake();
        #[cfg(feature = "bench")]
        if self.is_settled()
            && let Some(next) = self.next.take()
        {
            next();
        }
    }

    /// Does `next` in the very moment in which all that was committed is durable.
    #[cfg(feature = "bench")]
    pub(super) fn once_settled(&self, next: Box<dyn FnOnce()>) {
        if self.is_settled() {
            next();
        } else {
            self.next.replace(Some(next));
        }
    }

    fn wake(&self) {
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        waiting.into_values().for_each(Waker::wake);
    }

    /// How far the log may be read, and where it is known to begin; it changes whenever anything
    /// became durable.
    pub(super) fn durable(&self) -> Mark {
        self.durable.get()
    }

    /// The events above `after`, up to what is durable, with the last of their sequences; `None`
    /// where they must be read from the log.
    pub(super) fn tail(&self, after: Sequence) -> Option<(Bytes, Sequence)> {
        self.tail.borrow().above(after, self.durable.get().last)
    }

    /// Whether everything that was committed is durable.
    pub(super) fn is_settled(&self) -> bool {
        self.durable.get() == self.committed.get()
    }

    /// Completes when something has become durable since `seen`, when the session is gone, or when
    /// readers are asked whether they are there. Dropping it forgets who waited.
    pub(super) fn changed(self: &Rc<Self>, seen: Mark) -> Changed {
        Changed {
            publisher: self.clone(),
            seen,
            pings: self.pings(),
            place: None,
        }
    }
}

/// See [`Publisher::changed`].
pub(super) struct Changed {
    publisher: Rc<Publisher>,
    seen: Mark,
    pings: u64,
    /// Where its waker stands among those that wait.
    place: Option<u64>,
}

impl Future for Changed {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let is_over = matches!(this.publisher.life.get(), Life::Over | Life::Unknown);
        let is_asked = this.publisher.pings() != this.pings;
        if is_over || is_asked || this.publisher.durable.get() != this.seen {
            return Poll::Ready(());
        }
        let place = *this.place.get_or_insert_with(|| {
            let next = this.publisher.places.get();
            this.publisher.places.set(next.wrapping_add(1));
            next
        });
        // What is replaced is dropped after the borrow: it may be the last of a task that waits too.
        let waker = context.waker().clone();
        let replaced = this.publisher.waiting.borrow_mut().insert(place, waker);
        drop(replaced);
        Poll::Pending
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        // A reader that left must not be kept alive by its waker until the next commit.
        if let Some(place) = self.place {
            let waker = self.publisher.waiting.borrow_mut().remove(&place);
            drop(waker);
        }
    }
}

impl Tail {
    fn push(&mut self, first: Sequence, chunks: &[String]) {
        let follows = |newest: &Batch| newest.last.checked_add(1) == Some(first);
        if !self.batches.back().is_none_or(follows) {
            *self = Self::default();
        }
        let mut events = String::new();
        let mut last = first;
        for (sequence, chunk) in (first..).zip(chunks) {
            sse::encode_line(&mut events, sequence, chunk);
            last = sequence;
        }
        self.bytes = self.bytes.saturating_add(events.len());
        self.batches.push_back(Batch {
            first,
            last,
            events: events.into(),
        });
        while self.bytes > TAIL_BYTES {
            let Some(oldest) = self.batches.pop_front() else {
                break;
            };
            self.bytes = self.bytes.saturating_sub(oldest.events.len());
        }
    }

    /// Forgets all of it unless it ends at `last`: then it is of another log.
    fn keep_to(&mut self, last: Sequence) {
        if self
            .batches
            .back()
            .is_some_and(|newest| newest.last != last)
        {
            *self = Self::default();
        }
    }

    fn above(&self, after: Sequence, durable: Sequence) -> Option<(Bytes, Sequence)> {
        let start = after.checked_add(1)?;
        let at = self
            .batches
            .binary_search_by_key(&start, |batch| batch.first)
            .ok()?;
        let mut batches = self
            .batches
            .range(at..)
            .take_while(|batch| batch.last <= durable);
        let one = batches.next()?;
        let Some(next) = batches.next() else {
            // The one buffer that all readers at the tail share.
            return Some((one.events.clone(), one.last));
        };
        let mut last = next.last;
        let mut events = [one.events.as_ref(), next.events.as_ref()].concat();
        for batch in batches {
            events.extend_from_slice(&batch.events);
            last = batch.last;
        }
        Some((events.into(), last))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use futures::FutureExt as _;

    use super::*;
    use crate::native::LocalRuntime;

    #[test]
    fn case_16_a_reader_that_left_is_not_kept_until_the_next_commit() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let publisher = Publisher::new(LocalRuntime::new(0, Rc::new(|_, _| ())));
            let mut stays = publisher.changed(publisher.durable());
            assert!((&mut stays).now_or_never().is_none());
            for _ in 0..1000 {
                assert!(
                    publisher
                        .changed(publisher.durable())
                        .now_or_never()
                        .is_none()
                );
            }
            assert_eq!(publisher.waiting.borrow().len(), 1);
            // The one that stays is still told.
            publisher.durable.set(Mark {
                last: 1,
                ..Mark::default()
            });
            assert!(stays.now_or_never().is_some());
            assert_eq!(publisher.waiting.borrow().len(), 0);
        });
    }
}
