//! Running other programs: their output into a file, their time bounded, their failure told with the end of that file.

use std::{
    env, fs,
    fs::File,
    path::Path,
    process::{Command, ExitCode, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::{
    failure::{Failure, Result},
    files,
};

/// Runs a program whose output is for who looks on; its success is ours.
pub(crate) fn in_sight(command: &mut Command, program: &str) -> Result<ExitCode> {
    let status = command.status().map_err(|error| {
        Failure::new(
            format!("could not start {program}: {error}"),
            "run `cargo xtask doctor`",
        )
    })?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

const TAIL_LINES: usize = 40;
const POLL: Duration = Duration::from_millis(20);

/// How one program is run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    /// What the program does, as in "`what` failed".
    pub(crate) what: &'a str,
    /// What to do when it fails.
    pub(crate) remedy: &'a str,
    /// Where its output goes.
    pub(crate) log: &'a Path,
    /// How long it may take.
    pub(crate) limit: Duration,
    /// Begin the quoted end of the log at the first line that contains one of these.
    pub(crate) quote_from: &'a [&'a str],
}

impl<'a> Job<'a> {
    /// A job of at most ten minutes.
    pub(crate) fn new(what: &'a str, log: &'a Path, remedy: &'a str) -> Self {
        Self {
            what,
            remedy,
            log,
            limit: Duration::from_secs(600),
            quote_from: &[],
        }
    }

    /// Bounds the time.
    pub(crate) fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Quotes the log from one of these marks on, instead of its last lines alone.
    pub(crate) fn with_quote_from(self, quote_from: &'a [&'a str]) -> Self {
        Self { quote_from, ..self }
    }

    /// Runs it to its end.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        if let Some(folder) = self.log.parent() {
            files::make_dir(folder)?;
        }
        let file =
            File::create(self.log).map_err(|error| Failure::file("write", self.log, &error))?;
        let copy = file
            .try_clone()
            .map_err(|error| Failure::file("write", self.log, &error))?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(copy)
            .spawn()
            .map_err(|error| self.failure(&format!("could not start: {error}")))?;
        let started = Instant::now();
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => return Err(self.failure(&format!("failed ({})", told(status)))),
                Ok(None) if started.elapsed() > self.limit => {
                    // It may have ended by itself meanwhile, which is as good.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(self.failure(&format!(
                        "took longer than {} s and was ended",
                        self.limit.as_secs()
                    )));
                }
                Ok(None) => thread::sleep(POLL),
                Err(error) => {
                    return Err(self.failure(&format!("could not be waited for: {error}")));
                }
            }
        }
    }

    fn failure(&self, how: &str) -> Failure {
        let text = fs::read(self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        let marked = lines
            .iter()
            .position(|line| self.quote_from.iter().any(|mark| line.contains(mark)));
        let last = lines.len().saturating_sub(TAIL_LINES);
        let from = marked.map_or(last, |mark| {
            mark.min(last)
                .max(lines.len().saturating_sub(20 * TAIL_LINES))
        });
        // Linker lines can be megabytes long.
        let quoted: Vec<String> = lines
            .iter()
            .skip(from)
            .map(|line| line.chars().take(400).collect::<String>())
            .collect();
        Failure::new(
            format!(
                "{} {how}; all it said is in {}",
                self.what,
                self.log.display()
            ),
            self.remedy,
        )
        .with_seen(quoted.join("\n"))
    }
}

fn told(status: ExitStatus) -> String {
    status.code().map_or_else(
        || "ended by a signal".to_owned(),
        |code| format!("exit code {code}"),
    )
}

/// What a program prints, trimmed; `None` when it is not there or fails.
pub(crate) fn output(
    program: impl AsRef<std::ffi::OsStr>,
    arguments: &[&str],
    folder: &Path,
) -> Option<String> {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// `cargo` in `folder`, without what the cargo that runs this program said about this program.
pub(crate) fn cargo(folder: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(folder);
    forget_cargo(&mut command);
    command
}

/// Takes from `command` the variables that describe the package being run.
pub(crate) fn forget_cargo(command: &mut Command) {
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
        }) {
            command.env_remove(name);
        }
    }
}

/// Puts a folder before all others that programs are looked for in.
pub(crate) fn search_first(command: &mut Command, folders: &[&Path]) {
    let before = command
        .get_envs()
        .find(|(name, _)| *name == "PATH")
        .and_then(|(_, value)| value.map(ToOwned::to_owned))
        .or_else(|| env::var_os("PATH"))
        .unwrap_or_default();
    let all = folders
        .iter()
        .map(|folder| folder.to_path_buf())
        .chain(env::split_paths(&before));
    // A folder whose name holds the separator cannot be searched at all.
    if let Ok(joined) = env::join_paths(all) {
        command.env("PATH", joined);
    }
}
