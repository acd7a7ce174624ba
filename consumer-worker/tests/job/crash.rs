//! A job whose objects are ended at every place where that can make a difference.
//!
//! An object is ended just before one of its commits, with everything that led there done, and just
//! after it, with nothing of what follows done; as a request leaves or its answer comes, as a model
//! is asked or says something, as a wait begins or ends, as an alarm is set or rings. Each place of
//! each object in its turn; the job must come to what it comes to when nothing happens.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use remote_agents::native::{CommitMoment, Effect};
use remote_agents::protocol::ids::SessionId;
use remote_agents::store::{MessageRecord, Store as _, UsageRecord};
use serde_json::{Value, json};

use crate::checks::{count, hold, log, nothing_is_lost_on_the_way, writer_log};
use crate::library::few;
use crate::world::{ASKED, World, in_world};

/// How many places of one kind are passed by from one crash to the next.
const STRIDE: usize = 9;

/// As [`STRIDE`], for effects: there are many more of them.
const EFFECT_STRIDE: usize = 41;

/// Tokens that renamed calls add to a prompt at most.
const RENAMED: u64 = 16;

/// A kind of place at which an object can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    BeforeCommit,
    AfterCommit,
    At(Effect),
}

/// Where an object stands in the tree, whatever its id is in this run.
fn place(session: &SessionId) -> String {
    let id = session.as_str();
    match id.rsplit_once("-sub-") {
        // An id that a discarded answer used up has become `call_2_2`.
        Some((_, call)) => {
            let call: Vec<&str> = call.split(['_', '-']).take(2).collect();
            format!("researcher {}", call.join("_"))
        }
        None if id.contains("-remote-") => "planner".into(),
        None => "writer".into(),
    }
}

/// What a job came to.
struct Outcome {
    output: Value,
    usage: BTreeMap<String, Value>,
    calls: BTreeMap<String, Vec<u64>>,
    histories: BTreeMap<String, Vec<Value>>,
    discards: BTreeMap<String, usize>,
    places: Places,
}

/// How often each kind of place was passed, by object.
type Places = BTreeMap<(String, Kind), usize>;

#[derive(Clone, Debug)]
struct Crash {
    /// Whose places are counted.
    place: String,
    kind: Kind,
    number: usize,
    everyone: bool,
}

fn run(crash: Option<Crash>) -> Outcome {
    in_world(move |world| async move {
        let places = watch(&world, crash.clone());
        let (topic, documents) = few();
        let reader = {
            let world = world.clone();
            // A reader wakes what it reads, so that about half of the jobs go without one.
            let reads = crash.as_ref().is_none_or(|crash| match crash.kind {
                Kind::BeforeCommit => false,
                Kind::AfterCommit => true,
                Kind::At(_) => crash.number % 2 == 0,
            });
            async move {
                if reads {
                    Some(world.follow_writer().await.0)
                } else {
                    None
                }
            }
        };
        world.start(topic, &documents).await;
        let (read, status) = futures::join!(reader, world.rest());
        assert_eq!(status["status"], "completed", "{crash:?}: {status}");
        let log = writer_log(&world);
        if let Some(read) = read {
            assert_eq!(read, log, "{crash:?}: what was read is what is stored");
        }
        hold(&world);
        nothing_is_lost_on_the_way(&world);
        assert_eq!(count(&log, "run_started"), world.sessions().len());
        assert_eq!(count(&log, "run_resumed"), 0);
        let mut outcome = Outcome {
            output: status["output"].clone(),
            usage: BTreeMap::new(),
            calls: BTreeMap::new(),
            histories: BTreeMap::new(),
            discards: BTreeMap::new(),
            places: places.take(),
        };
        for (session, agent_type) in world.sessions() {
            let place = place(&session);
            let usage = world.usage(&session, agent_type).await;
            outcome.usage.insert(place.clone(), usage);
            let spent = world.store(&session).usage().unwrap();
            let spent = spent.into_iter().filter_map(|entry| match entry {
                UsageRecord::Model { tokens, .. } => Some(tokens.total),
                _ => None,
            });
            outcome.calls.insert(place.clone(), spent.collect());
            let discards = discards(&world, &session);
            outcome.discards.insert(place.clone(), discards);
            outcome.histories.insert(place, history(&world, &session));
        }
        outcome
    })
}

/// How many answers were discarded: those before any of their calls began. Later ones void patches
/// alone.
fn discards(world: &World, session: &SessionId) -> usize {
    let log = log(world, session);
    let is_own =
        |chunk: &Value, kind: &str| chunk["type"] == kind && chunk["agentId"] == session.as_str();
    let mut discarded = 0;
    for (at, (_, chunk)) in log.iter().enumerate() {
        let since = chunk["fromSequence"].as_u64();
        let began = log[..at]
            .iter()
            .any(|(sequence, one)| Some(*sequence) > since && is_own(one, "tool_start"));
        if is_own(chunk, "step_discarded") && !began {
            discarded += 1;
        }
    }
    discarded
}

/// The committed conversation, its calls by their place in it: an id that a discarded answer used
/// up is another one.
fn history(world: &World, session: &SessionId) -> Vec<Value> {
    let mut ids: Vec<String> = Vec::new();
    let mut told = Vec::new();
    for message in world.store(session).messages().unwrap() {
        told.push(match message {
            MessageRecord::User { text } => json!({ "user": text }),
            MessageRecord::Assistant {
                text, tool_calls, ..
            } => {
                let calls: Vec<Value> = tool_calls
                    .iter()
                    .map(|call| json!([call.name, call.arguments]))
                    .collect();
                ids.extend(tool_calls.into_iter().map(|call| call.id));
                json!({ "assistant": text, "calls": calls })
            }
            MessageRecord::Tool {
                tool_call_id,
                tool_name,
                outcome,
            } => {
                let call = ids.iter().position(|id| *id == tool_call_id);
                json!({ "tool": tool_name, "call": call, "success": outcome.success, "result": outcome.result })
            }
        });
    }
    told
}

/// Counts places and ends whom the plan says.
fn watch(world: &World, crash: Option<Crash>) -> Rc<RefCell<Places>> {
    let places: Rc<RefCell<Places>> = Rc::default();
    let (counted, of) = (places.clone(), world.clone());
    let done = Cell::new(false);
    let pass = Rc::new(move |session: &SessionId, kind: Kind| {
        let here = place(session);
        let number = {
            let mut counts = counted.borrow_mut();
            let count = counts.entry((here.clone(), kind)).or_default();
            *count += 1;
            *count
        };
        let Some(crash) = &crash else { return };
        let is_here = (&crash.place, crash.kind, crash.number) == (&here, kind, number);
        if !is_here || done.replace(true) {
            return;
        }
        for objects in [&of.writers, &of.researchers] {
            for other in objects.sessions() {
                if crash.everyone || other == *session {
                    objects.evict(&other).unwrap();
                }
            }
        }
    });
    let passed = pass.clone();
    *world.watcher.borrow_mut() = Some(Rc::new(move |session, moment| {
        passed(
            session,
            match moment {
                CommitMoment::Before => Kind::BeforeCommit,
                CommitMoment::After => Kind::AfterCommit,
            },
        );
    }));
    *world.effects.borrow_mut() = Some(Rc::new(move |session, effect| {
        pass(session, Kind::At(effect));
    }));
    places
}

/// Ends the objects at the places that `choose` says, and compares with the undisturbed job.
///
/// Every place of an object takes minutes. By default it is one commit in [`STRIDE`] and one effect
/// in [`EFFECT_STRIDE`]; `JOB_CRASHES=<n>` begins with the n-th, `JOB_CRASHES=all` takes every one.
fn step_through(choose: impl Fn(&str) -> bool, everyone: bool) {
    let wanted = std::env::var("JOB_CRASHES").unwrap_or_default();
    let plain = run(None);
    let mut runs = 0;
    for ((place, kind), times) in plain.places.iter().filter(|((at, _), _)| choose(at)) {
        let sampled = match kind {
            Kind::BeforeCommit | Kind::AfterCommit => STRIDE,
            Kind::At(_) => EFFECT_STRIDE,
        };
        let (first, stride) = match wanted.as_str() {
            "all" => (0, 1),
            offset => (offset.parse().unwrap_or(0) % sampled, sampled),
        };
        // Of a kind that an object passes seldom, the first one is always taken.
        let first = if first < *times { first } else { 0 };
        for number in (1..=*times).skip(first).step_by(stride) {
            let crash = Crash {
                place: place.clone(),
                kind: *kind,
                number,
                everyone,
            };
            let name = format!("{crash:?}");
            let disturbed = std::panic::catch_unwind(|| run(Some(crash)));
            let disturbed = disturbed.unwrap_or_else(|_| panic!("{name}"));
            assert_same(&plain, &disturbed, &name);
            at_most_one_answer_is_asked_for_again(&plain, &disturbed, place, everyone, &name);
            runs += 1;
        }
    }
    println!("{runs} crashes at the places {:?}", plain.places);
    assert!(runs > 10);
}

/// A model call in flight is repeated once for a crash, where its session was hit, and the attempt
/// is visible when it had said anything; nobody else asks again.
fn at_most_one_answer_is_asked_for_again(
    plain: &Outcome,
    disturbed: &Outcome,
    hit: &str,
    everyone: bool,
    name: &str,
) {
    for place in plain.usage.keys() {
        let asked = (place.clone(), Kind::At(Effect::Told(ASKED)));
        let again = disturbed.places[&asked].checked_sub(plain.places[&asked]);
        let again = again.unwrap_or_else(|| panic!("{name}: {place} asked less"));
        let most = usize::from(everyone || place == hit);
        assert!(again <= most, "{name}: {place} asked {again} times more");
        assert!(disturbed.discards[place] <= again, "{name}: {place}");
    }
}

fn assert_same(plain: &Outcome, disturbed: &Outcome, name: &str) {
    assert_eq!(disturbed.output, plain.output, "{name}");
    assert_eq!(disturbed.histories, plain.histories, "{name}");
    for (place, usage) in &plain.usage {
        let other = &disturbed.usage[place];
        for field in ["tools", "steps"] {
            assert_eq!(other[field], usage[field], "{name}: {field} of {place}");
        }
        assert_eq!(
            other["subAgents"]["calls"], usage["subAgents"]["calls"],
            "{name}"
        );
        assert_eq!(other["partial"], false, "{name}: {place}");
        // What costs more is a call to the model that was made again; a call's id that was used up
        // is a little longer, and so is every prompt that holds it.
        let like = |tokens: u64| move |other: &u64| (tokens..tokens + RENAMED).contains(other);
        let mut again = disturbed.calls[place].clone();
        for tokens in &plain.calls[place] {
            let at = again.iter().position(like(*tokens));
            again.remove(at.unwrap_or_else(|| panic!("{name}: a call of {place} is missing")));
        }
        for tokens in &again {
            assert!(
                plain.calls[place].iter().any(|call| like(*call)(tokens)),
                "{name}"
            );
        }
    }
    let sum = |outcome: &Outcome| -> u64 { outcome.calls.values().flatten().sum() };
    assert_eq!(
        disturbed.usage["writer"]["tokens"]["total"],
        sum(disturbed),
        "{name}"
    );
    assert_eq!(disturbed.usage.len(), plain.usage.len(), "{name}");
}

#[test]
fn a_job_survives_the_end_of_its_writer_anywhere() {
    step_through(|place| place == "writer", false);
}

#[test]
fn a_job_survives_the_end_of_its_planner_anywhere() {
    step_through(|place| place == "planner", false);
}

#[test]
fn a_job_survives_the_end_of_each_researcher_anywhere() {
    step_through(|place| place.starts_with("researcher"), false);
}

#[test]
fn a_job_survives_the_end_of_everything_at_once() {
    step_through(|place| place == "writer", true);
}
