//! What the drivers need of a platform: time, randomness, tasks, an alarm, durability.
//!
//! What the drivers do is told in [`Line`]s: ids and outcomes, never content. They are events of
//! `tracing`, with which a program does what it likes.
//!
//! Two shells implement it: Cloudflare and native. Nothing here is `Send`: an object is one thread.

use std::fmt;
use std::time::Duration;

use futures::future::LocalBoxFuture;
use serde_json::{Map, Value};

use crate::error::Result;
use crate::protocol::ids::Timestamp;

/// Time, randomness, tasks and the log of one isolate or thread.
pub trait Runtime {
    /// Milliseconds since the Unix epoch. May stand still between I/O events.
    fn now(&self) -> Timestamp;

    /// 128 fresh random bits.
    fn entropy(&self) -> [u8; 16];

    /// Completes after `duration`.
    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()>;

    /// Runs `task` to its end, whether or not anyone waits; on Workers through `wait_until`.
    fn spawn(&self, task: LocalBoxFuture<'static, ()>);

    /// Writes one line: ids and outcomes, never content or credentials.
    fn log(&self, level: Level, event: &dyn fmt::Display);

    /// Writes one structured line of a driver. Default: as an event of `tracing`, for whichever
    /// subscriber the program has.
    fn tell(&self, line: &Line<'_>) {
        line.trace();
    }
}

/// What an object adds: durability and one alarm.
pub trait ObjectRuntime: Runtime {
    /// Completes when every commit made so far is durable.
    fn sync(&self) -> LocalBoxFuture<'static, Result<()>>;

    /// Tells `told` when every commit made so far is durable. As [`ObjectRuntime::sync`] for one who
    /// does not wait, without a task of its own where the platform can do without.
    fn once_durable(&self, told: Box<dyn FnOnce(Result<()>)>) {
        let sync = self.sync();
        self.spawn(Box::pin(async move { told(sync.await) }));
    }

    /// Arms the object's one alarm for `at`, or disarms it.
    fn set_alarm(&self, at: Option<Timestamp>) -> LocalBoxFuture<'static, Result<()>>;

    /// Whether this instance is about to be replaced by a fresh one: it answers, but it must begin
    /// nothing. Default: no.
    fn is_leaving(&self) -> bool {
        false
    }

    /// Whether the object's last execution was ended by the fault of another object; told once.
    /// Default: no.
    fn was_cut_by_another(&self) -> bool {
        false
    }
}

/// How important a log line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// What happened.
    Info,
    /// What went wrong and was dealt with.
    Warn,
    /// What went wrong and needs a person.
    Error,
}

/// The target of every [`Line`] in `tracing`.
pub const LOG_TARGET: &str = "remote_agents";

/// One structured line of the log.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// How important it is.
    pub level: Level,
    /// What happened, in one word: `start`, `resume`, `step`, `wake`, `settled`, `refused` and the
    /// like.
    pub event: &'a str,
    /// Whom it happened to, where there is a session.
    pub session: Option<LineSession<'a>>,
    /// What more there is to say, by name.
    pub fields: &'a [(&'a str, &'a str)],
}

/// The ids of a [`Line`].
#[derive(Clone, Copy, Debug)]
pub struct LineSession<'a> {
    /// The session.
    pub session_id: &'a str,
    /// Its agent type.
    pub agent_type: &'a str,
    /// Its latest run.
    pub run_id: &'a str,
    /// The execution that owns it.
    pub epoch: u64,
    /// Its committed steps.
    pub step: u64,
    /// The trace that its start belongs to.
    pub trace_id: Option<&'a str>,
}

/// Writes a line as an event whose fields have names of their own. What is not among them stands in
/// `more`.
macro_rules! trace {
    ($line:expr, [$($name:ident),* $(,)?]) => {{
        const NAMED: &[&str] = &[$(stringify!($name)),*];
        let line: &Line<'_> = $line;
        let field = |name: &str| {
            let mut fields = line.fields.iter();
            fields.find(|(known, _)| *known == name).map(|(_, value)| *value)
        };
        let more: Vec<String> = line
            .fields
            .iter()
            .filter(|(name, _)| !NAMED.contains(name))
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let more = (!more.is_empty()).then(|| more.join(" "));
        let session = line.session.as_ref();
        macro_rules! event {
            ($level:ident) => {
                tracing::event!(
                    target: LOG_TARGET,
                    tracing::Level::$level,
                    event = line.event,
                    sessionId = session.map(|session| session.session_id),
                    agentType = session.map(|session| session.agent_type),
                    runId = session.map(|session| session.run_id),
                    epoch = session.map(|session| session.epoch),
                    step = session.map(|session| session.step),
                    traceId = session.and_then(|session| session.trace_id),
                    $($name = field(stringify!($name)),)*
                    more = more.as_deref(),
                )
            };
        }
        match line.level {
            Level::Info => event!(INFO),
            Level::Warn => event!(WARN),
            Level::Error => event!(ERROR),
        }
    }};
}

impl Line<'_> {
    /// The line as a JSON object.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let mut line = Map::new();
        line.insert("event".into(), self.event.into());
        if let Some(session) = &self.session {
            line.insert("sessionId".into(), session.session_id.into());
            line.insert("agentType".into(), session.agent_type.into());
            line.insert("runId".into(), session.run_id.into());
            line.insert("epoch".into(), session.epoch.into());
            line.insert("step".into(), session.step.into());
            if let Some(trace_id) = session.trace_id {
                line.insert("traceId".into(), trace_id.into());
            }
        }
        for (name, value) in self.fields {
            line.insert((*name).into(), (*value).into());
        }
        Value::Object(line)
    }

    /// The line as an event of `tracing`, with the target [`LOG_TARGET`].
    pub fn trace(&self) {
        trace!(
            self,
            [
                code,
                error,
                detail,
                field,
                kind,
                status,
                note,
                toolCallId,
                subSessionId,
                askedSessionId,
                settledRunId,
            ]
        );
    }
}
