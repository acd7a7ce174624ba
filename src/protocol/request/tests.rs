#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};

use super::*;

fn start(body: &Value) -> Result<StartRequest> {
    parse_start(body.to_string().as_bytes())
}

fn resume(body: &Value) -> Result<ResumeRequest> {
    parse_resume(body.to_string().as_bytes())
}

/// The field that a refusal names, with the code checked.
fn field<T: fmt::Debug>(result: Result<T>) -> String {
    let error = result.expect_err("a refusal");
    assert_eq!(error.code, Code::ValidationError);
    error.field.expect("a field")
}

#[test]
fn a_start_is_read_whole_and_what_is_unknown_is_left_out() {
    let body = json!({"sessionId": "s:1~a.b_c-", "agentType": "planner", "message": " ", "state": {"a": 1},
        "metadata": {"b": {}}, "userId": "", "tags": ["x", ""], "novel": [1],
        "parent": {"sessionId": "p", "streamId": "st", "toolCallId": "call 1", "novel": 1}});
    let request = start(&body).unwrap();
    assert_eq!(request.session_id.as_str(), "s:1~a.b_c-");
    let mut expected = body;
    expected.as_object_mut().unwrap().shift_remove("novel");
    expected
        .get_mut("parent")
        .unwrap()
        .as_object_mut()
        .unwrap()
        .shift_remove("novel");
    assert_eq!(serde_json::to_value(&request).unwrap(), expected);
}

#[test]
fn null_is_absence() {
    let full = json!({"sessionId": "s", "message": "m", "agentType": null, "state": null, "metadata": null,
        "userId": null, "tags": null, "parent": null});
    assert_eq!(
        start(&full),
        start(&json!({"sessionId": "s", "message": "m"}))
    );
    let full = json!({"sessionId": "s", "mode": null, "message": null, "parent": null});
    assert_eq!(resume(&full), resume(&json!({"sessionId": "s"})));
    assert_eq!(
        field(start(&json!({"sessionId": null, "message": "m"}))),
        "sessionId"
    );
    assert_eq!(
        field(start(&json!({"sessionId": "s", "message": null}))),
        "message"
    );
}

#[test]
fn a_refused_start_names_its_field() {
    let long = "a".repeat(257);
    for (change, expected) in [
        (json!({"sessionId": 1}), "sessionId"),
        (json!({"sessionId": ""}), "sessionId"),
        (json!({"sessionId": "a/b"}), "sessionId"),
        (json!({"sessionId": "é"}), "sessionId"),
        (json!({"sessionId": long}), "sessionId"),
        (json!({"agentType": ".."}), "agentType"),
        (json!({"agentType": 1}), "agentType"),
        (json!({"message": ""}), "message"),
        (json!({"message": ["m"]}), "message"),
        (json!({"state": []}), "state"),
        (json!({"state": "{}"}), "state"),
        (json!({"metadata": 1}), "metadata"),
        (json!({"userId": 1}), "userId"),
        (json!({"tags": "a"}), "tags"),
        (json!({"tags": ["a", 1]}), "tags.1"),
        (json!({"tags": [null]}), "tags.0"),
        (json!({"parent": "p"}), "parent"),
        (
            json!({"parent": {"streamId": "t", "toolCallId": "c"}}),
            "parent.sessionId",
        ),
        (
            json!({"parent": {"sessionId": "a b", "streamId": "t", "toolCallId": "c"}}),
            "parent.sessionId",
        ),
        (
            json!({"parent": {"sessionId": "p", "toolCallId": "c"}}),
            "parent.streamId",
        ),
        (
            json!({"parent": {"sessionId": "p", "streamId": "t t", "toolCallId": "c"}}),
            "parent.streamId",
        ),
        (
            json!({"parent": {"sessionId": "p", "streamId": "t"}}),
            "parent.toolCallId",
        ),
        (
            json!({"parent": {"sessionId": "p", "streamId": "t", "toolCallId": ""}}),
            "parent.toolCallId",
        ),
        (
            json!({"parent": {"sessionId": "p", "streamId": "t", "toolCallId": 1}}),
            "parent.toolCallId",
        ),
    ] {
        let mut body = json!({"sessionId": "s", "message": "m"});
        body.as_object_mut()
            .unwrap()
            .extend(change.as_object().unwrap().clone());
        assert_eq!(field(start(&body)), expected, "{body}");
    }
}

#[test]
fn a_body_that_is_no_json_object_is_refused_as_a_whole() {
    let deep = format!(
        "{{\"sessionId\":\"s\",\"message\":\"m\",\"state\":{{\"a\":{}",
        "[".repeat(100_000)
    );
    let closed = |levels: usize| {
        let (open, close) = ("[".repeat(levels), "]".repeat(levels));
        format!("{{\"sessionId\":\"s\",\"message\":\"m\",\"state\":{{\"a\":{open}{close}}}}}")
    };
    for body in [
        "",
        " ",
        "{",
        "[]",
        "null",
        "1",
        "\"s\"",
        "{}x",
        "{\"sessionId\":\"s\",}",
        "{\"sessionId\":NaN}",
        "\u{feff}{}",
        &deep,
        &closed(DEPTH_LIMIT - 1),
    ] {
        assert_eq!(field(parse_start(body.as_bytes())), "body", "{body:.40}");
        assert_eq!(field(parse_resume(body.as_bytes())), "body", "{body:.40}");
        assert_eq!(field(parse_stop(body.as_bytes())), "body", "{body:.40}");
    }
    assert!(parse_start(closed(DEPTH_LIMIT - 2).as_bytes()).is_ok());
    let not_utf8 = b"{\"sessionId\":\"s\",\"message\":\"\xff\"}";
    assert_eq!(field(parse_start(not_utf8)), "body");
    let not_utf8_either = b"{\"sessionId\":\"s\",\"message\":\"m\"}\xff";
    assert_eq!(field(parse_start(not_utf8_either)), "body");
}

#[test]
fn a_field_that_stands_twice_is_refused_at_any_depth() {
    for twice in [
        r#"{"sessionId":"s","message":"m","message":"m"}"#,
        r#"{"sessionId":"s","message":"m","state":{"a":1,"a":1}}"#,
        r#"{"sessionId":"s","message":"m","state":{"a":[[{"b":1,"\u0062":2}]]}}"#,
        r#"{"sessionId":"s","message":"m","metadata":{"a":{"b":null,"b":null}}}"#,
        r#"{"sessionId":"s","message":"m","parent":{"sessionId":"p","sessionId":"q"}}"#,
    ] {
        let error = parse_start(twice.as_bytes()).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("body"), "{twice}");
    }
    // The same name in two objects is two fields, and every kind of value is read as it is.
    let state =
        r#"{"a":{"a":[null,true,-1,18446744073709551615,0.1,1e300,"\u00e9"]},"b":{"a":{}}}"#;
    let body = format!(r#"{{"sessionId":"s","message":"m","state":{state}}}"#);
    let read = parse_start(body.as_bytes()).unwrap();
    let whole: Value = serde_json::from_str(state).unwrap();
    assert_eq!(read.state.map(Value::Object), Some(whole));
}

#[test]
fn the_mode_of_a_resume_follows_its_message() {
    use ResumeMode::{Continue, NewTurn, WithMessage};
    for (mode, message, expected) in [
        (None, None, Ok(Continue)),
        (None, Some("m"), Ok(WithMessage)),
        (Some("continue"), None, Ok(Continue)),
        (Some("continue"), Some("m"), Err("mode")),
        (Some("with_message"), None, Err("message")),
        (Some("with_message"), Some("m"), Ok(WithMessage)),
        (Some("new_turn"), None, Err("message")),
        (Some("new_turn"), Some("m"), Ok(NewTurn)),
        (Some("Continue"), None, Err("mode")),
        (Some(""), None, Err("mode")),
        (None, Some(""), Err("message")),
        (Some("continue"), Some(""), Err("message")),
    ] {
        let body = json!({"sessionId": "s", "mode": mode, "message": message});
        match expected {
            Ok(expected) => assert_eq!(resume(&body).unwrap().mode, Some(expected), "{body}"),
            Err(expected) => assert_eq!(field(resume(&body)), expected, "{body}"),
        }
    }
    assert_eq!(field(resume(&json!({"sessionId": "s", "mode": 1}))), "mode");
}

#[test]
fn a_stop_may_give_a_reason() {
    let stop = |body: Value| parse_stop(body.to_string().as_bytes());
    let read = stop(json!({"sessionId": "s", "reason": "enough"})).unwrap();
    assert_eq!(read.reason.as_deref(), Some("enough"));
    assert_eq!(stop(json!({"sessionId": "s"})).unwrap().reason, None);
    assert_eq!(
        field(stop(json!({"sessionId": "s", "reason": 1}))),
        "reason"
    );
    assert_eq!(field(stop(json!({"reason": "r"}))), "sessionId");
    let of = |bytes: usize| json!({"sessionId": "s", "reason": "r".repeat(bytes)});
    assert!(stop(of(MAX_REASON)).is_ok());
    assert_eq!(field(stop(of(MAX_REASON + 1))), "reason");
}

#[test]
fn a_query_names_one_session() {
    let session = |query| SessionQuery::parse(query).map(|q| q.session_id.to_string());
    assert_eq!(session(Some("sessionId=s-1")), Ok("s-1".into()));
    assert_eq!(
        session(Some("x=1&session%49d=a%3Ab&novel")),
        Ok("a:b".into())
    );
    for query in [
        None,
        Some(""),
        Some("sessionid=s"),
        Some("sessionId"),
        Some("sessionId="),
        Some("sessionId=a&sessionId=a"),
        Some("sessionId=a&session%49d=b"),
        Some("sessionId=a+b"),
        Some("sessionId=a%2Fb"),
        Some("sessionId=%"),
        Some("sessionId=%ff"),
        Some("sessionId=a%00"),
    ] {
        assert_eq!(field(session(query)), "sessionId", "{query:?}");
        assert_eq!(
            field(SseQuery::parse(query, None)),
            "sessionId",
            "{query:?}"
        );
    }
}

#[test]
fn a_cursor_is_a_position_and_the_header_counts_without_a_parameter() {
    let from = |query: &str, header| {
        SseQuery::parse(Some(&format!("sessionId=s{query}")), header).map(|q| q.from)
    };
    assert_eq!(from("", None), Ok(Position::None));
    assert_eq!(from("&fromSequence=-1", None), Ok(Position::None));
    assert_eq!(from("&fromSequence=0", None), Ok(Position::At(0)));
    assert_eq!(from("&fromSequence=12", Some("40")), Ok(Position::At(12)));
    assert_eq!(from("&fromSequence=-1", Some("40")), Ok(Position::None));
    assert_eq!(from("", Some("40")), Ok(Position::At(40)));
    assert_eq!(from("", Some("")), Ok(Position::None));
    assert_eq!(field(from("", Some("x"))), "Last-Event-ID");
    assert_eq!(from("&fromSequence=1", Some("x")), Ok(Position::At(1)));
    for bad in [
        "",
        "x",
        "-2",
        "+1",
        "1.0",
        "%2B1",
        "1e3",
        "+",
        "9007199254740992",
        "1&fromSequence=1",
    ] {
        assert_eq!(
            field(from(&format!("&fromSequence={bad}"), None)),
            "fromSequence",
            "{bad}"
        );
    }
}

#[test]
fn an_expected_stream_is_any_text_up_to_a_length() {
    let stream = |text: &str| {
        SseQuery::parse(Some(&format!("sessionId=s&streamId={text}")), None).map(|q| q.stream_id)
    };
    assert_eq!(stream("st_1"), Ok(Some("st_1".into())));
    assert_eq!(stream("no%20stream/%C3%A9"), Ok(Some("no stream/é".into())));
    assert_eq!(stream(&"a".repeat(128)).unwrap().unwrap().len(), 128);
    assert_eq!(field(stream(&"a".repeat(129))), "streamId");
    assert_eq!(field(stream("a&streamId=a")), "streamId");
    assert_eq!(
        SseQuery::parse(Some("sessionId=s"), None)
            .unwrap()
            .stream_id,
        None
    );
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &str)| {
        (
            HeaderName::from_bytes(name.as_bytes()).unwrap(),
            HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        )
    };
    let mut map = HeaderMap::new();
    for (name, value) in pairs.iter().map(pair) {
        map.append(name, value);
    }
    map
}

#[test]
fn an_idempotency_key_has_two_names_and_one_value() {
    let key = |pairs: &[(&str, &str)]| idempotency_key(&headers(pairs));
    let longest = "k".repeat(128);
    assert_eq!(key(&[]), Ok(None));
    assert_eq!(
        key(&[("Idempotency-Key", "start:a b~!")]),
        Ok(Some("start:a b~!".into()))
    );
    assert_eq!(
        key(&[("X-Helix-Request-Key", &longest)]),
        Ok(Some(longest.clone()))
    );
    assert_eq!(
        key(&[("idempotency-key", "k"), ("x-helix-request-key", "k")]),
        Ok(Some("k".into()))
    );
    for (name, bad) in [
        ("Idempotency-Key", ""),
        ("Idempotency-Key", "é"),
        ("Idempotency-Key", "a\tb"),
        ("X-Helix-Request-Key", ""),
        ("X-Helix-Request-Key", &format!("{longest}k")),
    ] {
        assert_eq!(field(key(&[(name, bad)])), name, "{bad}");
    }
    let two = [("idempotency-key", "a"), ("idempotency-key", "b")];
    assert_eq!(field(key(&two)), "Idempotency-Key");
    let other = [("idempotency-key", "a"), ("x-helix-request-key", "b")];
    assert_eq!(field(key(&other)), "X-Helix-Request-Key");
}

#[test]
fn a_later_version_is_refused_with_the_supported_ones() {
    let check = |version: &str| check_version(&headers(&[(header::VERSION, version)]));
    assert_eq!(check_version(&HeaderMap::new()), Ok(()));
    assert_eq!(check("1"), Ok(()));
    for later in ["2", "10", "99999999999999999999"] {
        let error = check(later).unwrap_err();
        assert_eq!(error.code, Code::VersionUnsupported, "{later}");
        assert_eq!(error.detail.as_deref(), Some("supported: 1"));
    }
    for bad in ["", "0", "x", "1.0", "+1", "-1", "1 1", "é"] {
        assert_eq!(field(check(bad)), "X-Remote-Agents-Version", "{bad}");
    }
}
