//! `cargo xtask sim`: builds the simulator and runs many seeds, or one again.

use std::process::ExitCode;

use clap::Args;

use crate::{failure::Result, paths::Paths, run};

/// What `sim` can be told.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How many seeds.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// One seed alone, as a failure's script names it. `SIM_TRACE=1` prints all that happens in it.
    #[arg(long)]
    seed: Option<u64>,
    /// With `--seed`: only the faults with these places in its plan, as a failure's script names
    /// them, or `none`.
    #[arg(long, requires = "seed")]
    faults: Option<String>,
    /// Threads, each with seeds of its own.
    #[arg(long, default_value_t = 2)]
    threads: u64,
    /// A rule of `src/mutants.rs` that is taken away.
    #[arg(long)]
    mutant: Option<String>,
}

/// Runs the seeds; the table of faults and the rate go to the standard output.
pub(crate) fn run(paths: &Paths, options: &Options) -> Result<ExitCode> {
    let mut command = run::cargo(&paths.root);
    command.args(["run", "--profile", "sim", "--package", "sim", "--"]);
    match options.seed {
        Some(seed) => command.arg("--seed").arg(seed.to_string()),
        None => command
            .arg("--first")
            .arg(options.first.to_string())
            .arg("--seeds")
            .arg(options.seeds.to_string()),
    };
    command.arg("--threads").arg(options.threads.to_string());
    if let Some(faults) = &options.faults {
        command.arg("--faults").arg(faults);
    }
    if let Some(mutant) = &options.mutant {
        command.arg("--mutant").arg(mutant);
    }
    run::in_sight(&mut command, "cargo")
}
