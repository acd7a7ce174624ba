//! What many seeds came to together: which fault struck at which effect on which side, how often.

use std::collections::BTreeMap;
use std::fmt;

use crate::gate::Outcome;
use crate::plan::{Fault, Kind, Side};

/// Counts over seeds.
#[derive(Clone, Debug, Default)]
pub struct Table {
    cells: BTreeMap<(Kind, Side, Fault), u64>,
    effects: Vec<u64>,
    faults: Vec<u64>,
    virtual_ms: u64,
    lost: u64,
    truncated: u64,
    deleted: u64,
}

impl Table {
    /// Adds what a seed came to.
    pub fn add(&mut self, outcome: &Outcome) {
        for struck in &outcome.struck {
            let cell = (struck.kind, struck.side, struck.fault);
            let count = self.cells.entry(cell).or_default();
            *count = count.saturating_add(1);
        }
        self.effects.push(outcome.effects.values().sum());
        let faults = u64::try_from(outcome.struck.len()).unwrap_or(u64::MAX);
        self.faults.push(faults);
        self.virtual_ms = self.virtual_ms.saturating_add(outcome.virtual_ms);
        self.lost = self.lost.saturating_add(outcome.lost);
        self.truncated = self.truncated.saturating_add(outcome.truncated);
        self.deleted = self.deleted.saturating_add(outcome.deleted);
    }

    /// Adds another table.
    pub fn join(&mut self, other: Self) {
        for (cell, count) in other.cells {
            let sum = self.cells.entry(cell).or_default();
            *sum = sum.saturating_add(count);
        }
        self.effects.extend(other.effects);
        self.faults.extend(other.faults);
        self.virtual_ms = self.virtual_ms.saturating_add(other.virtual_ms);
        self.lost = self.lost.saturating_add(other.lost);
        self.truncated = self.truncated.saturating_add(other.truncated);
        self.deleted = self.deleted.saturating_add(other.deleted);
    }

    /// The cells that can occur and did not.
    #[must_use]
    pub fn empty(&self) -> Vec<(Kind, Side, Fault)> {
        let mut empty = Vec::new();
        for kind in Kind::ALL {
            for side in Side::ALL {
                for fault in kind.faults(side) {
                    if !self.cells.contains_key(&(kind, side, fault)) {
                        empty.push((kind, side, fault));
                    }
                }
            }
        }
        empty
    }

    /// How often a reader's cursor was not in the log, and how often a session was deleted.
    #[must_use]
    pub fn trims_and_deletions(&self) -> (u64, u64) {
        (self.truncated, self.deleted)
    }

    /// How many effects and faults the median seed has.
    #[must_use]
    pub fn medians(&self) -> (u64, u64) {
        (median(&self.effects), median(&self.faults))
    }
}

fn median(counts: &[u64]) -> u64 {
    let mut counts = counts.to_vec();
    counts.sort_unstable();
    counts.get(counts.len() / 2).copied().unwrap_or(0)
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<30}", "effect, side")?;
        for fault in Fault::ALL {
            write!(f, "{:>11}", format!("{fault:?}"))?;
        }
        writeln!(f)?;
        for kind in Kind::ALL {
            for side in Side::ALL.into_iter().filter(|side| kind.occurs(*side)) {
                write!(f, "{:<30}", format!("{kind:?} {side:?}"))?;
                let can = kind.faults(side);
                for fault in Fault::ALL {
                    let cell = self.cells.get(&(kind, side, fault)).copied();
                    let told = match cell {
                        Some(count) => count.to_string(),
                        None if can.contains(&fault) => "0".into(),
                        None => ".".into(),
                    };
                    write!(f, "{told:>11}")?;
                }
                writeln!(f)?;
            }
        }
        let (effects, faults) = self.medians();
        let hours = self.virtual_ms / 3_600_000;
        write!(
            f,
            "{} seeds; the median has {effects} effects and {faults} faults; {hours} virtual hours; {} chunks were gone before they were durable; {} deletions; readers were told {} times that their place is not kept",
            self.effects.len(),
            self.lost,
            self.deleted,
            self.truncated
        )
    }
}
