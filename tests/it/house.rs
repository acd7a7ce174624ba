//! What the texts promise about the repository itself, read from its files.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::future::LocalBoxFuture;
use remote_agents::agent::StopSignal;
use remote_agents::http::Body;
use remote_agents::native::{LocalRuntime, RusqliteDatabase};
use remote_agents::platform::{Level, ObjectRuntime, Runtime};
use remote_agents::producer::Producer;
use remote_agents::protocol::ids::Timestamp;
use remote_agents::protocol::message::SessionStatus;
use remote_agents::protocol::route::Action;
use remote_agents::store::{SqlStore, Store as _};
use remote_agents::{Agent, AgentType, Agents, Code, Result};
use serde_json::Value;

use super::support::{in_world, scripted, text};

pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

pub fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The Rust files of a folder, or the file itself, relative to the root. Code that only tests use
/// is left out.
fn sources(place: &str) -> Vec<PathBuf> {
    fn walk(path: &Path, found: &mut Vec<PathBuf>) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_for_tests = ["tests", "tests.rs", "testing.rs", "contract", "contract.rs"]
            .contains(&name.as_str())
            || name == "bench.rs";
        if is_for_tests {
            return;
        }
        if path.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                walk(&entry.unwrap().path(), found);
            }
        } else if name.ends_with(".rs") {
            found.push(path.to_owned());
        }
    }
    let mut found = Vec::new();
    walk(&root().join(place), &mut found);
    assert!(!found.is_empty(), "{place} has no source");
    found.sort();
    found
}

/// A file's code: without comments, and without a module of tests at its end.
fn code(path: &Path) -> String {
    let source = fs::read_to_string(path).unwrap();
    let source = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
    let mut code = String::new();
    let mut characters = source.chars().peekable();
    let mut in_text = false;
    while let Some(character) = characters.next() {
        match character {
            '\\' if in_text => {
                code.push(character);
                code.extend(characters.next());
                continue;
            }
            '"' => in_text = !in_text,
            '\'' if !in_text && characters.peek() == Some(&'"') => {
                code.push(character);
                code.extend(characters.next());
                continue;
            }
            '/' if !in_text && characters.peek() == Some(&'/') => {
                while characters.peek().is_some_and(|next| *next != '\n') {
                    characters.next();
                }
                continue;
            }
            _ => {}
        }
        code.push(character);
    }
    code
}

fn words(code: &str) -> BTreeSet<&str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .collect()
}

/// What stands behind each `{root}::` in the code, up to the end of the path's next name.
fn behind<'a>(code: &'a str, root: &str) -> Vec<&'a str> {
    let mark = format!("{root}::");
    code.match_indices(&mark)
        .filter(|(at, _)| {
            !code[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':')
        })
        .map(|(at, mark)| {
            let rest = &code[at + mark.len()..];
            let end = rest
                .find(|c: char| !c.is_alphanumeric() && c != '_')
                .unwrap_or(rest.len());
            &rest[..end]
        })
        .collect()
}

#[test]
fn no_rule_can_be_taken_away_in_what_is_deployed() {
    for worker in ["producer-worker", "consumer-worker"] {
        let manifest = read(Path::new(worker).join("Cargo.toml"));
        assert!(!manifest.contains("mutants"), "{worker}");
    }
    let library = read("Cargo.toml");
    let named = library.lines().filter(|line| line.contains("mutants"));
    assert_eq!(named.collect::<Vec<_>>(), ["mutants = []"]);
}

#[test]
fn the_core_imports_nothing_that_waits_or_does_anything() {
    const CRATES: [&str; 11] = [
        "crate",
        "self",
        "super",
        "std",
        "serde",
        "serde_json",
        "sha2",
        "http",
        "json_patch",
        "percent_encoding",
        "thiserror",
    ];
    const STD: [&str; 8] = [
        "borrow",
        "cmp",
        "collections",
        "fmt",
        "mem",
        "rc",
        "result",
        "str",
    ];
    // What these hold besides values is for drivers, and its words are banned below. A rule that the
    // simulator takes away is a constant in all that is deployed.
    const OURS: [&str; 8] = [
        "error",
        "protocol",
        "session",
        "dispatch",
        "store",
        "agent",
        "transport",
        "mutants",
    ];
    const BANNED: [&str; 23] = [
        "async",
        "await",
        "Future",
        "LocalBoxFuture",
        "Stream",
        "Instant",
        "SystemTime",
        "UNIX_EPOCH",
        "Runtime",
        "ObjectRuntime",
        "Transport",
        "Fetch",
        "Database",
        "getrandom",
        "random",
        "thread",
        "stdin",
        "stdout",
        "stderr",
        "println",
        "eprintln",
        "RefCell",
        "target_arch",
    ];
    let mut wrong = Vec::new();
    for path in [
        "src/error.rs",
        "src/protocol",
        "src/session",
        "src/dispatch",
        "src/reconstruct",
    ]
    .into_iter()
    .flat_map(sources)
    {
        let code = code(&path);
        let mut complain = |what: String| wrong.push(format!("{}: {what}", path.display()));
        let imports = code.lines().map(str::trim_start).filter_map(|line| {
            let path = line.strip_prefix("pub ").unwrap_or(line);
            path.strip_prefix("use ")
        });
        for import in imports {
            let name = import.split([':', ';', ' ']).next().unwrap();
            let is_submodule = code.contains(&format!("mod {name};"));
            if !CRATES.contains(&name) && !is_submodule {
                complain(format!("use {name}"));
            }
        }
        for name in behind(&code, "std") {
            let is_allowed = match name {
                // A length of time is a number; `io::Write` counts bytes in memory.
                "time" => code.contains("use std::time::Duration;"),
                "io" => path.ends_with("dispatch/fold.rs"),
                name => STD.contains(&name),
            };
            if !is_allowed {
                complain(format!("std::{name}"));
            }
        }
        for name in behind(&code, "crate") {
            if !OURS.contains(&name) {
                complain(format!("crate::{name}"));
            }
        }
        for word in words(&code).intersection(&BTreeSet::from(BANNED)) {
            complain(format!("the word {word}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn minus_one_stands_in_one_file() {
    let mut found = BTreeSet::new();
    for path in sources("src") {
        let code = code(&path);
        let is_there = code.match_indices("-1").any(|(at, mark)| {
            let before = code[..at].chars().next_back();
            let after = code[at + mark.len()..].chars().next();
            !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
        });
        if is_there {
            found.insert(path.strip_prefix(root()).unwrap().to_owned());
        }
    }
    assert_eq!(
        found,
        BTreeSet::from([PathBuf::from("src/protocol/ids.rs")])
    );
}

#[test]
fn the_library_knows_no_class_no_binding_and_no_secret_of_the_workers() {
    let wrangler = read("wrangler.toml");
    let mut names = vec!["MODEL_PROVIDER".to_owned(), "API_KEY".to_owned()];
    for key in ["name", "class_name", "binding", "service"] {
        names.extend(wrangler.lines().filter_map(|line| {
            let value = line.strip_prefix(key)?.trim_start().strip_prefix('=')?;
            let value = value.trim().trim_matches('"');
            (value != "remote-agents").then(|| value.to_owned())
        }));
    }
    for name in ["ProducerAgents", "ConsumerAgents", "AGENTS", "PRODUCER"] {
        assert!(names.iter().any(|known| known == name), "{name} is gone");
    }
    for path in sources("src") {
        let code = code(&path);
        let words = words(&code);
        for name in &names {
            let is_there = words.contains(name.as_str()) || code.contains(&format!("\"{name}\""));
            assert!(!is_there, "{} names {name}", path.display());
        }
    }
    for (worker, class) in [
        ("producer-worker", "ProducerAgents"),
        ("consumer-worker", "ConsumerAgents"),
    ] {
        let shell = read(format!("{worker}/src/shell.rs"));
        assert!(shell.contains(&format!("pub struct {class}(")), "{worker}");
    }
}

#[test]
fn the_lints_that_keep_requests_from_panicking_stand() {
    const LINTS: [&str; 8] = [
        "await_holding_refcell_ref",
        "expect_used",
        "indexing_slicing",
        "panic",
        "todo",
        "unimplemented",
        "unreachable",
        "unwrap_used",
    ];
    let workspace = read("Cargo.toml");
    for lint in LINTS {
        assert!(
            workspace.contains(&format!("\n{lint} = \"deny\"\n")),
            "{lint} is not denied"
        );
    }
    for manifest in [
        "Cargo.toml",
        "producer-worker/Cargo.toml",
        "consumer-worker/Cargo.toml",
        "miniflare/bench/worker/Cargo.toml",
    ] {
        assert!(
            read(manifest).contains("[lints]\nworkspace = true"),
            "{manifest}"
        );
    }
    for place in ["src", "producer-worker/src", "consumer-worker/src"] {
        for path in sources(place) {
            let code = code(&path);
            for lint in LINTS {
                let name = format!("clippy::{lint}");
                assert!(!code.contains(&name), "{} speaks of {name}", path.display());
            }
        }
    }
}

/// The names in the sections of dependencies of a manifest.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut is_inside = false;
    let mut names = BTreeSet::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            is_inside = line.ends_with("dependencies]");
        } else if is_inside
            && !line.starts_with('#')
            && let Some((name, _)) = line.split_once([' ', '.', '='])
        {
            names.insert(name.to_owned());
        }
    }
    names
}

#[test]
fn every_dependency_is_used_and_explained() {
    let members = [
        "producer-worker",
        "consumer-worker",
        "miniflare/bench/worker",
        "sim",
        "xtask",
        "fuzz",
    ];
    let mut names: BTreeSet<String> = members
        .iter()
        .flat_map(|member| dependencies(&read(format!("{member}/Cargo.toml"))))
        .collect();
    let workspace = read("Cargo.toml");
    let (shared, own) = workspace.split_once("[package]").unwrap();
    names.extend(dependencies(own));
    assert!(names.contains("serde") && names.contains("rusqlite") && names.contains("clap"));
    for shared in dependencies(shared) {
        assert!(names.contains(&shared), "no package uses {shared}");
    }
    names.remove("remote-agents");
    for package in [
        "package.json",
        "miniflare/bench/package.json",
        "miniflare/model/package.json",
    ] {
        let package: Value = serde_json::from_str(&read(package)).unwrap();
        for section in ["dependencies", "devDependencies"] {
            let section = package.get(section).and_then(Value::as_object);
            names.extend(section.into_iter().flat_map(|s| s.keys().cloned()));
        }
    }
    let contributing = read("CONTRIBUTING.md");
    for name in names {
        let row = contributing
            .lines()
            .find(|line| line.starts_with('|') && line.contains(&format!("`{name}`")));
        assert!(row.is_some(), "CONTRIBUTING.md does not say why {name}");
    }
}

#[test]
fn case_14_the_date_is_pinned_and_no_object_asks_for_its_name() {
    let wrangler = read("wrangler.toml");
    let dates: Vec<&str> = wrangler
        .lines()
        .filter_map(|line| line.strip_prefix("compatibility_date = "))
        .collect();
    assert_eq!(dates, ["\"2026-10-15\""], "one date, for both Workers");
    let harness = read("miniflare/harness.mjs");
    assert!(harness.contains("compatibility_date") && !harness.contains("\"20"));
    // An object's session is in each request, and behind that in its own rows.
    for place in [
        "src/cloudflare",
        "producer-worker/src",
        "consumer-worker/src",
    ] {
        for path in sources(place) {
            let code = code(&path);
            for asks in ["id.name", "id().name", "&\"name\".into()", "js_name = name"] {
                assert!(!code.contains(asks), "{}: {asks}", path.display());
            }
        }
    }
}

#[test]
fn every_model_of_the_tests_has_its_histories_read() {
    let mut count = 0;
    let places = ["tests", "consumer-worker/tests"];
    let mut open: Vec<PathBuf> = places.map(|place| root().join(place)).into();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
            continue;
        }
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        let models = source
            .lines()
            .filter(|line| line.starts_with("impl ") && line.contains("LanguageModel for "));
        let models = models.count();
        let read = source.matches("paired::read(&request)").count();
        assert!(read >= models, "{}: {models} models", path.display());
        count += models;
    }
    assert!(count > 7, "only {count} models were found");
}

#[test]
fn the_readme_has_every_code_and_every_route() {
    let readme = read("README.md");
    for code in Code::ALL {
        let row = format!("| `{code}` | {} |", code.status());
        assert!(readme.contains(&row), "the row {row:?} is missing");
    }
    for action in Action::ALL {
        let route = format!(
            "| `{} {{base}}/{{agentType}}/{}` |",
            action.allow(),
            action.as_str()
        );
        assert!(readme.contains(&route), "the row {route:?} is missing");
    }
}

#[test]
fn the_readme_installs_what_the_lock_file_asks_for() {
    let lock = read("Cargo.lock");
    // `worker-build` is published together with `worker`, under the same version.
    let (_, behind) = lock.split_once("name = \"worker\"\nversion = \"").unwrap();
    let (version, _) = behind.split_once('"').unwrap();
    let command = format!("cargo install worker-build@{version}\n");
    assert!(read("README.md").contains(&command), "{command}");
}

#[test]
fn the_readme_s_first_job_is_the_one_that_dev_prints() {
    let readme = read("README.md");
    let dev = read("miniflare/dev.mjs");
    let (job, _) = readme.split_once("## Writing an agent").unwrap();
    let commands: Vec<&str> = job
        .lines()
        .filter(|line| line.starts_with("curl "))
        .collect();
    assert_eq!(commands.len(), 7);
    for command in commands {
        let (command, body) = command.split_once(" -d '").unwrap_or((command, ""));
        let printed = command
            .replace("http://127.0.0.1:8787", "${consumer}")
            .replace("http://127.0.0.1:8788", "${producer}")
            .replace("demo-1", "${sessionId}");
        assert!(dev.contains(&printed), "{printed}");
        if !body.is_empty() {
            let body: Value = serde_json::from_str(body.trim_end_matches('\'')).unwrap();
            assert_eq!(body["sessionId"], "demo-1");
            let documents = body["state"]["documents"].as_array().unwrap();
            let texts = documents
                .iter()
                .flat_map(|document| document.as_object().unwrap().values())
                .chain([&body["message"]]);
            for text in texts {
                assert!(dev.contains(&text.to_string()), "{text}");
            }
        }
    }
}

/// A runtime whose commits become durable when the gate is opened.
struct Gated {
    inner: Rc<LocalRuntime>,
    gate: StopSignal,
}

impl Runtime for Gated {
    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn entropy(&self) -> [u8; 16] {
        self.inner.entropy()
    }

    fn sleep(&self, duration: Duration) -> LocalBoxFuture<'static, ()> {
        self.inner.sleep(duration)
    }

    fn spawn(&self, task: LocalBoxFuture<'static, ()>) {
        self.inner.spawn(task);
    }

    fn log(&self, level: Level, event: &dyn fmt::Display) {
        self.inner.log(level, event);
    }
}

impl ObjectRuntime for Gated {
    fn sync(&self) -> LocalBoxFuture<'static, Result<()>> {
        let open = self.gate.wait();
        Box::pin(async move {
            open.await;
            Ok(())
        })
    }

    fn set_alarm(&self, at: Option<Timestamp>) -> LocalBoxFuture<'static, Result<()>> {
        self.inner.set_alarm(at)
    }
}

#[test]
fn a_chunk_is_published_once_its_commit_is_durable_and_not_before() {
    in_world(|| async {
        let inner = LocalRuntime::new(0, Rc::new(|_, _| {}));
        inner.on_alarm(Rc::new(|| Box::pin(async { Ok(()) })));
        let gate = StopSignal::default();
        let runtime = Rc::new(Gated {
            inner,
            gate: gate.clone(),
        });
        let database = Rc::new(RusqliteDatabase::in_memory().unwrap());
        let store = Rc::new(SqlStore::new(database));
        let speaker = Agent::new(
            AgentType::parse("speaker").unwrap(),
            "",
            scripted(|_| text("all is said")),
        );
        let agents = Agents::new([speaker]).unwrap();
        let producer = Producer::new(runtime, store.clone(), agents);

        let start = http::Request::post("/speaker/start")
            .body(Bytes::from(r#"{"sessionId": "s", "message": "m"}"#))
            .unwrap();
        assert_eq!(producer.handle(start).await.status(), 200);
        let attach = http::Request::get("/speaker/sse?sessionId=s&fromSequence=0")
            .body(Bytes::new())
            .unwrap();
        let Body::Stream(mut stream) = producer.handle(attach).await.into_body() else {
            panic!("a stream was expected")
        };

        // The run ends while nothing of it is durable: a reader gets comments and nothing else.
        let early = tokio::time::timeout(Duration::from_secs(100), async {
            let mut parts = 0;
            loop {
                let part = stream.next().await.unwrap().unwrap();
                let part = std::str::from_utf8(&part).unwrap();
                assert!(part.starts_with(':'), "after {parts} parts: {part}");
                parts += 1;
            }
        });
        assert!(early.await.is_err());
        let record = store.session().unwrap().unwrap();
        assert_eq!(record.status, SessionStatus::Completed);
        assert!(record.last_sequence > 3);

        gate.set();
        let mut rest = String::new();
        while let Some(part) = stream.next().await {
            rest.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
        }
        let chunks = rest.matches("event: chunk\n").count();
        assert_eq!(u64::try_from(chunks).unwrap(), record.last_sequence);
        assert!(rest.contains("event: end\n"), "{rest}");
    });
}
