//! A consumer and a producer of different versions.

use std::cell::Cell;

use futures::future::LocalBoxFuture;
use http::{HeaderMap, HeaderValue};
use remote_agents::agent::SubAgent;
use remote_agents::http::{Request, Response};
use remote_agents::native::MountFetch;
use remote_agents::store::SubLocation;
use remote_agents::transport::{Fetch, FetchError, HttpTransport};

use super::*;

const VERSION: &str = "x-remote-agents-version";

/// A way between two services that says another version on each side; an old peer says none.
struct Aged {
    inner: MountFetch,
    consumer: Option<&'static str>,
    producer: Option<&'static str>,
    starts: Rc<Cell<u32>>,
}

fn say(headers: &mut HeaderMap, version: Option<&'static str>) {
    headers.remove(VERSION);
    if let Some(version) = version {
        headers.insert(VERSION, HeaderValue::from_static(version));
    }
}

impl Fetch for Aged {
    fn fetch(&self, mut request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
        if request.uri().path().ends_with("/start") {
            self.starts.set(self.starts.get() + 1);
        }
        say(request.headers_mut(), self.consumer);
        let (answer, version) = (self.inner.fetch(request), self.producer);
        Box::pin(async move {
            let mut answer = answer.await?;
            say(answer.headers_mut(), version);
            Ok(answer)
        })
    }
}

/// A parent whose one child is in a service behind such a way; and how many starts were sent.
fn pair(
    consumer: Option<&'static str>,
    producer: Option<&'static str>,
) -> (Client, Client, Rc<Cell<u32>>) {
    let far = client(|| worker(1));
    let starts: Rc<Cell<u32>> = Rc::default();
    let (mount, objects, count) = (far.mount.clone(), far.objects.clone(), starts.clone());
    let parent = LocalObjects::new(
        1_700_000_000_000,
        Lines::default().sink(),
        Rc::new(move |_, runtime| {
            let fetch = Aged {
                inner: MountFetch::new(mount.clone(), objects.clone()),
                consumer,
                producer,
                starts: count.clone(),
            };
            let worker = AgentType::parse("worker")?;
            let transport = HttpTransport::new(
                Rc::new(fetch) as Rc<dyn Fetch>,
                runtime.clone(),
                "http://far",
                "/agents",
                worker.clone(),
            );
            let model = scripted(|request| match turn(request) {
                0 => calls(&[("c1", "subagent__far", json!({"message": "go"}))]),
                _ => text("done"),
            });
            let far = SubAgent::new(
                "far",
                "Far.",
                worker,
                SubLocation::Remote,
                Rc::new(transport),
            );
            Agents::new(
                [Agent::new(AgentType::parse("parent")?, "Ask.", model).with_sub_agent(far)],
            )
        }),
    );
    let near = Client {
        mount: Rc::new(Mount::new("/agents").allow_unauthenticated()),
        objects: parent,
    };
    (near, far, starts)
}

#[test]
fn case_41_old_and_new_consumers_and_producers_work_together_or_say_that_they_cannot() {
    in_world(|| async {
        // A peer that says no version is of the first; a minor one is added without a word.
        let known = [None, Some("1")];
        for consumer in [None, Some("1"), Some("2")] {
            for producer in [None, Some("1"), Some("2")] {
                let (near, far, starts) = pair(consumer, producer);
                let body = json!({"sessionId": "p", "message": "go"});
                assert_eq!(near.post("/agents/parent/start", body).await.0, 200);
                let (frames, _) = near
                    .sse("/agents/parent/sse?sessionId=p&fromSequence=0")
                    .await;
                assert!(matches!(frames.last(), Some(Frame::End(_))), "{frames:?}");
                let ends: Vec<_> = numbered(&frames)
                    .into_iter()
                    .filter(|(_, chunk)| chunk["type"] == "tool_end" && chunk["agentId"] == "p")
                    .collect();
                let [(_, end)] = &ends[..] else {
                    panic!("{ends:?}")
                };
                let works = known.contains(&consumer) && known.contains(&producer);
                let pair = format!("consumer {consumer:?}, producer {producer:?}: {end}");
                assert_eq!(end["success"], works, "{pair}");
                assert_eq!(starts.get(), 1, "it is not sent again: {pair}");
                if !works {
                    assert!(end.to_string().contains("VERSION_UNSUPPORTED"), "{pair}");
                }
                if !known.contains(&consumer) {
                    assert!(far.objects.sessions().is_empty(), "{pair}");
                }
            }
        }
    });
}
