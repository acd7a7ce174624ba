//! What both clients have in common: deadlines, refusals, settings.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt as _;

use super::testing::{Piece, Provider, Wire, in_time, question};
use super::{AnthropicModel, KnownModels, OpenAiModel, SettingError};
use crate::agent::model::{
    LanguageModel, ModelError, ModelErrorKind, ModelEvent, ModelPolicy, StopReason,
};
use crate::error::Error;
use crate::transport::testing::TestRuntime;

const SECOND: Duration = Duration::from_secs(1);

/// The error that ends the answer of each client, and the milliseconds until then.
fn ends(make: impl Fn() -> Provider) -> Vec<(ModelError, u64)> {
    let ended = |anthropic: bool| {
        in_time(async {
            let runtime = Rc::new(TestRuntime::new());
            let fetch = Rc::new(Wire(Rc::new(make())));
            let model: Rc<dyn LanguageModel> = if anthropic {
                Rc::new(
                    AnthropicModel::new(fetch, runtime.clone(), "http://ai.test", "sk-secret", "m")
                        .unwrap(),
                )
            } else {
                Rc::new(
                    OpenAiModel::new(
                        fetch,
                        runtime.clone(),
                        "http://ai.test",
                        Some("sk-secret"),
                        "m",
                    )
                    .unwrap(),
                )
            };
            let events: Vec<_> = model.stream(question()).collect().await;
            let error = events.last().unwrap().as_ref().unwrap_err().clone();
            (error, runtime.elapsed())
        })
    };
    vec![ended(false), ended(true)]
}

#[test]
fn a_provider_that_does_not_answer_or_falls_silent_is_given_up_at_its_deadline() {
    let policy = ModelPolicy::default();
    let millis = |time: Duration| crate::protocol::ids::millis(time);
    let silent = || Provider {
        before: Duration::from_secs(3600),
        ..Provider::saying("")
    };
    for (error, after) in ends(silent) {
        assert_eq!(
            (error.kind, after),
            (ModelErrorKind::Unavailable, millis(policy.connect_timeout))
        );
    }
    let stalled = || Provider {
        pieces: vec![
            Piece::Wait(SECOND),
            Piece::Bytes(": ping\n\n".into()),
            Piece::Wait(Duration::from_secs(3600)),
        ],
        ..Provider::saying("")
    };
    for (error, after) in ends(stalled) {
        assert_eq!(
            (error.kind, after),
            (
                ModelErrorKind::Unavailable,
                millis(SECOND + policy.idle_timeout)
            )
        );
    }
    // A ping in time is no silence, but an attempt is not for ever.
    let pinging = || Provider {
        pieces: (0..100)
            .flat_map(|_| {
                [
                    Piece::Wait(Duration::from_secs(100)),
                    Piece::Bytes(": ping\n\n".into()),
                ]
            })
            .collect(),
        ..Provider::saying("")
    };
    for (error, after) in ends(pinging) {
        assert_eq!(
            (error.kind, after),
            (ModelErrorKind::Unavailable, millis(policy.total_timeout))
        );
    }
}

#[test]
fn a_silence_behind_the_reason_of_an_answer_is_its_end() {
    let body =
        "data: {\"choices\":[{\"delta\":{\"content\":\"x\"},\"finish_reason\":\"stop\"}]}\n\n";
    let provider = Provider {
        pieces: vec![
            Piece::Bytes(body.into()),
            Piece::Wait(Duration::from_secs(3600)),
        ],
        ..Provider::saying("")
    };
    in_time(async {
        let runtime = Rc::new(TestRuntime::new());
        let fetch = Rc::new(Wire(Rc::new(provider)));
        let model = OpenAiModel::new(fetch, runtime, "http://ai.test", None, "m").unwrap();
        let events: Vec<_> = model.stream(question()).collect().await;
        assert_eq!(
            events.last(),
            Some(&Ok(ModelEvent::Stop(StopReason::EndTurn)))
        );
    });
}

#[test]
fn a_refusal_has_its_kind_and_its_wait_and_repeats_nothing() {
    let refused = |status: u16, headers: Vec<(&'static str, &'static str)>| {
        move || Provider {
            status,
            headers: headers.clone(),
            ..Provider::saying(
                "{\"error\":{\"message\":\"sk-secret What is a tide?\",\"type\":\"x\"}}",
            )
        }
    };
    let table = [
        (401, ModelErrorKind::Rejected),
        (404, ModelErrorKind::Rejected),
        (413, ModelErrorKind::ContextOverflow),
        (429, ModelErrorKind::RateLimited),
        (500, ModelErrorKind::Unavailable),
        (529, ModelErrorKind::Unavailable),
    ];
    for (status, kind) in table {
        for (error, _) in ends(refused(status, vec![("retry-after", "7")])) {
            assert_eq!(error.kind, kind, "{status}");
            assert_eq!(error.retry_after, kind.may_pass().then_some(7), "{status}");
            let said = format!("{error:?} {error}");
            assert!(
                !said.contains("sk-secret") && !said.contains("tide"),
                "{said}"
            );
        }
    }
    // A refusal whose body never ends is told by its status.
    let endless = || Provider {
        status: 503,
        pieces: vec![Piece::Wait(Duration::from_secs(3600))],
        ..Provider::saying("")
    };
    for (error, after) in ends(endless) {
        assert_eq!((error.kind, after), (ModelErrorKind::Unavailable, 60_000));
        assert!(error.message.contains("503"));
    }
}

fn chosen(provider: &str, set: &[(&str, &str)]) -> Result<String, SettingError> {
    let variable = |name: &str| {
        let found = set.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    in_time(async {
        let fetch = Rc::new(Wire(Rc::new(Provider::saying(""))));
        let has_binding = variable("AI").is_some();
        let models = KnownModels {
            variable: &variable,
            fetch: fetch.clone(),
            workers_ai: has_binding.then_some(fetch as _),
            runtime: Rc::new(TestRuntime::new()),
        };
        models.model(provider).map(|model| model.name().to_owned())
    })
}

/// The body of what the model that these settings name is asked.
fn asked(provider: &str, set: &[(&str, &str)]) -> serde_json::Value {
    let variable = |name: &str| {
        let found = set.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| (*value).to_owned())
    };
    let served = Rc::new(Provider::saying(""));
    in_time(async {
        let models = KnownModels {
            variable: &variable,
            fetch: Rc::new(Wire(served.clone())),
            workers_ai: Some(Rc::new(Wire(served.clone()))),
            runtime: Rc::new(TestRuntime::new()),
        };
        let model = models.model(provider).unwrap();
        drop(model.stream(question()).collect::<Vec<_>>().await);
    });
    let sent = served.asked.borrow_mut().remove(0);
    serde_json::from_slice(sent.body()).unwrap()
}

#[test]
fn the_settings_have_a_model_think_or_keep_to_a_declared_output() {
    let openai = [("MODEL_NAME", "m"), ("OPENAI_API_KEY", "sk")];
    let anthropic = [("MODEL_NAME", "m"), ("ANTHROPIC_API_KEY", "sk")];
    let structured = |value| {
        let set = [openai[0], openai[1], ("MODEL_STRUCTURED_OUTPUT", value)];
        asked("openai", &set)["response_format"]["json_schema"]["schema"]["title"].clone()
    };
    assert_eq!(structured("true"), "Report");
    for off in ["false", " "] {
        assert!(structured(off).is_null(), "{off:?}");
    }
    let with = |provider, needed: &[(&'static str, &'static str)]| {
        asked(
            provider,
            &[needed, &[("MODEL_STRUCTURED_OUTPUT", "true")]].concat(),
        )
    };
    let sent = with("anthropic", &anthropic);
    assert_eq!(sent["output_config"]["format"]["schema"]["title"], "Report");
    let sent = with("workers-ai", &[("MODEL_NAME", "m")]);
    assert_eq!(sent["tool_choice"], "required");
    let thinking = |value| {
        let set = [anthropic[0], anthropic[1], ("MODEL_THINKING", value)];
        asked("anthropic", &set)["thinking"]["type"].clone()
    };
    assert_eq!(thinking("adaptive"), "adaptive");
    assert_eq!(thinking("4096"), "enabled");
    assert!(thinking("").is_null());
    for (provider, [name, key], variable) in [
        ("openai", openai, "MODEL_STRUCTURED_OUTPUT"),
        ("anthropic", anthropic, "MODEL_STRUCTURED_OUTPUT"),
        ("anthropic", anthropic, "MODEL_THINKING"),
    ] {
        assert_eq!(
            chosen(provider, &[name, key, (variable, "yes")]),
            Err(SettingError::Malformed { variable })
        );
    }
}

/// A provider, what it needs, and what it does nothing by.
type Taking = (
    &'static str,
    &'static [(&'static str, &'static str)],
    &'static [&'static str],
);

#[test]
fn a_setting_that_a_provider_does_nothing_by_is_refused_with_what_to_do() {
    let table: [Taking; 4] = [
        (
            "offline",
            &[],
            &[
                "MODEL_NAME",
                "MODEL_MAX_TOKENS",
                "MODEL_THINKING",
                "MODEL_STRUCTURED_OUTPUT",
            ],
        ),
        (
            "openai",
            &[("MODEL_NAME", "m"), ("OPENAI_API_KEY", "sk")],
            &["MODEL_THINKING"],
        ),
        (
            "anthropic",
            &[("MODEL_NAME", "m"), ("ANTHROPIC_API_KEY", "sk")],
            &[],
        ),
        (
            "workers-ai",
            &[("MODEL_NAME", "m"), ("AI", "")],
            &["MODEL_THINKING"],
        ),
    ];
    let values = [
        ("MODEL_NAME", "m"),
        ("MODEL_MAX_TOKENS", "9"),
        ("MODEL_THINKING", "2000"),
        ("MODEL_STRUCTURED_OUTPUT", "true"),
    ];
    for (provider, needed, untaken) in table {
        for (variable, value) in values {
            let mut set = needed.to_vec();
            set.push((variable, value));
            let found = chosen(provider, &set);
            if !untaken.contains(&variable) {
                assert_eq!(found, Ok("m".into()), "{provider} {variable}");
                continue;
            }
            let said = found.unwrap_err().to_string();
            let (is, to_do) = said.split_once("; ").unwrap();
            assert!(is.contains(variable) && is.contains(provider), "{said}");
            assert!(to_do.starts_with("unset it, or choose the provider "));
            let taker = table
                .iter()
                .find(|(taker, _, other)| !other.contains(&variable) && to_do.contains(taker));
            assert!(taker.is_some() && !to_do.contains(provider), "{said}");
        }
        // What is turned off asks for nothing, and neither does another provider's key.
        let mut set = needed.to_vec();
        set.extend([
            ("MODEL_STRUCTURED_OUTPUT", "false"),
            ("MODEL_THINKING", " "),
        ]);
        set.extend([("OPENAI_API_KEY", "sk"), ("ANTHROPIC_API_KEY", "sk")]);
        assert!(chosen(provider, &set).is_ok(), "{provider}");
    }
}

#[test]
fn the_settings_choose_the_model_and_a_missing_one_is_named() {
    let missing = |variable, provider| Err(SettingError::Missing { variable, provider });
    let malformed = |variable| Err(SettingError::Malformed { variable });
    assert_eq!(chosen("offline", &[]), Ok("offline".into()));
    assert_eq!(
        chosen("Offline ", &[]),
        Err(SettingError::Unknown("Offline ".into()))
    );
    for (provider, key, base_url) in [
        ("openai", "OPENAI_API_KEY", "OPENAI_BASE_URL"),
        ("anthropic", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
    ] {
        let name = ("MODEL_NAME", "big-model");
        assert_eq!(
            chosen(provider, &[name, (key, " sk \n")]),
            Ok("big-model".into())
        );
        assert_eq!(
            chosen(provider, &[(key, "sk")]),
            missing("MODEL_NAME", provider)
        );
        assert_eq!(chosen(provider, &[name]), missing(key, provider));
        assert_eq!(
            chosen(provider, &[name, (key, " ")]),
            missing(key, provider)
        );
        assert_eq!(chosen(provider, &[name, (key, "s\nk")]), malformed(key));
        assert_eq!(
            chosen(provider, &[name, (key, "sk"), (base_url, "sk-secret")]),
            malformed(base_url)
        );
        assert_eq!(
            chosen(provider, &[name, (key, "sk"), ("MODEL_MAX_TOKENS", "0")]),
            malformed("MODEL_MAX_TOKENS")
        );
        assert_eq!(
            chosen(provider, &[name, (key, "sk"), ("MODEL_MAX_TOKENS", "10")]),
            Ok("big-model".into())
        );
    }
    assert_eq!(
        chosen("workers-ai", &[("MODEL_NAME", "@cf/m"), ("AI", "")]),
        Ok("@cf/m".into())
    );
    assert_eq!(
        chosen("workers-ai", &[("MODEL_NAME", "@cf/m")]),
        Err(SettingError::NoBinding)
    );
    let error = Error::from(chosen("openai", &[("MODEL_NAME", "m")]).unwrap_err());
    assert_eq!(error.status(), 500);
    assert!(error.detail.unwrap().contains("OPENAI_API_KEY"));
}
