//! Documents, passages, outlines and projections.

use super::*;

#[test]
fn passages_are_slices_that_leave_out_no_word() {
    for seed in 1..20 {
        for document in wild_documents(seed) {
            let text = document.text.as_str();
            let mut behind = 0;
            for piece in passages::split(text) {
                assert!(piece.chars().count() <= passages::LONGEST);
                assert_eq!(piece.trim(), piece);
                let at = piece.as_ptr() as usize - text.as_ptr() as usize;
                assert_eq!(
                    &text[at..at + piece.len()],
                    piece,
                    "a passage is a slice of its text"
                );
                let skipped = &text[behind..at];
                let is_heading = skipped.contains("# ");
                assert!(
                    is_heading || !skipped.chars().any(char::is_alphanumeric),
                    "{skipped:?} was lost"
                );
                behind = at + piece.len();
            }
        }
    }
}

#[test]
fn sentences_stay_whole() {
    let text = "# Boats\n\nThe first boat is red and was built in the year of the flood, by hand. The second boat, \
                \"the blue one.\" is younger and much faster than any other boat in the harbour! Version 1.5 is old.\n\n- a list item\n- another\n";
    assert_eq!(
        passages::split(text),
        [
            "The first boat is red and was built in the year of the flood, by hand.\u{20}The second boat, \
             \"the blue one.\" is younger and much faster than any other boat in the harbour!",
            "Version 1.5 is old.",
            "- a list item",
            "- another",
        ]
    );
    assert_eq!(passages::split("# Only a heading"), ["# Only a heading"]);
    assert_eq!(passages::split(""), Vec::<&str>::new());
}

#[test]
fn any_text_can_be_searched_for() {
    let database = Memory::new();
    let documents = wild_documents(7);
    corpus::store(&database, &documents).unwrap();
    passages::index(&database, &documents).unwrap();
    let long = "word ".repeat(5000) + &"x".repeat(5000);
    let queries = [
        "",
        " ",
        "\"",
        "\"\"\"",
        "'",
        "a AND",
        "OR",
        "NOT",
        "NEAR(a b, 2)",
        "NEAR",
        "text : ship",
        "document: cjk",
        "{text pairs}: x",
        "^ship",
        "ship*",
        "*",
        "(",
        ")",
        "((((",
        "-",
        "--",
        "; DROP TABLE passages",
        "ship\" OR \"x",
        "\u{0}",
        "🚢",
        "👩‍👩‍👧",
        "e\u{301}",
        "\u{301}",
        "港",
        "港口",
        "ﬁ",
        "ß",
        "İ",
        "²",
        "\u{202e}",
        "+",
        "a+b",
        "%",
        "_",
        "\\",
        "`",
        "[]",
        "?",
        "?1",
        ":x",
        "@x",
        "$x",
        &long,
    ];
    for query in queries {
        let found =
            passages::search(&database, query, 5).unwrap_or_else(|e| panic!("{query:?}: {e:?}"));
        assert!(found.len() <= 5);
        for quotation in &found {
            assert_verbatim(&[(&quotation.document_id, &quotation.quote)], &documents);
        }
        if passages::match_query(query).is_none() {
            assert_eq!(found, []);
        }
    }
    let ids = |query| -> Vec<String> {
        passages::search(&database, query, 3)
            .unwrap()
            .into_iter()
            .map(|found| found.document_id)
            .collect()
    };
    assert!(
        ids("的船很").contains(&"cjk".to_owned()),
        "scripts without spaces are searched by pairs"
    );
    assert!(!ids("港").is_empty(), "and by a lone character");
    assert!(!ids("sail").is_empty(), "and words by their stem");
    assert_eq!(ids("zebra quantum"), Vec::<String>::new());
}

#[test]
fn what_matches_best_comes_first_and_once() {
    let text = |id: &str, text: &str| Document {
        id: id.into(),
        title: "t".into(),
        text: text.into(),
    };
    let documents = [
        text("a", "The harbour is old."),
        text(
            "b",
            "Cargo ships in the harbour carry grain.\n\nCargo ships in the harbour carry grain.",
        ),
        text("c", "Nothing to see."),
    ];
    let database = Memory::new();
    corpus::store(&database, &documents).unwrap();
    passages::index(&database, &documents).unwrap();
    let found =
        passages::search(&database, "Which cargo do ships in the harbour carry?", 5).unwrap();
    let ids: Vec<&str> = found
        .iter()
        .map(|quotation| quotation.document_id.as_str())
        .collect();
    assert_eq!(ids, ["b", "a"]);
    assert_eq!(found[0].quote, "Cargo ships in the harbour carry grain.");
}

#[test]
fn a_topic_becomes_two_to_six_questions() {
    let corpus = "Ships carry grain to Riga. Ships carry coal to Malta. Old sails rot. Ships need anchors, and anchors rust.";
    let long = "word ".repeat(3000);
    let many = "one, two, three, four, five, six, seven, eight";
    let topics = [
        "",
        " ",
        "🚢",
        "ships",
        "Ships and sails",
        "How do ships carry grain, and why do sails rot?",
        "zebra",
        "船",
        "港口的船，谷物。",
        "?!",
        "the of and",
        "\"quoted\" 'it'",
        "a\r\nb\tc",
        "\u{0}",
        many,
        &long,
    ];
    for texts in [
        vec![corpus],
        vec![],
        vec![""],
        vec!["港口的船很大。船很多。"],
    ] {
        for topic in topics {
            let questions = outline::questions(topic, &texts);
            assert!(
                (2..=6).contains(&questions.len()),
                "{topic:?} → {questions:?}"
            );
            assert!(
                questions
                    .iter()
                    .all(|question| !question.trim().is_empty() && question.chars().count() <= 300)
            );
            let distinct: std::collections::HashSet<_> = questions.iter().collect();
            assert_eq!(distinct.len(), questions.len(), "{questions:?}");
        }
    }
    assert_eq!(
        outline::questions("How do ships carry grain, and why do sails rot?", &[corpus]),
        ["How do ships carry grain", "why do sails rot"]
    );
    assert_eq!(
        outline::questions("ships", &[corpus])[..2],
        ["ships", "ships: carry"]
    );
    assert_eq!(
        outline::questions("zebra", &[corpus]),
        ["zebra", "More about zebra"]
    );
    assert!(
        outline::questions(many, &[])[5].contains("eight"),
        "nothing of a long topic is lost"
    );
}

#[test]
fn malformed_documents_are_refused_by_field() {
    let cases = [
        (json!("text"), "state.documents"),
        (json!(null), "state.documents"),
        (json!({ "id": "a" }), "state.documents"),
        (json!([1]), "state.documents[0]"),
        (
            json!([{ "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "", "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": 5, "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "x".repeat(201), "title": "t", "text": "x" }]),
            "state.documents[0].id",
        ),
        (
            json!([{ "id": "a", "text": "x" }]),
            "state.documents[0].title",
        ),
        (
            json!([{ "id": "a", "title": "t" }]),
            "state.documents[0].text",
        ),
        (
            json!([{ "id": "a", "title": "t", "text": "x" }, { "id": "a", "title": "t", "text": "y" }]),
            "state.documents[1].id",
        ),
    ];
    for agent in ["planner", "thread-researcher"] {
        for (documents, field) in &cases {
            let state = json!({ "documents": documents })
                .as_object()
                .unwrap()
                .clone();
            let error = Session::start(agents().find(agent).unwrap(), "ships", state)
                .err()
                .expect("a refusal");
            assert_eq!(
                (error.code, error.field.as_deref()),
                (Code::ValidationError, Some(*field))
            );
        }
    }
}

#[test]
fn the_public_sees_counts_and_units() {
    let state = json!({
        "phase": "researching", "topic": "x", "extra": 1,
        "threads": [{ "id": "t1", "question": "q", "status": "done" }],
        "findings": [{ "threadId": "t1", "documentId": "a", "quote": "q", "note": "n" }, { "threadId": "t1", "documentId": "a", "quote": "r" }],
    });
    assert_eq!(
        projection::project_state("planner", &state),
        json!({ "phase": "researching", "threadCount": 1, "findingCount": 2 })
    );
    let unknown = json!({ "phase": "unknown", "threadCount": 0, "findingCount": 0 });
    for other in [
        json!(null),
        json!({}),
        json!({ "phase": "x" }),
        json!([]),
        json!({ "phase": "done", "topic": 1 }),
    ] {
        assert_eq!(projection::project_state("planner", &other), unknown);
    }
    assert_eq!(
        projection::project_state("thread-researcher", &state),
        unknown
    );
    for (total, units) in [(0, 0), (1, 1), (1000, 1), (1001, 2)] {
        let rollup = json!({ "sessionId": "s", "tokens": { "total": total }, "byModel": { "m": { "total": total } } });
        assert_eq!(
            projection::project_usage(&rollup),
            json!({ "billingUnits": units })
        );
    }
    assert_eq!(
        projection::project_usage(&json!("x")),
        json!({ "billingUnits": 0 })
    );
}
