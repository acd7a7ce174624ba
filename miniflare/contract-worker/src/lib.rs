//! What needs objects of its own in workerd: a Worker that is built for tests alone.
//!
//! The store's contract suite: `GET /` lists the cases; `GET /<number>` puts the platform's SQLite through one of them, in an
//! object of its own. A broken promise is a panic, which the guard turns into a 500; its words are
//! in the log. Below `/life` are sessions that end, in `life`.

#![cfg(target_arch = "wasm32")]
#![allow(missing_docs)] // `durable_object` writes methods without documentation.

mod life;

use std::rc::Rc;

use remote_agents::cloudflare::{DurableDatabase, guard_panics};
use remote_agents::store::contract::{CASES, Site, Subject};
use remote_agents::store::{Database, SqlStore, SqlValue};
use worker::{Context, DurableObject, Env, Request, Response, State, durable_object, event};

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
        let number = request.path().trim_start_matches('/').parse::<usize>();
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

#[event(fetch)]
async fn fetch(request: Request, env: Env, _context: Context) -> worker::Result<Response> {
    let path = request.path();
    if path.starts_with("/life/") {
        return life::serve(request, &env).await;
    }
    if path == "/" {
        let names: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        return Response::from_json(&names);
    }
    let object = env.durable_object("CONTRACT")?.get_by_name(&path)?;
    object.fetch_with_request(request).await
}
