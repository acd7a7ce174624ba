//! Wrangler's dry run of a deployment: everything but the upload, without the internet.

use std::time::Duration;

use crate::{build::Worker, failure::Result, progress, provision::Provision, run::Job};

/// Runs `wrangler deploy --dry-run` for both environments. Its own build step finds all built and takes a second.
pub(crate) fn dry_runs(provision: &Provision<'_>) -> Result<()> {
    Worker::ALL
        .into_iter()
        .try_for_each(|worker| dry_run(provision, worker))
}

fn dry_run(provision: &Provision<'_>, worker: Worker) -> Result<()> {
    let paths = provision.paths;
    let node = provision.node()?;
    let name = format!("wrangler deploy --env {} --dry-run", worker.environment());
    progress::step(&name, || {
        let mut command = node.command();
        command
            .arg("node_modules/wrangler/bin/wrangler.js")
            .args([
                "deploy",
                "--dry-run",
                "--env",
                worker.environment(),
                "--outdir",
            ])
            .arg(
                paths
                    .target
                    .join("xtask")
                    .join(format!("deploy-{}", worker.environment())),
            )
            .env("CI", "true")
            .env("WRANGLER_SEND_METRICS", "false")
            .env("WRANGLER_SEND_ERROR_REPORTS", "false")
            .env("WRANGLER_HIDE_BANNER", "true")
            .env("WRANGLER_WRITE_LOGS", "false");
        let log = paths.log(&format!("deploy-{}", worker.environment()));
        Job::new(
            &name,
            &log,
            "mend wrangler.toml or the build as the log says",
        )
        .with_limit(Duration::from_secs(600))
        .run(&mut command)
    })
}
