//! One seed from its first effect to rest.

use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use remote_agents::protocol::ids::SessionId;
use remote_agents::protocol::message::{ResumeMode, ResumeRequest, StartRequest, StopRequest};
use remote_agents::transport::{Transport, TransportError};
use remote_agents::{Error, Result};

use crate::gate::{Broken, Invariant, Outcome};
use crate::plan::{Plan, Side};
use crate::watchers;
use crate::workload::Then;
use crate::world::{ROOT, World};

/// How long everything may take to come to rest after the last fault and the user's last word, in
/// virtual milliseconds: four levels of calls with their time and their grace, and an hour of alarms.
const BOUND_MS: u64 = 3 * 3_600_000;

/// How long descendants may go on after their root has stopped and nothing strikes any more: the
/// time of their calls, and what it takes to tell them again.
const STOP_BOUND_MS: u64 = 15 * 60_000;

/// How long what came late is waited for.
const LATE: Duration = Duration::from_secs(120);

/// Runs a plan.
#[must_use]
pub fn run(plan: &Plan) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build();
    let Ok(runtime) = runtime else {
        return Outcome::failed("there is no runtime");
    };
    let local = tokio::task::LocalSet::new();
    let plan = plan.clone();
    crate::paired::findings();
    crate::panics::watch();
    local.block_on(&runtime, async move {
        let told = tokio::task::spawn_local(async move { live(&plan).await }).await;
        match told {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::failed(&error.to_string()),
            Err(error) => Outcome::failed(&error.to_string()),
        }
    })
}

impl Outcome {
    fn failed(what: &str) -> Self {
        Self {
            effects: std::collections::BTreeMap::new(),
            struck: Vec::new(),
            broken: Some(Broken {
                invariant: Invariant::Panic,
                what: what.to_owned(),
            }),
            last: Vec::new(),
            trace: (0, 0),
            virtual_ms: 0,
            lost: 0,
            truncated: 0,
            deleted: 0,
        }
    }
}

async fn live(plan: &Plan) -> Result<Outcome> {
    let world = World::new(plan)?;
    let prober = told(world.clone(), watchers::probe(world.clone()));
    let mut watchers = vec![tokio::task::spawn_local(prober)];
    if plan.workload.is_shown {
        let public = told(world.clone(), watchers::peep(world.clone()));
        watchers.push(tokio::task::spawn_local(public));
    }
    if plan.workload.is_followed {
        let follower = watchers::follow(world.clone());
        watchers.push(tokio::task::spawn_local(told(world.clone(), follower)));
    }
    if plan.workload.is_surveyed {
        let surveyor = watchers::survey(world.clone());
        watchers.push(tokio::task::spawn_local(told(world.clone(), surveyor)));
    }
    let reader = plan.workload.is_read.then(|| {
        let reader = watchers::read(world.clone());
        tokio::task::spawn_local(told(world.clone(), reader))
    });
    let user = tokio::task::spawn_local(told(world.clone(), user(world.clone())));
    let broken = world.shared.gate.breaks();
    let lived = async {
        drop(user.await);
        if let Some(reader) = reader
            && tokio::time::timeout(LATE, reader).await.is_err()
        {
            let what = "a reader never has the whole log";
            world.shared.gate.broken(Invariant::Cursor, what);
        }
    };
    futures::future::select(std::pin::pin!(lived), std::pin::pin!(broken)).await;
    for watcher in watchers {
        watcher.abort();
    }
    world.shared.gate.no_panics();
    let outcome = world.shared.gate.outcome();
    world.close();
    Ok(outcome)
}

/// Tells what a part of the world came to, if it failed.
async fn told(world: Rc<World>, part: impl Future<Output = Result<()>>) {
    if let Err(error) = part.await {
        world
            .shared
            .gate
            .broken(Invariant::Panic, error.to_string());
    }
}

async fn user(world: Rc<World>) -> Result<()> {
    let root = SessionId::parse(ROOT)?;
    let transport = world.to("root")?;
    let workload = &world.shared.workload;
    let message = workload.script.to_string();
    begin(&world, &transport, &root, &message, "begin").await;
    let stop = match workload.then {
        Then::Interrupt(at) | Then::Abort(at) | Then::Continue(at) | Then::NewTurn(at) => Some(at),
        Then::Nothing | Then::Message => None,
    };
    if let Some(at) = stop {
        tokio::time::sleep(Duration::from_millis(at)).await;
        world.shared.stop_asked.set(true);
        let request = StopRequest {
            session_id: root.clone(),
            reason: None,
        };
        let aborts = matches!(workload.then, Then::Abort(_));
        insist(&world, if aborts { "abort" } else { "interrupt" }, || {
            if aborts {
                transport.abort(request.clone())
            } else {
                transport.interrupt(request.clone())
            }
        })
        .await;
    }
    if let Some(behind) = workload.deleted {
        tokio::time::sleep(Duration::from_millis(behind)).await;
        delete(&world, &root).await;
        let anew = workload.again.to_string();
        begin(&world, &transport, &root, &anew, "anew").await;
    }
    at_rest(&world).await;
    let again = match workload.then {
        _ if workload.deleted.is_some() => None,
        Then::Message => Some((ResumeMode::WithMessage, Some(workload.again.to_string()))),
        Then::Continue(_) => Some((ResumeMode::Continue, None)),
        Then::NewTurn(_) => Some((ResumeMode::NewTurn, Some(workload.again.to_string()))),
        Then::Nothing | Then::Interrupt(_) | Then::Abort(_) => None,
    };
    if let Some((mode, message)) = again {
        insist(&world, "resume", || {
            transport.resume(
                ResumeRequest {
                    session_id: root.clone(),
                    mode: Some(mode),
                    message: message.clone(),
                    parent: None,
                },
                "again".into(),
            )
        })
        .await;
        at_rest(&world).await;
    }
    // What came late has changed nothing.
    tokio::time::sleep(LATE).await;
    at_rest(&world).await;
    world.judge.at_the_end();
    counted(&world).await?;
    world.shared.over.set(true);
    Ok(())
}

/// Starts a session.
async fn begin(
    world: &World,
    transport: &dyn Transport,
    root: &SessionId,
    message: &str,
    key: &str,
) {
    insist(world, "start", || {
        transport.start(
            StartRequest {
                session_id: root.clone(),
                agent_type: None,
                message: message.to_owned(),
                state: None,
                metadata: None,
                user_id: None,
                tags: None,
                parent: None,
            },
            key.into(),
        )
    })
    .await;
}

/// Deletes the root, as its own Worker does. Its object may end meanwhile; asking again is safe.
async fn delete(world: &World, root: &SessionId) {
    for _ in 0..200 {
        let objects = world.shared.objects(Side::Consumer);
        let producer = objects.map(|objects| objects.producer(root));
        let Some(Ok(producer)) = producer else { break };
        match producer.delete().await {
            Ok(()) => return,
            Err(error) => {
                world.shared.gate.tell(&format_args!("delete: {error}"));
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
        }
    }
    world
        .shared
        .gate
        .broken(Invariant::Bounded, "no deletion is done");
}

/// Asks until there is an answer that is no accident.
async fn insist<'a, T>(
    world: &World,
    what: &str,
    ask: impl Fn() -> remote_agents::transport::Call<'a, T>,
) {
    for _ in 0..200 {
        match ask().await {
            Ok(_) => return,
            Err(TransportError::Refused { envelope, .. })
                if envelope.code.starts_with("ALREADY") =>
            {
                return;
            }
            Err(error) => {
                world.shared.gate.tell(&format_args!("{what}: {error}"));
                tokio::time::sleep(Duration::from_secs(3)).await;
            }
        }
    }
    let what = format!("no {what} is answered");
    world.shared.gate.broken(Invariant::Bounded, what);
}

/// Waits until nothing runs any more.
async fn at_rest(world: &World) {
    let begun = world.shared.gate.now();
    loop {
        let running = world.judge.running();
        if running.is_empty() {
            return;
        }
        let since = begun.max(world.shared.gate.struck_at());
        let waited = world.shared.gate.now().saturating_sub(since);
        if waited > BOUND_MS {
            let what = format!("{running:?} never come to rest");
            world.shared.gate.broken(Invariant::Bounded, what);
            return;
        }
        let rested = world
            .judge
            .of(ROOT, |root| root.known().rested_at)
            .flatten();
        let lives = world.shared.workload.deleted.is_none();
        let stopped =
            lives && world.shared.stop_asked.get() && !running.iter().any(|name| name == ROOT);
        let since = rested.unwrap_or(0).max(world.shared.gate.struck_at());
        let waited = world.shared.gate.now().saturating_sub(since);
        if stopped && waited > STOP_BOUND_MS {
            let what = format!("{running:?} go on after their root has stopped");
            world.shared.gate.broken(Invariant::Interrupt, what);
            return;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Each token is counted once, by the root's own rollup. Where a part of the tree could not be asked,
/// the rollup says that it is partial, and is asked for again.
async fn counted(world: &World) -> Result<()> {
    let (transport, root) = (world.to("root")?, SessionId::parse(ROOT)?);
    let mut last = String::from("never answered");
    for _ in 0..40 {
        if let Ok(usage) = transport.usage(&root).await {
            let total = usage.rollup["tokens"]["total"].as_u64();
            let total = total.ok_or_else(|| Error::internal("a rollup without tokens"))?;
            let spent = world.judge.spent();
            let is_partial = usage.rollup["partial"] == true;
            if total == spent {
                return Ok(());
            }
            last = format!("says {total} (partial: {is_partial}), all sessions together {spent}");
            if total > spent || !is_partial {
                break;
            }
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
    }
    let what = format!("the rollup {last}");
    world.shared.gate.broken(Invariant::CountedOnce, what);
    Ok(())
}
