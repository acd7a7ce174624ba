//! A world for tests: objects in this process, scripted models, a virtual clock.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::http::{Body, Response};
use remote_agents::mount::{Mount, serve};
use remote_agents::native::{LocalObjects, LogSink};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::sse::{Decoded, Decoder};
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::MessageRecord;
use serde_json::{Value, json};

use crate::stories::paired;

/// Runs a test on one thread with a virtual clock: a wait is over as soon as nothing else can run.
/// In no history that a model was sent meanwhile may a call be without its one result.
pub fn in_world<F: Future<Output = ()> + 'static>(test: impl FnOnce() -> F + 'static) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let local = tokio::task::LocalSet::new();
    paired::findings();
    // The test is a task among the others: the one that blocks is polled far more seldom.
    local.block_on(&runtime, async move {
        tokio::task::spawn_local(test()).await.unwrap()
    });
    assert_eq!(paired::findings(), Vec::<String>::new());
}

/// What a scripted model answers to a conversation.
pub type Script = Rc<dyn Fn(&ModelRequest) -> Vec<Result<ModelEvent, ModelError>>>;

/// A model whose answers are given by a function of the conversation. It takes a (virtual)
/// millisecond for each event, as a provider takes its time.
pub struct Scripted(pub Script);

impl LanguageModel for Scripted {
    fn name(&self) -> &str {
        "scripted"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let events: VecDeque<_> = match paired::read(&request) {
            Ok(()) => (self.0)(&request).into(),
            Err(broken) => [Err(broken)].into(),
        };
        Box::pin(stream::unfold(events, |mut events| async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            events.pop_front().map(|event| (event, events))
        }))
    }
}

/// A model that says `words` words, one in each `pause`.
pub struct Slow {
    pub words: usize,
    pub pause: Duration,
}

impl LanguageModel for Slow {
    fn name(&self) -> &str {
        "slow"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        paired::read(&request).unwrap();
        let (words, pause) = (self.words, self.pause);
        Box::pin(stream::unfold(0, move |n| async move {
            tokio::time::sleep(pause).await;
            match n {
                n if n < words => Some((Ok(ModelEvent::TextDelta(format!("w{n} "))), n + 1)),
                n if n == words => Some((Ok(ModelEvent::Stop(StopReason::EndTurn)), n + 1)),
                _ => None,
            }
        }))
    }
}

pub fn scripted(
    script: impl Fn(&ModelRequest) -> Vec<Result<ModelEvent, ModelError>> + 'static,
) -> Rc<dyn LanguageModel> {
    Rc::new(Scripted(Rc::new(script)))
}

/// How many model answers stand since the last user message.
pub fn turn(request: &ModelRequest) -> usize {
    request
        .messages
        .iter()
        .rev()
        .take_while(|message| !matches!(message, MessageRecord::User { .. }))
        .filter(|message| matches!(message, MessageRecord::Assistant { .. }))
        .count()
}

pub fn text(words: &str) -> Vec<Result<ModelEvent, ModelError>> {
    let mut events: Vec<_> = words
        .split_inclusive(' ')
        .map(|word| Ok(ModelEvent::TextDelta(word.to_owned())))
        .collect();
    events.push(Ok(ModelEvent::Usage(Tokens {
        prompt: 10,
        completion: 5,
        total: 15,
        ..Tokens::default()
    })));
    events.push(Ok(ModelEvent::Stop(StopReason::EndTurn)));
    events
}

pub fn calls(calls: &[(&str, &str, Value)]) -> Vec<Result<ModelEvent, ModelError>> {
    let mut events = Vec::new();
    for (index, (id, name, arguments)) in calls.iter().enumerate() {
        events.push(Ok(ModelEvent::ToolCallStart {
            index,
            id: (*id).into(),
            name: (*name).into(),
        }));
        let json = arguments.to_string();
        let (left, right) = json.split_at(json.len() / 2);
        events.push(Ok(ModelEvent::ToolCallDelta {
            index,
            delta: left.into(),
        }));
        events.push(Ok(ModelEvent::ToolCallDelta {
            index,
            delta: right.into(),
        }));
        events.push(Ok(ModelEvent::ToolCallEnd { index }));
    }
    events.push(Ok(ModelEvent::Usage(Tokens {
        prompt: 20,
        completion: 10,
        total: 30,
        ..Tokens::default()
    })));
    events.push(Ok(ModelEvent::Stop(StopReason::ToolUse)));
    events
}

/// Lets half a virtual millisecond pass, so that every other task runs.
pub async fn yield_now() {
    tokio::time::sleep(Duration::from_micros(500)).await;
}

/// Log lines, gathered.
#[derive(Clone, Default)]
pub struct Lines(pub Rc<RefCell<Vec<String>>>);

impl Lines {
    pub fn sink(&self) -> LogSink {
        let lines = self.0.clone();
        Rc::new(move |_, line| lines.borrow_mut().push(line.to_owned()))
    }
}

/// A mount with its objects, as a client sees it.
pub struct Client {
    pub mount: Rc<Mount>,
    pub objects: Rc<LocalObjects>,
}

impl Client {
    pub async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Response {
        let mut request = http::Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        serve(
            &self.mount,
            &*self.objects,
            request.body(body.into()).unwrap(),
        )
        .await
    }

    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        read(self.send("POST", path, &[], body.to_string()).await).await
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        read(self.send("GET", path, &[], Bytes::new()).await).await
    }

    /// Reads a stream to its end; the frames and the raw bytes.
    pub async fn sse(&self, path: &str) -> (Vec<Frame>, String) {
        let response = self.send("GET", path, &[], Bytes::new()).await;
        assert_eq!(response.status(), 200, "{path}");
        let mut decoder = Decoder::new();
        let mut frames = Vec::new();
        let mut raw = Vec::new();
        let Body::Stream(mut body) = response.into_body() else {
            panic!("a stream was expected")
        };
        while let Some(part) = body.next().await {
            let part = part.unwrap();
            raw.extend_from_slice(&part);
            decoder.push(&part);
            while let Some(decoded) = decoder.poll().unwrap() {
                if let Decoded::Frame(frame) = decoded {
                    frames.push(frame);
                }
            }
        }
        (frames, String::from_utf8(raw).unwrap())
    }

    /// Waits until the session is not running any more.
    pub async fn settled(&self, agent_type: &str, session: &str) -> Value {
        let base = self.base();
        let (_, _) = self
            .sse(&format!("{base}/{agent_type}/sse?sessionId={session}"))
            .await;
        let (status, body) = self
            .get(&format!("{base}/{agent_type}/status?sessionId={session}"))
            .await;
        assert_eq!(status, 200);
        body
    }

    pub fn base(&self) -> String {
        "/agents".to_owned()
    }
}

pub async fn read(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let bytes = response.into_body().collect(64 << 20).await.unwrap();
    (
        status,
        serde_json::from_slice(&bytes).unwrap_or(json!(String::from_utf8_lossy(&bytes))),
    )
}

pub async fn pass(duration: Duration) {
    tokio::time::advance(duration).await;
}

/// The chunks of a list of frames, as JSON.
pub fn chunks(frames: &[Frame]) -> Vec<Value> {
    frames
        .iter()
        .filter_map(|frame| match frame {
            Frame::Chunk { chunk, .. } => Some(Value::Object(chunk.0.clone())),
            _ => None,
        })
        .collect()
}
