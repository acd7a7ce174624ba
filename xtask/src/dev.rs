//! `cargo xtask dev`: both Workers in workerd on this machine.

use std::{
    net::{Ipv4Addr, TcpListener},
    process::{Command, ExitCode},
};

use clap::Args;

use crate::{
    build::{self, Worker},
    failure::{Failure, Result},
    files, progress,
    provision::Provision,
};

/// What `dev` can be told.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The consumer's port; the producer's public mount is on the next one.
    #[arg(long, default_value_t = 8787, value_parser = clap::value_parser!(u16).range(1..65535))]
    port: u16,
    /// Forget the sessions and the development key of this pair of ports first.
    #[arg(long)]
    fresh: bool,
}

/// Builds and runs both until Ctrl-C.
pub(crate) fn run(provision: &Provision<'_>, options: &Options) -> Result<ExitCode> {
    let paths = provision.paths;
    // First, since a build is a long time to wait for this news.
    for port in [options.port, options.port.saturating_add(1)] {
        check_free(port)?;
    }
    build::run(provision, &Worker::ALL)?;
    // Each pair of ports has data of its own: two runs on one database would break each other.
    let data = paths.data().join(options.port.to_string());
    if options.fresh {
        let step = format!("remove .data/{}", options.port);
        progress::step(&step, || files::remove(&data))?;
    }
    let mut command = provision.node()?.command();
    command
        .arg("miniflare/dev.mjs")
        .args(["--port", &options.port.to_string(), "--data"])
        .arg(data);
    become_program(command)
}

fn check_free(port: u16) -> Result<()> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map(drop).map_err(|error| {
        Failure::new(
            format!("port {port} on 127.0.0.1 cannot be used: {error}"),
            "stop the program that uses it (another `cargo xtask dev`?), or choose another pair with `--port N`",
        )
    })
}

/// Hands this process over, so that Ctrl-C and a plain kill reach the one that ends workerd in order.
#[cfg(unix)]
fn become_program(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    let error = command.exec();
    Err(Failure::new(
        format!("could not start Node: {error}"),
        "run `cargo xtask doctor`",
    ))
}

#[cfg(not(unix))]
fn become_program(mut command: Command) -> Result<ExitCode> {
    match command.status() {
        Ok(status) if status.success() => Ok(ExitCode::SUCCESS),
        Ok(_) => Ok(ExitCode::FAILURE),
        Err(error) => Err(Failure::new(
            format!("could not start Node: {error}"),
            "run `cargo xtask doctor`",
        )),
    }
}
