//! How a Worker reaches others: a service binding, an object of its own, the open network.
//!
//! Dropping a call that waits for its answer, or the body of an answer, cancels it at the other
//! end. Nothing of an incoming request is added here: what crosses is what the caller built.

use std::rc::Rc;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use js_sys::Promise;
use wasm_bindgen::{JsCast as _, JsValue};

use super::convert;
use super::ffi::{self, RawAbortController, RawFetcher};
use crate::error::{Code, Error};
use crate::http::{Request, Response, refusal};
use crate::mount::Objects;
use crate::platform::Runtime;
use crate::protocol::ids::{AgentType, SessionId};
use crate::transport::{Fetch, FetchError, HttpTransport, ObjectsFetch};

/// Calls another Worker over a service binding.
#[derive(Clone, Debug)]
pub struct BindingFetch {
    fetcher: RawFetcher,
}

/// The objects of one namespace, by session id.
#[derive(Clone, Debug)]
pub struct DurableObjects {
    namespace: worker::ObjectNamespace,
}

/// Calls one object.
struct StubFetch {
    namespace: worker::ObjectNamespace,
    session: SessionId,
}

/// Calls the open network.
#[derive(Clone, Copy, Debug, Default)]
pub struct GlobalFetch;

impl BindingFetch {
    /// A caller over this binding.
    #[must_use]
    pub fn new(binding: worker::Fetcher) -> Self {
        Self {
            fetcher: JsValue::from(binding).unchecked_into(),
        }
    }
}

impl DurableObjects {
    /// The objects of this namespace.
    #[must_use]
    pub fn new(namespace: worker::ObjectNamespace) -> Self {
        Self { namespace }
    }
}

impl Fetch for BindingFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let fetcher = self.fetcher.clone();
        exchange(request, move |request| fetcher.fetch(request)).boxed_local()
    }
}

impl Objects for DurableObjects {
    fn object(&self, session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(StubFetch {
            namespace: self.namespace.clone(),
            session: session.clone(),
        })
    }
}

impl Fetch for StubFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let (namespace, session) = (self.namespace.clone(), self.session.clone());
        // A stub that failed once stays broken, so each call has its own.
        exchange(request, move |request| {
            stub(&namespace, &session)?.fetch(request)
        })
        .boxed_local()
    }
}

impl Fetch for GlobalFetch {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        exchange(request, ffi::global_fetch).boxed_local()
    }
}

/// A transport to the agents of type `agent_type` that another Worker mounts at `base_path`.
///
/// No headers of the caller's choice and the default policy, as [`HttpTransport::new`] says.
#[must_use]
pub fn service_binding_transport(
    binding: worker::Fetcher,
    base_path: &str,
    agent_type: AgentType,
    runtime: Rc<dyn Runtime>,
) -> HttpTransport {
    // The authority of the address is ignored: the binding decides who answers.
    let fetch = Rc::new(BindingFetch::new(binding));
    HttpTransport::new(fetch, runtime, "http://service", base_path, agent_type)
}

/// A transport to the objects of this Worker's own namespace that host agents of type `agent_type`.
/// No mount stands between: the objects check the type themselves.
#[must_use]
pub fn object_stub_transport(
    namespace: worker::ObjectNamespace,
    agent_type: AgentType,
    runtime: Rc<dyn Runtime>,
) -> HttpTransport {
    let fetch = Rc::new(ObjectsFetch::new(Rc::new(DurableObjects::new(namespace))));
    HttpTransport::new(fetch, runtime, "http://object", "", agent_type)
}

/// A transport over the open network to the agents of type `agent_type` that the service at
/// `base_url` (scheme and authority) mounts at `base_path`. Credentials go into its headers.
#[must_use]
pub fn http_transport(
    base_url: &str,
    base_path: &str,
    agent_type: AgentType,
    runtime: Rc<dyn Runtime>,
) -> HttpTransport {
    HttpTransport::new(
        Rc::new(GlobalFetch),
        runtime,
        base_url,
        base_path,
        agent_type,
    )
}

/// The object of this name, as something that answers requests.
pub(super) fn stub(
    namespace: &worker::ObjectNamespace,
    session: &SessionId,
) -> Result<RawFetcher, JsValue> {
    Ok(namespace.get_by_name(session.as_str())?.into_rpc())
}

/// Sends a request and reads the head of the answer.
async fn exchange(
    request: Request,
    send: impl FnOnce(&web_sys::Request) -> Result<Promise, JsValue>,
) -> Result<Response, FetchError> {
    let failed = |thrown: JsValue| FetchError(ffi::message(&thrown));
    let (mut pending, signal) = Pending::new().map_err(failed)?;
    let request = convert::outgoing(request, Some(&signal)).map_err(failed)?;
    let answer = ffi::settled(send(&request)).await;
    pending.done();
    match answer {
        Ok(answer) => {
            let answer = answer
                .dyn_into()
                .map_err(|_| FetchError("the answer is no response".to_owned()))?;
            convert::incoming(&answer).map_err(FetchError)
        }
        Err(thrown) if ffi::flag(&thrown, "overloaded") => Ok(refusal(&overloaded())),
        Err(thrown) => Err(failed(thrown)),
    }
}

/// What an overloaded object or service is told as.
pub(super) fn overloaded() -> Error {
    let mut error = Error::new(Code::Overloaded, "The service cannot take more work now.");
    error.retry_after = Some(1);
    error
}

/// A call that waits for its answer: dropped before it has come, it cancels the request.
pub(super) struct Pending(Option<RawAbortController>);

impl Pending {
    /// One that is about to be sent, with what cancels it.
    pub(super) fn new() -> Result<(Self, web_sys::AbortSignal), JsValue> {
        let controller = RawAbortController::new()?;
        let signal = controller.signal()?;
        Ok((Self(Some(controller)), signal))
    }

    /// The answer has come, or none will.
    pub(super) fn done(&mut self) {
        self.0 = None;
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(controller) = self.0.take() {
            drop(controller.cancel_request());
        }
    }
}
