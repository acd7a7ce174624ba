//! Calls objects of the same service directly, without a mount: what `-sub-` children use.

use std::rc::Rc;

use futures::future::LocalBoxFuture;
use serde::Deserialize;

use super::{Fetch, FetchError};
use crate::http::{Request, Response};
use crate::mount::Objects;
use crate::protocol::ids::SessionId;
use crate::protocol::request::parameter;

/// A [`Fetch`] that finds each request's object by the session id it names, in the query or in the
/// body.
pub struct ObjectsFetch(Rc<dyn Objects>);

impl ObjectsFetch {
    /// Calls these objects.
    #[must_use]
    pub fn new(objects: Rc<dyn Objects>) -> Self {
        Self(objects)
    }
}

impl Fetch for ObjectsFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        match named_session(&request) {
            Some(session) => self.0.object(&session).fetch(request),
            None => Box::pin(async { Err(FetchError("the request names no session".into())) }),
        }
    }
}

fn named_session(request: &Request) -> Option<SessionId> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Named {
        session_id: SessionId,
    }
    match parameter(request.uri().query(), "sessionId") {
        Ok(Some(id)) => SessionId::parse(&id).ok(),
        _ => serde_json::from_slice::<Named>(request.body())
            .ok()
            .map(|named| named.session_id),
    }
}
