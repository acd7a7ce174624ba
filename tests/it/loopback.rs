//! A mount behind a real socket of this machine, for tests that must cross one.

use std::cell::Cell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use remote_agents::http::{Body, BodyError, ByteStream};
use remote_agents::mount::{Mount, serve};
use remote_agents::native::LocalObjects;
use tokio::net::TcpListener;

/// A service that listens on a free port of loopback until it is dropped.
pub struct Service {
    address: SocketAddr,
    answered: Rc<Cell<usize>>,
    listening: tokio::task::JoinHandle<()>,
}

impl Service {
    /// Serves `mount`; the connections of a service that is dropped go on to their end.
    pub async fn new(mount: Rc<Mount>, objects: Rc<LocalObjects>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answered: Rc<Cell<usize>> = Rc::default();
        let counter = answered.clone();
        let listening = tokio::task::spawn_local(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let (mount, objects, counter) = (mount.clone(), objects.clone(), counter.clone());
                let answer = service_fn(move |request: http::Request<Incoming>| {
                    let (mount, objects) = (mount.clone(), objects.clone());
                    counter.set(counter.get() + 1);
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.unwrap().to_bytes();
                        let request = http::Request::from_parts(head, body);
                        let answer = serve(&mount, &*objects, request).await;
                        Ok::<_, Infallible>(answer.map(streamed))
                    }
                });
                tokio::task::spawn_local(async move {
                    // A reader that goes away is no failure of the service.
                    let connection = http1::Builder::new();
                    drop(
                        connection
                            .serve_connection(TokioIo::new(socket), answer)
                            .await,
                    );
                });
            }
        });
        Self {
            address,
            answered,
            listening,
        }
    }

    /// Its address.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// How many requests have come in.
    pub fn answered(&self) -> usize {
        self.answered.get()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

fn streamed(
    body: Body,
) -> StreamBody<impl futures::Stream<Item = Result<Frame<Bytes>, BodyError>>> {
    let parts: ByteStream = match body {
        Body::Full(bytes) => Box::pin(stream::iter([Ok(bytes)])),
        Body::Stream(parts) => parts,
    };
    StreamBody::new(parts.map(|part| part.map(Frame::data)))
}

/// Runs a test on one thread with real sockets.
pub fn on_loopback(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}

mod client {
    //! What the native client does with a peer that is no service of ours.

    use remote_agents::http::Request;
    use remote_agents::native::HttpClient;
    use remote_agents::transport::Fetch;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    fn get(url: &str) -> Request {
        http::Request::get(url).body(Bytes::new()).unwrap()
    }

    /// A peer that takes one connection, reads the head of a request and says `answer`; then what
    /// is left of the connection.
    async fn peer(answer: &'static str) -> (String, tokio::task::JoinHandle<(String, TcpStream)>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/path?x=1", listener.local_addr().unwrap());
        let taken = tokio::task::spawn_local(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(socket.read_u8().await.unwrap());
            }
            socket.write_all(answer.as_bytes()).await.unwrap();
            (String::from_utf8(head).unwrap(), socket)
        });
        (url, taken)
    }

    /// Whether the other side has closed the connection.
    async fn is_closed(socket: &mut TcpStream) -> bool {
        matches!(socket.read(&mut [0]).await, Ok(0) | Err(_))
    }

    #[test]
    fn case_37_a_redirect_is_an_answer_and_not_an_instruction() {
        on_loopback(async {
            let answer = "HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/x\r\ncontent-length: 0\r\n\r\n";
            let (url, taken) = peer(answer).await;
            let answer = HttpClient.fetch(get(&url)).await.unwrap();
            assert_eq!(answer.status(), 307);
            assert_eq!(answer.headers()["location"], "http://127.0.0.1:1/x");
            let (head, _) = taken.await.unwrap();
            let authority = url.trim_start_matches("http://").split('/').next().unwrap();
            assert!(head.starts_with("GET /path?x=1 HTTP/1.1\r\n"), "{head}");
            assert!(head.contains(&format!("host: {authority}\r\n")), "{head}");
        });
    }

    #[test]
    fn a_body_that_is_dropped_closes_its_connection() {
        on_loopback(async {
            let answer = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";
            let (url, taken) = peer(answer).await;
            let answer = HttpClient.fetch(get(&url)).await.unwrap();
            let Body::Stream(mut body) = answer.into_body() else {
                panic!("a stream was expected")
            };
            assert_eq!(body.next().await.unwrap().unwrap(), "hello");
            let (_, mut socket) = taken.await.unwrap();
            drop(body);
            assert!(is_closed(&mut socket).await);
        });
    }

    #[test]
    fn a_call_that_is_dropped_closes_its_connection() {
        on_loopback(async {
            let (url, taken) = peer("").await;
            let mut call = HttpClient.fetch(get(&url));
            let (_, mut socket) = tokio::select! {
                _ = &mut call => panic!("nobody has answered"),
                taken = taken => taken.unwrap(),
            };
            drop(call);
            assert!(is_closed(&mut socket).await);
        });
    }

    #[test]
    fn a_body_that_breaks_off_is_an_error() {
        on_loopback(async {
            let (url, taken) = peer("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello").await;
            let answer = HttpClient.fetch(get(&url)).await.unwrap();
            drop(taken.await.unwrap());
            let error = answer.into_body().collect(100).await.unwrap_err();
            assert!(error.0.contains("body"), "{error}");
        });
    }

    #[test]
    fn what_it_does_not_speak_is_refused_and_what_is_not_there_is_no_answer() {
        on_loopback(async {
            let error = HttpClient.fetch(get("https://127.0.0.1/")).await.err();
            assert!(error.unwrap().0.contains("http://"));
            let error = HttpClient.fetch(get("/path")).await.err();
            assert!(error.unwrap().0.contains("http://"));
            let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = free.local_addr().unwrap();
            drop(free);
            let url = format!("http://{address}/");
            assert!(HttpClient.fetch(get(&url)).await.is_err());
        });
    }
}
