//! Runs seeds: `sim [--seeds N] [--first S] [--seed S [--faults none|P,P..]] [--threads N] [--mutant NAME]`.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use sim::mutants::{self, Mutant};
use sim::shrink::{script, shrink};
use sim::table::Table;
use sim::{Plan, run};

/// What was asked for.
#[derive(Clone)]
struct Asked {
    first: u64,
    seeds: u64,
    threads: u64,
    mutant: Option<Mutant>,
    /// The places of the faults that are kept; all without them.
    faults: Option<Vec<usize>>,
}

fn asked() -> Result<Asked, String> {
    let mut asked = Asked {
        first: 0,
        seeds: 1_000,
        threads: 2,
        mutant: None,
        faults: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} has no value"))?;
        let number = || value.parse::<u64>().map_err(|e| format!("{word}: {e}"));
        match word.as_str() {
            "--seeds" => asked.seeds = number()?,
            "--first" => asked.first = number()?,
            "--threads" => asked.threads = number()?.max(1),
            "--seed" => (asked.first, asked.seeds) = (number()?, 1),
            "--faults" if value == "none" => asked.faults = Some(Vec::new()),
            "--faults" => {
                let places = value.split(',').map(str::parse::<usize>);
                let places = places.collect::<Result<_, _>>();
                asked.faults = Some(places.map_err(|e| format!("{word}: {e}"))?);
            }
            "--mutant" => {
                let known = Mutant::ALL.into_iter();
                let mut known = known.filter(|mutant| format!("{mutant:?}") == value);
                asked.mutant = Some(known.next().ok_or(format!("no mutant is {value}"))?);
            }
            other => return Err(format!("{other} is unknown")),
        }
    }
    Ok(asked)
}

fn main() -> ExitCode {
    match asked() {
        Ok(asked) => carry_out(asked),
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}

fn carry_out(asked: Asked) -> ExitCode {
    let began = Instant::now();
    let done = Arc::new(AtomicU64::new(0));
    let failed = Arc::new(AtomicBool::new(false));
    let (told, heard) = mpsc::channel();
    for thread in 0..asked.threads {
        let (told, done, failed) = (told.clone(), done.clone(), failed.clone());
        let asked = asked.clone();
        std::thread::spawn(move || {
            mutants::take(asked.mutant);
            let mut table = Table::default();
            let mut seed = asked.first.saturating_add(thread);
            while seed < asked.first.saturating_add(asked.seeds) && !failed.load(Ordering::Relaxed)
            {
                let mut plan = Plan::of(seed);
                if let Some(places) = &asked.faults {
                    plan = plan.only(places);
                }
                let outcome = run(&plan);
                table.add(&outcome);
                if let Some(broken) = outcome.broken {
                    failed.store(true, Ordering::Relaxed);
                    let (smallest, outcome) = shrink(plan, broken.invariant);
                    println!("{}", script(&smallest, &outcome));
                }
                done.fetch_add(1, Ordering::Relaxed);
                seed = seed.saturating_add(asked.threads);
            }
            drop(told.send(table));
        });
    }
    drop(told);
    let mut table = Table::default();
    loop {
        match heard.recv_timeout(Duration::from_secs(20)) {
            Ok(part) => table.join(part),
            Err(mpsc::RecvTimeoutError::Timeout) => progress(&done, began),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    println!("{table}");
    progress(&done, began);
    let is_one = asked.seeds < 2_000 || asked.mutant.is_some();
    let empty = table.empty();
    if failed.load(Ordering::Relaxed) {
        return ExitCode::FAILURE;
    }
    let (effects, faults) = table.medians();
    if !is_one && (effects < 20 || faults < 2) {
        println!("the median seed has less than 20 effects and 2 faults");
        return ExitCode::FAILURE;
    }
    if !is_one && !empty.is_empty() {
        for (kind, side, fault) in empty {
            println!("no seed has had {fault:?} at {side:?} {kind:?}");
        }
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

#[allow(clippy::cast_precision_loss)] // A rate to look at.
fn progress(done: &AtomicU64, began: Instant) {
    let done = done.load(Ordering::Relaxed);
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{done} seeds in {seconds:.0} s, {:.0} a second",
        done as f64 / seconds
    );
}
