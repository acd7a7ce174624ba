//! Which test shows what: `tests/coverage.md` has a row for each case from the field and for each
//! binding sentence of the contract, and every test that a text names is there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use super::house::{read, root};

/// The numbers of the cases. Those that are left out were no faults of systems like this one.
const CASES: [u32; 33] = [
    1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 23, 24, 26, 27, 29, 30, 31,
    33, 36, 37, 39, 40, 41, 43, 46,
];

/// A sentence of the contract with one of these words promises something that can be broken.
const BINDING: [&str; 18] = [
    "must",
    "never",
    "always",
    "exactly",
    "only",
    "alone",
    "once",
    "no",
    "none",
    "nothing",
    "nobody",
    "neither",
    "cannot",
    "strictly",
    "exclusive",
    "unique",
    "whatever",
    "most",
];

/// What a test is called and where it stands: `file::name`.
type Named<'a> = (&'a str, &'a str);

/// The tests that a text names in backticks.
pub fn named(text: &str) -> Vec<Named<'_>> {
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|name| name.split_once("::"))
        .filter(|(file, _)| {
            let path = Path::new(file);
            file.contains('/')
                && path
                    .extension()
                    .is_some_and(|kind| ["rs", "mjs", "ts"].iter().any(|known| kind == *known))
        })
        .collect()
}

/// Whether the file has this test: in Rust a function with an attribute of a test, or a case of a
/// suite by its title; in JavaScript a title of `test` or `describe` that holds these words.
pub fn is_test((file, test): Named<'_>) -> bool {
    let source = read(file);
    if !file.ends_with(".rs") {
        return titles(&source).iter().any(|title| title.contains(test));
    }
    functions(&source).iter().any(|name| name == test)
        || (test.contains(' ') && source.contains(&format!("\"{test}\"")))
}

/// The functions of a Rust file that have an attribute of a test.
fn functions(source: &str) -> Vec<String> {
    let mut is_test = false;
    let mut found = Vec::new();
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        } else if let Some((_, rest)) = line.split_once("fn ")
            && is_test
        {
            found.extend(rest.split('(').next().map(str::to_owned));
            is_test = false;
        } else {
            is_test = false;
        }
    }
    found
}

/// The titles of the tests in a JavaScript file.
fn titles(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for call in ["test(", "describe("] {
        for (at, _) in source.match_indices(call) {
            let is_call = !source[..at].ends_with(|c: char| c.is_alphanumeric() || c == '.');
            let rest = source[at + call.len()..].trim_start();
            let quote = rest.chars().next().filter(|c| "\"'`".contains(*c));
            if let Some(quote) = quote.filter(|_| is_call) {
                found.extend(rest[1..].split(quote).next().map(str::to_owned));
            }
        }
    }
    found
}

/// Every file of tests in the repository, with its path from the root.
fn files() -> Vec<(String, String)> {
    fn walk(path: &Path, found: &mut Vec<(String, String)>) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if ["target", "node_modules", "build", "dist"].contains(&name.as_str())
            || name.starts_with('.')
        {
            return;
        }
        if path.is_dir() {
            for entry in fs::read_dir(path).unwrap() {
                walk(&entry.unwrap().path(), found);
            }
        } else if [".rs", ".mjs", ".ts"].iter().any(|end| name.ends_with(end)) {
            let place = path.strip_prefix(root()).unwrap();
            let place = place.to_string_lossy().into_owned();
            found.push((place, fs::read_to_string(path).unwrap()));
        }
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root()).unwrap() {
        walk(&entry.unwrap().path(), &mut found);
    }
    found
}

/// The number of a case that a test has in its name: `case_07_…` in Rust, `case 7` elsewhere.
fn case_of(name: &str) -> Option<u32> {
    let rest = name
        .strip_prefix("case_")
        .or_else(|| Some(name.split_once("case ")?.1))?;
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    rest[..digits].parse().ok()
}

/// The rows of the table below a heading, each as its cells.
fn rows(table: &str, heading: &str) -> Vec<[String; 3]> {
    let (_, rest) = table.split_once(&format!("## {heading}\n")).unwrap();
    let part = rest.split("\n## ").next().unwrap();
    part.lines()
        .filter(|line| line.starts_with('|'))
        .skip(2)
        .map(|line| {
            let inner = line.trim_start_matches("| ").trim_end_matches(" |");
            let cells: Vec<_> = inner.split(" | ").map(str::to_owned).collect();
            cells.try_into().unwrap_or_else(|cells| panic!("{cells:?}"))
        })
        .collect()
}

/// The binding sentences of the contract with the sections in which they stand.
fn binding(contract: &str) -> Vec<(String, String)> {
    let mut section = "0".to_owned();
    let mut found = Vec::new();
    for line in contract.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.split('.').next().unwrap().to_owned();
        }
        if line.starts_with(['#', '|']) {
            continue;
        }
        for sentence in sentences(line.strip_prefix("- ").unwrap_or(line)) {
            let lower = sentence.to_lowercase();
            let mut words = lower.split(|c: char| !c.is_alphanumeric() && c != '_');
            if words.any(|word| BINDING.contains(&word)) {
                found.push((section.clone(), sentence.to_owned()));
            }
        }
    }
    found
}

/// A paragraph's sentences: one ends with a full stop in front of what begins the next.
fn sentences(paragraph: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut begin = 0;
    for (at, _) in paragraph.match_indices(". ") {
        let next = paragraph[at + 2..].chars().next();
        if next.is_some_and(|c| c.is_uppercase() || "`*\"".contains(c)) {
            found.push(&paragraph[begin..=at]);
            begin = at + 2;
        }
    }
    found.push(&paragraph[begin..]);
    found
}

#[test]
fn every_case_has_a_test_by_its_number_and_every_such_test_has_its_row() {
    let table = read("tests/coverage.md");
    let rows = rows(&table, "Cases from the field");
    let numbers: Vec<u32> = rows.iter().map(|row| row[0].parse().unwrap()).collect();
    assert_eq!(numbers, CASES);

    let mut there: BTreeMap<u32, BTreeSet<String>> = BTreeMap::new();
    for (file, source) in files() {
        let names = if file.ends_with(".rs") {
            functions(&source)
        } else {
            titles(&source)
        };
        for name in names {
            if let Some(number) = case_of(&name) {
                there
                    .entry(number)
                    .or_default()
                    .insert(format!("{file}::{name}"));
            }
        }
    }
    for [number, case, shown] in rows {
        assert!(case.ends_with('.') && !case.contains('`'), "{case}");
        let mut tests = there.remove(&number.parse().unwrap()).unwrap_or_default();
        assert!(
            !tests.is_empty() || shown.starts_with("Cannot apply: "),
            "no test has the number {number}"
        );
        for test in named(&shown) {
            assert!(is_test(test), "case {number}: there is no test {test:?}");
            let (file, name) = test;
            let is_this = |title: &str| {
                title
                    .strip_prefix(file)
                    .and_then(|title| title.strip_prefix("::"))
                    .is_some_and(|title| title.contains(name))
            };
            tests.retain(|title| !is_this(title));
        }
        assert!(tests.is_empty(), "case {number} does not name {tests:?}");
    }
    assert!(there.is_empty(), "no row has the numbers of {there:?}");
}

#[test]
fn every_binding_sentence_of_the_contract_has_a_test() {
    let table = read("tests/coverage.md");
    let rows = rows(&table, "The contract");
    let sentences = binding(&read("docs/contract.md"));
    assert!(sentences.len() > 80, "only {} sentences", sentences.len());
    let has_row = |section: &str, sentence: &str| {
        rows.iter()
            .any(|row| row[0] == section && row[1] == sentence)
    };
    let missing: Vec<String> = sentences
        .iter()
        .filter(|(section, sentence)| !has_row(section, sentence))
        .map(|(section, sentence)| format!("| {section} | {sentence} | `file::test` |"))
        .collect();
    assert!(
        missing.is_empty(),
        "these rows are missing:\n{}",
        missing.join("\n")
    );
    for [section, sentence, shown] in rows {
        assert!(
            sentences.contains(&(section.clone(), sentence.clone())),
            "the contract does not say in {section}: {sentence}"
        );
        let tests = named(&shown);
        assert!(!tests.is_empty(), "no test shows: {sentence}");
        for test in tests {
            assert!(is_test(test), "there is no test {test:?} for: {sentence}");
        }
    }
}

#[test]
fn every_test_that_a_text_names_is_there() {
    for (text, least) in [("ARCHITECTURE.md", 200), ("SECURITY.md", 50)] {
        let text_of = read(text);
        let tests = named(&text_of);
        assert!(tests.len() >= least, "{text} names only {}", tests.len());
        for test in tests {
            assert!(is_test(test), "{text}: there is no test {test:?}");
        }
    }
}

#[test]
fn what_is_no_test_is_not_taken_for_one() {
    let rust = "#[test]\nfn shown() {}\nfn helper() {}\n#[tokio::test(start_paused = true)]\n\
        async fn waits() {}\n#[derive(Debug)]\nstruct S;\nimpl S { fn more() {} }\n";
    assert_eq!(functions(rust), ["shown", "waits"]);
    let script = "test(\"one\", () => {});\nlatest(\"no\");\ndescribe(`two ${x}`, f);\n// three\n";
    assert_eq!(titles(script), ["one", "two ${x}"]);
    assert_eq!(case_of("case_07_a"), Some(7));
    assert_eq!(case_of("case 15: a"), Some(15));
    assert_eq!(case_of("in any case"), None);
    assert_eq!(
        sentences("A b. `C` d, e.g. f. G"),
        ["A b.", "`C` d, e.g. f.", "G"]
    );
    let contract =
        "- It is so. It must be.\n## 3. Title never\n| never |\nMustard.\nNobody knows.\n";
    let of = |section: &str, sentence: &str| (section.to_owned(), sentence.to_owned());
    assert_eq!(
        binding(contract),
        [of("0", "It must be."), of("3", "Nobody knows.")]
    );
}
