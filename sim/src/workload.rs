//! The job of a seed: what each agent of the tree does, and what its user does meanwhile.

use std::time::Duration;

use remote_agents::session::Retention;
use serde_json::{Value, json};

use crate::random::Random;

/// What a user does behind the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// Nothing more.
    Nothing,
    /// Sends another message once the run has ended.
    Message,
    /// Interrupts after so many milliseconds, and leaves it at that.
    Interrupt(u64),
    /// Aborts after so many milliseconds.
    Abort(u64),
    /// Interrupts after so many milliseconds, and then goes on without a message.
    Continue(u64),
    /// Interrupts after so many milliseconds, and then begins a new turn.
    NewTurn(u64),
}

/// A job and its user.
#[derive(Clone, Debug)]
pub struct Workload {
    /// What the root is told: its script, with those of its children inside.
    pub script: Value,
    /// What comes behind it.
    pub then: Then,
    /// What the root is told then.
    pub again: Value,
    /// How long a reader stays at most, in milliseconds; it comes again with its cursor.
    pub reads_for: u64,
    /// The longest wait before a piece of a model's answer, in milliseconds.
    pub pace: u64,
    /// Whether the root has a reader with a cursor. One wakes what it reads.
    pub is_read: bool,
    /// Whether somebody follows the tree.
    pub is_followed: bool,
    /// Whether somebody asks for tree and conversation now and then.
    pub is_surveyed: bool,
    /// Whether the public looks on.
    pub is_shown: bool,
    /// Whether calls of children have little time.
    pub hasty: bool,
    /// How much of their logs the sessions keep.
    pub keeps: Retention,
    /// When the root is deleted, in milliseconds behind the rest of what its user does; another
    /// life of it begins then.
    pub deleted: Option<u64>,
}

impl Workload {
    /// The workload that these numbers make, and those of what came later.
    #[must_use]
    pub fn of(random: &Random, later: &Random) -> Self {
        let at = 1 + random.below(400);
        let then = match random.below(10) {
            0..5 => Then::Nothing,
            5 => Then::Message,
            6 => Then::Interrupt(at),
            7 => Then::Abort(at),
            8 => Then::Continue(at),
            _ => Then::NewTurn(at),
        };
        let stops = !matches!(then, Then::Nothing | Then::Message);
        Self {
            script: script(random, 0, stops),
            then,
            again: script(random, 1, false),
            reads_for: 1 + random.below(2_000),
            pace: 1 + random.below(12),
            is_read: random.chance(75),
            is_followed: random.chance(60),
            is_surveyed: random.chance(40),
            is_shown: random.chance(35),
            hasty: random.chance(30),
            keeps: keeps(later),
            deleted: later.chance(12).then(|| later.below(900)),
        }
    }
}

/// Three of four seeds keep everything.
fn keeps(random: &Random) -> Retention {
    let all = Retention::default();
    match random.below(20) {
        0 | 1 => all.with_max_chunks(1 + random.below(60)),
        2 => all.with_max_bytes(500 + random.below(20_000)),
        3 => all.with_max_age(Duration::from_millis(1 + random.below(60_000))),
        4 => all.with_hard_max_bytes(1_000 + random.below(12_000)),
        _ => all,
    }
}

/// How many levels of children there are.
const LEVELS: u64 = 3;

/// The script of a session: what it calls in each step, and how it speaks at its end.
fn script(random: &Random, level: u64, slow: bool) -> Value {
    let steps = 1 + u64::from(random.chance(if level < 2 { 40 } else { 15 }));
    let steps: Vec<Value> = (0..steps)
        .map(|step| {
            let mut calls = Vec::new();
            for _ in 0..=u64::from(random.chance(30)) {
                calls.push(match random.below(4) {
                    0 => json!(["fail", {"note": random.below(90)}]),
                    1 => json!(["slow", {"note": random.below(90)}]),
                    _ => json!(["note", {"note": random.below(90)}]),
                });
            }
            if level < LEVELS && (step == 0 || random.chance(20)) {
                let children = match level {
                    0 => 1 + u64::from(random.chance(20)),
                    1 => u64::from(random.chance(70)) + u64::from(random.chance(15)),
                    _ => u64::from(random.chance(40)),
                };
                for _ in 0..children {
                    let child = script(random, level + 1, slow && random.chance(60));
                    calls.push(json!(["ask", child]));
                }
            }
            Value::Array(calls)
        })
        .collect();
    // One that is slow speaks for hours: it ends in time by a stop alone.
    let words = if slow && level > 0 && random.chance(60) {
        json!([200, 40_000])
    } else {
        json!([1 + random.below(4), 0])
    };
    json!({"steps": steps, "words": words})
}
