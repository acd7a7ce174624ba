//! Reading and writing the cells of a row.
//!
//! A cell that is not what its column promises is `invalid_stored_state` with table, key, column
//! and reason; what the cell holds is never told. JSON above the row limit goes to `ra_parts`.

use std::vec::IntoIter;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Database, SqlValue};
use crate::error::{Code, Error, Result};
use crate::protocol::ids::MAX_SAFE_INTEGER;

/// JSON up to this many bytes stays in its row. The platform's limit is 2 MB for all of a row.
pub(super) const INLINE_BYTES: usize = 1_500_000;

/// The largest part of a text that does not fit its row, in bytes.
const PART_BYTES: usize = 1_500_000;

/// A row whose first cell is its key and whose cells are taken in order.
pub(super) struct Row {
    table: &'static str,
    key: String,
    cells: IntoIter<SqlValue>,
}

impl Row {
    /// Wraps a row; its first cell is the key that errors name.
    pub(super) fn new(table: &'static str, cells: Vec<SqlValue>) -> Self {
        let mut cells = cells.into_iter();
        let key = match cells.next() {
            Some(SqlValue::Text(text)) => text,
            Some(SqlValue::Integer(number)) => number.to_string(),
            Some(SqlValue::Real(number)) => number.to_string(),
            Some(SqlValue::Null) | None => String::new(),
        };
        Self { table, key, cells }
    }

    /// The first row of an answer that always has one.
    pub(super) fn one(table: &'static str, rows: Vec<Vec<SqlValue>>) -> Result<Self> {
        match rows.into_iter().next() {
            Some(cells) => Ok(Self::new(table, cells)),
            None => Err(malformed(table, "", "", "there is no row")),
        }
    }

    /// The key as text.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// The error of a cell of this row.
    pub(super) fn malformed(&self, column: &str, reason: &str) -> Error {
        malformed(self.table, &self.key, column, reason)
    }

    /// The key as a number.
    pub(super) fn key_number(&self, column: &str) -> Result<u64> {
        self.key
            .parse()
            .map_err(|_| self.malformed(column, "not a whole number"))
    }

    /// The key through a parser of ours.
    pub(super) fn key_parsed<T>(
        &self,
        column: &str,
        parse: impl FnOnce(&str) -> Result<T>,
    ) -> Result<T> {
        parse(&self.key).map_err(|error| self.malformed(column, &error.message))
    }

    /// A non-negative integer below 2^53.
    pub(super) fn whole(&mut self, column: &str) -> Result<u64> {
        self.optional_whole(column)?
            .ok_or_else(|| self.malformed(column, "missing"))
    }

    /// A non-negative integer below 2^53, or NULL.
    pub(super) fn optional_whole(&mut self, column: &str) -> Result<Option<u64>> {
        match self.cells.next() {
            Some(SqlValue::Integer(number)) => match u64::try_from(number) {
                Ok(number) if number <= MAX_SAFE_INTEGER => Ok(Some(number)),
                _ => Err(self.malformed(column, "out of range")),
            },
            Some(SqlValue::Null) | None => Ok(None),
            Some(_) => Err(self.malformed(column, "not a whole number")),
        }
    }

    /// A text.
    pub(super) fn text(&mut self, column: &str) -> Result<String> {
        self.optional_text(column)?
            .ok_or_else(|| self.malformed(column, "missing"))
    }

    /// A text, or NULL.
    pub(super) fn optional_text(&mut self, column: &str) -> Result<Option<String>> {
        match self.cells.next() {
            Some(SqlValue::Text(text)) => Ok(Some(text)),
            Some(SqlValue::Null) | None => Ok(None),
            Some(_) => Err(self.malformed(column, "not a text")),
        }
    }

    /// A text through a parser of ours.
    pub(super) fn parsed<T>(
        &mut self,
        column: &str,
        parse: impl FnOnce(&str) -> Result<T>,
    ) -> Result<T> {
        let text = self.text(column)?;
        parse(&text).map_err(|error| self.malformed(column, &error.message))
    }

    /// A text that stands for one of a few values.
    pub(super) fn one_of<T>(
        &mut self,
        column: &str,
        value: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T> {
        let text = self.text(column)?;
        value(&text).ok_or_else(|| self.malformed(column, "an unknown value"))
    }

    /// JSON of any size, or NULL.
    pub(super) fn optional_json<T: DeserializeOwned>(
        &mut self,
        database: &dyn Database,
        column: &str,
    ) -> Result<Option<T>> {
        let Some(cell) = self.optional_text(column)? else {
            return Ok(None);
        };
        let text = self.whole_text(database, column, cell)?;
        serde_json::from_str(&text).map(Some).map_err(|error| {
            // The words of the parser may quote the value; its place says enough.
            let reason = format!(
                "not the JSON it should be, at line {} column {}",
                error.line(),
                error.column()
            );
            self.malformed(column, &reason)
        })
    }

    /// JSON of any size.
    pub(super) fn json<T: DeserializeOwned>(
        &mut self,
        database: &dyn Database,
        column: &str,
    ) -> Result<T> {
        self.optional_json(database, column)?
            .ok_or_else(|| self.malformed(column, "missing"))
    }

    /// The whole text that a cell stands for.
    pub(super) fn whole_text(
        &self,
        database: &dyn Database,
        column: &str,
        cell: String,
    ) -> Result<String> {
        let Some(count) = cell.strip_prefix('@') else {
            return Ok(cell);
        };
        let parts = database.query(
            "SELECT body FROM ra_parts WHERE owner = ? ORDER BY part",
            &[SqlValue::Text(owner(self.table, &self.key, column))],
        )?;
        if parts.len().to_string() != count {
            return Err(self.malformed(column, "parts of the text are missing"));
        }
        let mut text = String::new();
        for cell in parts.into_iter().flatten() {
            match cell {
                SqlValue::Text(part) => text.push_str(&part),
                _ => return Err(self.malformed(column, "a part is not a text")),
            }
        }
        Ok(text)
    }
}

/// Where a text of any size is kept.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) table: &'static str,
    pub(super) key: &'a str,
    pub(super) column: &'static str,
}

impl Place<'_> {
    /// Keeps `text` and gives what to put in the cell: itself, or a mark when it is above `inline`
    /// bytes and went to `ra_parts`. What was kept here before is removed.
    pub(super) fn keep(
        self,
        database: &dyn Database,
        text: String,
        inline: usize,
    ) -> Result<SqlValue> {
        self.clear(database)?;
        if text.len() <= inline {
            return Ok(SqlValue::Text(text));
        }
        let mut rest = text.as_str();
        let mut parts = 0;
        while !rest.is_empty() {
            let (part, tail) = rest.split_at(rest.floor_char_boundary(PART_BYTES));
            let values = [
                SqlValue::Text(owner(self.table, self.key, self.column)),
                integer(parts)?,
                SqlValue::Text(part.to_owned()),
            ];
            database.query(
                "INSERT INTO ra_parts (owner, part, body) VALUES (?, CAST(? AS INTEGER), ?)",
                &values,
            )?;
            parts += 1;
            rest = tail;
        }
        Ok(SqlValue::Text(format!("@{parts}")))
    }

    /// Keeps a value as JSON. See [`Place::keep`].
    pub(super) fn keep_json(
        self,
        database: &dyn Database,
        value: &impl Serialize,
    ) -> Result<SqlValue> {
        self.keep(database, to_json(value)?, INLINE_BYTES)
    }

    /// Removes what `ra_parts` has for this place.
    pub(super) fn clear(self, database: &dyn Database) -> Result<()> {
        let owner = SqlValue::Text(owner(self.table, self.key, self.column));
        database
            .query("DELETE FROM ra_parts WHERE owner = ?", &[owner])
            .map(drop)
    }
}

/// Removes what `ra_parts` has for all rows of a table.
pub(super) fn clear_table(database: &dyn Database, table: &'static str) -> Result<()> {
    // `0` is the character after `/`: the range is every owner that begins with the table.
    let range = [
        SqlValue::Text(format!("{table}/")),
        SqlValue::Text(format!("{table}0")),
    ];
    database
        .query(
            "DELETE FROM ra_parts WHERE owner >= ? AND owner < ?",
            &range,
        )
        .map(drop)
}

fn owner(table: &str, key: &str, column: &str) -> String {
    format!("{table}/{column}/{key}")
}

/// The error of a cell that is not what its column promises.
pub(super) fn malformed(table: &str, key: &str, column: &str, reason: &str) -> Error {
    let at = match (key, column) {
        ("", "") => table.to_owned(),
        ("", _) => format!("{table}.{column}"),
        _ => format!("{table}.{column}, key {key}"),
    };
    Error::new(
        Code::InvalidStoredState,
        format!("A stored row cannot be read ({at}): {reason}."),
    )
}

/// A number as a parameter.
pub(super) fn integer(number: u64) -> Result<SqlValue> {
    match i64::try_from(number) {
        Ok(signed) if number <= MAX_SAFE_INTEGER => Ok(SqlValue::Integer(signed)),
        _ => Err(Error::internal("a number to store is not below 2^53")),
    }
}

/// A text as a parameter.
pub(super) fn text(text: impl Into<String>) -> SqlValue {
    SqlValue::Text(text.into())
}

/// A text or NULL as a parameter.
pub(super) fn optional(text: Option<String>) -> SqlValue {
    text.map_or(SqlValue::Null, SqlValue::Text)
}

/// A value as JSON text.
pub(super) fn to_json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| Error::internal(format!("a value cannot be stored as JSON: {error}")))
}
