//! What is due for a session at rest, and how a session ends for good.
//!
//! A session at rest has an alarm exactly where its agent has a policy by age, at the next instant
//! at which the policy wants something. A deletion leaves nothing: no row, no table of an agent's
//! own, no alarm, no execution that could write into a later life of the same id.

use std::rc::Rc;

use futures::channel::oneshot;

use super::Producer;
use super::publish::Publisher;
use crate::agent::{Agent, SubAgent};
use crate::error::{Code, Error, Result};
use crate::platform::Level;
use crate::protocol::ids::{SessionId, Timestamp, millis};
use crate::protocol::message::StopRequest;
use crate::session::{SPANS_AT_ONCE, next_expiry, retention};
use crate::store::{Database, DueHook, SqlValue, SubSessionRecord};

/// How often the alarm looks after a session at rest whose agent this version does not know, in
/// milliseconds.
const UNKNOWN_AGENT_MS: u64 = 3_600_000;

/// What a policy wants of a session at rest.
enum Due {
    /// To be deleted.
    Expiry,
    /// To lose the oldest part of its log.
    Trim,
    /// To have a hook called that a settled run is owed.
    Hook(DueHook),
}

impl Producer {
    /// Deletes the session completely, whether it runs or not: every row and every table in the
    /// object's database, the alarm, and what is held here. Its execution is ended where it stands,
    /// readers are told `NOT_FOUND`, and children that still work for it are aborted as far as they
    /// can be reached. The id is unknown afterwards; a start begins a new life of it, with another
    /// stream. Deleting nothing is no error.
    ///
    /// # Errors
    /// The database's, or `invalid_stored_state` when a later version than this one wrote it;
    /// nothing is deleted then. `INTERNAL` when the object ends before the deletion is known to be
    /// durable; asking again is safe.
    pub async fn delete(self: &Rc<Self>) -> Result<()> {
        let children = self.children_of_the_deleted();
        self.log(Level::Info, "deleting", &[]);
        self.store.delete_all(&mut drop_tables)?;
        // In the same turn, nothing of this life is left to go on.
        let old = self.publisher.replace(Publisher::new(self.runtime.clone()));
        old.leave();
        *self.session.borrow_mut() = None;
        let runner = self.runner.borrow_mut().take();
        if let Some(runner) = runner {
            runner.stop.set();
            runner.end.abort();
        }
        let disarmed = self.runtime.set_alarm(None);
        for (sub, child) in children {
            self.abort_child(sub, child);
        }
        // Readers are told once it is durable, also if the caller does not wait for it.
        let (told, durable) = oneshot::channel();
        let this = self.clone();
        self.runtime.spawn(Box::pin(async move {
            let synced = this.runtime.sync().await;
            old.close(synced.is_ok());
            // Whoever asked for the deletion may be gone.
            drop(told.send(synced));
        }));
        if let Err(error) = disarmed.await {
            // It fires once, finds nothing and goes.
            self.log(
                Level::Warn,
                "alarm_not_cleared",
                &[("error", &error.message)],
            );
        }
        durable
            .await
            .map_err(|_| Error::internal("the object has ended"))?
    }

    /// Does what is due for a session at rest, and arms the alarm for what is due next: a hook that
    /// is owed, a policy's instant, or a child that has to be looked at, less those in `done`. For
    /// nothing, where there is none of these.
    pub(super) async fn arm_at_rest(self: &Rc<Self>, done: &[SessionId]) -> Result<()> {
        loop {
            let Some(agent) = self.agent()? else {
                // A version of the code that knows the agent finds what is due by the alarm alone.
                let later = self.read(|_| self.now().saturating_add(UNKNOWN_AGENT_MS))?;
                return self.runtime.set_alarm(later).await;
            };
            let child = self.next_child(done)?;
            match self.due(&agent)? {
                Some((at, due)) if at <= self.now() => match due {
                    Due::Hook(_) if self.hook_at_work.get() => return self.arm_watchdog().await,
                    Due::Hook(due) => return self.begin_hook(agent, due).await,
                    Due::Trim => self.trim()?,
                    Due::Expiry => {
                        self.log(Level::Info, "expired", &[]);
                        return self.delete().await;
                    }
                },
                later => {
                    let policy = later.map(|(at, _)| at);
                    let next = policy.into_iter().chain(child).min();
                    return self.runtime.set_alarm(next).await;
                }
            }
        }
    }

    /// The agent of the session here.
    fn agent(&self) -> Result<Option<Rc<Agent>>> {
        let agent_type = self.read(|session| session.record.agent_type.clone())?;
        Ok(agent_type.and_then(|agent_type| self.agents.find(agent_type.as_str())))
    }

    /// What is due first, now or later.
    fn due(&self, agent: &Agent) -> Result<Option<(Timestamp, Due)>> {
        // What is owed comes before anything is given up.
        if let Some(due) = self.store.due_hooks()?.into_iter().next() {
            return Ok(Some((due.due_at, Due::Hook(due))));
        }
        let expiry = match agent.expiry {
            Some(after) => {
                let after = millis(after);
                self.read(|session| session.record.updated_at.saturating_add(after))?
            }
            None => None,
        };
        let trim = if agent.retention.max_age.is_some() {
            let stats = self.store.log_stats(1)?;
            self.read(|session| next_expiry(&agent.retention, session, &stats))?
                .flatten()
        } else {
            None
        };
        Ok(match (expiry, trim) {
            (Some(expiry), Some(trim)) if trim < expiry => Some((trim, Due::Trim)),
            (Some(expiry), _) => Some((expiry, Due::Expiry)),
            (None, Some(trim)) => Some((trim, Due::Trim)),
            (None, None) => None,
        })
    }

    /// Drops what has grown too old.
    fn trim(&self) -> Result<()> {
        let stats = self.store.log_stats(SPANS_AT_ONCE)?;
        self.apply(|session, now| {
            let policy = self.agents.find(session.record.agent_type.as_str());
            policy
                .and_then(|agent| retention(&agent.retention, session, &stats, now))
                .map(|floor| session.trim(floor))
                .ok_or_else(|| Error::internal("what is due to be trimmed cannot be trimmed"))
        })
    }

    /// The children that work for the session. What cannot be read does not keep a session from
    /// being deleted.
    fn children_of_the_deleted(&self) -> Vec<(Rc<SubAgent>, SubSessionRecord)> {
        let agent = self.agent().ok().flatten();
        let children = self.open_children().unwrap_or_default().into_iter();
        let reached = children.filter_map(|child| {
            let sub =
                agent.as_ref()?.sub_agents.iter().find(|sub| {
                    sub.agent_type == child.agent_type && sub.location == child.location
                })?;
            Some((sub.clone(), child))
        });
        reached.collect()
    }

    /// Nobody can resume a child for a parent that is gone.
    fn abort_child(self: &Rc<Self>, sub: Rc<SubAgent>, child: SubSessionRecord) {
        let this = self.clone();
        self.runtime.spawn(Box::pin(async move {
            let request = StopRequest {
                session_id: child.sub_session_id.clone(),
                reason: Some("The calling session was deleted.".into()),
            };
            if let Err(error) = sub.transport.abort(request).await {
                let fields = [
                    ("subSessionId", child.sub_session_id.as_str()),
                    ("error", &*error.to_string()),
                ];
                this.log(Level::Warn, "child_not_aborted", &fields);
            }
        }));
    }
}

/// Drops every table that is not ours or the platform's: all that is in the object belongs to its
/// one session.
fn drop_tables(database: &dyn Database) -> Result<()> {
    // A virtual table takes its shadow tables along, and they cannot be dropped by themselves.
    for wanted in ["AND sql LIKE 'CREATE VIRTUAL%'", ""] {
        let sql = format!(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 3) <> 'ra_'
             AND substr(name, 1, 7) <> 'sqlite_' AND substr(name, 1, 4) <> '_cf_' {wanted}"
        );
        let names = match database.query(&sql, &[]) {
            Ok(names) => names,
            // A store without SQL has no tables of an agent's own.
            Err(error) if error.code == Code::NotSupported => return Ok(()),
            Err(error) => return Err(error),
        };
        for name in names.into_iter().flatten() {
            if let SqlValue::Text(name) = name {
                let name = name.replace('"', "\"\"");
                database.query(&format!("DROP TABLE IF EXISTS \"{name}\""), &[])?;
            }
        }
    }
    Ok(())
}
