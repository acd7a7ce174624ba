//! A declared output: handed in, said as text by a provider that is held to it, or missed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use remote_agents::agent::model::{ModelError, ModelEvent, ModelRequest};
use remote_agents::store::{MessageRecord, ToolOutcome};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::conversation::{hosting, looker, say};
use crate::support::{calls, in_world, scripted, text};

#[derive(Deserialize, JsonSchema)]
#[allow(dead_code)] // The schema is what it is for.
struct Finding {
    depth: u32,
}

type Answer = fn() -> Vec<Result<ModelEvent, ModelError>>;

/// Answers with each of these in turn, the last one again and again. What became of the session, and the
/// last message of each history that was sent.
async fn after(answers: &'static [Answer]) -> (Value, Vec<MessageRecord>) {
    let read: Rc<RefCell<Vec<MessageRecord>>> = Rc::default();
    let asked = read.clone();
    let next = Rc::new(Cell::new(0));
    let client = hosting(move || {
        let (next, asked) = (next.clone(), asked.clone());
        let model = scripted(move |request: &ModelRequest| {
            asked.borrow_mut().extend(request.messages.last().cloned());
            assert_eq!(request.output.as_ref().unwrap()["title"], "Finding");
            let at = next.replace(next.get() + 1);
            answers[at.min(answers.len() - 1)]()
        });
        looker(model, &Rc::default()).with_output::<Finding>()
    });
    let status = say(&client, "go").await;
    let read = read.borrow().clone();
    (status, read)
}

fn right() -> Vec<Result<ModelEvent, ModelError>> {
    calls(&[("c", "finish", json!({"depth": 3}))])
}

fn misfit() -> Vec<Result<ModelEvent, ModelError>> {
    calls(&[("c", "finish", json!({"depth": "deep"}))])
}

fn words() -> Vec<Result<ModelEvent, ModelError>> {
    text("It is deep.")
}

fn said(output: &str) -> Vec<Result<ModelEvent, ModelError>> {
    text(output)
}

#[test]
fn an_output_is_handed_in_or_said_as_text_that_is_such_json() {
    in_world(|| async {
        let answers: [&[Answer]; 3] = [
            &[right],
            &[|| said("{\"depth\": 3}")],
            // Neither JSON of another shape nor words are one; the model is told so.
            &[|| said("{\"depth\": -1}"), words, right],
        ];
        for answers in answers {
            let (status, _) = after(answers).await;
            assert_eq!(status["status"], "completed", "{status}");
            assert_eq!(status["output"], json!({"depth": 3}));
        }
    });
}

#[test]
fn a_missed_output_is_told_to_the_model_and_the_third_miss_fails_the_run() {
    in_world(|| async {
        let (status, read) = after(&[words, misfit, right]).await;
        assert_eq!(status["output"], json!({"depth": 3}), "{status}");
        let [
            _,
            MessageRecord::User { text },
            MessageRecord::Tool { outcome, .. },
        ] = &read[..]
        else {
            panic!("{read:?}")
        };
        assert!(text.contains("`finish`"), "{text}");
        let ToolOutcome { success, error, .. } = outcome;
        assert!(!success && error.is_some(), "{outcome:?}");

        let missing: [&[Answer]; 3] = [&[words], &[misfit], &[misfit, words]];
        for answers in missing {
            let (status, read) = after(answers).await;
            assert_eq!(status["status"], "failed");
            assert_eq!(status["errorCode"], "output_validation_failed");
            assert_eq!(read.len(), 3, "{read:?}");
        }
    });
}
