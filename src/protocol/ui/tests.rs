//! `tests/vectors/ui.json` says which frames make which parts; `client/test/ui.test.mjs` reads the
//! same parts with the package `ai`. Here also: whatever a reader attaches at stands alone.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use std::collections::BTreeSet;

use serde::Deserialize;

use super::*;

#[derive(Deserialize)]
struct Vectors {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Case {
    name: String,
    session: String,
    stream_id: String,
    discard: String,
    frames: Vec<FrameRow>,
    /// By frame.
    parts: Vec<Vec<Value>>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum FrameRow {
    Chunk {
        sequence: Sequence,
        chunk: RawChunk,
    },
    CaughtUp {
        #[serde(rename = "caughtUp")]
        caught_up: UiCursor,
    },
    End {
        end: EndFrame,
    },
    Error {
        error: ErrorFrame,
    },
}

impl From<FrameRow> for Frame {
    fn from(row: FrameRow) -> Self {
        match row {
            FrameRow::Chunk { sequence, chunk } => Self::Chunk { sequence, chunk },
            FrameRow::CaughtUp { caught_up } => Self::CaughtUp {
                sequence: caught_up.sequence,
            },
            FrameRow::End { end } => Self::End(end),
            FrameRow::Error { error } => Self::Error(error),
        }
    }
}

fn cases() -> Vec<Case> {
    let text = include_str!("../../../tests/vectors/ui.json");
    serde_json::from_str::<Vectors>(text).unwrap().cases
}

impl Case {
    fn stream(&self, discard: Discard) -> UiStream {
        UiStream::new(&self.session, Some(self.stream_id.clone()), discard)
    }

    /// The parts that a reader gets who attached behind the first `skipped` frames, by frame.
    fn read_by_frame(&self, discard: Discard, skipped: usize) -> Vec<Vec<UiPart>> {
        let mut stream = self.stream(discard);
        let frames = self.frames.iter().skip(skipped).cloned();
        frames.map(|frame| stream.take(frame.into())).collect()
    }

    fn read(&self, discard: Discard, skipped: usize) -> Vec<UiPart> {
        self.read_by_frame(discard, skipped).concat()
    }
}

#[test]
fn the_vectors_are_what_frames_make() {
    let cases = cases();
    assert!(cases.len() > 20);
    for case in cases {
        let discard = Discard::parse(Some(&case.discard)).unwrap();
        let parts = serde_json::to_value(case.read_by_frame(discard, 0)).unwrap();
        assert_eq!(
            parts,
            serde_json::to_value(&case.parts).unwrap(),
            "{}",
            case.name
        );
    }
}

#[test]
fn every_type_of_part_stands_in_the_vectors() {
    let cases = cases();
    let parts = cases.iter().flat_map(|case| &case.parts).flatten();
    let seen: BTreeSet<&str> = parts.map(|part| part["type"].as_str().unwrap()).collect();
    let source = include_str!("part.rs");
    let (_, variants) = source.split_once("pub enum UiPart {").unwrap();
    let (variants, _) = variants.split_once("\n}\n").unwrap();
    let names = variants.lines().filter_map(|line| {
        let name = line.strip_prefix("    ")?.trim_end_matches([' ', '{', ',']);
        name.starts_with(char::is_uppercase).then_some(name)
    });
    let mut count = 0;
    for name in names {
        count += 1;
        let wire: String = name
            .chars()
            .flat_map(|c| {
                let dash = c.is_uppercase().then_some('-');
                dash.into_iter().chain([c.to_ascii_lowercase()])
            })
            .skip(1)
            .collect();
        assert!(seen.contains(wire.as_str()), "{wire}");
    }
    assert!(count > 20);
}

/// What the package asks of the order of parts; it throws otherwise.
#[derive(Default)]
struct Judge {
    is_begun: bool,
    is_in_step: bool,
    texts: BTreeSet<String>,
    streaming: BTreeSet<String>,
    calls: BTreeSet<String>,
}

impl Judge {
    fn hear(&mut self, part: &UiPart) -> Result<(), String> {
        let need = |holds: bool| holds.then_some(()).ok_or(format!("{part:?}"));
        match part {
            UiPart::Start { .. } => {
                need(self.texts.is_empty() && !self.is_in_step)?;
                *self = Self {
                    is_begun: true,
                    ..Self::default()
                };
                Ok(())
            }
            UiPart::StartStep => {
                need(!std::mem::replace(&mut self.is_in_step, true))?;
                need(self.is_begun)
            }
            UiPart::FinishStep => {
                need(self.texts.is_empty())?;
                need(std::mem::replace(&mut self.is_in_step, false))
            }
            UiPart::ResetStep => {
                self.texts.clear();
                self.streaming.clear();
                need(self.is_in_step)
            }
            UiPart::TextStart { id } | UiPart::ReasoningStart { id } => {
                need(self.is_in_step && self.texts.insert(id.clone()))
            }
            UiPart::TextDelta { id, .. } | UiPart::ReasoningDelta { id, .. } => {
                need(self.texts.contains(id))
            }
            UiPart::TextEnd { id } | UiPart::ReasoningEnd { id } => need(self.texts.remove(id)),
            UiPart::ToolInputStart { tool_call_id, .. } => {
                self.calls.insert(tool_call_id.clone());
                need(self.is_in_step && self.streaming.insert(tool_call_id.clone()))
            }
            UiPart::ToolInputDelta { tool_call_id, .. } => {
                need(self.streaming.contains(tool_call_id))
            }
            UiPart::ToolInputAvailable { tool_call_id, .. } => {
                self.streaming.remove(tool_call_id);
                self.calls.insert(tool_call_id.clone());
                need(self.is_in_step)
            }
            UiPart::ToolInputError { tool_call_id, .. } => {
                need(self.streaming.remove(tool_call_id))
            }
            UiPart::ToolOutputAvailable { tool_call_id, .. }
            | UiPart::ToolOutputError { tool_call_id, .. } => {
                need(self.calls.contains(tool_call_id))
            }
            _ => Ok(()),
        }
    }
}

#[test]
fn whatever_a_reader_attaches_at_its_stream_stands_alone() {
    let mut attached = 0;
    for case in cases() {
        for discard in [Discard::Close, Discard::Reset] {
            for skipped in 0..case.frames.len() {
                let mut judge = Judge::default();
                for part in case.read(discard, skipped) {
                    if let Err(why) = judge.hear(&part) {
                        panic!("{} behind {skipped} frames: {why}", case.name);
                    }
                }
                attached += 1;
            }
        }
    }
    assert!(attached > 300, "{attached}");
}

#[test]
fn nothing_is_kept_of_a_step_that_is_over() {
    let case = &cases()[0];
    let mut stream = case.stream(Discard::Close);
    for frame in &case.frames {
        let is_over =
            matches!(frame, FrameRow::Chunk { chunk, .. } if chunk.kind() == "step_committed");
        stream.take(frame.clone().into());
        assert!(!is_over || stream.step.is_none());
    }
    assert!(stream.step.is_none() && stream.text.is_none() && stream.reasoning.is_none());
}

#[test]
fn what_is_for_developers_is_in_no_part_of_an_error() {
    let case = cases()
        .into_iter()
        .find(|case| case.name.starts_with("a failed run"))
        .unwrap();
    let text = serde_json::to_string(&case.read(Discard::Close, 0)).unwrap();
    assert!(
        text.contains("The model failed.") && !text.contains("secret detail"),
        "{text}"
    );
}

#[test]
fn discard_is_close_or_reset() {
    assert_eq!(Discard::parse(None), Ok(Discard::Close));
    assert_eq!(Discard::parse(Some("reset")), Ok(Discard::Reset));
    for wrong in ["", "Reset", "open"] {
        assert_eq!(
            Discard::parse(Some(wrong)).unwrap_err().field.as_deref(),
            Some("discard")
        );
    }
}
