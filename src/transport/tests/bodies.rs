//! What becomes of an answer's body, and of the waits between tries.

use super::*;

/// An answer whose body tells when it is dropped.
fn guarded(
    status: u16,
    content_type: &'static str,
    header: Option<(&'static str, &'static str)>,
    parts: Vec<Result<Bytes, BodyError>>,
    dropped: &Rc<Cell<bool>>,
) -> Step {
    struct Guard(Rc<Cell<bool>>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.set(true);
        }
    }
    let guard = Guard(dropped.clone());
    Box::new(move |_| {
        let parts = stream::iter(parts).chain(stream::pending());
        let body = parts.map(move |part| {
            let _held = &guard;
            part
        });
        let mut answer = answer(status, content_type, Body::Stream(Box::pin(body)));
        if let Some((name, value)) = header {
            let value = HeaderValue::from_static(value);
            answer.headers_mut().insert(name, value);
        }
        Box::pin(async move { Ok(answer) })
    })
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_not_read_to_its_end_is_dropped_with_its_answer() {
    const JSON: &str = "application/json";
    const MOUNT: &str = "x-remote-agents-mount";
    let huge = || vec![Ok(Bytes::from(vec![b' '; 9 * 1024 * 1024]))];
    let cases = [
        ("a redirect", guarded_case(307, "text/html", None, vec![])),
        ("another success", guarded_case(202, JSON, None, vec![])),
        ("a wrong type", guarded_case(200, "text/html", None, vec![])),
        (
            "a bare refusal",
            guarded_case(403, "text/html", None, vec![]),
        ),
        ("a huge answer", guarded_case(200, JSON, None, huge())),
        ("a huge refusal", guarded_case(400, JSON, None, huge())),
        (
            "a projected mount",
            guarded_case(200, JSON, Some((MOUNT, "projected")), vec![]),
        ),
        (
            "a later version",
            guarded_case(200, JSON, Some(("x-remote-agents-version", "2")), vec![]),
        ),
    ];
    for (name, (step, dropped)) in cases {
        let bench = Bench::new([step]).without_retries();
        assert!(!dropped.get(), "{name}");
        let (result, began) = (start(&bench).await, bench.runtime.elapsed());
        assert!(result.is_err(), "{name}");
        assert!(dropped.get(), "{name}");
        assert_eq!((bench.requests(), began), (1, 0), "{name}");
    }
}

fn guarded_case(
    status: u16,
    content_type: &'static str,
    header: Option<(&'static str, &'static str)>,
    parts: Vec<Result<Bytes, BodyError>>,
) -> (Step, Rc<Cell<bool>>) {
    let dropped = Rc::new(Cell::new(false));
    let step = guarded(status, content_type, header, parts, &dropped);
    (step, dropped)
}

#[tokio::test(start_paused = true)]
async fn a_refusal_cut_short_is_a_network_failure_and_no_refusal() {
    let whole = json!({"code": "NOT_FOUND", "error": "No."}).to_string();
    for cut in 0..whole.len() {
        let part = Bytes::copy_from_slice(&whole.as_bytes()[..cut]);
        let step: Step = Box::new(move |_| {
            let parts = stream::iter([Ok(part), Err(BodyError("reset".into()))]);
            let body = Body::Stream(Box::pin(parts));
            Box::pin(async move { Ok(answer(404, "application/json", body)) })
        });
        let (result, sent, _) = outcome(Kind::PlainPost, vec![step, ok(&stopped())]).await;
        assert_eq!((result, sent), (Ok(()), 2), "cut at {cut}");
    }
}

fn stopped() -> Value {
    json!({"sessionId": child(), "status": "interrupted", "accepted": true})
}

#[tokio::test(start_paused = true)]
async fn half_of_each_wait_is_chance() {
    for (chance, waited) in [(0, 250 + 500 + 1000), (255, 500 + 1000 + 2000)] {
        let steps = [unreachable(), unreachable(), unreachable(), ok(&started())];
        let bench = Bench::new(steps);
        bench.runtime.chance.set(chance);
        start(&bench).await.unwrap();
        assert_eq!(bench.runtime.elapsed(), waited);
    }
}

#[tokio::test(start_paused = true)]
async fn a_layer_meets_every_request_of_its_transport() {
    struct Layer(Rc<dyn Fetch>, Rc<Cell<u32>>);
    impl Fetch for Layer {
        fn fetch(&self, request: Request) -> LocalBoxFuture<'static, Result<Response, FetchError>> {
            self.1.set(self.1.get() + 1);
            self.0.fetch(request)
        }
    }
    let met = Rc::new(Cell::new(0));
    let layer = met.clone();
    let bench = Bench::new([unreachable(), ok(&started()), streams(vec![], true)])
        .with(|transport| transport.through(|inner| Rc::new(Layer(inner, layer))));
    start(&bench).await.unwrap();
    drop(attach(&bench).await.unwrap());
    assert_eq!((met.get(), bench.requests()), (3, 3));
}
