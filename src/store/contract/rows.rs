//! Records: what is written is what is read, at any size; what is malformed is refused.

use super::*;

pub(super) fn every_record_reads_back_as_written(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let mut full = session(2, 7);
    full.status = SessionStatus::Failed;
    full.step_count = 3;
    full.floor = 2;
    full.last_ordinal = (1 << 53) - 1;
    full.attempts = 4;
    full.stop = Some(Stop {
        kind: StopKind::Abort,
        reason: Some("enough".into()),
    });
    full.output = Some(json!({"report": ["é", null, 1.5, 9_007_199_254_740_991u64]}));
    full.failure = Some(Failure {
        code: "run_aborted".into(),
        error: "Stopped.".into(),
        detail: None,
    });
    let run = RunRecord {
        run_id: run_id(2),
        start_sequence: 5,
        start_step: 3,
        started_at: 1_500,
        terminal: Some(Terminal {
            status: SessionStatus::Completed,
            sequence: 7,
            output: Some(json!("done")),
            state: Some(json!({"phase": "done"})),
            usage: Some(UsageRollup::default()),
            failure: None,
        }),
    };
    let saved = checkpoint(3, json!({"b": 1, "a": [true, {"deep": null}]}));
    let messages = vec![
        MessageRecord::User {
            text: "hello\nworld".into(),
        },
        MessageRecord::Assistant {
            text: String::new(),
            tool_calls: vec![call("a", 0, json!({"q": 1})).call],
            cut: true,
            kept: Some(json!({"thinking": []})),
        },
        MessageRecord::Tool {
            tool_call_id: "a".into(),
            tool_name: "note".into(),
            outcome: ToolOutcome {
                success: false,
                result: Value::Null,
                error: Some("no".into()),
            },
        },
    ];
    let mut answered = step(4);
    answered.start_sequence = 6;
    answered.answer = Some(Answer {
        text: "I will look.".into(),
        cut: false,
        kept: Some(json!({"thinking": ["a\u{2028}"]})),
        then: Vec::new(),
    });
    let mut done = call("b", 1, json!({}));
    done.begun = 3;
    done.outcome = Some(ToolOutcome {
        success: true,
        result: json!([1]),
        error: None,
    });
    done.staged = vec![StagedPatch {
        by_hook: false,
        ordinal: 9,
        patches: vec![PatchOperation {
            op: "add".into(),
            path: "/a/-".into(),
            from: None,
            value: Some(Value::Null),
        }],
    }];
    let calls = vec![
        call("z", 0, json!("not an object")),
        done,
        call("a", 2, json!({})),
    ];
    let mut forwarded = child("c-2");
    forwarded.remote = Some(SubRemote {
        stream_id: StreamId::parse("st_child").unwrap(),
        last_sequence: 12,
    });
    forwarded.status = SubStatus::Stopping;
    let mut local = child("c-1");
    local.location = SubLocation::Local;
    let usage = vec![
        UsageRecord::Model {
            model: "offline".into(),
            tokens: Tokens {
                prompt: 1,
                completion: 2,
                reasoning: 0,
                cached: 0,
                total: 3,
            },
            at: 1,
        },
        UsageRecord::Tool {
            name: "note".into(),
            success: true,
            at: 2,
        },
        UsageRecord::SubAgent {
            sub_session_id: "c-1".into(),
            sub_agent_type: "thread-researcher".into(),
            tool_call_id: "a".into(),
            rollup: Some(Box::default()),
            origin: RollupOrigin::Recovery,
            at: 3,
        },
    ];
    let answer = IdempotencyRecord {
        key: "start:s-1".into(),
        digest: "00ff".into(),
        answer: "{\"runId\":\"run_1\"}".into(),
        at: 4,
    };
    let mut writes = vec![
        Write::Session(full.clone()),
        Write::Run(run.clone()),
        Write::Checkpoint(saved.clone()),
        Write::Step(answered.clone()),
        Write::SubSession(forwarded.clone()),
        Write::SubSession(local.clone()),
        Write::Idempotency(answer.clone()),
    ];
    writes.extend(messages.iter().cloned().map(Write::Message));
    // Stored in another order than that of the calls.
    writes.extend(calls.iter().rev().cloned().map(Write::ToolCall));
    writes.extend(usage.iter().cloned().map(Write::Usage));
    write(&*store, writes);

    assert_eq!(store.session().unwrap(), Some(full));
    assert_eq!(store.run("run_2").unwrap(), Some(run));
    assert_eq!(store.checkpoint().unwrap(), Some(saved));
    assert_eq!(store.messages().unwrap(), messages);
    // One by one, numbered from 1 without a gap.
    let mut index = 0;
    for message in &messages {
        let read = store.message_behind(index).unwrap();
        index += 1;
        assert_eq!(read, Some((index, message.clone())));
    }
    for beyond in [index, index + 1, MAX_SAFE_INTEGER] {
        assert_eq!(store.message_behind(beyond).unwrap(), None);
    }
    assert_eq!(store.step().unwrap(), Some((answered, calls)));
    assert_eq!(
        store.sub_sessions().unwrap(),
        [forwarded.clone(), local.clone()]
    );
    assert_eq!(store.sub_session("c-1").unwrap(), Some(local));
    let ids = store.sub_session_ids().unwrap();
    let spoiled = SubSessionRecord {
        status: SubStatus::Failed,
        remote: None,
        ..forwarded
    };
    assert_eq!(ids[0], spoiled.sub_session_id.as_str());
    let sub_session_id = ids[0].clone();
    let epoch = store.session().unwrap().unwrap().epoch;
    let spoil = Write::SpoiledSubSession { sub_session_id };
    store.commit(&fenced(epoch, vec![spoil])).unwrap();
    assert_eq!(store.sub_sessions().unwrap()[0], spoiled);
    assert_eq!(store.usage().unwrap(), usage);
    assert_eq!(store.idempotency("start:s-1").unwrap(), Some(answer));
    assert_eq!(store.idempotency("start:s").unwrap(), None);

    let (_, other) = subject.fresh();
    let mut handed_down = session(1, 0);
    handed_down.origin = Rc::new(SessionOrigin {
        owner: Some("6f2a".to_owned()),
        parent: Some(ParentRef {
            session_id: id(),
            stream_id: StreamId::parse("st_0").unwrap(),
            tool_call_id: "call".into(),
        }),
        user_id: Some("u".into()),
        tags: Some(vec!["t".into()]),
        metadata: json!({"m": [1]}).as_object().cloned(),
        trace: Some(crate::protocol::trace::TraceContext {
            traceparent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into(),
            tracestate: None,
        }),
    });
    let first = Commit {
        fence: None,
        writes: vec![Write::Session(handed_down.clone())],
    };
    other.commit(&first).unwrap();
    assert_eq!(other.session().unwrap(), Some(handed_down.clone()));
    handed_down.last_sequence = 1;
    write(&*other, vec![Write::Session(handed_down.clone())]);
    assert_eq!(
        other.session().unwrap(),
        Some(handed_down),
        "the origin stays"
    );
}

pub(super) fn a_later_write_replaces(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let open = RunRecord {
        run_id: run_id(1),
        start_sequence: 0,
        start_step: 0,
        started_at: 1,
        terminal: None,
    };
    write(
        &*store,
        vec![
            Write::Run(open.clone()),
            Write::Step(step(1)),
            Write::ToolCall(call("a", 0, json!({}))),
            Write::SubSession(child("c-1")),
            Write::SubSession(child("c-2")),
        ],
    );
    let mut first = child("c-1");
    first.status = SubStatus::Completed;
    let mut started = call("a", 0, json!({}));
    started.begun = 1;
    let mut answered = step(1);
    answered.answer = Some(answer("yes"));
    for number in 1..=4 {
        write(
            &*store,
            vec![Write::Checkpoint(checkpoint(number, json!({"n": number})))],
        );
        let latest = store.checkpoint().unwrap().unwrap();
        assert_eq!(
            latest.step_count, number,
            "the last written checkpoint is the latest"
        );
        assert_eq!(*latest.state, json!({"n": number}));
    }
    write(
        &*store,
        vec![
            Write::SubSession(first.clone()),
            Write::ToolCall(started.clone()),
            Write::Step(answered.clone()),
        ],
    );
    assert_eq!(
        store.sub_sessions().unwrap(),
        [first, child("c-2")],
        "the order is that of making"
    );
    assert_eq!(store.step().unwrap(), Some((answered, vec![started])));
    assert_eq!(store.run("run_1").unwrap(), Some(open));
}

pub(super) fn rows_above_the_limit_are_kept(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    // Three bytes a character: no part may be cut inside one.
    let huge = "日本語".repeat(500_000);
    let medium = "m".repeat(200_000);
    let log: Vec<String> = [&medium, &medium, &huge, "small", &medium, &medium, &medium]
        .into_iter()
        .map(text_chunk)
        .collect();
    let state = json!({"text": huge, "list": vec![medium.clone(); 3]});
    let mut big_call = call("a/b", 0, json!({"q": medium}));
    big_call.outcome = Some(ToolOutcome {
        success: true,
        result: json!(huge),
        error: None,
    });
    let mut big_session = session(1, 7);
    big_session.output = Some(json!(huge));
    let big_message = MessageRecord::User { text: huge.clone() };
    let mut big_step = step(1);
    big_step.answer = Some(answer(&huge));
    let terminal = Terminal {
        status: SessionStatus::Completed,
        sequence: 7,
        output: Some(json!(huge)),
        state: None,
        usage: None,
        failure: None,
    };
    let mut ended = RunRecord {
        run_id: run_id(1),
        start_sequence: 0,
        start_step: 0,
        started_at: 1,
        terminal: Some(terminal),
    };
    write(
        &*store,
        vec![
            Write::Chunks {
                first: 1,
                chunks: log.clone(),
            },
            Write::Checkpoint(checkpoint(1, state.clone())),
            Write::Step(big_step.clone()),
            Write::ToolCall(big_call.clone()),
            Write::Session(big_session.clone()),
            Write::Message(big_message.clone()),
            Write::Message(MessageRecord::User {
                text: "next".into(),
            }),
            Write::Run(ended.clone()),
        ],
    );
    let expected: Vec<(Sequence, String)> = (1..).zip(log.iter().cloned()).collect();
    assert_eq!(read(&*store, 0, 100, ALL), expected);
    for after in 0..7 {
        let one = PageLimit { chunks: 1, ..ALL };
        let index = usize::try_from(after).unwrap();
        assert_eq!(read(&*store, after, 100, one), expected[index..=index]);
    }
    let few = PageLimit {
        bytes: 300_000,
        ..ALL
    };
    assert_eq!(read(&*store, 0, 100, few), expected[..2]);
    assert_eq!(
        store.checkpoint().unwrap().map(|c| (*c.state).clone()),
        Some(state)
    );
    assert_eq!(
        store.step().unwrap(),
        Some((big_step, vec![big_call.clone()]))
    );
    assert_eq!(store.session().unwrap(), Some(big_session.clone()));
    assert_eq!(store.messages().unwrap()[0], big_message);
    assert_eq!(store.message_behind(0).unwrap(), Some((1, big_message)));
    assert_eq!(store.run("run_1").unwrap(), Some(ended.clone()));

    // Written again smaller, or cleared, nothing of the large text comes back.
    big_call.outcome = None;
    big_session.output = None;
    ended.terminal = None;
    write(
        &*store,
        vec![
            Write::ToolCall(big_call.clone()),
            Write::Step(step(1)),
            Write::Session(big_session.clone()),
            Write::Run(ended.clone()),
        ],
    );
    assert_eq!(store.step().unwrap(), Some((step(1), vec![big_call])));
    assert_eq!(store.session().unwrap(), Some(big_session));
    assert_eq!(store.run("run_1").unwrap(), Some(ended));
}

pub(super) fn a_cleared_step_keeps_its_ids_used(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    begun(&*store);
    let big = json!({"x": "x".repeat(2_000_000)});
    write(
        &*store,
        vec![Write::Step(step(1)), Write::ToolCall(call("a", 0, big))],
    );
    write(&*store, vec![Write::ClearStep]);
    assert_eq!(store.step().unwrap(), None);
    write(
        &*store,
        vec![
            Write::Step(step(2)),
            Write::ToolCall(call("b", 0, json!({}))),
        ],
    );
    let (_, calls) = store.step().unwrap().unwrap();
    assert_eq!(
        calls,
        [call("b", 0, json!({}))],
        "calls of a cleared step are gone"
    );
    assert!(store.tool_call_id_used("a").unwrap());
    assert!(store.tool_call_id_used("b").unwrap());
    assert!(!store.tool_call_id_used("A").unwrap());
}

pub(super) fn due_hooks_stand_until_they_are_done(subject: Subject<'_>) {
    let (_, store) = subject.fresh();
    assert_eq!(store.due_hooks().unwrap(), []);
    begun(&*store);
    let interrupted = due_hook(1, SessionStatus::Interrupted);
    let mut failed = due_hook(1, SessionStatus::Failed);
    failed.due_at = interrupted.due_at + 1;
    let mut other = due_hook(2, SessionStatus::Completed);
    other.due_at = interrupted.due_at + 2;
    let all = [interrupted.clone(), failed.clone(), other.clone()];
    let writes = [&other, &failed, &interrupted].map(|hook| Write::DueHook(hook.clone()));
    write(&*store, writes.to_vec());
    assert_eq!(store.due_hooks().unwrap(), all);
    let mut later = interrupted.clone();
    later.attempts = 3;
    later.due_at += 9;
    write(&*store, vec![Write::DueHook(later.clone())]);
    assert_eq!(
        store.due_hooks().unwrap(),
        [failed.clone(), other.clone(), later]
    );
    // By run and status, whatever else it says.
    write(
        &*store,
        vec![Write::HookDone(interrupted), Write::HookDone(failed)],
    );
    assert_eq!(store.due_hooks().unwrap(), [other]);
}
