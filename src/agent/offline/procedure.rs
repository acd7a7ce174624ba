//! Reads instructions: the numbered steps, the tools that they call, and the lists they go over.
//!
//! A step is a line that begins with a number, and the lines up to the next one or an empty line.
//! Sentences that begin with a condition or a prohibition are left out: the model cannot judge
//! them.

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The tool to call; without one the step only writes.
    pub(super) tool: Option<String>,
    /// Whether the tool is called once for each item of a list, and of which one, if it is named.
    pub(super) each: Option<Option<String>>,
    /// Whether to write something to the reader.
    pub(super) write: bool,
}

const CALLING: &[&str] = &["call", "calls", "use", "run", "invoke", "using", "calling"];
const FILLERS: &[&str] = &["the", "tool", "then", "once", "again"];
const EACH: &[&str] = &["for each", "for every"];
const WRITING: &[&str] = &[
    "write",
    "tell",
    "reply",
    "summarise",
    "summarize",
    "explain",
    "answer",
];
const CONDITIONS: &[&str] = &["if", "unless", "when", "never", "do not ", "don't"];

/// The steps of these instructions, given the names of the tools on offer.
pub(super) fn parse(instructions: &str, tools: &[&str]) -> Vec<Step> {
    let mut texts: Vec<String> = Vec::new();
    let mut open = false;
    for line in instructions.lines() {
        let line = line.trim();
        if let Some(rest) = numbered(line) {
            texts.push(rest.to_owned());
            open = true;
        } else if line.is_empty() {
            open = false;
        } else if let (true, Some(text)) = (open, texts.last_mut()) {
            text.push(' ');
            text.push_str(line);
        }
    }
    texts
        .iter()
        .flat_map(|text| steps_of(text, tools))
        .collect()
}

fn numbered(line: &str) -> Option<&str> {
    let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
    if rest.len() == line.len() {
        return None;
    }
    rest.strip_prefix(['.', ')'])?
        .strip_prefix([' ', '\t'])
        .map(str::trim)
}

fn steps_of(text: &str, tools: &[&str]) -> Vec<Step> {
    let text = sentences(text)
        .into_iter()
        .filter(|sentence| {
            let lower = sentence.to_lowercase();
            !CONDITIONS.iter().any(|word| {
                lower.strip_prefix(word).is_some_and(|rest| {
                    word.ends_with(' ') || !rest.starts_with(char::is_alphanumeric)
                })
            })
        })
        .collect::<Vec<_>>()
        .join(" ");
    // Odd parts stand between backticks.
    let parts: Vec<&str> = text.split('`').collect();
    let quoted = || parts.iter().enumerate().filter(|(i, _)| i % 2 == 1);
    let mut called: Vec<&str> = Vec::new();
    let mut after_called = false;
    for (i, name) in quoted() {
        let before = i
            .checked_sub(1)
            .and_then(|i| parts.get(i))
            .copied()
            .unwrap_or_default();
        let is_called = calling(before) || (after_called && joining(before));
        after_called = is_called && tools.contains(name);
        if after_called {
            called.push(name);
        }
    }
    if called.is_empty() {
        called.extend(
            quoted()
                .map(|(_, name)| *name)
                .find(|name| tools.contains(name)),
        );
    }
    let each = each(&parts, tools);
    let write = writes(&text);
    if called.is_empty() {
        return if write {
            vec![Step {
                tool: None,
                each: None,
                write,
            }]
        } else {
            Vec::new()
        };
    }
    let first = |i: usize| i == 0 && write;
    called
        .into_iter()
        .enumerate()
        .map(|(i, name)| Step {
            tool: Some(name.to_owned()),
            each: each.clone(),
            write: first(i),
        })
        .collect()
}

fn sentences(text: &str) -> Vec<&str> {
    let mut sentences = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(". ") {
        let (sentence, more) = rest.split_at(at.saturating_add(1));
        sentences.push(sentence.trim());
        rest = more;
    }
    sentences.push(rest.trim());
    sentences
}

/// Whether the last word before a name, fillers aside, says to call it.
fn calling(before: &str) -> bool {
    let lower = before.to_lowercase();
    if !lower.ends_with(char::is_whitespace) {
        return false;
    }
    lower
        .split_whitespace()
        .rev()
        .find(|word| !FILLERS.contains(word))
        .is_some_and(|word| CALLING.contains(&word))
}

fn joining(between: &str) -> bool {
    let words: Vec<_> = between.split_whitespace().collect();
    matches!(
        words.as_slice(),
        ["and" | "," | "then"] | [",", "then"] | ["and", "then"] | [",", "and"]
    )
}

/// The list that a step goes over: "for each item of `name`" wherever it stands, or "for each …"
/// without a name at the beginning of the step.
fn each(parts: &[&str], tools: &[&str]) -> Option<Option<String>> {
    for (i, part) in parts.iter().enumerate().filter(|(i, _)| i % 2 == 0) {
        let lower = part.to_lowercase();
        let Some((before, after)) = EACH.iter().find_map(|phrase| lower.rsplit_once(phrase)) else {
            continue;
        };
        let name = parts
            .get(i.saturating_add(1))
            .filter(|name| !tools.contains(name));
        let words: Vec<&str> = after.split_whitespace().collect();
        let leads = matches!(words.last(), Some(&("of" | "in" | "from" | "the")) | None)
            && words.len() <= 4;
        if let (true, Some(name)) = (leads, name) {
            return Some(Some((*name).to_owned()));
        }
        if i == 0 && before.trim().is_empty() {
            return Some(None);
        }
    }
    None
}

/// Whether a clause begins with a word that asks to write.
fn writes(text: &str) -> bool {
    let lower = text
        .to_lowercase()
        .replace(" and ", ",")
        .replace(" then ", ",");
    lower.split(['.', ',', ';', ':']).any(|clause| {
        let word = clause.split_whitespace().next().unwrap_or_default();
        WRITING.contains(&word)
    })
}
