//! The stories.

use futures::future::FutureExt as _;
use remote_agents::Code;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{Position, SessionId};
use remote_agents::protocol::message::{SessionStatus, StartRequest};
use remote_agents::transport::{Transport, TransportError};
use serde_json::{Value, json};

use super::agents::PARENT;
use super::log::{Log, text};
use super::{Story, Told, World, hold, resume, start, status, stop, told, usage};

macro_rules! stories {
    ($($tale:ident: $name:literal),+ $(,)?) => {
        /// Every story.
        pub const STORIES: &[Story] = &[$(Story {
            name: $name,
            tell: |world| $tale(world).boxed_local(),
        }),+];
    };
}

stories! {
    eight_calls: "the eight calls are answered, and refused with what they were refused for",
    completes: "a call starts, attaches, completes and folds output, state and usage",
    nests: "a child of a child is forwarded through both hops and counted once",
    identity: "user, tags and metadata go to the child, and it knows its parent",
    many: "six children of one parent all settle, and no more than four at once",
    fails: "a failing child fails its call and not the parent",
    interrupts: "an interrupt reaches the child, and the parent can be resumed",
    aborts: "an abort reaches the child, and nothing goes on",
    goes_on: "a parent that is resumed with a message calls a child of its own for it",
    cut: "a stream that breaks off three times is forwarded as if it had not",
    unheard: "a start whose answer was lost begins one run",
    completed_already: "a start that meets a child that has ended attaches to it",
    stolen: "a child that belongs to someone else is never attached to",
    projected: "a projected mount is refused before anything is folded",
    later_version: "a later version of the protocol is refused",
    misfit: "an output that misses its shape is a structured failure, and is paid for",
    typed: "an output of the declared shape is folded",
    oversize: "a state that is too large is not folded, output and usage are",
    endless: "a child whose stream never tells its end is read from its status",
    paused: "a child that waits for its client fails the call at once",
    dead: "a child that nothing executes fails the call as such",
    revived: "a child that nothing executes is resumed once where that is allowed",
}

/// The code of a refusal.
fn refusal<T>(answer: Result<T, TransportError>) -> Result<String, String> {
    match answer {
        Err(TransportError::Refused { envelope, .. }) => Ok(envelope.code.clone()),
        Err(other) => Err(told(other)),
        Ok(_) => Err("a refusal was due".into()),
    }
}

async fn eight_calls(world: World) -> Told {
    let children = world.children("slow")?;
    let unknown = world.fresh("unknown")?;
    let not_found = Code::NotFound.as_str();
    hold!(
        refusal(children.status(&unknown).await)? == not_found,
        "status"
    );
    hold!(
        refusal(children.snapshot(&unknown).await)? == not_found,
        "snapshot"
    );
    hold!(
        refusal(children.usage(&unknown).await)? == not_found,
        "usage"
    );
    hold!(
        refusal(children.interrupt(stop(&unknown)).await)? == not_found,
        "interrupt"
    );
    hold!(
        refusal(children.abort(stop(&unknown)).await)? == not_found,
        "abort"
    );
    let resumed = children.resume(resume(&unknown, None), "k".into()).await;
    hold!(refusal(resumed)? == not_found, "resume");
    let attached = children.stream(&unknown, Position::None, None).await;
    hold!(refusal(attached)? == not_found, "stream");

    let session = world.fresh("direct")?;
    let begun = children
        .start(start(&session), "one".into())
        .await
        .map_err(told)?;
    let again = children
        .start(start(&session), "one".into())
        .await
        .map_err(told)?;
    hold!(again == begun, "the same key begins one run: {again:?}");
    let other = children.start(start(&session), "two".into()).await;
    hold!(
        refusal(other)? == Code::AlreadyRunning.as_str(),
        "another key"
    );
    let changed = StartRequest {
        message: "something else".into(),
        ..start(&session)
    };
    let conflict = children.start(changed, "one".into()).await;
    hold!(
        refusal(conflict)? == Code::IdempotencyConflict.as_str(),
        "the same key"
    );

    Log::read(&children, &session, |chunk| chunk["type"] == "text_delta").await?;
    let running = status(&children, &session).await?;
    hold!(
        running.status == SessionStatus::Running && running.is_executing,
        "{running:?}"
    );
    let pinned = children.snapshot(&session).await.map_err(told)?;
    hold!(pinned.stream_id == begun.stream_id, "{pinned:?}");
    hold!(
        pinned.stream_sequence != Position::None,
        "a running session has a position"
    );
    let rollup = usage(&children, &session).await?;
    hold!(rollup["sessionId"] == session.as_str(), "{rollup}");

    let stopped = children.interrupt(stop(&session)).await.map_err(told)?;
    hold!(stopped.accepted, "{stopped:?}");
    let log = Log::of(&children, &session).await?;
    log.ended("interrupted")?;
    let stopped = children.interrupt(stop(&session)).await.map_err(told)?;
    hold!(!stopped.accepted, "{stopped:?}");
    let resumed = children.resume(resume(&session, None), "on".into()).await;
    let resumed = resumed.map_err(told)?;
    hold!(resumed.stream_id == begun.stream_id, "{resumed:?}");
    hold!(resumed.run_id != begun.run_id, "{resumed:?}");
    let stopped = children.abort(stop(&session)).await.map_err(told)?;
    hold!(stopped.accepted, "{stopped:?}");
    let log = Log::of(&children, &session).await?;
    let aborted =
        matches!(&log.end, Frame::Error(error) if error.code == Code::RunAborted.as_str());
    hold!(aborted, "{:?}", log.end);
    let over = children.resume(resume(&session, None), "more".into()).await;
    hold!(
        refusal(over)? == Code::AlreadyCompleted.as_str(),
        "resume after an abort"
    );
    Ok(())
}

/// What a parent's state says of its call of a sub-agent.
fn folded<'a>(log: &'a Log, name: &str) -> Result<&'a Value, String> {
    let end = log.ended("completed")?;
    let state = end.state.as_ref().and_then(|state| state.get(name));
    state.ok_or_else(|| format!("nothing was folded of {name}: {:?}", end.state))
}

async fn completes(world: World) -> Told {
    let (parent, log) = world.run(&[("ask", "hi there")]).await?;
    let echo = world.children("echo")?;
    let child = log.child()?;
    let told = folded(&log, "ask")?;
    let wanted = json!({
        "success": true,
        "output": "you said hi there",
        "state": {"notes": ["hi there"]},
    });
    hold!(*told == wanted, "{told}");
    let [begun] = log.own("subagent_start")[..] else {
        return Err("one start was due".into());
    };
    hold!(begun["subAgentType"] == "echo", "{begun}");
    let [ended] = log.own("subagent_end")[..] else {
        return Err("one end was due".into());
    };
    hold!(
        ended["success"] == true && ended["subSessionId"] == child.as_str(),
        "{ended}"
    );
    let of_child = Log::of(&echo, &child).await?;
    forwarded_whole(&log, &child, &of_child)?;
    let runs = of_child.own("run_started").len();
    hold!(runs == 1, "the child has {runs} runs");

    // Two answers of each, fifteen tokens an answer.
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 60, "{rollup}");
    hold!(rollup["subAgents"]["calls"] == 1, "{rollup}");
    hold!(rollup["partial"] == false, "{rollup}");
    let own = usage(&echo, &child).await?;
    hold!(own["tokens"]["total"] == 30, "{own}");
    let end = log.ended("completed")?;
    let at_end = end.usage.as_ref().map(|usage| &usage["tokens"]);
    hold!(at_end == Some(&rollup["tokens"]), "{at_end:?}");
    Ok(())
}

/// Each chunk of the child stands in the parent's log, stamped and otherwise unchanged.
fn forwarded_whole(log: &Log, child: &SessionId, of_child: &Log) -> Told {
    let forwarded: Vec<Value> = log
        .chunks
        .iter()
        .filter(|chunk| chunk["remoteSource"]["childSessionId"] == child.as_str())
        .map(|chunk| {
            let mut chunk = chunk.clone();
            if let Some(fields) = chunk.as_object_mut() {
                fields.remove("remoteSource");
                fields.remove("origin");
            }
            chunk
        })
        .collect();
    let said: Vec<Value> = of_child
        .chunks
        .iter()
        .map(|chunk| {
            let mut chunk = chunk.clone();
            if let Some(fields) = chunk.as_object_mut() {
                fields.remove("remoteSource");
                fields.remove("origin");
            }
            chunk
        })
        .collect();
    hold!(
        forwarded == said,
        "{} of {} chunks",
        forwarded.len(),
        said.len()
    );
    Ok(())
}

async fn nests(world: World) -> Told {
    let (parent, log) = world.run(&[("nest", "deep")]).await?;
    let told = folded(&log, "nest")?;
    hold!(told["output"] == "nested and done", "{told}");
    let child = log.child()?;
    let of_child = Log::of(&world.children("nester")?, &child).await?;
    forwarded_whole(&log, &child, &of_child)?;
    let grandchild = of_child.child()?;
    let of_grandchild = Log::of(&world.children("echo")?, &grandchild).await?;
    forwarded_whole(&of_child, &grandchild, &of_grandchild)?;
    let twice = log
        .chunks
        .iter()
        .filter(|chunk| chunk["agentId"] == grandchild.as_str());
    let origins: Vec<u64> = twice
        .map(|chunk| chunk["origin"]["sequence"].as_u64().unwrap_or_default())
        .collect();
    let due: Vec<u64> = (1..).take(of_grandchild.chunks.len()).collect();
    hold!(origins == due, "{origins:?}");
    for kind in ["subagent_start", "subagent_end"] {
        let count = log.all(kind).len();
        hold!(count == 2, "{count} times {kind}");
    }
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 90, "{rollup}");
    hold!(rollup["subAgents"]["calls"] == 2, "{rollup}");
    Ok(())
}

async fn identity(world: World) -> Told {
    let session = world.fresh(PARENT)?;
    let request = StartRequest {
        message: json!([["who", "are you"]]).to_string(),
        user_id: Some("u-1".into()),
        tags: Some(vec!["a".into(), "b".into()]),
        metadata: json!({"trace": "t-1"}).as_object().cloned(),
        ..start(&session)
    };
    let begun = world.parents.start(request, "begin".into()).await;
    begun.map_err(told)?;
    let log = Log::of(&*world.parents, &session).await?;
    let output = &folded(&log, "who")?["output"];
    let output: Value = serde_json::from_str(output.as_str().unwrap_or_default())
        .map_err(|e| format!("{output}: {e}"))?;
    let wanted = json!({
        "userId": "u-1",
        "tags": ["a", "b"],
        "metadata": {"trace": "t-1"},
        "parent": session.as_str(),
    });
    hold!(output == wanted, "{output}");
    Ok(())
}

async fn many(world: World) -> Told {
    let (parent, log) = world.run(&[("ask", "x"); 6]).await?;
    let children = log.children()?;
    hold!(children.len() == 6, "{children:?}");
    let (mut open, mut most) = (0, 0);
    for chunk in log
        .chunks
        .iter()
        .filter(|chunk| chunk.get("remoteSource").is_none())
    {
        match text(chunk, "type") {
            "subagent_start" => open += 1,
            "subagent_end" => open -= 1,
            _ => {}
        }
        most = most.max(open);
    }
    hold!(most == 4, "{most} at once");
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 30 + 6 * 30, "{rollup}");
    Ok(())
}

async fn fails(world: World) -> Told {
    let (_, log) = world.run(&[("fail", "now")]).await?;
    let code = log.failure()?;
    hold!(code == Code::ProviderError.as_str(), "{code}");
    let told = folded(&log, "fail")?;
    hold!(
        told["success"] == false && told["output"].is_null(),
        "{told}"
    );
    let failed = status(&world.children("failing")?, &log.child()?).await?;
    hold!(failed.status == SessionStatus::Failed, "{failed:?}");
    Ok(())
}

/// A parent whose slow child has said something, and the child.
async fn speaking(world: &World) -> Result<(SessionId, SessionId), String> {
    let parent = world.begin(&[("slow", "go")]).await?;
    let spoken =
        |chunk: &Value| chunk["type"] == "text_delta" && chunk.get("remoteSource").is_some();
    let (chunks, _) = Log::read(&*world.parents, &parent, spoken).await?;
    let said = chunks.last().map(|chunk| text(chunk, "agentId"));
    let child = SessionId::parse(said.unwrap_or_default()).map_err(|e| e.to_string())?;
    Ok((parent, child))
}

async fn interrupts(world: World) -> Told {
    let (parent, child) = speaking(&world).await?;
    let stopped = world.parents.interrupt(stop(&parent)).await.map_err(told)?;
    hold!(stopped.accepted, "{stopped:?}");
    let log = Log::of(&*world.parents, &parent).await?;
    log.ended("interrupted")?;
    hold!(
        log.failure()? == Code::RunInterrupted.as_str(),
        "{:?}",
        log.end
    );
    let of_child = status(&world.children("slow")?, &child).await?;
    hold!(
        of_child.status == SessionStatus::Interrupted,
        "{of_child:?}"
    );
    let resumed = world
        .parents
        .resume(resume(&parent, None), "on".into())
        .await;
    resumed.map_err(told)?;
    let log = Log::of(&*world.parents, &parent).await?;
    let output = &log.ended("completed")?.output;
    hold!(
        *output == Some(json!("all calls have settled")),
        "{output:?}"
    );
    Ok(())
}

async fn aborts(world: World) -> Told {
    let (parent, child) = speaking(&world).await?;
    let stopped = world.parents.abort(stop(&parent)).await.map_err(told)?;
    hold!(stopped.accepted, "{stopped:?}");
    let log = Log::of(&*world.parents, &parent).await?;
    let aborted =
        matches!(&log.end, Frame::Error(error) if error.code == Code::RunAborted.as_str());
    hold!(aborted, "{:?}", log.end);
    let of_child = status(&world.children("slow")?, &child).await?;
    hold!(
        of_child.status == SessionStatus::Interrupted,
        "{of_child:?}"
    );
    let resumed = world
        .parents
        .resume(resume(&parent, None), "on".into())
        .await;
    hold!(
        refusal(resumed)? == Code::AlreadyCompleted.as_str(),
        "resume"
    );
    Ok(())
}

async fn goes_on(world: World) -> Told {
    let (parent, log) = world.run(&[("ask", "first")]).await?;
    let first = log.child()?;
    let message = json!([["ask", "second"]]).to_string();
    let resumed = world
        .parents
        .resume(resume(&parent, Some(message)), "on".into())
        .await;
    resumed.map_err(told)?;
    let log = Log::of(&*world.parents, &parent).await?;
    let children = log.children()?;
    hold!(
        children.len() == 2 && children.first() == Some(&first),
        "{children:?}"
    );
    let told = folded(&log, "ask")?;
    hold!(told["output"] == "you said second", "{told}");
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 120, "{rollup}");
    Ok(())
}

/// The call of `name` is as good as an undisturbed one.
async fn undisturbed(world: &World, name: &str) -> Result<(SessionId, Log), String> {
    let (parent, log) = world.run(&[(name, "hi there")]).await?;
    let told = folded(&log, name)?;
    let wanted = json!({
        "success": true,
        "output": "you said hi there",
        "state": {"notes": ["hi there"]},
    });
    hold!(*told == wanted, "{told}");
    let child = log.child()?;
    let of_child = Log::of(&world.children("echo")?, &child).await?;
    forwarded_whole(&log, &child, &of_child)?;
    let runs = of_child.own("run_started").len();
    hold!(runs == 1, "the child has {runs} runs");
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 60, "{rollup}");
    Ok((child, of_child))
}

async fn cut(world: World) -> Told {
    undisturbed(&world, "cut").await.map(drop)
}

async fn unheard(world: World) -> Told {
    undisturbed(&world, "unheard").await.map(drop)
}

async fn completed_already(world: World) -> Told {
    undisturbed(&world, "unheard_keyless").await.map(drop)
}

async fn stolen(world: World) -> Told {
    let (parent, log) = world.run(&[("stolen", "mine")]).await?;
    let code = log.failure()?;
    hold!(code == Code::ChildSessionTaken.as_str(), "{code}");
    let forwarded = log
        .chunks
        .iter()
        .filter(|chunk| chunk.get("remoteSource").is_some());
    hold!(
        forwarded.count() == 0,
        "something of a stranger was forwarded"
    );
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 30, "{rollup}");
    let slow = world.children("slow")?;
    let stranger = log.child()?;
    let at_work = status(&slow, &stranger).await?;
    hold!(
        at_work.status == SessionStatus::Running,
        "it was left alone: {at_work:?}"
    );
    slow.abort(stop(&stranger)).await.map_err(told)?;
    Ok(())
}

async fn projected(world: World) -> Told {
    let (_, log) = world.run(&[("projected", "x")]).await?;
    let code = log.failure()?;
    hold!(code == Code::NotSupported.as_str(), "{code}");
    let told = folded(&log, "projected")?;
    hold!(
        told["state"].is_null() && told["output"].is_null(),
        "{told}"
    );
    Ok(())
}

async fn later_version(world: World) -> Told {
    let (_, log) = world.run(&[("later_version", "x")]).await?;
    let code = log.failure()?;
    hold!(code == Code::VersionUnsupported.as_str(), "{code}");
    Ok(())
}

async fn misfit(world: World) -> Told {
    let (parent, log) = world.run(&[("misfind", "words")]).await?;
    let code = log.failure()?;
    hold!(code == Code::OutputValidationFailed.as_str(), "{code}");
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 60, "{rollup}");
    Ok(())
}

async fn typed(world: World) -> Told {
    let (_, log) = world.run(&[("find", "gold")]).await?;
    let told = folded(&log, "find")?;
    hold!(
        told["output"] == json!({"finding": "gold", "sources": 2}),
        "{told}"
    );
    Ok(())
}

async fn oversize(world: World) -> Told {
    let (parent, log) = world.run(&[("big", "x")]).await?;
    let told = folded(&log, "big")?;
    hold!(
        told["output"] == "grown" && told["state"].is_null(),
        "{}",
        told["output"]
    );
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 60, "{rollup}");
    Ok(())
}

async fn endless(world: World) -> Told {
    let (parent, log) = world.run(&[("endless", "deep")]).await?;
    let told = folded(&log, "endless")?;
    hold!(
        told["success"] == true && told["output"] == "nested and done",
        "{told}"
    );
    hold!(told["state"] == json!({}), "{told}");
    let rollup = world.usage(&parent).await?;
    hold!(rollup["tokens"]["total"] == 90, "{rollup}");
    Ok(())
}

async fn paused(world: World) -> Told {
    let (_, log) = world.run(&[("paused", "x")]).await?;
    let code = log.failure()?;
    hold!(code == Code::ClientToolUnsupported.as_str(), "{code}");
    Ok(())
}

async fn dead(world: World) -> Told {
    let (_, log) = world.run(&[("dead", "x")]).await?;
    let code = log.failure()?;
    hold!(code == Code::ProducerDead.as_str(), "{code}");
    Ok(())
}

async fn revived(world: World) -> Told {
    undisturbed(&world, "revived").await.map(drop)
}
