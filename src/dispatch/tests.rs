#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use serde_json::{Value, json};

use super::fold::{bounded_state, checked_output};
use super::*;
use crate::agent::Shape;
use crate::error::Code;
use crate::protocol::chunk::RawChunk;
use crate::protocol::ids::{SessionId, StreamId};
use crate::session::CallFailure;
use crate::store::SubLocation::{self, Local, Remote};
use crate::transport::TransportError;

fn session(id: &str) -> SessionId {
    SessionId::parse(id).unwrap()
}

fn stream(id: &str) -> StreamId {
    StreamId::parse(id).unwrap()
}

fn id_of(parent: &str, life: &str, call: &str, location: SubLocation) -> String {
    child_id(&session(parent), &stream(life), call, location)
        .unwrap()
        .to_string()
}

/// The expected values come from another implementation (Python's `hashlib` and `base64`).
#[test]
fn child_ids_are_derived() {
    let life = "st_00112233445566778899aabbccddeeff";
    assert_eq!(
        id_of("writer-1", life, "call_1", Remote),
        "writer-1-remote-call_1-gr2i36qpchp6h3pe"
    );
    assert_eq!(
        id_of("writer-1", life, "call_1", Local),
        "writer-1-sub-call_1-gr2i36qpchp6h3pe"
    );
}

#[test]
fn odd_and_long_child_ids_become_a_digest_behind_the_root() {
    let life = "st_00112233445566778899aabbccddeeff";
    assert_eq!(
        id_of("writer-1", life, "call 1/ä", Remote),
        "writer-1-remote-bg24sqysefn7nie3557b23kbsnvw6swyxypuxyu4mizastralj3q"
    );
    // 244 characters, two levels deep: the root's id stays, the parent's does not.
    let parent = id_of("writer-1", life, "call_1", Remote);
    assert_eq!(
        id_of(&parent, "st_x", &"c".repeat(180), Remote),
        "writer-1-remote-gldr6aq2i4zi57h5ajcksqktzzxgzv33udsbhgibvli65d5xp5la"
    );
    let long = id_of(&"r".repeat(130), "st_x", &"c".repeat(60), Remote);
    assert_eq!(
        long,
        format!(
            "{}-remote-5jhydejqvwq6pwa6we45y46qoon4u2tgv3zo5rpxelnfrgimhlra",
            "r".repeat(120)
        )
    );
    assert_eq!(long.len(), 180);
    // 200 characters are still readable.
    assert!(id_of(&"r".repeat(100), "st_x", &"c".repeat(75), Remote).contains("-remote-ccc"));
    assert!(!id_of(&"r".repeat(100), "st_x", &"c".repeat(76), Remote).contains("-remote-ccc"));
    // A root whose own id looks a little like a child's is not cut.
    assert_eq!(
        id_of("my-remote-job", "st_x", "a b", Local),
        "my-remote-job-remote-vgontshyuj37dytbbrtidae7he3wxnkrf3abq7q2cyxt2ati22tq"
    );
}

#[test]
fn a_child_id_is_bound_to_one_call_of_one_life() {
    let base = id_of("p", "st_1", "c", Remote);
    assert_eq!(base, id_of("p", "st_1", "c", Remote));
    assert_ne!(base, id_of("p", "st_2", "c", Remote));
    assert_ne!(base, id_of("p", "st_1", "d", Remote));
    assert_ne!(base, id_of("q", "st_1", "c", Remote));
    // The separator keeps apart what would be the same text when joined.
    let tag = |life: &str, call: &str| {
        id_of("p", life, call, Remote)
            .rsplit_once('-')
            .unwrap()
            .1
            .to_owned()
    };
    assert_ne!(tag("st_1", "2c"), tag("st_12", "c"));
}

#[test]
fn keys_fit_the_contract_for_every_child() {
    assert_eq!(
        call_key("start", &session("p-remote-c"), None),
        "start:p-remote-c"
    );
    assert_eq!(
        call_key("resume", &session("p-remote-c"), Some(1)),
        "resume:p-remote-c:1"
    );
    let deep = session(&"c".repeat(125));
    assert_eq!(
        call_key("start", &deep, None),
        "start:5dlkvqyogee564m5sr3wgzjwg23jryz2ltpuvaohyxrie5myaskq"
    );
    assert_eq!(
        call_key("resume", &session(&"c".repeat(256)), Some(u32::MAX)).len(),
        7 + 52 + 11
    );
}

#[test]
fn the_message_is_the_only_text_field_or_the_whole_input() {
    let of = |input: Value| message_for(&input);
    assert_eq!(of(json!({"message": "do it"})), "do it");
    assert_eq!(
        of(json!({"message": "do it", "topic": "x"})),
        r#"{"message":"do it","topic":"x"}"#
    );
    assert_eq!(of(json!({"message": 3})), r#"{"message":3}"#);
    assert_eq!(of(json!({"topic": "x"})), r#"{"topic":"x"}"#);
    assert_eq!(of(json!({})), "{}");
    assert_eq!(of(json!("text")), "\"text\"");
}

fn raw(value: Value) -> RawChunk {
    serde_json::from_value(value).unwrap()
}

/// Stamps one chunk that stands at 9 of the child's stream, with no earlier announcements.
fn stamped(forwarder: &mut Forwarder, chunk: Value) -> (Value, Option<String>) {
    let forwarded = forwarder
        .stamp(&stream("st_c"), 9, raw(chunk), &|_| Ok(false))
        .unwrap();
    (
        serde_json::from_str(&forwarded.json).unwrap(),
        forwarded.removed_origin,
    )
}

fn source() -> Value {
    json!({"childSessionId": "c", "childSequence": 9, "streamId": "st_c"})
}

#[test]
fn the_first_hop_adds_both_stamps_and_loses_nothing() {
    let mut forwarder = Forwarder::new(session("c"));
    let chunk = json!({"type": "from_the_future", "agentId": "c", "agentType": "t", "timestamp": 1, "step": 2,
        "unknown": {"deep": [1, null, 1.5, 12345678901234567890_u64]}});
    let (out, removed) = stamped(&mut forwarder, chunk.clone());
    let mut expected = chunk;
    expected["origin"] = json!({"sessionId": "c", "streamId": "st_c", "sequence": 9});
    expected["remoteSource"] = source();
    assert_eq!((out, removed), (expected, None));
}

#[test]
fn a_later_hop_restamps_the_source_and_keeps_origin_and_agent() {
    let mut forwarder = Forwarder::new(session("c"));
    stamped(
        &mut forwarder,
        json!({"type": "subagent_start", "agentId": "c", "subSessionId": "g"}),
    );
    let origin = json!({"sessionId": "g", "streamId": "st_g", "sequence": 4});
    let (out, removed) = stamped(
        &mut forwarder,
        json!({
            "type": "text_delta", "agentId": "g", "origin": origin,
            "remoteSource": {"childSessionId": "g", "childSequence": 4, "streamId": "st_g"},
        }),
    );
    assert_eq!(removed, None);
    assert_eq!(
        out,
        json!({"type": "text_delta", "agentId": "g", "origin": origin, "remoteSource": source()})
    );
}

#[test]
fn a_child_s_step_loses_what_only_a_mount_tells() {
    let step = json!({"type": "step_committed", "agentId": "c", "stepCount": 1, "novel": 1});
    let mut forged = step.clone();
    forged["patches"] = json!([{"op": "remove", "path": "/a"}]);
    forged["projection"] = json!("count@1");
    forged["resync"] = json!(true);
    let mut forwarder = Forwarder::new(session("c"));
    let (plain, _) = stamped(&mut forwarder, step);
    assert_eq!(stamped(&mut forwarder, forged).0, plain);
    assert_eq!(plain["novel"], 1);
    let (patch, _) = stamped(
        &mut forwarder,
        json!({"type": "state_patch", "patches": []}),
    );
    assert_eq!(patch["patches"], json!([]));
}

#[test]
fn an_old_forwarder_s_chunk_gets_no_origin() {
    let mut forwarder = Forwarder::new(session("c"));
    let (out, removed) = stamped(
        &mut forwarder,
        json!({
            "type": "text_delta", "agentId": "g",
            "remoteSource": {"childSessionId": "g", "childSequence": 4, "streamId": "st_g"},
        }),
    );
    assert_eq!(
        (out.get("origin"), out["remoteSource"].clone(), removed),
        (None, source(), None)
    );
}

#[test]
fn a_foreign_origin_is_removed_and_reported() {
    let mut forwarder = Forwarder::new(session("c"));
    for (origin, named) in [
        (
            json!({"sessionId": "victim", "streamId": "st_v", "sequence": 4}),
            "victim",
        ),
        (json!({"sessionId": "victim"}), "(malformed)"),
        (json!("victim"), "(malformed)"),
        (Value::Null, "(malformed)"),
    ] {
        let (out, removed) = stamped(
            &mut forwarder,
            json!({"type": "state_patch", "agentId": "victim", "origin": origin}),
        );
        assert_eq!((out.get("origin"), removed.as_deref()), (None, Some(named)));
        assert_eq!(
            (&out["agentId"], &out["remoteSource"]),
            (&json!("victim"), &source())
        );
    }
    // The child may name itself, and a descendant that was announced in an earlier life is looked up.
    let own = json!({"sessionId": "c", "streamId": "st_c", "sequence": 9});
    assert_eq!(
        stamped(&mut forwarder, json!({"agentId": "c", "origin": own})).1,
        None
    );
    let chunk = raw(
        json!({"agentId": "g", "origin": {"sessionId": "g", "streamId": "st_g", "sequence": 1}}),
    );
    let forwarded = forwarder
        .stamp(&stream("st_c"), 9, chunk, &|id| Ok(id == "g"))
        .unwrap();
    assert_eq!(forwarded.removed_origin, None);
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Report {
    #[allow(dead_code)]
    text: String,
}

#[test]
fn outputs_are_held_to_their_shape() {
    let shape = Shape::of::<Report>();
    assert_eq!(
        checked_output(Some(json!({"text": "x"})), Some(&shape)),
        Ok(json!({"text": "x"}))
    );
    assert_eq!(checked_output(Some(json!([1])), None), Ok(json!([1])));
    assert_eq!(checked_output(None, None), Ok(Value::Null));
    for bad in [Some(json!({"text": 1})), Some(json!({})), None] {
        let failure = checked_output(bad, Some(&shape)).unwrap_err();
        assert_eq!(failure.code, "output_validation_failed");
        assert!(failure.detail.is_some());
    }
}

#[test]
fn states_are_measured_as_json() {
    let state = json!({"k": "é"});
    assert_eq!(state.to_string().len(), 10);
    assert_eq!(bounded_state(state.clone(), 10), Ok(state.clone()));
    assert!(bounded_state(state, 9).unwrap_err().contains("10 bytes"));
}

#[test]
fn a_failed_result_has_the_shape_that_the_model_reads() {
    let failure = CallFailure::lost("refused:UNAUTHORIZED").with_detail("for developers");
    assert_eq!(
        failure.to_result(),
        json!({
            "error": "The sub-agent can no longer be found.",
            "metadata": {"helixErrorDetail": {
                "code": "framework_subagent_lost", "category": "framework", "retryable": false,
                "cause": "refused:UNAUTHORIZED",
            }},
        })
    );
    let outcome = CallOutcome::failed(failure.clone()).to_tool_outcome();
    assert_eq!(outcome, failure.to_outcome());
    assert_eq!(
        (outcome.success, outcome.error.as_deref()),
        (false, Some("The sub-agent can no longer be found."))
    );
}

#[test]
fn failures_have_categories() {
    let category = |code: Code| CallFailure::new(code, "x").category();
    assert_eq!(category(Code::SubagentLost), "framework");
    assert_eq!(category(Code::RunTimeout), "run");
    assert_eq!(category(Code::OutputValidationFailed), "validation");
    assert_eq!(category(Code::ToolExecutionFailed), "tool");
    assert_eq!(
        CallFailure::of_child(Some("unheard_of"), None, None).category(),
        "tool"
    );
    assert_eq!(
        CallFailure::of_transport(&TransportError::Unreachable("x".into())).category(),
        "transport"
    );
}
