//! Splits a topic into questions, by its own clauses or by what the documents say about it.
//!
//! A question is made of words of the topic and of the texts. Titles are never read.

use std::collections::{HashMap, HashSet};

use crate::passages;

/// Questions of one outline.
const FEWEST: usize = 2;
const MOST: usize = 6;

/// Questions that are added to a topic of one clause.
const ASPECTS: usize = 3;

/// The longest question, in characters.
const LONGEST: usize = 240;

/// Two to six questions, all different.
#[must_use]
pub fn questions(topic: &str, texts: &[&str]) -> Vec<String> {
    let clauses = clauses(topic);
    let mut questions: Vec<String> = Vec::new();
    if clauses.len() >= FEWEST {
        clauses
            .iter()
            .for_each(|clause| add(&mut questions, clip(clause)));
    }
    if questions.len() < FEWEST {
        questions.clear();
        let whole = clip(&topic.split_whitespace().collect::<Vec<_>>().join(" "));
        let aspects = aspects(&whole, texts);
        add(&mut questions, whole.clone());
        for aspect in aspects {
            add(
                &mut questions,
                if whole.is_empty() {
                    aspect
                } else {
                    format!("{whole}: {aspect}")
                },
            );
        }
        if questions.is_empty() {
            add(&mut questions, "Overview".to_owned());
        }
        while let (true, Some(first)) = (questions.len() < FEWEST, questions.first()) {
            let more = format!("More about {first}");
            add(&mut questions, more);
        }
    }
    questions.truncate(MOST);
    questions
}

fn add(questions: &mut Vec<String>, question: String) {
    if !question.is_empty() && !questions.contains(&question) {
        questions.push(question);
    }
}

/// The clauses that have words of their own; what goes beyond the last question joins it.
fn clauses(topic: &str) -> Vec<String> {
    let mut clauses: Vec<String> = Vec::new();
    let mut clause = String::new();
    let mut close = |clause: &mut String| {
        let done = std::mem::take(clause);
        if !passages::terms(&done).is_empty() {
            clauses.push(done);
        }
    };
    for word in topic.split_whitespace() {
        let lower = word.to_lowercase();
        if matches!(
            lower.as_str(),
            "and" | "und" | "et" | "y" | "versus" | "vs" | "&"
        ) {
            close(&mut clause);
            continue;
        }
        for part in word.split_inclusive(['、', '，', '。', '；', '？', '！']) {
            let bare =
                part.trim_end_matches([',', ';', '?', '!', '、', '，', '。', '；', '？', '！']);
            let bare = if bare.ends_with('.') {
                bare.trim_end_matches('.')
            } else {
                bare
            };
            if !clause.is_empty() && !bare.is_empty() {
                clause.push(' ');
            }
            clause.push_str(bare);
            if bare.len() < part.len() {
                close(&mut clause);
            }
        }
    }
    close(&mut clause);
    let rest = clauses.split_off(clauses.len().min(MOST));
    if let (false, Some(last)) = (rest.is_empty(), clauses.last_mut()) {
        *last = format!("{last}; {}", rest.join("; "));
    }
    clauses
}

/// What the texts mention most particularly together with the topic; without a topic, most often.
fn aspects(topic: &str, texts: &[&str]) -> Vec<String> {
    let wanted: HashSet<String> = passages::terms(topic).into_iter().collect();
    if wanted.is_empty() && !topic.is_empty() {
        return Vec::new();
    }
    let mut order: Vec<String> = Vec::new();
    let mut counts: HashMap<String, (u64, u64)> = HashMap::new();
    for passage in texts.iter().flat_map(|text| passages::split(text)) {
        let terms = passages::terms(passage);
        let near = wanted.is_empty() || terms.iter().any(|term| wanted.contains(term));
        for term in terms {
            if term.chars().all(|c| c.is_numeric())
                || (term.is_ascii() && term.len() < 4)
                || wanted.contains(&term)
            {
                continue;
            }
            let (together, all) = counts.entry(term.clone()).or_insert_with(|| {
                order.push(term);
                (0, 0)
            });
            *together = together.saturating_add(near.into());
            *all = all.saturating_add(1);
        }
    }
    // Often together and seldom apart comes first: the square over the whole count. Ties keep the
    // order of the texts.
    let score = |term: &String| {
        let (together, all) = counts.get(term).copied().unwrap_or_default();
        together
            .saturating_mul(together)
            .saturating_mul(1000)
            .checked_div(all)
            .unwrap_or(0)
    };
    let mut ranked: Vec<(u64, &String)> = order
        .iter()
        .map(|term| (score(term), term))
        .filter(|(score, _)| *score > 0)
        .collect();
    ranked.sort_by_key(|(score, _)| std::cmp::Reverse(*score));
    ranked
        .into_iter()
        .take(ASPECTS)
        .map(|(_, term)| term.clone())
        .collect()
}

fn clip(text: &str) -> String {
    text.trim()
        .chars()
        .take(LONGEST)
        .collect::<String>()
        .trim_end()
        .to_owned()
}
