//! When what a model streams is committed and shown: bounds in time and bytes, on a virtual clock.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{StreamExt as _, stream};
use remote_agents::agent::Flush;
use remote_agents::agent::model::{
    LanguageModel, ModelEvent, ModelRequest, ModelStream, StopReason,
};
use remote_agents::http::Body;
use remote_agents::mount::Mount;
use remote_agents::native::{CommitMoment, LocalObjects};
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::AgentType;
use remote_agents::protocol::sse::{Decoded, Decoder};
use remote_agents::{Agent, Agents};
use serde_json::json;
use tokio::time::Instant;

use crate::stories::paired;
use crate::support::{Client, Lines, chunks, in_world};

/// Says each of its pieces after a wait, and knows when it said it.
struct Paced {
    pieces: Vec<(u64, String)>,
    said: Rc<RefCell<Vec<Instant>>>,
}

impl LanguageModel for Paced {
    fn name(&self) -> &str {
        "paced"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        paired::read(&request).unwrap();
        let said = self.said.clone();
        let pieces = stream::iter(self.pieces.clone()).then(move |(wait, piece)| {
            let said = said.clone();
            async move {
                if wait > 0 {
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                }
                said.borrow_mut().push(Instant::now());
                Ok(ModelEvent::TextDelta(piece))
            }
        });
        let end = stream::iter([Ok(ModelEvent::Stop(StopReason::EndTurn))]);
        Box::pin(pieces.chain(end))
    }
}

struct World {
    client: Client,
    said: Rc<RefCell<Vec<Instant>>>,
    commits: Rc<Cell<usize>>,
}

fn world(flush: Flush, pieces: Vec<(u64, String)>) -> World {
    let said = Rc::new(RefCell::new(Vec::new()));
    let told = said.clone();
    let objects = LocalObjects::new(
        1_700_000_000_000,
        Lines::default().sink(),
        Rc::new(move |_, _| {
            let model = Paced {
                pieces: pieces.clone(),
                said: told.clone(),
            };
            let agent = AgentType::parse("talker").unwrap();
            Agents::new([Agent::new(agent, "Talk.", Rc::new(model)).with_flush(flush)])
        }),
    );
    let commits = Rc::new(Cell::new(0));
    let count = commits.clone();
    objects.on_commit(Rc::new(move |_, moment| {
        if moment == CommitMoment::After {
            count.set(count.get() + 1);
        }
    }));
    let client = Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects,
    };
    World {
        client,
        said,
        commits,
    }
}

/// The start, the answer and its promotion: what a run commits besides its text.
const OTHER_COMMITS: usize = 3;

impl World {
    async fn start(&self) {
        let body = json!({"sessionId": "s1", "message": "go"});
        assert_eq!(self.client.post("/agents/talker/start", body).await.0, 200);
    }

    /// How long each piece took from the model's mouth to a live reader, in milliseconds, and the
    /// size of each part that the reader got at once.
    async fn follow(&self) -> (Vec<u128>, Vec<usize>) {
        self.start().await;
        let path = "/agents/talker/sse?sessionId=s1";
        let response = self.client.send("GET", path, &[], "").await;
        let Body::Stream(mut body) = response.into_body() else {
            panic!("a stream was expected")
        };
        let (mut decoder, mut delays, mut parts) = (Decoder::new(), Vec::new(), Vec::new());
        while let Some(part) = body.next().await {
            decoder.push(&part.unwrap());
            let before = delays.len();
            while let Some(decoded) = decoder.poll().unwrap() {
                if let Decoded::Frame(frame @ Frame::Chunk { .. }) = decoded
                    && chunks(&[frame])[0]["type"] == "text_delta"
                {
                    let said = self.said.borrow()[delays.len()];
                    delays.push(said.elapsed().as_millis());
                }
            }
            if delays.len() > before {
                parts.push(delays.len() - before);
            }
        }
        (delays, parts)
    }
}

fn words(number: usize, wait: u64) -> Vec<(u64, String)> {
    vec![(wait, "word ".to_owned()); number]
}

#[test]
fn by_default_nothing_waits_and_what_is_there_together_is_one_commit() {
    in_world(|| async {
        let slow = world(Flush::default(), words(40, 5));
        let (delays, parts) = slow.follow().await;
        assert_eq!(delays, [0; 40]);
        assert_eq!(parts, [1; 40]);
        assert_eq!(slow.commits.get(), 40 + OTHER_COMMITS);

        // A word after a pause, then many at once.
        let pieces = [words(1, 5), words(49, 0)].concat();
        let quick = world(Flush::default(), pieces);
        assert_eq!(quick.follow().await.0, [0; 50]);
        assert_eq!(quick.commits.get(), 1 + OTHER_COMMITS);
    });
}

#[test]
fn a_delay_gathers_pieces_and_shows_none_later_than_it_says() {
    in_world(|| async {
        let flush = Flush {
            max_delay: Duration::from_millis(50),
            ..Flush::default()
        };
        let steady = world(flush, words(100, 5));
        let (delays, parts) = steady.follow().await;
        assert_eq!(delays.len(), 100);
        assert!(delays.iter().all(|delay| *delay <= 51), "{delays:?}");
        assert!(delays.iter().any(|delay| *delay >= 45), "{delays:?}");
        assert!((10..=12).contains(&parts.len()), "{parts:?}");
        assert!(steady.commits.get() <= 12 + OTHER_COMMITS);

        // A model that falls silent does not keep its last words waiting.
        let pieces = [words(3, 5), words(1, 10_000)].concat();
        let (delays, _) = world(flush, pieces).follow().await;
        assert!(delays.iter().all(|delay| *delay <= 51), "{delays:?}");
    });
}

#[test]
fn bytes_are_committed_at_once_however_long_the_delay_is() {
    in_world(|| async {
        let flush = Flush {
            max_delay: Duration::from_secs(3_600),
            max_bytes: 50,
        };
        let bounded = world(flush, words(40, 5));
        let (delays, parts) = bounded.follow().await;
        // Ten words are fifty bytes; the tenth does not wait.
        assert_eq!(parts, [10; 4]);
        assert!(delays.iter().all(|delay| *delay <= 46), "{delays:?}");
        assert_eq!(bounded.commits.get(), 4 + OTHER_COMMITS);
        // The end of the answer waits for nothing.
        let rest = world(flush, words(13, 5));
        let (delays, parts) = rest.follow().await;
        assert_eq!(parts, [10, 3]);
        assert!(delays.iter().all(|delay| *delay <= 46), "{delays:?}");
    });
}

/// A wait that wakes whoever asked first, and nobody else: as the `worker` crate's delay does.
struct FirstComer {
    millis: u64,
    over: Option<Rc<Cell<bool>>>,
}

impl Future for FirstComer {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let millis = self.millis;
        let over = self.over.get_or_insert_with(|| {
            let over = Rc::new(Cell::new(false));
            let (told, first) = (over.clone(), context.waker().clone());
            tokio::task::spawn_local(async move {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                told.set(true);
                first.wake();
            });
            over
        });
        if over.get() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

/// Says three words, each after such a wait.
struct Stubborn;

impl LanguageModel for Stubborn {
    fn name(&self) -> &str {
        "stubborn"
    }

    fn stream(&self, request: ModelRequest) -> ModelStream {
        paired::read(&request).unwrap();
        let words = stream::iter(0..3).then(|n| async move {
            FirstComer {
                millis: 5,
                over: None,
            }
            .await;
            Ok(ModelEvent::TextDelta(format!("w{n} ")))
        });
        Box::pin(words.chain(stream::iter([Ok(ModelEvent::Stop(StopReason::EndTurn))])))
    }
}

#[test]
fn a_model_whose_waits_wake_whoever_asked_first_is_heard_to_its_end() {
    for flush in [
        Flush::default(),
        Flush {
            max_delay: Duration::from_millis(7),
            ..Flush::default()
        },
    ] {
        in_world(move || async move {
            let objects = LocalObjects::new(
                1_700_000_000_000,
                Lines::default().sink(),
                Rc::new(move |_, _| {
                    let agent = AgentType::parse("talker").unwrap();
                    Agents::new([Agent::new(agent, "Talk.", Rc::new(Stubborn)).with_flush(flush)])
                }),
            );
            let client = Client {
                mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
                objects,
            };
            let start = json!({"sessionId": "s1", "message": "go"});
            client.post("/agents/talker/start", start).await;
            let settled =
                tokio::time::timeout(Duration::from_millis(500), client.settled("talker", "s1"));
            assert_eq!(settled.await.unwrap()["output"], json!("w0 w1 w2 "));
        });
    }
}

#[test]
fn a_stop_waits_for_no_delay_and_loses_nothing_that_was_said() {
    in_world(|| async {
        let flush = Flush {
            max_delay: Duration::from_secs(60),
            ..Flush::default()
        };
        let world = world(flush, words(1_000, 5));
        world.start().await;
        tokio::time::sleep(Duration::from_millis(52)).await;
        let body = json!({"sessionId": "s1"});
        world.client.post("/agents/talker/interrupt", body).await;
        let began = Instant::now();
        let path = "/agents/talker/sse?sessionId=s1&fromSequence=0";
        let (frames, _) = world.client.sse(path).await;
        assert!(began.elapsed() <= Duration::from_millis(5));
        let shown: String = chunks(&frames)
            .iter()
            .filter_map(|chunk| chunk["delta"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(shown, "word ".repeat(world.said.borrow().len()));
        assert_eq!(world.said.borrow().len(), 10);
        use remote_agents::store::{MessageRecord, SqlStore, Store as _};
        let id = remote_agents::SessionId::parse("s1").unwrap();
        let store = SqlStore::new(world.client.objects.database(&id).unwrap());
        let kept = store.messages().unwrap().pop().unwrap();
        assert_eq!(
            kept,
            MessageRecord::Assistant {
                text: shown,
                tool_calls: Vec::new(),
                cut: true,
                kept: None,
            }
        );
    });
}
