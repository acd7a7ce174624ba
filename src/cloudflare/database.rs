//! A Durable Object's SQLite as a [`Database`].
//!
//! Writes outside [`Database::transaction`] are not atomic together on this platform, so whoever
//! writes more than one row opens one. Statements and rows are read eagerly: a cursor here is live
//! and must not outlive the turn.

use std::cell::RefCell;
use std::collections::HashMap;

use js_sys::{Array, ArrayBuffer, JsString, Uint8Array};
use wasm_bindgen::{JsCast as _, JsValue};

use super::ffi::{self, RawContext, RawCursor, RawSql, RawStorage, RawTextEncoder};
use crate::error::{Error, Result};
use crate::protocol::ids::MAX_SAFE_INTEGER;
use crate::store::{Database, SqlValue};

/// Texts of this many UTF-16 units and more are copied out of JavaScript in one go.
const LONG_TEXT: u32 = 64;

/// This many statements are kept as the platform's own strings.
const STATEMENTS: usize = 256;

/// Where a statement's text stands, and how long it is.
type PlaceOfText = (usize, usize);

thread_local! {
    static ENCODER: Option<RawTextEncoder> = RawTextEncoder::new().ok();
    /// Statements by where their text stands: the platform knows a string again without looking at
    /// it, and so finds what it has compiled. The text is compared, since a place may be used anew.
    static KNOWN: RefCell<HashMap<PlaceOfText, (Box<str>, JsString)>> = RefCell::default();
}

fn statement(sql: &str) -> JsString {
    KNOWN.with_borrow_mut(|known| {
        let place = (sql.as_ptr().addr(), sql.len());
        if let Some((text, statement)) = known.get(&place)
            && **text == *sql
        {
            return statement.clone();
        }
        if known.len() >= STATEMENTS {
            known.clear();
        }
        let statement = JsString::from(sql);
        known.insert(place, (sql.into(), statement.clone()));
        statement
    })
}

/// The SQLite of one Durable Object.
///
/// The platform binds every number as a double. A whole one becomes an integer again in a column
/// of INTEGER affinity and in every comparison; in an expression that looks at the type itself
/// (`json_object`, `||`, `typeof`, division) it needs `CAST(? AS INTEGER)`.
#[derive(Clone, Debug)]
pub struct DurableDatabase {
    storage: RawStorage,
    sql: RawSql,
}

impl DurableDatabase {
    /// The database of an object that has no [`ObjectHost`](super::ObjectHost).
    ///
    /// # Errors
    /// `INTERNAL` when the object's class is not SQLite-backed.
    pub fn of(state: &worker::State) -> Result<Self> {
        let context: RawContext = JsValue::from(state.as_raw()).unchecked_into();
        let storage = context
            .storage()
            .map_err(|thrown| failed("storage", &thrown))?;
        Self::new(storage)
    }

    /// The database of the object with this storage.
    ///
    /// # Errors
    /// `INTERNAL` when the object's class is not SQLite-backed.
    pub(super) fn new(storage: RawStorage) -> Result<Self> {
        let sql = storage
            .sql()
            .map_err(|thrown| failed("the object has no SQLite", &thrown))?;
        Ok(Self { storage, sql })
    }
}

impl DurableDatabase {
    fn exec(&self, sql: &str, parameters: &[SqlValue]) -> Result<RawCursor> {
        let statement = statement(sql);
        let cursor = match parameters {
            [] => self.sql.exec_0(&statement),
            [a] => self.sql.exec_1(&statement, &to_js(a)?),
            [a, b] => self.sql.exec_2(&statement, &to_js(a)?, &to_js(b)?),
            [a, b, c] => self
                .sql
                .exec_3(&statement, &to_js(a)?, &to_js(b)?, &to_js(c)?),
            [a, b, c, d, e] => self.sql.exec_5(
                &statement,
                &to_js(a)?,
                &to_js(b)?,
                &to_js(c)?,
                &to_js(d)?,
                &to_js(e)?,
            ),
            _ => {
                let bindings = Array::new();
                for parameter in parameters {
                    bindings.push(&to_js(parameter)?);
                }
                self.sql.exec(&statement, bindings)
            }
        };
        cursor.map_err(|thrown| failed("SQL", &thrown))
    }
}

impl Database for DurableDatabase {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        let cursor = self.exec(sql, parameters)?;
        let rows = cursor.raw().and_then(|rows| rows.to_array());
        let rows = rows.map_err(|thrown| failed("SQL", &thrown))?;
        rows.iter()
            .map(|row| {
                row.unchecked_into::<Array>()
                    .iter()
                    .map(|value| from_js(&value))
                    .collect()
            })
            .collect()
    }

    fn write(&self, sql: &str, parameters: &[SqlValue]) -> Result<bool> {
        let rows = self.exec(sql, parameters)?.rows_written();
        let rows = rows.map_err(|thrown| failed("SQL", &thrown))?;
        Ok(rows > 0.0)
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let mut refusal = None;
        let outcome = self.storage.transaction_sync(&mut || match work() {
            Ok(()) => Ok(JsValue::UNDEFINED),
            Err(error) => {
                // A thrown value is what rolls back; the typed error stays on this side.
                refusal = Some(error);
                Err(JsValue::from_str("rolled back"))
            }
        });
        match (refusal, outcome) {
            (Some(error), _) => Err(error),
            (None, Ok(_)) => Ok(()),
            (None, Err(thrown)) => Err(failed("transaction", &thrown)),
        }
    }
}

fn failed(what: &str, thrown: &JsValue) -> Error {
    Error::internal(format!("{what}: {}", ffi::message(thrown)))
}

/// Numbers that a double holds exactly; the cast is lossless within this bound.
fn is_exact(number: f64) -> bool {
    number.fract() == 0.0 && number.abs() <= MAX_SAFE_INTEGER as f64
}

fn to_js(value: &SqlValue) -> Result<JsValue> {
    match value {
        SqlValue::Null => Ok(JsValue::NULL),
        SqlValue::Integer(number) if number.unsigned_abs() <= MAX_SAFE_INTEGER => {
            Ok(JsValue::from_f64(*number as f64))
        }
        SqlValue::Integer(number) => Err(Error::internal(format!(
            "SQL: the integer {number} is not below 2^53"
        ))),
        SqlValue::Real(number) => Ok(JsValue::from_f64(*number)),
        SqlValue::Text(text) => Ok(JsValue::from_str(text)),
    }
}

/// The text of a cell. `as_string` copies it character by character, which for a row of chunks costs
/// more than reading it from the database did.
fn long_text(value: &JsValue) -> Option<String> {
    let text: &JsString = value
        .dyn_ref()
        .filter(|text: &&JsString| text.length() >= LONG_TEXT)?;
    let bytes = ENCODER.with(|encoder| encoder.as_ref()?.encode(text).ok())?;
    String::from_utf8(bytes.to_vec()).ok()
}

fn from_js(value: &JsValue) -> Result<SqlValue> {
    if let Some(number) = value.as_f64() {
        return Ok(if is_exact(number) {
            SqlValue::Integer(number as i64)
        } else {
            SqlValue::Real(number)
        });
    }
    if let Some(text) = long_text(value).or_else(|| value.as_string()) {
        return Ok(SqlValue::Text(text));
    }
    if value.is_null() {
        return Ok(SqlValue::Null);
    }
    let bytes = value
        .dyn_ref::<ArrayBuffer>()
        .map(|buffer| Uint8Array::new(buffer).to_vec());
    match bytes.map(String::from_utf8) {
        Some(Ok(text)) => Ok(SqlValue::Text(text)),
        _ => Err(Error::internal(
            "SQL: a row holds a value that is neither text, number nor NULL",
        )),
    }
}
