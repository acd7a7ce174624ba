//! The documents that a caller sends along: kept in a table of the object, handed down to the
//! research.
//!
//! They never stay in a state. Ids are unique; what is malformed is refused before anything is
//! stored.

use std::collections::HashSet;

use remote_agents::protocol::BODY_LIMIT;
use remote_agents::store::{Database, SqlValue};
use remote_agents::{Code, Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The state field that documents come in by.
pub const DOCUMENTS: &str = "documents";

/// The largest set of documents, in bytes of JSON: they are handed down in a body of their own,
/// which has to fit the same limit.
pub const LIMIT: usize = BODY_LIMIT;

/// The longest id of a document, in characters.
const LONGEST_ID: usize = 200;

/// A document to research in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Unique among the documents of a session.
    pub id: String,
    /// What it is called.
    pub title: String,
    /// All of its text.
    pub text: String,
}

/// Takes `documents` out of a start's state; none when there are none.
///
/// # Errors
/// `VALIDATION_ERROR` naming the field, e.g. `state.documents[2].id`; `PAYLOAD_TOO_LARGE` above
/// [`LIMIT`].
pub fn take(state: &mut Map<String, Value>) -> Result<Vec<Document>> {
    let items = match state.remove(DOCUMENTS) {
        None => return Ok(Vec::new()),
        Some(Value::Array(items)) => items,
        Some(_) => {
            return Err(Error::invalid(
                "state.documents",
                "documents must be a list of {id, title, text}.",
            ));
        }
    };
    let mut ids = HashSet::new();
    let mut documents = Vec::with_capacity(items.len());
    for (i, item) in items.into_iter().enumerate() {
        let Value::Object(mut item) = item else {
            let message = "A document must be an object {id, title, text}.";
            return Err(Error::invalid(format!("state.documents[{i}]"), message));
        };
        let mut text = |name: &str| match item.remove(name) {
            Some(Value::String(text)) => Ok(text),
            _ => {
                let field = format!("state.documents[{i}].{name}");
                Err(Error::invalid(
                    field,
                    format!("A document's {name} must be a text."),
                ))
            }
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
    let size = serde_json::to_vec(&documents).map_or(usize::MAX, |json| json.len());
    if size > LIMIT {
        let mut error = Error::new(
            Code::PayloadTooLarge,
            "The documents are too large to be handed on; send fewer.",
        )
        .with_detail(format!(
            "{size} bytes of JSON; at most {LIMIT} can be handed on"
        ));
        error.field = Some("state.documents".into());
        return Err(error);
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
    // Three parameters a row, of a hundred that a statement may have.
    for rows in documents.chunks(33) {
        let places = vec!["(?, ?, ?)"; rows.len()].join(", ");
        let parameters: Vec<SqlValue> = rows
            .iter()
            .flat_map(|row| {
                [&row.id, &row.title, &row.text].map(|text| SqlValue::Text(text.clone()))
            })
            .collect();
        database.query(
            &format!("INSERT INTO documents (id, title, text) VALUES {places}"),
            &parameters,
        )?;
    }
    Ok(())
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
    let document = |row: Vec<SqlValue>| match <[SqlValue; 3]>::try_from(row) {
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
    };
    rows.into_iter().map(document).collect()
}
