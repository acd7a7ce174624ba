#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]

mod whole;

use std::rc::Rc;

use serde_json::{Value, json};

use super::{ChatDialect, OpenAiModel};
use crate::agent::model::ModelEvent::{
    Kept, Reasoning, Stop, TextDelta, ToolCallDelta, ToolCallEnd, ToolCallStart, Usage,
};
use crate::agent::model::{
    LanguageModel as _, ModelError, ModelErrorKind, ModelEvent, ModelRequest, StopReason,
};
use crate::protocol::usage::Tokens;
use crate::provider::testing::{
    self, Piece, Provider, Wire, answer, cuts, in_time, question, whole,
};
use crate::store::MessageRecord;
use crate::transport::testing::TestRuntime;

fn model(fetch: Rc<dyn crate::transport::Fetch>, runtime: Rc<TestRuntime>) -> OpenAiModel {
    OpenAiModel::new(fetch, runtime, "http://ai.test/v1/", Some("sk-secret"), "m").unwrap()
}

/// The events that a body of these frames is, each of which is one event's data.
fn body(frames: &[&str]) -> String {
    frames
        .iter()
        .map(|data| format!("data: {data}\n\n"))
        .collect()
}

fn said(frames: &[&str]) -> Vec<Result<ModelEvent, ModelError>> {
    answer(Provider::saying(body(frames)), model)
}

fn good(frames: &[&str]) -> Vec<ModelEvent> {
    said(frames).into_iter().map(Result::unwrap).collect()
}

fn failed(events: &[Result<ModelEvent, ModelError>]) -> ModelErrorKind {
    events.last().unwrap().as_ref().unwrap_err().kind
}

fn start(index: usize, id: &str, name: &str) -> ModelEvent {
    ToolCallStart {
        index,
        id: id.into(),
        name: name.into(),
    }
}

fn delta(index: usize, delta: &str) -> ModelEvent {
    ToolCallDelta {
        index,
        delta: delta.into(),
    }
}

fn thought(content: &str, is_complete: bool) -> ModelEvent {
    Reasoning {
        content: content.into(),
        is_complete,
    }
}

const ANSWER: &str = concat!(
    ": keep-alive\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"Hmm 🤔\"}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Größe 日本\"}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"id\":\"a\",\"type\":\"function\",\"function\":{\"name\":\"search\",\"arguments\":\"\"}}]}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{\\\"q\\\":\"}}]}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"b\",\"function\":{\"name\":\"look\",\"arguments\":\"{}\"}}]}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"\\\"ü\\\"}\"}}]}}]}\r\n\r\n",
    "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\r\n\r\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":11,\"completion_tokens\":7,\"total_tokens\":18,\"prompt_tokens_details\":{\"cached_tokens\":5},\"completion_tokens_details\":{\"reasoning_tokens\":3}}}\r\n\r\n",
    "data: [DONE]\r\n\r\n",
);

#[test]
fn an_answer_is_the_same_wherever_its_bytes_are_cut_and_however_its_lines_end() {
    let expected = vec![
        thought("Hmm 🤔", false),
        thought("", true),
        TextDelta("Größe 日本".into()),
        start(0, "a", "search"),
        delta(0, "{\"q\":"),
        start(1, "b", "look"),
        delta(1, "{}"),
        delta(0, "\"ü\"}"),
        Usage(Tokens {
            prompt: 11,
            completion: 7,
            reasoning: 3,
            cached: 5,
            total: 18,
        }),
        ToolCallEnd { index: 0 },
        ToolCallEnd { index: 1 },
        Kept(json!({"reasoning_content": "Hmm 🤔"})),
        Stop(StopReason::ToolUse),
    ];
    let lines = [
        (ANSWER.to_owned(), 1),
        (ANSWER.replace("\r\n", "\n"), 5),
        (ANSWER.replace("\r\n", "\r"), 5),
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
    let reason = ANSWER.find("\"finish_reason\"").unwrap();
    let after = reason + ANSWER[reason..].find("\r\n\r\n").unwrap() + 3;
    for at in 0..ANSWER.len() {
        for end in [None, Some(Piece::Break)] {
            let mut provider = Provider::saying(ANSWER.as_bytes()[..at].to_vec());
            provider.pieces.extend(end);
            let events = answer(provider, model);
            match events.last() {
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
fn reasons_usage_and_refusals_are_read_as_each_service_spells_them() {
    let stop = |finish: &str| {
        let frame = format!(
            "{{\"choices\":[{{\"delta\":{{\"content\":\"x\"}},\"finish_reason\":\"{finish}\"}}]}}"
        );
        good(&[&frame, "[DONE]"]).pop()
    };
    assert_eq!(stop("stop"), Some(Stop(StopReason::EndTurn)));
    assert_eq!(stop("length"), Some(Stop(StopReason::MaxTokens)));
    assert_eq!(stop("content_filter"), Some(Stop(StopReason::Refusal)));
    assert_eq!(stop("something_new"), Some(Stop(StopReason::EndTurn)));
    let given_up =
        said(&[r#"{"choices":[{"delta":{},"finish_reason":"insufficient_system_resource"}]}"#]);
    assert_eq!(failed(&given_up), ModelErrorKind::Unavailable);
    let refused = good(&[
        r#"{"choices":[{"delta":{"refusal":"No."}}]}"#,
        r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
        "[DONE]",
    ]);
    assert_eq!(refused, [Stop(StopReason::Refusal)]);
    let deepseek = good(&[
        r#"{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":4,"completion_tokens":2,"prompt_cache_hit_tokens":3}}"#,
    ]);
    assert_eq!(
        deepseek[1],
        Usage(Tokens {
            prompt: 4,
            completion: 2,
            reasoning: 0,
            cached: 3,
            total: 6
        })
    );
    // Without the closing frame, as of servers that have none.
    assert_eq!(deepseek[2], Stop(StopReason::EndTurn));
}

#[test]
fn contents_in_parts_and_whole_messages_are_read_and_no_reason_is_none() {
    let parts = good(&[
        r#"{"choices":[{"delta":{"content":[{"type":"thinking","thinking":[{"type":"text","text":"Hm"}]}]},"finish_reason":"null"}]}"#,
        r#"{"choices":[{"delta":{"content":[{"type":"thinking","thinking":"..."},{"type":"text","text":"Y"},{"type":"image"}]},"finish_reason":null}]}"#,
        r#"{"choices":[{"delta":{"content":"es."},"finish_reason":"stop"}]}"#,
        "[DONE]",
    ]);
    assert_eq!(
        parts,
        [
            thought("Hm", false),
            thought("...", false),
            thought("", true),
            TextDelta("Y".into()),
            TextDelta("es.".into()),
            Stop(StopReason::EndTurn)
        ]
    );
    let message = r#"{"choices":[{"message":{"content":"Yes."},"finish_reason":"stop"}]}"#;
    let whole = vec![TextDelta("Yes.".into()), Stop(StopReason::EndTurn)];
    assert_eq!(good(&[message, "[DONE]"]), whole);
    // Behind the pieces it says the same once more.
    let piece = r#"{"choices":[{"delta":{"content":"Yes."},"finish_reason":"null"}]}"#;
    assert_eq!(good(&[piece, message, "[DONE]"]), whole);
    // Text that ends with "null" for a reason has ended for none.
    let unfinished = said(&[piece]);
    assert_eq!(failed(&unfinished), ModelErrorKind::Unavailable);
}

#[test]
fn calls_are_told_apart_whatever_a_server_leaves_out() {
    // Every call numbered 0, each whole, "stop" as the reason.
    let zeros = good(&[
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{}"}}]}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"b","function":{"name":"f","arguments":{"n":1}}}]},"finish_reason":"stop"}]}"#,
    ]);
    let two = vec![
        start(0, "a", "f"),
        delta(0, "{}"),
        start(1, "b", "f"),
        delta(1, "{\"n\":1}"),
        ToolCallEnd { index: 0 },
        ToolCallEnd { index: 1 },
        Stop(StopReason::ToolUse),
    ];
    assert_eq!(zeros, two);
    // No numbers at all.
    let bare = good(&[
        r#"{"choices":[{"delta":{"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{"}}]}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"function":{"arguments":"}"}}]}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"id":"b","function":{"name":"f","arguments":"{\"n\":1}"}}]},"finish_reason":"tool_calls"}]}"#,
    ]);
    assert_eq!(
        bare,
        [
            start(0, "a", "f"),
            delta(0, "{"),
            delta(0, "}"),
            start(1, "b", "f"),
            delta(1, "{\"n\":1}"),
            ToolCallEnd { index: 0 },
            ToolCallEnd { index: 1 },
            Stop(StopReason::ToolUse)
        ]
    );
    // The id in each piece, the name behind the first arguments.
    let late = good(&[
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"arguments":"{"}}]}}]}"#,
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"}"}}]},"finish_reason":"tool_calls"}]}"#,
    ]);
    assert_eq!(
        late,
        [
            start(0, "a", "f"),
            delta(0, "{"),
            delta(0, "}"),
            ToolCallEnd { index: 0 },
            Stop(StopReason::ToolUse)
        ]
    );
    // Never a name.
    let nameless = good(&[
        r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]},"finish_reason":"tool_calls"}]}"#,
    ]);
    assert_eq!(
        nameless,
        [
            start(0, "", ""),
            delta(0, "{}"),
            ToolCallEnd { index: 0 },
            Stop(StopReason::ToolUse)
        ]
    );
}

#[test]
fn the_older_models_of_workers_ai_are_read_as_well() {
    let spoken = good(&[
        r#"{"response":"It ","p":"abc"}"#,
        r#"{"response":4}"#,
        r#"{"response":"","usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}"#,
        "[DONE]",
    ]);
    let usage = Usage(Tokens {
        prompt: 3,
        completion: 2,
        total: 5,
        ..Tokens::default()
    });
    assert_eq!(
        spoken,
        [
            TextDelta("It ".into()),
            TextDelta("4".into()),
            usage,
            Stop(StopReason::EndTurn)
        ]
    );
    let called = good(&[
        r#"{"response":null,"tool_calls":[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":{}}]}"#,
        "[DONE]",
    ]);
    assert_eq!(
        called,
        [
            start(0, "", "f"),
            delta(0, "{\"a\":1}"),
            start(1, "", "g"),
            delta(1, "{}"),
            ToolCallEnd { index: 0 },
            ToolCallEnd { index: 1 },
            Stop(StopReason::ToolUse)
        ]
    );
}

#[test]
fn garbage_is_malformed_and_what_had_been_said_before_it_is_told_first() {
    let first = r#"{"choices":[{"delta":{"content":"kept"}}]}"#;
    for garbage in [
        "{\"choices\":[{\"del",
        "true",
        "[1]",
        "<html>sk-secret</html>",
    ] {
        let events = said(&[first, garbage, "[DONE]"]);
        assert_eq!(events[0], Ok(TextDelta("kept".into())), "{garbage}");
        assert_eq!(failed(&events), ModelErrorKind::Malformed, "{garbage}");
        assert!(!format!("{events:?}").contains("sk-secret"));
        assert_eq!(events.len(), 2);
    }
    assert_eq!(failed(&said(&["[DONE]"])), ModelErrorKind::Malformed);
    let mut bytes = Provider::saying(b"data: \xff\xfe\n\n".to_vec());
    assert_eq!(failed(&answer(bytes, model)), ModelErrorKind::Malformed);
    bytes = Provider::saying("{\"error\": \"no stream\"}");
    bytes.headers = vec![("content-type", "application/json")];
    assert_eq!(failed(&answer(bytes, model)), ModelErrorKind::Malformed);
    // What nobody knows is passed over.
    let unknown = format!(
        "event: new\ndata: {{\"object\":\"new\"}}\n\ngarbage line\n\n{}",
        body(&[
            first,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            "[DONE]"
        ])
    );
    let events = whole(answer(Provider::saying(unknown), model));
    assert_eq!(
        events,
        [Ok(TextDelta("kept".into())), Ok(Stop(StopReason::EndTurn))]
    );
}

#[test]
fn an_error_in_the_middle_of_a_stream_is_judged_like_a_refusal() {
    let kind = |frame: &str| {
        failed(&said(&[
            r#"{"choices":[{"delta":{"content":"x"}}]}"#,
            frame,
        ]))
    };
    assert_eq!(
        kind(r#"{"error":{"message":"sk-secret","code":"rate_limit_exceeded"}}"#),
        ModelErrorKind::RateLimited
    );
    assert_eq!(
        kind(r#"{"error":{"message":"boom","type":"server_error"}}"#),
        ModelErrorKind::Unavailable
    );
    assert_eq!(
        kind(r#"{"error":{"code":"context_length_exceeded"}}"#),
        ModelErrorKind::ContextOverflow
    );
    let named = Provider::saying("event: error\ndata: {\"message\":\"boom\"}\n\n");
    assert_eq!(failed(&answer(named, model)), ModelErrorKind::Unavailable);
}

#[test]
fn the_request_says_the_conversation_with_each_call_answered_once() {
    let (head, sent) = asked(|model| model.with_max_tokens(99));
    assert_eq!(head.uri(), "http://ai.test/v1/chat/completions");
    assert_eq!(head.headers()["authorization"], "Bearer sk-secret");
    assert!(head.headers()["authorization"].is_sensitive());
    assert_eq!(
        sent,
        json!({
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is a tide?"},
                {"role": "assistant", "content": null, "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{\"query\":\"tide\"}"}},
                    {"id": "c:2", "type": "function", "function": {"name": "made_up", "arguments": "{\"malformed\":\"{\\\"broken\"}"}},
                ]},
                {"role": "tool", "tool_call_id": "c1", "content": "{\"found\":1}"},
                {"role": "tool", "tool_call_id": "c:2", "content": "{\"error\":\"There is no tool made.up.\",\"result\":{\"code\":\"x\"}}"},
                {"role": "user", "content": "Go on."},
            ],
            "stream": true,
            "stream_options": {"include_usage": true},
            "tools": [{"type": "function", "function": {"name": "search", "description": "Searches.", "parameters": {"type": "object"}}}],
            "max_tokens": 99,
        })
    );
    let (_, sent) = asked(|model| model.with_dialect(ChatDialect::OpenAi).with_max_tokens(99));
    assert_eq!(
        (&sent["max_completion_tokens"], &sent["max_tokens"]),
        (&json!(99), &Value::Null)
    );
    let (_, sent) = asked(|model| model.with_dialect(ChatDialect::WorkersAi));
    assert_eq!(sent["messages"][2]["content"], "");
    let (_, sent) = asked(OpenAiModel::with_structured_output);
    assert_eq!(
        sent["response_format"]["json_schema"]["schema"]["title"],
        "Report"
    );
}

/// What is sent of answers with calls that had this kept.
fn sent_back(kept: [Option<Value>; 2]) -> Vec<Value> {
    let mut asked = question();
    let [first, second] = kept;
    let MessageRecord::Assistant { kept, .. } = &mut Rc::get_mut(&mut asked.messages).unwrap()[1]
    else {
        panic!("the answer stands second")
    };
    *kept = first;
    let mut messages = asked.messages.to_vec();
    let mut later = messages.clone();
    if let MessageRecord::Assistant { kept, .. } = &mut later[1] {
        *kept = second;
    }
    messages.extend(later);
    asked.messages = messages.into();
    let (_, sent) = asked_for(asked, |model| model);
    let sent = sent["messages"].as_array().unwrap().iter();
    let calls = sent.filter(|message| !message["tool_calls"].is_null());
    calls
        .map(|message| message["reasoning_content"].clone())
        .collect()
}

#[test]
fn reasoning_before_calls_is_sent_back_to_services_that_say_it_so() {
    let kept = || Some(json!({"reasoning_content": "Hmm."}));
    assert_eq!(sent_back([kept(), kept()]), ["Hmm.", "Hmm."]);
    // A service that has said it once asks for it in each answer with calls.
    assert_eq!(sent_back([kept(), None]), ["Hmm.", ""]);
    // What another service wants back is not for this one.
    let other = Some(json!({"thinking": []}));
    assert_eq!(sent_back([None, other]), [Value::Null, Value::Null]);

    let finish = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
    let call = r#"{"choices":[{"delta":{"tool_calls":[{"id":"a","function":{"name":"f"}}]}}]}"#;
    let kept = |reasoning: &str, rest: &[&str]| {
        let events = good(&[&[reasoning], rest, &[finish, "[DONE]"]].concat());
        let kept = events.into_iter().filter_map(|event| match event {
            Kept(value) => Some(value),
            _ => None,
        });
        kept.collect::<Vec<_>>()
    };
    let cut = r#"{"choices":[{"delta":{"reasoning_content":"Hm \ud83e"}}]}"#;
    let half = r#"{"choices":[{"delta":{"reasoning_content":"\udd14"}}]}"#;
    assert_eq!(
        kept(cut, &[half, call]),
        [json!({"reasoning_content": "Hm 🤔"})]
    );
    // Without calls nobody needs it, and others have it under another name.
    assert_eq!(kept(cut, &[half]), [Value::Null; 0]);
    let elsewhere = r#"{"choices":[{"delta":{"reasoning":"Hm"}}]}"#;
    assert_eq!(kept(elsewhere, &[call]), [Value::Null; 0]);
}

#[test]
fn an_answer_that_is_last_is_gone_on_with_by_the_user() {
    let mut asked = question();
    let cut = MessageRecord::Assistant {
        text: "Half of".into(),
        tool_calls: Vec::new(),
        cut: true,
        kept: None,
    };
    asked.messages = vec![MessageRecord::User { text: "Go.".into() }, cut].into();
    let (_, sent) = asked_for(asked, |model| model);
    let last = |back: usize| {
        let sent = sent["messages"].as_array().unwrap();
        sent[sent.len() - back].clone()
    };
    assert_eq!(last(2), json!({"role": "assistant", "content": "Half of"}));
    assert_eq!(last(1), json!({"role": "user", "content": "Go on."}));
}

#[test]
fn pieces_find_their_call_whatever_ids_and_numbers_a_server_gives() {
    let finish = r#"{"choices":[{"delta":{},"finish_reason":"tool_calls"}]}"#;
    let calls = |pieces: &[Value]| {
        let frames = pieces
            .iter()
            .map(|piece| json!({"choices": [{"delta": {"tool_calls": [piece]}}]}).to_string());
        let frames: Vec<String> = frames.chain([finish.into(), "[DONE]".into()]).collect();
        let frames: Vec<&str> = frames.iter().map(String::as_str).collect();
        let mut told: Vec<(String, String)> = Vec::new();
        for event in good(&frames) {
            match event {
                ToolCallStart { name, .. } => told.push((name, String::new())),
                ToolCallDelta { index, delta } => told[index].1.push_str(&delta),
                _ => {}
            }
        }
        told
    };
    let piece = |id: &str, name: &str, arguments: &str| json!({"index": 0, "id": id, "function": {"name": name, "arguments": arguments}});
    let call = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned());
    // Another id for each piece.
    assert_eq!(
        calls(&[
            piece("a", "f", ""),
            piece("b", "", "{\"n\":"),
            piece("c", "", "1}")
        ]),
        [call("f", "{\"n\":1}")]
    );
    // Every call is number 0, with ids and without.
    for ids in [["a", "b"], ["", ""]] {
        assert_eq!(
            calls(&[piece(ids[0], "f", "{\"n\":1}"), piece(ids[1], "g", "{}")]),
            [call("f", "{\"n\":1}"), call("g", "{}")],
            "{ids:?}"
        );
    }
    // The name again and again.
    assert_eq!(
        calls(&[
            piece("a", "f", "{\"n\":"),
            piece("", "f", "1"),
            piece("a", "f", "}"),
            piece("", "f", "")
        ]),
        [call("f", "{\"n\":1}")]
    );
    // The arguments before the name.
    assert_eq!(
        calls(&[piece("a", "", "{"), piece("", "f", "}")]),
        [call("f", "{}")]
    );
}

#[test]
fn what_stands_behind_the_reason_of_an_answer_takes_nothing_back() {
    let text = r#"{"choices":[{"delta":{"content":"Yes."},"finish_reason":"stop"}]}"#;
    for behind in [r#"{"error":{"code":503,"message":"x"}}"#, "garbage"] {
        let told = good(&[text, behind]);
        assert_eq!(told, [TextDelta("Yes.".into()), Stop(StopReason::EndTurn)]);
        let before = said(&[behind, text]);
        assert!(before.last().unwrap().is_err(), "{behind}");
    }
}

fn asked(with: impl FnOnce(OpenAiModel) -> OpenAiModel) -> (http::Request<()>, Value) {
    asked_for(question(), with)
}

fn asked_for(
    question: ModelRequest,
    with: impl FnOnce(OpenAiModel) -> OpenAiModel,
) -> (http::Request<()>, Value) {
    use futures::StreamExt as _;
    let provider = Rc::new(Provider::saying(""));
    let wire = Rc::new(Wire(provider.clone()));
    in_time(async move {
        let model = with(model(wire, Rc::new(TestRuntime::new())));
        drop(model.stream(question).collect::<Vec<_>>().await);
    });
    let (head, body) = provider.asked.borrow_mut().remove(0).into_parts();
    (
        http::Request::from_parts(head, ()),
        serde_json::from_slice(&body).unwrap(),
    )
}
