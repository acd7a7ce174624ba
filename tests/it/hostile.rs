//! The table of `tests/vectors/hostile.json`: requests that mean harm, on all three mounts, over
//! sessions that stand. Each gets its refusal, nothing is written, and nobody else is harmed. The
//! same file is run in workerd.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use bytes::Bytes;
use remote_agents::mount::serve;
use remote_agents::native::{CommitMoment, LocalObjects};
use remote_agents::protocol::ids::SessionId;
use remote_agents::store::Database as _;
use remote_agents::{Agent, Agents};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::routes::{BodyRow, KEY, MountRow};
use crate::support::{Client, Lines, in_world, scripted, text, yield_now};

const SESSION: &str = "Standing-1";
const FRESH: &str = "never-begun";

#[derive(Deserialize)]
struct Table {
    rows: Vec<Row>,
    replays: Vec<Replay>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    name: String,
    method: String,
    path: String,
    mounts: Option<Vec<String>>,
    #[serde(default)]
    headers: Vec<(String, String)>,
    body: Option<BodyRow>,
    expect: Expect,
    /// What a platform may do that cleans paths up; here nothing does.
    #[serde(rename = "or")]
    _or: Option<Expect>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    status: u16,
    code: Option<String>,
    field: Option<String>,
    frame: Option<String>,
    lacks: Option<String>,
    same: Option<usize>,
}

#[derive(Deserialize)]
struct Replay {
    name: String,
    runs: usize,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Step {
    Settle {
        #[serde(rename = "settle")]
        _settle: bool,
    },
    Post(Box<Post>),
}

#[derive(Deserialize)]
struct Post {
    action: String,
    body: BodyRow,
    #[serde(default)]
    headers: Vec<(String, String)>,
    expect: Expect,
}

fn table() -> Table {
    serde_json::from_str(include_str!("../vectors/hostile.json")).unwrap()
}

/// One mount of `routes.json` over agents that say a few words.
struct World {
    client: Client,
    base: String,
    agent_type: String,
    gated: bool,
    own: String,
}

impl World {
    fn new(row: &MountRow) -> Self {
        let types = row.agents.clone();
        let agents = move || {
            let agent = |agent_type: &remote_agents::protocol::ids::AgentType| {
                let model = scripted(|_| text("A few words."));
                Agent::new(agent_type.clone(), "Say a few words.", model)
            };
            Agents::new(types.iter().map(agent))
        };
        Self {
            client: Client {
                mount: Rc::new(row.mount()),
                objects: LocalObjects::new(
                    1_700_000_000_000,
                    Lines::default().sink(),
                    Rc::new(move |_, _| agents()),
                ),
            },
            base: row.base.clone(),
            agent_type: row.agents[0].to_string(),
            gated: row.gated,
            own: String::new(),
        }
    }

    /// A text with its placeholders filled.
    fn filled(&self, text: &str) -> String {
        let mut filled = text.to_owned();
        for (name, value) in [
            ("base", self.base.as_str()),
            ("BASE", &self.base.to_uppercase()),
            ("type", &self.agent_type),
            ("TYPE", &self.agent_type.to_uppercase()),
            ("session", SESSION),
            ("SESSION", &SESSION.to_uppercase()),
            ("fresh", FRESH),
            ("own", &self.own),
            ("key", KEY),
        ] {
            filled = filled.replace(&format!("{{{name}}}"), value);
        }
        while let Some((at, end, long)) = repeated(&filled) {
            filled.replace_range(at..end, &long);
        }
        filled
    }

    /// Sends a request with the mount's right credentials, unless it brings its own.
    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(String, String)],
        body: Vec<u8>,
    ) -> (u16, Vec<u8>) {
        let mut request = http::Request::builder().method(method).uri(path);
        let own = headers.iter().any(|(name, _)| name == "authorization");
        if self.gated && !own {
            request = request.header("authorization", format!("Bearer {KEY}"));
        }
        for (name, value) in headers {
            let latin: Vec<u8> = self.filled(value).chars().map(|c| c as u8).collect();
            request = request.header(name, latin);
        }
        let request = request.body(Bytes::from(body)).unwrap();
        let response = serve(&self.client.mount, &*self.client.objects, request).await;
        let status = response.status().as_u16();
        let body = response.into_body().collect(64 << 20).await.unwrap();
        (status, body.to_vec())
    }

    async fn get(&self, action: &str, query: &str) -> (u16, Vec<u8>) {
        let path = format!("{}/{}/{action}?{query}", self.base, self.agent_type);
        self.send("GET", &path, &[], Vec::new()).await
    }

    async fn post(&self, action: &str, body: Value) -> (u16, Vec<u8>) {
        let path = format!("{}/{}/{action}", self.base, self.agent_type);
        let body = body.to_string().into_bytes();
        self.send("POST", &path, &[], body).await
    }

    fn body(&self, body: Option<&BodyRow>) -> Vec<u8> {
        match body {
            Some(BodyRow::Hex(_)) => body.map(BodyRow::bytes).unwrap(),
            Some(body) => self
                .filled(&String::from_utf8(body.bytes()).unwrap())
                .into_bytes(),
            None => Vec::new(),
        }
    }

    /// Everything that can be read of a session.
    async fn seen(&self, session: &str) -> BTreeMap<&'static str, (u16, String)> {
        let mut seen = BTreeMap::new();
        for action in ["status", "snapshot", "usage", "tree", "messages", "sse"] {
            let query = match action {
                "sse" => format!("sessionId={session}&fromSequence=0"),
                _ => format!("sessionId={session}"),
            };
            let (status, body) = self.get(action, &query).await;
            seen.insert(action, (status, String::from_utf8(body).unwrap()));
        }
        seen
    }

    /// Waits for the end of the session's stream.
    async fn settled(&self, session: &str) {
        let (status, log) = self.get("sse", &format!("sessionId={session}")).await;
        let log = String::from_utf8(log).unwrap();
        assert!(
            status == 200 && log.contains("event: end"),
            "{status} {log}"
        );
        while self
            .client
            .objects
            .pending(&SessionId::parse(session).unwrap())
            > 0
        {
            yield_now().await;
        }
    }
}

/// The first `{c*n}` of a text, and what it stands for.
fn repeated(text: &str) -> Option<(usize, usize, String)> {
    text.match_indices('{').find_map(|(at, _)| {
        let inner = text[at + 1..].split_once('}')?.0;
        let (one, count) = inner.split_once('*')?;
        let long = one.repeat(count.parse().ok()?);
        (one.chars().count() == 1).then_some((at, at + inner.len() + 2, long))
    })
}

fn check(expect: &Expect, status: u16, body: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(body);
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let found = |name: &str| json[name].as_str();
    let frame = expect.frame.as_deref();
    let is_as_said = status == expect.status
        && expect
            .code
            .as_deref()
            .is_none_or(|code| found("code") == Some(code))
        && (status < 400 || found("error").is_some_and(|sentence| !sentence.is_empty()))
        && expect
            .field
            .as_deref()
            .is_none_or(|field| found("field") == Some(field))
        && frame.is_none_or(|code| {
            text.contains("event: error") && text.contains(&format!("\"code\":\"{code}\""))
        })
        && expect
            .lacks
            .as_deref()
            .is_none_or(|lacks| !text.contains(lacks));
    if is_as_said {
        Ok(())
    } else {
        Err(format!("{status} {text:.200}"))
    }
}

#[test]
fn every_hostile_request_is_refused_and_nothing_is_written_and_nobody_harmed() {
    in_world(|| async {
        let (routes, table) = (crate::routes::table(), table());
        assert!(table.rows.len() > 400);
        for (name, mount) in &routes.mounts {
            let world = World::new(mount);
            let begin = json!({"sessionId": SESSION, "message": "Stand."});
            assert_eq!(world.post("start", begin).await.0, 200);
            world.settled(SESSION).await;
            let before = world.seen(SESSION).await;
            assert_eq!(before["sse"].0, 200);
            let commits = Rc::new(Cell::new(0));
            let counted = commits.clone();
            world.client.objects.on_commit(Rc::new(move |_, moment| {
                if moment == CommitMoment::Before {
                    counted.set(counted.get() + 1);
                }
            }));
            let mut wrong = Vec::new();
            for row in &table.rows {
                if row.mounts.as_ref().is_some_and(|only| !only.contains(name)) {
                    continue;
                }
                let (path, body) = (world.filled(&row.path), world.body(row.body.as_ref()));
                let (status, body) = world.send(&row.method, &path, &row.headers, body).await;
                if let Err(got) = check(&row.expect, status, &body) {
                    wrong.push(format!("{name}: {}: {got}", row.name));
                }
                if commits.replace(0) > 0 {
                    wrong.push(format!("{name}: {}: it was written", row.name));
                }
            }
            assert!(
                wrong.is_empty(),
                "{} rows:\n{}",
                wrong.len(),
                wrong.join("\n")
            );
            assert_eq!(world.seen(SESSION).await, before, "{name}");
            for session in world.client.objects.sessions() {
                let database = world.client.objects.database(&session).unwrap();
                let tables = database
                    .query("SELECT name FROM sqlite_master", &[])
                    .unwrap();
                assert!(
                    session.as_str() == SESSION || tables.is_empty(),
                    "{name}: {session} has {tables:?}"
                );
            }
            // A write would have been seen.
            let begin = json!({"sessionId": FRESH, "message": "Begin."});
            assert_eq!(world.post("start", begin).await.0, 200);
            assert!(commits.get() > 0);
            assert_ne!(world.seen(FRESH).await, before);
        }
    });
}

#[test]
fn a_replayed_key_is_answered_as_at_first_and_begins_nothing() {
    in_world(|| async {
        let (routes, table) = (crate::routes::table(), table());
        for mount in routes.mounts.values() {
            let mut world = World::new(mount);
            for (number, replay) in table.replays.iter().enumerate() {
                world.own = format!("own-{number}");
                let own = world.own.clone();
                let mut answers = Vec::new();
                for step in &replay.steps {
                    let Step::Post(post) = step else {
                        world.settled(&own).await;
                        answers.push(Value::Null);
                        continue;
                    };
                    let (action, expect) = (&post.action, &post.expect);
                    let path = format!("{}/{}/{action}", world.base, world.agent_type);
                    let body = world.body(Some(&post.body));
                    let (status, body) = world.send("POST", &path, &post.headers, body).await;
                    let at = format!("{}: step {}", replay.name, answers.len());
                    assert_eq!(check(expect, status, &body), Ok(()), "{at}");
                    let answer: Value = serde_json::from_slice(&body).unwrap();
                    if let Some(same) = expect.same {
                        assert_eq!(answer, answers[same], "{at}");
                    }
                    answers.push(answer);
                }
                world.settled(&own).await;
                let runs = runs(&world, &own).await;
                assert_eq!(runs, replay.runs, "{}", replay.name);
            }
        }
    });
}

async fn runs(world: &World, session: &str) -> usize {
    let query = format!("sessionId={session}&fromSequence=0");
    let log = String::from_utf8(world.get("sse", &query).await.1).unwrap();
    let begins = ["\"type\":\"run_started\"", "\"type\":\"run_resumed\""];
    begins.iter().map(|begin| log.matches(begin).count()).sum()
}
