//! HTTP over TCP: how a native program reaches a producer that listens somewhere.
//!
//! One connection for one exchange. It ends with its body, or at once when the call or the body is
//! dropped, so that the other end sees that nobody reads any more. It follows no redirect, keeps no
//! cookie and speaks no TLS: a program that crosses an open network brings a [`Fetch`] of its own.

use std::rc::Rc;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use futures::stream;
use http::HeaderValue;
use http::header::HOST;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use crate::http::{Body, BodyError, Request, Response};
use crate::platform::Runtime;
use crate::protocol::ids::AgentType;
use crate::transport::{Fetch, FetchError, HttpTransport};

/// A small client of HTTP/1.1. Must be used within a tokio runtime.
#[derive(Clone, Copy, Debug, Default)]
pub struct HttpClient;

/// A transport over TCP to the agents of type `agent_type` that the service at `base_url` (as
/// `http://127.0.0.1:8788`) mounts at `base_path` (as `/agents`).
///
/// No headers of the caller's choice and the default policy, as [`HttpTransport::new`] says.
#[must_use]
pub fn http_transport(
    base_url: &str,
    base_path: &str,
    agent_type: AgentType,
    runtime: Rc<dyn Runtime>,
) -> HttpTransport {
    HttpTransport::new(
        Rc::new(HttpClient),
        runtime,
        base_url,
        base_path,
        agent_type,
    )
}

impl Fetch for HttpClient {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        Box::pin(exchange(request))
    }
}

async fn exchange(request: Request) -> Result<Response, FetchError> {
    let failed = |error: &dyn std::error::Error| FetchError(error.to_string());
    let (request, authority) = origin_form(request)?;
    let port = authority.port_u16().unwrap_or(80);
    let host = authority.host().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, port))
        .await
        .map_err(|e| failed(&e))?;
    // A small request must not wait for an acknowledgement of the one before.
    stream.set_nodelay(true).map_err(|e| failed(&e))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|e| failed(&e))?;
    let connection = Connection(tokio::spawn(async move {
        // How it ended is told by the answer or by its body.
        drop(connection.await);
    }));
    let answer = sender.send_request(request).await.map_err(|e| failed(&e))?;
    Ok(answer.map(|body| streaming(body, connection)))
}

/// The request as it goes to the server itself, and where that is.
fn origin_form(
    request: Request,
) -> Result<(http::Request<Full<Bytes>>, http::uri::Authority), FetchError> {
    let uri = request.uri().clone();
    if uri.scheme() != Some(&http::uri::Scheme::HTTP) {
        let said =
            format!("{uri} does not begin with http://, which is all that this client speaks");
        return Err(FetchError(said));
    }
    let Some(authority) = uri.authority().cloned() else {
        return Err(FetchError(format!("{uri} names no host")));
    };
    let host = HeaderValue::from_str(authority.as_str())
        .map_err(|_| FetchError("the host is not a header value".to_owned()))?;
    let mut request = request.map(Full::new);
    *request.uri_mut() = uri
        .path_and_query()
        .map(|path| path.as_str())
        .unwrap_or("/")
        .parse()
        .map_err(|e| FetchError(format!("the path cannot be sent: {e}")))?;
    request.headers_mut().insert(HOST, host);
    Ok((request, authority))
}

/// A connection; dropped, it closes.
struct Connection(tokio::task::JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn streaming(body: Incoming, connection: Connection) -> Body {
    let parts = stream::unfold((body, connection), |(mut body, connection)| async move {
        loop {
            let part = match body.frame().await? {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => Ok(data),
                    // Trailers say nothing that the contract knows.
                    Err(_) => continue,
                },
                Err(error) => Err(BodyError(error.to_string())),
            };
            return Some((part, (body, connection)));
        }
    });
    Body::Stream(Box::pin(parts))
}
