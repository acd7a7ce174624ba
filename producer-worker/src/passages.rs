//! Passages: how a text is cut into quotable slices, and how they are searched.
//!
//! A passage is a slice of the text; cutting never changes a character. Searching takes any text
//! whatever: only plain words reach the query language, each as a quoted string.

use std::collections::HashSet;

use remote_agents::Result;
use remote_agents::store::{Database, SqlValue};

use crate::corpus;
use crate::state::{Document, Quotation};

/// A passage is cut when it would be longer, in characters.
pub const LONGEST: usize = 400;

/// Sentences of a paragraph are put together until a passage has this many bytes.
const SHORT: usize = 80;

/// Words of one query. Far below the depth that an expression may have.
const MOST_TERMS: usize = 24;

/// A word is cut after this many characters and searched for by its beginning.
const LONGEST_TERM: usize = 48;

/// Hits that are looked at for one search, repetitions included.
const MOST_HITS: usize = 60;

const STOP_WORDS: &[&str] = &[
    "a",
    "about",
    "after",
    "again",
    "against",
    "all",
    "also",
    "always",
    "an",
    "and",
    "another",
    "any",
    "are",
    "as",
    "at",
    "be",
    "because",
    "become",
    "becomes",
    "been",
    "before",
    "being",
    "between",
    "both",
    "but",
    "by",
    "can",
    "cannot",
    "come",
    "comes",
    "could",
    "did",
    "do",
    "does",
    "done",
    "down",
    "during",
    "each",
    "either",
    "else",
    "ever",
    "every",
    "first",
    "for",
    "from",
    "get",
    "gets",
    "give",
    "given",
    "gives",
    "go",
    "goes",
    "had",
    "has",
    "have",
    "here",
    "how",
    "however",
    "i",
    "if",
    "in",
    "into",
    "is",
    "it",
    "its",
    "just",
    "last",
    "like",
    "made",
    "make",
    "makes",
    "many",
    "may",
    "me",
    "might",
    "more",
    "most",
    "much",
    "must",
    "my",
    "neither",
    "never",
    "no",
    "nor",
    "not",
    "now",
    "of",
    "off",
    "often",
    "on",
    "once",
    "one",
    "only",
    "or",
    "other",
    "others",
    "our",
    "out",
    "over",
    "own",
    "per",
    "put",
    "same",
    "say",
    "says",
    "see",
    "seen",
    "set",
    "sets",
    "should",
    "since",
    "so",
    "some",
    "still",
    "such",
    "take",
    "takes",
    "tell",
    "than",
    "that",
    "the",
    "their",
    "them",
    "themselves",
    "then",
    "there",
    "these",
    "they",
    "this",
    "those",
    "though",
    "through",
    "thus",
    "to",
    "together",
    "too",
    "two",
    "under",
    "until",
    "up",
    "us",
    "very",
    "want",
    "was",
    "we",
    "well",
    "went",
    "were",
    "what",
    "when",
    "where",
    "whether",
    "which",
    "while",
    "who",
    "whole",
    "why",
    "will",
    "with",
    "without",
    "would",
    "yet",
    "you",
    "your",
];

/// Cuts a text into passages: sentences, short ones together with their neighbours, long ones cut
/// between words or, failing that, between characters. Every passage is a slice of the text.
#[must_use]
pub fn split(text: &str) -> Vec<&str> {
    let mut passages = Vec::new();
    for paragraph in cut(text, paragraph_ends) {
        let mut start: Option<usize> = None;
        let mut from = 0;
        for sentence in cut(paragraph, sentence_ends) {
            let end = from + sentence.len();
            let begin = *start.get_or_insert(from);
            if end.saturating_sub(begin) >= SHORT {
                passages.extend(paragraph.get(begin..end).into_iter().flat_map(shorten));
                start = None;
            }
            from = end;
        }
        passages.extend(
            start
                .and_then(|begin| paragraph.get(begin..))
                .into_iter()
                .flat_map(shorten),
        );
    }
    passages.retain(|passage| passage.chars().any(char::is_alphanumeric));
    if passages.iter().any(|passage| !is_heading(passage)) {
        passages.retain(|passage| !is_heading(passage));
    }
    passages
}

/// The words that tell what a text is about: lower case, each once, in order. Text of scripts that
/// do not part words comes as pairs of characters.
#[must_use]
pub fn terms(text: &str) -> Vec<String> {
    let mut seen = HashSet::new();
    let all: Vec<String> = words(text)
        .into_iter()
        .filter(|word| seen.insert(word.clone()))
        .collect();
    let telling: Vec<String> = all
        .iter()
        .filter(|word| !STOP_WORDS.contains(&word.as_str()))
        .cloned()
        .collect();
    if telling.is_empty() { all } else { telling }
}

/// The query for a text, or `None` when it has no word.
#[must_use]
pub fn match_query(text: &str) -> Option<String> {
    let quoted = terms(text).into_iter().take(MOST_TERMS).map(|term| {
        // A lone character of such a script is only ever found inside of pairs.
        let begins = term.chars().count() >= LONGEST_TERM
            || (term.chars().count() == 1 && term.chars().all(is_unparted));
        format!("\"{term}\"{}", if begins { "*" } else { "" })
    });
    Some(quoted.collect::<Vec<_>>().join(" OR ")).filter(|query| !query.is_empty())
}

/// Makes the table of passages and fills it.
///
/// # Errors
/// What the database says.
pub fn index(database: &dyn Database, documents: &[Document]) -> Result<()> {
    database.query(
        "CREATE VIRTUAL TABLE IF NOT EXISTS passages USING fts5(text, pairs, document UNINDEXED, tokenize = 'porter unicode61')",
        &[],
    )?;
    let passages: Vec<(&str, String, &str)> = documents
        .iter()
        .flat_map(|document| {
            split(&document.text)
                .into_iter()
                .map(|passage| (passage, pairs(passage), document.id.as_str()))
        })
        .collect();
    let rows = passages
        .iter()
        .map(|(passage, pairs, document)| [*passage, pairs.as_str(), *document]);
    corpus::insert(
        database,
        "INSERT INTO passages (text, pairs, document) VALUES",
        rows,
    )
}

/// The passages that match a text best, the best first, each once.
///
/// # Errors
/// What the database says.
pub fn search(database: &dyn Database, text: &str, most: usize) -> Result<Vec<Quotation>> {
    let Some(query) = match_query(text) else {
        return Ok(Vec::new());
    };
    let sql = format!(
        "SELECT document, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT {MOST_HITS}"
    );
    let rows = database.query(&sql, &[SqlValue::Text(query)])?;
    let mut found: Vec<Quotation> = Vec::new();
    for row in rows {
        let Ok([SqlValue::Text(document_id), SqlValue::Text(quote)]) =
            <[SqlValue; 2]>::try_from(row)
        else {
            continue;
        };
        let quotation = Quotation { document_id, quote };
        // The index is a copy; the document has the last word.
        if !found.contains(&quotation)
            && corpus::is_verbatim(database, &quotation.document_id, &quotation.quote)?
        {
            found.push(quotation);
            if found.len() >= most {
                break;
            }
        }
    }
    Ok(found)
}

/// Cuts a text after each of the places that `ends` names.
fn cut(text: &str, ends: fn(&str) -> Vec<usize>) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut from = 0;
    for end in ends(text).into_iter().chain([text.len()]) {
        if let Some(part) = text.get(from..end).filter(|part| !part.is_empty()) {
            parts.push(part);
            from = end;
        }
    }
    parts
}

/// Places after an empty line, and before a line that is a heading, a list item or a table row.
fn paragraph_ends(text: &str) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut at: usize = 0;
    let mut after_heading = false;
    for line in text.split_inclusive('\n') {
        let bare = line.trim();
        if bare.is_empty() || after_heading || begins_block(bare) {
            ends.push(at);
        }
        after_heading = is_heading(bare);
        at = at.saturating_add(line.len());
    }
    ends
}

fn begins_block(line: &str) -> bool {
    let numbered = || {
        let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
        rest.len() < line.len() && (rest.starts_with(". ") || rest.starts_with(") "))
    };
    let marked = ["- ", "* ", "+ ", "> ", "|", "```"]
        .iter()
        .any(|mark| line.starts_with(mark));
    marked || is_heading(line) || numbered()
}

fn is_heading(text: &str) -> bool {
    let rest = text.trim_start_matches('#');
    rest.len() < text.len() && rest.starts_with(' ') && !text.trim().contains('\n')
}

/// Places after a sentence: its mark, closing quotes and brackets, and the space behind it. A small
/// letter carries the sentence on, as after an abbreviation.
fn sentence_ends(text: &str) -> Vec<usize> {
    let mut ends = Vec::new();
    let mut marked = false;
    let mut wide = false;
    let mut spaced = false;
    for (at, c) in text.char_indices() {
        if c.is_whitespace() {
            spaced = marked;
            continue;
        }
        // Marks of scripts without spaces end a sentence by themselves.
        let goes_on = !wide && c.is_lowercase();
        if marked && (spaced || wide) && !goes_on && !is_mark(c) && !is_closing(c) {
            ends.push(at);
            marked = false;
        }
        if is_mark(c) {
            marked = true;
            wide = matches!(c, '。' | '！' | '？' | '।');
        } else if !is_closing(c) {
            marked = false;
        }
        spaced = false;
    }
    ends
}

fn is_mark(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…' | '。' | '！' | '？' | '।')
}

fn is_closing(c: char) -> bool {
    matches!(
        c,
        '"' | '\'' | ')' | ']' | '*' | '_' | '”' | '’' | '»' | '」' | '』' | '）'
    )
}

/// A slice without the space around it, in pieces of at most [`LONGEST`] characters.
fn shorten(passage: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = passage.trim();
    while let Some((limit, _)) = rest.char_indices().nth(LONGEST) {
        let head = rest.get(..limit).unwrap_or(rest);
        let space = head
            .char_indices()
            .rev()
            .find(|(_, c)| c.is_whitespace())
            .map(|(at, _)| at);
        // A word that would leave a stub is cut in the middle.
        let at = space.filter(|at| *at > limit / 2).unwrap_or(limit);
        let (piece, more) = rest.split_at(at);
        pieces.push(piece.trim_end());
        rest = more.trim_start();
    }
    pieces.push(rest);
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

/// All words of a text, in order.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for word in text
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
    {
        let mut rest = word;
        while let Some(first) = rest.chars().next() {
            let unparted = is_unparted(first);
            let end = rest
                .find(|c| is_unparted(c) != unparted)
                .unwrap_or(rest.len());
            let (run, more) = rest.split_at(end);
            if unparted {
                words.extend(pairs_of(run));
            } else {
                words.push(
                    run.chars()
                        .take(LONGEST_TERM)
                        .flat_map(char::to_lowercase)
                        .collect(),
                );
            }
            rest = more;
        }
    }
    words
}

/// The pairs of a passage that the index's own tokens would miss.
fn pairs(text: &str) -> String {
    let runs = text
        .split(|c: char| !is_unparted(c))
        .filter(|run| !run.is_empty());
    runs.flat_map(pairs_of).collect::<Vec<_>>().join(" ")
}

fn pairs_of(run: &str) -> Vec<String> {
    let characters: Vec<char> = run.chars().collect();
    if characters.len() < 2 {
        return vec![run.to_owned()];
    }
    characters
        .windows(2)
        .map(|pair| pair.iter().collect())
        .collect()
}

/// Whether a character is of a script that does not part words by spaces.
fn is_unparted(c: char) -> bool {
    matches!(u32::from(c),
        0x0E00..=0x0EFF | 0x1000..=0x109F | 0x1780..=0x17FF | 0x3040..=0x30FF | 0x3400..=0x4DBF
        | 0x4E00..=0x9FFF | 0xF900..=0xFAFF | 0x20000..=0x3FFFF)
        && c.is_alphanumeric()
}
