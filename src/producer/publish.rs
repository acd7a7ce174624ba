//! Tells readers how far the log may be read: up to what is durable.
//!
//! Commits are counted as they happen; one durability barrier at a time covers all that happened
//! before it, and readers wake once it has passed.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::task::{Poll, Waker};

use serde_json::json;

use crate::platform::{Level, ObjectRuntime};
use crate::protocol::ids::Sequence;

pub(super) struct Publisher {
    runtime: Rc<dyn ObjectRuntime>,
    /// The newest committed sequence, and a count of commits: a commit without chunks counts too,
    /// because it may have settled the run.
    committed: Cell<(Sequence, u64)>,
    durable: Cell<(Sequence, u64)>,
    syncing: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

impl Publisher {
    pub(super) fn new(runtime: Rc<dyn ObjectRuntime>) -> Rc<Self> {
        Rc::new(Self {
            runtime,
            committed: Cell::new((0, 0)),
            durable: Cell::new((0, 0)),
            syncing: Cell::new(false),
            waiting: RefCell::new(Vec::new()),
        })
    }

    /// A commit happened; `last` is the newest sequence now.
    pub(super) fn committed(self: &Rc<Self>, last: Sequence) {
        let (_, count) = self.committed.get();
        self.committed.set((last, count.wrapping_add(1)));
        if !self.syncing.replace(true) {
            let this = self.clone();
            self.runtime
                .spawn(Box::pin(async move { this.sync().await }));
        }
    }

    async fn sync(self: Rc<Self>) {
        while self.durable.get() != self.committed.get() {
            let covered = self.committed.get();
            if let Err(error) = self.runtime.sync().await {
                let line = json!({"event": "sync_failed", "error": error.message});
                self.runtime.log(Level::Error, &line);
                break;
            }
            self.durable.set(covered);
            let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
            waiting.into_iter().for_each(Waker::wake);
        }
        self.syncing.set(false);
    }

    /// How far the log may be read, with a mark that changes whenever anything became durable.
    pub(super) fn durable(&self) -> (Sequence, u64) {
        self.durable.get()
    }

    /// Whether everything that was committed is durable.
    pub(super) fn is_settled(&self) -> bool {
        self.durable.get() == self.committed.get()
    }

    /// Completes when something has become durable since `seen`.
    pub(super) fn changed(
        self: &Rc<Self>,
        seen: (Sequence, u64),
    ) -> impl Future<Output = ()> + 'static {
        let this = self.clone();
        std::future::poll_fn(move |context| {
            if this.durable.get() != seen {
                return Poll::Ready(());
            }
            let mut waiting = this.waiting.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
    }
}
