//! Decides the next answer: which step of the procedure is open, and which calls it still needs.
//!
//! The decision is replayed from the conversation each time; nothing is remembered between two
//! answers. A failed call is made once more and then given up, so every procedure ends.

use serde_json::Value;

use super::extract;
use super::fill::{self, Sources};
use super::history::{self, History};
use super::procedure::{self, Step};
use crate::agent::FINISH_TOOL;
use crate::agent::model::ModelRequest;

/// Calls of one answer.
const MOST_CALLS: usize = 16;

/// Answers with calls to one user message; the next one only writes.
const MOST_TURNS: usize = 64;

/// Failures after which a call is given up.
const MOST_FAILURES: u32 = 2;

/// Tries after which a call is given up, those that were stopped before they began included.
const MOST_TRIES: u32 = 24;

/// What to say and what to call.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) calls: Vec<(String, Value)>,
}

/// The next answer to this request.
pub(super) fn answer(request: &ModelRequest) -> Answer {
    let history = History::of(&request.messages);
    let tools: Vec<&str> = request
        .tools
        .iter()
        .map(|tool| tool.name.as_str())
        .collect();
    let mut steps = procedure::parse(&request.instructions, &tools);
    let is_finish = |step: &Step| step.tool.as_deref() == Some(FINISH_TOOL);
    if tools.contains(&FINISH_TOOL) && !steps.iter().any(is_finish) {
        steps.push(Step {
            tool: Some(FINISH_TOOL.to_owned()),
            each: None,
            write: false,
        });
    }
    let mut replay = Replay {
        history: &history,
        cursor: 0,
        groups: Vec::new(),
        failures: Vec::new(),
    };
    let mut write = false;
    if history.turns.len() < MOST_TURNS {
        for step in &steps {
            write |= step.write;
            let Some(spec) = step
                .tool
                .as_ref()
                .and_then(|name| request.tools.iter().find(|tool| tool.name == *name))
            else {
                continue;
            };
            if let Some(open) = replay.open_calls(step, &spec.name, &spec.parameters) {
                let text = if write && open.is_first {
                    replay.text()
                } else {
                    String::new()
                };
                let calls = open.arguments.into_iter().take(MOST_CALLS);
                return Answer {
                    text,
                    calls: calls
                        .map(|arguments| (spec.name.clone(), arguments))
                        .collect(),
                };
            }
            write = false;
        }
    }
    Answer {
        text: replay.text(),
        calls: Vec::new(),
    }
}

/// A walk through the conversation along the procedure.
struct Replay<'a> {
    history: &'a History<'a>,
    /// The first turn that no step has taken yet.
    cursor: usize,
    /// The successful results of each finished step, the latest step first.
    groups: Vec<Vec<&'a Value>>,
    /// What failed calls said, the latest first.
    failures: Vec<String>,
}

/// The calls that a step still needs.
struct Open {
    arguments: Vec<Value>,
    /// Whether the step has not been tried at all yet.
    is_first: bool,
}

#[derive(Clone, Default)]
struct Tally {
    succeeded: bool,
    failures: u32,
    tries: u32,
}

impl Tally {
    fn is_open(&self) -> bool {
        !self.succeeded && self.failures < MOST_FAILURES && self.tries < MOST_TRIES
    }
}

impl<'a> Replay<'a> {
    /// Takes the turns that belong to a step; what it still has to call, or `None` when it is done.
    fn open_calls(&mut self, step: &Step, tool: &str, schema: &Value) -> Option<Open> {
        let expected = self.expected(step, schema);
        let mut tally = vec![Tally::default(); expected.len()];
        let mut results = Vec::new();
        let mut is_first = true;
        while tally.iter().any(Tally::is_open) {
            let rest = self.history.turns.get(self.cursor..).unwrap_or_default();
            let Some(at) = rest
                .iter()
                .position(|turn| turn.calls.iter().any(|(call, _)| call.name == tool))
            else {
                let open = expected
                    .into_iter()
                    .zip(&tally)
                    .filter(|(_, tally)| tally.is_open());
                return Some(Open {
                    arguments: open.map(|(arguments, _)| arguments).collect(),
                    is_first,
                });
            };
            is_first = false;
            for turn in rest.iter().take(at.saturating_add(1)) {
                for (call, outcome) in &turn.calls {
                    // A call that is not the step's own counts for none, but its result may be read.
                    let own = (call.name == tool)
                        .then(|| place(&expected, &tally, &call.arguments))
                        .flatten();
                    let tally = own.and_then(|own| tally.get_mut(own));
                    self.settle(tally, *outcome, &mut results);
                }
            }
            self.cursor = self.cursor.saturating_add(at).saturating_add(1);
        }
        self.groups.insert(0, results);
        None
    }

    fn settle(
        &mut self,
        tally: Option<&mut Tally>,
        outcome: Option<&'a crate::store::ToolOutcome>,
        results: &mut Vec<&'a Value>,
    ) {
        let succeeded = outcome.is_some_and(|outcome| outcome.success);
        if let Some(tally) = tally {
            tally.tries = tally.tries.saturating_add(1);
            tally.succeeded |= succeeded;
            if !succeeded && !outcome.is_some_and(history::not_executed) {
                tally.failures = tally.failures.saturating_add(1);
            }
        }
        match outcome {
            Some(outcome) if outcome.success => results.push(&outcome.result),
            Some(outcome) => self
                .failures
                .splice(0..0, history::failure_text(outcome))
                .for_each(drop),
            None => {}
        }
    }

    /// The arguments of every call that a step makes, as of the results before it.
    fn expected(&self, step: &Step, schema: &Value) -> Vec<Value> {
        let sources = Sources {
            element: None,
            groups: &self.groups,
            user: &self.history.user,
            failures: &self.failures,
        };
        let Some(list) = &step.each else {
            return vec![fill::arguments(schema, &sources)];
        };
        let mut expected = Vec::new();
        for element in self.list(list.as_deref()) {
            let arguments = fill::arguments(
                schema,
                &Sources {
                    element: Some(element),
                    ..sources
                },
            );
            if !expected.contains(&arguments) {
                expected.push(arguments);
            }
        }
        expected
    }

    /// The items of a list by its name, or of the latest list of all.
    fn list(&self, name: Option<&str>) -> Vec<&Value> {
        let array_in = |value: &'_ Value| match name {
            Some(name) => extract::find(value, name).is_some_and(Value::is_array),
            None => extract::first_array(value).is_some(),
        };
        let items = |value| match name {
            Some(name) => extract::find(value, name).and_then(Value::as_array),
            None => extract::first_array(value),
        };
        let group = self
            .groups
            .iter()
            .find(|group| group.iter().any(|value| array_in(value)));
        match group {
            Some(group) => group
                .iter()
                .filter_map(|value| items(value))
                .flatten()
                .collect(),
            None => items(&self.history.user).into_iter().flatten().collect(),
        }
    }

    /// What there is to say: the latest results; failing those the failures; failing those the
    /// user's own words.
    fn text(&self) -> String {
        let text = self
            .groups
            .iter()
            .find(|group| !group.is_empty())
            .map_or_else(String::new, |group| extract::render(group));
        if !text.is_empty() {
            return text;
        }
        let topic = extract::topic(&self.history.user);
        match self.failures.first() {
            Some(failure) => failure.clone(),
            None if self.groups.iter().all(Vec::is_empty) => topic,
            None => format!("Nothing found: {topic}"),
        }
    }
}

/// The expected call that a call with these arguments is; else the first that is still open.
fn place(expected: &[Value], tally: &[Tally], arguments: &Value) -> Option<usize> {
    expected
        .iter()
        .position(|candidate| candidate == arguments)
        .or_else(|| tally.iter().position(Tally::is_open))
}
