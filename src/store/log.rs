//! The chunk log: one row a commit, one chunk a line, read in pages by sequence.
//!
//! Rows lie in three tables, see [`tail`]; readers see one log.
//! `after` is exclusive and nobody adds or subtracts one elsewhere. A page never reads more of the
//! log than it returns, but for the rows at its two ends. Sections 4 and 7 of the contract.

mod tail;
mod trim;

use std::cell::{Cell, RefCell};

pub(super) use tail::{Hint, last};
pub(super) use trim::{stats, trim};

use super::rows::{Row, integer, malformed, text};
use super::{Database, PageLimit, SqlValue};
use crate::error::{Error, Result};
use crate::protocol::chunk::RawChunk;
use crate::protocol::ids::{MAX_SAFE_INTEGER, Sequence, Timestamp};
use tail::Head;

/// A commit's chunks are split over rows of about this many bytes.
const ROW_BYTES: usize = 256 * 1024;

/// This many rows are looked at first: packed ones fill a page with one or two.
const ROWS_AT_FIRST: usize = 8;

/// At most this many rows are looked at in one go.
const ROWS_AT_ONCE: usize = 128;

/// The tables of the log, by the number that stands for them in a query over all.
const TABLES: [&str; 3] = ["ra_chunks", "ra_tail_0", "ra_tail_1"];

/// Appends chunks and notes the children that they announce. Without a time they are as old as the
/// session row's last change.
pub(super) fn append(
    database: &dyn Database,
    hint: &Cell<Option<Hint>>,
    first: Sequence,
    chunks: &[String],
    at: Option<Timestamp>,
) -> Result<()> {
    if chunks.is_empty() {
        return Ok(());
    }
    check(chunks)?;
    let mut head = Head::read(database)?;
    follows_on(head.newest, first)?;
    let mut next = first;
    let mut rest = chunks;
    while !rest.is_empty() {
        let (row, later) = rest.split_at(fitting(rest));
        next = head.append(database, next, row, at)?;
        rest = later;
    }
    hint.set(head.hint());
    chunks
        .iter()
        .try_for_each(|chunk| announce(database, chunk))
}

/// What a page left of the row in which it ended, so that the next page need not read a packed
/// row again.
pub(super) struct Rest {
    row: (Sequence, Sequence),
    lines: Lines,
}

/// Hands on the chunks above `after`, up to and including `until`, within `limit`.
pub(super) fn page(
    database: &dyn Database,
    rest: &RefCell<Option<Rest>>,
    after: Sequence,
    until: Sequence,
    limit: PageLimit,
    each: &mut dyn FnMut(Sequence, &str),
) -> Result<()> {
    let until = until.min(MAX_SAFE_INTEGER);
    let (mut count, mut bytes) = (0usize, 0usize);
    let mut reached = after;
    let mut at_once = ROWS_AT_FIRST;
    while reached < until && count < limit.chunks && bytes <= limit.bytes {
        let left = PageLimit {
            chunks: limit.chunks.saturating_sub(count),
            bytes: limit.bytes.saturating_sub(bytes),
        };
        let before = reached;
        let (found, more) = rows(database, rest.take(), reached, until, left, at_once)?;
        for mut row in found {
            // A page may begin above `after` (the retention floor), but has no gap inside.
            if count > 0 && row.lines.next > reached.saturating_add(1) {
                let key = row.lines.next.to_string();
                return Err(malformed(
                    table_at(row.place),
                    &key,
                    "first_sequence",
                    "chunks are missing before it",
                ));
            }
            loop {
                if count >= limit.chunks || bytes > limit.bytes {
                    if row.place == 0 && !row.lines.is_empty() {
                        rest.replace(Some(Rest {
                            row: row.span,
                            lines: row.lines,
                        }));
                    }
                    return Ok(());
                }
                let Some((sequence, chunk)) = row.lines.take() else {
                    break;
                };
                if sequence <= reached || sequence > until {
                    continue;
                }
                bytes = bytes.saturating_add(chunk.len());
                count = count.saturating_add(1);
                reached = sequence;
                each(sequence, chunk);
            }
        }
        if reached == before || !more {
            break;
        }
        at_once = ROWS_AT_ONCE;
    }
    Ok(())
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

/// Whether a chunk of the log that came from the child `via` announces this session. Where an
/// earlier version stored the announcement, any child counts.
pub(super) fn announced_by(
    database: &dyn Database,
    via: &str,
    sub_session_id: &str,
) -> Result<bool> {
    let found = database.query(
        "SELECT 1 FROM ra_announced WHERE sub_session_id = ?1 AND via IN (?2, '*')",
        &[text(sub_session_id), text(via)],
    )?;
    Ok(!found.is_empty())
}

/// Refuses a number that was issued before, and a gap.
pub(super) fn follows_on(newest: Option<Sequence>, first: Sequence) -> Result<()> {
    let expected = newest.map_or(first.max(1), |newest| newest.saturating_add(1));
    if first == expected {
        Ok(())
    } else {
        Err(Error::internal(format!(
            "chunks from sequence {first} on do not follow the log, whose next is {expected}"
        )))
    }
}

/// Refuses what is not a JSON object on one line.
pub(super) fn check(chunks: &[String]) -> Result<()> {
    let is_one_line = |chunk: &String| looks_like_a_chunk(chunk) && has_no_break(chunk);
    if chunks.iter().all(is_one_line) {
        Ok(())
    } else {
        Err(Error::internal("a chunk must be a JSON object on one line"))
    }
}

/// As [`check`], for chunks that were joined to `body` already: one look at all of it.
fn are_chunks(chunks: &[String], body: &str) -> bool {
    let breaks = memchr::memchr2_iter(b'\n', b'\r', body.as_bytes()).count();
    !chunks.is_empty()
        && breaks == chunks.len().saturating_sub(1)
        && chunks.iter().all(|chunk| looks_like_a_chunk(chunk))
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

fn looks_like_a_chunk(chunk: &str) -> bool {
    chunk.starts_with('{') && chunk.ends_with('}')
}

/// A stored chunk has neither of the characters that break a line, so that whoever sends it need
/// not look for them.
fn has_no_break(chunk: &str) -> bool {
    memchr::memchr2(b'\n', b'\r', chunk.as_bytes()).is_none()
}

/// Whether a chunk may announce a child. One of ours says at its very beginning what it is.
fn may_announce(chunk: &str) -> bool {
    const OURS: &str = "{\"type\":\"";
    match chunk
        .strip_prefix(OURS)
        .and_then(|rest| rest.split_once('"'))
    {
        Some((kind, _)) if !kind.contains('\\') => kind == "subagent_start",
        _ => chunk.contains("subagent_start"),
    }
}

/// Whether one of the chunks may announce a child.
fn announces(chunks: &[String]) -> bool {
    chunks.iter().any(|chunk| may_announce(chunk))
}

fn announce(database: &dyn Database, chunk: &str) -> Result<()> {
    let Some((id, kind, via)) = announcement(chunk)? else {
        return Ok(());
    };
    database
        .query(
            "INSERT OR IGNORE INTO ra_announced (sub_session_id, agent_type, via) VALUES (?, ?, ?)",
            &[text(id), text(kind), text(via)],
        )
        .map(drop)
}

/// The child, its type and the child from which the chunk came (empty when it is the session's
/// own), if the chunk announces one.
pub(super) fn announcement(chunk: &str) -> Result<Option<(String, String, String)>> {
    if !may_announce(chunk) {
        return Ok(None);
    }
    let chunk: RawChunk = serde_json::from_str(chunk)
        .map_err(|error| Error::internal(format!("a chunk is not JSON: {error}")))?;
    if chunk.kind() != "subagent_start" {
        return Ok(None);
    }
    Ok(chunk
        .text("subSessionId")
        .zip(chunk.text("subAgentType"))
        .map(|(id, kind)| {
            let via = chunk.0.get("remoteSource").and_then(|source| {
                let via = source.get("childSessionId")?.as_str()?;
                Some(via.to_owned())
            });
            (id.to_owned(), kind.to_owned(), via.unwrap_or_default())
        }))
}

struct LogRow {
    place: u64,
    /// The first and the last sequence of the row as it is stored.
    span: (Sequence, Sequence),
    lines: Lines,
}

/// The chunks of a row that were not taken yet, in one text.
struct Lines {
    text: String,
    /// Where each line ends, the last one first.
    ends: Vec<usize>,
    begin: usize,
    /// The sequence of the next.
    next: Sequence,
}

impl Lines {
    /// The chunks of a row's body, `first` being the first one's sequence, or why it is none.
    fn of(text: String, first: Sequence, last: Sequence) -> Result<Self, &'static str> {
        let mut ends = Vec::new();
        let mut begin = 0;
        for end in
            memchr::memchr2_iter(b'\n', b'\r', text.as_bytes()).chain(std::iter::once(text.len()))
        {
            let line = text.get(begin..end).unwrap_or_default();
            if !looks_like_a_chunk(line) {
                return Err("a line is not a JSON object");
            }
            ends.push(end);
            begin = end.saturating_add(1);
        }
        let count = u64::try_from(ends.len()).unwrap_or(u64::MAX);
        if first.checked_add(count) != last.checked_add(1) {
            return Err("not as many chunks as the row says");
        }
        ends.reverse();
        Ok(Self {
            text,
            ends,
            begin: 0,
            next: first,
        })
    }

    fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    fn take(&mut self) -> Option<(Sequence, &str)> {
        let end = self.ends.pop()?;
        let line = self.text.get(self.begin..end).unwrap_or_default();
        self.begin = end.saturating_add(1);
        let sequence = self.next;
        self.next = sequence.saturating_add(1);
        Some((sequence, line))
    }
}

/// The sizes of the rows from the one that holds the chunk `?1` on, up to `?2`. Each table is read
/// in the order of its key, and no further than the limit asks.
const SIZES: &str = "SELECT first_sequence, 0 AS place, last_sequence, bytes FROM ra_chunks
    WHERE first_sequence >= COALESCE((SELECT MAX(first_sequence) FROM ra_chunks
                                      WHERE first_sequence <= CAST(?1 AS INTEGER)), 0)
      AND first_sequence <= CAST(?2 AS INTEGER)
    UNION ALL SELECT first_sequence, 1, last_sequence, bytes FROM ra_tail_0
    WHERE first_sequence >= COALESCE((SELECT MAX(first_sequence) FROM ra_tail_0
                                      WHERE first_sequence <= CAST(?1 AS INTEGER)), 0)
      AND first_sequence <= CAST(?2 AS INTEGER)
    UNION ALL SELECT first_sequence, 2, last_sequence, bytes FROM ra_tail_1
    WHERE first_sequence >= COALESCE((SELECT MAX(first_sequence) FROM ra_tail_1
                                      WHERE first_sequence <= CAST(?1 AS INTEGER)), 0)
      AND first_sequence <= CAST(?2 AS INTEGER)
    ORDER BY first_sequence LIMIT CAST(?3 AS INTEGER)";

const BODIES: &str =
    "SELECT first_sequence, 0 AS place, last_sequence, CAST(body AS BLOB) FROM ra_chunks
    WHERE first_sequence BETWEEN CAST(?1 AS INTEGER) AND CAST(?2 AS INTEGER)
    UNION ALL SELECT first_sequence, 1, last_sequence, CAST(body AS BLOB) FROM ra_tail_0
    WHERE first_sequence BETWEEN CAST(?1 AS INTEGER) AND CAST(?2 AS INTEGER)
    UNION ALL SELECT first_sequence, 2, last_sequence, CAST(body AS BLOB) FROM ra_tail_1
    WHERE first_sequence BETWEEN CAST(?1 AS INTEGER) AND CAST(?2 AS INTEGER)
    ORDER BY first_sequence";

/// The table that a query's second column stands for.
fn table_of(place: Option<&SqlValue>) -> &'static str {
    match place {
        Some(SqlValue::Integer(1)) => table_at(1),
        Some(SqlValue::Integer(2)) => table_at(2),
        _ => table_at(0),
    }
}

fn table_at(place: u64) -> &'static str {
    let [chunks, first, second] = TABLES;
    match place {
        1 => first,
        2 => second,
        _ => chunks,
    }
}

/// The rows from the one that holds the chunk after `after` on, as many as `limit` may need, and
/// whether there may be more.
fn rows(
    database: &dyn Database,
    rest: Option<Rest>,
    after: Sequence,
    until: Sequence,
    limit: PageLimit,
    at_once: usize,
) -> Result<(Vec<LogRow>, bool)> {
    let start = after.saturating_add(1);
    // Two of the three tables may each give a row that ends before the start.
    let at_once = limit.chunks.min(at_once).saturating_add(2);
    let at_once = u64::try_from(at_once).unwrap_or(u64::MAX);
    let sizes = database.query(
        SIZES,
        &[integer(start)?, integer(until)?, integer(at_once)?],
    )?;
    let mut more = u64::try_from(sizes.len()).unwrap_or(u64::MAX) >= at_once;
    let mut rest = rest.filter(|rest| rest.lines.next == start);
    let mut found = Vec::new();
    let mut range = None;
    let mut bytes = 0u64;
    let enough = after.saturating_add(u64::try_from(limit.chunks).unwrap_or(u64::MAX));
    let budget = u64::try_from(limit.bytes).unwrap_or(u64::MAX);
    for cells in sizes {
        let mut row = Row::new(table_of(cells.get(1)), cells);
        let first = row.key_number("first_sequence")?;
        let place = row.whole("place")?;
        let last = row.whole("last_sequence")?;
        let size = row.whole("bytes")?;
        if last < first {
            return Err(row.malformed("last_sequence", "below the first"));
        }
        if last < start {
            continue;
        }
        match rest.take() {
            Some(rest) if place == 0 && rest.row == (first, last) => found.push(LogRow {
                place,
                span: rest.row,
                lines: rest.lines,
            }),
            _ => range = Some((range.map_or(first, |(lowest, _)| lowest), first)),
        }
        // A row that begins before `start` may give a few of its bytes only: they do not count.
        if first >= start {
            bytes = bytes.saturating_add(size);
        }
        if bytes > budget || last >= enough {
            more = true;
            break;
        }
    }
    if let Some((lowest, highest)) = range {
        for cells in database.query(BODIES, &[integer(lowest)?, integer(highest)?])? {
            found.push(unpack(database, cells)?);
        }
    }
    Ok((found, more))
}

fn unpack(database: &dyn Database, cells: Vec<SqlValue>) -> Result<LogRow> {
    let table = table_of(cells.get(1));
    let mut row = Row::new(table, cells);
    let first = row.key_number("first_sequence")?;
    let place = row.whole("place")?;
    let last = row.whole("last_sequence")?;
    let lines = unpack_body(database, &mut row, first, last)?;
    Ok(LogRow {
        place,
        span: (first, last),
        lines,
    })
}

/// The chunks of a row whose next cell is its body.
fn unpack_body(
    database: &dyn Database,
    row: &mut Row,
    first: Sequence,
    last: Sequence,
) -> Result<Lines> {
    let cell = row.text("body")?;
    let body = row.whole_text(database, "body", cell)?;
    Lines::of(body, first, last).map_err(|reason| row.malformed("body", reason))
}
