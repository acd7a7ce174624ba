#![allow(clippy::unwrap_used)]

use super::*;

fn agent(text: &str, action: Action) -> Option<Route> {
    let agent_type = AgentType::parse(text).unwrap();
    Some(Route::Agent { agent_type, action })
}

#[test]
fn each_action_has_its_path_and_its_method() {
    let posts = [
        Action::Start,
        Action::Resume,
        Action::Interrupt,
        Action::Abort,
    ];
    for action in Action::ALL {
        assert_eq!(Action::parse(action.as_str()), Some(action));
        for base in ["/agents", "/internal/agents", "", "/"] {
            let path = format!("{}/planner/{}", base.trim_end_matches('/'), action.as_str());
            assert_eq!(parse_path(base, &path), agent("planner", action), "{path}");
        }
        let method = if posts.contains(&action) {
            Method::POST
        } else {
            Method::GET
        };
        assert_eq!(action.method(), method);
        assert_eq!(action.allow(), method.as_str());
    }
    assert_eq!(Route::List.method(), Method::GET);
}

#[test]
fn the_base_path_has_one_spelling_in_requests_and_any_slashes_in_configuration() {
    for base in ["/agents", "agents", "agents/", "/agents/"] {
        assert_eq!(parse_path(base, "/agents"), Some(Route::List));
        assert_eq!(parse_path(base, "/agents/"), None);
    }
    assert_eq!(parse_path("/", "/"), Some(Route::List));
}

#[test]
fn an_agent_type_is_decoded_once() {
    for path in [
        "/agents/%70lanner/status",
        "/agents/plan%6Eer/status",
        "/agents/%70%6c%61%6E%6e%65%72/status",
    ] {
        assert_eq!(
            parse_path("/agents", path),
            agent("planner", Action::Status),
            "{path}"
        );
    }
    assert_eq!(
        parse_path("/agents", "/agents/A.b_c-1/sse"),
        agent("A.b_c-1", Action::Sse)
    );
}

#[test]
fn what_is_not_a_route_is_no_route() {
    let long = format!("/agents/{}/status", "a".repeat(65));
    for path in [
        "",
        "/",
        "//",
        "/agent",
        "/agentsx",
        "/agents/",
        "/agents//",
        "/agents//status",
        "/agents/planner",
        "/agents/planner/",
        "/agents/planner/status/",
        "/agents/planner//status",
        "//agents/planner/status",
        "/agents//planner/status",
        "/agents/planner/status/x",
        "/Agents/planner/status",
        "/agents/planner/Status",
        "/agents/planner/descendant",
        "/agents/planner/documents",
        "/agents/planner/unknown",
        "/agents/planner/%73tatus",
        "/%61gents/planner/status",
        "/agents/planner%2fstatus",
        "/agents/planner%2Fstatus/status",
        "/agents/../status",
        "/agents/./status",
        "/agents/%2e%2e/status",
        "/agents/%2E/status",
        "/agents/%2570lanner/status",
        "/agents/plan ner/status",
        "/agents/plan%20ner/status",
        "/agents/planner%00/status",
        "/agents/planner\0/status",
        "/agents/planner/status%00",
        "/agents/planner/status\0",
        "/agents/%/status",
        "/agents/%7/status",
        "/agents/%zz/status",
        "/agents/%ff/status",
        "/agents/pl%C3%A9/status",
        "/agents/pl+er/status",
        "/x/agents/planner/status",
        "/agents/planner/../planner/status",
        &long,
    ] {
        assert_eq!(parse_path("/agents", path), None, "{path:?}");
    }
}

#[test]
fn a_built_path_leads_back_and_its_query_is_encoded() {
    let planner = AgentType::parse("planner").unwrap();
    let query = [("sessionId", "a:b~c"), ("streamId", "x&y=é +#")];
    let path = agent_path("/internal/agents/", &planner, Action::Sse, &query);
    let (path, query) = path.split_once('?').unwrap();
    assert_eq!(
        parse_path("/internal/agents", path),
        agent("planner", Action::Sse)
    );
    let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes()).collect();
    assert_eq!(
        pairs,
        [
            ("sessionId".into(), "a:b~c".into()),
            ("streamId".into(), "x&y=é +#".into())
        ]
    );
    assert!(query.is_ascii());
    assert_eq!(
        agent_path("", &planner, Action::Start, &[]),
        "/planner/start"
    );
}
