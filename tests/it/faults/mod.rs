//! One fault at every point of a call whose child has a child of its own.
//!
//! A scene is a job that makes certain requests; it is run once without a fault, which tells its
//! points, and then once for each point and each kind of fault. Whatever strikes, the call has one
//! result, one `subagent_end` and one `tool_end`, nothing is counted twice, and each child was
//! begun once.

mod kinds;
mod line;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use remote_agents::native::{LocalObjects, LocalRuntime, MountFetch};
use remote_agents::protocol::ids::{AgentType, SessionId};
use remote_agents::protocol::message::SessionStatus;
use remote_agents::store::{Database, SqlStore, Store as _, SubLocation};
use remote_agents::transport::{Fetch, HttpTransport};
use serde_json::Value;

use crate::stories::agents::{PARENT, Way, policy};
use crate::stories::log::text;
use crate::stories::mischief::{Mischief, Mischievous};
use crate::stories::{Log, World, stop, usage};
use crate::story::{mount, service};
use crate::support::{Lines, in_world};
use kinds::{Class, Due, due, kinds, stream_kinds};
use line::{Fault, Faulty, Hop, Line, Point};

const START: u64 = 1_700_000_000_000;

/// A job that makes certain requests.
#[derive(Clone, Copy)]
struct Scene {
    /// The sub-agent that the parent calls.
    call: &'static str,
    /// Its type.
    child_type: &'static str,
    /// What is wrong on one hop all the time.
    mischief: Option<(Hop, Mischief)>,
    /// When the parent is interrupted.
    stopped: Option<Duration>,
    /// The actions that faults strike, or all.
    actions: &'static [&'static str],
}

const WHOLE: Scene = Scene {
    call: "nest",
    child_type: "nester",
    mischief: None,
    stopped: None,
    actions: &["start", "sse"],
};

const UPPER_ENDLESS: Scene = Scene {
    mischief: Some((Hop::Upper, Mischief::Endless)),
    actions: &["sse", "status", "snapshot", "usage"],
    ..WHOLE
};

const LOWER_ENDLESS: Scene = Scene {
    mischief: Some((Hop::Lower, Mischief::Endless)),
    ..UPPER_ENDLESS
};

const UPPER_DEAD: Scene = Scene {
    call: "nest_revivable",
    mischief: Some((Hop::Upper, Mischief::NoRunner)),
    actions: &["status", "resume"],
    ..WHOLE
};

const LOWER_DEAD: Scene = Scene {
    call: "nest",
    mischief: Some((Hop::Lower, Mischief::NoRunner)),
    ..UPPER_DEAD
};

const STOPPED: Scene = Scene {
    call: "nest_slow",
    child_type: "slow_nester",
    stopped: Some(Duration::from_millis(400)),
    actions: &["interrupt", "sse", "usage"],
    ..WHOLE
};

/// A world with a line in it.
struct Job {
    world: World,
    far: Rc<LocalObjects>,
    line: Rc<Line>,
}

impl Job {
    fn new(scene: Scene, line: Rc<Line>) -> Self {
        let slot: Rc<std::cell::OnceCell<Rc<dyn Fetch>>> = Rc::default();
        let way = |hop: Option<Hop>| -> Way {
            let (slot, line) = (slot.clone(), line.clone());
            Rc::new(move |agent_type, runtime| {
                let mut fetch = slot.get().unwrap().clone();
                if let (Some((at, mischief)), Some(hop)) = (scene.mischief, hop)
                    && at == hop
                {
                    fetch = Rc::new(Mischievous::new(fetch, mischief));
                }
                if let Some(hop) = hop {
                    fetch = Rc::new(Faulty {
                        inner: fetch,
                        hop,
                        line: line.clone(),
                    });
                }
                HttpTransport::new(fetch, runtime, "http://far", "/agents", agent_type)
            })
        };
        let far = service(way(Some(Hop::Lower)), SubLocation::Remote);
        let near = service(way(Some(Hop::Upper)), SubLocation::Remote);
        let reached = Rc::new(MountFetch::new(mount(), far.clone())) as Rc<dyn Fetch>;
        assert!(slot.set(reached).is_ok());
        let runtime = LocalRuntime::new(START, Lines::default().sink());
        let parents = HttpTransport::new(
            Rc::new(MountFetch::new(mount(), near)),
            runtime.clone(),
            "http://near",
            "/agents",
            AgentType::parse(PARENT).unwrap(),
        );
        let world = World {
            parents: Rc::new(parents.with_policy(policy())),
            way: way(None),
            runtime,
        };
        Self { world, far, line }
    }

    /// Every session of the far service that was begun, with its type.
    fn begun(&self) -> Vec<(SessionId, AgentType, SqlStore)> {
        let mut begun = Vec::new();
        for session in self.far.sessions() {
            let database = self.far.database(&session).unwrap();
            let store = SqlStore::new(database as Rc<dyn Database>);
            if let Some(record) = store.session().unwrap() {
                begun.push((session, record.agent_type, store));
            }
        }
        begun.sort_by_key(|(session, ..)| session.clone());
        begun
    }

    /// Waits until nothing runs in the far service, and what was late has come.
    async fn rest(&self) {
        let is_running = |(.., store): &(SessionId, AgentType, SqlStore)| {
            store.session().unwrap().unwrap().status == SessionStatus::Running
        };
        for _ in 0..200 {
            tokio::time::sleep(Duration::from_secs(15)).await;
            if !self.begun().iter().any(is_running) {
                return;
            }
        }
        panic!("a child never rests")
    }
}

/// What one job came to.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    /// The results of both calls; the lower one is missing when it was never made.
    results: BTreeMap<Hop, Value>,
    /// What the parent keeps of its call.
    kept: Value,
    /// The parent's rollup and what all sessions together have spent.
    counted: u64,
    spent: u64,
    /// How the far sessions stand.
    rest: Vec<SessionStatus>,
}

async fn run(scene: Scene, line: Rc<Line>) -> Result<Outcome, String> {
    let job = Job::new(scene, line);
    let parent = job.world.begin(&[(scene.call, "deep")]).await?;
    if let Some(at) = scene.stopped {
        job.world.runtime.sleep(at).await;
        let stopped = job.world.parents.interrupt(stop(&parent)).await;
        assert!(stopped.unwrap().accepted);
    }
    let log = Log::of(&*job.world.parents, &parent).await?;
    job.rest().await;
    // What came late has changed nothing.
    let again = Log::of(&*job.world.parents, &parent).await?;
    if again.chunks != log.chunks {
        return Err("what came late has changed the log".into());
    }

    let mut results = BTreeMap::new();
    let [result] = log.own("tool_end")[..] else {
        return Err(format!(
            "the parent has {} results",
            log.own("tool_end").len()
        ));
    };
    results.insert(Hop::Upper, result.clone());
    if log.own("subagent_end").len() != 1 {
        return Err("the child does not end once".into());
    }
    let mut rest = Vec::new();
    let mut spent = 0;
    let begun = job.begun();
    if begun.len() > 2 {
        return Err(format!("{} children were begun", begun.len()));
    }
    for (session, agent_type, store) in &begun {
        let children = job.world.children(agent_type.as_str())?;
        let runs = count(store, "SELECT count(*) FROM ra_runs");
        if runs != 1 {
            return Err(format!("{session} has {runs} runs"));
        }
        rest.push(store.session().unwrap().unwrap().status);
        let of_child = Log::of(&children, session).await?;
        if agent_type.as_str() == scene.child_type {
            if let [result] = of_child.own("tool_end")[..] {
                results.insert(Hop::Lower, result.clone());
            }
            is_told_truly(&log, session, &of_child)?;
        }
        let rollup = usage(&children, session).await?;
        spent += rollup["own"]["tokens"]["total"].as_u64().unwrap();
    }
    let rollup = usage(&*job.world.parents, &parent).await?;
    let own = rollup["own"]["tokens"]["total"].as_u64().unwrap();
    let snapshot = job.world.parents.snapshot(&parent).await.unwrap();
    Ok(Outcome {
        results: results
            .into_iter()
            .map(|(hop, result)| (hop, result["result"].clone()))
            .collect(),
        kept: snapshot.state[scene.call].clone(),
        counted: rollup["tokens"]["total"].as_u64().unwrap(),
        spent: spent + own,
        rest,
    })
}

/// What stands of a child in its parent's log is what it said, up to some place. That something is
/// missing is said in its name by the parent.
fn is_told_truly(log: &Log, child: &SessionId, of_child: &Log) -> Result<(), String> {
    let is_said = |chunk: &&Value| chunk["type"] != "stream_resync";
    let of = |chunk: &&Value| chunk["remoteSource"]["childSessionId"] == child.as_str();
    let told = log.chunks.iter().filter(of).filter(is_said);
    let mut said = of_child.chunks.iter().filter(is_said);
    for told in told {
        let said = said.next().unwrap_or(&Value::Null);
        if told["type"] != said["type"] || told["timestamp"] != said["timestamp"] {
            return Err(format!("{told} was told where {said} was said"));
        }
    }
    Ok(())
}

fn count(store: &SqlStore, sql: &str) -> u64 {
    let rows = store.database().query(sql, &[]).unwrap();
    match rows[0][0] {
        remote_agents::store::SqlValue::Integer(count) => u64::try_from(count).unwrap(),
        ref other => panic!("{other:?}"),
    }
}

/// What does not hold of a job on which a fault has struck.
fn verdict(point: &Point, due: Due, base: &Outcome, seen: &Outcome) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{what}: {seen:?}"));
    if seen.counted != seen.spent {
        return wrong("usage is missing or counted twice");
    }
    let code = |hop: Hop| {
        let result = seen.results.get(&hop).unwrap_or(&Value::Null);
        text(&result["metadata"]["helixErrorDetail"], "code").to_owned()
    };
    match due {
        Due::Same => {
            if seen.results != base.results || seen.kept != base.kept {
                return wrong("not the same");
            }
            if seen.rest != base.rest {
                return wrong("not at rest as without it");
            }
        }
        Due::Unfolded => {
            if seen.results != base.results || seen.rest != base.rest {
                return wrong("not the same");
            }
        }
        Due::Untold => {
            if seen.results.get(&point.hop) != base.results.get(&point.hop) {
                return wrong("not the same");
            }
        }
        Due::Fails(expected) => {
            if code(point.hop) != expected {
                return wrong(&format!("{expected} was due"));
            }
            // The other call is as it would be, if it was made.
            let other = match point.hop {
                Hop::Lower => seen.results.get(&Hop::Upper) == base.results.get(&Hop::Upper),
                Hop::Upper => true,
            };
            if !other {
                return wrong("the other call");
            }
        }
    }
    Ok(())
}

/// How often each kind was tried at each place of a table.
type Table = BTreeMap<(String, String), usize>;

fn table(name: &'static str, scene: Scene) {
    let (points, base) = {
        let line = Line::honest();
        let inside = line.clone();
        let (told, heard) = std::sync::mpsc::channel();
        in_world(move || async move {
            told.send(run(scene, inside).await).unwrap();
        });
        let base = heard.recv().unwrap().unwrap();
        let points: Vec<(Point, usize)> = line
            .points()
            .into_iter()
            .map(|point| (point.clone(), line.events(&point)))
            .collect();
        (points, base)
    };
    assert_eq!(base.counted, base.spent, "{base:?}");
    let mut table = Table::new();
    let mut wrong = Vec::new();
    for (point, events) in &points {
        let struck_hop = scene.mischief.is_none_or(|(hop, _)| hop == point.hop);
        // The first attach of a job that is stopped comes before the stop.
        let is_early = scene.stopped.is_some() && point.action == "sse" && point.occurrence == 0;
        if !scene.actions.contains(&point.action.as_str()) || !struck_hop || is_early {
            continue;
        }
        let column = format!("{:?} {}", point.hop, point.action);
        let mut faults = kinds(&point.action);
        // A body is cut everywhere in the plain scene, and at three places in the others.
        let places: Vec<usize> = match scene.mischief {
            None if scene.stopped.is_none() => (0..*events).collect(),
            _ => vec![0, *events / 2, events.saturating_sub(1)],
        };
        if point.action == "sse" {
            faults.extend(stream_kinds(&places));
        }
        if table.keys().any(|(_, at)| *at == column) {
            // Every kind strikes the first request of its sort; the others, one of each class.
            faults = one_of_each(faults);
        }
        for (kind, fault, class) in faults {
            let due = match due(&point.action, &kind, class) {
                // A child that was told to stop is heard as far as that goes.
                _ if scene.stopped.is_some() && point.action == "sse" => Due::Same,
                // So is one that has ended already, by its status.
                _ if point.action == "sse" && point.occurrence > 3 => Due::Same,
                due => due,
            };
            let (cell, seen) = struck(scene, point.clone(), fault.clone());
            let held = cell.and_then(|cell| verdict(point, due, &base, &cell));
            if !seen {
                wrong.push(format!("{point:?} {kind}: it never struck"));
            }
            if let Err(what) = held {
                wrong.push(format!("{point:?} {kind} {fault:?}: {what}"));
            }
            *table.entry((kind, column.clone())).or_default() += 1;
        }
    }
    print(name, &table);
    assert!(wrong.is_empty(), "{}:\n{}", wrong.len(), wrong.join("\n"));
}

/// The first fault of each class, and those that the clock alone ends.
fn one_of_each(faults: Vec<(String, Fault, Class)>) -> Vec<(String, Fault, Class)> {
    let mut seen: Vec<Class> = Vec::new();
    let mut kept = Vec::new();
    for (kind, fault, class) in faults {
        let is_silent = kind == "unanswered" || kind == "silent between events";
        if !seen.contains(&class) || is_silent {
            seen.push(class);
            kept.push((kind, fault, class));
        }
    }
    kept
}

/// Runs a job on which a fault strikes; what it came to, and whether the fault did strike.
fn struck(scene: Scene, point: Point, fault: Fault) -> (Result<Outcome, String>, bool) {
    let line = Line::with(point, fault);
    let (told, heard) = std::sync::mpsc::channel();
    let inside = line.clone();
    in_world(move || async move {
        told.send(run(scene, inside).await).unwrap();
    });
    (heard.recv().unwrap(), line.has_struck())
}

fn print(name: &str, table: &Table) {
    let columns: BTreeSet<&String> = table.keys().map(|(_, column)| column).collect();
    let kinds: BTreeSet<&String> = table.keys().map(|(kind, _)| kind).collect();
    let total: usize = table.values().sum();
    println!("\n{name}: {total} jobs");
    for kind in kinds {
        let cells: Vec<String> = columns
            .iter()
            .map(|column| {
                let key = (kind.clone(), (*column).clone());
                format!("{column} {}", table.get(&key).copied().unwrap_or_default())
            })
            .collect();
        println!("  {kind:<30} {}", cells.join("  "));
    }
}

#[test]
fn a_fault_at_any_point_of_a_call_settles_it_once() {
    table("a call with a nested child", WHOLE);
}

#[test]
fn a_fault_on_top_of_streams_without_an_end_settles_the_upper_call_once() {
    table("the upper stream never tells its end", UPPER_ENDLESS);
}

#[test]
fn a_fault_on_top_of_streams_without_an_end_settles_the_lower_call_once() {
    table("the lower stream never tells its end", LOWER_ENDLESS);
}

#[test]
fn a_fault_on_top_of_a_dead_producer_settles_the_upper_call_once() {
    table("nothing executes the child", UPPER_DEAD);
}

#[test]
fn a_fault_on_top_of_a_dead_producer_settles_the_lower_call_once() {
    table("nothing executes the grandchild", LOWER_DEAD);
}

#[test]
fn a_fault_while_a_call_is_stopped_settles_it_once() {
    table("the parent is interrupted", STOPPED);
}
