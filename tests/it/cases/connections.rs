//! Readers and callers that come, come twice, stay away, or leave at any moment.

use std::task::Poll;

use futures::FutureExt as _;
use futures::future::poll_fn;

use super::*;

#[test]
fn case_03_each_reader_has_the_whole_stream_and_a_second_start_is_told_to_attach() {
    in_world(|| async {
        let client = Rc::new(client(|| worker(3)));
        let started = start(&client, "go").await;
        let mut readers = Vec::new();
        for moment in 0..12 {
            let reader = client.clone();
            readers.push(tokio::task::spawn_local(async move {
                reader.sse(&format!("{SSE}&fromSequence=0")).await
            }));
            if moment % 4 == 3 {
                let (code, body) = post(&client, "start", Some("go")).await;
                assert_eq!((code, &body["code"]), (409, &json!("ALREADY_RUNNING")));
                assert_eq!(body["streamId"], started["streamId"]);
                assert_eq!(body["runId"], started["runId"]);
            }
            yield_now().await;
        }
        let mut copies = Vec::new();
        for reader in readers {
            copies.push(numbered(&reader.await.unwrap().0));
        }
        let sequences: Vec<u64> = copies[0].iter().map(|(sequence, _)| *sequence).collect();
        let last = u64::try_from(copies[0].len()).unwrap();
        assert_eq!(sequences, (1..=last).collect::<Vec<_>>());
        assert!(copies.iter().all(|copy| *copy == copies[0]));
        let runs = copies[0]
            .iter()
            .filter(|(_, chunk)| chunk["type"] == "run_started");
        assert_eq!(runs.count(), 1);
    });
}

#[test]
fn case_16_a_thousand_readers_that_come_and_go_leave_nothing() {
    in_world(|| async {
        let client = client(|| worker(1).with_max_readers(2));
        start(&client, "hang").await;
        let mut stays = attach(&client, "").await;
        while !String::from_utf8_lossy(&stays.next().await.unwrap().unwrap()).contains("caught-up")
        {
        }
        let before = client.objects.pending(&id());
        for read in 0..1_000 {
            // Room for one more: each must have been forgotten before the next comes.
            let mut reader = attach(&client, "").await;
            for _ in 0..read % 4 {
                reader.next().await.unwrap().unwrap();
            }
            if read % 4 == 3 {
                // One that waits for what is next.
                assert!(reader.next().now_or_never().is_none());
            }
        }
        assert_eq!(client.objects.pending(&id()), before);
        post(&client, "interrupt", None).await;
        let mut rest = String::new();
        while let Some(part) = stays.next().await {
            rest.push_str(std::str::from_utf8(&part.unwrap()).unwrap());
        }
        assert!(rest.contains("event: end\n"), "{rest}");
    });
}

#[test]
fn case_26_a_run_ends_the_same_whenever_its_readers_leave() {
    in_world(|| async {
        let kinds = async |client: &Client| {
            let (frames, _) = client.sse(&format!("{SSE}&fromSequence=0")).await;
            assert!(matches!(frames.last(), Some(Frame::End(_))), "{frames:?}");
            let kind = |(_, chunk): &(u64, Value)| chunk["type"].clone();
            numbered(&frames).iter().map(kind).collect::<Vec<_>>()
        };
        let undisturbed = client(|| worker(3));
        start(&undisturbed, "go").await;
        until(&undisturbed, "completed").await;
        let expected = kinds(&undisturbed).await;
        for parts in 0..expected.len() {
            let client = client(|| worker(3));
            start(&client, "go").await;
            let mut reader = attach(&client, "&fromSequence=0").await;
            for _ in 0..parts {
                if reader.next().await.is_none() {
                    break;
                }
            }
            drop(reader);
            until(&client, "completed").await;
            assert_eq!(kinds(&client).await, expected, "left after {parts} parts");
        }
    });
}

/// Polls the request at most `polls` times and then leaves.
async fn leave_after(client: &Client, route: &str, message: Option<&str>, polls: usize) -> bool {
    let request = post(client, route, message);
    let mut request = Box::pin(request);
    for _ in 0..polls {
        let polled = poll_fn(|context| Poll::Ready(request.as_mut().poll(context))).await;
        if polled.is_ready() {
            return true;
        }
        yield_now().await;
    }
    false
}

#[test]
fn case_26_a_caller_that_leaves_at_any_await_begins_a_whole_run_or_none() {
    in_world(|| async {
        let mut answered = false;
        let mut polls = 0;
        while !answered {
            let client = client(|| worker(2));
            answered = leave_after(&client, "start", Some("go"), polls).await;
            polls += 1;
            // Whoever was not answered sends it again.
            tokio::time::sleep(Duration::from_secs(1)).await;
            let (code, body) = post(&client, "start", Some("go")).await;
            assert!(
                code == 200
                    || ["ALREADY_RUNNING", "ALREADY_COMPLETED"]
                        .contains(&body["code"].as_str().unwrap()),
                "{body}"
            );
            until(&client, "completed").await;
            let (frames, _) = client.sse(&format!("{SSE}&fromSequence=0")).await;
            let chunks = numbered(&frames);
            let starts = chunks
                .iter()
                .filter(|(_, chunk)| chunk["type"] == "run_started");
            assert_eq!(starts.count(), 1, "left after {polls} polls");
        }
        assert!(polls > 1, "a start has an await");

        // So it is with a stop: it is carried out, or nothing of it happened.
        let mut answered = false;
        let mut polls = 0;
        while !answered {
            let client = client(|| worker(2));
            start(&client, "hang").await;
            tokio::time::sleep(Duration::from_millis(20)).await;
            answered = leave_after(&client, "interrupt", None, polls).await;
            polls += 1;
            tokio::time::sleep(Duration::from_secs(1)).await;
            post(&client, "interrupt", None).await;
            until(&client, "interrupted").await;
            let (frames, _) = client.sse(&format!("{SSE}&fromSequence=0")).await;
            let ends = frames.iter().filter(|frame| is_terminal(frame)).count();
            assert_eq!(ends, 1, "left after {polls} polls");
        }
    });
}

#[test]
fn case_18_nothing_of_an_evicted_object_stays_in_memory() {
    in_world(|| async {
        for message in ["go", "hang"] {
            let client = client(|| worker(20));
            start(&client, message).await;
            let mut reader = attach(&client, "").await;
            let unread = attach(&client, "").await;
            reader.next().await.unwrap().unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
            let mut earlier = Vec::new();
            for _ in 0..100 {
                earlier.push(Rc::downgrade(&client.objects.producer(&id()).unwrap()));
                client.objects.evict(&id()).unwrap();
                yield_now().await;
                status(&client).await;
            }
            // One that somebody holds would be seen.
            let held = client.objects.producer(&id()).unwrap();
            let seen = Rc::downgrade(&held);
            client.objects.evict(&id()).unwrap();
            yield_now().await;
            assert!(seen.upgrade().is_some());
            drop(held);
            earlier.push(seen);
            // Its readers hear that it is gone, and then hold nothing of it either.
            while let Some(Ok(_)) = reader.next().await {}
            drop((reader, unread));
            yield_now().await;
            let kept = earlier.iter().filter(|weak| weak.upgrade().is_some());
            assert_eq!(kept.count(), 0, "{message}");
        }
    });
}
