//! The chunk log: one row a commit, read in pages by sequence.
//!
//! `after` is exclusive and nobody adds or subtracts one elsewhere. A page never reads more of the
//! log than it returns, but for the rows at its two ends. Sections 4 and 7 of the contract.

use super::rows::{INLINE_BYTES, Place, Row, integer, malformed, text};
use super::{ChunkPage, Database, PageLimit, SqlValue};
use crate::error::{Error, Result};
use crate::protocol::chunk::RawChunk;
use crate::protocol::ids::{MAX_SAFE_INTEGER, Sequence};

/// A commit's chunks are split over rows of about this many bytes.
const ROW_BYTES: usize = 256 * 1024;

/// At most this many rows are looked at in one go.
const ROWS_AT_ONCE: usize = 512;

const TABLE: &str = "ra_chunks";

/// Appends chunks and notes the children that they announce.
pub(super) fn append(database: &dyn Database, first: Sequence, chunks: &[String]) -> Result<()> {
    if chunks.is_empty() {
        return Ok(());
    }
    follows_on(database, first)?;
    let mut next = first;
    let mut rest = chunks;
    while !rest.is_empty() {
        let (row, tail) = rest.split_at(fitting(rest));
        next = append_row(database, next, row)?;
        rest = tail;
    }
    chunks
        .iter()
        .filter(|chunk| chunk.contains("\"subagent_start\""))
        .try_for_each(|chunk| announce(database, chunk))
}

/// The chunks above `after`, up to and including `until`, within `limit`.
pub(super) fn page(
    database: &dyn Database,
    after: Sequence,
    until: Sequence,
    limit: PageLimit,
) -> Result<ChunkPage> {
    let mut page = ChunkPage::default();
    let until = until.min(MAX_SAFE_INTEGER);
    let mut bytes = 0;
    let mut reached = after;
    while reached < until && page.chunks.len() < limit.chunks && bytes <= limit.bytes {
        let left = PageLimit {
            chunks: limit.chunks.saturating_sub(page.chunks.len()),
            bytes: limit.bytes.saturating_sub(bytes),
        };
        let before = reached;
        for row in rows(database, reached, until, left)? {
            // A page may begin above `after` (the retention floor), but has no gap inside.
            if !page.chunks.is_empty() && row.first > reached.saturating_add(1) {
                let key = row.first.to_string();
                return Err(malformed(
                    TABLE,
                    &key,
                    "first_sequence",
                    "chunks are missing before it",
                ));
            }
            for (sequence, chunk) in (row.first..).zip(row.chunks) {
                if sequence <= reached || sequence > until {
                    continue;
                }
                if page.chunks.len() >= limit.chunks || bytes > limit.bytes {
                    return Ok(page);
                }
                bytes = bytes.saturating_add(chunk.len());
                page.chunks.push((sequence, chunk));
                reached = sequence;
            }
        }
        if reached == before {
            break;
        }
    }
    Ok(page)
}

/// Whether a chunk of the log announces this child with this type.
pub(super) fn announced(
    database: &dyn Database,
    sub_session_id: &str,
    agent_type: Option<&str>,
) -> Result<bool> {
    let found = database.query(
        "SELECT 1 FROM ra_announced WHERE sub_session_id = ?1 AND agent_type = coalesce(?2, agent_type)",
        &[text(sub_session_id), agent_type.map_or(SqlValue::Null, text)],
    )?;
    Ok(!found.is_empty())
}

/// Refuses a number that was issued before, and a gap.
fn follows_on(database: &dyn Database, first: Sequence) -> Result<()> {
    let newest = database.query(
        "SELECT first_sequence, last_sequence FROM ra_chunks ORDER BY first_sequence DESC LIMIT 1",
        &[],
    )?;
    let expected = match newest.into_iter().next() {
        Some(cells) => Row::new(TABLE, cells)
            .whole("last_sequence")?
            .saturating_add(1),
        None => first.max(1),
    };
    if first == expected {
        Ok(())
    } else {
        Err(Error::internal(format!(
            "chunks from sequence {first} on do not follow the log, whose next is {expected}"
        )))
    }
}

/// How many of the first chunks share a row: always one, more while they are small.
fn fitting(chunks: &[String]) -> usize {
    let mut bytes = 0usize;
    let small = chunks.iter().take_while(|chunk| {
        bytes = bytes.saturating_add(chunk.len());
        bytes <= ROW_BYTES
    });
    small.count().max(1)
}

fn append_row(database: &dyn Database, first: Sequence, chunks: &[String]) -> Result<Sequence> {
    if chunks.iter().any(|chunk| !looks_like_a_chunk(chunk)) {
        return Err(Error::internal("a chunk must be a JSON object on one line"));
    }
    let count = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
    let next = first.saturating_add(count);
    let body = chunks.join("\n");
    let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
    let key = first.to_string();
    let place = Place {
        table: TABLE,
        key: &key,
        column: "body",
    };
    // Only a huge chunk, alone in its row, goes to the parts.
    let body = if body.len() > INLINE_BYTES {
        place.keep(database, body, INLINE_BYTES)?
    } else {
        text(body)
    };
    let values = [
        integer(first)?,
        integer(next.saturating_sub(1))?,
        integer(bytes)?,
        body,
    ];
    database.query(
        "INSERT INTO ra_chunks (first_sequence, last_sequence, bytes, body)
         VALUES (CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER), ?)",
        &values,
    )?;
    Ok(next)
}

fn looks_like_a_chunk(chunk: &str) -> bool {
    chunk.starts_with('{') && chunk.ends_with('}') && !chunk.contains('\n')
}

fn announce(database: &dyn Database, chunk: &str) -> Result<()> {
    let chunk: RawChunk = serde_json::from_str(chunk)
        .map_err(|error| Error::internal(format!("a chunk is not JSON: {error}")))?;
    if chunk.kind() != "subagent_start" {
        return Ok(());
    }
    let (Some(id), Some(kind)) = (chunk.text("subSessionId"), chunk.text("subAgentType")) else {
        return Ok(());
    };
    database
        .query(
            "INSERT OR IGNORE INTO ra_announced (sub_session_id, agent_type) VALUES (?, ?)",
            &[text(id), text(kind)],
        )
        .map(drop)
}

struct LogRow {
    first: Sequence,
    chunks: Vec<String>,
}

/// The rows from the one that holds the chunk after `after` on, as many as `limit` may need.
fn rows(
    database: &dyn Database,
    after: Sequence,
    until: Sequence,
    limit: PageLimit,
) -> Result<Vec<LogRow>> {
    let start = after.saturating_add(1);
    let at_once = u64::try_from(limit.chunks.min(ROWS_AT_ONCE)).unwrap_or(u64::MAX);
    let sizes = database.query(
        "SELECT first_sequence, last_sequence, bytes FROM ra_chunks
         WHERE first_sequence >= COALESCE((SELECT MAX(first_sequence) FROM ra_chunks
                                           WHERE first_sequence <= CAST(? AS INTEGER)), 0)
           AND first_sequence <= CAST(? AS INTEGER)
         ORDER BY first_sequence LIMIT CAST(? AS INTEGER)",
        &[integer(start)?, integer(until)?, integer(at_once)?],
    )?;
    let mut range = None;
    let mut bytes = 0u64;
    let budget = u64::try_from(limit.bytes).unwrap_or(u64::MAX);
    for cells in sizes {
        let mut row = Row::new(TABLE, cells);
        let first = row.key_number("first_sequence")?;
        let last = row.whole("last_sequence")?;
        let size = row.whole("bytes")?;
        if last < first {
            return Err(row.malformed("last_sequence", "below the first"));
        }
        if last < start {
            continue;
        }
        range = Some((range.map_or(first, |(lowest, _)| lowest), first));
        // A row that begins before `start` may give a few of its bytes only: they do not count.
        if first >= start {
            bytes = bytes.saturating_add(size);
        }
        if bytes > budget {
            break;
        }
    }
    let Some((lowest, highest)) = range else {
        return Ok(Vec::new());
    };
    database
        .query(
            "SELECT first_sequence, last_sequence, body FROM ra_chunks
             WHERE first_sequence BETWEEN CAST(? AS INTEGER) AND CAST(? AS INTEGER)
             ORDER BY first_sequence",
            &[integer(lowest)?, integer(highest)?],
        )?
        .into_iter()
        .map(|cells| unpack(database, Row::new(TABLE, cells)))
        .collect()
}

fn unpack(database: &dyn Database, mut row: Row) -> Result<LogRow> {
    let first = row.key_number("first_sequence")?;
    let last = row.whole("last_sequence")?;
    let cell = row.text("body")?;
    let body = row.whole_text(database, "body", cell)?;
    let chunks: Vec<String> = body.split('\n').map(str::to_owned).collect();
    if !chunks.iter().all(|chunk| looks_like_a_chunk(chunk)) {
        return Err(row.malformed("body", "a line is not a JSON object"));
    }
    let count = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
    if first.checked_add(count) != last.checked_add(1) {
        return Err(row.malformed("body", "not as many chunks as the row says"));
    }
    Ok(LogRow { first, chunks })
}
