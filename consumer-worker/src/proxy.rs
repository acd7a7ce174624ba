//! What a child in another service looks like, for readers that reach this service alone.
//!
//! A reader may see a child only through a session of this service that knows it: the child's id
//! extends that session's id by `-remote-`, and the session announced it with that agent type.
//! Whatever is not so is the 404 of an unknown session; a reader learns nothing else from it. The
//! order of the checks is the mount's own, because the mount makes them.

use std::rc::Rc;

use bytes::Bytes;
use http::{HeaderValue, StatusCode, Uri};
use remote_agents::http::{Request, Response, json, refusal};
use remote_agents::mount::{Forward, INTERNAL_CALLER, Mount, Objects};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::request::parameter;
use remote_agents::transport::{Transport, TransportError};
use remote_agents::{Code, Error, Result};

#[cfg(test)]
mod tests;

/// The agent type of a child that is not named: the one that this service calls.
const DEFAULT_TYPE: &str = crate::writer::RESEARCH_AGENT_TYPE;

/// What stands between a session's id and the rest of a remote descendant's.
const MARK: &str = "-remote-";

/// What is read of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Its state.
    Snapshot,
    /// What it has cost.
    Usage,
}

impl Reading {
    /// What this path reads, if it is one of the two.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        match path {
            "/api/child-snapshot" => Some(Self::Snapshot),
            "/api/child-usage" => Some(Self::Usage),
            _ => None,
        }
    }
}

/// Reads children for whoever may use the mount.
pub struct ChildProxy<'a> {
    /// The mount whose callers may read.
    pub mount: &'a Mount,
    /// The mount's base path.
    pub base_path: &'a str,
    /// The agent type that the mount serves.
    pub agent_type: &'a AgentType,
    /// The sessions of this service.
    pub objects: &'a dyn Objects,
    /// The way to sessions of a type in the other service, unprojected.
    pub children: &'a dyn Fn(AgentType) -> Rc<dyn Transport>,
}

impl ChildProxy<'_> {
    /// Answers a request for one of the two paths.
    pub async fn answer(&self, reading: Reading, request: &Request) -> Response {
        let mut response = match self.read(reading, request).await {
            Ok(response) => response,
            Err(response) => *response,
        };
        self.mount.stamp(response.headers_mut());
        response
    }

    async fn read(&self, reading: Reading, request: &Request) -> Result<Response, Box<Response>> {
        let refused = |error: Error| Box::new(refusal(&error));
        let query = request.uri().query();
        let forward = self.admitted(request, query.unwrap_or_default()).await?;
        let (child, caller) = (
            forward.asked.session_id,
            forward.request.headers().get(INTERNAL_CALLER),
        );
        let child_type = parameter(query, "agentType").map_err(refused)?;
        let child_type = AgentType::parse(child_type.as_deref().unwrap_or(DEFAULT_TYPE))
            .map_err(|_| refused(Error::not_found()))?;
        let known = self.is_known(&child, &child_type, caller).await;
        if !known.map_err(refused)? {
            return Err(refused(Error::not_found()));
        }
        let transport = (self.children)(child_type);
        match reading {
            Reading::Snapshot => transport
                .snapshot(&child)
                .await
                .map(|snapshot| json(200, &snapshot)),
            Reading::Usage => transport.usage(&child).await.map(|usage| json(200, &usage)),
        }
        .map_err(|error| Box::new(failed(&error)))
    }

    /// The child, after every check that the mount makes of a read of its own: method, credentials,
    /// version, `sessionId`, in this order and with the same refusals.
    async fn admitted(&self, request: &Request, query: &str) -> Result<Forward, Box<Response>> {
        let address = format!("{}/{}/snapshot?{query}", self.base_path, self.agent_type);
        let address: Uri = address.parse().map_err(|_| {
            Box::new(refusal(&Error::invalid(
                "query",
                "The query cannot be read.",
            )))
        })?;
        let admission = self
            .mount
            .admit_within_limits(request.method(), &address, request.headers())
            .await
            .map_err(Box::new)?;
        admission.forward(Bytes::new()).map_err(Box::new)
    }

    /// Whether a session of this service knows the child under this type: one that the caller may
    /// reach, where the mount binds sessions to their callers.
    async fn is_known(
        &self,
        child: &SessionId,
        child_type: &AgentType,
        caller: Option<&HeaderValue>,
    ) -> Result<bool> {
        let mut unasked = false;
        for session in ancestors(child) {
            let question = format!(
                "http://object/{}/descendant?{}",
                self.agent_type,
                form_urlencoded::Serializer::new(String::new())
                    .append_pair("sessionId", session.as_str())
                    .append_pair("subSessionId", child.as_str())
                    .append_pair("subAgentType", child_type.as_str())
                    .finish()
            );
            let mut request = Request::new(Bytes::new());
            *request.uri_mut() = question
                .parse()
                .map_err(|e| Error::internal(format!("descendant: {e}")))?;
            if let Some(caller) = caller {
                request
                    .headers_mut()
                    .insert(INTERNAL_CALLER, caller.clone());
            }
            match self
                .objects
                .object(&session)
                .fetch(request)
                .await
                .map(|answer| answer.status())
            {
                Ok(StatusCode::OK) => return Ok(true),
                Ok(StatusCode::NOT_FOUND) => {}
                Ok(_) | Err(_) => unasked = true,
            }
        }
        if unasked {
            // "Unknown" would be a guess here, and readers take a 404 for final.
            return Err(Error::new(
                Code::TransportError,
                "The session cannot be reached right now; try again.",
            ));
        }
        Ok(false)
    }
}

/// The sessions whose remote descendant this could be, the nearest to the root first.
fn ancestors(child: &SessionId) -> impl Iterator<Item = SessionId> {
    let id = child.as_str();
    // Two marks may share a character: a session's own id can end like one begins.
    (1..id.len())
        .filter_map(|at| id.split_at_checked(at))
        .filter(|(_, rest)| rest.len() > MARK.len() && rest.starts_with(MARK))
        .filter_map(|(session, _)| SessionId::parse(session).ok())
}

/// What the other service's failure is here.
fn failed(error: &TransportError) -> Response {
    let refused = match error {
        TransportError::Refused {
            status, envelope, ..
        } => Some((*status, envelope.known_code())),
        _ => None,
    };
    match refused {
        Some((_, Some(Code::FeatureUnavailable))) => with_status(
            StatusCode::NOT_IMPLEMENTED,
            &Error::new(
                Code::FeatureUnavailable,
                "The other service does not offer this.",
            ),
        ),
        Some((404, _)) => refusal(&Error::not_found()),
        _ => with_status(
            StatusCode::BAD_GATEWAY,
            &Error::new(
                Code::TransportError,
                "The other service cannot answer right now; try again.",
            )
            .with_detail(error.to_string()),
        ),
    }
}

fn with_status(status: StatusCode, error: &Error) -> Response {
    let mut response = refusal(error);
    *response.status_mut() = status;
    response
}
