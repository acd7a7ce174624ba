//! Agents in this process for a program that talks to them: say something, wait for what comes of it.

use std::future::Future;
use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;
use serde_json::Value;

use super::{LocalObjects, LocalRuntime, LogSink};
use crate::agent::Agents;
use crate::error::{Code, Error, Result};
use crate::platform::Runtime as _;
use crate::protocol::frame::Frame;
use crate::protocol::ids::{AgentType, Position, SessionId, hex, millis};
use crate::protocol::message::{ResumeRequest, SessionStatus, StartRequest};
use crate::transport::{HttpTransport, ObjectsFetch, Transport, TransportError};

/// Runs a program of agents to its end on this thread: tokio's clock, sockets and local tasks.
///
/// # Errors
/// `INTERNAL` when the system gives no event loop, or what the program says.
pub fn block_on<T>(program: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::internal(format!("the event loop: {error}")))?;
    tokio::task::LocalSet::new().block_on(&runtime, program)
}

/// The sessions of some agents, each with its database in memory. They run inside of [`block_on`], or
/// of another tokio `LocalSet`.
#[derive(Clone)]
pub struct Host {
    objects: Rc<LocalObjects>,
    runtime: Rc<LocalRuntime>,
}

impl Host {
    /// Hosts the agents that a function makes; each session asks for its own. The function gets a
    /// host of the same sessions, through which an agent reaches its siblings.
    #[must_use]
    pub fn new(agents: impl Fn(&Self) -> Result<Agents> + 'static) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let base = now.map_or(0, millis);
        let log: LogSink = Rc::new(|_, _| {});
        let make = move |objects: &Rc<LocalObjects>, runtime: &Rc<LocalRuntime>| {
            agents(&Self {
                objects: objects.clone(),
                runtime: runtime.clone(),
            })
        };
        Self {
            objects: LocalObjects::new(base, log.clone(), Rc::new(make)),
            runtime: LocalRuntime::new(base, log),
        }
    }

    /// The objects, for a mount over them.
    #[must_use]
    pub fn objects(&self) -> &Rc<LocalObjects> {
        &self.objects
    }

    /// A way to the sessions of an agent here, as a sub-agent takes it.
    ///
    /// # Errors
    /// `VALIDATION_ERROR` when the agent type is malformed.
    pub fn transport(&self, agent_type: &str) -> Result<Rc<dyn Transport>> {
        let fetch = Rc::new(ObjectsFetch::new(self.objects.clone()));
        let (runtime, agent_type) = (self.runtime.clone(), AgentType::parse(agent_type)?);
        Ok(Rc::new(HttpTransport::new(
            fetch,
            runtime,
            "http://object",
            "",
            agent_type,
        )))
    }

    /// Says something to a session, which begins with it or goes on, and waits for the output of the
    /// run.
    ///
    /// # Errors
    /// Why the message was refused, or why the run did not complete.
    pub async fn say(&self, agent_type: &str, session: &str, message: &str) -> Result<Value> {
        self.follow(agent_type, session, message, |_| {}).await
    }

    /// As [`Self::say`], and tells of each chunk of the run as it comes.
    ///
    /// # Errors
    /// As [`Self::say`].
    pub async fn follow(
        &self,
        agent_type: &str,
        session: &str,
        message: &str,
        mut tell: impl FnMut(&Value),
    ) -> Result<Value> {
        let session_id = SessionId::parse(session)?;
        let transport = self.transport(agent_type)?;
        let key = hex(&self.runtime.entropy());
        let message = message.to_owned();
        let begun = match transport.status(&session_id).await {
            Ok(_) => {
                let request = ResumeRequest {
                    session_id: session_id.clone(),
                    mode: None,
                    message: Some(message),
                    parent: None,
                };
                transport.resume(request, key).await
            }
            Err(TransportError::Refused { status: 404, .. }) => {
                let request = StartRequest {
                    session_id: session_id.clone(),
                    agent_type: None,
                    message,
                    state: None,
                    metadata: None,
                    user_id: None,
                    tags: None,
                    parent: None,
                };
                transport.start(request, key).await
            }
            Err(error) => Err(error),
        };
        begun.map_err(refused)?;
        let mut cursor = Position::None;
        loop {
            let attached = transport.stream(&session_id, cursor, None).await;
            let mut frames = attached.map_err(refused)?;
            // A stream that breaks off is attached again where it was.
            while let Some(Ok(frame)) = frames.next().await {
                match frame {
                    Frame::Chunk { sequence, chunk } => {
                        cursor = Position::At(sequence);
                        tell(&Value::Object(chunk.0));
                    }
                    Frame::End(end) if end.status == SessionStatus::Completed => {
                        return Ok(end.output.unwrap_or_default());
                    }
                    Frame::End(_) => {
                        return Err(Error::new(Code::RunInterrupted, "The run was interrupted."));
                    }
                    Frame::Error(error) if error.recoverable => break,
                    Frame::Error(error) => {
                        let code = Code::from_wire(&error.code).unwrap_or(Code::Internal);
                        return Err(Error::new(code, error.error));
                    }
                    Frame::CaughtUp { .. } => {}
                }
            }
        }
    }
}

fn refused(error: TransportError) -> Error {
    match error {
        TransportError::Refused { envelope, .. } => {
            let code = envelope.known_code().unwrap_or(Code::Internal);
            Error::new(code, envelope.error)
        }
        other => Error::new(Code::TransportError, "The session cannot be reached.")
            .with_detail(other.to_string()),
    }
}
