//! What must hold of the documents, and a path in words.

use super::{Act, Action, Flight, Held, Phase, State, Watching, stream, wrong};
use crate::reconstruct::tests::model::history::Odd;
use crate::reconstruct::{Document, Stale, Status};

impl Watching {
    pub(super) fn judge(
        &self,
        session: usize,
        at: u32,
        document: &Document,
        held: Held,
        failed: bool,
    ) -> u16 {
        let shown = self.shown(at, session);
        let mut found = 0;
        match document.status() {
            Status::Exact { step } => {
                let is = |(life, at, state): &(u8, u64, serde_json::Value)| {
                    at == step
                        && state == document.state()
                        && document.stream_id() == Some(stream(session, *life).as_str())
                };
                if !shown.committed.iter().any(is) {
                    found |= wrong::UNCOMMITTED;
                }
            }
            Status::Final => {
                // Of an earlier life the last states are not kept; its committed ones are.
                let is_old = document.stream_id() != Some(stream(session, shown.life).as_str());
                let states = shown.committed.iter().map(|(.., state)| state);
                if !states.clone().any(|state| state == document.state()) {
                    found |= wrong::UNCOMMITTED;
                }
                if !is_old && !shown.finals.contains(document.state()) {
                    found |= wrong::UNENDED;
                }
            }
            Status::Stale(why) => {
                let reasons = &self.histories.moments[at as usize].reasons;
                let plan = &self.histories.plan;
                let is_reason = match why {
                    Stale::Discarded => reasons.contains("discarded"),
                    Stale::Resync => reasons.contains("resync"),
                    Stale::Truncated => reasons.contains("truncated"),
                    Stale::NewStream => reasons.contains("new_stream"),
                    // A replay of what led to the end looks the same as more of it.
                    Stale::Reopened => !shown.finals.is_empty(),
                    Stale::Diverged => reasons.contains("diverged"),
                    Stale::NestedDescendant => {
                        let numbered = [Odd::Forged, Odd::Impostor];
                        let mut scripts = plan.scripts.iter();
                        !plan.stamped
                            // A last state's baseline tells no ordinal.
                            || !shown.finals.is_empty()
                            || scripts.any(|s| s.odd.iter().any(|odd| numbered.contains(odd)))
                    }
                    // Something was missed: by a late join, a stale while, a resync.
                    Stale::Gap => session > 0 || reasons.contains("gap"),
                };
                if !is_reason {
                    found |= wrong::UNREASONED;
                }
                // What is missing was asked for once; what has no place no snapshot mends.
                let may_wait = match why {
                    Stale::Gap | Stale::Diverged => held.asked > 0,
                    Stale::NestedDescendant => true,
                    _ => false,
                };
                if !document.waits() && !failed && !may_wait {
                    found |= wrong::UNASKED;
                }
            }
            Status::Unpinned | Status::InStep => {}
        }
        found
    }

    /// Whether nothing happens any more; then every document must be the session's last state.
    pub(super) fn rests_well(&self, state: &State) -> bool {
        if !self.histories.moments[state.moment as usize]
            .next
            .is_empty()
        {
            return true;
        }
        self.looks.iter().zip(&state.seen).all(|(look, seen)| {
            let is_at_rest = seen.phase == Phase::Over
                && !seen.failed
                && seen.held.iter().all(|held| held.flight == Flight::None);
            !is_at_rest
                || seen.held.iter().enumerate().all(|(at, held)| {
                    let shown = self.shown(state.moment, look.root + at);
                    let document = self.document(held.document);
                    // Whoever heard a run's end hears no more of the next run.
                    let goes_on = !self.histories.plan.scripts[look.root].pauses.is_empty();
                    match (document.status(), shown.snapshot_is_last(&self.histories)) {
                        (Status::Final | Status::Exact { .. }, _) if goes_on => true,
                        (Status::Final, true) => shown.finals.last() == Some(document.state()),
                        (Status::Exact { .. }, false) => true,
                        _ => false,
                    }
                })
        })
    }

    /// Whether some document is exact again, which was stale for this reason.
    fn mended(&self, state: &State, cause: u8) -> bool {
        state.seen.iter().flat_map(|seen| &seen.held).any(|held| {
            held.cause == cause
                && matches!(self.document(held.document).status(), Status::Exact { .. })
        })
    }

    /// Whether a document of a grandchild took a patch.
    pub(super) fn patched_deep(&self, state: &State) -> bool {
        state.seen.iter().any(|seen| {
            let deep = seen.held.get(2).map(|held| self.document(held.document));
            deep.is_some_and(|document| *document.status() == Status::InStep)
        })
    }
}

pub(super) type Holds = fn(&Watching, &State) -> bool;

impl Watching {
    pub(super) const MENDED: [(&'static str, &'static str, Holds); 4] = [
        ("discarded", "exact after a discard", |model, state| {
            model.mended(state, 1)
        }),
        ("resync", "exact after a resync", |model, state| {
            model.mended(state, 2)
        }),
        ("truncated", "exact after a truncation", |model, state| {
            model.mended(state, 3)
        }),
        ("new_stream", "exact after a reset", |model, state| {
            model.mended(state, 4)
        }),
    ];

    /// Whether the histories have what this property is about.
    pub(super) fn expects(&self, reason: &str) -> bool {
        let scripts = &self.histories.plan.scripts;
        let root = self.looks.iter().map(|look| look.root);
        match reason {
            "discarded" => scripts.iter().any(|script| script.discards > 0),
            "resync" => scripts.len() > 1 && scripts.iter().skip(1).any(|script| script.cuts > 0),
            "truncated" => root.into_iter().any(|at| scripts[at].cuts > 0),
            _ => scripts.len() > 1 && scripts.iter().skip(1).any(|s| s.resets > 0),
        }
    }
}

impl Watching {
    /// An action in words, and what the documents are behind it.
    pub(in super::super) fn tale(&self, before: &State, action: Action, after: &State) -> String {
        let what = match action {
            Action::Producer(way) => self.histories.moments[before.moment as usize].next[way]
                .0
                .clone(),
            Action::Observer(n, act) => {
                let log = &self.shown(before.moment, self.looks[n].root).log;
                let chunk = log.get(usize::from(before.seen[n].cursor));
                let chunk = chunk.filter(|_| act == Act::Deliver);
                let chunk = chunk.map(|id| {
                    serde_json::to_string(&self.histories.chunks[*id as usize].0).unwrap()
                });
                format!("observer {n}: {act:?} {}", chunk.unwrap_or_default())
            }
        };
        let held = after.seen.iter().flat_map(|seen| &seen.held).map(|held| {
            let document = self.document(held.document);
            format!(
                "{:?} {} {:?}",
                document.status(),
                document.state(),
                held.flight
            )
        });
        format!("{what}\n          {}", held.collect::<Vec<_>>().join("; "))
    }
}
