//! How runs end: once, told to everyone, and by nobody who belongs to an earlier one.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use remote_agents::agent::{Limits, ToolContext};
use remote_agents::native::CommitMoment;

use super::*;

#[test]
fn case_06_a_running_session_without_a_runner_says_so_and_what_it_said_is_replayed() {
    in_world(|| async {
        let client = client(|| worker(6));
        start(&client, "go").await;
        tokio::time::sleep(Duration::from_millis(30)).await;
        client.objects.evict(&id()).unwrap();
        // The row says running, and nothing is at work. Asking changes nothing about that.
        for _ in 0..3 {
            let read = status(&client).await;
            assert_eq!(
                (&read["status"], &read["isExecuting"]),
                (&json!("running"), &json!(false))
            );
        }
        let mut reader = attach(&client, "&fromSequence=0").await;
        let mut told = String::new();
        while !told.contains("event: caught-up") {
            let part = reader.next().await.unwrap().unwrap();
            told.push_str(std::str::from_utf8(&part).unwrap());
        }
        let replayed = told.matches("event: chunk\n").count();
        assert!(replayed > 5, "{told}");
        assert!(
            told.contains(&format!("{{\"sequence\":{replayed}}}")),
            "{told}"
        );
        // The alarm goes on with it, in the same stream, to a typed end.
        while let Some(part) = reader.next().await {
            told.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
        }
        assert_eq!(told.matches("event: end\n").count(), 1);
        assert_eq!(status(&client).await["status"], "completed");
    });
}

type Told = Rc<RefCell<BTreeMap<(String, String), u32>>>;

fn telling(agent: Agent, told: &Told) -> Agent {
    let told = told.clone();
    agent.with_after_settled(move |settled| {
        let key = (
            settled.run_id.to_string(),
            settled.status.as_str().to_owned(),
        );
        *told.borrow_mut().entry(key).or_default() += 1;
        async { Ok(()) }
    })
}

/// Reads from the run's start; a stream that breaks off is attached again.
async fn followed(client: &Client) -> Vec<Frame> {
    let (mut frames, mut decoder) = (Vec::new(), remote_agents::protocol::sse::Decoder::new());
    let mut last = -1;
    loop {
        let mut body = attach(client, &format!("&fromSequence={last}")).await;
        while let Some(Ok(part)) = body.next().await {
            decoder.push(&part);
            while let Some(decoded) = decoder.poll().unwrap() {
                let remote_agents::protocol::sse::Decoded::Frame(frame) = decoded else {
                    continue;
                };
                if let Frame::Chunk { sequence, .. } = &frame {
                    last = i64::try_from(*sequence).unwrap();
                }
                let is_over = is_terminal(&frame);
                frames.push(frame);
                if is_over {
                    assert!(body.next().await.is_none(), "something follows the end");
                    return frames;
                }
            }
        }
        decoder = remote_agents::protocol::sse::Decoder::new();
    }
}

/// What happens to a run that is under way.
#[derive(Clone, Copy)]
enum Befalls {
    Nothing,
    Post(&'static str),
    /// The object ends again and again, until the run's attempts are used up.
    Evictions,
    /// The object ends right behind the commit that takes note of the interrupt.
    InterruptAndEviction,
}

async fn befall(client: &Client, what: Befalls) {
    match what {
        Befalls::Nothing => {}
        Befalls::Post(route) => assert_eq!(post(client, route, None).await.0, 200),
        Befalls::Evictions => {
            for _ in 0..40 {
                client.objects.evict(&id()).unwrap();
                tokio::time::sleep(Duration::from_secs(40)).await;
            }
        }
        Befalls::InterruptAndEviction => {
            let objects = Rc::downgrade(&client.objects);
            let ended = Rc::new(Cell::new(false));
            let is_over = ended.clone();
            client.objects.on_commit(Rc::new(move |session, moment| {
                if moment == CommitMoment::After && !is_over.replace(true) {
                    objects.upgrade().unwrap().evict(session).unwrap();
                }
            }));
            assert_eq!(post(client, "interrupt", None).await.0, 503);
            assert!(ended.get());
        }
    }
}

#[test]
fn case_08_every_settlement_tells_the_hook_and_every_reader_once() {
    in_world(|| async {
        let three_steps = Limits {
            max_steps: 3,
            ..Limits::default()
        };
        let five_seconds = Limits {
            max_run_time: Some(Duration::from_secs(5)),
            ..Limits::default()
        };
        let default = Limits::default;
        let exhausted = "run_attempts_exhausted";
        for (message, what, limits, wanted, code) in [
            ("go", Befalls::Nothing, default(), "completed", ""),
            (
                "fail",
                Befalls::Nothing,
                default(),
                "failed",
                "provider_error",
            ),
            (
                "hang",
                Befalls::Post("interrupt"),
                default(),
                "interrupted",
                "",
            ),
            (
                "hang",
                Befalls::Post("abort"),
                default(),
                "failed",
                "run_aborted",
            ),
            ("hang", Befalls::Evictions, default(), "failed", exhausted),
            (
                "hang",
                Befalls::InterruptAndEviction,
                default(),
                "interrupted",
                "",
            ),
            ("go", Befalls::Nothing, three_steps, "failed", exhausted),
            (
                "hang",
                Befalls::Nothing,
                five_seconds,
                "failed",
                "run_timeout",
            ),
        ] {
            let told = Told::default();
            let hooked = told.clone();
            let steps = if limits.max_steps == 3 { 40 } else { 2 };
            let client = Rc::new(client(move || {
                telling(worker(steps).with_limits(limits), &hooked)
            }));
            let started = start(&client, message).await;
            let reader = client.clone();
            let live = tokio::task::spawn_local(async move { followed(&reader).await });
            tokio::time::sleep(Duration::from_millis(20)).await;
            befall(&client, what).await;
            until(&client, wanted).await;
            tokio::time::sleep(Duration::from_secs(3_600)).await;
            let run = started["runId"].as_str().unwrap().to_owned();
            let once = BTreeMap::from([((run, wanted.to_owned()), 1)]);
            assert_eq!(*told.borrow(), once, "{message} {wanted} {code}");
            let live = live.await.unwrap();
            let late = followed(&client).await;
            for frames in [&live, &late] {
                let terminal: Vec<_> = frames.iter().filter(|frame| is_terminal(frame)).collect();
                assert_eq!(terminal.len(), 1, "{message} {wanted} {code}");
                assert_eq!(Some(terminal[0]), frames.last());
            }
            let told = match live.last() {
                Some(Frame::Error(error)) => error.code.as_str(),
                _ => "",
            };
            assert_eq!(told, code, "{message} {wanted}");
            assert_eq!(live.last(), late.last(), "{message} {wanted} {code}");
            assert_eq!(
                numbered(&live),
                numbered(&late),
                "{message} {wanted} {code}"
            );
        }
    });
}

#[test]
fn case_24_what_is_left_of_an_earlier_run_changes_nothing_of_the_next() {
    in_world(|| async {
        let kept: Rc<RefCell<Vec<ToolContext>>> = Rc::default();
        let keeping = kept.clone();
        let client = client(move || {
            let keeping = keeping.clone();
            let model = scripted(|request| {
                let says = format!("{:?}", request.messages.last());
                if says.contains("first") {
                    calls(&[("c", "keep", json!({}))])
                } else if turn(request) == 0 {
                    calls(&[("d", "hang", json!({}))])
                } else {
                    text("done")
                }
            });
            Agent::new(AgentType::parse("worker").unwrap(), "Work.", model)
                .with_state::<Notes>()
                .with_tool(typed_tool("hang", "Hangs.", |_, _: Value| async move {
                    std::future::pending::<()>().await;
                    Ok(json!({}))
                }))
                .with_tool(typed_tool(
                    "keep",
                    "Keeps its context and hangs.",
                    move |context: ToolContext, _: Value| {
                        keeping.borrow_mut().push(context);
                        async {
                            std::future::pending::<()>().await;
                            Ok(json!({}))
                        }
                    },
                ))
        });
        start(&client, "first").await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(
            kept.borrow()[0].emit("early", json!({})).is_ok(),
            "it is at work"
        );
        post(&client, "interrupt", None).await;
        until(&client, "interrupted").await;
        let (code, second) = post(&client, "resume", Some("second")).await;
        assert_eq!(code, 200, "{second}");
        tokio::time::sleep(Duration::from_millis(20)).await;

        // The second run is under way when the first one's tool comes back.
        let before = status(&client).await;
        assert_eq!(
            (&before["status"], &before["runId"]),
            (&json!("running"), &second["runId"])
        );
        let late = kept.borrow()[0].clone();
        assert!(late.emit("late", json!({})).is_err());
        assert!(
            late.update(|state: &mut Notes| state.notes.push(9))
                .is_err()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(status(&client).await, before);
        post(&client, "interrupt", None).await;
        until(&client, "interrupted").await;
        let (frames, raw) = client.sse(&format!("{SSE}&fromSequence=0")).await;
        assert!(raw.contains("\"early\"") && !raw.contains("\"late\""));
        let Some(Frame::End(end)) = frames.last() else {
            panic!("{frames:?}")
        };
        assert_eq!(
            end.run_id.as_ref().map(ToString::to_string),
            second["runId"].as_str().map(Into::into)
        );
        assert_eq!(end.state.as_ref().unwrap()["notes"], json!([]));
    });
}

#[test]
fn case_27_whoever_attaches_around_the_end_has_all_of_it_and_the_end_once_and_last() {
    in_world(|| async {
        for wanted in ["go", "fail"] {
            let client = Rc::new(client(|| worker(2)));
            start(&client, wanted).await;
            let mut readers = Vec::new();
            let mut is_over = 0;
            while is_over < 5 {
                let reader = client.clone();
                readers.push(tokio::task::spawn_local(async move {
                    reader.sse(&format!("{SSE}&fromSequence=0")).await
                }));
                yield_now().await;
                is_over += u32::from(status(&client).await["status"] != "running");
            }
            let mut copies = Vec::new();
            for reader in readers {
                let (frames, _) = reader.await.unwrap();
                let ends = frames.iter().filter(|frame| is_terminal(frame)).count();
                assert_eq!(ends, 1);
                copies.push((numbered(&frames), frames.last().unwrap().clone()));
            }
            assert!(copies.len() > 5, "{} readers", copies.len());
            assert!(
                copies
                    .iter()
                    .all(|copy| is_terminal(&copy.1) && *copy == copies[0])
            );
        }
    });
}
