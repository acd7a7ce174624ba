//! The answers of model providers: the same at every cut, in order, and never repeated in a failure.

use std::collections::BTreeSet;
use std::rc::Rc;

use bytes::Bytes;
use futures::StreamExt as _;
use remote_agents::agent::model::{LanguageModel, ModelError, ModelEvent, ModelRequest};
use remote_agents::provider::{AnthropicModel, OpenAiModel};
use remote_agents::transport::Fetch;

use super::input::{Answering, Still, choice, cuts, now, owned};

type Said = Vec<Result<ModelEvent, ModelError>>;
type Make = fn(Rc<dyn Fetch>) -> Rc<dyn LanguageModel>;

pub(crate) fn openai(data: &[u8]) {
    answer(data, |fetch| {
        let made = OpenAiModel::new(
            fetch,
            Still::shared(),
            "http://ai.test",
            Some("sk-secret"),
            "m",
        );
        Rc::new(made.unwrap())
    });
}

pub(crate) fn anthropic(data: &[u8]) {
    answer(data, |fetch| {
        let made = AnthropicModel::new(fetch, Still::shared(), "http://ai.test", "sk-secret", "m");
        Rc::new(made.unwrap())
    });
}

fn answer(data: &[u8], make: Make) {
    let (status, data) = choice(data, 8);
    let status = [200, 200, 200, 200, 400, 401, 429, 503][status];
    let whole = said(status, vec![owned(data)], make);
    in_order(&whole);
    for parts in cuts(data) {
        assert_eq!(said(status, parts, make), whole, "it depends on the cut");
    }
}

fn said(status: u16, parts: Vec<Bytes>, make: Make) -> Said {
    let model = make(Rc::new(Answering {
        status,
        content_type: "text/event-stream",
        parts,
    }));
    let request = ModelRequest {
        instructions: "".into(),
        messages: [].into(),
        tools: [].into(),
        output: None,
    };
    now(model.stream(request).collect())
}

/// What every reader of an answer relies on.
fn in_order(said: &Said) {
    let mut begun = BTreeSet::new();
    for (n, event) in said.iter().enumerate() {
        let is_last = n + 1 == said.len();
        match event {
            Ok(ModelEvent::ToolCallStart { index, .. }) => {
                assert!(begun.insert(*index), "call {index} begins twice");
            }
            Ok(ModelEvent::ToolCallDelta { index, .. } | ModelEvent::ToolCallEnd { index }) => {
                assert!(begun.contains(index), "call {index} did not begin");
            }
            Ok(ModelEvent::Stop(_)) => assert!(is_last, "something follows the end"),
            Ok(_) => {}
            Err(error) => {
                assert!(is_last, "something follows the failure");
                let text = format!("{error:?} {error}");
                for secret in ["sk-secret", "canary"] {
                    assert!(!text.contains(secret), "{text}");
                }
            }
        }
    }
    assert!(!said.is_empty(), "an answer has an end");
    let ends = matches!(said.last(), Some(Ok(ModelEvent::Stop(_)) | Err(_)));
    assert!(ends, "{:?} is no end", said.last());
}
