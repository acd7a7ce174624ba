//! The documents of a session: taken out of the incoming state into a table of the object.
//!
//! Documents never stay in a state. Without any, the project's own documentation is read.

use std::collections::HashSet;

use remote_agents::store::{Database, SqlValue};
use remote_agents::{Code, Error, Result};
use serde_json::{Map, Value};

use crate::state::Document;

/// The state field that documents come in by.
pub const DOCUMENTS: &str = "documents";

/// The longest id of a document, in characters.
const LONGEST_ID: usize = 200;

/// Rows of one insert; three parameters each, of a hundred that a statement may have.
const ROWS: usize = 33;

const OWN: [(&str, &str, &str); 4] = [
    (
        "README.md",
        "What remote-agents is",
        include_str!("../../README.md"),
    ),
    (
        "ARCHITECTURE.md",
        "How remote-agents is built",
        include_str!("../../ARCHITECTURE.md"),
    ),
    (
        "CONTRIBUTING.md",
        "How to work on remote-agents",
        include_str!("../../CONTRIBUTING.md"),
    ),
    (
        "CHANGELOG.md",
        "What changed in remote-agents",
        include_str!("../../CHANGELOG.md"),
    ),
];

/// Takes `documents` out of a start's state; the project's own documentation when there are none.
///
/// # Errors
/// `VALIDATION_ERROR` naming the field, e.g. `state.documents[2].id`.
pub fn take(state: &mut Map<String, Value>) -> Result<Vec<Document>> {
    let items = match state.remove(DOCUMENTS) {
        None => Vec::new(),
        Some(Value::Array(items)) => items,
        Some(_) => {
            return Err(Error::invalid(
                "state.documents",
                "documents must be a list of {id, title, text}.",
            ));
        }
    };
    if items.is_empty() {
        let own = OWN.iter().map(|(id, title, text)| Document {
            id: (*id).to_owned(),
            title: (*title).to_owned(),
            text: (*text).to_owned(),
        });
        return Ok(own.collect());
    }
    let mut ids = HashSet::new();
    let mut documents = Vec::with_capacity(items.len());
    for (i, item) in items.into_iter().enumerate() {
        let Value::Object(mut item) = item else {
            return Err(Error::invalid(
                format!("state.documents[{i}]"),
                "A document must be an object {id, title, text}.",
            ));
        };
        let mut text = |name: &str| match item.remove(name) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(Error::invalid(
                format!("state.documents[{i}].{name}"),
                format!("A document's {name} must be a text."),
            )),
        };
        let document = Document {
            id: text("id")?,
            title: text("title")?,
            text: text("text")?,
        };
        let field = || format!("state.documents[{i}].id");
        if document.id.trim().is_empty() || document.id.chars().count() > LONGEST_ID {
            return Err(Error::invalid(
                field(),
                format!("A document's id must be 1 to {LONGEST_ID} characters."),
            ));
        }
        if !ids.insert(document.id.clone()) {
            return Err(Error::invalid(
                field(),
                "A document's id must be unique among the documents.",
            ));
        }
        documents.push(document);
    }
    Ok(documents)
}

/// Writes the documents to the object's table, which is made when it is missing.
///
/// # Errors
/// What the database says.
pub fn store(database: &dyn Database, documents: &[Document]) -> Result<()> {
    database.query(
        "CREATE TABLE IF NOT EXISTS documents (position INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, title TEXT NOT NULL, text TEXT NOT NULL)",
        &[],
    )?;
    let rows = documents
        .iter()
        .map(|document| [&document.id, &document.title, &document.text].map(|text| text.as_str()));
    insert(
        database,
        "INSERT INTO documents (id, title, text) VALUES",
        rows,
    )
}

/// Inserts rows of three texts, as many at a time as a statement can take.
///
/// # Errors
/// What the database says.
pub fn insert<'a>(
    database: &dyn Database,
    into: &str,
    rows: impl Iterator<Item = [&'a str; 3]>,
) -> Result<()> {
    let mut parameters: Vec<SqlValue> = Vec::new();
    let write = |parameters: &mut Vec<SqlValue>| -> Result<()> {
        if !parameters.is_empty() {
            let places = vec!["(?, ?, ?)"; parameters.len() / 3].join(", ");
            database.query(&format!("{into} {places}"), parameters)?;
            parameters.clear();
        }
        Ok(())
    };
    for row in rows {
        parameters.extend(row.map(|text| SqlValue::Text(text.to_owned())));
        if parameters.len() >= ROWS.saturating_mul(3) {
            write(&mut parameters)?;
        }
    }
    write(&mut parameters)
}

/// All documents, in the order in which they came.
///
/// # Errors
/// What the database says.
pub fn load(database: &dyn Database) -> Result<Vec<Document>> {
    let rows = database.query(
        "SELECT id, title, text FROM documents ORDER BY position",
        &[],
    )?;
    rows.into_iter().map(document).collect()
}

/// One document.
///
/// # Errors
/// What the database says.
pub fn find(database: &dyn Database, id: &str) -> Result<Option<Document>> {
    let id = SqlValue::Text(id.to_owned());
    let rows = database.query("SELECT id, title, text FROM documents WHERE id = ?", &[id])?;
    rows.into_iter().next().map(document).transpose()
}

/// Whether a quote is a verbatim slice of the document that it names. A blank one is none.
///
/// # Errors
/// What the database says.
pub fn is_verbatim(database: &dyn Database, document_id: &str, quote: &str) -> Result<bool> {
    let document = find(database, document_id)?;
    Ok(!quote.trim().is_empty() && document.is_some_and(|document| document.text.contains(quote)))
}

fn document(row: Vec<SqlValue>) -> Result<Document> {
    match <[SqlValue; 3]>::try_from(row) {
        Ok(
            [
                SqlValue::Text(id),
                SqlValue::Text(title),
                SqlValue::Text(text),
            ],
        ) => Ok(Document { id, title, text }),
        _ => Err(Error::new(
            Code::InvalidStoredState,
            "A stored document cannot be read.",
        )
        .with_detail("table documents: expected three texts")),
    }
}
