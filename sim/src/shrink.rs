//! Makes a failing plan small: faults are taken out one by one while it still fails alike.

use crate::gate::{Invariant, Outcome};
use crate::plan::Plan;
use crate::run::run;

/// The smallest plan that was found, and what it comes to. `of` is the invariant that does not hold.
#[must_use]
pub fn shrink(plan: Plan, of: Invariant) -> (Plan, Outcome) {
    let mut smallest = plan;
    let mut place = 0;
    while place < smallest.faults.len() {
        let smaller = smallest.without(place);
        let broken = run(&smaller).broken;
        if broken.is_some_and(|broken| broken.invariant == of) {
            smallest = smaller;
        } else {
            place = place.saturating_add(1);
        }
    }
    let outcome = run(&smallest);
    (smallest, outcome)
}

/// What a person needs to see of a failing seed: what does not hold, what is left of the plan, and
/// the end of the trace.
#[must_use]
pub fn script(plan: &Plan, outcome: &Outcome) -> String {
    let mut text = format!("seed {}\n", plan.seed);
    if let Some(broken) = &outcome.broken {
        text.push_str(&format!("  broken: {broken}\n"));
    }
    text.push_str(&format!("  then: {:?}\n", plan.workload.then));
    if let Some(behind) = plan.workload.deleted {
        text.push_str(&format!("  deleted: {behind} ms behind it\n"));
    }
    if !plan.workload.keeps.keeps_all() {
        text.push_str(&format!("  keeps: {:?}\n", plan.workload.keeps));
    }
    for fault in &plan.faults {
        text.push_str(&format!("  fault: {fault}\n"));
    }
    for line in &outcome.last {
        text.push_str(&format!("  {line}\n"));
    }
    let places: Vec<String> = plan
        .faults
        .iter()
        .map(|fault| fault.place.to_string())
        .collect();
    text.push_str(&format!(
        "  again: cargo xtask sim --seed {} --faults {}\n",
        plan.seed,
        if places.is_empty() {
            "none".into()
        } else {
            places.join(",")
        },
    ));
    text
}
