//! Every kind of fault, and what a call makes of it.

use remote_agents::Code;
use serde_json::json;

use super::line::{Canned, Fault, Filling, When};
use crate::stories::mischief::Ending;

/// What a fault means, whatever it looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The same request may be answered later.
    Passing,
    /// A refusal with this code.
    Refused(&'static str),
    /// A refusal that says that there is something to attach to.
    Attach(&'static str, When),
    /// An answer that is not what the contract says.
    Malformed,
    /// A refusal that the producer did not give.
    Unexplained,
    /// An answer of a projected mount.
    Projected,
    /// An answer of a later version.
    Later,
}

/// What must come of the call on which a fault has struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The same as without it.
    Same,
    /// The same result; state or usage may be missing.
    Unfolded,
    /// The same result; the child may not have been told to stop.
    Untold,
    /// A failed result with this code.
    Fails(&'static str),
}

/// A kind of fault at a request that is no stream, by its name.
pub fn kinds(action: &str) -> Vec<(String, Fault, Class)> {
    let mut kinds = vec![
        ("request lost", Fault::RequestLost, Class::Passing),
        ("response lost", Fault::ResponseLost, Class::Passing),
        ("late", Fault::Late, Class::Passing),
        ("unanswered", Fault::Unanswered, Class::Passing),
        (
            "projected",
            Fault::Header("x-remote-agents-mount", "projected"),
            Class::Projected,
        ),
        (
            "later version",
            Fault::Header("x-remote-agents-version", "2"),
            Class::Later,
        ),
        (
            "odd version",
            Fault::Header("x-remote-agents-version", "two"),
            Class::Malformed,
        ),
        (
            "wrong content type",
            Fault::Header("content-type", "text/plain"),
            Class::Malformed,
        ),
    ];
    if action != "sse" {
        kinds.push(("body cut", Fault::CutJson, Class::Passing));
    }
    let mut kinds: Vec<(String, Fault, Class)> = kinds
        .into_iter()
        .map(|(name, fault, class)| (name.to_owned(), fault, class))
        .collect();
    let has_effect = ["start", "resume", "interrupt"].contains(&action);
    for (name, answer, class) in answers() {
        let mut add = |suffix: &str, when: When| {
            let class = match class {
                Class::Attach(code, _) => Class::Attach(code, when),
                other => other,
            };
            let fault = Fault::Instead {
                answer: answer.clone(),
                when,
            };
            kinds.push((format!("{name}{suffix}"), fault, class));
        };
        add("", When::Before);
        if has_effect {
            add(", took effect", When::After);
        }
    }
    kinds
}

fn answers() -> Vec<(&'static str, Canned, Class)> {
    use Class::{Attach, Malformed, Passing, Refused, Unexplained};
    let elsewhere = json!({
        "sessionId": "elsewhere", "streamId": "st_1", "status": "completed", "accepted": true,
        "state": {}, "streamSequence": 3, "oldestRetainedSequence": 0, "stepCount": 1,
        "rollup": {},
    });
    let envelope = Canned::envelope;
    let refused = |code: Code| (envelope(code.status(), code.as_str()), code.as_str());
    let mut answers = vec![
        ("400", refused(Code::ValidationError)),
        ("400 version", refused(Code::VersionUnsupported)),
        ("401", refused(Code::Unauthorized)),
        ("404", refused(Code::NotFound)),
        ("404 feature", refused(Code::FeatureUnavailable)),
        ("405", refused(Code::MethodNotAllowed)),
        ("409 conflict", refused(Code::IdempotencyConflict)),
        ("409 busy", refused(Code::StateAlreadyRunning)),
        ("409 taken", refused(Code::ChildSessionTaken)),
        ("413", refused(Code::PayloadTooLarge)),
    ]
    .into_iter()
    .map(|(name, (answer, code))| (name, answer, Refused(code)))
    .collect::<Vec<_>>();
    answers.extend([
        ("418 unknown", envelope(418, "TEAPOT"), Refused("TEAPOT")),
        (
            "409 running",
            envelope(409, Code::AlreadyRunning.as_str()),
            Attach("ALREADY_RUNNING", When::Before),
        ),
        (
            "409 completed",
            envelope(409, Code::AlreadyCompleted.as_str()),
            Attach("ALREADY_COMPLETED", When::Before),
        ),
        (
            "429",
            envelope(429, Code::RateLimited.as_str()).with_header("retry-after", "1"),
            Passing,
        ),
        ("429 bare", Canned::bare(429), Passing),
        ("500", envelope(500, Code::Internal.as_str()), Passing),
        ("500 bare", Canned::bare(500), Passing),
        ("501 bare", Canned::bare(501), Passing),
        ("502 bare", Canned::bare(502), Passing),
        (
            "503",
            envelope(503, Code::Overloaded.as_str()).with_header("retry-after", "2"),
            Passing,
        ),
        ("503 reset", envelope(503, "transport_error"), Passing),
        ("504 bare", Canned::bare(504), Passing),
        ("403 bare", Canned::bare(403), Unexplained),
        ("404 bare", Canned::bare(404), Unexplained),
        ("202", Canned::json(202, &elsewhere.to_string()), Malformed),
        ("204", Canned::bare(204), Malformed),
        (
            "redirect",
            Canned::bare(307).with_header("location", "http://elsewhere/agents"),
            Malformed,
        ),
        ("page of HTML", Canned::bare(200), Malformed),
        (
            "garbage",
            Canned::json(200, "{\"sessionId\": \""),
            Malformed,
        ),
        ("no JSON", Canned::json(200, "\u{0}\u{1}garbage"), Malformed),
        ("nothing", Canned::json(200, ""), Malformed),
        ("an array", Canned::json(200, "[1, 2]"), Malformed),
        (
            "another session's",
            Canned::json(200, &elsewhere.to_string()),
            Malformed,
        ),
        (
            "huge",
            Canned {
                body: Filling::Huge,
                ..Canned::json(200, "")
            },
            Malformed,
        ),
        (
            "huge refusal",
            Canned {
                body: Filling::Huge,
                ..Canned::json(400, "")
            },
            Unexplained,
        ),
    ]);
    answers
}

/// Every kind of fault in a stream of `events` events, at each of `places`.
pub fn stream_kinds(places: &[usize]) -> Vec<(String, Fault, Class)> {
    let mut kinds = Vec::new();
    let error = |recoverable: bool| {
        let error = json!({"code": "INTERNAL", "error": "Oops.", "recoverable": recoverable});
        format!("event: error\ndata: {error}\n\n")
    };
    let slipped = [
        (
            "garbage event",
            "event: chunk\nid: 1\ndata: {oops\n\n".to_owned(),
        ),
        ("recoverable error", error(true)),
        ("final error", error(false)),
        ("rewound", "event: rewound\ndata: {}\n\n".to_owned()),
        (
            "huge event",
            format!("event: chunk\ndata: {}", "x".repeat(9 << 20)),
        ),
    ];
    for (n, events) in places.iter().copied().enumerate() {
        let mut cut = |name: &str, more: usize, ending: Ending| {
            let fault = Fault::Cut {
                events,
                more,
                ending,
            };
            kinds.push((name.to_owned(), fault, Class::Passing));
        };
        cut("cut between events", 0, Ending::Clean);
        cut("cut within an event", 9, Ending::Reset);
        cut("silent between events", 0, Ending::Silence);
        for (at, (name, event)) in slipped.iter().enumerate() {
            // Each at some of the places; all of them at the first.
            if n == 0 || n % slipped.len() == at {
                let event = event.clone();
                let fault = Fault::Event { events, event };
                kinds.push(((*name).to_owned(), fault, Class::Passing));
            }
        }
    }
    kinds
}

/// What must come of a fault of this kind and class at a request of this action.
pub fn due(action: &str, kind: &str, class: Class) -> Due {
    const LOST: &str = "framework_subagent_lost";
    const UNREADABLE: &str = "transport_error";
    let not_supported = Code::NotSupported.as_str();
    let later = Code::VersionUnsupported.as_str();
    let is_silent = ["late", "unanswered"].contains(&kind);
    match (action, class) {
        // The wait for these is as long as one try; what is not heard by then is done without.
        ("snapshot" | "usage", Class::Passing) if is_silent => Due::Unfolded,
        ("interrupt", Class::Passing) if is_silent => Due::Untold,
        // Without a key, what a failing server has done is not known: it is not sent again.
        ("interrupt", Class::Passing) if kind == "500" || kind == "500, took effect" => Due::Untold,
        ("interrupt", Class::Attach(_, When::After)) | (_, Class::Passing) => Due::Same,
        ("interrupt", _) => Due::Untold,
        ("start", Class::Refused(code)) => Due::Fails(code),
        ("start", Class::Attach(_, When::Before)) => Due::Fails(LOST),
        ("start", Class::Unexplained) => Due::Fails(UNREADABLE),
        // Under a key, an answer that cannot be read is asked for again.
        // The true answer to this resume is a refusal, and one of another type is unexplained.
        ("resume", Class::Malformed) if kind == "wrong content type" => {
            Due::Fails(Code::ProducerDead.as_str())
        }
        ("start" | "resume", Class::Malformed) => Due::Same,
        ("resume", Class::Refused("state_child_session_taken")) => {
            Due::Fails("state_child_session_taken")
        }
        ("start" | "resume", Class::Attach(_, When::After)) => Due::Same,
        ("resume", _) => Due::Fails(Code::ProducerDead.as_str()),
        ("status", Class::Refused(_) | Class::Attach(..) | Class::Unexplained) => Due::Fails(LOST),
        ("snapshot" | "usage", Class::Projected) => Due::Fails(not_supported),
        ("snapshot" | "usage", _) => Due::Unfolded,
        (_, Class::Projected) => Due::Fails(not_supported),
        (_, Class::Later) => Due::Fails(later),
        ("sse" | "status", _) => Due::Same,
        (other, class) => panic!("nothing is said of {class:?} at {other}"),
    }
}
