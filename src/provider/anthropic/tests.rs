#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

use std::rc::Rc;

use serde_json::{Value, json};

use super::{AnthropicModel, Thinking, messages};
use crate::agent::model::ModelEvent::{
    Kept, Reasoning, Stop, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart, Usage,
};
use crate::agent::model::{LanguageModel as _, ModelError, ModelErrorKind, ModelEvent, StopReason};
use crate::protocol::usage::Tokens;
use crate::provider::testing::{self, Piece, Provider, Wire, answer, cuts, in_time, question};
use crate::store::{MessageRecord, ToolCall};
use crate::transport::testing::TestRuntime;

fn model(fetch: Rc<dyn crate::transport::Fetch>, runtime: Rc<TestRuntime>) -> AnthropicModel {
    AnthropicModel::new(fetch, runtime, "http://ai.test", "sk-secret", "m").unwrap()
}

/// A body of these events, named by their type.
fn body(events: &[Value]) -> String {
    events
        .iter()
        .map(|event| {
            format!(
                "event: {}\ndata: {event}\n\n",
                event["type"].as_str().unwrap()
            )
        })
        .collect()
}

fn said(events: &[Value]) -> Vec<Result<ModelEvent, ModelError>> {
    answer(Provider::saying(body(events)), model)
}

fn failed(events: &[Result<ModelEvent, ModelError>]) -> ModelErrorKind {
    events.last().unwrap().as_ref().unwrap_err().kind
}

fn block(index: usize, block: Value) -> Value {
    json!({"type": "content_block_start", "index": index, "content_block": block})
}

fn piece(index: usize, delta: Value) -> Value {
    json!({"type": "content_block_delta", "index": index, "delta": delta})
}

fn end(index: usize) -> Value {
    json!({"type": "content_block_stop", "index": index})
}

fn stopped(reason: &str) -> Value {
    json!({"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 9}})
}

fn whole_answer() -> Vec<Value> {
    vec![
        json!({"type": "message_start", "message": {"usage": {"input_tokens": 10, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 20, "output_tokens": 1}}}),
        block(0, json!({"type": "thinking", "thinking": ""})),
        json!({"type": "ping"}),
        piece(0, json!({"type": "thinking_delta", "thinking": "Hmm 🤔"})),
        piece(0, json!({"type": "signature_delta", "signature": "c2ln"})),
        end(0),
        block(1, json!({"type": "text", "text": ""})),
        piece(1, json!({"type": "text_delta", "text": "Größe 日本"})),
        end(1),
        block(
            2,
            json!({"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}),
        ),
        piece(2, json!({"type": "input_json_delta", "partial_json": ""})),
        piece(
            2,
            json!({"type": "input_json_delta", "partial_json": "{\"q\":"}),
        ),
        piece(
            2,
            json!({"type": "input_json_delta", "partial_json": "\"ü\"}"}),
        ),
        end(2),
        block(
            3,
            json!({"type": "tool_use", "id": "toolu_2", "name": "look", "input": {"n": 1}}),
        ),
        end(3),
        stopped("tool_use"),
        json!({"type": "message_stop"}),
    ]
}

#[test]
fn an_answer_is_the_same_wherever_its_bytes_are_cut_and_however_its_lines_end() {
    let usage = |completion, total| {
        Usage(Tokens {
            prompt: 33,
            completion,
            reasoning: 0,
            cached: 20,
            total,
        })
    };
    let start = |index, id: &str, name: &str| ToolCallStart {
        index,
        id: id.into(),
        name: name.into(),
    };
    let delta = |index, delta: &str| ToolCallDelta {
        index,
        delta: delta.into(),
    };
    let expected = vec![
        usage(1, 34),
        Reasoning {
            content: "Hmm 🤔".into(),
            is_complete: false,
        },
        Reasoning {
            content: String::new(),
            is_complete: true,
        },
        TextDelta("Größe 日本".into()),
        start(0, "toolu_1", "search"),
        delta(0, "{\"q\":"),
        delta(0, "\"ü\"}"),
        ToolCallEnd { index: 0 },
        start(1, "toolu_2", "look"),
        delta(1, "{\"n\":1}"),
        ToolCallEnd { index: 1 },
        usage(9, 42),
        Kept(
            json!({"thinking": [{"type": "thinking", "thinking": "Hmm 🤔", "signature": "c2ln"}]}),
        ),
        Stop(StopReason::ToolUse),
    ];
    let body = body(&whole_answer());
    let lines = [
        (body.replace('\n', "\r\n"), 1),
        (body.replace('\n', "\r"), 5),
        (body, 5),
    ];
    for (body, step) in lines {
        in_time(async {
            for pieces in cuts(body.as_bytes()).step_by(step) {
                let mut provider = Provider::saying("");
                provider.pieces = pieces;
                let events = testing::said(provider, model).await;
                let events: Vec<_> = events.into_iter().map(Result::unwrap).collect();
                assert_eq!(events, expected);
            }
        });
    }
}

#[test]
fn a_body_that_is_cut_before_the_answer_s_reason_has_failed_and_after_it_is_whole() {
    let body = body(&whole_answer());
    let after = body.find("event: message_stop").unwrap();
    for at in 0..body.len() {
        for end in [None, Some(Piece::Break)] {
            let mut provider = Provider::saying(body.as_bytes()[..at].to_vec());
            provider.pieces.extend(end);
            match answer(provider, model).last() {
                Some(Ok(Stop(StopReason::ToolUse))) if at >= after => {}
                Some(Err(error)) if at < after => {
                    assert_eq!(error.kind, ModelErrorKind::Unavailable);
                    assert!(!error.message.contains("sk-secret"));
                }
                other => panic!("cut at {at} of {after}: {other:?}"),
            }
        }
    }
}

#[test]
fn reasons_and_errors_are_read() {
    let stop = |reason: &str| {
        said(&[stopped(reason), json!({"type": "message_stop"})])
            .pop()
            .unwrap()
            .unwrap()
    };
    assert_eq!(stop("end_turn"), Stop(StopReason::EndTurn));
    assert_eq!(stop("stop_sequence"), Stop(StopReason::EndTurn));
    assert_eq!(stop("max_tokens"), Stop(StopReason::MaxTokens));
    assert_eq!(
        stop("model_context_window_exceeded"),
        Stop(StopReason::MaxTokens)
    );
    assert_eq!(stop("refusal"), Stop(StopReason::Refusal));
    let kind = |name: &str, message: &str| {
        failed(&said(&[
            piece(0, json!({"type": "text_delta", "text": "x"})),
            json!({"type": "error", "error": {"type": name, "message": message}}),
        ]))
    };
    assert_eq!(
        kind("overloaded_error", "Overloaded"),
        ModelErrorKind::Unavailable
    );
    assert_eq!(kind("api_error", "boom"), ModelErrorKind::Unavailable);
    assert_eq!(
        kind("rate_limit_error", "slow"),
        ModelErrorKind::RateLimited
    );
    assert_eq!(
        kind("invalid_request_error", "prompt is too long: 9 > 8"),
        ModelErrorKind::ContextOverflow
    );
    assert_eq!(
        kind("authentication_error", "sk-secret"),
        ModelErrorKind::Rejected
    );
}

#[test]
fn garbage_is_malformed_and_what_nobody_knows_is_passed_over() {
    for garbage in ["{\"type\":\"content_", "true", "sk-secret"] {
        let events = answer(
            Provider::saying(format!("event: x\ndata: {garbage}\n\n")),
            model,
        );
        assert_eq!(failed(&events), ModelErrorKind::Malformed, "{garbage}");
        assert!(!format!("{events:?}").contains("sk-secret"));
    }
    assert_eq!(
        failed(&said(&[json!({"type": "message_stop"})])),
        ModelErrorKind::Malformed
    );
    let events = said(&[
        json!({"type": "new_kind"}),
        block(0, json!({"type": "redacted_thinking", "data": "x"})),
        end(0),
        block(1, json!({"type": "text", "text": "a"})),
        piece(1, json!({"type": "citations_delta", "citation": {}})),
        piece(1, json!({"type": "text_delta", "text": "b"})),
        stopped("end_turn"),
        json!({"type": "message_stop"}),
    ]);
    let texts: String = events
        .iter()
        .filter_map(|event| match event {
            Ok(TextDelta(text)) => Some(text.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(texts, "ab");
}

#[test]
fn the_request_says_the_conversation_by_turns_with_each_call_answered_once() {
    use futures::StreamExt as _;
    let provider = Rc::new(Provider::saying(""));
    let wire = Rc::new(Wire(provider.clone()));
    in_time(async move {
        let model = model(wire, Rc::new(TestRuntime::new())).with_max_tokens(99);
        drop(model.stream(question()).collect::<Vec<_>>().await);
    });
    let sent = provider.asked.borrow_mut().remove(0);
    assert_eq!(sent.uri(), "http://ai.test/v1/messages");
    assert_eq!(sent.headers()["x-api-key"], "sk-secret");
    assert!(sent.headers()["x-api-key"].is_sensitive());
    assert_eq!(sent.headers()["anthropic-version"], "2023-06-01");
    let cache = json!({"type": "ephemeral"});
    assert_eq!(
        serde_json::from_slice::<Value>(sent.body()).unwrap(),
        json!({
            "model": "m",
            "max_tokens": 99,
            "stream": true,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": cache}],
            "tools": [{"name": "search", "description": "Searches.", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "What is a tide?"}]},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "c1", "name": "search", "input": {"query": "tide"}},
                    {"type": "tool_use", "id": "xc-3a-2", "name": "made_up", "input": {"malformed": "{\"broken"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "{\"found\":1}", "is_error": false},
                    {"type": "tool_result", "tool_use_id": "xc-3a-2", "content": "{\"error\":\"There is no tool made.up.\",\"result\":{\"code\":\"x\"}}", "is_error": true},
                    {"type": "text", "text": "Go on.", "cache_control": cache},
                ]},
            ],
        })
    );
}

/// The body of a request of a model that thinks, about a conversation that ends in results; `kept` is
/// what was kept with the answer of their calls.
fn thinking(thinking: Thinking, kept: Option<Value>) -> Value {
    use futures::StreamExt as _;
    let mut asked = question();
    let mut messages = asked.messages.to_vec();
    messages.pop();
    if let MessageRecord::Assistant { kept: held, .. } = &mut messages[1] {
        *held = kept;
    }
    asked.messages = messages.into();
    let provider = Rc::new(Provider::saying(""));
    let wire = Rc::new(Wire(provider.clone()));
    in_time(async move {
        let model = model(wire, Rc::new(TestRuntime::new())).with_thinking(thinking);
        drop(model.stream(asked).collect::<Vec<_>>().await);
    });
    let sent = provider.asked.borrow_mut().remove(0);
    serde_json::from_slice(sent.body()).unwrap()
}

#[test]
fn thinking_before_calls_is_sent_back_unchanged_and_without_it_nothing_is_thought() {
    let blocks = json!([
        {"type": "thinking", "thinking": "Hmm 🤔", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "x"},
    ]);
    let kept = || Some(json!({ "thinking": blocks }));
    let sent = thinking(Thinking::Budget(2000), kept());
    assert_eq!(
        (&sent["thinking"], &sent["max_tokens"]),
        (
            &json!({"type": "enabled", "budget_tokens": 2000}),
            &json!(10_192)
        )
    );
    let content = &sent["messages"][1]["content"];
    assert_eq!(json!([content[0], content[1]]), blocks);
    assert_eq!(content[2]["type"], "tool_use");
    let sent = thinking(Thinking::Budget(1), kept());
    assert_eq!(sent["thinking"]["budget_tokens"], 1024);
    let sent = thinking(Thinking::Adaptive, kept());
    assert_eq!(sent["thinking"], json!({"type": "adaptive"}));
    // Calls that were made without thinking are gone on with without.
    for kept in [None, Some(json!({"reasoning_content": "Hmm."}))] {
        let sent = thinking(Thinking::Budget(2000), kept);
        assert_eq!(
            (&sent["thinking"], &sent["max_tokens"]),
            (&Value::Null, &json!(8192))
        );
        assert_eq!(sent["messages"][1]["content"][0]["type"], "tool_use");
    }

    let kept = |events: &[Value]| {
        let events = said(
            &[
                events,
                &[stopped("end_turn"), json!({"type": "message_stop"})],
            ]
            .concat(),
        );
        let kept = events.into_iter().filter_map(|event| match event {
            Ok(Kept(value)) => Some(value),
            _ => None,
        });
        kept.collect::<Vec<_>>()
    };
    let call = block(
        2,
        json!({"type": "tool_use", "id": "a", "name": "f", "input": {}}),
    );
    let redacted = block(0, json!({"type": "redacted_thinking", "data": "x"}));
    let thought = block(
        1,
        json!({"type": "thinking", "thinking": "Hm", "signature": "s"}),
    );
    assert_eq!(
        kept(&[
            redacted.clone(),
            end(0),
            thought.clone(),
            end(1),
            call.clone(),
            end(2)
        ]),
        [json!({"thinking": [
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "Hm", "signature": "s"},
        ]})]
    );
    // What was thought between words and calls stands there when it is sent back.
    let words = block(3, json!({"type": "text", "text": "First. "}));
    let more = json!({"type": "content_block_delta", "index": 3, "delta": {"type": "text_delta", "text": "Then."}});
    let events = [
        redacted.clone(),
        end(0),
        words,
        more,
        end(3),
        thought.clone(),
        end(1),
        call.clone(),
        end(2),
    ];
    let mixed = kept(&events);
    let blocks = |kept: Option<Value>| {
        let sent = messages(&[MessageRecord::Assistant {
            text: "First. Then.".into(),
            tool_calls: vec![ToolCall {
                id: "a".into(),
                name: "f".into(),
                arguments: json!({}),
            }],
            cut: false,
            kept,
        }]);
        let blocks = sent[0]["content"].as_array().unwrap().iter();
        blocks
            .map(|block| block["type"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        blocks(mixed.first().cloned()),
        ["redacted_thinking", "text", "thinking", "tool_use"]
    );
    assert_eq!(mixed[0]["thinking"][1]["text"], "First. Then.");
    assert_eq!(blocks(None), ["text", "tool_use"]);
    assert_eq!(kept(&[redacted, end(0), thought, end(1)]), [Value::Null; 0]);
    let unsigned = block(0, json!({"type": "thinking", "thinking": "Hm"}));
    assert_eq!(kept(&[unsigned, end(0), call, end(2)]), [Value::Null; 0]);
}

#[test]
fn a_declared_output_is_asked_for_in_the_provider_s_words_or_refused_before_it_is_sent() {
    use futures::StreamExt as _;
    let asked = |output: Value, hold: bool| {
        let provider = Rc::new(Provider::saying(""));
        let wire = Rc::new(Wire(provider.clone()));
        let events = in_time(async move {
            let mut model = model(wire, Rc::new(TestRuntime::new()));
            if hold {
                model = model.with_structured_output();
            }
            let mut asked = question();
            asked.output = Some(output);
            model.stream(asked).collect::<Vec<_>>().await
        });
        let sent = provider.asked.borrow_mut().pop();
        let sent = sent.map(|sent| serde_json::from_slice::<Value>(sent.body()).unwrap());
        (sent, events)
    };
    let output = json!({"type": "object", "properties": {"depth": {"type": "integer", "format": "uint32", "minimum": 0}}});
    let (sent, _) = asked(output.clone(), true);
    let sent = sent.unwrap();
    let schema = json!({"type": "object", "properties": {"depth": {"type": "integer"}}, "additionalProperties": false});
    assert_eq!(
        sent["output_config"],
        json!({"format": {"type": "json_schema", "schema": schema}})
    );
    assert_eq!(sent["tools"][0]["name"], "search");
    let (sent, _) = asked(output, false);
    assert!(sent.unwrap()["output_config"].is_null());

    let map = json!({"type": "object", "additionalProperties": {"type": "integer"}});
    let (sent, events) = asked(map, true);
    assert_eq!(sent, None);
    let [Err(error)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(error.kind, ModelErrorKind::Rejected);
    assert!(error.message.contains("Anthropic") && error.message.contains("a map"));
    assert!(error.message.contains("turn structured output off"));
}

#[test]
fn no_block_is_empty_and_the_last_turn_is_the_user_s() {
    let user = |text: &str| MessageRecord::User { text: text.into() };
    let said = |text: &str| MessageRecord::Assistant {
        text: text.into(),
        tool_calls: Vec::new(),
        cut: true,
        kept: None,
    };
    let texts = |records: &[MessageRecord]| -> Vec<(String, Vec<String>)> {
        let turns = messages(records);
        let turns = turns.as_array().unwrap().iter();
        turns
            .map(|turn| {
                let blocks = turn["content"].as_array().unwrap().iter();
                (
                    turn["role"].as_str().unwrap().into(),
                    blocks
                        .map(|block| block["text"].as_str().unwrap().into())
                        .collect(),
                )
            })
            .collect()
    };
    let turn = |role: &str, blocks: &[&str]| {
        (
            role.to_owned(),
            blocks
                .iter()
                .map(|text| (*text).to_owned())
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(texts(&[user(" ")]), [turn("user", &["(no text)"])]);
    assert_eq!(
        texts(&[user("a"), said(" "), user("b")]),
        [turn("user", &["a", "b"])]
    );
    assert_eq!(
        texts(&[user("a"), said("half \n")]),
        [
            turn("user", &["a"]),
            turn("assistant", &["half"]),
            turn("user", &["Go on."])
        ]
    );
}
