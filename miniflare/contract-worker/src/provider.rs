//! The suite of model providers, with the network of workerd and a binding of Workers AI.
//!
//! `GET /providers` lists the cases; `GET /providers/<client>/<number>` runs one against the
//! endpoints in the variables `AIMOCK` and `RAW`.

use std::rc::Rc;

use remote_agents::cloudflare::{GlobalFetch, WorkerRuntime, WorkersAi, variable};
use worker::{Context, Env, Response};

use crate::providers::{CASES, Client, Endpoints, run};

/// The binding of Workers AI.
const AI: &str = "AI";

/// Lists the cases, or runs one.
pub(crate) async fn serve(path: &str, env: &Env, context: &Context) -> worker::Result<Response> {
    let mut segments = path.split('/').skip(2);
    let Some(client) = segments.next() else {
        let names: Vec<&str> = CASES.iter().map(|case| case.name).collect();
        return Response::from_json(&names);
    };
    let case = segments
        .next()
        .and_then(|number| number.parse::<usize>().ok())
        .and_then(|number| CASES.get(number));
    let (Some(client), Some(case), Some(ai)) =
        (Client::named(client), case, WorkersAi::bound(env, AI))
    else {
        return Response::error("no such case", 404);
    };
    let endpoints = Endpoints {
        fetch: Rc::new(GlobalFetch),
        workers_ai: Rc::new(ai),
        runtime: Rc::new(WorkerRuntime::new(context)),
        aimock: variable(env, "AIMOCK").unwrap_or_default(),
        raw: variable(env, "RAW").unwrap_or_default(),
    };
    match run(case, client, &endpoints).await {
        Ok(()) => Response::ok("held"),
        Err(what) => Response::error(what, 500),
    }
}
