//! Stories of a parent and its children, told over any transport.
//!
//! The same list is run natively (`tests/it/story.rs`: in this process and over HTTP on loopback)
//! and inside of workerd (`miniflare/contract-worker`: over a service binding and over an object
//! stub). A story panics nowhere: what does not hold is its error.

pub mod agents;
pub mod log;
pub mod mischief;
pub mod paired;
mod tales;

use std::rc::Rc;

use futures::future::LocalBoxFuture;
use remote_agents::platform::Runtime;
use remote_agents::protocol::ids::SessionId;
use remote_agents::protocol::message::{
    ResumeRequest, StartRequest, StatusResponse, StopRequest, UsageResponse,
};
use remote_agents::transport::{HttpTransport, Transport, TransportError};
use remote_agents::{AgentType, SessionId as Id};
use serde_json::{Value, json};

use agents::{PARENT, Way};
pub use log::Log;
pub use tales::STORIES;

/// What a story came to: nothing, or what did not hold.
pub type Told = Result<(), String>;

/// A story.
pub struct Story {
    /// The sentence that it shows.
    pub name: &'static str,
    /// Tells it.
    pub tell: fn(World) -> LocalBoxFuture<'static, Told>,
}

/// Where a story happens.
#[derive(Clone)]
pub struct World {
    /// The service of the parents, for the eight calls.
    pub parents: Rc<dyn Transport>,
    /// The way from a parent to its children, honest; the story takes it too.
    pub way: Way,
    /// The clock of whoever tells the story.
    pub runtime: Rc<dyn Runtime>,
}

impl World {
    /// The eight calls to children of a type.
    pub fn children(&self, agent_type: &str) -> Result<HttpTransport, String> {
        let agent_type = AgentType::parse(agent_type).map_err(|e| e.to_string())?;
        Ok((self.way)(agent_type, self.runtime.clone()).with_policy(agents::policy()))
    }

    /// A session id that nobody has used.
    pub fn fresh(&self, name: &str) -> Result<SessionId, String> {
        let [a, b, c, d, e, f, ..] = self.runtime.entropy();
        Id::parse(&format!(
            "{name}-{a:02x}{b:02x}{c:02x}{d:02x}{e:02x}{f:02x}"
        ))
        .map_err(|e| e.to_string())
    }

    /// Begins a parent that makes these calls.
    pub async fn begin(&self, wanted: &[(&str, &str)]) -> Result<SessionId, String> {
        let session = self.fresh(PARENT)?;
        let request = StartRequest {
            message: json!(wanted).to_string(),
            ..start(&session)
        };
        let answer = self.parents.start(request, "begin".into()).await;
        answer.map_err(told)?;
        Ok(session)
    }

    /// Begins a parent, and reads its log to the end of its run.
    pub async fn run(&self, wanted: &[(&str, &str)]) -> Result<(SessionId, Log), String> {
        let session = self.begin(wanted).await?;
        let log = Log::of(&*self.parents, &session).await?;
        Ok((session, log))
    }

    /// A parent's rollup.
    pub async fn usage(&self, session: &SessionId) -> Result<Value, String> {
        usage(&*self.parents, session).await
    }
}

/// A start of `session` with nothing but a message.
pub fn start(session: &SessionId) -> StartRequest {
    StartRequest {
        session_id: session.clone(),
        agent_type: None,
        message: "hello".into(),
        state: None,
        metadata: None,
        user_id: None,
        tags: None,
        parent: None,
    }
}

/// A resume of `session` with a message.
pub fn resume(session: &SessionId, message: Option<String>) -> ResumeRequest {
    ResumeRequest {
        session_id: session.clone(),
        mode: None,
        message,
        parent: None,
    }
}

/// A stop of `session`.
pub fn stop(session: &SessionId) -> StopRequest {
    StopRequest {
        session_id: session.clone(),
        reason: None,
    }
}

/// A session's rollup.
pub async fn usage(transport: &dyn Transport, session: &SessionId) -> Result<Value, String> {
    let answer: UsageResponse = transport.usage(session).await.map_err(told)?;
    Ok(answer.rollup)
}

/// A session's status.
pub async fn status(
    transport: &dyn Transport,
    session: &SessionId,
) -> Result<StatusResponse, String> {
    transport.status(session).await.map_err(told)
}

/// An error as a story tells it.
pub fn told(error: TransportError) -> String {
    format!("{error} ({error:?})")
}

/// Leaves the story where something does not hold.
macro_rules! hold {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!("{}: {}", stringify!($holds), format!($($what)+)));
        }
    };
}
use hold;
