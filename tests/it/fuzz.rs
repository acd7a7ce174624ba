//! The fuzz targets as ordinary tests: over their corpus, and over mutations of it.
//!
//! `FUZZ_RUNS=<n>` asks for more mutations of each target, `FUZZ_SEED=<seed>` for others. An input
//! that breaks a promise is printed as a literal; put into the target's corpus it is read first.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::{env, fs};

#[allow(clippy::pedantic, unused_qualifications)]
#[path = "../../fuzz/src/lib.rs"]
mod targets;

use targets::TARGETS;

fn fuzz() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz")
}

/// The inputs of a target, in the order of their names.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = fuzz().join("corpus").join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths: BTreeSet<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn variable(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn holds(target: &str, input: &[u8]) {
    let outcome = catch_unwind(AssertUnwindSafe(|| targets::run(target, input)));
    if outcome.is_err() {
        panic!("{target} breaks a promise on b\"{}\"", input.escape_ascii());
    }
}

/// Changes inputs: what libFuzzer does, without its eyes.
struct Mutator(u64);

impl Mutator {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % u64::try_from(n.max(1)).unwrap()).unwrap()
    }

    fn range(&mut self, length: usize) -> std::ops::Range<usize> {
        let from = self.below(length + 1);
        let most = (length - from).min(1 + self.below(24));
        from..from + most
    }

    fn mutate(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        const TOKENS: [&[u8]; 24] = [
            b"\n",
            b"\r",
            b"\r\n",
            b"\n\n",
            b"\xff",
            b"\xef\xbb\xbf",
            b"\0",
            b"\\ud83d",
            b"\"",
            b"{",
            b"}",
            b"[",
            b"]",
            b":",
            b",",
            b"null",
            b"-1",
            b"0",
            b"9007199254740992",
            b"1e400",
            b"%2f",
            b"..",
            b"&",
            b"\xc3",
        ];
        let mut input = inputs[self.below(inputs.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.range(input.len());
            match self.below(6) {
                0 => drop(input.drain(at)),
                1 => {
                    let token = TOKENS[self.below(TOKENS.len())];
                    input.splice(at.start..at.start, token.iter().copied());
                }
                2 => {
                    let other = &inputs[self.below(inputs.len())];
                    let piece = other[self.range(other.len())].to_vec();
                    input.splice(at, piece);
                }
                3 => {
                    let piece = input[at.clone()].to_vec();
                    input.splice(at.start..at.start, piece);
                }
                4 if at.start < input.len() => input[at.start] ^= 1 << self.below(8),
                _ if at.start < input.len() => {
                    input[at.start] = u8::try_from(self.below(256)).unwrap()
                }
                _ => {}
            }
        }
        input
    }
}

#[test]
fn no_input_and_no_mutation_of_one_breaks_a_promise() {
    let seed = variable("FUZZ_SEED", 1);
    let runs = variable("FUZZ_RUNS", 400);
    let only = env::var("FUZZ_TARGET").ok();
    for (target, _) in TARGETS {
        if only.as_ref().is_some_and(|only| only != target) {
            continue;
        }
        let inputs = corpus(target);
        for input in &inputs {
            holds(target, input);
        }
        let mut mutator = Mutator(seed);
        for _ in 0..runs {
            holds(target, &mutator.mutate(&inputs));
        }
        println!(
            "{target}: {} inputs and {runs} mutations by FUZZ_SEED={seed}",
            inputs.len()
        );
    }
}

#[test]
fn every_target_is_one_of_cargo_fuzz_and_has_a_corpus() {
    let manifest = fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(fuzz().join("fuzz_targets")).unwrap() {
        files.insert(entry.unwrap().file_name().into_string().unwrap());
    }
    for (target, _) in TARGETS {
        let file = format!("{target}.rs");
        assert!(files.remove(&file), "{file}");
        let source = fs::read_to_string(fuzz().join("fuzz_targets").join(&file)).unwrap();
        assert!(
            source.contains(&format!("run(\"{target}\", data)")),
            "{file}"
        );
        assert!(manifest.contains(&format!(
            "name = \"{target}\"\npath = \"fuzz_targets/{file}\""
        )));
        assert!(corpus(target).len() >= 3, "{target}");
    }
    assert!(files.is_empty(), "{files:?}");
}
