//! A job whose objects are ended at every place where that can make a difference.
//!
//! An object is ended just before one of its commits, with everything that led there done, and just
//! after it, with nothing of what follows done; each commit of each object in turn.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

use remote_agents::native::CommitMoment;
use remote_agents::protocol::ids::SessionId;
use remote_agents::store::{Store as _, UsageRecord};
use serde_json::Value;

use crate::checks::{count, hold, nothing_is_lost_on_the_way, writer_log};
use crate::library::few;
use crate::world::{World, in_world};

/// How many commits are passed by from one crash to the next.
const STRIDE: usize = 9;

/// Tokens that renamed calls add to a prompt at most.
const RENAMED: u64 = 16;

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
    commits: BTreeMap<String, u32>,
}

#[derive(Clone, Debug)]
struct Crash {
    /// Whose commits are counted.
    place: String,
    number: u32,
    moment: CommitMoment,
    everyone: bool,
}

fn run(crash: Option<Crash>) -> Outcome {
    in_world(move |world| async move {
        let commits = watch(&world, crash.clone());
        let (topic, documents) = few();
        let reader = {
            let world = world.clone();
            // A reader wakes what it reads, so that half of the jobs go without one.
            let reads = crash
                .as_ref()
                .is_none_or(|crash| crash.moment == CommitMoment::After);
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
        let mut usage = BTreeMap::new();
        let mut calls = BTreeMap::new();
        for (session, agent_type) in world.sessions() {
            usage.insert(place(&session), world.usage(&session, agent_type).await);
            let spent = world.store(&session).usage().unwrap();
            let spent = spent.into_iter().filter_map(|entry| match entry {
                UsageRecord::Model { tokens, .. } => Some(tokens.total),
                _ => None,
            });
            calls.insert(place(&session), spent.collect());
        }
        Outcome {
            output: status["output"].clone(),
            usage,
            calls,
            commits: commits.take(),
        }
    })
}

/// Counts commits and ends whom the plan says.
fn watch(world: &World, crash: Option<Crash>) -> Rc<Cell<BTreeMap<String, u32>>> {
    let commits: Rc<Cell<BTreeMap<String, u32>>> = Rc::default();
    let (counted, of) = (commits.clone(), world.clone());
    let done = Cell::new(false);
    *world.watcher.borrow_mut() = Some(Rc::new(move |session, moment| {
        let mut counts = counted.take();
        let count = counts.entry(place(session)).or_default();
        if moment == CommitMoment::Before {
            *count += 1;
        }
        let number = *count;
        counted.set(counts);
        let Some(crash) = &crash else { return };
        let here = (&crash.place, crash.number, crash.moment) == (&place(session), number, moment);
        if !here || done.replace(true) {
            return;
        }
        for objects in [&of.writers, &of.researchers] {
            for other in objects.sessions() {
                if crash.everyone || other == *session {
                    objects.evict(&other).unwrap();
                }
            }
        }
    }));
    commits
}

/// Ends the objects at the places that `choose` says, and compares with the undisturbed job.
///
/// Every commit of an object takes minutes. By default it is one commit in [`STRIDE`];
/// `JOB_CRASHES=<n>` begins with the n-th, `JOB_CRASHES=all` takes every one.
fn step_through(choose: impl Fn(&str) -> bool, everyone: bool) {
    let wanted = std::env::var("JOB_CRASHES").unwrap_or_default();
    let (first, stride) = match wanted.as_str() {
        "all" => (0, 1),
        offset => (offset.parse().unwrap_or(0) % STRIDE, STRIDE),
    };
    println!("one commit in {stride}, from number {} on", first + 1);
    let plain = run(None);
    let mut runs = 0;
    for (place, commits) in plain.commits.iter().filter(|(place, _)| choose(place)) {
        for number in (1..=*commits).skip(first).step_by(stride) {
            for moment in [CommitMoment::Before, CommitMoment::After] {
                let crash = Crash {
                    place: place.clone(),
                    number,
                    moment,
                    everyone,
                };
                let name = format!("{crash:?}");
                let disturbed = std::panic::catch_unwind(|| run(Some(crash)));
                let disturbed = disturbed.unwrap_or_else(|_| panic!("{name}"));
                assert_same(&plain, &disturbed, &name);
                runs += 1;
            }
        }
    }
    println!("{runs} crashes, of commits {:?}", plain.commits);
    assert!(runs > 10);
}

fn assert_same(plain: &Outcome, disturbed: &Outcome, name: &str) {
    assert_eq!(disturbed.output, plain.output, "{name}");
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
