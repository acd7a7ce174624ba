//! One session of a history: the real machine, driven through everything that its script allows.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{Do, Ends, Odd, Script, Shown, Tables, Truth, name, record, stream, without};
use crate::protocol::chunk::RawChunk;
use crate::protocol::frame::{EndFrame, ErrorFrame, Frame};
use crate::protocol::ids::{AgentType, RunId, SessionId, StreamId};
use crate::protocol::message::{ResumeMode, SessionStatus};
use crate::protocol::usage::{Tokens, UsageRollup};
use crate::session::{Begin, EntryIds, ModelAnswer, Reopen, Session, Settlement, Transition};
use crate::store::{Failure, RunRecord, SessionOrigin, ToolCall, ToolOutcome, Write};

#[derive(Clone)]
pub(super) struct Actor {
    pub(super) index: usize,
    pub(super) session: Session,
    pub(super) life: u8,
    pub(super) step: usize,
    /// How many writes of each tool of the step are done.
    pub(super) done: Vec<usize>,
    pub(super) log: Vec<u32>,
    pub(super) committed: Vec<(u8, u64, Value)>,
    pub(super) finals: Vec<Value>,
    pub(super) discards: u8,
    pub(super) resets: u8,
    pub(super) cuts: u8,
    pub(super) odd: Vec<Odd>,
    pub(super) reasons: BTreeSet<&'static str>,
}

pub(super) fn done() -> ToolOutcome {
    ToolOutcome {
        success: true,
        result: json!(1),
        error: None,
    }
}

fn run() -> RunRecord {
    RunRecord {
        run_id: RunId::from_entropy([1; 16]),
        start_sequence: 0,
        start_step: 0,
        started_at: 1,
        terminal: None,
    }
}

fn ids() -> EntryIds {
    EntryIds {
        run_id: RunId::from_entropy([1; 16]),
        entropy: [1; 16],
    }
}

impl Actor {
    pub(super) fn begin(index: usize, script: &Script, tables: &mut Tables) -> Self {
        let begun = Self::first(index, 0);
        let mut actor = Self {
            index,
            session: begun.next.clone(),
            life: 0,
            step: 0,
            done: Vec::new(),
            log: Vec::new(),
            committed: Vec::new(),
            finals: Vec::new(),
            discards: script.discards,
            resets: script.resets,
            cuts: script.cuts,
            odd: script.odd.to_vec(),
            reasons: BTreeSet::new(),
        };
        actor.take(begun, tables);
        actor.answer(tables);
        actor
    }

    fn first(index: usize, life: u8) -> Transition {
        let begin = Begin {
            session_id: SessionId::parse(name(index)).unwrap(),
            agent_type: AgentType::parse("tester").unwrap(),
            stream_id: StreamId::parse(&stream(index, life)).unwrap(),
            message: "hello".into(),
            state: json!({"list": [], "x": 0}),
            origin: SessionOrigin::default(),
            idempotency: None,
            ids: ids(),
        };
        Session::begin(begin, 1).unwrap()
    }

    pub(super) fn is_over(&self) -> bool {
        self.session.record.status != SessionStatus::Running
    }

    pub(super) fn take(&mut self, transition: Transition, tables: &mut Tables) {
        let (index, life) = (self.index, self.life);
        self.take_as(transition, tables, |place, _| Truth {
            session: Some(index),
            life,
            place,
        });
    }

    /// Takes a transition whose chunks are in truth what `truth` says of place and index.
    pub(super) fn take_as(
        &mut self,
        transition: Transition,
        tables: &mut Tables,
        truth: impl Fn(u64, usize) -> Truth,
    ) {
        self.note(transition, tables, truth, |chunk| chunk);
    }

    fn note(
        &mut self,
        transition: Transition,
        tables: &mut Tables,
        truth: impl Fn(u64, usize) -> Truth,
        make: impl Fn(RawChunk) -> RawChunk,
    ) {
        let texts = transition.commit.writes.iter().filter_map(Write::chunks);
        for (at, text) in texts.flat_map(|(_, chunks)| chunks).enumerate() {
            let text = if tables.plan.numbered {
                text.clone()
            } else {
                without(text, &["patchOrdinal", "patchBase"])
            };
            let chunk = make(serde_json::from_str(&text).unwrap());
            match chunk.kind() {
                "step_discarded" => drop(self.reasons.insert("discarded")),
                "stream_resync" => drop(self.reasons.insert("resync")),
                "run_resumed" => drop(self.reasons.insert("reopened")),
                _ => {}
            }
            let place = self.log.len() as u64 + 1;
            self.log.push(tables.chunk(chunk, truth(place, at)));
        }
        self.session = transition.next;
        let checkpoint = &self.session.checkpoint;
        let now = (
            self.life,
            checkpoint.step_count,
            (*checkpoint.state).clone(),
        );
        if self.committed.last() != Some(&now) {
            self.committed.push(now.clone());
        }
        if self.session.record.status.is_terminal() && self.finals.last() != Some(&now.2) {
            self.finals.push(now.2);
        }
    }

    fn answer(&mut self, tables: &mut Tables) {
        let script = &tables.plan.scripts[self.index];
        let tools = script.steps[self.step];
        self.done = vec![0; tools.len()];
        let calls = tools.iter().map(|(name, _)| ToolCall {
            id: (*name).into(),
            name: "t".into(),
            arguments: json!({}),
        });
        let answer = ModelAnswer {
            text: "so".into(),
            calls: calls.collect(),
            queued: Vec::new(),
            cut: false,
            kept: None,
            model: "m".into(),
            tokens: Tokens::default(),
        };
        let answered = self.session.answer(answer, 1).unwrap();
        self.take(answered, tables);
    }

    pub(super) fn successors(&self, tables: &mut Tables) -> Vec<(String, Self)> {
        let script = tables.plan.scripts[self.index].clone();
        let mut found = Vec::new();
        if self.is_over() {
            if script.pauses.contains(&self.step) {
                found.push(("resumes".to_owned(), self.resumed(tables)));
            }
            return found;
        }
        let tools = script.steps[self.step];
        for (tool, (name, writes)) in tools.iter().enumerate() {
            if self.done[tool] == writes.len() {
                continue;
            }
            found.push((format!("writes {name}"), self.written(tool, None, tables)));
            for odd in [Odd::Broken, Odd::Lost] {
                if self.odd.contains(&odd) {
                    let after = self.written(tool, Some(odd), tables);
                    found.push((format!("writes {name} {odd:?}"), after));
                }
            }
        }
        let step = self.session.step.as_ref();
        let broken = step.is_some_and(|step| {
            let mut calls = step.calls.iter();
            calls.any(|call| call.outcome.is_none() && !call.staged.is_empty())
        });
        // Once each tool has written, so that what one finished is staged anew.
        let is_late = self.done.iter().all(|done| *done > 0);
        if broken && is_late && self.discards > 0 {
            found.push(("is discarded".to_owned(), self.discarded(tables)));
        }
        if step.is_some_and(|step| step.calls.iter().all(|call| call.outcome.is_some())) {
            found.push(("promotes".to_owned(), self.promoted(&script, tables)));
        }
        // Late enough that a committed step and patches of the next one are lost with it.
        let is_late = self.step + 1 == script.steps.len() && self.done.iter().any(|n| *n > 0);
        if self.resets > 0 && is_late {
            found.push(("is reset".to_owned(), self.reset(tables)));
        }
        if self.cuts > 0 && self.session.record.floor < self.session.record.last_sequence {
            let mut after = self.clone();
            after.cuts -= 1;
            after.session.record.floor = self.session.record.last_sequence;
            after.reasons.insert("truncated");
            found.push(("is cut".to_owned(), after));
        }
        for odd in [
            Odd::Streamer,
            Odd::Twice,
            Odd::Forged,
            Odd::Impostor,
            Odd::Visitor,
        ] {
            if self.odd.contains(&odd)
                && let Some(after) = self.oddly(odd, tables)
            {
                found.push((format!("says {odd:?}"), after));
            }
        }
        found
    }

    fn written(&self, tool: usize, odd: Option<Odd>, tables: &mut Tables) -> Self {
        let mut after = self.clone();
        after.odd.retain(|left| Some(*left) != odd);
        let (name, writes) = tables.plan.scripts[self.index].steps[self.step][tool];
        let mut state = (*self.session.working_state()).clone();
        match writes[self.done[tool]] {
            Do::Set(key, value) => state[key] = json!(value),
            Do::Push(value) => state["list"].as_array_mut().unwrap().push(json!(value)),
        }
        after.done[tool] += 1;
        let (index, life) = (self.index, self.life);
        let staged = self.session.stage(name, state, 1).unwrap();
        let truth = move |place, _| Truth {
            session: Some(index),
            life,
            place,
        };
        after.note(staged, tables, truth, |mut chunk| match odd {
            Some(Odd::Broken) => {
                let remove = json!({"op": "remove", "path": "/none"});
                chunk.0["patches"].as_array_mut().unwrap().push(remove);
                chunk
            }
            Some(Odd::Lost) => {
                chunk.0.insert("type".into(), json!("stream_resync"));
                chunk.0.insert("reason".into(), json!("lost"));
                chunk
            }
            _ => chunk,
        });
        match odd {
            Some(Odd::Broken) => drop(after.reasons.insert("diverged")),
            Some(Odd::Lost) => after.reasons.extend(["gap", "resync"]),
            _ => {}
        }
        if after.done[tool] == writes.len() {
            let finished = after.session.tool_finished(name, done(), None, 1).unwrap();
            after.take(finished, tables);
        }
        after
    }

    fn discarded(&self, tables: &mut Tables) -> Self {
        let mut after = self.clone();
        after.discards -= 1;
        let woken = self.session.wake(1).unwrap();
        after.take(woken, tables);
        let step = after.session.step.as_ref().unwrap();
        for (done, call) in after.done.iter_mut().zip(&step.calls) {
            if call.outcome.is_none() {
                *done = 0;
            }
        }
        after
    }

    fn promoted(&self, script: &Script, tables: &mut Tables) -> Self {
        let mut after = self.clone();
        let is_last = self.step + 1 == script.steps.len() || script.pauses.contains(&self.step);
        let settlement = match script.ends {
            Ends::Completed { .. } => Settlement::Completed {
                output: json!("out"),
            },
            Ends::Interrupted => Settlement::Interrupted { reason: None },
            Ends::Failed => Settlement::Failed {
                failure: Failure {
                    code: "provider_error".into(),
                    error: "no".into(),
                    detail: None,
                },
            },
        };
        let end = is_last.then(|| (settlement, run(), UsageRollup::default()));
        let promoted = self.session.promote(end, None, [0; 16], 1).unwrap();
        after.take(promoted, tables);
        if !is_last {
            after.step += 1;
            after.answer(tables);
        }
        after
    }

    fn resumed(&self, tables: &mut Tables) -> Self {
        let mut after = self.clone();
        let reopen = Reopen {
            mode: ResumeMode::WithMessage,
            message: Some("more".into()),
            ids: ids(),
            state: None,
            healed: Vec::new(),
            idempotency: None,
        };
        let resumed = self.session.resume(reopen, 1).unwrap();
        after.take(resumed, tables);
        after.step += 1;
        after.answer(tables);
        after
    }

    /// The session is deleted and begun anew, on another stream.
    fn reset(&self, tables: &mut Tables) -> Self {
        let mut after = self.clone();
        after.resets -= 1;
        after.life += 1;
        after.log.clear();
        after.finals.clear();
        // It says less in its next life: the last step alone.
        after.step = tables.plan.scripts[self.index].steps.len() - 1;
        after.reasons.extend(["new_stream", "truncated"]);
        after.take(Self::first(self.index, after.life), tables);
        after.answer(tables);
        after
    }

    fn oddly(&self, odd: Odd, tables: &mut Tables) -> Option<Self> {
        let mut after = self.clone();
        after.odd.retain(|left| *left != odd);
        let patch = |agent: &str| {
            json!({
                "type": "state_patch", "agentId": agent, "agentType": "tester", "timestamp": 1,
                "step": 1, "patches": [{"op": "replace", "path": "/x", "value": 99}],
            })
        };
        let mut truth = Truth {
            session: None,
            life: self.life,
            place: 0,
        };
        let chunk = match odd {
            Odd::Streamer => patch(name(self.index)),
            Odd::Visitor => patch(name(self.index + 1)),
            Odd::Impostor => {
                let mut chunk = patch(name(self.index + 1));
                chunk["patchOrdinal"] = json!(1);
                chunk["patchBase"] = json!(0);
                chunk
            }
            Odd::Forged => {
                let above = self.index.checked_sub(1)?;
                let mut chunk = patch(name(above));
                chunk["patchOrdinal"] = json!(1);
                chunk["patchBase"] = json!(0);
                chunk["origin"] = json!({
                    "sessionId": name(self.index), "streamId": stream(above, 0), "sequence": 50,
                });
                chunk
            }
            Odd::Twice => {
                let own = self.log.iter().rev().map(|id| &tables.chunks[*id as usize]);
                let (last, said) = own
                    .filter(|(_, said)| said.session == Some(self.index))
                    .find(|(chunk, _)| chunk.kind() == "state_patch")?;
                truth = Truth {
                    place: said.place,
                    ..*said
                };
                serde_json::to_value(last).unwrap()
            }
            Odd::Broken | Odd::Lost => return None,
        };
        let own = record(self.index);
        let stream_id = self.session.record.stream_id.clone();
        let said = self
            .session
            .forwarded(own, stream_id, 0, vec![chunk.to_string()], 1)
            .unwrap();
        after.take_as(said, tables, |_, _| truth);
        Some(after)
    }

    pub(super) fn shown(&self, tables: &mut Tables) -> Shown {
        let mut snapshot = self.session.snapshot();
        if !tables.plan.numbered {
            snapshot.patch_ordinal = None;
        }
        let status = self.session.record.status;
        let ended = matches!(status, SessionStatus::Completed | SessionStatus::Failed);
        let ends = tables.plan.scripts[self.index].ends;
        let state = (*self.session.checkpoint.state).clone();
        let end = self.is_over().then(|| match ends {
            Ends::Failed => Frame::Error(ErrorFrame {
                run_id: None,
                code: "provider_error".into(),
                error: "no".into(),
                detail: None,
                recoverable: false,
                floor: None,
                stream_id: None,
            }),
            Ends::Completed { .. } | Ends::Interrupted => Frame::End(EndFrame {
                run_id: None,
                status,
                output: None,
                state: (ends == Ends::Completed { with_state: true }).then_some(state),
                usage: None,
            }),
        });
        Shown {
            life: self.life,
            log: self.log.as_slice().into(),
            floor: self.session.record.floor,
            snapshot: tables.snapshot((snapshot, ended)),
            end: end.map(Arc::new),
            committed: self.committed.as_slice().into(),
            finals: self.finals.as_slice().into(),
        }
    }
}
