#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::collections::HashMap;
use std::rc::Rc;
use std::task::{Context, Poll};

use futures::stream::StreamExt as _;
use serde_json::{Value, json};

use super::OfflineModel;
use crate::agent::model::{LanguageModel as _, ModelEvent, ModelRequest, StopReason, ToolSpec};
use crate::protocol::usage::Tokens;
use crate::store::{MessageRecord, ToolCall, ToolOutcome};

/// One answer, put together from its events.
#[derive(Debug, Default, PartialEq)]
struct Said {
    text: String,
    text_pieces: usize,
    calls: Vec<ToolCall>,
    tokens: Option<Tokens>,
    stop: Option<StopReason>,
}

impl Said {
    fn named(&self) -> Vec<(&str, &Value)> {
        self.calls
            .iter()
            .map(|call| (call.name.as_str(), &call.arguments))
            .collect()
    }
}

/// Reads an answer event by event. Before the first one and then every few of them the stream must
/// give the thread away.
fn ask(request: &ModelRequest) -> Said {
    let mut stream = OfflineModel::new().stream(request.clone());
    let waker = futures::task::noop_waker();
    let mut context = Context::from_waker(&waker);
    let (mut said, mut pieces) = (Said::default(), HashMap::<usize, Vec<String>>::new());
    let mut since_turn = super::EVENTS_PER_TURN;
    loop {
        let event = match stream.poll_next_unpin(&mut context) {
            Poll::Pending => {
                assert!(
                    since_turn > 0,
                    "one poll gives the thread away, the next has an event"
                );
                since_turn = 0;
                continue;
            }
            Poll::Ready(None) => break,
            Poll::Ready(Some(event)) => event.unwrap(),
        };
        since_turn += 1;
        assert!(
            since_turn <= super::EVENTS_PER_TURN,
            "nobody else has had a turn"
        );
        assert_eq!(said.stop, None, "the stop comes last");
        match event {
            ModelEvent::TextDelta(delta) => {
                assert!(!delta.is_empty());
                said.text.push_str(&delta);
                said.text_pieces += 1;
            }
            ModelEvent::ToolCallStart { index, id, name } => {
                assert_eq!(index, said.calls.len());
                said.calls.push(ToolCall {
                    id,
                    name,
                    arguments: Value::Null,
                });
            }
            ModelEvent::ToolCallDelta { index, delta } => {
                pieces.entry(index).or_default().push(delta)
            }
            ModelEvent::ToolCallEnd { index } => {
                assert!(
                    pieces[&index].len() >= 2,
                    "arguments never come all at once"
                );
                said.calls[index].arguments =
                    serde_json::from_str(&pieces[&index].concat()).unwrap();
            }
            ModelEvent::Usage(tokens) => said.tokens = Some(tokens),
            ModelEvent::Stop(stop) => {
                assert!(said.tokens.is_some(), "usage comes before the stop");
                said.stop = Some(stop);
            }
            ModelEvent::Reasoning { .. } | ModelEvent::Kept(_) => {
                panic!("the model does not reason")
            }
        }
    }
    let stop = if said.calls.is_empty() {
        StopReason::EndTurn
    } else {
        StopReason::ToolUse
    };
    assert_eq!(said.stop, Some(stop));
    said
}

/// A conversation with scripted tools.
struct Talk {
    request: ModelRequest,
    answers: Vec<Said>,
}

impl Talk {
    fn new(instructions: &str, message: &str, tools: &[(&str, Value)]) -> Self {
        let spec = |(name, parameters): &(&str, Value)| ToolSpec {
            name: (*name).into(),
            description: format!("Does {name}."),
            parameters: parameters.clone(),
        };
        let request = ModelRequest {
            instructions: instructions.into(),
            messages: Rc::new([MessageRecord::User {
                text: message.into(),
            }]),
            tools: tools.iter().map(spec).collect(),
            output: None,
        };
        Self {
            request,
            answers: Vec::new(),
        }
    }

    fn push(&mut self, more: impl IntoIterator<Item = MessageRecord>) {
        self.request.messages = self.request.messages.iter().cloned().chain(more).collect();
    }

    /// Answers once and appends what the tools say to it.
    fn step(&mut self, tool: &mut dyn FnMut(&ToolCall) -> Result<Value, &'static str>) -> &Said {
        let said = ask(&self.request);
        assert_eq!(
            said,
            ask(&self.request),
            "the same request has the same answer"
        );
        let results: Vec<_> = said
            .calls
            .iter()
            .map(|call| {
                let outcome = match tool(call) {
                    Ok(result) => ToolOutcome {
                        success: true,
                        result,
                        error: None,
                    },
                    Err(error) => ToolOutcome {
                        success: false,
                        result: Value::Null,
                        error: Some(error.into()),
                    },
                };
                MessageRecord::Tool {
                    tool_call_id: call.id.clone(),
                    tool_name: call.name.clone(),
                    outcome,
                }
            })
            .collect();
        self.push([MessageRecord::Assistant {
            text: said.text.clone(),
            tool_calls: said.calls.clone(),
            cut: false,
            kept: None,
        }]);
        self.push(results);
        self.answers.push(said);
        self.answers.last().unwrap()
    }

    /// Goes on until an answer has no call, or calls `finish` with success.
    fn run(&mut self, mut tool: impl FnMut(&ToolCall) -> Result<Value, &'static str>) -> &Said {
        for _ in 0..80 {
            let mut finished = false;
            let said = self.step(&mut |call| {
                let result = tool(call);
                finished |= call.name == "finish" && result.is_ok();
                result
            });
            if said.calls.is_empty() || finished {
                return self.answers.last().unwrap();
            }
        }
        panic!("the model goes on for ever");
    }

    fn calls(&self) -> Vec<Vec<(&str, &Value)>> {
        self.answers.iter().map(Said::named).collect()
    }
}

fn object(properties: Value) -> Value {
    let required: Vec<String> = properties.as_object().unwrap().keys().cloned().collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

const HARBOUR: &str = "\
You keep the harbour's books. Be exact; see also the `ledger`.

1. Call `list_ships` with the place.
2. For each item of `ships`, call `weigh_cargo` with its ship id and its flag.
   If a call fails, call `ring_bell` instead. Never call `ring_bell` twice.
3) Write a line for every ship, and call `finish` with what was weighed.
";

fn harbour(message: &str) -> Talk {
    let text = json!({ "type": "string" });
    Talk::new(
        HARBOUR,
        message,
        &[
            ("list_ships", object(json!({ "place": text }))),
            (
                "weigh_cargo",
                object(json!({ "shipId": text, "flag": text })),
            ),
            ("ring_bell", object(json!({}))),
            (
                "finish",
                json!({
                    "type": "object",
                    "properties": {
                        "place": text,
                        "cargoes": { "type": "array", "items": { "$ref": "#/$defs/Cargo" } },
                    },
                    "required": ["place", "cargoes"],
                    "$defs": { "Cargo": object(json!({ "shipId": text, "tons": { "type": "integer" } })) },
                }),
            ),
        ],
    )
}

fn ships() -> Value {
    json!({ "ships": [
        { "id": "s-1", "flag": "Malta", "captain": "Ada" },
        { "id": "s-2", "flag": "Åland 🚢", "captain": "Bo" },
        { "id": "s-1", "flag": "Malta", "captain": "the same once more" },
    ] })
}

fn weigh(call: &ToolCall) -> Value {
    let tons = if call.arguments["shipId"] == "s-1" {
        7
    } else {
        9
    };
    json!({ "shipId": call.arguments["shipId"], "tons": tons, "clerk": "Cy" })
}

#[test]
fn a_numbered_procedure_is_followed_to_its_end() {
    let mut talk = harbour(r#"{"place": "Gdańsk", "season": "spring"}"#);
    talk.run(|call| {
        Ok(match call.name.as_str() {
            "list_ships" => ships(),
            "weigh_cargo" => weigh(call),
            _ => json!({}),
        })
    });
    let expected = json!({ "place": "Gdańsk", "cargoes": [{ "shipId": "s-1", "tons": 7 }, { "shipId": "s-2", "tons": 9 }] });
    assert_eq!(
        talk.calls(),
        [
            vec![("list_ships", &json!({ "place": "Gdańsk" }))],
            vec![
                ("weigh_cargo", &json!({ "shipId": "s-1", "flag": "Malta" })),
                (
                    "weigh_cargo",
                    &json!({ "shipId": "s-2", "flag": "Åland 🚢" })
                ),
            ],
            vec![("finish", &expected)],
        ]
    );
    let last = talk.answers.last().unwrap();
    assert!(
        last.text.contains("[s-1]") && last.text.contains("[s-2]"),
        "{}",
        last.text
    );
    assert!(last.text_pieces >= 2);
    assert!(
        talk.answers[0].text.is_empty(),
        "text comes where the procedure asks for it"
    );
    let ids: Vec<&str> = talk
        .answers
        .iter()
        .flat_map(|said| &said.calls)
        .map(|call| call.id.as_str())
        .collect();
    assert_eq!(ids, ["call_1", "call_2", "call_3", "call_4"]);
}

#[test]
fn a_failed_call_is_made_once_more_and_then_left_out() {
    let mut talk = harbour("Gdańsk");
    let mut tries = 0;
    talk.run(|call| match call.name.as_str() {
        "list_ships" => Ok(ships()),
        "weigh_cargo" if call.arguments["shipId"] == "s-2" => {
            tries += 1;
            Err("the scales are broken")
        }
        "weigh_cargo" => Ok(weigh(call)),
        _ => Ok(json!({})),
    });
    assert_eq!(tries, 2);
    let calls = talk.calls();
    assert_eq!(calls.len(), 4);
    assert_eq!(
        calls[2],
        [(
            "weigh_cargo",
            &json!({ "shipId": "s-2", "flag": "Åland 🚢" })
        )]
    );
    assert_eq!(
        calls[3][0].1["cargoes"],
        json!([{ "shipId": "s-1", "tons": 7 }])
    );
}

#[test]
fn a_second_try_that_succeeds_counts() {
    let mut talk = harbour("Gdańsk");
    let mut broken = true;
    talk.run(|call| match call.name.as_str() {
        "list_ships" => Ok(ships()),
        "weigh_cargo" if call.arguments["shipId"] == "s-1" && std::mem::take(&mut broken) => {
            Err("come again")
        }
        "weigh_cargo" => Ok(weigh(call)),
        _ => Ok(json!({})),
    });
    let finish = talk.calls()[3][0].1["cargoes"].clone();
    assert_eq!(
        finish,
        json!([{ "shipId": "s-2", "tons": 9 }, { "shipId": "s-1", "tons": 7 }])
    );
}

#[test]
fn a_conversation_ends_when_everything_fails() {
    let mut talk = harbour("Gdańsk");
    let last = talk.run(|_| Err("the harbour is closed"));
    assert_eq!(last.text, "the harbour is closed");
    // Two tries of the list, none of the items that nobody listed, two of the end.
    assert_eq!(talk.answers.len(), 5);
    assert_eq!(
        talk.calls()[2],
        [("finish", &json!({ "place": "Gdańsk", "cargoes": [] }))]
    );
}

#[test]
fn a_call_that_was_stopped_before_it_began_is_made_again() {
    let mut talk = harbour("Gdańsk");
    talk.step(&mut |_| Ok(ships()));
    for _ in 0..3 {
        let said = ask(&talk.request);
        assert_eq!(said.calls.len(), 2);
        let outcome = ToolOutcome {
            success: false,
            result: json!({ "metadata": { "helixErrorDetail": { "code": "run_interrupted" } } }),
            error: Some("not executed".into()),
        };
        let results = said.calls.iter().map(|call| MessageRecord::Tool {
            tool_call_id: call.id.clone(),
            tool_name: call.name.clone(),
            outcome: outcome.clone(),
        });
        let results: Vec<_> = results.collect();
        talk.push([MessageRecord::Assistant {
            text: String::new(),
            tool_calls: said.calls,
            cut: true,
            kept: None,
        }]);
        talk.push(results);
    }
    talk.run(|call| Ok(weigh(call)));
    assert_eq!(
        talk.calls().last().unwrap()[0].1["cargoes"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn a_new_message_begins_the_procedure_again() {
    let mut talk = harbour("Gdańsk");
    talk.run(|call| {
        Ok(if call.name == "list_ships" {
            ships()
        } else {
            weigh(call)
        })
    });
    talk.push([MessageRecord::User {
        text: "Riga".into(),
    }]);
    assert_eq!(
        ask(&talk.request).named(),
        [("list_ships", &json!({ "place": "Riga" }))]
    );
    assert_eq!(ask(&talk.request).calls[0].id, "call_5", "ids go on");
}

#[test]
fn nothing_is_invented() {
    let mut talk = harbour(r#"{"place": "Gdańsk"}"#);
    talk.run(|call| {
        Ok(if call.name == "list_ships" {
            ships()
        } else {
            weigh(call)
        })
    });
    let given = format!(
        "{HARBOUR} Gdańsk {} tons: 7 9 Cy cargoes place shipId",
        ships()
    );
    for word in talk
        .answers
        .iter()
        .flat_map(|said| said.text.split_whitespace())
    {
        let bare = word.trim_matches(|c: char| !c.is_alphanumeric());
        assert!(given.contains(bare), "{word} was read nowhere");
    }
}

#[test]
fn without_a_procedure_it_answers_with_what_it_was_told() {
    for instructions in [
        "",
        "Be kind.",
        "1. Call `nobody` at all.",
        "2024 was a year.",
    ] {
        let mut talk = Talk::new(
            instructions,
            "Tell me of 船 and sails.",
            &[("unused", object(json!({})))],
        );
        let said = talk.run(|_| panic!("nothing is to be called"));
        assert_eq!(said.text, "Tell me of 船 and sails.");
        assert!(said.text_pieces >= 2);
    }
    let said = ask(&ModelRequest {
        instructions: "".into(),
        messages: Rc::new([]),
        tools: Rc::new([]),
        output: None,
    });
    assert_eq!((said.text.as_str(), said.calls.len()), ("", 0));
}

#[test]
fn a_declared_output_is_handed_in_without_being_asked_for() {
    let text = json!({ "type": "string" });
    let mut talk = Talk::new(
        "Be kind.",
        "boats",
        &[("finish", object(json!({ "answer": text })))],
    );
    talk.run(|_| Ok(Value::Null));
    assert_eq!(talk.calls(), [[("finish", &json!({ "answer": "boats" }))]]);
}

#[test]
fn arguments_follow_their_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "query": { "type": "string" },
            "tags": { "type": "array", "items": { "type": "string" }, "minItems": 1 },
            "mode": { "enum": ["slow", "fast"] },
            "kind": { "const": "k" },
            "limit": { "type": ["integer", "null"], "minimum": 3 },
            "deep": { "type": "boolean" },
            "short": { "type": "string", "maxLength": 4 },
            "owner": { "anyOf": [{ "$ref": "#/$defs/Owner" }, { "type": "null" }] },
            "owner_name": { "type": "string" },
            "boxes": { "type": "array", "minItems": 1, "items": { "type": "object", "properties": { "label": { "type": "string" } }, "required": ["label"] } },
            "note": { "type": "string" },
            "loop": { "$ref": "#/$defs/Loop" },
        },
        "required": ["query", "tags", "mode", "kind", "limit", "deep", "short", "owner", "boxes", "loop"],
        "$defs": {
            "Owner": { "type": "object", "properties": { "ownerName": { "type": "string" } }, "required": ["ownerName"] },
            "Loop": { "type": "object", "properties": { "loop": { "$ref": "#/$defs/Loop" } }, "required": ["loop"] },
        },
    });
    let message = r#"{"question": "How fast do the red boats, and old ships, sail?", "ownerName": "Ada", "deep": "no"}"#;
    let talk = Talk::new("1. Use the `probe` tool.", message, &[("probe", schema)]);
    let said = ask(&talk.request);
    let arguments = &said.calls[0].arguments;
    assert_eq!(
        arguments["query"],
        "How fast do the red boats, and old ships, sail?"
    );
    assert_eq!(
        arguments["tags"],
        json!(["fast", "red boats", "old ships", "sail"])
    );
    assert_eq!(arguments["mode"], "fast");
    assert_eq!(arguments["kind"], "k");
    assert_eq!(arguments["limit"], 3);
    assert_eq!(arguments["deep"], false, "a text is no boolean");
    assert_eq!(arguments["short"], "How ");
    assert_eq!(arguments["owner"], json!({ "ownerName": "Ada" }));
    assert_eq!(
        arguments["owner_name"], "Ada",
        "case and separators do not matter"
    );
    assert_eq!(arguments["boxes"].as_array().unwrap().len(), 1);
    assert_eq!(
        arguments.get("note"),
        None,
        "what is optional and stands nowhere is left out"
    );
}

#[test]
fn lists_are_gathered_from_all_results_of_a_step() {
    let text = json!({ "type": "string" });
    let instructions = "\
1. For each of `words`, call `look_up`.
2. For every item of `meanings`, use `write_down`.";
    let tools = [
        ("look_up", object(json!({ "word": text }))),
        ("write_down", object(json!({ "meaning": text }))),
    ];
    let mut talk = Talk::new(
        instructions,
        r#"{"words": ["sail", "oar", "sail"]}"#,
        &tools,
    );
    talk.run(|call| {
        Ok(match call.arguments["word"].as_str() {
            Some(word) => json!({ "meanings": [{ "meaning": format!("{word} 1") }, { "meaning": format!("{word} 2") }] }),
            None => json!("written"),
        })
    });
    let words: Vec<&Value> = talk.calls()[1]
        .iter()
        .map(|(_, arguments)| &arguments["meaning"])
        .collect();
    assert_eq!(words, ["sail 1", "sail 2", "oar 1", "oar 2"]);
    assert_eq!(talk.answers[0].calls.len(), 2, "the same call is made once");
}

#[test]
fn a_list_without_a_name_is_the_latest_one() {
    let text = json!({ "type": "string" });
    let instructions = "1. Call `list`.\n2. For each boat, call `paint` with its name.\n3. Call `close` for every boat.";
    let tools = [
        ("list", object(json!({}))),
        ("paint", object(json!({ "name": text }))),
        ("close", object(json!({}))),
    ];
    let mut talk = Talk::new(instructions, "go", &tools);
    talk.run(|call| {
        Ok(if call.name == "list" {
            json!([{ "name": "Ada" }, { "name": "Bo" }])
        } else {
            json!(1)
        })
    });
    let counts: Vec<usize> = talk.answers.iter().map(|said| said.calls.len()).collect();
    assert_eq!(counts, [1, 2, 1, 0]);
}

#[test]
fn tokens_grow_with_the_conversation() {
    let mut talk = harbour("Gdańsk");
    talk.run(|call| {
        Ok(if call.name == "list_ships" {
            ships()
        } else {
            weigh(call)
        })
    });
    let tokens: Vec<Tokens> = talk
        .answers
        .iter()
        .map(|said| said.tokens.unwrap())
        .collect();
    assert!(
        tokens
            .windows(2)
            .all(|pair| pair[0].prompt < pair[1].prompt)
    );
    assert!(
        tokens
            .iter()
            .all(|t| t.completion > 0 && t.total == t.prompt + t.completion)
    );
}

#[test]
fn it_knows_no_agent_and_no_tool() {
    let sources = [
        include_str!("mod.rs"),
        include_str!("extract.rs"),
        include_str!("fill.rs"),
        include_str!("history.rs"),
        include_str!("policy.rs"),
        include_str!("procedure.rs"),
    ];
    let foreign = [
        "planner",
        "researcher",
        "writer",
        "research",
        "plan",
        "search",
        "record_finding",
        "compose",
        "subagent__",
        "documentId",
        "threadId",
        "thread_id",
        "findings",
    ];
    for source in sources {
        for word in source.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
            assert!(
                !foreign.contains(&word),
                "{word} is a name of the project's agents"
            );
        }
    }
}
