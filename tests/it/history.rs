//! What of a long conversation a model is sent, and what becomes of one that cannot be sent.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use remote_agents::agent::model::{ModelError, ModelErrorKind, ModelRequest};
use remote_agents::agent::{
    BytesPerToken, Conversation, CutOldest, History, HistoryPolicy, Selected,
};
use remote_agents::protocol::ids::SessionId;
use remote_agents::protocol::usage::Tokens;
use remote_agents::store::MessageRecord;
use remote_agents::{Error, Result};
use serde_json::json;

use crate::conversation::{hosting, looker, say, stored};
use crate::support::{Client, calls, in_world, scripted, text, turn};

/// What a model was asked, and an agent that answers each message with as many words as it has.
fn talker(history: History) -> (Client, Rc<RefCell<Vec<Vec<MessageRecord>>>>) {
    let asked: Rc<RefCell<Vec<Vec<MessageRecord>>>> = Rc::default();
    let told = asked.clone();
    let client = hosting(move || {
        let asked = told.clone();
        let model = scripted(move |request: &ModelRequest| {
            asked.borrow_mut().push(request.messages.to_vec());
            match turn(request) {
                0 => calls(&[("c", "look", json!({"at": request.messages.len()}))]),
                _ => text(&"word ".repeat(20)),
            }
        });
        looker(model, &Rc::default()).with_history(history.clone())
    });
    (client, asked)
}

#[test]
fn a_history_beyond_the_budget_is_cut_and_the_stored_one_is_not() {
    in_world(|| async {
        let (client, asked) = talker(History {
            budget: 300,
            counter: Rc::new(BytesPerToken(1)),
            policy: Rc::new(CutOldest { keep_last: 2 }),
        });
        for turn in 0..8 {
            let status = say(&client, &format!("question {turn}")).await;
            assert_eq!(status["status"], "completed", "{status}");
        }
        let stored = stored(&client);
        assert_eq!(stored.len(), 8 * 4);
        let first = MessageRecord::User {
            text: "question 0".into(),
        };
        let asked = asked.borrow();
        assert_eq!(asked.len(), 16);
        for (nth, sent) in asked.iter().enumerate() {
            assert_eq!(sent.first(), Some(&first));
            let latest = format!("question {}", nth / 2);
            assert!(sent.contains(&MessageRecord::User { text: latest }));
            let exchanges = sent
                .iter()
                .filter(|message| matches!(message, MessageRecord::Assistant { .. }));
            assert!(exchanges.count() <= 3, "{sent:?}");
        }
        // It was long enough to be cut, and what was sent is part of what is stored.
        assert!(asked[15].len() < stored.len() / 2);
        assert!(asked[15].iter().all(|message| stored.contains(message)));
    });
}

#[test]
fn below_the_default_budget_nothing_is_cut() {
    in_world(|| async {
        let (client, asked) = talker(History::default());
        for turn in 0..8 {
            say(&client, &format!("question {turn}")).await;
        }
        let stored = stored(&client);
        let longest = asked.borrow().last().unwrap().clone();
        assert_eq!(longest, stored[..stored.len() - 1]);
    });
}

/// Says in one message what all but the last exchange was about, and remembers it for the session.
struct Summary {
    made: Rc<Cell<u32>>,
}

impl HistoryPolicy for Summary {
    fn select<'a>(
        &'a self,
        conversation: Conversation<'a>,
    ) -> LocalBoxFuture<'a, Result<Selected>> {
        async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            self.made.set(self.made.get() + 1);
            let user = |message: &&MessageRecord| matches!(message, MessageRecord::User { .. });
            let count = conversation.messages.iter().filter(user).count();
            let latest = conversation
                .messages
                .iter()
                .rposition(|m| user(&m))
                .unwrap();
            let text = format!("{} questions were answered.", count - 1);
            let mut messages = vec![MessageRecord::User { text }];
            messages.extend_from_slice(&conversation.messages[latest..]);
            let tokens = Tokens {
                prompt: 1000,
                total: 1000,
                ..Tokens::default()
            };
            Ok(Selected {
                messages,
                spent: vec![("summariser".into(), tokens)],
            })
        }
        .boxed_local()
    }
}

#[test]
fn a_policy_of_the_user_s_may_ask_a_model_and_what_that_cost_is_counted() {
    in_world(|| async {
        let made = Rc::new(Cell::new(0));
        let (client, asked) = talker(History {
            budget: 300,
            counter: Rc::new(BytesPerToken(1)),
            policy: Rc::new(Summary { made: made.clone() }),
        });
        for turn in 0..3 {
            say(&client, &format!("question {turn}")).await;
        }
        let last = asked.borrow().last().unwrap().clone();
        let summary = MessageRecord::User {
            text: "2 questions were answered.".into(),
        };
        assert_eq!(last.first(), Some(&summary));
        assert!(!stored(&client).contains(&summary));
        let (_, usage) = client.get("/agents/looker/usage?sessionId=s1").await;
        let counted = &usage["rollup"]["byModel"]["summariser"]["total"];
        assert!(made.get() >= 3);
        assert_eq!(counted.as_u64(), Some(1000 * u64::from(made.get())));
    });
}

/// A policy that does something else than what it should.
struct Wrong(fn(&[MessageRecord]) -> LocalBoxFuture<'static, Result<Selected>>);

impl HistoryPolicy for Wrong {
    fn select<'a>(
        &'a self,
        conversation: Conversation<'a>,
    ) -> LocalBoxFuture<'a, Result<Selected>> {
        (self.0)(conversation.messages)
    }
}

#[test]
fn a_policy_that_breaks_the_pairing_fails_or_hangs_ends_the_run_and_sends_nothing() {
    in_world(|| async {
        fn breaks(messages: &[MessageRecord]) -> LocalBoxFuture<'static, Result<Selected>> {
            let kept = messages
                .iter()
                .filter(|m| !matches!(m, MessageRecord::Tool { .. }));
            let messages = kept.cloned().collect();
            let selected = Selected {
                messages,
                spent: Vec::new(),
            };
            async { Ok(selected) }.boxed_local()
        }
        fn fails(_: &[MessageRecord]) -> LocalBoxFuture<'static, Result<Selected>> {
            async { Err(Error::new(remote_agents::Code::Overloaded, "Not now.")) }.boxed_local()
        }
        fn hangs(_: &[MessageRecord]) -> LocalBoxFuture<'static, Result<Selected>> {
            std::future::pending().boxed_local()
        }
        for (policy, wanted, histories) in [
            (breaks as fn(&[MessageRecord]) -> _, "INTERNAL", 1),
            (fails, "OVERLOADED", 0),
            (hangs, "run_timeout", 0),
        ] {
            let (client, asked) = talker(History {
                budget: 0,
                policy: Rc::new(Wrong(policy)),
                ..History::default()
            });
            let status = say(&client, "question").await;
            assert_eq!(status["errorCode"], wanted, "{status}");
            assert_eq!(asked.borrow().len(), histories);
        }
        // A stop does not wait for it.
        let (client, asked) = talker(History {
            budget: 0,
            policy: Rc::new(Wrong(hangs)),
            ..History::default()
        });
        let body = json!({"sessionId": "s1", "message": "go"});
        client.post("/agents/looker/start", body).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let stop = json!({"sessionId": "s1"});
        client.post("/agents/looker/interrupt", stop).await;
        assert_eq!(
            client.settled("looker", "s1").await["status"],
            "interrupted"
        );
        assert_eq!(asked.borrow().len(), 0);
    });
}

/// The bytes of each conversation that a model was sent, and whether there was room for it.
type Asked = Rc<RefCell<Vec<(usize, bool)>>>;

/// An agent whose model has room for so many bytes of a conversation.
fn narrow(room: Rc<Cell<usize>>, keep_last: usize) -> (Client, Asked) {
    let asked = Asked::default();
    let told = asked.clone();
    let client = hosting(move || {
        let (asked, room) = (told.clone(), room.clone());
        let model = scripted(move |request: &ModelRequest| {
            let size = serde_json::to_string(&*request.messages).unwrap().len();
            let fits = size <= room.get();
            asked.borrow_mut().push((size, fits));
            match turn(request) {
                _ if !fits => vec![Err(ModelError::new(
                    ModelErrorKind::ContextOverflow,
                    "The conversation is too long for the model.",
                ))],
                0 => calls(&[("c", "look", json!({"at": 1}))]),
                _ => text(&"word ".repeat(20)),
            }
        });
        looker(model, &Rc::default()).with_history(History {
            policy: Rc::new(CutOldest { keep_last }),
            ..History::default()
        })
    });
    (client, asked)
}

#[test]
fn a_conversation_that_the_model_finds_too_long_is_cut_and_sent_again() {
    in_world(|| async {
        let room = Rc::new(Cell::new(1500));
        let (client, asked) = narrow(room.clone(), 1);
        for turn in 0..12 {
            let status = say(&client, &format!("question {turn}")).await;
            assert_eq!(status["status"], "completed", "{status}");
        }
        assert_eq!(stored(&client).len(), 12 * 4);
        let told = asked.borrow().clone();
        let refused: Vec<usize> = (0..told.len()).filter(|at| !told[*at].1).collect();
        // The next one is half as long, and so are all that follow.
        let [first] = refused[..] else {
            panic!("{told:?}")
        };
        for (size, _) in &told[first + 1..] {
            assert!(*size < told[first].0 * 3 / 4, "{told:?}");
        }
        // Where no cut is enough, the run fails, after a few.
        room.set(0);
        asked.borrow_mut().clear();
        let status = say(&client, "another question").await;
        assert_eq!(status["errorCode"], "provider_error", "{status}");
        let told = asked.borrow().clone();
        assert!((2..=5).contains(&told.len()), "{told:?}");
        assert!(told.is_sorted_by(|one, next| one.0 > next.0), "{told:?}");
        // It goes on once there is room again.
        room.set(1500);
        assert_eq!(say(&client, "once more").await["status"], "completed");
    });
}

#[test]
fn a_conversation_that_is_too_long_and_cannot_be_cut_is_sent_once() {
    in_world(|| async {
        let (client, asked) = narrow(Rc::default(), 4);
        let status = say(&client, "question").await;
        assert_eq!(status["errorCode"], "provider_error");
        assert_eq!(asked.borrow().len(), 1);
    });
}

#[test]
fn a_stored_conversation_that_is_broken_is_not_sent() {
    in_world(|| async {
        let (client, asked) = talker(History::default());
        say(&client, "question").await;
        let id = SessionId::parse("s1").unwrap();
        let database = client.objects.database(&id).unwrap();
        let delete = "DELETE FROM ra_messages WHERE json_extract(body, '$.role') = 'tool'";
        remote_agents::store::Database::query(&*database, delete, &[]).unwrap();
        client.objects.evict(&id).unwrap();
        let before = asked.borrow().len();
        let status = say(&client, "another question").await;
        assert_eq!(status["errorCode"], "invalid_stored_state");
        assert_eq!(asked.borrow().len(), before);
    });
}
