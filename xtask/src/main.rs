//! `cargo xtask dev | test | build | bench | fuzz | sim | doctor`: everything between a fresh clone and two running Workers.
//!
//! Each command first provides what it needs and prints one line per step with its duration. Nothing outside the
//! source tree changes but a cache folder (`$XDG_CACHE_HOME/remote-agents`) and, where rustup can add it, the
//! `wasm32-unknown-unknown` target. Output of the tools goes to files under `target/xtask`.

mod bench;
mod browser;
mod build;
mod debian;
mod deny;
mod dev;
mod doctor;
mod failure;
mod files;
mod fuzz;
mod model;
mod newcomer;
mod node;
mod paths;
mod progress;
mod provision;
mod run;
mod sim;
mod test;
mod toolchain;
mod tools;
mod wrangler;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{build::Worker, failure::Result, paths::Paths, provision::Provision};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Sets up, builds, runs and tests the two Workers."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Install what is missing, build both Workers, run them locally and print a first job to try.
    Dev(dev::Options),
    /// Run everything that must be green: formatting, lints, dependencies, tests, docs, both builds, deploy dry-runs, workerd tests.
    Test(test::Options),
    /// Build the Workers in release into `<worker>/build` and check their size.
    Build {
        /// One Worker; both without it.
        worker: Option<Worker>,
    },
    /// Measure the library's object beside its peers and say which goals are met.
    Bench(bench::Options),
    /// Run the fuzz targets under libFuzzer, each for some minutes.
    Fuzz(fuzz::Options),
    /// Run seeds of the deterministic simulator, or one again, and print what struck where and the rate.
    Sim(sim::Options),
    /// Say what was found, what is missing and how to mend it.
    Doctor,
}

fn main() -> ExitCode {
    match carry_out(&Arguments::parse()) {
        Ok(code) => code,
        Err(failure) => {
            eprintln!("\n{failure}");
            ExitCode::FAILURE
        }
    }
}

fn carry_out(arguments: &Arguments) -> Result<ExitCode> {
    let paths = Paths::find()?;
    let provision = Provision::new(&paths);
    match &arguments.command {
        Command::Dev(options) => dev::run(&provision, options),
        Command::Test(options) => test::run(&provision, options),
        Command::Build { worker } => {
            let workers = worker.map_or_else(|| Worker::ALL.to_vec(), |worker| vec![worker]);
            build::run(&provision, &workers)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Bench(options) => bench::run(&provision, options),
        Command::Fuzz(options) => fuzz::run(&paths, options),
        Command::Sim(options) => sim::run(&paths, options),
        Command::Doctor => Ok(doctor::run(&paths)),
    }
}
