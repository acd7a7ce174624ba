//! Documents of every awkward size, up to the last byte that the mount takes.

use remote_agents::protocol::BODY_LIMIT;
use serde_json::{Value, json};

use crate::checks::quotes_are_verbatim;
use crate::library::few;
use crate::world::{Side, WRITER, World, in_world, whole};

fn body(documents: &[Value]) -> String {
    let (topic, _) = few();
    json!({ "sessionId": WRITER, "message": topic, "state": { "documents": documents } })
        .to_string()
}

/// Fills the last document until the body has this size.
fn filled(mut documents: Vec<Value>, size: usize) -> (String, Vec<Value>) {
    let missing = size - body(&documents).len();
    let last = documents.last_mut().unwrap();
    let text = last["text"].as_str().unwrap().to_owned() + &"x".repeat(missing);
    last["text"] = json!(text);
    let body = body(&documents);
    assert_eq!(body.len(), size);
    (body, documents)
}

async fn start(world: &World, body: String) -> (u16, Value) {
    whole(
        world
            .send(Side::Consumer, "POST", "/agents/writer/start", &[], body)
            .await,
    )
    .await
}

/// Runs the job with a body of exactly the limit, and sees one byte more refused.
fn at_the_limit(documents: Vec<Value>) {
    in_world(|world| async move {
        let (over, _) = filled(documents.clone(), BODY_LIMIT + 1);
        let (status, refused) = start(&world, over).await;
        assert_eq!(
            (status, &refused["code"]),
            (413, &json!("PAYLOAD_TOO_LARGE"))
        );
        assert_eq!(world.sessions(), []);

        let (body, documents) = filled(documents, BODY_LIMIT);
        let (status, answer) = start(&world, body).await;
        assert_eq!(status, 200, "{answer}");
        let status = world.rest().await;
        assert_eq!(status["status"], "completed", "{status:.2000}");
        assert!(
            quotes_are_verbatim(&status["output"], &documents) > 0,
            "{status:.2000}"
        );
    });
}

fn document(number: usize, text: String) -> Value {
    json!({ "id": format!("d{number}"), "title": "", "text": text })
}

#[test]
fn one_document_of_sentences() {
    let sentence = "Lighthouses stand on rocks.\r\n灯台 keeps the knots of the rope. ";
    at_the_limit(vec![document(
        0,
        sentence.repeat(BODY_LIMIT / 2 / sentence.len()),
    )]);
}

#[test]
fn thousands_of_documents() {
    let mut documents: Vec<Value> = (0..8000)
        .map(|n| document(n, format!("Knot {n}.")))
        .collect();
    documents.push(document(8000, "Lighthouses. ".into()));
    at_the_limit(documents);
}

#[test]
fn a_document_that_is_nearly_all_escapes() {
    // Each of these takes twice to six times its size in JSON.
    let noise = "\"\\\n\t\u{1}\u{8}".repeat(40_000);
    at_the_limit(vec![document(
        0,
        format!("Lighthouses and knots.{noise} Knots hold. "),
    )]);
}

#[test]
fn a_document_of_one_word_without_an_end() {
    at_the_limit(vec![document(0, "Lighthouses and knots. ".into())]);
}

#[test]
fn documents_of_nothing() {
    in_world(|world| async move {
        let documents = [document(0, String::new()), document(1, " \r\n\t".into())];
        assert_eq!(start(&world, body(&documents)).await.0, 200);
        let status = world.rest().await;
        assert_eq!(status["status"], "completed", "{status}");
        assert_eq!(quotes_are_verbatim(&status["output"], &documents), 0);
    });
}

#[test]
fn a_message_as_large_as_the_mount_takes() {
    for unit in ["lighthouses ", "灯", "x"] {
        in_world(move |world| async move {
            let (_, documents) = few();
            let make = |message: &str| {
                json!({ "sessionId": WRITER, "message": message, "state": { "documents": documents } }).to_string()
            };
            let mut message = String::from("knots and ");
            let each = make(unit).len() - make("").len();
            message.push_str(&unit.repeat((BODY_LIMIT - make(&message).len()) / each));
            let missing = BODY_LIMIT - make(&message).len();
            message.push_str(&"x".repeat(missing));
            let body = make(&message);
            assert_eq!(body.len(), BODY_LIMIT);
            let (status, answer) = start(&world, body).await;
            assert_eq!(status, 200, "{answer}");
            let status = world.rest().await;
            assert_eq!(status["status"], "completed", "{unit:?}: {status:.2000}");
            assert!(
                quotes_are_verbatim(&status["output"], &documents) > 0,
                "{unit:?}: {status:.2000}"
            );
        });
    }
}
