//! Both Workers in release: `<worker>/build/index.js` with `index_bg.wasm`, and their size.

use std::{path::PathBuf, process::Command, time::Duration};

use clap::ValueEnum;

use crate::{
    failure::{Failure, Result},
    files, node,
    paths::Paths,
    progress,
    provision::Provision,
    run::{self, Job},
    toolchain::TARGET,
};

/// The most that a Worker's module may weigh after gzip, in bytes.
const GZIPPED_LIMIT: u64 = 1_000_000;
const COMPILE_LIMIT: Duration = Duration::from_secs(1800);
const GZIP_SCRIPT: &str = "const { readFileSync } = require('node:fs'); const { gzipSync } = require('node:zlib');\
    const bytes = readFileSync(process.argv[1]); console.log(bytes.length, gzipSync(bytes).length);";

/// A Worker of this workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Worker {
    /// The agents that others call.
    Producer,
    /// The agent that calls them.
    Consumer,
    /// The suites that any store and any transport are put through, for tests in workerd alone; never deployed.
    Contract,
    /// Agents that do what a test's message says, for tests in workerd alone; never deployed.
    Stress,
    /// The library's object as the benchmark drives it; never deployed.
    Bench,
}

impl Worker {
    /// The two that are deployed, in that order.
    pub(crate) const ALL: [Self; 2] = [Self::Producer, Self::Consumer];

    /// All that the tests in workerd run.
    pub(crate) const TESTED: [Self; 4] =
        [Self::Producer, Self::Consumer, Self::Contract, Self::Stress];

    /// Its environment in wrangler.toml.
    pub(crate) fn environment(self) -> &'static str {
        match self {
            Self::Producer => "producer",
            Self::Consumer => "consumer",
            Self::Contract => "contract",
            Self::Stress => "stress",
            Self::Bench => "bench",
        }
    }

    /// Its package and folder.
    pub(crate) fn package(self) -> String {
        format!("{}-worker", self.environment())
    }

    fn folder(self, paths: &Paths) -> PathBuf {
        match self {
            Self::Producer | Self::Consumer => paths.root.join(self.package()),
            Self::Contract | Self::Stress => paths.root.join("miniflare").join(self.package()),
            Self::Bench => paths.root.join("miniflare/bench/worker"),
        }
    }

    fn module(self, paths: &Paths) -> PathBuf {
        self.folder(paths).join("build/index_bg.wasm")
    }

    fn compiled(self, paths: &Paths) -> PathBuf {
        let file = format!("{}.wasm", self.package().replace('-', "_"));
        paths.wasm_target().join(TARGET).join("release").join(file)
    }
}

/// Provides what is missing, builds `workers` and checks their size.
pub(crate) fn run(provision: &Provision<'_>, workers: &[Worker]) -> Result<()> {
    provision.node()?;
    provision.toolchain()?;
    provision.tools()?;
    for worker in workers {
        compile(provision, *worker)?;
        package(provision, *worker)?;
        if *worker == Worker::Consumer {
            page(provision)?;
        }
    }
    for worker in workers.iter().filter(|worker| Worker::ALL.contains(worker)) {
        check_size(provision, *worker)?;
    }
    Ok(())
}

/// Cargo alone decides what is fresh. The call is the one that `worker-build` makes, so that it finds all done.
fn compile(provision: &Provision<'_>, worker: Worker) -> Result<()> {
    let paths = provision.paths;
    let name = format!("compile {}", worker.package());
    let toolchain = provision.toolchain()?;
    progress::step(&name, || {
        let mut command = run::cargo(&worker.folder(paths));
        command.args(["build", "--lib", "--release", "--target", TARGET]);
        toolchain.apply(paths, &mut command);
        let log = paths.log(&format!("compile-{}", worker.environment()));
        Job::new(&name, &log, "mend what the compiler says")
            .with_limit(COMPILE_LIMIT)
            .run(&mut command)
    })
}

/// Binds, optimises and bundles the compiled module, unless this was done already for these very bytes and tools.
fn package(provision: &Provision<'_>, worker: Worker) -> Result<()> {
    let paths = provision.paths;
    let tools = provision.tools()?;
    let toolchain = provision.toolchain()?;
    let node = provision.node()?;
    let name = format!("package {}", worker.package());
    progress::noted(&name, || {
        let build = worker.folder(paths).join("build");
        let stamp = build.join(".made-of");
        let made_of = || {
            let files = [
                &worker.compiled(paths),
                &build.join("index.js"),
                &worker.module(paths),
            ];
            files::fingerprint(
                &files.map(PathBuf::as_path),
                &[&tools.versions, &node::wanted(paths)],
            )
        };
        if files::read(&stamp).is_ok_and(|stamp| stamp == made_of()) {
            return Ok(((), "unchanged".to_owned()));
        }
        files::remove(&stamp)?;
        let mut command = Command::new(&tools.worker_build);
        command.arg("--release").current_dir(worker.folder(paths));
        run::forget_cargo(&mut command);
        command
            .env("WASM_BINDGEN_BIN", &tools.wasm_bindgen)
            .env("WASM_OPT_BIN", node.program("wasm-opt"))
            .env("ESBUILD_BIN", node.program("esbuild"));
        run::search_first(&mut command, &[&paths.node_bin()]);
        toolchain.apply(paths, &mut command);
        let log = paths.log(&format!("package-{}", worker.environment()));
        Job::new(
            &name,
            &log,
            "look at the log; `cargo xtask doctor` tells whether a tool is missing",
        )
        .with_limit(COMPILE_LIMIT)
        .run(&mut command)?;
        files::write(&stamp, &made_of())?;
        Ok(((), String::new()))
    })
}

/// Bundles the page's modules into the one that a browser loads.
fn page(provision: &Provision<'_>) -> Result<()> {
    let paths = provision.paths;
    let node = provision.node()?;
    progress::step("bundle the page", || {
        let mut command = Command::new(node.program("esbuild"));
        command
            .current_dir(paths.root.join("consumer-worker"))
            .args(["page/main.ts", "--outfile=public/app.js"])
            .args(["--bundle", "--minify", "--format=esm", "--target=es2022"])
            .arg("--log-level=warning");
        run::forget_cargo(&mut command);
        Job::new(
            "bundle the page",
            &paths.log("page"),
            "mend what esbuild says of consumer-worker/page",
        )
        .run(&mut command)
    })
}

fn check_size(provision: &Provision<'_>, worker: Worker) -> Result<()> {
    let module = worker.module(provision.paths);
    let node = provision.node()?;
    progress::noted(&format!("size of {}", worker.package()), || {
        let measured = node
            .command()
            .args(["-e", GZIP_SCRIPT])
            .arg(&module)
            .output()
            .ok();
        let text = measured
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default();
        let mut numbers = text
            .split_whitespace()
            .filter_map(|number| number.parse::<u64>().ok());
        let (Some(raw), Some(gzipped)) = (numbers.next(), numbers.next()) else {
            return Err(Failure::new(
                format!("{} could not be measured", module.display()),
                "run `cargo xtask build` again",
            ));
        };
        let told = format!(
            "{} KB, {} KB gzipped",
            raw.div_ceil(1000),
            gzipped.div_ceil(1000)
        );
        if gzipped > GZIPPED_LIMIT {
            return Err(Failure::new(
                format!(
                    "{} is {told}: more than {} KB",
                    worker.package(),
                    GZIPPED_LIMIT / 1000
                ),
                "find what grew (`cargo tree --target wasm32-unknown-unknown`), or make it smaller",
            ));
        }
        Ok(((), told))
    })
}
