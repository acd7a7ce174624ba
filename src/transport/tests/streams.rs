//! Attaches and the frames of their bodies.

use super::*;

/// Everything that a stream yields: sequences, then how it ended.
async fn drain(bench: &Bench) -> (Vec<u64>, String) {
    let mut frames = attach(bench).await.unwrap();
    let mut sequences = Vec::new();
    let mut end = "nothing".to_owned();
    while let Some(frame) = frames.next().await {
        match frame {
            Ok(Frame::Chunk { sequence, .. }) => sequences.push(sequence),
            Ok(Frame::CaughtUp { .. }) => {}
            Ok(Frame::End(frame)) => end = frame.status.as_str().into(),
            Ok(Frame::Error(frame)) => end = frame.code,
            Err(error) => end = format!("dropped: {error}"),
        }
    }
    (sequences, end)
}

fn chunk_event(sequence: u64) -> String {
    let mut out = String::new();
    sse::encode_chunk(
        &mut out,
        sequence,
        r#"{"type":"text_delta","delta":"é","agentId":"c"}"#,
    );
    out
}

const END: &str = "event: end\ndata: {\"status\":\"completed\"}\n\n";

#[tokio::test(start_paused = true)]
async fn a_stream_cut_anywhere_is_dropped_and_a_whole_one_ends() {
    let whole = format!(
        "{}{}: ping\n\n{}{END}",
        chunk_event(1),
        chunk_event(2),
        chunk_event(3)
    )
    .into_bytes();
    let ends: Vec<usize> = {
        let text = String::from_utf8(whole.clone()).unwrap();
        text.match_indices("\n\n").map(|(at, _)| at + 2).collect()
    };
    for cut in 0..=whole.len() {
        for reset in [false, true] {
            let mut parts: Vec<Result<Bytes, BodyError>> = whole[..cut]
                .chunks(5)
                .map(|part| Ok(Bytes::copy_from_slice(part)))
                .collect();
            if reset {
                parts.push(Err(BodyError("reset".into())));
            }
            let (sequences, end) = drain(&Bench::new([streams(parts, false)])).await;
            let complete = ends
                .iter()
                .enumerate()
                .filter(|(n, end)| *n != 2 && **end <= cut)
                .count();
            assert_eq!(sequences.len(), complete.min(3), "cut at {cut}");
            if cut == whole.len() {
                assert_eq!(end, "completed");
            } else {
                assert!(
                    end.starts_with("dropped: unreachable"),
                    "cut at {cut}: {end}"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_read_behind_a_terminal_frame() {
    let body = format!("{}{END}{}", chunk_event(1), chunk_event(2));
    let (sequences, end) = drain(&Bench::new([streams(vec![Ok(body.into())], true)])).await;
    assert_eq!((sequences, end.as_str()), (vec![1], "completed"));
}

#[tokio::test(start_paused = true)]
async fn a_recoverable_error_is_a_drop_and_any_other_an_end() {
    let event = |recoverable: bool| {
        let body = format!(
            "{}event: error\ndata: {{\"code\":\"provider_error\",\"error\":\"x\",\"recoverable\":{recoverable}}}\n\n",
            chunk_event(1)
        );
        Bench::new([streams(vec![Ok(body.into())], false)])
    };
    assert_eq!(
        drain(&event(false)).await,
        (vec![1], "provider_error".into())
    );
    let (sequences, end) = drain(&event(true)).await;
    assert_eq!(sequences, [1]);
    assert!(end.starts_with("dropped"), "{end}");
}

#[tokio::test(start_paused = true)]
async fn garbage_on_a_stream_is_a_drop() {
    let body = "event: chunk\ndata: {oops\n\n";
    let (_, end) = drain(&Bench::new([streams(vec![Ok(body.into())], true)])).await;
    assert!(end.starts_with("dropped: malformed"), "{end}");
}

#[tokio::test(start_paused = true)]
async fn an_event_over_the_limit_is_not_asked_for_again() {
    let body = format!("event: chunk\ndata: {}", "x".repeat(sse::EVENT_LIMIT + 1));
    let (_, end) = drain(&Bench::new([streams(vec![Ok(body.into())], true)])).await;
    let error = TransportError::TooLarge(sse::EVENT_LIMIT);
    assert_eq!(end, format!("dropped: {error}"));
    assert!(!error.may_pass());
}

#[tokio::test(start_paused = true)]
async fn silence_drops_a_stream_and_any_byte_is_life() {
    let pings: Step = Box::new(|_| {
        // Six pings, 40 s apart, then nothing.
        let parts = stream::unfold(0, |n| async move {
            if n == 6 {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(Duration::from_secs(40)).await;
            Some((Ok(Bytes::from_static(b": ping\n\n")), n + 1))
        });
        Box::pin(async move {
            Ok(answer(
                200,
                sse::CONTENT_TYPE,
                Body::Stream(Box::pin(parts)),
            ))
        })
    });
    let bench = Bench::new([pings]);
    let (_, end) = drain(&bench).await;
    assert_eq!(end, "dropped: no answer within 45s");
    assert_eq!(bench.runtime.elapsed(), (6 * 40 + 45) * 1000);
}

#[tokio::test(start_paused = true)]
async fn an_attach_is_tried_once_and_has_a_deadline() {
    for (step, malformed) in [
        (unreachable(), false),
        (silent(), false),
        (refuses(503, "OVERLOADED"), false),
        (gives(200, "application/json", "{}"), true),
        (gives(200, "text/html", ""), true),
    ] {
        let bench = Bench::new([step]);
        let error = attach(&bench).await.err().unwrap();
        assert_eq!(
            matches!(error, TransportError::Malformed(_)),
            malformed,
            "{error}"
        );
        assert_eq!(bench.requests(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_attach_without_a_position_says_none() {
    let bench = Bench::new([streams(vec![], true)]);
    drop(
        bench
            .transport
            .stream(&child(), Position::None, None)
            .await
            .unwrap(),
    );
    assert_eq!(
        bench.fetch.seen.borrow()[0].uri().query(),
        Some("sessionId=p%3A1-remote-c")
    );
}

#[tokio::test(start_paused = true)]
async fn a_body_is_dropped_with_its_stream() {
    struct Guard(Rc<Cell<bool>>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let dropped = Rc::new(Cell::new(false));
    let guard = Guard(dropped.clone());
    let step: Step = Box::new(move |_| {
        let parts = stream::unfold(guard, |guard| async move {
            std::future::pending::<()>().await;
            Some((Ok(Bytes::new()), guard))
        });
        Box::pin(async move {
            Ok(answer(
                200,
                sse::CONTENT_TYPE,
                Body::Stream(Box::pin(parts)),
            ))
        })
    });
    let bench = Bench::new([step]);
    let frames = attach(&bench).await.unwrap();
    assert!(!dropped.get());
    drop(frames);
    assert!(dropped.get());
}
