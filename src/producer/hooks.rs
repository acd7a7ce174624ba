//! The hooks at a run's end: one inside its last commit, one that is owed from that commit on.
//!
//! A hook with effects outside is begun again until it has come to its end once: its row stands
//! from the commit that settled the run, and each attempt is counted before it is made. Section 5.

use std::rc::Rc;
use std::time::Duration;

use futures::future::{Either, select};

use super::{Halt, Producer};
use crate::agent::hooks::{changed, fields};
use crate::agent::{Agent, Completing, Identity, Settled, SettledOutcome};
use crate::error::{Code, Error, Result};
use crate::platform::Level;
use crate::protocol::ids::millis;
use crate::protocol::message::SessionStatus;
use crate::protocol::usage::UsageRollup;
use crate::session::{Settlement, Transition};
use crate::store::{DueHook, Epoch, RunRecord, Write};

/// How often a hook is begun for one run and status.
const MAX_HOOK_ATTEMPTS: u32 = 10;

/// The wait after a hook's first attempt; it doubles.
const HOOK_RETRY: Duration = Duration::from_secs(2);

/// The longest wait between two attempts of a hook.
const HOOK_RETRY_MOST: Duration = Duration::from_secs(3_600);

impl Producer {
    /// Completes the run in one transaction with what its hook does. The inner error is the hook's:
    /// then nothing of it stands and the run has not completed.
    pub(super) fn complete(
        &self,
        epoch: Epoch,
        agent: &Agent,
        end: (Settlement, RunRecord, UsageRollup),
        entropy: [u8; 16],
    ) -> Result<Result<(), Error>, Halt> {
        let (Some(hook), Settlement::Completed { output }) = (&agent.before_completion, &end.0)
        else {
            return Ok(Err(Error::internal(
                "the run does not complete with a hook",
            )));
        };
        let present = self.read(|session| {
            let record = &session.record;
            let ids = (record.session_id.clone(), record.run_id.clone());
            (record.epoch, ids, session.final_state())
        })?;
        let Some((current, (session_id, run_id), state)) = present else {
            return Err(Halt::Superseded);
        };
        if current != epoch {
            return Err(Halt::Superseded);
        }
        let state = state?;
        let now = self.now();
        let database = self.store.database();
        let (mut refused, mut committed) = (None, None);
        let outcome = database.transaction(&mut || {
            let mut fields = fields(&state);
            let made = hook(&mut Completing {
                session_id: &session_id,
                run_id: &run_id,
                output,
                state: &mut fields,
                database,
            });
            let changed = made
                .and_then(|()| changed(agent, &state, fields))
                .inspect_err(|error| refused = Some(error.clone()))?;
            let transition = self
                .read(|session| session.promote_as(end.clone(), changed, entropy, now))?
                .ok_or_else(Error::not_found)??;
            let transition = self.within_policies(transition);
            self.store.commit(&transition.commit)?;
            committed = Some(transition);
            Ok(())
        });
        match (outcome, refused, committed) {
            (Ok(()), _, Some(transition)) => {
                self.take_over(transition);
                Ok(Ok(()))
            }
            (_, Some(error), _) => Ok(Err(error)),
            (outcome, ..) => {
                // As in `commit`: the cache may be behind the store.
                *self.session.borrow_mut() = None;
                outcome?;
                Ok(Ok(()))
            }
        }
    }

    /// The transition; if it settles a run whose agent has a hook for that, with what is owed.
    pub(super) fn owing(&self, mut transition: Transition) -> Transition {
        let agent = self.agents.find(transition.next.record.agent_type.as_str());
        if agent.is_none_or(|agent| agent.after_settled.is_none()) {
            return transition;
        }
        let due = transition.settles().map(|(run_id, status)| DueHook {
            run_id: run_id.clone(),
            status,
            attempts: 0,
            due_at: self.now(),
        });
        transition.commit.writes.extend(due.map(Write::DueHook));
        transition
    }

    /// Begins an attempt of a hook that is owed; nobody waits for it.
    pub(super) async fn begin_hook(self: &Rc<Self>, agent: Rc<Agent>, due: DueHook) -> Result<()> {
        self.hook_at_work.set(true);
        let this = self.clone();
        self.runtime.spawn(Box::pin(async move {
            let at_work = AtWork(this.clone());
            let attempted = this.attempt_hook(&agent, due).await;
            drop(at_work);
            let seen_to = match attempted {
                Ok(()) => this.after_hook().await,
                Err(error) => Err(error),
            };
            if let Err(error) = seen_to {
                // The alarm is armed still and comes back to it.
                let fields = [("code", error.code.as_str()), ("error", &*error.message)];
                this.log(Level::Warn, "settled_hook_not_stored", &fields);
            }
        }));
        // Whatever ends this object now, the alarm finds the hook again.
        self.arm_watchdog().await
    }

    /// A run that has begun while a hook was at work has its own alarm.
    async fn after_hook(self: &Rc<Self>) -> Result<()> {
        match self.read(|session| session.record.status)? {
            None | Some(SessionStatus::Running) => Ok(()),
            Some(_) => self.arm_at_rest(&[]).await,
        }
    }

    /// Makes one attempt of a hook that is owed.
    async fn attempt_hook(self: &Rc<Self>, agent: &Agent, due: DueHook) -> Result<()> {
        let ids = [
            ("settledRunId", due.run_id.as_str()),
            ("status", due.status.as_str()),
        ];
        let Some(hook) = agent.after_settled.clone() else {
            // The agent has no such hook any more.
            return self.apply(|session, _| Ok(session.hook(Write::HookDone(due.clone()))));
        };
        if due.attempts >= MAX_HOOK_ATTEMPTS {
            self.log(Level::Error, "settled_hook_given_up", &ids);
            return self.apply(|session, _| Ok(session.hook(Write::HookDone(due.clone()))));
        }
        let life = self.read(|session| session.record.stream_id.clone())?;
        let settled = self.settled(&due)?;
        let wait = HOOK_RETRY
            .saturating_mul(1_u32 << due.attempts.min(16))
            .min(HOOK_RETRY_MOST);
        let begun = DueHook {
            attempts: due.attempts.saturating_add(1),
            due_at: self.now().saturating_add(millis(wait)),
            ..due.clone()
        };
        self.apply(|session, _| Ok(session.hook(Write::DueHook(begun))))?;
        let limit = self.runtime.sleep(agent.limits.tool_timeout);
        let outcome = match select(hook(settled), limit).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right(_) => Err(Error::new(Code::RunTimeout, "The hook took too long.")),
        };
        if self.read(|session| session.record.stream_id.clone())? != life {
            // The session was deleted meanwhile.
            return Ok(());
        }
        match outcome {
            Ok(()) => self.apply(|session, _| Ok(session.hook(Write::HookDone(due.clone())))),
            Err(error) => {
                let [run, status] = ids;
                let fields = [run, status, ("code", error.code.as_str())];
                self.log(Level::Warn, "settled_hook_failed", &fields);
                Ok(())
            }
        }
    }

    fn settled(&self, due: &DueHook) -> Result<Settled> {
        let (identity, stream_id) = self
            .read(|session| {
                let record = &session.record;
                let identity = Identity {
                    session_id: record.session_id.clone(),
                    agent_type: record.agent_type.clone(),
                    origin: record.origin.clone(),
                };
                (identity, record.stream_id.clone())
            })?
            .ok_or_else(Error::not_found)?;
        let terminal = self
            .store
            .run(due.run_id.as_str())?
            .and_then(|run| run.terminal)
            .filter(|terminal| terminal.status == due.status);
        Ok(Settled {
            identity,
            run_id: due.run_id.clone(),
            status: due.status,
            outcome: terminal.map(|terminal| SettledOutcome {
                output: terminal.output,
                failure: terminal.failure,
                state: terminal.state,
                usage: terminal.usage,
            }),
            attempt: due.attempts.saturating_add(1),
            idempotency_key: format!("settled:{stream_id}:{}:{}", due.run_id, due.status.as_str()),
        })
    }
}

/// A hook is at work as long as this lives.
struct AtWork(Rc<Producer>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.hook_at_work.set(false);
    }
}
