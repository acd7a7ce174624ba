//! What a model may do to a conversation, and what comes of it: the rows of the table in
//! `docs/agents.md`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use remote_agents::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelRequest, StopReason,
};
use remote_agents::agent::{Limits, typed_tool};
use remote_agents::mount::Mount;
use remote_agents::native::LocalObjects;
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::store::{MessageRecord, SqlStore, Store as _, ToolCall, ToolOutcome};
use remote_agents::{Agent, Agents, ToolContext, ToolError};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::stories::paired;
use crate::support::{Client, Lines, calls, chunks, in_world, scripted, text, turn};

type Events = Vec<Result<ModelEvent, ModelError>>;

#[derive(Deserialize, JsonSchema)]
struct Place {
    at: u32,
}

/// An agent that can look, which gives what is looked at; each look is counted.
pub fn looker(model: Rc<dyn LanguageModel>, looks: &Rc<Cell<u32>>) -> Agent {
    let looks = looks.clone();
    let look = typed_tool("look", "Looks.", move |_: ToolContext, place: Place| {
        looks.set(looks.get() + 1);
        async move { Ok::<_, ToolError>(json!({"seen": place.at})) }
    });
    Agent::new(AgentType::parse("looker").unwrap(), "Look.", model).with_tool(look)
}

pub fn hosting(make: impl Fn() -> Agent + 'static) -> Client {
    Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: LocalObjects::new(
            1_700_000_000_000,
            Lines::default().sink(),
            Rc::new(move |_, _| Agents::new([make()])),
        ),
    }
}

pub async fn say(client: &Client, message: &str) -> Value {
    let body = json!({"sessionId": "s1", "message": message});
    let (status, _) = client.post("/agents/looker/start", body.clone()).await;
    if status != 200 {
        let (status, answer) = client.post("/agents/looker/resume", body).await;
        assert_eq!(status, 200, "{answer}");
    }
    client.settled("looker", "s1").await
}

pub fn stored(client: &Client) -> Vec<MessageRecord> {
    let id = SessionId::parse("s1").unwrap();
    SqlStore::new(client.objects.database(&id).unwrap())
        .messages()
        .unwrap()
}

fn outcomes(messages: &[MessageRecord]) -> Vec<(String, ToolOutcome)> {
    let results = messages.iter().filter_map(|message| match message {
        MessageRecord::Tool {
            tool_call_id,
            outcome,
            ..
        } => Some((tool_call_id.clone(), outcome.clone())),
        _ => None,
    });
    results.collect()
}

fn code(outcome: &ToolOutcome) -> (&str, &str) {
    let detail = &outcome.result["metadata"]["helixErrorDetail"];
    (
        detail["code"].as_str().unwrap_or("none"),
        detail["cause"].as_str().unwrap_or("none"),
    )
}

/// The model's first answer is `first`, then it says that it is done. What became of the session,
/// its results, and how often the tool ran.
async fn after(
    first: impl Fn() -> Events + 'static,
    change: impl Fn(Agent) -> Agent + 'static,
) -> (Value, Vec<(String, ToolOutcome)>, u32) {
    let looks = Rc::new(Cell::new(0));
    let (first, counted) = (Rc::new(first), looks.clone());
    let client = hosting(move || {
        let first = first.clone();
        let model = scripted(move |request| match turn(request) {
            0 => first(),
            _ => text("done"),
        });
        change(looker(model, &counted))
    });
    let status = say(&client, "go").await;
    (status, outcomes(&stored(&client)), looks.get())
}

/// One call whose arguments are this text.
fn raw(id: &str, name: &str, arguments: &str) -> Events {
    [
        ModelEvent::ToolCallStart {
            index: 0,
            id: id.into(),
            name: name.into(),
        },
        ModelEvent::ToolCallDelta {
            index: 0,
            delta: arguments.into(),
        },
        ModelEvent::ToolCallEnd { index: 0 },
        ModelEvent::Stop(StopReason::ToolUse),
    ]
    .map(Ok)
    .into()
}

#[test]
fn a_call_of_a_tool_that_is_not_there_has_a_result_that_says_so() {
    in_world(|| async {
        for name in ["peek", "", "finish", "subagent__nobody", "LOOK"] {
            let first = move || calls(&[("c1", name, json!({"at": 1}))]);
            let (status, results, looks) = after(first, |agent| agent).await;
            assert_eq!(status["status"], "completed");
            let [(_, outcome)] = results.as_slice() else {
                panic!("{results:?}")
            };
            assert_eq!(code(outcome), ("VALIDATION_ERROR", "none"), "{name}");
            assert!(outcome.error.as_ref().unwrap().contains(name));
            assert_eq!(looks, 0);
        }
    });
}

#[test]
fn pieces_of_a_call_that_never_began_are_skipped() {
    in_world(|| async {
        let first = || {
            let stray = [
                ModelEvent::ToolCallDelta {
                    index: 7,
                    delta: "{}".into(),
                },
                ModelEvent::ToolCallEnd { index: 7 },
            ];
            let mut events: Events = stray.map(Ok).into();
            events.extend(calls(&[("c1", "look", json!({"at": 1}))]));
            events
        };
        let (status, results, looks) = after(first, |agent| agent).await;
        assert_eq!(status["status"], "completed");
        assert_eq!((results.len(), looks), (1, 1));
        assert!(results[0].1.success);
    });
}

#[test]
fn malformed_arguments_are_refused_before_the_tool_and_no_argument_is_an_empty_object() {
    in_world(|| async {
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let deep = format!("{{\"at\": {deep}}}");
        for arguments in [
            "{\"at\": ",
            "[1]",
            "\"at\"",
            "{\"at\": \"here\"}",
            "",
            &deep,
        ] {
            let arguments = arguments.to_owned();
            let shown = arguments.clone();
            let first = move || raw("c1", "look", &arguments);
            let (status, results, looks) = after(first, |agent| agent).await;
            assert_eq!(status["status"], "completed");
            let (_, outcome) = &results[0];
            assert_eq!(code(outcome), ("VALIDATION_ERROR", "none"), "{shown}");
            assert_eq!((results.len(), looks), (1, 0), "{shown}");
        }
        // The driver does so for whichever tool; what it hands in has to be an object as well.
        #[derive(Deserialize, JsonSchema)]
        struct Any {}
        let looked = Rc::new(Cell::new(0));
        let counted = looked.clone();
        let change = move |agent: Agent| {
            let counted = counted.clone();
            agent.with_tool(typed_tool("any", "Any.", move |_, _: Any| {
                counted.set(counted.get() + 1);
                async { Ok::<_, ToolError>("done") }
            }))
        };
        let (_, results, _) = after(|| raw("c1", "any", "[]"), change.clone()).await;
        assert_eq!(
            (code(&results[0].1).0, looked.get()),
            ("VALIDATION_ERROR", 0)
        );
        let (_, results, _) = after(|| raw("c1", "any", " "), change).await;
        assert!(results[0].1.success && looked.get() == 1);
    });
}

#[test]
fn a_call_id_that_was_used_becomes_another_one() {
    in_world(|| async {
        let looks = Rc::new(Cell::new(0));
        let client = hosting(move || {
            let model = scripted(|request| match turn(request) {
                0 => calls(&[
                    ("c1", "look", json!({"at": 1})),
                    ("c1", "look", json!({"at": 2})),
                    ("", "look", json!({"at": 3})),
                ]),
                1 => calls(&[("c1", "look", json!({"at": 4}))]),
                _ => text("done"),
            });
            looker(model, &looks)
        });
        assert_eq!(say(&client, "go").await["status"], "completed");
        let seen: Vec<_> = outcomes(&stored(&client))
            .into_iter()
            .map(|(id, outcome)| (id, outcome.result["seen"].as_u64().unwrap()))
            .collect();
        let wanted = [("c1", 1), ("c1_2", 2), ("call", 3), ("c1_3", 4)];
        assert_eq!(seen, wanted.map(|(id, at)| (id.to_owned(), at)));
    });
}

/// A client of an agent whose model says what `says` makes of the number of its call, from 1 on; and
/// how often it was asked.
fn counting(says: impl Fn(u32) -> Events + Clone + 'static) -> (Client, Rc<Cell<u32>>) {
    let asked = Rc::new(Cell::new(0));
    let count = asked.clone();
    let client = hosting(move || {
        let (count, says) = (count.clone(), says.clone());
        let model = scripted(move |_| {
            count.set(count.get() + 1);
            says(count.get())
        });
        looker(model, &Rc::default())
    });
    (client, asked)
}

/// An answer that is a thought and nothing else.
fn thought(reason: StopReason) -> Events {
    let thought = ModelEvent::Reasoning {
        content: "hm".into(),
        is_complete: true,
    };
    vec![Ok(thought), Ok(ModelEvent::Stop(reason))]
}

#[test]
fn an_empty_answer_is_discarded_and_asked_for_again_and_never_enters_the_conversation() {
    in_world(|| async {
        for (empties, wanted) in [(1, "completed"), (3, "completed"), (4, "failed")] {
            let (client, asked) = counting(move |call| match call {
                n if n > empties => text("done"),
                n if n % 2 == 0 => text(" "),
                _ => thought(StopReason::ToolUse),
            });
            let status = say(&client, "go").await;
            assert_eq!(status["status"], wanted, "{empties}");
            let answers = stored(&client).len() - 1;
            if wanted == "failed" {
                assert_eq!(status["errorCode"], "provider_error");
                assert_eq!((asked.get(), answers), (4, 0));
            } else {
                assert_eq!((status["output"].as_str(), answers), (Some("done"), 1));
            }
            let path = "/agents/looker/sse?sessionId=s1&fromSequence=0";
            let said = chunks(&client.sse(path).await.0);
            let discarded = said
                .iter()
                .filter(|chunk| chunk["type"] == "step_discarded");
            assert_eq!(discarded.count(), usize::try_from(empties).unwrap());
        }
    });
}

#[test]
fn a_model_that_reaches_its_limit_before_it_answers_is_not_asked_again() {
    in_world(|| async {
        let (client, asked) = counting(|_| thought(StopReason::MaxTokens));
        let status = say(&client, "go").await;
        assert_eq!(status["errorCode"], "provider_error", "{status}");
        assert!(
            status["error"]
                .as_str()
                .unwrap()
                .contains("limit of tokens")
        );
        assert_eq!((asked.get(), stored(&client).len()), (1, 1));
    });
}

#[test]
fn an_answer_at_the_provider_s_limit_stands_and_its_unfinished_call_is_refused() {
    in_world(|| async {
        let cut_text = || {
            let mut events = text("as far as it");
            events.pop();
            events.push(Ok(ModelEvent::Stop(StopReason::MaxTokens)));
            events
        };
        let (status, ..) = after(cut_text, |agent| agent).await;
        assert_eq!(status["output"], "as far as it");
        let cut_call = || {
            let mut events = raw("c1", "look", "{\"at\": 1");
            events.truncate(2);
            events.push(Ok(ModelEvent::Stop(StopReason::MaxTokens)));
            events
        };
        let (status, results, looks) = after(cut_call, |agent| agent).await;
        assert_eq!((status["status"].as_str(), looks), (Some("completed"), 0));
        assert_eq!(code(&results[0].1).0, "VALIDATION_ERROR");
    });
}

#[test]
fn a_refusal_and_a_conversation_that_is_too_long_for_the_model_fail_the_run_at_once() {
    in_world(|| async {
        let refusal = || {
            let mut events = text("no");
            events.pop();
            events.push(Ok(ModelEvent::Stop(StopReason::Refusal)));
            events
        };
        let overflow = || {
            vec![Err(ModelError {
                kind: ModelErrorKind::ContextOverflow,
                message: "The conversation is too long for the model.".into(),
                retry_after: None,
            })]
        };
        let failing: [fn() -> Events; 2] = [refusal, overflow];
        for first in failing {
            let (status, ..) = after(first, |agent| agent).await;
            assert_eq!(status["status"], "failed");
            assert_eq!(status["errorCode"], "provider_error");
        }
    });
}

#[test]
fn what_a_provider_wants_back_is_stored_with_its_answer_and_in_each_later_history() {
    in_world(|| async {
        let seen: Rc<RefCell<Vec<Vec<Option<Value>>>>> = Rc::default();
        let read = seen.clone();
        let client = hosting(move || {
            let read = read.clone();
            let model = scripted(move |request| {
                let kept = request.messages.iter().filter_map(|message| match message {
                    MessageRecord::Assistant { kept, .. } => Some(kept.clone()),
                    _ => None,
                });
                read.borrow_mut().push(kept.collect());
                if turn(request) > 0 {
                    return text("done");
                }
                let mut events = calls(&[("c1", "look", json!({"at": 1}))]);
                let kept = |what: &str| Ok(ModelEvent::Kept(json!({ "kept": what })));
                events.insert(0, kept("the first"));
                events.insert(2, kept("the last"));
                events
            });
            looker(model, &Rc::default())
        });
        say(&client, "go").await;
        let id = SessionId::parse("s1").unwrap();
        client.objects.evict(&id).unwrap();
        say(&client, "go on").await;
        let last = Some(json!({"kept": "the last"}));
        assert_eq!(
            *seen.borrow(),
            [
                vec![],
                vec![last.clone()],
                vec![last.clone(), None],
                vec![last.clone(), None, last]
            ]
        );
        let path = "/agents/looker/sse?sessionId=s1&fromSequence=0";
        assert!(
            !json!(chunks(&client.sse(path).await.0))
                .to_string()
                .contains("the last")
        );
    });
}

#[test]
fn a_loop_of_the_same_call_is_told_to_the_model_and_then_ends_the_run() {
    in_world(|| async {
        // Which step the model does something else in, if it does.
        for (limit, wakes_at, wanted) in [
            (None, None, "failed"),
            (Some(2), None, "failed"),
            (Some(2), Some(3), "completed"),
            (Some(0), None, "failed"),
            (Some(u32::MAX), None, "failed"),
        ] {
            let looks = Rc::new(Cell::new(0));
            let counted = looks.clone();
            let client = hosting(move || {
                let model = scripted(move |request| match turn(request) {
                    n if wakes_at == Some(n) => text("done"),
                    n => calls(&[
                        (&format!("c{n}"), "look", json!({"at": 1})),
                        (&format!("d{n}"), "look", json!({"at": 2})),
                    ]),
                });
                let defaults = Limits::default();
                looker(model, &counted).with_limits(Limits {
                    max_steps: 12,
                    max_repeats: limit.unwrap_or(defaults.max_repeats),
                    ..defaults
                })
            });
            let status = say(&client, "go").await;
            assert_eq!(status["status"], wanted);
            let made = match limit {
                None => 5,
                Some(u32::MAX) => 12,
                Some(n) => n.max(1),
            };
            assert_eq!(looks.get(), 2 * made, "{limit:?}");
            let results = outcomes(&stored(&client));
            let refused: Vec<_> = results
                .iter()
                .filter(|(_, result)| !result.success)
                .collect();
            for (_, outcome) in &refused {
                assert_eq!(code(outcome), ("tool_execution_failed", "repeated_call"));
            }
            let told = match (limit, wakes_at) {
                (Some(u32::MAX), _) => 0,
                (_, Some(_)) => 1,
                _ => 2,
            };
            assert_eq!(refused.len(), 2 * told, "{limit:?}");
            if wanted == "failed" {
                assert_eq!(status["errorCode"], "run_attempts_exhausted");
                let is_loop = status["error"].as_str().unwrap().contains("same calls");
                assert_eq!(is_loop, limit != Some(u32::MAX));
            }
        }
    });
}

#[test]
fn calls_that_go_round_in_a_longer_circle_end_the_run_at_its_limit_of_steps() {
    in_world(|| async {
        let looks = Rc::new(Cell::new(0));
        let counted = looks.clone();
        let client = hosting(move || {
            let model = scripted(|request| {
                let turn = turn(request);
                calls(&[(&format!("c{turn}"), "look", json!({"at": turn % 2}))])
            });
            looker(model, &counted)
        });
        let status = say(&client, "go").await;
        assert_eq!(status["errorCode"], "run_attempts_exhausted");
        assert!(status["error"].as_str().unwrap().contains("32 steps"));
        assert_eq!(looks.get(), 32);
    });
}

#[test]
fn the_same_call_with_another_result_is_no_loop() {
    in_world(|| async {
        let client = hosting(|| {
            let model = scripted(|request| match turn(request) {
                n if n < 10 => calls(&[(&format!("c{n}"), "poll", json!({}))]),
                _ => text("done"),
            });
            #[derive(Deserialize, JsonSchema)]
            struct Poll {}
            let polls = Cell::new(0);
            looker(model, &Rc::default()).with_tool(typed_tool(
                "poll",
                "Polls.",
                move |_, _: Poll| {
                    polls.set(polls.get() + 1);
                    let seen = polls.get();
                    async move { Ok::<_, ToolError>(seen) }
                },
            ))
        });
        let status = say(&client, "go").await;
        assert_eq!(status["output"], "done");
        assert_eq!(outcomes(&stored(&client)).len(), 10);
    });
}

#[test]
fn a_loop_is_seen_across_a_crash_of_the_object_at_every_step() {
    in_world(|| async {
        let looks = Rc::new(Cell::new(0));
        let counted = looks.clone();
        let client = hosting(move || {
            let model = scripted(|request| {
                let id = format!("c{}", turn(request));
                calls(&[(&id, "look", json!({"at": 1}))])
            });
            looker(model, &counted)
        });
        let body = json!({"sessionId": "s1", "message": "go"});
        assert_eq!(client.post("/agents/looker/start", body).await.0, 200);
        let id = SessionId::parse("s1").unwrap();
        for _ in 0..9 {
            tokio::time::sleep(Duration::from_millis(8)).await;
            client.objects.evict(&id).unwrap();
            tokio::time::sleep(Duration::from_millis(2_000)).await;
        }
        let status = client.settled("looker", "s1").await;
        assert_eq!(status["errorCode"], "run_attempts_exhausted");
        let failed = outcomes(&stored(&client));
        assert_eq!(
            failed.iter().filter(|(_, result)| result.success).count(),
            5
        );
        assert_eq!(failed.len(), 7);
    });
}

#[test]
fn the_judge_of_histories_sees_each_way_to_break_one() {
    let answer = |ids: &[&str]| MessageRecord::Assistant {
        text: String::new(),
        tool_calls: ids
            .iter()
            .map(|id| ToolCall {
                id: (*id).into(),
                name: "look".into(),
                arguments: json!({}),
            })
            .collect(),
        cut: false,
        kept: None,
    };
    let result = |id: &str| MessageRecord::Tool {
        tool_call_id: id.into(),
        tool_name: "look".into(),
        outcome: ToolOutcome {
            success: true,
            result: Value::Null,
            error: None,
        },
    };
    let user = || MessageRecord::User { text: "q".into() };
    let whole = vec![
        user(),
        answer(&["a", "b"]),
        result("a"),
        result("b"),
        user(),
    ];
    paired::judge(&whole).unwrap();
    for place in 1..4 {
        let mut without = whole.clone();
        without.remove(place);
        assert!(paired::judge(&without).is_err(), "{place}");
        let mut twice = whole.clone();
        twice.insert(place, whole[place].clone());
        assert!(paired::judge(&twice).is_err(), "{place}");
        let mut parted = whole.clone();
        parted.insert(place + 1, user());
        let is_behind_the_last = place == 3;
        assert_eq!(
            paired::judge(&parted).is_ok(),
            is_behind_the_last,
            "{place}"
        );
    }
    let mut swapped = whole;
    swapped.swap(2, 3);
    assert!(paired::judge(&swapped).is_err());
    // What it finds is noted for the end of the test.
    paired::findings();
    let request = ModelRequest {
        instructions: "".into(),
        messages: swapped.into(),
        tools: Rc::new([]),
        output: None,
    };
    assert!(paired::read(&request).is_err());
    assert_eq!((paired::count(), paired::findings().len()), (1, 1));
}
