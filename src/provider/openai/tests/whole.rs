//! An answer that is held to a declared output and comes whole, as that of Workers AI.

use std::rc::Rc;
use std::time::Duration;

use serde_json::json;

use super::{asked_for, body, failed, model};
use crate::agent::model::ModelEvent::{Stop, TextDelta, Usage};
use crate::agent::model::{
    LanguageModel as _, ModelError, ModelErrorKind, ModelEvent, ModelRequest, StopReason,
};
use crate::protocol::usage::Tokens;
use crate::provider::openai::{ChatDialect, OpenAiModel};
use crate::provider::testing::{Piece, Provider, Wire, in_time, question};
use crate::transport::testing::TestRuntime;

/// A question to an agent that has no tool but the one that hands its output in.
fn handing_in() -> ModelRequest {
    let mut asked = question();
    let mut tool = asked.tools[0].clone();
    tool.name = "finish".into();
    asked.tools = [tool].into();
    asked
}

fn workers_ai(model: OpenAiModel) -> OpenAiModel {
    model
        .with_dialect(ChatDialect::WorkersAi)
        .with_structured_output()
}

#[test]
fn workers_ai_is_held_to_an_output_whole_and_where_there_are_tools_by_them() {
    let (_, sent) = asked_for(handing_in(), workers_ai);
    assert_eq!(
        sent["response_format"],
        json!({"type": "json_schema", "json_schema": {"type": "object", "title": "Report"}})
    );
    for field in ["stream", "stream_options", "tools", "tool_choice"] {
        assert!(sent[field].is_null(), "{field}");
    }
    let (_, sent) = asked_for(question(), workers_ai);
    assert_eq!(
        (&sent["tool_choice"], &sent["stream"]),
        (&json!("required"), &json!(true))
    );
    assert!(sent["response_format"].is_null() && sent["tools"].is_array());
    // Without a declared output there is nothing to hold to.
    let mut free = handing_in();
    free.output = None;
    let (_, sent) = asked_for(free, workers_ai);
    assert!(sent["response_format"].is_null() && sent["tool_choice"].is_null());
    assert_eq!(sent["stream"], true);
}

/// What is said by the answer to a question that asks for it whole.
fn whole_answer(pieces: Vec<Piece>, kind: &'static str) -> Vec<Result<ModelEvent, ModelError>> {
    let mut provider = Provider::saying("");
    provider.headers = vec![("content-type", kind)];
    provider.pieces = pieces;
    whole_of(provider)
}

fn whole_of(provider: Provider) -> Vec<Result<ModelEvent, ModelError>> {
    use futures::StreamExt as _;
    let wire = Rc::new(Wire(Rc::new(provider)));
    in_time(async move {
        let model = workers_ai(model(wire, Rc::new(TestRuntime::new())));
        model.stream(handing_in()).collect().await
    })
}

#[test]
fn an_answer_that_comes_whole_is_read_as_its_service_spells_it() {
    let json = "application/json; charset=utf-8";
    let read = |document: &str| whole_answer(vec![Piece::Bytes(document.to_owned().into())], json);
    let said = || Ok(TextDelta("{\"depth\":3}".into()));
    let end = |reason| Ok(Stop(reason));
    assert_eq!(
        read(
            r#"{"response": {"depth": 3}, "usage": {"prompt_tokens": 4, "completion_tokens": 2}}"#
        ),
        [
            said(),
            Ok(Usage(Tokens {
                prompt: 4,
                completion: 2,
                total: 6,
                ..Tokens::default()
            })),
            end(StopReason::EndTurn)
        ]
    );
    for document in [
        r#"{"response":"{\"depth\":3}","tool_calls":[]}"#,
        r#"{"choices":[{"message":{"role":"assistant","content":"{\"depth\":3}"},"finish_reason":"stop"}]}"#,
    ] {
        assert_eq!(read(document), [said(), end(StopReason::EndTurn)]);
    }
    let cut = r#"{"choices":[{"message":{"content":"{"},"finish_reason":"length"}]}"#;
    assert_eq!(read(cut).pop(), Some(end(StopReason::MaxTokens)));
    for (document, kind) in [
        ("{}", ModelErrorKind::Malformed),
        ("{\"response\":", ModelErrorKind::Malformed),
        ("[]", ModelErrorKind::Malformed),
        (
            r#"{"error":{"message":"sk-secret"}}"#,
            ModelErrorKind::Unavailable,
        ),
    ] {
        let events = read(document);
        assert_eq!((events.len(), failed(&events)), (1, kind), "{document}");
        assert!(!format!("{events:?}").contains("sk-secret"));
    }
    let half = || Piece::Bytes("{\"response\": {\"depth\": 3}".into());
    for end in [Piece::Break, Piece::Wait(Duration::from_secs(3600))] {
        let events = whole_answer(vec![half(), end], json);
        assert_eq!(failed(&events), ModelErrorKind::Unavailable);
    }
    // A service that streams all the same is read as one that does.
    let streamed = [
        r#"{"choices":[{"delta":{"content":""}}]}"#,
        r#"{"choices":[{"delta":{"content":"{\"depth\":3}"},"finish_reason":"stop"}]}"#,
        "[DONE]",
    ];
    let streamed = vec![Piece::Bytes(body(&streamed).into())];
    assert_eq!(
        whole_answer(streamed, "text/event-stream"),
        [said(), end(StopReason::EndTurn)]
    );
}

#[test]
fn an_answer_that_comes_whole_may_begin_as_late_as_a_silence_ends() {
    for (seconds, is_heard) in [(119, true), (121, false)] {
        let mut provider = Provider::saying(r#"{"response": 3}"#);
        provider.headers = vec![("content-type", "application/json")];
        provider.before = Duration::from_secs(seconds);
        let events = whole_of(provider);
        assert_eq!(events[0].is_ok(), is_heard, "{events:?}");
    }
}
