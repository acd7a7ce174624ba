//! A session's log as a reader gets it, and what holds of every log.

use std::collections::{BTreeMap, BTreeSet};

use futures::StreamExt as _;
use remote_agents::protocol::frame::{EndFrame, Frame};
use remote_agents::protocol::ids::{Position, SessionId};
use remote_agents::transport::Transport;
use serde_json::Value;

use super::{Told, hold, told};

/// How often a reader attaches.
const ATTACHES: u32 = 20;

/// The chunks of a session up to the end of its run, and that end.
#[derive(Clone, Debug)]
pub struct Log {
    /// Whose log it is.
    pub session: String,
    /// Every chunk, from the first one on.
    pub chunks: Vec<Value>,
    /// The terminal frame.
    pub end: Frame,
}

impl Log {
    /// Reads the log of a session to its end, and holds it to what holds of every log.
    pub async fn of(transport: &dyn Transport, session: &SessionId) -> Result<Self, String> {
        let (chunks, end) = Self::read(transport, session, |_| false).await?;
        let Some(end) = end else {
            return Err("the stream has no end".into());
        };
        let log = Self {
            session: session.to_string(),
            chunks,
            end,
        };
        log.check()?;
        Ok(log)
    }

    /// Reads up to the first chunk that is what is waited for, or to the end of the run.
    pub async fn read(
        transport: &dyn Transport,
        session: &SessionId,
        until: impl Fn(&Value) -> bool,
    ) -> Result<(Vec<Value>, Option<Frame>), String> {
        let mut chunks: Vec<Value> = Vec::new();
        for _ in 0..ATTACHES {
            let from = Position::At(u64::try_from(chunks.len()).unwrap_or(u64::MAX));
            let mut frames = transport.stream(session, from, None).await.map_err(told)?;
            while let Some(frame) = frames.next().await {
                match frame {
                    Ok(Frame::Chunk { sequence, chunk }) => {
                        let next = u64::try_from(chunks.len()).unwrap_or(u64::MAX) + 1;
                        hold!(sequence == next, "{sequence} came where {next} was due");
                        let chunk = Value::Object(chunk.0);
                        let found = until(&chunk);
                        chunks.push(chunk);
                        if found {
                            return Ok((chunks, None));
                        }
                    }
                    Ok(Frame::CaughtUp { .. }) => {}
                    Ok(end) => return Ok((chunks, Some(end))),
                    Err(_) => break,
                }
            }
        }
        Err(format!("{session} has no end after {ATTACHES} attaches"))
    }

    /// The chunks of a type that the session said itself.
    pub fn own(&self, kind: &str) -> Vec<&Value> {
        let own = |chunk: &&Value| chunk.get("remoteSource").is_none();
        self.all(kind).into_iter().filter(own).collect()
    }

    /// The chunks of a type, those of descendants included.
    pub fn all(&self, kind: &str) -> Vec<&Value> {
        let chunks = self.chunks.iter();
        chunks.filter(|chunk| chunk["type"] == kind).collect()
    }

    /// The session ids of the children that the session called, in order.
    pub fn children(&self) -> Result<Vec<SessionId>, String> {
        let starts = self.own("subagent_start");
        let ids = starts.iter().map(|start| text(start, "subSessionId"));
        ids.map(|id| SessionId::parse(id).map_err(|e| e.to_string()))
            .collect()
    }

    /// The one child that the session called.
    pub fn child(&self) -> Result<SessionId, String> {
        let mut children = self.children()?;
        hold!(children.len() == 1, "{children:?}");
        children.pop().ok_or_else(|| "no child".into())
    }

    /// The terminal frame of a run that did not fail.
    pub fn ended(&self, status: &str) -> Result<&EndFrame, String> {
        match &self.end {
            Frame::End(end) if end.status.as_str() == status => Ok(end),
            other => Err(format!("{status} was due, not {other:?}")),
        }
    }

    /// The code of the one call's failure.
    pub fn failure(&self) -> Result<String, String> {
        let ends = self.own("tool_end");
        let [end] = ends.as_slice() else {
            return Err(format!("one call was due: {ends:?}"));
        };
        hold!(end["success"] == false, "{end}");
        let detail = &end["result"]["metadata"]["helixErrorDetail"];
        Ok(text(detail, "code").to_owned())
    }

    /// What holds of every log: each child that was called ends once, its call's end follows at
    /// once, each call has one result, each chunk of a child stands once and in order.
    pub fn check(&self) -> Told {
        let own: Vec<&Value> = self
            .chunks
            .iter()
            .filter(|chunk| chunk.get("remoteSource").is_none())
            .collect();
        let mut open: BTreeSet<&str> = BTreeSet::new();
        let mut results: BTreeSet<&str> = BTreeSet::new();
        for (at, chunk) in own.iter().enumerate() {
            let call = text(chunk, "toolCallId");
            match text(chunk, "type") {
                "subagent_start" => hold!(open.insert(call), "{call} starts twice"),
                "subagent_end" => {
                    hold!(open.remove(call), "{call} ends without a start");
                    let next = own.get(at + 1).copied().unwrap_or(&Value::Null);
                    let is_result = next["type"] == "tool_end" && next["toolCallId"] == call;
                    hold!(is_result, "behind the end of {call} stands {next}");
                    hold!(next["success"] == chunk["success"], "{next}");
                }
                "tool_end" => hold!(results.insert(call), "{call} has two results"),
                _ => {}
            }
        }
        hold!(open.is_empty(), "{open:?} never end");
        let mut last: BTreeMap<(String, String), u64> = BTreeMap::new();
        for chunk in &self.chunks {
            let Some(source) = chunk.get("remoteSource") else {
                hold!(chunk["agentId"] == self.session.as_str(), "{chunk}");
                continue;
            };
            let of = (
                text(source, "childSessionId").to_owned(),
                text(source, "streamId").to_owned(),
            );
            let sequence = source["childSequence"].as_u64().unwrap_or_default();
            let seen = last.entry(of).or_default();
            hold!(sequence == *seen + 1, "{seen} and then {chunk}");
            *seen = sequence;
            let origin = &chunk["origin"];
            hold!(chunk["agentId"] == origin["sessionId"], "{chunk}");
        }
        Ok(())
    }
}

/// A text field, or the empty text.
pub fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}
