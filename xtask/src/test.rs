//! `cargo xtask test`: everything that must be green, in the order in which a mistake shows soonest.

use std::{
    path::Path,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};

use crate::{
    browser,
    build::{self, Worker},
    deny,
    failure::{Failure, Result},
    files, model, newcomer, progress,
    provision::Provision,
    run::{self, Job},
    wrangler,
};

const LIMIT: Duration = Duration::from_secs(1800);
/// A whole file of workerd tests, not one test.
const NODE_FILE_LIMIT_MS: &str = "--test-timeout=1200000";

/// What `test` can be told.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// These parts alone, in the order of the whole.
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
}

/// The parts of the whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Formatting of all Rust code.
    Fmt,
    /// Lints of all packages, natively.
    Clippy,
    /// What the dependencies may be.
    Deny,
    /// Unit and integration tests, natively.
    Native,
    /// The documentation of all packages, without a warning.
    Doc,
    /// Lints of library and Workers as compiled for WebAssembly.
    WasmClippy,
    /// The first agent of README.md: run, compiled as a Worker, and misused.
    Newcomer,
    /// Both Workers in release, and their size; and the one that only a test needs.
    Build,
    /// The observer's JavaScript package: its types and its tests.
    Client,
    /// Dry runs of both deployments.
    Deploy,
    /// Both Workers in workerd.
    Workerd,
    /// The page in a browser, with both Workers in workerd.
    Page,
    /// The research job with a real language model, where one can be installed.
    RealModel,
}

impl Part {
    const ALL: [Self; 13] = [
        Self::Fmt,
        Self::Clippy,
        Self::Deny,
        Self::Native,
        Self::Doc,
        Self::WasmClippy,
        Self::Newcomer,
        Self::Build,
        Self::Client,
        Self::Deploy,
        Self::Workerd,
        Self::Page,
        Self::RealModel,
    ];

    fn title(self) -> &'static str {
        match self {
            Self::Fmt => "formatting",
            Self::Clippy => "lints",
            Self::Deny => "dependencies",
            Self::Native => "native tests",
            Self::Doc => "documentation",
            Self::WasmClippy => "lints for WebAssembly",
            Self::Newcomer => "the first agent of README.md",
            Self::Build => "build of the Workers",
            Self::Client => "JavaScript client",
            Self::Deploy => "dry runs of the deployments",
            Self::Workerd => "tests in workerd",
            Self::Page => "the page in a browser",
            Self::RealModel => "the research job with a real model",
        }
    }
}

/// How many tests passed and failed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Count {
    passed: u64,
    failed: u64,
}

/// Runs the parts until one fails, then says how long each took.
pub(crate) fn run(provision: &Provision<'_>, options: &Options) -> Result<ExitCode> {
    let chosen = |part: &Part| options.only.is_empty() || options.only.contains(part);
    let started = Instant::now();
    let mut count = Count::default();
    let mut summary = Vec::new();
    let mut outcome = Ok(());
    for part in Part::ALL.into_iter().filter(chosen) {
        println!("{}", part.title());
        let began = Instant::now();
        outcome = run_part(provision, part, &mut count);
        summary.push((part, began.elapsed(), outcome.is_ok()));
        if outcome.is_err() {
            break;
        }
    }
    println!("\nsummary");
    for (part, took, is_green) in summary {
        let verdict = if is_green { "ok" } else { "FAILED" };
        println!(
            "  {:<50} {:>8}  {verdict}",
            part.title(),
            progress::seconds(took)
        );
    }
    println!(
        "  {:<50} {:>8}",
        "all",
        progress::seconds(started.elapsed())
    );
    println!("{} passed, {} failed", count.passed, count.failed);
    outcome.map(|()| ExitCode::SUCCESS)
}

fn run_part(provision: &Provision<'_>, part: Part, count: &mut Count) -> Result<()> {
    match part {
        Part::Fmt => cargo(
            provision,
            "cargo fmt --check",
            "run `cargo fmt --all` (without rustfmt: `rustup component add rustfmt`)",
            |cargo| cargo.args(["fmt", "--all", "--", "--check"]),
        ),
        Part::Clippy => cargo(
            provision,
            "cargo clippy",
            "mend what it says (without clippy: `rustup component add clippy`)",
            |cargo| {
                cargo.args([
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--",
                    "-D",
                    "warnings",
                ])
            },
        ),
        Part::Deny => deny::run(provision),
        Part::Native => native_tests(provision, count),
        Part::Doc => cargo(
            provision,
            "cargo doc",
            "mend the doc comments it names",
            |cargo| {
                cargo
                    .args([
                        "doc",
                        "--workspace",
                        "--no-deps",
                        "--document-private-items",
                    ])
                    .env("RUSTDOCFLAGS", "-D warnings")
            },
        ),
        Part::WasmClippy => wasm_clippy(provision),
        Part::Newcomer => {
            count.passed = count.passed.saturating_add(newcomer::run(provision)?);
            Ok(())
        }
        Part::Build => build::run(provision, &Worker::TESTED),
        Part::Client => client_tests(provision, count),
        Part::Deploy => {
            provision.node()?;
            wrangler::dry_runs(provision)
        }
        Part::Workerd => workerd_tests(provision, count),
        Part::Page => page_tests(provision, count),
        Part::RealModel => real_model_tests(provision, count),
    }
}

fn cargo(
    provision: &Provision<'_>,
    name: &str,
    remedy: &str,
    arguments: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<()> {
    progress::step(name, || {
        let mut command = run::cargo(&provision.paths.root);
        arguments(&mut command);
        let log = provision.paths.log(&name.replace(' ', "-"));
        Job::new(name, &log, remedy)
            .with_limit(LIMIT)
            .run(&mut command)
    })
}

fn native_tests(provision: &Provision<'_>, count: &mut Count) -> Result<()> {
    // The scripted model providers are npm packages: with them here, no test may do without.
    provision.node()?;
    cargo(
        provision,
        "cargo test --no-run",
        "mend what the compiler says",
        |cargo| cargo.args(["test", "--workspace", "--no-run"]),
    )?;
    let name = "cargo test";
    progress::noted(name, || {
        let log = provision.paths.log("cargo-test");
        let mut command = run::cargo(&provision.paths.root);
        command
            .args(["test", "--workspace"])
            .env("NPM_PACKAGES", "required");
        let outcome = Job::new(name, &log, "mend the tests named above")
            .with_limit(LIMIT)
            .with_quote_from(&["failures:"])
            .run(&mut command);
        told(outcome, &log, count, cargo_count)
    })
}

fn wasm_clippy(provision: &Provision<'_>) -> Result<()> {
    let toolchain = provision.toolchain()?;
    let name = "cargo clippy --target wasm32-unknown-unknown";
    progress::step(name, || {
        let mut command = toolchain.clippy(provision.paths);
        // In release, so that the macros compiled for this serve the build of the Workers too.
        command.args(["--release", "--lib", "-p", "remote-agents"]);
        for worker in Worker::TESTED {
            command.args(["-p", &worker.package()]);
        }
        command.args(["--", "-D", "warnings"]);
        let log = provision.paths.log("wasm-clippy");
        Job::new(name, &log, "mend what it says")
            .with_limit(LIMIT)
            .run(&mut command)
    })
}

fn workerd_tests(provision: &Provision<'_>, count: &mut Count) -> Result<()> {
    let name = "node --test miniflare/test";
    node_tests(
        provision,
        name,
        "workerd",
        &["miniflare", "miniflare/test"],
        &[],
        count,
    )
}

fn page_tests(provision: &Provision<'_>, count: &mut Count) -> Result<()> {
    let browser = browser::provide(provision.paths)?;
    let name = "node --test miniflare/page";
    node_tests(
        provision,
        name,
        "page",
        &["miniflare/page"],
        &[("CHROME", &browser)],
        count,
    )
}

fn real_model_tests(provision: &Provision<'_>, count: &mut Count) -> Result<()> {
    let Some(file) = model::provide(provision)? else {
        return Ok(());
    };
    let name = "node --test miniflare/model";
    node_tests(
        provision,
        name,
        "real-model",
        &[model::FOLDER],
        &[("MODEL_FILE", &file.to_string_lossy())],
        count,
    )
}

fn client_tests(provision: &Provision<'_>, count: &mut Count) -> Result<()> {
    let node = provision.node()?;
    for project in [
        "client",
        "client/tsconfig.types.json",
        "consumer-worker/page",
    ] {
        let name = format!("tsc -p {project}");
        progress::step(&name, || {
            let mut command = node.command();
            command
                .arg(provision.paths.root.join("node_modules/typescript/bin/tsc"))
                .args(["-p", project]);
            Job::new(
                &name,
                &provision.paths.log("client-types"),
                "mend the types it names",
            )
            .run(&mut command)
        })?;
    }
    node_tests(
        provision,
        "node --test client/test",
        "client",
        &["client/test"],
        &[],
        count,
    )
}

/// Runs the test files of some folders with Node's own runner.
fn node_tests(
    provision: &Provision<'_>,
    name: &str,
    log: &str,
    folders: &[&str],
    variables: &[(&str, &str)],
    count: &mut Count,
) -> Result<()> {
    let node = provision.node()?;
    progress::noted(name, || {
        let mut tests = Vec::new();
        for folder in folders {
            let folder = provision.paths.root.join(folder);
            if folder.exists() {
                tests.extend(files::entries(&folder, |file| file.ends_with(".test.mjs"))?);
            }
        }
        let log = provision.paths.log(log);
        let mut command = node.command();
        command
            .args(["--test", "--test-reporter=spec", NODE_FILE_LIMIT_MS])
            .args(tests)
            .envs(variables.iter().copied());
        let outcome = Job::new(
            name,
            &log,
            "mend the tests named above; one file alone: `npx node --test <file>`",
        )
        .with_limit(LIMIT)
        .with_quote_from(&["failing tests:"])
        .run(&mut command);
        told(outcome, &log, count, node_count)
    })
}

/// Adds what a runner counted to the whole, and a word about it to the step.
fn told(
    outcome: Result<()>,
    log: &Path,
    count: &mut Count,
    read: fn(&str) -> Count,
) -> Result<((), String)> {
    let seen = read(&files::read(log).unwrap_or_default());
    count.passed = count.passed.saturating_add(seen.passed);
    count.failed = count.failed.saturating_add(seen.failed);
    outcome?;
    if seen.passed == 0 {
        return Err(Failure::new(
            format!("no test ran; see {}", log.display()),
            "find out where the tests went",
        ));
    }
    Ok(((), format!("{} passed", seen.passed)))
}

/// Sums the closing lines of cargo's test binaries.
fn cargo_count(log: &str) -> Count {
    let closing = log
        .lines()
        .filter_map(|line| line.strip_prefix("test result: "));
    closing
        .flat_map(|line| line.split([';', '.']))
        .map(str::trim)
        .fold(Count::default(), |count, part| {
            let number = |unit: &str| {
                part.strip_suffix(unit)
                    .and_then(|number| number.trim().parse().ok())
                    .unwrap_or(0)
            };
            Count {
                passed: count.passed + number(" passed"),
                failed: count.failed + number(" failed"),
            }
        })
}

/// Reads the closing lines of node's spec reporter.
fn node_count(log: &str) -> Count {
    let number = |name: &str| {
        log.lines()
            .rev()
            .find_map(|line| {
                line.trim_start_matches(|c: char| !c.is_ascii_alphabetic())
                    .strip_prefix(name)
            })
            .and_then(|number| number.trim().parse().ok())
            .unwrap_or(0)
    };
    Count {
        passed: number("pass "),
        failed: number("fail ").saturating_add(number("cancelled ")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Count, cargo_count, node_count};

    #[test]
    fn closing_lines_are_counted() {
        let log = "running 2 tests\ntest result: ok. 2 passed; 0 failed; 0 ignored; finished in 0.1s\n\
                   test result: FAILED. 3 passed; 1 failed; 0 ignored\n";
        assert_eq!(
            cargo_count(log),
            Count {
                passed: 5,
                failed: 1
            }
        );
        let log = "✔ a test (3.1ms)\nℹ tests 7\nℹ pass 5\nℹ fail 1\nℹ cancelled 1\nℹ skipped 0\n";
        assert_eq!(
            node_count(log),
            Count {
                passed: 5,
                failed: 2
            }
        );
    }
}
