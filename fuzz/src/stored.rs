//! Stored rows: whatever stands in a cell, a reading is a record or an error that quotes no cell.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use remote_agents::error::Result;
use remote_agents::native::RusqliteDatabase;
use remote_agents::store::{Database, PageLimit, SqlStore, SqlValue, Store};

use super::input::{choice, text, values};

/// A database of every table, as the newest released schema has it.
const FIXTURE: &str = include_str!("../../tests/fixtures/schema-v4.sql");
const ALL: PageLimit = PageLimit {
    chunks: 1000,
    bytes: 1 << 20,
};

thread_local! {
    static FILLED: Rc<RusqliteDatabase> = filled();
}

fn filled() -> Rc<RusqliteDatabase> {
    let database = Rc::new(RusqliteDatabase::in_memory().unwrap());
    for statement in FIXTURE.split(";\n").filter(|text| !text.trim().is_empty()) {
        database.query(statement, &[]).unwrap();
    }
    let session = SqlStore::new(database.clone()).session().unwrap();
    assert!(session.is_some(), "the fixture has no session");
    database
}

/// A database of which some cells are read as something else.
struct Tampered {
    inner: Rc<RusqliteDatabase>,
    /// The cell of a reading that is replaced, and by what.
    cells: RefCell<Vec<(usize, SqlValue)>>,
    seen: Cell<usize>,
    /// What stood in replaced cells of keys, which an error may tell, and in others.
    keys: RefCell<Vec<String>>,
    content: RefCell<Vec<String>>,
}

impl Database for Tampered {
    fn query(&self, sql: &str, parameters: &[SqlValue]) -> Result<Vec<Vec<SqlValue>>> {
        let mut rows = self.inner.query(sql, parameters)?;
        if sql.contains("ra_migrations") || sql.contains("sqlite_master") {
            return Ok(rows);
        }
        for (column, cell) in rows.iter_mut().flat_map(|row| row.iter_mut().enumerate()) {
            let at = self.seen.replace(self.seen.get() + 1);
            let cells = self.cells.borrow();
            let Some((_, value)) = cells.iter().find(|(place, _)| *place == at) else {
                continue;
            };
            cell.clone_from(value);
            match value {
                SqlValue::Text(text) if column == 0 => self.keys.borrow_mut().push(text.clone()),
                SqlValue::Text(text) if text.starts_with("canary-") => {
                    self.content.borrow_mut().push(text.clone());
                }
                _ => {}
            }
        }
        Ok(rows)
    }

    fn transaction(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.inner.transaction(work)
    }
}

pub(crate) fn rows(data: &[u8]) {
    let (reading, rest) = choice(data, READINGS.len());
    let cells = values::<3>(rest).map(cell);
    let inner = FILLED.with(Clone::clone);
    let database = Rc::new(Tampered {
        inner: inner.clone(),
        cells: RefCell::default(),
        seen: Cell::new(0),
        keys: RefCell::default(),
        content: RefCell::default(),
    });
    let store = SqlStore::new(database.clone());
    // The first look at the schema is not the reading's.
    assert!(store.run("nobody").is_ok());
    database.seen.set(0);
    database.cells.replace(cells.into());
    if let Err(error) = READINGS[reading](&store) {
        let said = format!("{error:?} {error}");
        for text in database.content.borrow().iter() {
            let is_key = database.keys.borrow().iter().any(|key| key.contains(text));
            assert!(is_key || !said.contains(text), "{text} is quoted: {said}");
        }
    }
    let untouched = SqlStore::new(inner);
    assert!(
        READINGS[reading](&untouched).is_ok(),
        "reading changed something"
    );
}

type Reading = fn(&dyn Store) -> Result<()>;

/// Every reading of a store.
const READINGS: [Reading; 18] = [
    |store| store.session().map(drop),
    |store| store.run("run_1").map(drop),
    |store| store.checkpoint().map(drop),
    |store| store.checkpoint_up_to(100).map(drop),
    |store| store.checkpoint_after(0).map(drop),
    |store| store.run_opened_at(1).map(drop),
    |store| store.chunks(0, 1 << 52, ALL).map(drop),
    |store| store.each_chunk(2, 6, ALL, &mut |_, _| {}),
    |store| store.log_stats(100).map(drop),
    |store| store.messages().map(drop),
    |store| store.message_behind(0).map(drop),
    |store| store.step().map(drop),
    |store| store.sub_sessions().map(drop),
    |store| store.sub_session("s-1-remote-a").map(drop),
    |store| store.usage().map(drop),
    |store| store.idempotency("start:s-1").map(drop),
    |store| store.due_hooks().map(drop),
    |store| {
        store.announced("s-1-remote-a", None)?;
        store.announced_by("s-1-remote-a", "x")?;
        store.tool_call_id_used("a")?;
        store.sub_session_ids().map(drop)
    },
];

/// Which cell of the reading is replaced, and by what.
fn cell(data: &[u8]) -> (usize, SqlValue) {
    let (place, rest) = choice(data, 64);
    let (kind, rest) = choice(rest, 4);
    let text = text(rest);
    let value = match kind {
        0 => SqlValue::Null,
        1 => SqlValue::Integer(text.parse().unwrap_or(i64::MIN)),
        2 => SqlValue::Real(text.parse().unwrap_or(f64::NAN)),
        _ => SqlValue::Text(text.into_owned()),
    };
    (place, value)
}
