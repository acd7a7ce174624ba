//! The driver of one session: it feeds the machine, commits what the machine says, and publishes.
//!
//! One [`Producer`] lives in one object. The store is the truth; what is held in memory is a cache
//! that may vanish at any await. Every change goes through `Producer::apply`: compute a
//! transition, commit it, swap the session, in one synchronous block. A chunk reaches readers only
//! after its commit is durable (section 4 of the contract).

mod answer;
#[cfg(feature = "bench")]
mod bench;
mod bounds;
mod calls;
mod descendants;
mod history;
mod hooks;
mod lifecycle;
pub(crate) mod neighbours;
mod publish;
mod reconcile;
mod retention;
mod retry;
mod routes;
mod run;
mod stream;
mod tree;
mod usage;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use crate::agent::{Agents, StopSignal};
use crate::error::{Code, Error, Result};
use crate::mutants::{self, Mutant};
use crate::platform::{Level, Line, LineSession, ObjectRuntime};
use crate::protocol::ids::{Sequence, Timestamp};
use crate::protocol::message::SessionStatus;
use crate::session::{Session, Transition};
use crate::store::{CommitError, Epoch, SessionRecord, Store};
use futures::future::{AbortHandle, Abortable, FutureExt as _, LocalBoxFuture};
use publish::Publisher;

/// How often the alarm looks after a running session, in milliseconds.
const WATCHDOG_MS: u64 = 2_000;

/// How soon the alarm comes back to an instance that was about to be replaced, in milliseconds.
const LEAVING_MS: u64 = 50;

/// How often the alarm looks after a session that cannot be read, in milliseconds.
const UNREADABLE_MS: u64 = 60_000;

/// Executions of one run in a row without any progress after which the run fails. An answer, a
/// call's result, forwarded chunks and a committed step are progress.
const MAX_ATTEMPTS: u32 = 10;

/// The driver of one session.
pub struct Producer {
    runtime: Rc<dyn ObjectRuntime>,
    store: Rc<dyn Store>,
    agents: Agents,
    session: RefCell<Option<Session>>,
    runner: RefCell<Option<Runner>>,
    next_runner: Cell<u64>,
    /// Whether a hook after a settled run is at work here.
    hook_at_work: Cell<bool>,
    /// The tokens of a conversation that the model may have room for: less than any that it found
    /// too long, as far as this instance knows.
    room: Cell<u64>,
    /// Who tells readers of the present life; a deletion begins another.
    publisher: RefCell<Rc<Publisher>>,
}

/// The execution that lives in this instance.
struct Runner {
    number: u64,
    stop: StopSignal,
    /// Ends the execution where it stands: it is not polled once more.
    end: AbortHandle,
}

/// Why an execution ends without settling its run.
#[derive(Debug)]
enum Halt {
    /// Another execution owns the session now.
    Superseded,
    /// The store or a transition failed; the watchdog starts another execution.
    Failed(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Producer {
    /// The driver of the session in `store`, or of none as long as none was begun there.
    #[must_use]
    pub fn new(runtime: Rc<dyn ObjectRuntime>, store: Rc<dyn Store>, agents: Agents) -> Rc<Self> {
        let publisher = RefCell::new(Publisher::new(runtime.clone()));
        Rc::new(Self {
            runtime,
            store,
            agents,
            session: RefCell::new(None),
            runner: RefCell::new(None),
            next_runner: Cell::new(0),
            hook_at_work: Cell::new(false),
            room: Cell::new(u64::MAX),
            publisher,
        })
    }

    /// The alarm. Starts an execution if the session is running and has none here, and arms the
    /// alarm again as long as the session is running; does what is due for a session at rest. A
    /// failure is logged, and the alarm is armed all the same.
    ///
    /// # Errors
    /// When the alarm cannot be armed: whoever rang it has to ring again, as the platform does.
    pub async fn alarm(self: &Rc<Self>) -> Result<()> {
        let at_rest = self.read(|session| session.record.status != SessionStatus::Running);
        let looked_after = match at_rest {
            Ok(Some(true)) => self.rest().await,
            _ => self.kick().await,
        };
        if let Err(error) = looked_after {
            self.log(
                Level::Error,
                "watchdog",
                &[("code", error.code.as_str()), ("error", &error.message)],
            );
            // What cannot be read now will hardly be readable in a moment, but perhaps by a later
            // version of the code.
            let later = if error.code == Code::InvalidStoredState {
                UNREADABLE_MS
            } else {
                WATCHDOG_MS
            };
            let at = self.now().saturating_add(later);
            if let Err(error) = self.runtime.set_alarm(Some(at)).await {
                self.not_armed(&error);
                return Err(error);
            }
        }
        Ok(())
    }

    fn not_armed(&self, error: &Error) {
        self.log(
            Level::Error,
            "watchdog_not_armed",
            &[("error", &error.message)],
        );
    }

    /// Makes sure that a running session has an execution and a watchdog, and one at rest the
    /// alarm of what is due next.
    async fn kick(self: &Rc<Self>) -> Result<()> {
        let Some(status) = self.read(|session| session.record.status)? else {
            return Ok(());
        };
        if status != SessionStatus::Running {
            return self.arm_at_rest(&[]).await;
        }
        if self.runtime.is_leaving() {
            // What began here would be cut off at once; the next instance begins it.
            let at = self.now().saturating_add(LEAVING_MS);
            return self.runtime.set_alarm(Some(at)).await;
        }
        if !self.is_executing() {
            if self.runtime.was_cut_by_another() {
                self.apply(Session::wake_uncharged)?;
            } else {
                self.apply(Session::wake)?;
            }
            self.launch()?;
            self.log(Level::Info, "wake", &[]);
        }
        self.arm_watchdog().await
    }

    async fn arm_watchdog(&self) -> Result<()> {
        if mutants::lacks(Mutant::Watchdog) {
            return Ok(());
        }
        self.runtime
            .set_alarm(Some(self.now().saturating_add(WATCHDOG_MS)))
            .await
    }

    /// Arms the watchdog in the transaction that begins a run, as the last of it, or in the turn of a
    /// commit: one that is refused at once refuses that. The rest of its word comes with the future.
    fn watch(self: &Rc<Self>) -> Result<LocalBoxFuture<'static, Result<()>>> {
        if mutants::lacks(Mutant::BegunIsWatched) {
            return Ok(async { Ok(()) }.boxed_local());
        }
        let this = self.clone();
        let mut armed = async move { this.arm_watchdog().await }.boxed_local();
        match (&mut armed).now_or_never() {
            None => Ok(armed),
            Some(done) => done.map(|()| async { Ok(()) }.boxed_local()),
        }
    }

    /// A refusal writes nothing, and a run without a runner is looked after all the same.
    async fn look_after_running(&self) -> Result<()> {
        let running = self.read(|session| session.record.status == SessionStatus::Running)?;
        if running == Some(true) && !self.is_executing() {
            self.runtime.set_alarm(Some(self.now())).await?;
        }
        Ok(())
    }

    /// Starts the execution of the session's present epoch.
    fn launch(self: &Rc<Self>) -> Result<()> {
        let Some(epoch) = self.read(|session| session.record.epoch)? else {
            return Ok(());
        };
        let number = self.next_runner.get().wrapping_add(1);
        self.next_runner.set(number);
        let stop = StopSignal::default();
        let (end, ending) = AbortHandle::new_pair();
        *self.runner.borrow_mut() = Some(Runner {
            number,
            stop: stop.clone(),
            end,
        });
        let this = self.clone();
        let execution = async move {
            // What takes the object down with it takes back what is not durable: the attempt must
            // count before anything is tried again.
            let counted = this.count_attempt().await;
            let halt = match counted {
                Ok(()) => this.clone().run(epoch, stop).await.err(),
                Err(error) => Some(Halt::Failed(error)),
            };
            this.forget_runner(number);
            match halt {
                None => {
                    // A resume may have begun the next run meanwhile: it has armed its own alarm.
                    let at_rest =
                        this.read(|session| session.record.status != SessionStatus::Running);
                    if matches!(at_rest, Ok(Some(true)))
                        && !this.is_executing()
                        && let Err(error) = this.arm_at_rest(&[]).await
                    {
                        // The watchdog is armed still and comes back to it.
                        this.log(
                            Level::Warn,
                            "not_at_rest",
                            &[("code", error.code.as_str()), ("error", &error.message)],
                        );
                    }
                }
                Some(Halt::Superseded) => this.log(Level::Info, "superseded", &[]),
                Some(Halt::Failed(error)) => {
                    this.log(
                        Level::Error,
                        "execution_failed",
                        &[
                            ("code", error.code.as_str()),
                            ("error", &error.message),
                            ("detail", error.detail.as_deref().unwrap_or_default()),
                        ],
                    );
                }
            }
        };
        let execution = Abortable::new(execution, ending);
        self.runtime.spawn(Box::pin(async move {
            // An aborted execution was ended by a deletion: there is nothing left to see to.
            let _ended = execution.await;
        }));
        Ok(())
    }

    /// Waits until the attempt that is about to be made is durable; the first one of a run has
    /// nothing to count.
    async fn count_attempt(&self) -> Result<()> {
        if self.read(|session| session.record.attempts)?.unwrap_or(0) == 0 {
            return Ok(());
        }
        self.runtime.sync().await
    }

    fn forget_runner(&self, number: u64) {
        let mut runner = self.runner.borrow_mut();
        if runner
            .as_ref()
            .is_some_and(|runner| runner.number == number)
        {
            *runner = None;
        }
    }

    /// Whether an execution lives in this instance right now.
    fn is_executing(&self) -> bool {
        self.runner.borrow().is_some()
    }

    fn signal_stop(&self) {
        let stop = self
            .runner
            .borrow()
            .as_ref()
            .map(|runner| runner.stop.clone());
        if let Some(stop) = stop {
            stop.set();
        }
    }

    fn now(&self) -> Timestamp {
        self.runtime.now()
    }

    /// Reads from the session; `None` when none was begun here.
    fn read<T>(&self, look: impl FnOnce(&Session) -> T) -> Result<Option<T>> {
        let mut cached = self.session.borrow_mut();
        if cached.is_none() {
            *cached = Session::load(&*self.store)?;
            if let Some(session) = cached.as_ref() {
                self.publisher().committed(extent(&session.record));
            }
        }
        Ok(cached.as_ref().map(look))
    }

    /// Computes a transition, commits it and makes it the session. Nothing changes on an error.
    fn apply(&self, change: impl FnOnce(&Session, Timestamp) -> Result<Transition>) -> Result<()> {
        let now = self.now();
        let Some(transition) = self.read(|session| change(session, now))? else {
            return Err(Error::not_found());
        };
        self.commit(transition?)
    }

    /// Makes a session the present one whose commit was part of a larger transaction, and tells
    /// readers how far its log goes.
    fn adopt(&self, next: Session) {
        let extent = extent(&next.record);
        *self.session.borrow_mut() = Some(next);
        self.publisher().committed(extent);
    }

    /// The transition with what the agent's policies add to its commit.
    fn within_policies(&self, transition: Transition) -> Transition {
        self.owing(self.within_retention(transition))
    }

    /// Makes what was committed the present, and tells readers.
    fn take_over(&self, transition: Transition) {
        let extent = extent(&transition.next.record);
        *self.session.borrow_mut() = Some(transition.next);
        self.publisher().said(extent, &transition.commit);
    }

    fn publisher(&self) -> Rc<Publisher> {
        self.publisher.borrow().clone()
    }

    fn commit(&self, transition: Transition) -> Result<()> {
        let transition = self.within_policies(transition);
        match self.store.commit(&transition.commit) {
            Ok(()) => {
                self.take_over(transition);
                Ok(())
            }
            Err(error) => {
                // The cache may be behind the store now; the next read loads it anew.
                *self.session.borrow_mut() = None;
                if let CommitError::Fenced { .. } = error {
                    self.signal_stop();
                }
                Err(error.into())
            }
        }
    }

    /// As [`Self::apply`], for an execution: refused once another execution owns the session.
    fn apply_in(
        &self,
        epoch: Epoch,
        change: impl FnOnce(&Session, Timestamp) -> Result<Transition>,
    ) -> Result<(), Halt> {
        match self.read(|session| session.record.epoch)? {
            Some(current) if current == epoch => Ok(self.apply(change)?),
            _ => Err(Halt::Superseded),
        }
    }

    /// One structured log line with the session's ids. Never content, never credentials.
    fn log(&self, level: Level, event: &str, fields: &[(&str, &str)]) {
        let session = self.session.borrow();
        let session = session.as_ref().map(|session| &session.record);
        self.runtime.tell(&Line {
            level,
            event,
            session: session.map(|record| LineSession {
                session_id: record.session_id.as_str(),
                agent_type: record.agent_type.as_str(),
                run_id: record.run_id.as_str(),
                epoch: record.epoch,
                step: record.step_count,
                trace_id: record.origin.trace.as_ref().map(|trace| trace.trace_id()),
            }),
            fields,
        });
    }

    fn stored_missing(what: &str, key: &dyn fmt::Display) -> Error {
        Error::new(
            Code::InvalidStoredState,
            format!("A {what} row is missing."),
        )
        .with_detail(key.to_string())
    }
}

/// Where the log of a session begins and ends.
fn extent(record: &SessionRecord) -> (Sequence, Sequence) {
    (record.floor, record.last_sequence)
}
