//! Where a row of the log goes, and how small rows are packed into large ones.
//!
//! A row that fills its pages well goes to `ra_chunks` at once. Small ones go to one of two tails;
//! when that is full, the *other* one, whose rows are older than a whole tail, is packed into
//! `ra_chunks` in the very commit that needs the room. So readers at the end of the log meet rows
//! as they were written, a commit packs one tail at most, and packing writes less than a quarter of
//! a row for each that was appended: dropping the packed tail's table is not counted row by row.

use super::{TABLES, announces, are_chunks, table_of};
use crate::error::Result;
use crate::protocol::ids::{Sequence, Timestamp};
use crate::store::rows::{INLINE_BYTES, Place, Row, integer, text};
use crate::store::schema::{TAIL_0, TAIL_1};
use crate::store::{Database, Epoch, SqlValue};

/// A smaller row is packed with others: however well it fills its pages, there are too many of them.
const WHOLE_BYTES: usize = 12 * 1024;

/// The size of a page of SQLite's, here and on the platform.
const PAGE: usize = 4096;

/// A tail that holds this many bytes is full. With one more row it stays below eight packed rows.
pub(super) const TAIL_BYTES: u64 = 960 * 1024;

/// What a row of a tail counts beside its body: it bounds the rows of a tail. It stands in the
/// statement that appends alone, too.
const ROW_OVERHEAD: u64 = 64;

/// The statements for one tail.
struct Tail {
    place: u64,
    insert: &'static str,
    append: &'static str,
    stretches: &'static str,
    pack: &'static str,
    drop: &'static str,
    make: &'static str,
}

macro_rules! tail {
    ($place:literal, $name:literal, $other:literal, $make:expr) => {
        Tail {
            place: $place,
            insert: concat!(
                "INSERT INTO ",
                $name,
                " (first_sequence, last_sequence, bytes, start_byte, committed_at, filled, body)
                 VALUES (CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER),
                    CAST(? AS INTEGER),
                    COALESCE(CAST(? AS INTEGER), (SELECT updated_at FROM ra_session), 0),
                    CAST(? AS INTEGER), ?)"
            ),
            // A commit in one statement: a row without a body is ignored, so what is not as it
            // should be (the epoch, the newest row, its place) leaves everything as it was. Each
            // parameter costs more than finding the newest row again.
            append: concat!(
                "INSERT OR IGNORE INTO ",
                $name,
                " (first_sequence, last_sequence, bytes, start_byte, committed_at, filled, body)
                 VALUES (?1, ?2, octet_length(?4),
                    (SELECT start_byte + bytes + 1 FROM ",
                $name,
                " ORDER BY first_sequence DESC LIMIT 1), ?3,
                    (SELECT filled FROM ",
                $name,
                " ORDER BY first_sequence DESC LIMIT 1) + octet_length(?4) + 64,
                    CASE WHEN (SELECT epoch FROM ra_session) = ?5
                        AND (SELECT last_sequence FROM ",
                $name,
                " ORDER BY first_sequence DESC LIMIT 1) = ?1 - 1
                        AND COALESCE((SELECT MAX(first_sequence) FROM ra_chunks), 0) < ?1
                        AND COALESCE((SELECT MAX(first_sequence) FROM ",
                $other,
                "), 0) < ?1
                    THEN ?4 END)"
            ),
            // Rows without a gap between them and of one 128 KiB of the tail become one. A row that
            // is not what it should be stays alone: it must not take its neighbours with it. Bodies
            // are not carried through this query: it would copy each several times.
            stretches: concat!(
                "SELECT MIN(first_sequence), MAX(first_sequence)
                 FROM (SELECT first_sequence, filled,
                          SUM(apart) OVER (ORDER BY first_sequence) AS stretch
                       FROM (SELECT first_sequence, filled,
                                first_sequence IS NOT LAG(last_sequence) OVER (ORDER BY first_sequence) + 1
                                OR NOT sound
                                OR NOT LAG(sound, 1, 1) OVER (ORDER BY first_sequence) AS apart
                             FROM (SELECT first_sequence, last_sequence, filled,
                                      octet_length(body) IS bytes AS sound
                                   FROM ",
                $name,
                ")))
                 GROUP BY stretch, filled / 131072 ORDER BY 1"
            ),
            pack: concat!(
                "INSERT INTO ra_chunks
                    (first_sequence, last_sequence, bytes, start_byte, committed_at, body)
                 SELECT MIN(first_sequence), MAX(last_sequence), SUM(bytes) + COUNT(*) - 1,
                    MIN(start_byte), MAX(committed_at), group_concat(body, char(10))
                 FROM (SELECT * FROM ",
                $name,
                " WHERE first_sequence BETWEEN CAST(? AS INTEGER) AND CAST(? AS INTEGER)
                  ORDER BY first_sequence)"
            ),
            drop: concat!("DROP TABLE ", $name),
            make: $make,
        }
    };
}

static TAILS: [Tail; 2] = [
    tail!(1, "ra_tail_0", "ra_tail_1", TAIL_0),
    tail!(2, "ra_tail_1", "ra_tail_0", TAIL_1),
];

/// The newest rows, in one query: of the whole log and of each tail.
const NEWEST: &str = "SELECT first_sequence, place, last_sequence, bytes, start_byte, filled FROM (
        SELECT first_sequence, 0 AS place, last_sequence, bytes, start_byte, 0 AS filled
        FROM ra_chunks ORDER BY first_sequence DESC LIMIT 1)
    UNION ALL SELECT first_sequence, place, last_sequence, bytes, start_byte, filled FROM (
        SELECT first_sequence, 1 AS place, last_sequence, bytes, start_byte, filled
        FROM ra_tail_0 ORDER BY first_sequence DESC LIMIT 1)
    UNION ALL SELECT first_sequence, place, last_sequence, bytes, start_byte, filled FROM (
        SELECT first_sequence, 2 AS place, last_sequence, bytes, start_byte, filled
        FROM ra_tail_1 ORDER BY first_sequence DESC LIMIT 1)";

/// The newest row of all.
const LAST: &str = "SELECT first_sequence, 0 AS place, last_sequence, committed_at FROM ra_chunks
    UNION ALL SELECT first_sequence, 1, last_sequence, committed_at FROM ra_tail_0
    UNION ALL SELECT first_sequence, 2, last_sequence, committed_at FROM ra_tail_1
    ORDER BY first_sequence DESC LIMIT 1";

/// The newest sequence and when it was committed, unless the log is empty.
pub(in crate::store) fn last(database: &dyn Database) -> Result<Option<(Sequence, Timestamp)>> {
    let Some(cells) = database.query(LAST, &[])?.into_iter().next() else {
        return Ok(None);
    };
    let table = table_of(cells.get(1));
    let mut row = Row::new(table, cells);
    row.whole("place")?;
    Ok(Some((
        row.whole("last_sequence")?,
        row.whole("committed_at")?,
    )))
}

/// Where the next small row goes, as far as the last append knows. A hint: the statement that uses
/// it looks whether it is so.
#[derive(Clone, Copy)]
pub(in crate::store) struct Hint {
    tail: &'static Tail,
    newest: Sequence,
    filled: u64,
}

impl Hint {
    /// Appends one small row in a commit of its own. False, with nothing written, where that cannot
    /// be done: the ordinary commit then tells why or does it.
    pub(in crate::store) fn append(
        self,
        database: &dyn Database,
        epoch: Epoch,
        first: Sequence,
        chunks: &[String],
        at: Timestamp,
    ) -> Result<Option<Self>> {
        if self.newest.checked_add(1) != Some(first) || self.filled >= TAIL_BYTES {
            return Ok(None);
        }
        let body = chunks.join("\n");
        if fills_its_pages(body.len()) || !are_chunks(chunks, &body) || announces(chunks) {
            return Ok(None);
        }
        let count = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
        let last = self.newest.saturating_add(count);
        let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let filled = self
            .filled
            .saturating_add(bytes)
            .saturating_add(ROW_OVERHEAD);
        let values = [
            integer(first)?,
            integer(last)?,
            integer(at)?,
            text(body),
            integer(epoch)?,
        ];
        if !database.write(self.tail.append, &values)? {
            return Ok(None);
        }
        Ok(Some(Self {
            newest: last,
            filled,
            ..self
        }))
    }
}

/// The end of the log, as appending needs it.
pub(super) struct Head {
    /// The newest sequence, unless the log is empty.
    pub(super) newest: Option<Sequence>,
    /// The size of all log so far, a line end after each chunk included.
    pub(super) next_byte: u64,
    current: Room,
    other: Room,
}

/// How a tail stands.
struct Room {
    tail: &'static Tail,
    newest: Option<Sequence>,
    filled: u64,
}

impl Head {
    /// Looks at the end of the log.
    pub(super) fn read(database: &dyn Database) -> Result<Self> {
        let [zero, one] = &TAILS;
        let room = |tail| Room {
            tail,
            newest: None,
            filled: 0,
        };
        let mut head = Self {
            newest: None,
            next_byte: 0,
            current: room(zero),
            other: room(one),
        };
        for cells in database.query(NEWEST, &[])? {
            let table = table_of(cells.get(1));
            let mut row = Row::new(table, cells);
            let place = row.whole("place")?;
            let last = row.whole("last_sequence")?;
            let bytes = row.whole("bytes")?;
            let start_byte = row.whole("start_byte")?;
            let filled = row.whole("filled")?;
            if head.newest.is_none_or(|newest| newest < last) {
                head.newest = Some(last);
                head.next_byte = start_byte.saturating_add(bytes).saturating_add(1);
            }
            for room in [&mut head.current, &mut head.other] {
                if room.tail.place == place {
                    room.newest = Some(last);
                    room.filled = filled;
                }
            }
        }
        // The tail that was written last is the one that is being filled.
        if head.other.newest > head.current.newest {
            std::mem::swap(&mut head.current, &mut head.other);
        }
        Ok(head)
    }

    /// Appends one row of chunks, `first` being the first's sequence; gives the next sequence.
    pub(super) fn append(
        &mut self,
        database: &dyn Database,
        first: Sequence,
        chunks: &[String],
        at: Option<Timestamp>,
    ) -> Result<Sequence> {
        let count = u64::try_from(chunks.len()).unwrap_or(u64::MAX);
        let next = first.saturating_add(count);
        let last = next.saturating_sub(1);
        let body = chunks.join("\n");
        let bytes = u64::try_from(body.len()).unwrap_or(u64::MAX);
        let mut values = vec![
            integer(first)?,
            integer(last)?,
            integer(bytes)?,
            integer(self.next_byte)?,
            at.map_or(Ok(SqlValue::Null), integer)?,
        ];
        if fills_its_pages(body.len()) {
            values.push(whole_body(database, first, body)?);
            database.query(
                "INSERT INTO ra_chunks
                    (first_sequence, last_sequence, bytes, start_byte, committed_at, body)
                 VALUES (CAST(? AS INTEGER), CAST(? AS INTEGER), CAST(? AS INTEGER),
                    CAST(? AS INTEGER),
                    COALESCE(CAST(? AS INTEGER), (SELECT updated_at FROM ra_session), 0), ?)",
                &values,
            )?;
        } else {
            self.make_room(database)?;
            let room = &mut self.current;
            room.filled = room
                .filled
                .saturating_add(bytes)
                .saturating_add(ROW_OVERHEAD);
            room.newest = Some(last);
            values.push(integer(room.filled)?);
            values.push(text(body));
            database.query(room.tail.insert, &values)?;
        }
        self.newest = Some(last);
        self.next_byte = self.next_byte.saturating_add(bytes).saturating_add(1);
        Ok(next)
    }

    /// What the next append of a small row may rely on: the newest row must be in the tail that is
    /// being filled.
    pub(super) fn hint(&self) -> Option<Hint> {
        let newest = self.newest?;
        (self.current.newest == self.newest).then_some(Hint {
            tail: self.current.tail,
            newest,
            filled: self.current.filled,
        })
    }

    /// Turns to the other tail when this one is full, once what was in it is packed.
    fn make_room(&mut self, database: &dyn Database) -> Result<()> {
        if self.current.filled < TAIL_BYTES {
            return Ok(());
        }
        let older = &mut self.other;
        if older.newest.is_some() {
            for stretch in database.query(older.tail.stretches, &[])? {
                database.query(older.tail.pack, &stretch)?;
            }
            for statement in [older.tail.drop, older.tail.make] {
                database.query(statement, &[])?;
            }
        }
        older.newest = None;
        older.filled = 0;
        std::mem::swap(&mut self.current, &mut self.other);
        Ok(())
    }
}

/// Whether a row with a body of this many bytes is worth a place of its own: what it wastes of the
/// pages that it takes is less than a twelfth of it.
///
/// SQLite keeps the beginning of a long row in a leaf of the table and the rest in pages of its own,
/// divided so that these are full where the beginning still fits into a leaf
/// (<https://sqlite.org/fileformat2.html#b_tree_pages>, "payload").
fn fills_its_pages(body: usize) -> bool {
    /// What a row has beside its body: the other columns, and the headers of row and cell.
    const AROUND: usize = 48;
    /// The bytes of an overflow page that hold payload.
    const OVERFLOW: usize = PAGE - 4;
    /// At most this much of a row stands in a leaf, and if it is longer, at least that much.
    const MOST: usize = PAGE - 35;
    const LEAST: usize = (PAGE - 12) * 32 / 255 - 23;
    if body < WHOLE_BYTES {
        return false;
    }
    let payload = body.saturating_add(AROUND);
    let fitting = LEAST + payload.saturating_sub(LEAST) % OVERFLOW;
    let in_leaf = if fitting <= MOST { fitting } else { LEAST };
    let pages = payload.saturating_sub(in_leaf).div_ceil(OVERFLOW);
    let leaf = PAGE / (PAGE / in_leaf).max(1);
    let taken = pages.saturating_mul(PAGE).saturating_add(leaf);
    taken.saturating_sub(body) < body / 12
}

/// Only a huge chunk, alone in its row, goes to the parts.
fn whole_body(database: &dyn Database, first: Sequence, body: String) -> Result<SqlValue> {
    if body.len() <= INLINE_BYTES {
        return Ok(text(body));
    }
    let [table, ..] = TABLES;
    let key = first.to_string();
    let place = Place {
        table,
        key: &key,
        column: "body",
    };
    place.keep(database, body, INLINE_BYTES)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic)]

    use super::{PAGE, fills_its_pages};
    use crate::store::schema::{MIGRATIONS, Stage, migrate};
    use crate::store::{Database as _, SqlValue};

    /// Bytes that SQLite takes for one of many rows like this.
    fn taken(body: usize) -> usize {
        const ROWS: usize = 40;
        let database = crate::native::RusqliteDatabase::in_memory().unwrap();
        migrate(&database, MIGRATIONS, Stage::Absent).unwrap();
        let pages = || match database.query("PRAGMA page_count", &[]).unwrap()[0][0] {
            SqlValue::Integer(count) => usize::try_from(count).unwrap(),
            ref other => panic!("{other:?}"),
        };
        let before = pages();
        let insert = "INSERT INTO ra_chunks
                (first_sequence, last_sequence, bytes, start_byte, committed_at, body)
             VALUES (?1, ?1, ?2, ?1 * ?2, 1790000000000, ?3)";
        for row in 1..=ROWS {
            let number = |value| SqlValue::Integer(i64::try_from(value).unwrap());
            let values = [
                number(row * 100),
                number(body),
                SqlValue::Text("x".repeat(body)),
            ];
            database.query(insert, &values).unwrap();
        }
        (pages() - before) * PAGE / ROWS
    }

    #[test]
    fn a_row_of_its_own_wastes_less_than_a_tenth_of_its_size() {
        let mut own = 0;
        for body in (8_000..60_000).step_by(397) {
            let taken = taken(body);
            if fills_its_pages(body) {
                own += 1;
                assert!((taken - body) * 10 < body, "{body} bytes take {taken}");
            }
            if body >= 30_000 {
                assert!(fills_its_pages(body), "{body} bytes take {taken}");
            }
        }
        assert!(own > 100, "{own} of 131 sizes");
    }
}
