//! What the log holds, without reading it, and how its front is dropped.
//!
//! Sizes come from the two ends of the log alone. A trim never takes the newest row: its number is
//! what keeps the next one from being issued twice.

use super::{TABLES, table_of, unpack_body};
use crate::error::{Error, Result};
use crate::protocol::ids::Sequence;
use crate::store::rows::{INLINE_BYTES, Row, integer, text};
use crate::store::{Database, LogSpan, LogStats};

use super::tail::Head;

/// The oldest rows, from the front on.
const OLDEST: &str = "SELECT first_sequence, 0 AS place, last_sequence, bytes, start_byte, committed_at
    FROM ra_chunks
    UNION ALL SELECT first_sequence, 1, last_sequence, bytes, start_byte, committed_at FROM ra_tail_0
    UNION ALL SELECT first_sequence, 2, last_sequence, bytes, start_byte, committed_at FROM ra_tail_1
    ORDER BY first_sequence LIMIT CAST(? AS INTEGER)";

/// What the log holds, and its oldest rows, `spans` of them at most.
pub(in crate::store) fn stats(database: &dyn Database, spans: usize) -> Result<LogStats> {
    let head = Head::read(database)?;
    let Some(newest) = head.newest else {
        return Ok(LogStats::default());
    };
    let limit = u64::try_from(spans.max(1)).unwrap_or(u64::MAX);
    let mut begin = None;
    let mut front = Vec::new();
    for cells in database.query(OLDEST, &[integer(limit)?])? {
        let table = table_of(cells.get(1));
        let mut row = Row::new(table, cells);
        let first = row.key_number("first_sequence")?;
        row.whole("place")?;
        let last = row.whole("last_sequence")?;
        let bytes = row.whole("bytes")?;
        let start_byte = row.whole("start_byte")?;
        let committed_at = row.whole("committed_at")?;
        begin.get_or_insert((first, start_byte));
        front.push(LogSpan {
            first,
            last,
            bytes: bytes.saturating_add(1),
            committed_at,
        });
    }
    front.truncate(spans);
    let (oldest, first_byte) = begin.unwrap_or((newest, head.next_byte));
    Ok(LogStats {
        oldest,
        newest,
        bytes: head.next_byte.saturating_sub(first_byte),
        front,
    })
}

/// Drops every chunk below `floor`: whole rows, and the front of the row in which it lies.
pub(in crate::store) fn trim(database: &dyn Database, floor: Sequence) -> Result<()> {
    let newest = Head::read(database)?.newest;
    if newest.is_none_or(|newest| floor > newest) {
        return Err(Error::internal(format!(
            "the log cannot be trimmed up to {floor}: its newest chunk stays"
        )));
    }
    cut(database, floor)?;
    let below = integer(floor)?;
    // Parts exist for rows above the inline limit alone.
    let limit = u64::try_from(INLINE_BYTES).unwrap_or(u64::MAX);
    database.query(
        "DELETE FROM ra_parts WHERE owner IN (
            SELECT 'ra_chunks/body/' || first_sequence FROM ra_chunks
            WHERE first_sequence < CAST(?1 AS INTEGER) AND bytes > CAST(?2 AS INTEGER))",
        &[below.clone(), integer(limit)?],
    )?;
    for statement in [
        "DELETE FROM ra_chunks WHERE first_sequence < CAST(? AS INTEGER)",
        "DELETE FROM ra_tail_0 WHERE first_sequence < CAST(? AS INTEGER)",
        "DELETE FROM ra_tail_1 WHERE first_sequence < CAST(? AS INTEGER)",
    ] {
        database.query(statement, std::slice::from_ref(&below))?;
    }
    Ok(())
}

/// Takes from the row in which `floor` lies what is before it.
fn cut(database: &dyn Database, floor: Sequence) -> Result<()> {
    let places = [
        (
            "SELECT first_sequence, last_sequence, bytes, start_byte, body FROM ra_chunks
             WHERE first_sequence < CAST(?1 AS INTEGER) AND last_sequence >= CAST(?1 AS INTEGER)
             ORDER BY first_sequence DESC LIMIT 1",
            "UPDATE ra_chunks SET first_sequence = CAST(? AS INTEGER), bytes = CAST(? AS INTEGER),
                start_byte = CAST(? AS INTEGER), body = ? WHERE first_sequence = CAST(? AS INTEGER)",
        ),
        (
            "SELECT first_sequence, last_sequence, bytes, start_byte, body FROM ra_tail_0
             WHERE first_sequence < CAST(?1 AS INTEGER) AND last_sequence >= CAST(?1 AS INTEGER)
             ORDER BY first_sequence DESC LIMIT 1",
            "UPDATE ra_tail_0 SET first_sequence = CAST(? AS INTEGER), bytes = CAST(? AS INTEGER),
                start_byte = CAST(? AS INTEGER), body = ? WHERE first_sequence = CAST(? AS INTEGER)",
        ),
        (
            "SELECT first_sequence, last_sequence, bytes, start_byte, body FROM ra_tail_1
             WHERE first_sequence < CAST(?1 AS INTEGER) AND last_sequence >= CAST(?1 AS INTEGER)
             ORDER BY first_sequence DESC LIMIT 1",
            "UPDATE ra_tail_1 SET first_sequence = CAST(? AS INTEGER), bytes = CAST(? AS INTEGER),
                start_byte = CAST(? AS INTEGER), body = ? WHERE first_sequence = CAST(? AS INTEGER)",
        ),
    ];
    for (table, (find, update)) in TABLES.into_iter().zip(places) {
        let found = database.query(find, &[integer(floor)?])?;
        let Some(cells) = found.into_iter().next() else {
            continue;
        };
        let mut row = Row::new(table, cells);
        let first = row.key_number("first_sequence")?;
        let last = row.whole("last_sequence")?;
        let bytes = row.whole("bytes")?;
        let start_byte = row.whole("start_byte")?;
        let mut lines = unpack_body(database, &mut row, first, last)?;
        let mut kept = Vec::new();
        while let Some((sequence, line)) = lines.take() {
            if sequence >= floor {
                kept.push(line.to_owned());
            }
        }
        let body = kept.join("\n");
        let left = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let begins = start_byte.saturating_add(bytes.saturating_sub(left));
        let values = [
            integer(floor)?,
            integer(left)?,
            integer(begins)?,
            text(body),
            integer(first)?,
        ];
        database.query(update, &values)?;
    }
    Ok(())
}
