//! `cargo xtask fuzz`: the fuzz targets under libFuzzer; see `fuzz/`.
//!
//! The stable compiler builds them with the instrumentation that libFuzzer asks for, and without a
//! sanitizer, which a stable one does not have: the library has no `unsafe`. What libFuzzer finds on
//! its way stays in `target/fuzz`, an input that breaks a promise in `fuzz/artifacts`.

use std::{
    fs::File,
    io::{Write as _, stdout},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use clap::Args;

use crate::{
    failure::{Failure, Result},
    files,
    paths::Paths,
    progress, run,
    run::Job,
};

/// What `cargo fuzz` asks of the compiler for coverage.
const COVERAGE: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Ccodegen-units=1";
/// One input may take this long.
const INPUT_SECONDS: &str = "-timeout=30";
const PULSE: Duration = Duration::from_secs(5);
const REMEDY: &str = "the input is named above: put it into the target's folder of fuzz/corpus, and `cargo test --test it \
    fuzz` shows it; then mend the product and give the finding a named test";

/// What `fuzz` can be told.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// One target; all of them, one after the other, without it.
    target: Option<String>,
    /// How long each target runs.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
}

/// Builds the targets and runs them.
pub(crate) fn run(paths: &Paths, options: &Options) -> Result<ExitCode> {
    let mut targets = targets(paths)?;
    if let Some(wanted) = &options.target {
        let known = targets.join(", ");
        targets.retain(|target| target == wanted);
        if targets.is_empty() {
            return Err(Failure::new(
                format!("there is no target {wanted}"),
                format!("take one of {known}"),
            ));
        }
    }
    let programs = build(paths, &targets)?;
    let time = Duration::from_secs(options.minutes.saturating_mul(60));
    for target in targets {
        fuzz(paths, &programs, &target, time)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The names of the targets: of their files.
fn targets(paths: &Paths) -> Result<Vec<String>> {
    let found = files::entries(&paths.root.join("fuzz/fuzz_targets"), |file| {
        file.ends_with(".rs")
    })?;
    let names = found.iter().filter_map(|file| file.file_stem()?.to_str());
    Ok(names.map(ToOwned::to_owned).collect())
}

/// Builds the targets where `cargo fuzz` would; tells the folder of the programs.
fn build(paths: &Paths, targets: &[String]) -> Result<PathBuf> {
    let folder = paths.root.join("fuzz");
    let host = run::output("rustc", &["-vV"], &paths.root).unwrap_or_default();
    let host = host
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .unwrap_or_default()
        .to_owned();
    let built = folder.join("target");
    let mut command = run::cargo(&folder);
    command
        .args(["build", "--release", "--target", &host])
        .args(targets.iter().flat_map(|target| ["--bin", target]))
        .env("CARGO_TARGET_DIR", &built)
        .env("RUSTFLAGS", COVERAGE)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    progress::step("build the targets with libFuzzer", || {
        let remedy = "mend what the compiler says; libFuzzer itself needs a C++ compiler";
        Job::new("cargo build", &paths.log("fuzz-build"), remedy)
            .with_limit(Duration::from_secs(3600))
            .run(&mut command)
    })?;
    Ok(built.join(host).join("release"))
}

fn fuzz(paths: &Paths, programs: &Path, target: &str, time: Duration) -> Result<()> {
    let found = paths.target.join("fuzz").join(target);
    let seeds = paths.root.join("fuzz/corpus").join(target);
    let broken = paths.root.join("fuzz/artifacts").join(target);
    for folder in [&found, &broken] {
        files::make_dir(folder)?;
    }
    let log = paths.log(&format!("fuzz-{target}"));
    progress::noted(target, || {
        let output = File::create(&log).map_err(|error| Failure::file("write", &log, &error))?;
        let mut child = Command::new(programs.join(target))
            .arg(format!("-max_total_time={}", time.as_secs()))
            .arg(format!("-artifact_prefix={}/", broken.display()))
            .args(["-print_final_stats=1", "-rss_limit_mb=2048", INPUT_SECONDS])
            .args([&found, &seeds])
            .current_dir(&paths.root)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output)
            .spawn()
            .map_err(|error| {
                Failure::new(
                    format!("{target} could not start: {error}"),
                    "build it anew",
                )
            })?;
        let mut told = Instant::now();
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if told.elapsed() >= PULSE => {
                    told = Instant::now();
                    tell(target, &last(&files::read(&log)?));
                }
                Ok(None) => thread::sleep(Duration::from_millis(50)),
                Err(error) => return Err(Failure::new(format!("{target}: {error}"), REMEDY)),
            }
        };
        tell(target, "");
        let text = files::read(&log)?;
        if status.success() {
            return Ok(((), last(&text)));
        }
        let lines: Vec<&str> = text.lines().collect();
        let end = lines.get(lines.len().saturating_sub(40)..);
        Err(Failure::new(
            format!(
                "{target} broke a promise; all it said is in {}",
                log.display()
            ),
            REMEDY,
        )
        .with_seen(end.unwrap_or_default().join("\n")))
    })
}

/// Writes over the target's line how far it is.
fn tell(target: &str, how: &str) {
    // A closed standard output must not stop the work.
    let mut out = stdout();
    let _ = write!(out, "\r  {target:<50} {how:<60}\r  {target:<50} ");
    let _ = out.flush();
}

/// What libFuzzer said last of its progress: how many inputs it ran, and what they cover.
fn last(log: &str) -> String {
    let line = log.lines().rev().find(|line| line.starts_with('#'));
    let mut words = line.unwrap_or_default().split_whitespace();
    let runs = words
        .next()
        .unwrap_or("#0")
        .trim_start_matches('#')
        .to_owned();
    let cover: Vec<&str> = words
        .skip_while(|word| *word != "cov:")
        .skip(1)
        .take(1)
        .collect();
    format!("{runs} inputs, {} edges", cover.first().unwrap_or(&"0"))
}

#[cfg(test)]
mod tests {
    use super::last;

    #[test]
    fn progress_is_read_from_what_libfuzzer_says() {
        let log = "INFO: Seed: 1\n#2\tINITED cov: 12 ft: 13 corp: 1/1b\n#4096\tpulse  cov: 40 ft: 90\nDone\n";
        assert_eq!(last(log), "4096 inputs, 40 edges");
        assert_eq!(last(""), "0 inputs, 0 edges");
    }
}
