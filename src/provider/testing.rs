//! A provider that answers once, with bytes as a test cuts them, in virtual time.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::LocalBoxFuture;
use futures::{StreamExt as _, stream};
use serde_json::{Value, json};

use crate::agent::model::{LanguageModel, ModelError, ModelEvent, ModelRequest, ToolSpec};
use crate::http::{Body, BodyError, Request, Response};
use crate::store::{MessageRecord, ToolCall, ToolOutcome};
use crate::transport::testing::TestRuntime;
use crate::transport::{Fetch, FetchError};

/// One piece of what a provider does.
#[derive(Clone)]
pub(super) enum Piece {
    Bytes(Bytes),
    Wait(Duration),
    Break,
}

/// A provider that answers with these pieces, and remembers what it was asked.
pub(super) struct Provider {
    pub(super) status: u16,
    pub(super) headers: Vec<(&'static str, &'static str)>,
    pub(super) before: Duration,
    pub(super) pieces: Vec<Piece>,
    pub(super) asked: RefCell<Vec<Request>>,
}

impl Provider {
    /// One that answers well, with this body at once.
    pub(super) fn saying(body: impl Into<Bytes>) -> Self {
        Self {
            status: 200,
            headers: vec![("content-type", "text/event-stream; charset=utf-8")],
            before: Duration::ZERO,
            pieces: vec![Piece::Bytes(body.into())],
            asked: RefCell::default(),
        }
    }
}

/// The provider as something to fetch from.
pub(super) struct Wire(pub(super) Rc<Provider>);

impl Fetch for Wire {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        let provider = self.0.clone();
        Box::pin(async move {
            provider.asked.borrow_mut().push(request);
            if !provider.before.is_zero() {
                tokio::time::sleep(provider.before).await;
            }
            let parts = stream::iter(provider.pieces.clone()).filter_map(|piece| async move {
                match piece {
                    Piece::Bytes(bytes) => Some(Ok(bytes)),
                    Piece::Break => Some(Err(BodyError("sk-secret was cut".into()))),
                    Piece::Wait(time) => {
                        tokio::time::sleep(time).await;
                        None
                    }
                }
            });
            let mut answer = http::Response::builder().status(provider.status);
            for (name, value) in &provider.headers {
                answer = answer.header(*name, *value);
            }
            answer
                .body(Body::Stream(Box::pin(parts)))
                .map_err(|e| FetchError(e.to_string()))
        })
    }
}

/// Runs `work` with a paused clock.
pub(super) fn in_time<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, work)
}

/// What a model of `make` says over `provider`.
pub(super) fn answer<M: LanguageModel>(
    provider: Provider,
    make: impl FnOnce(Rc<dyn Fetch>, Rc<TestRuntime>) -> M,
) -> Vec<Result<ModelEvent, ModelError>> {
    in_time(said(provider, make))
}

/// As [`answer`], for a test that has many answers and makes the time itself.
pub(super) async fn said<M: LanguageModel>(
    provider: Provider,
    make: impl FnOnce(Rc<dyn Fetch>, Rc<TestRuntime>) -> M,
) -> Vec<Result<ModelEvent, ModelError>> {
    let wire = Rc::new(Wire(Rc::new(provider)));
    let model = make(wire, Rc::new(TestRuntime::new()));
    model.stream(question()).collect().await
}

/// Each way to cut a body once, and the one that cuts it at every byte.
pub(super) fn cuts(body: &[u8]) -> impl Iterator<Item = Vec<Piece>> + '_ {
    let once = (0..=body.len()).map(|at| vec![body[..at].to_vec(), body[at..].to_vec()]);
    let always = std::iter::once(body.iter().map(|byte| vec![*byte]).collect());
    once.chain(always).map(|parts: Vec<Vec<u8>>| {
        parts
            .into_iter()
            .map(|part| Piece::Bytes(part.into()))
            .collect()
    })
}

/// An answer with what is told in pieces put together, so that it does not depend on the cuts.
pub(super) fn whole(
    events: Vec<Result<ModelEvent, ModelError>>,
) -> Vec<Result<ModelEvent, ModelError>> {
    let mut joined: Vec<Result<ModelEvent, ModelError>> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(Ok(ModelEvent::TextDelta(text))), Ok(ModelEvent::TextDelta(more))) => {
                text.push_str(&more);
            }
            (_, event) => joined.push(event),
        }
    }
    joined
}

/// A conversation with a call that came back and one that failed.
pub(super) fn question() -> ModelRequest {
    let call = |id: &str, name: &str, arguments: Value| ToolCall {
        id: id.into(),
        name: name.into(),
        arguments,
    };
    let result = |id: &str, success, value, error: Option<&str>| MessageRecord::Tool {
        tool_call_id: id.into(),
        tool_name: "search".into(),
        outcome: ToolOutcome {
            success,
            result: value,
            error: error.map(str::to_owned),
        },
    };
    ModelRequest {
        instructions: "Be brief.".into(),
        messages: vec![
            MessageRecord::User {
                text: "What is a tide?".into(),
            },
            MessageRecord::Assistant {
                text: String::new(),
                tool_calls: vec![
                    call("c1", "search", json!({"query": "tide"})),
                    call("c:2", "made.up", json!("{\"broken")),
                ],
                cut: false,
                kept: None,
            },
            result("c1", true, json!({"found": 1}), None),
            result(
                "c:2",
                false,
                json!({"code": "x"}),
                Some("There is no tool made.up."),
            ),
            MessageRecord::User {
                text: "Go on.".into(),
            },
        ]
        .into(),
        tools: [ToolSpec {
            name: "search".into(),
            description: "Searches.".into(),
            parameters: json!({"type": "object"}),
        }]
        .into(),
        output: Some(json!({"type": "object", "title": "Report"})),
    }
}
