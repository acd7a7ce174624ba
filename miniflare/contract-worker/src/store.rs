//! The store's contract suite inside Durable Objects.
//!
//! `GET /store` lists the cases; `GET /store/<number>` puts the platform's SQLite through one of
//! them, in an object of its own. A broken promise is a panic, which the guard turns into a 500;
//! its words are in the log.

#![allow(missing_docs)] // `durable_object` writes methods without documentation.

use std::rc::Rc;

use remote_agents::cloudflare::{DurableDatabase, guard_panics};
use remote_agents::store::contract::{CASES, Site, Subject};
use remote_agents::store::{Database, SqlStore, SqlValue};
use worker::{DurableObject, Env, Request, Response, State, durable_object};

/// One case's database.
#[durable_object(fetch)]
pub struct ContractObject {
    database: remote_agents::Result<Rc<dyn Database>>,
}

impl DurableObject for ContractObject {
    fn new(state: State, _env: Env) -> Self {
        guard_panics(&state);
        let database = DurableDatabase::of(&state);
        Self {
            database: database.map(|database| Rc::new(database) as Rc<dyn Database>),
        }
    }

    async fn fetch(&self, request: Request) -> worker::Result<Response> {
        let database = match &self.database {
            Ok(database) => Rc::clone(database),
            Err(error) => return Response::error(format!("{error:?}"), 500),
        };
        let path = request.path();
        let number = path.rsplit('/').next().unwrap_or_default().parse::<usize>();
        let Some(case) = number.ok().and_then(|number| CASES.get(number)) else {
            return Response::error("no such case", 404);
        };
        if let Err(error) = clear(&*database) {
            return Response::error(format!("{error:?}"), 500);
        }
        let site = || {
            // A case may begin anew; what was there before is not looked at again.
            let cleared = clear(&*database);
            assert!(cleared.is_ok(), "{cleared:?}");
            Site::over(Rc::clone(&database), |database| {
                Rc::new(SqlStore::new(database))
            })
        };
        (case.check)(Subject { site: &site });
        Response::ok("kept")
    }
}

/// Drops every table but the platform's own.
fn clear(database: &dyn Database) -> remote_agents::Result<()> {
    let tables = database.query(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND substr(name, 1, 4) <> '_cf_'",
        &[],
    )?;
    for name in tables.into_iter().flatten() {
        if let SqlValue::Text(name) = name {
            database.query(&format!("DROP TABLE \"{name}\""), &[])?;
        }
    }
    Ok(())
}

/// Lists the cases, or puts an object through one.
pub(crate) async fn serve(request: Request, env: &Env) -> worker::Result<Response> {
    let path = request.path();
    if path == "/store" {
        let names: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        return Response::from_json(&names);
    }
    let object = env.durable_object("CONTRACT")?.get_by_name(&path)?;
    object.fetch_with_request(request).await
}
