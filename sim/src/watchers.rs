//! Who watches a run: a reader with a cursor, a follower of the tree, whoever asks for a snapshot
//! now and then, and the public.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt as _;
use remote_agents::follower::{Follower, FollowerEvent};
use remote_agents::http::Body;
use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::ids::{AgentType, Position, SessionId, StreamId};
use remote_agents::protocol::message::SnapshotResponse;
use remote_agents::protocol::tree::{TreeBounds, TreeNode};
use remote_agents::transport::{Fetch, Transport};
use remote_agents::{Error, Result};
use serde_json::Value;

use crate::agents::LEVELS;
use crate::gate::Invariant;
use crate::world::{CANARY, ROOT, World};

async fn wait(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

fn root() -> Result<SessionId> {
    SessionId::parse(ROOT)
}

/// Reads the root's stream, leaves now and then, and comes again with its cursor. It is done when
/// the run is over and it has everything.
///
/// # Errors
/// When a name is malformed.
pub async fn read(world: Rc<World>) -> Result<()> {
    let transport = world.to("root")?;
    let mut place = (None, 0);
    let mut most = world.shared.workload.reads_for;
    loop {
        let stays = 1 + world.shared.random.below(most);
        // It leaves often in the beginning, and seldom in a run that takes long.
        most = most.saturating_add(most / 2).min(3_600_000);
        let reading = read_once(&world, &transport, &mut place);
        // Its time is over, or its stream is: either way it comes again.
        drop(tokio::time::timeout(Duration::from_millis(stays), reading).await);
        let (stream, cursor) = &place;
        let has_all = world.judge.of(ROOT, |ledger| {
            let is_of_it = stream.is_none() || ledger.stream() == stream.as_ref();
            is_of_it && Some(ledger.chunks.len()) == usize::try_from(*cursor).ok()
        });
        let has_all = has_all == Some(true);
        if world.shared.over.get() && has_all {
            return Ok(());
        }
        let is_at_rest = has_all && world.judge.rests(ROOT);
        wait(if is_at_rest { 25_000 } else { 20 }).await;
    }
}

/// Reads from a cursor in a life. Which life it is matters where there may be another one.
async fn read_once(
    world: &World,
    transport: &dyn Transport,
    (stream, cursor): &mut (Option<StreamId>, u64),
) {
    let Ok(root) = root() else { return };
    if stream.is_none() && world.shared.workload.deleted.is_some() {
        let Ok(status) = transport.status(&root).await else {
            return;
        };
        let told = status.stream_id.as_deref();
        *stream = told.and_then(|told| StreamId::parse(told).ok());
    }
    let from = Position::At(*cursor);
    let Ok(mut frames) = transport.stream(&root, from, stream.as_ref()).await else {
        return;
    };
    while let Some(Ok(frame)) = frames.next().await {
        match frame {
            Frame::Chunk { sequence, chunk } => {
                let of = (ROOT, stream.as_ref());
                world.judge.was_told(of, *cursor, sequence, &chunk);
                *cursor = sequence;
            }
            Frame::CaughtUp { .. } => {}
            Frame::Error(error) if error.code == "TRUNCATED" => {
                let on = world.judge.was_truncated(stream.as_ref(), *cursor, &error);
                if let Some((told, before_floor)) = on {
                    *stream = stream.is_some().then_some(told);
                    *cursor = before_floor;
                }
                return;
            }
            Frame::End(_) | Frame::Error(_) => {
                return; // There may be another run.
            }
        }
    }
}

/// Follows the tree from the root on, run after run.
///
/// # Errors
/// When a name is malformed.
pub async fn follow(world: Rc<World>) -> Result<()> {
    let mut ways = Vec::new();
    for level in LEVELS {
        ways.push((level, Rc::new(world.to(level)?) as Rc<dyn Transport>));
    }
    let root_way = ways.first().map(|(_, way)| way.clone());
    let root_way = root_way.ok_or_else(|| Error::internal("no way"))?;
    let routes = Rc::new(move |agent_type: &AgentType| {
        let way = ways.iter().find(|(level, _)| *level == agent_type.as_str());
        way.map_or_else(|| root_way.clone(), |(_, way)| way.clone())
    });
    while !world.shared.over.get() {
        let agent_type = AgentType::parse("root")?;
        let mut follower = Follower::new(world.user(), routes.clone(), root()?, agent_type);
        let (mut has_ended, mut is_unread) = (false, false);
        while let Some(Ok(event)) = follower.next().await {
            match event {
                FollowerEvent::Document(node) | FollowerEvent::Node(node) => {
                    if let Some(node) = follower.nodes().get(node) {
                        world.judge.looks_exact(&node.document);
                    }
                }
                // Whoever follows is told, and may ask again.
                FollowerEvent::NoSnapshot { .. } => is_unread = true,
                FollowerEvent::End(_) | FollowerEvent::Failed(_) => has_ended = true,
                _ => {}
            }
        }
        if has_ended && !is_unread {
            world
                .judge
                .was_followed(follower.nodes().iter().map(|node| &node.document));
        }
        // Another run is followed anew.
        wait(200).await;
        while world.judge.rests(ROOT) && !world.shared.over.get() {
            wait(1_000).await;
        }
    }
    Ok(())
}

/// Asks for the snapshot of some session, again and again, over an honest line.
///
/// # Errors
/// When a name is malformed.
pub async fn probe(world: Rc<World>) -> Result<()> {
    let mut pause = 7;
    while !world.shared.over.get() {
        wait(1 + world.shared.random.below(pause)).await;
        pause = (pause + 2).min(5_000);
        let sessions = world.judge.sessions();
        let Some((session, agent_type)) = world.shared.random.one_of(&sessions) else {
            continue;
        };
        let path = format!("/agents/{agent_type}/snapshot?sessionId={session}");
        let fetch = world.honest(agent_type, &world.raw)?;
        let Some(bytes) = get(&*fetch, &path).await else {
            continue;
        };
        if let Ok(snapshot) = serde_json::from_slice::<SnapshotResponse>(&bytes) {
            let session = SessionId::parse(&snapshot.session_id)?;
            let position = snapshot.stream_sequence;
            world.judge.was_shown(&session, position, &snapshot.state);
        }
    }
    Ok(())
}

/// Asks for the root's tree and for its conversation now and then, over the line.
///
/// # Errors
/// When a name is malformed.
pub async fn survey(world: Rc<World>) -> Result<()> {
    let (transport, line) = (world.to("root")?, world.line("root")?);
    let root = root()?;
    let mut read = Vec::new();
    let mut read_in = world.judge.turns();
    let mut pause = 40;
    while !world.shared.over.get() {
        wait(1 + world.shared.random.below(pause)).await;
        pause = pause.saturating_mul(3);
        if let Ok(tree) = transport.tree(&root, TreeBounds::MOST).await {
            surveyed(&world, &tree);
        }
        let path = format!("/agents/root/messages?sessionId={ROOT}&after=0&limit=200");
        let asked_in = world.judge.turns();
        let Some(bytes) = get(&line, &path).await else {
            continue;
        };
        if world.judge.turns() != asked_in {
            continue; // It may be the conversation of either life.
        }
        if read_in != asked_in {
            read.clear();
            read_in = asked_in;
        }
        let page: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let messages = page["messages"].as_array().cloned().unwrap_or_default();
        let stays = messages
            .iter()
            .zip(&read)
            .all(|(now, before)| now == before);
        if !stays || (!messages.is_empty() && messages.len() < read.len()) {
            let what = format!("{read:?} was the conversation, {messages:?} is");
            world.shared.gate.broken(Invariant::Promoted, what);
        }
        if !messages.is_empty() {
            read = messages;
        }
    }
    Ok(())
}

fn surveyed(world: &World, node: &TreeNode) {
    if let (Some(state), Some(position)) = (&node.state, node.stream_sequence) {
        world.judge.was_shown(&node.session_id, position, state);
    }
    for child in &node.children {
        surveyed(world, child);
    }
}

async fn get(fetch: &dyn Fetch, path: &str) -> Option<Bytes> {
    let request = http::Request::get(path).body(Bytes::new()).ok()?;
    let answer = fetch.fetch(request).await.ok()?;
    answer.into_body().collect(64 << 20).await.ok()
}

/// Reads all that the projected mount shows.
///
/// # Errors
/// When the objects are gone.
pub async fn peep(world: Rc<World>) -> Result<()> {
    let fetch = world.honest("root", &world.public)?;
    let mut pause = 50;
    while !world.shared.over.get() {
        for action in ["snapshot", "tree", "messages", "usage", "status"] {
            let path = format!("/public/root/{action}?sessionId={ROOT}");
            if let Some(bytes) = get(&*fetch, &path).await {
                shown(&world, action, &bytes);
            }
            wait(30).await;
        }
        let path = format!("/public/root/sse?sessionId={ROOT}&fromSequence=0");
        let stream = stream(&world, &*fetch, &path);
        let stays = Duration::from_millis(1 + world.shared.random.below(1_000));
        drop(tokio::time::timeout(stays, stream).await);
        pause *= 3;
        wait(pause).await;
    }
    Ok(())
}

async fn stream(world: &World, fetch: &dyn Fetch, path: &str) {
    let Ok(request) = http::Request::get(path).body(Bytes::new()) else {
        return;
    };
    let Ok(answer) = fetch.fetch(request).await else {
        return;
    };
    if let Body::Stream(mut parts) = answer.into_body() {
        while let Some(Ok(part)) = parts.next().await {
            shown(world, "sse", &part);
        }
    }
}

fn shown(world: &World, action: &str, bytes: &[u8]) {
    let canary = CANARY.as_bytes();
    if bytes.windows(canary.len()).any(|window| window == canary) {
        let what = format!("the public sees the canary at {action}");
        world.shared.gate.broken(Invariant::Canary, what);
    }
}
