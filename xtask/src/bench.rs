//! `cargo xtask bench`: the library's object beside its peers in workerd; see `miniflare/bench`.

use std::process::ExitCode;

use clap::Args;

use crate::{
    build::{self, Worker},
    failure::Result,
    node, progress,
    provision::Provision,
    run,
};

const FOLDER: &str = "miniflare/bench";

/// What `bench` can be told.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// A smoke run of two minutes: it shows that the benchmark works, its numbers mean little.
    #[arg(long)]
    quick: bool,
    /// For the benchmark itself: `--runs 7`, `--only append,live`, `--storage disk`, `--without A10`,
    /// `--attaches 10000`, `--longest 100000`, `--out <folder>`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Builds what is measured, then measures; the table goes to the standard output and to `target/bench`.
pub(crate) fn run(provision: &Provision<'_>, options: &Options) -> Result<ExitCode> {
    build::run(provision, &[Worker::Bench])?;
    peers(provision)?;
    let paths = provision.paths;
    let mut command = provision.node()?.command();
    command
        .arg(format!("{FOLDER}/run.mjs"))
        .arg("--out")
        .arg(paths.target.join("bench"));
    if options.quick {
        command.arg("--quick");
    }
    command.args(&options.rest);
    run::in_sight(&mut command, "Node")
}

/// Installs the package that is measured beside ours. Without it the benchmark goes on and says so.
fn peers(provision: &Provision<'_>) -> Result<()> {
    progress::noted("npm packages of the benchmark", || {
        let installed = node::provide_aside(provision.paths, FOLDER, "npm-bench", &[])?;
        let note = installed.unwrap_or("not installed: measured without them");
        Ok(((), note.to_owned()))
    })
}
