//! The model: it says what the benchmark wants said, and waits for nothing else.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use futures::StreamExt as _;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use futures::stream;
use remote_agents::agent::model::{
    LanguageModel, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::MessageRecord;
use serde::Deserialize;
use serde_json::json;

/// Says what its feed is told, or what the session's message scripts.
pub(crate) struct BenchModel(pub(crate) Rc<Feed>);

/// The way into the answer of a model that waits to be told what to say.
#[derive(Default)]
pub(crate) struct Feed(RefCell<State>);

#[derive(Default)]
struct State {
    sender: Option<UnboundedSender<ModelEvent>>,
    waiting: Vec<Waker>,
}

/// A message that is a script, as JSON.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Script {
    /// One answer of `chunks` texts of `bytes` bytes, `per` at a time.
    Turn {
        chunks: usize,
        per: usize,
        bytes: usize,
    },
    /// As many steps, each with an answer, a call and a state to promote.
    Steps(usize),
}

impl Feed {
    /// Says something; waits for the model to be asked first.
    pub(crate) async fn say(&self, event: ModelEvent) {
        let sender = poll_fn(|context| {
            let mut state = self.0.borrow_mut();
            match &state.sender {
                Some(sender) if !sender.is_closed() => Poll::Ready(sender.clone()),
                _ => {
                    state.waiting.push(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await;
        // A model that is not listened to any more has ended its answer.
        drop(sender.unbounded_send(event));
    }

    fn open(&self) -> ModelStream {
        let (sender, receiver) = unbounded();
        let waiting = {
            let mut state = self.0.borrow_mut();
            state.sender = Some(sender);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
        receiver.map(Ok).boxed_local()
    }
}

impl LanguageModel for BenchModel {
    fn name(&self) -> &str {
        "bench"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        let asked = request
            .messages
            .iter()
            .rev()
            .find_map(|message| match message {
                MessageRecord::User { text } => Some(text.as_str()),
                _ => None,
            });
        match asked.and_then(|text| serde_json::from_str(text).ok()) {
            None => self.0.open(),
            Some(Script::Turn { chunks, per, bytes }) => turn(chunks, per, bytes),
            Some(Script::Steps(steps)) => step(&request, steps),
        }
    }
}

/// Texts in batches, between which nothing is ready for a moment.
fn turn(chunks: usize, per: usize, bytes: usize) -> ModelStream {
    let batches = (0..chunks.div_ceil(per.max(1))).map(move |_| {
        let text = ModelEvent::TextDelta("x".repeat(bytes));
        vec![Ok(text); per]
    });
    stream::iter(batches)
        .then(|batch| async {
            pause().await;
            stream::iter(batch)
        })
        .flatten()
        .chain(stream::iter(ended(StopReason::EndTurn)))
        .boxed_local()
}

/// One step of many: a call of the tool, or the end.
fn step(request: &ModelRequest, steps: usize) -> ModelStream {
    let done = request
        .messages
        .iter()
        .filter(|message| matches!(message, MessageRecord::Assistant { .. }))
        .count();
    if done >= steps {
        return stream::iter(ended(StopReason::EndTurn)).boxed_local();
    }
    let arguments = json!({"text": format!("This is note number {done}.")}).to_string();
    let events = [
        ModelEvent::ToolCallStart {
            index: 0,
            id: format!("call_{done}"),
            name: "note".into(),
        },
        ModelEvent::ToolCallDelta {
            index: 0,
            delta: arguments,
        },
        ModelEvent::ToolCallEnd { index: 0 },
    ];
    stream::iter(events.map(Ok))
        .chain(stream::iter(ended(StopReason::ToolUse)))
        .boxed_local()
}

fn ended(reason: StopReason) -> [Result<ModelEvent, remote_agents::agent::model::ModelError>; 2] {
    [
        Ok(ModelEvent::Usage(Tokens::default())),
        Ok(ModelEvent::Stop(reason)),
    ]
}

/// Is not ready once.
async fn pause() {
    let mut paused = false;
    poll_fn(|context| {
        if std::mem::replace(&mut paused, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
