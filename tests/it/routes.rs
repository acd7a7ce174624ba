//! The table of `tests/vectors/routes.json`: path × method × auth × body on all three mounts.
//!
//! The table is run against the whole of [`serve`], over objects that know no session. The same
//! file is run in workerd.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use futures::future::LocalBoxFuture;
use remote_agents::error::Error;
use remote_agents::http::{Request, Response, refusal};
use remote_agents::mount::{Auth, Mount, Objects, Projection, serve};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::message::ErrorEnvelope;
use remote_agents::protocol::route::Action;
use remote_agents::transport::{Fetch, FetchError};
use serde::Deserialize;
use serde_json::Value;

pub const KEY: &str = "the-right-key";

#[derive(Deserialize)]
pub struct Table {
    pub mounts: BTreeMap<String, MountRow>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
pub struct MountRow {
    pub base: String,
    pub agents: Vec<AgentType>,
    pub gated: bool,
    projected: bool,
    #[serde(default)]
    ui: bool,
    #[serde(default)]
    messages: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    mount: String,
    method: String,
    path: String,
    auth: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<BodyRow>,
    expect: Expect,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BodyRow {
    Json(Value),
    Text(String),
    Hex(String),
    Repeat {
        before: String,
        text: String,
        count: usize,
        after: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    status: u16,
    code: Option<String>,
    field: Option<String>,
    allow: Option<String>,
    agents: Option<Vec<String>>,
}

pub fn table() -> Table {
    serde_json::from_str(include_str!("../vectors/routes.json")).unwrap()
}

impl MountRow {
    pub fn mount(&self) -> Mount {
        let mut mount = Mount::new(&self.base).with_agents(self.agents.clone());
        mount = if self.gated {
            mount.with_auth(Auth::Bearer(Some(KEY.to_owned())))
        } else {
            mount.allow_unauthenticated()
        };
        if self.ui {
            mount = mount.with_ui();
        }
        if self.projected {
            mount = mount.with_projection(Projection {
                name: "nothing".to_owned(),
                map: Rc::new(|_, _| Value::Null),
            });
        }
        if self.messages {
            mount = mount.with_messages();
        }
        mount
    }
}

impl BodyRow {
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Json(value) => value.to_string().into_bytes(),
            Self::Text(text) => text.clone().into_bytes(),
            Self::Hex(hex) => {
                let digits = hex
                    .as_bytes()
                    .chunks(2)
                    .map(|d| std::str::from_utf8(d).unwrap());
                digits.map(|d| u8::from_str_radix(d, 16).unwrap()).collect()
            }
            Self::Repeat {
                before,
                text,
                count,
                after,
            } => format!("{before}{}{after}", text.repeat(*count)).into_bytes(),
        }
    }
}

impl Row {
    fn request(&self) -> Request {
        let mut builder = http::Request::builder()
            .method(self.method.as_str())
            .uri(&self.path);
        let authorization = match self.auth.as_str() {
            "none" => None,
            "wrong" => Some("Bearer not-the-key".to_owned()),
            "empty" => Some("Bearer ".to_owned()),
            "right" => Some(format!("Bearer {KEY}")),
            other => panic!("unknown auth {other}"),
        };
        if let Some(value) = authorization {
            builder = builder.header("authorization", value);
        }
        for (name, value) in &self.headers {
            builder = builder.header(name, value);
        }
        let body = self.body.as_ref().map(BodyRow::bytes).unwrap_or_default();
        builder.body(body.into()).unwrap()
    }

    fn name(&self, number: usize) -> String {
        format!(
            "row {number}: {} {} {:.100} auth {} body {:.100}",
            self.mount,
            self.method,
            self.path,
            self.auth,
            String::from_utf8_lossy(&self.body.as_ref().map(BodyRow::bytes).unwrap_or_default())
        )
    }
}

/// Objects that know no session, and note what they are asked.
#[derive(Clone, Default)]
struct Nobody(Rc<RefCell<Vec<String>>>);

impl Fetch for Nobody {
    fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        self.0.borrow_mut().push(request.uri().path().to_owned());
        Box::pin(async { Ok(refusal(&Error::not_found())) })
    }
}

impl Objects for Nobody {
    fn object(&self, _session: &SessionId) -> Rc<dyn Fetch> {
        Rc::new(self.clone())
    }
}

#[tokio::test]
async fn every_row_of_the_table_is_answered_as_it_says() {
    let table = table();
    let mut wrong = Vec::new();
    for (number, row) in table.rows.iter().enumerate() {
        let mount = &table.mounts[&row.mount];
        let objects = Nobody::default();
        let response = serve(&mount.mount(), &objects, row.request()).await;
        let asked = objects.0.take();
        if let Err(why) = check(row, mount, response).await {
            wrong.push(format!("{}\n    {why}", row.name(number)));
        }
        if asked.len() > 1 || asked.iter().any(|path| path.ends_with("/start")) {
            wrong.push(format!(
                "{}\n    the object was asked {asked:?}",
                row.name(number)
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

async fn check(row: &Row, mount: &MountRow, response: Response) -> Result<(), String> {
    let expect = &row.expect;
    let header = |name: &str| {
        response
            .headers()
            .get(name)
            .map(|v| v.to_str().unwrap().to_owned())
    };
    let same = |what: &str, got: Option<String>, wanted: Option<&str>| {
        if got.as_deref() == wanted {
            Ok(())
        } else {
            Err(format!("{what} is {got:?}, not {wanted:?}"))
        }
    };
    same(
        "status",
        Some(response.status().as_u16().to_string()),
        Some(&expect.status.to_string()),
    )?;
    same("allow", header("allow"), expect.allow.as_deref())?;
    same("version", header("x-remote-agents-version"), Some("1"))?;
    let kind = if mount.projected { "projected" } else { "raw" };
    same("mount", header("x-remote-agents-mount"), Some(kind))?;
    if row.method == "HEAD" {
        return Ok(());
    }
    same(
        "content type",
        header("content-type"),
        Some("application/json"),
    )?;
    let body = response
        .into_body()
        .collect(1 << 20)
        .await
        .map_err(|e| e.to_string())?;
    if let Some(agents) = &expect.agents {
        let list: Value = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
        let wanted = serde_json::json!({"agents": agents, "version": 1});
        return same("list", Some(list.to_string()), Some(&wanted.to_string()));
    }
    let envelope: ErrorEnvelope = serde_json::from_slice(&body).map_err(|e| e.to_string())?;
    if let Some(code) = &expect.code {
        same("code", Some(envelope.code), Some(code))?;
    }
    same("field", envelope.field, expect.field.as_deref())?;
    if envelope.error.is_empty() {
        return Err("the envelope has no sentence".to_owned());
    }
    Ok(())
}

#[test]
fn the_table_has_every_route_with_every_method_and_every_auth() {
    let table = table();
    let has: BTreeSet<(&str, &str, &str, &str)> = table
        .rows
        .iter()
        .map(|row| {
            let path = row.path.split('?').next().unwrap();
            (
                row.mount.as_str(),
                row.method.as_str(),
                path,
                row.auth.as_str(),
            )
        })
        .collect();
    for (name, mount) in &table.mounts {
        let mut routes = vec![(mount.base.clone(), "GET")];
        for agent_type in &mount.agents {
            for action in Action::ALL {
                routes.push((
                    format!("{}/{agent_type}/{}", mount.base, action.as_str()),
                    action.allow(),
                ));
            }
        }
        for (path, right) in routes {
            for auth in ["none", "wrong", "empty", "right"] {
                assert!(
                    has.contains(&(name, right, &path, auth)),
                    "{name} {right} {path} {auth}"
                );
            }
            for method in [
                "GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "PROPFIND",
            ] {
                assert!(
                    has.contains(&(name, method, &path, "none")),
                    "{name} {method} {path}"
                );
            }
        }
    }
}
