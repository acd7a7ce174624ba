//! The documents that a job was started with, for a page that did not start it.
//!
//! They stand in a table of the writer's object and in no state. Whoever may read the session's
//! status may read them: the mount makes the checks, and its refusals are the answers.

use bytes::Bytes;
use http::{StatusCode, Uri};
use remote_agents::http::{Request, Response, json, refusal};
use remote_agents::mount::{Mount, Objects};
use remote_agents::protocol::ids::AgentType;
use remote_agents::store::Database;
use remote_agents::{Error, Result};
use serde_json::json;

use crate::documents;

/// The path that callers ask.
pub const PATH: &str = "/api/documents";

/// The path at which the object of a session answers. No mount forwards to it.
pub const OF_OBJECT: &str = "/documents";

/// Reads documents for whoever may use the mount.
pub struct Sources<'a> {
    /// The mount whose callers may read.
    pub mount: &'a Mount,
    /// The mount's base path.
    pub base_path: &'a str,
    /// The agent type whose sessions have documents.
    pub agent_type: &'a AgentType,
    /// The sessions of this service.
    pub objects: &'a dyn Objects,
}

impl Sources<'_> {
    /// Answers a request for [`PATH`]: `{documents: [{id, title, text}]}`, in the order in which they
    /// came; none for a job that was started without.
    pub async fn answer(&self, request: &Request) -> Response {
        let mut response = match self.read(request).await {
            Ok(response) => response,
            Err(response) => *response,
        };
        self.mount.stamp(response.headers_mut());
        response
    }

    async fn read(&self, request: &Request) -> Result<Response, Box<Response>> {
        let query = request.uri().query().unwrap_or_default();
        let address = format!("{}/{}/status?{query}", self.base_path, self.agent_type);
        let address: Uri = address.parse().map_err(|_| {
            let error = Error::invalid("query", "The query cannot be read.");
            Box::new(refusal(&error))
        })?;
        let forward = self
            .mount
            .admit_within_limits(request.method(), &address, request.headers())
            .await
            .and_then(|admission| admission.forward(Bytes::new()))
            .map_err(Box::new)?;
        let object = self.objects.object(&forward.asked.session_id);
        let unreachable = |_| Box::new(self.mount.unreachable());
        let status = object.fetch(forward.request).await.map_err(unreachable)?;
        if status.status() != StatusCode::OK {
            return Err(Box::new(self.mount.answer(&forward.asked, status)));
        }
        let mut read = Request::new(Bytes::new());
        *read.uri_mut() = Uri::from_static("http://object/documents");
        object.fetch(read).await.map_err(unreachable)
    }
}

/// What the object of a session answers at [`OF_OBJECT`]. The session must have begun.
#[must_use]
pub fn of_object(database: &dyn Database) -> Response {
    match documents::load(database) {
        Ok(documents) => json(200, &json!({ "documents": documents })),
        Err(error) => refusal(&error),
    }
}
