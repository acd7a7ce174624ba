//! The clients of model providers against scripted endpoints on loopback. In workerd they are run by
//! `miniflare/test/providers.test.mjs`.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::rc::Rc;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use remote_agents::native::{HttpClient, LocalRuntime};
use remote_agents::platform::Runtime;
use remote_agents::transport::Fetch;
use serde_json::Value;

use crate::loopback::on_loopback;
use crate::providers_suite::{CASES, CLIENTS, Endpoints, run};
use crate::support::{Lines, read};

/// Set where the npm packages are known to be there: without them the test then fails.
const REQUIRED: &str = "NPM_PACKAGES";

/// The endpoints; they end with their standard input.
struct Served {
    child: Child,
    stdin: Option<ChildStdin>,
    urls: Value,
}

impl Served {
    /// `None`, with the reason, where the npm packages are missing.
    fn start() -> Option<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let node = root.join("node_modules/.bin/node");
        let aimock = root.join("node_modules/@copilotkit/aimock");
        if !node.exists() || !aimock.exists() {
            let reason = "the npm packages are not installed; `cargo xtask test` installs them";
            assert!(std::env::var_os(REQUIRED).is_none(), "{reason}");
            println!("skipped: {reason}");
            return None;
        }
        let mut child = Command::new(node)
            .arg(root.join("miniflare/providers/endpoints.mjs"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        BufReader::new(stdout).read_line(&mut line).unwrap();
        Some(Self {
            stdin: child.stdin.take(),
            child,
            urls: serde_json::from_str(&line).unwrap(),
        })
    }

    fn url(&self, name: &str) -> String {
        self.urls[name].as_str().unwrap().to_owned()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        drop(self.stdin.take());
        self.child.wait().unwrap();
    }
}

#[test]
fn every_client_holds_the_suite_on_loopback() {
    let Some(served) = Served::start() else {
        return;
    };
    on_loopback(async {
        let fetch: Rc<dyn Fetch> = Rc::new(HttpClient);
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let now = u64::try_from(now.as_millis()).unwrap();
        let runtime: Rc<dyn Runtime> = LocalRuntime::new(now, Lines::default().sink());
        let endpoints = Endpoints {
            workers_ai: fetch.clone(),
            fetch: fetch.clone(),
            runtime,
            aimock: served.url("aimock"),
            raw: served.url("raw"),
        };
        assert!(CASES.len() > 30);
        let cases = CLIENTS
            .into_iter()
            .flat_map(|client| CASES.iter().map(move |case| (client, case)));
        let failures: Vec<String> = stream::iter(cases)
            .map(|(client, case)| {
                let endpoints = endpoints.clone();
                async move {
                    let held = run(case, client, &endpoints).await;
                    held.err()
                        .map(|what| format!("{}: {}: {what}", client.name(), case.name))
                }
            })
            .buffer_unordered(16)
            .filter_map(|failure| async move { failure })
            .collect()
            .await;
        assert!(failures.is_empty(), "{}", failures.join("\n"));

        let request = http::Request::get(format!("{}/histories", served.url("raw")));
        let answer = fetch
            .fetch(request.body(Bytes::new()).unwrap())
            .await
            .unwrap();
        let (_, histories) = read(answer).await;
        let asked = CASES.len() * CLIENTS.len();
        assert!(
            histories["requests"].as_u64().unwrap() >= asked as u64,
            "{histories}"
        );
        assert_eq!(histories["violations"], serde_json::json!([]));
    });
}
