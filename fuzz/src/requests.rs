//! Requests: paths, queries, cursors, bodies, and all of it together through a mount.

use http::{HeaderMap, HeaderValue, Method, Uri};
use remote_agents::mount::{Auth, Mount, Projection};
use remote_agents::protocol::canonical::{canonical_json, digest};
use remote_agents::protocol::ids::{AgentType, Position, SessionId};
use remote_agents::protocol::request::{
    DEPTH_LIMIT, MessagesQuery, SessionQuery, SseQuery, TreeQuery, check_version, idempotency_key,
    last_event_id, parameter, parse_resume, parse_start, parse_stop,
};
use remote_agents::protocol::route::{Action, Route, agent_path, parse_path};
use remote_agents::protocol::tree::TreeBounds;
use serde_json::Value;

use super::input::{choice, owned, text, values};
use super::reference::{depth, pairs};

const MOST: u64 = (1 << 53) - 1;

pub(crate) fn route(data: &[u8]) {
    let (base, rest) = choice(data, 3);
    let [path, query, header] = values::<3>(rest).map(text);
    let base = ["", "/agents", "/a/b"][base];
    match parse_path(base, &path) {
        None | Some(Route::List) => {}
        Some(Route::Agent { agent_type, action }) => {
            is_id(agent_type.as_str(), "._-", 64);
            let own = agent_path(base, &agent_type, action, &[]);
            let again = Some(Route::Agent { agent_type, action });
            assert_eq!(parse_path(base, &own), again, "{own}");
            // The way to an action is one: nothing but an encoding of the type may differ.
            assert_eq!(
                path.matches('/').count(),
                own.matches('/').count(),
                "{path}"
            );
            assert!(path.starts_with(base) && path.ends_with(action.as_str()));
        }
    }
    queries(&query, &header);
}

fn queries(query: &str, header: &str) {
    let pairs = pairs(query);
    let given = |name: &str| {
        let mut found = pairs.iter().filter(|(key, _)| key == name);
        (
            found.next().map(|(_, value)| value.as_str()),
            found.next().is_some(),
        )
    };
    for name in ["sessionId", "fromSequence", "streamId", "after"] {
        match (parameter(Some(query), name), given(name)) {
            (Ok(value), (expected, false)) => assert_eq!(value.as_deref(), expected, "{query}"),
            (Err(error), (_, true)) => assert_eq!(error.status(), 400),
            (read, _) => panic!("{name} of {query} is {read:?}"),
        }
    }
    let session = given("sessionId").0.unwrap_or_default();
    let is_named = |read: &SessionId| {
        assert_eq!(read.as_str(), session);
        is_id(session, "._:~-", 256);
    };
    if let Ok(read) = SessionQuery::parse(Some(query)) {
        is_named(&read.session_id);
    }
    if let Ok(read) = TreeQuery::parse(Some(query)) {
        is_named(&read.session_id);
        let most = TreeBounds::MOST;
        assert!((1..=most.depth).contains(&read.bounds.depth));
        assert!((1..=most.nodes).contains(&read.bounds.nodes));
        assert!((TreeBounds::FEWEST_BYTES..=most.bytes).contains(&read.bounds.bytes));
    }
    if let Ok(read) = MessagesQuery::parse(Some(query)) {
        is_named(&read.session_id);
        assert!((1..=200).contains(&read.limit) && read.after <= MOST);
    }
    if let Ok(read) = SseQuery::parse(Some(query), Some(header)) {
        is_named(&read.session_id);
        let told = given("fromSequence").0.unwrap_or(header);
        let is_told = given("fromSequence").0.is_some() || !header.is_empty();
        assert_eq!(
            Some(read.from),
            if is_told {
                plain(told)
            } else {
                Some(Position::None)
            }
        );
    }
}

/// The cursor that a text is, read digit by digit.
fn plain(text: &str) -> Option<Position> {
    if text == "-1" {
        return Some(Position::None);
    }
    let mut number: u64 = 0;
    for letter in text.chars() {
        let digit = u64::from(letter.to_digit(10)?);
        number = number * 10 + digit;
        if number > MOST {
            return None;
        }
    }
    ((1..=16).contains(&text.len())).then_some(Position::At(number))
}

pub(crate) fn cursor(data: &[u8]) {
    let text = text(data);
    let read = Position::parse("fromSequence", &text).ok();
    assert_eq!(read, plain(&text), "{text}");
    if let Some(position) = read {
        let written = position.to_string();
        assert_eq!(Position::parse("x", &written).ok(), Some(position));
        assert_eq!(
            serde_json::from_str::<Position>(&written).ok(),
            Some(position)
        );
        assert_eq!(position.sequence().is_none(), text == "-1");
    }
    if let Ok(position) = serde_json::from_str::<Position>(&text) {
        assert_eq!(
            plain(text.trim()),
            Some(position).filter(|_| text.trim() != "-0"),
            "{text}"
        );
    }
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(data) {
        headers.insert("last-event-id", value);
    }
    let session = Some("sessionId=s");
    let header = last_event_id(&headers);
    if let Ok(read) = header.and_then(|header| SseQuery::parse(session, header)) {
        let expected = if headers.is_empty() || data.is_empty() {
            Some(Position::None)
        } else {
            plain(&text)
        };
        assert_eq!(Some(read.from), expected);
    }
}

pub(crate) fn body(data: &[u8]) {
    let (kind, rest) = choice(data, 3);
    let [body, key, version] = values::<3>(rest);
    match kind {
        0 => {
            if let Ok(start) = parse_start(body) {
                is_id(start.session_id.as_str(), "._:~-", 256);
                assert!(!start.message.is_empty());
                let written = serde_json::to_vec(&start).unwrap();
                assert_eq!(parse_start(&written).ok(), Some(start));
            }
        }
        1 => {
            if let Ok(resume) = parse_resume(body) {
                assert!(resume.mode.is_some());
                let written = serde_json::to_vec(&resume).unwrap();
                assert_eq!(parse_resume(&written).ok(), Some(resume));
            }
        }
        _ => {
            if let Ok(stop) = parse_stop(body) {
                let written = serde_json::to_vec(&stop).unwrap();
                assert_eq!(parse_stop(&written).ok(), Some(stop));
            }
        }
    }
    if parse_start(body).is_ok() || parse_resume(body).is_ok() || parse_stop(body).is_ok() {
        let value: Value = serde_json::from_slice(body).unwrap();
        assert!(value.is_object() && depth(&value) <= DEPTH_LIMIT);
        let canonical = canonical_json(&value);
        let again: Value = serde_json::from_str(&canonical).unwrap();
        assert_eq!(canonical_json(&again), canonical);
        assert_eq!(digest(Action::Start, &again), digest(Action::Start, &value));
    }
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(key) {
        headers.insert("idempotency-key", value);
    }
    if let Ok(value) = HeaderValue::from_bytes(version) {
        headers.insert("x-remote-agents-version", value);
    }
    if let Ok(Some(read)) = idempotency_key(&headers) {
        assert_eq!(read.as_bytes(), key);
        assert!((1..=128).contains(&key.len()));
    }
    if headers.contains_key("x-remote-agents-version") && check_version(&headers).is_ok() {
        assert_eq!(text(version).parse(), Ok(1));
    }
}

pub(crate) fn request(data: &[u8]) {
    let (method, rest) = choice(data, 4);
    let [uri, key, connection, body] = values::<4>(rest);
    let Ok(uri) = Uri::try_from(uri) else {
        return;
    };
    let method = [Method::GET, Method::POST, Method::HEAD, Method::OPTIONS][method].clone();
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("authorization", key),
        ("idempotency-key", key),
        ("connection", connection),
    ] {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.insert(name, value);
        }
    }
    headers.insert(
        "x-remote-agents-internal-mount",
        HeaderValue::from_static("forged"),
    );
    for mount in mounts() {
        let forward = mount
            .admit(&method, &uri, &headers)
            .and_then(|admission| admission.forward(owned(body)));
        match forward {
            Err(response) => {
                let status = response.status().as_u16();
                let known = [200, 400, 401, 404, 405, 413];
                assert!(known.contains(&status), "{status}");
                assert!(response.headers().contains_key("x-remote-agents-version"));
            }
            Ok(forward) => {
                let asked = forward.asked;
                is_id(asked.session_id.as_str(), "._:~-", 256);
                assert_eq!(asked.action.method(), method);
                let request = forward.request;
                let path = agent_path("", &asked.agent_type, inner(asked.action), &[]);
                assert_eq!(request.uri().path(), path);
                let told = request.headers().get_all("x-remote-agents-internal-mount");
                assert!(told.iter().all(|kind| kind == "raw" || kind == "projected"));
                assert!(!request.headers().contains_key("connection"));
            }
        }
    }
}

fn inner(action: Action) -> Action {
    if action == Action::Ui {
        Action::Sse
    } else {
        action
    }
}

fn mounts() -> [Mount; 2] {
    let planner = AgentType::parse("planner").unwrap();
    let projection = Projection {
        name: "public@1".to_owned(),
        map: std::rc::Rc::new(|_, _| Value::Null),
    };
    [
        Mount::new("/agents")
            .allow_unauthenticated()
            .with_messages()
            .with_ui(),
        Mount::new("")
            .with_auth(Auth::Bearer(Some("k".to_owned())))
            .with_agents([planner])
            .with_projection(projection)
            .with_body_limit(200),
    ]
}

fn is_id(text: &str, more: &str, most: usize) {
    assert!((1..=most).contains(&text.len()), "{text}");
    let known = |letter: char| letter.is_ascii_alphanumeric() || more.contains(letter);
    assert!(text.chars().all(known), "{text}");
    assert!(text != ".." || more.contains('~'), "{text}");
}
