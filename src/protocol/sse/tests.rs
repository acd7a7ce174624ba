#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic
)]

use serde_json::{Value, json};

use super::*;
use crate::protocol::message::SessionStatus;

fn chunk_json(delta: &str) -> String {
    json!({"type": "text_delta", "delta": delta, "agentId": "s-1", "agentType": "planner",
        "timestamp": 5, "step": 1, "unknownField": {"kept": true}})
    .to_string()
}

fn chunk_frame(sequence: Sequence, delta: &str) -> Frame {
    let chunk = serde_json::from_str(&chunk_json(delta)).unwrap();
    Frame::Chunk { sequence, chunk }
}

fn error_frame(code: &str, error: &str) -> ErrorFrame {
    ErrorFrame {
        run_id: None,
        code: code.into(),
        error: error.into(),
        detail: None,
        recoverable: false,
        floor: None,
        stream_id: None,
    }
}

/// Feeds `bytes` in parts that end at `cuts`, and takes all that comes out.
fn decode_cut(bytes: &[u8], cuts: &[usize]) -> (Vec<Decoded>, Option<DecodeError>) {
    let mut decoder = Decoder::new();
    let mut found = Vec::new();
    let mut from = 0;
    for to in cuts.iter().copied().chain([bytes.len()]) {
        decoder.push(&bytes[from..to]);
        from = to;
        loop {
            match decoder.poll() {
                Ok(Some(item)) => found.push(item),
                Ok(None) => break,
                Err(error) => return (found, Some(error)),
            }
        }
    }
    (found, None)
}

fn decode(text: &str) -> Vec<Decoded> {
    let (found, error) = decode_cut(text.as_bytes(), &[]);
    assert_eq!(error, None, "{text}");
    found
}

fn only_frame(text: &str) -> Frame {
    match decode(text).as_slice() {
        [Decoded::Frame(frame)] => frame.clone(),
        other => panic!("{other:?}"),
    }
}

fn only_error(text: &str) -> DecodeError {
    decode_cut(text.as_bytes(), &[]).1.expect(text)
}

#[test]
fn a_stored_chunk_has_one_byte_form() {
    let stored = r#"{"type":"text_delta","delta":"a\nb","n":1.0,"step":1}"#;
    let mut out = String::new();
    encode_chunk(&mut out, 7, stored);
    assert_eq!(
        out,
        "event: chunk\nid: 7\ndata: {\"sequence\":7,\"chunk\":{\"type\":\"text_delta\",\"delta\":\"a\\nb\",\"n\":1.0,\"step\":1}}\n\n"
    );
    for sequence in [
        1,
        7,
        9,
        10,
        99,
        100,
        4_294_967_296,
        MAX_SAFE_INTEGER,
        u64::MAX,
    ] {
        let mut out = String::from("before");
        encode_chunk(&mut out, sequence, stored);
        let mut again = String::from("before");
        encode_line(&mut again, sequence, stored);
        assert_eq!(out, again);
    }
    // The same bytes come from a decoded frame, where the stored text is compact JSON.
    assert_eq!(encode_frame(&only_frame(&out)).unwrap(), out);
}

#[test]
fn stored_text_with_line_breaks_between_its_tokens_stays_one_event() {
    let mut out = String::new();
    encode_chunk(
        &mut out,
        1,
        "{\r\n\"type\":\r\"output\",\n\n\"output\":[1,\n2]}",
    );
    let Frame::Chunk { chunk, .. } = only_frame(&out) else {
        panic!()
    };
    assert_eq!(
        Value::Object(chunk.0),
        json!({"type": "output", "output": [1, 2]})
    );
}

#[test]
fn every_frame_is_decoded_as_it_was_encoded() {
    let end = |status, output| EndFrame {
        run_id: Some("run_1".into()),
        status,
        output,
        state: Some(json!({"a": {"b": [1, null]}})),
        usage: Some(json!({"tokens": {"total": 3}})),
    };
    let mut truncated = error_frame("TRUNCATED", "The stream no longer holds that.");
    truncated.floor = Some(9);
    truncated.stream_id = Some("st_1".into());
    let mut dropped = error_frame("INTERNAL", "Again.");
    dropped.recoverable = true;
    dropped.detail = Some("more".into());
    let frames = [
        chunk_frame(1, "plain"),
        chunk_frame(
            MAX_SAFE_INTEGER,
            "line\nbreak\r\n\u{2028}\u{85} é 😀 : data: x\n\nevent: end",
        ),
        Frame::CaughtUp { sequence: 0 },
        Frame::End(end(SessionStatus::Completed, Some(json!("done")))),
        Frame::End(end(SessionStatus::Paused, None)),
        Frame::Error(truncated),
        Frame::Error(dropped),
    ];
    for frame in &frames {
        assert_eq!(only_frame(&encode_frame(frame).unwrap()), *frame);
    }
    let all: String = frames.iter().map(|f| encode_frame(f).unwrap()).collect();
    let expected: Vec<_> = frames.into_iter().map(Decoded::Frame).collect();
    assert_eq!(decode(&all), expected);
}

/// A small generator: the same numbers on every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(self.0 >> 33).unwrap() % n
    }

    fn text(&mut self) -> String {
        const PARTS: [&str; 14] = [
            "a", "\n", "\r", "\r\n", "\"", "\\", ":", "data: ", "é", "😀", "\u{feff}", "\0",
            "\u{2028}", " ",
        ];
        (0..self.below(9))
            .map(|_| PARTS[self.below(PARTS.len())])
            .collect()
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => Value::Bool(true),
            2 => json!(self.below(1000)),
            3 => json!(-0.5),
            4 => Value::String(self.text()),
            5 => (0..self.below(4)).map(|_| self.value(depth - 1)).collect(),
            _ => Value::Object(
                (0..self.below(4))
                    .map(|_| (self.text(), self.value(depth - 1)))
                    .collect(),
            ),
        }
    }

    fn frame(&mut self) -> Frame {
        match self.below(6) {
            0 => Frame::CaughtUp {
                sequence: self.below(100) as u64,
            },
            1 => Frame::End(EndFrame {
                run_id: Some(self.text()),
                status: SessionStatus::Interrupted,
                output: Some(self.value(3)).filter(|v| !v.is_null()),
                state: Some(json!({"s": self.value(2)})),
                usage: None,
            }),
            2 => Frame::Error(error_frame(&self.text(), &self.text())),
            _ => Frame::Chunk {
                sequence: 1 + self.below(1 << 20) as u64,
                chunk: RawChunk((0..3).map(|_| (self.text(), self.value(3))).collect()),
            },
        }
    }
}

#[test]
fn any_frames_cut_anywhere_come_back_as_they_were() {
    for seed in 0..200 {
        let mut numbers = Numbers(seed);
        let frames: Vec<Frame> = (0..6).map(|_| numbers.frame()).collect();
        let bytes: String = frames.iter().map(|f| encode_frame(f).unwrap()).collect();
        let mut cuts: Vec<usize> = (0..numbers.below(40))
            .map(|_| numbers.below(bytes.len()))
            .collect();
        cuts.sort_unstable();
        let expected: Vec<_> = frames.into_iter().map(Decoded::Frame).collect();
        assert_eq!(
            decode_cut(bytes.as_bytes(), &cuts),
            (expected, None),
            "seed {seed}"
        );
    }
}

/// All line ends, a mark, comments, several data lines, characters of many bytes, unknown events
/// and fields, and an incomplete event at the end.
fn sample() -> String {
    let first = encode_frame(&chunk_frame(3, "é😀\u{2028}")).unwrap();
    format!(
        "\u{feff}: ping é\r\n\r\n{first}event:chunk\rid:4\rretry: 5\rdata:{{\"sequence\":4,\rdata:\"chunk\":{}}}\r\r\
         event: novelty\ndata: 😀\n\n:\nid: 9\n\nevent: caught-up\r\ndata: {{\"sequence\":4}}\r\n\r\n\
         data: no name\n\nevent: end\ndata: {{\"status\":\"completed\",\"novel\":1}}\n\n\
         event: chunk\ndata: {{\"sequence\":5,\"chunk\":{{}}}}\n",
        chunk_json("x")
    )
}

#[test]
fn the_cut_makes_no_difference() {
    let sample = sample();
    let bytes = sample.as_bytes();
    let whole = decode_cut(bytes, &[]);
    let end = EndFrame {
        run_id: None,
        status: SessionStatus::Completed,
        output: None,
        state: None,
        usage: None,
    };
    let expected = vec![
        Decoded::Comment,
        Decoded::Frame(chunk_frame(3, "é😀\u{2028}")),
        Decoded::Frame(chunk_frame(4, "x")),
        Decoded::Skipped,
        Decoded::Comment,
        Decoded::Frame(Frame::CaughtUp { sequence: 4 }),
        Decoded::Skipped,
        Decoded::Frame(Frame::End(end)),
    ];
    assert_eq!(whole, (expected, None));
    for one in 0..=bytes.len() {
        assert_eq!(decode_cut(bytes, &[one]), whole, "cut at {one}");
        let two = (one + 3).min(bytes.len());
        assert_eq!(
            decode_cut(bytes, &[one, two]),
            whole,
            "cut at {one} and {two}"
        );
    }
    let every: Vec<usize> = (0..bytes.len()).collect();
    assert_eq!(decode_cut(bytes, &every), whole);
}

#[test]
fn an_event_is_there_with_its_empty_line_and_not_before() {
    let event = "event: caught-up\ndata: {\"sequence\":1}\n";
    assert_eq!(decode(event), []);
    assert_eq!(decode(&format!("{event}\n")).len(), 1);
    assert_eq!(decode(&format!("{event}\r")).len(), 1);
    // With CR the event is there at once; it does not wait for a LF that may never come.
    assert_eq!(decode("event: x\rdata: y\r\r"), [Decoded::Skipped]);
}

#[test]
fn the_newer_dialect_is_understood() {
    let fail = "event: fail\ndata: {\"error\":\"Broken.\",\"errorDetail\":\"why\",\"recoverable\":true}\n\n";
    let mut expected = error_frame("INTERNAL", "Broken.");
    expected.recoverable = true;
    expected.detail = Some("why".into());
    assert_eq!(only_frame(fail), Frame::Error(expected));

    let truncated =
        "event: truncated\ndata: {\"floor\":12,\"recoverable\":true,\"streamId\":\"st\"}\n\n";
    let Frame::Error(error) = only_frame(truncated) else {
        panic!()
    };
    assert_eq!(error.code, "TRUNCATED");
    assert_eq!(error.floor, Some(12));
    assert_eq!(error.stream_id.as_deref(), Some("st"));
    assert!(!error.recoverable);

    assert_eq!(decode("event: rewound\ndata: {}\n\n"), [Decoded::Rewound]);
}

#[test]
fn an_error_needs_only_its_sentence() {
    let data = "event: error\ndata: {\"code\":\"run_aborted\",\"error\":\"Stopped.\"}\n\n";
    assert_eq!(
        only_frame(data),
        Frame::Error(error_frame("run_aborted", "Stopped."))
    );
    only_error("event: error\ndata: {\"code\":\"run_aborted\"}\n\n");
}

#[test]
fn a_malformed_frame_is_an_error_and_the_frames_before_it_count() {
    for bad in [
        "event: chunk\nid: 2\ndata: {\"sequence\":1,\"chunk\":{}}\n\n",
        "event: chunk\nid: 01\ndata: {\"sequence\":1,\"chunk\":{}}\n\n",
        "event: chunk\nid: 0\ndata: {\"sequence\":0,\"chunk\":{}}\n\n",
        "event: chunk\nid: 1\ndata: {\"sequence\":1}\n\n",
        "event: chunk\nid: 1\ndata: {\"chunk\":{}}\n\n",
        "event: chunk\nid: 1\ndata: {\"sequence\":1,\"chunk\":[]}\n\n",
        "event: chunk\nid: 1\ndata: {\"sequence\":1,\"chunk\":{\"type\":\"a\",\"type\":\"b\"}}\n\n",
        "event: chunk\nid: 1\ndata: {\"sequence\":1,\"chunk\":{},\"chunk\":{}}\n\n",
        "event: chunk\ndata: {\"sequence\":9007199254740992,\"chunk\":{}}\n\n",
        "event: chunk\ndata: {\"sequence\":1,\"chunk\":{}\n\n",
        "event: chunk\nid: 1\n\n",
        "event: caught-up\ndata: {}\n\n",
        "event: end\ndata: {\"output\":1}\n\n",
        "event: end\ndata: [\n\n",
    ] {
        let good = encode_frame(&Frame::CaughtUp { sequence: 1 }).unwrap();
        let (found, error) = decode_cut(format!("{good}{bad}{good}").as_bytes(), &[]);
        assert_eq!(found.len(), 1, "{bad}");
        assert!(matches!(error, Some(DecodeError::Malformed(_))), "{bad}");
    }
    let mut not_utf8 = b"event: novelty\ndata: ".to_vec();
    not_utf8.extend([0xc3, 0x28, b'\n', b'\n']);
    assert!(decode_cut(&not_utf8, &[]).1.is_some());
}

#[test]
fn an_error_is_final_and_quotes_nothing() {
    let mut decoder = Decoder::new();
    decoder.push(b"event: chunk\ndata: {\"sequence\":\"canary\",\"chunk\":{}}\n\n");
    let error = decoder.poll().unwrap_err();
    assert!(!error.to_string().contains("canary"), "{error}");
    decoder.push(b"event: caught-up\ndata: {\"sequence\":1}\n\n");
    assert_eq!(decoder.poll(), Err(error));
}

#[test]
fn an_event_has_a_largest_size_wherever_it_is_cut() {
    let fits = "event: x\ndata: 0123456789\ndata: 0123\n\n";
    let too_large = "event: x\ndata: 0123456789\ndata: 01234\n\n";
    let unfinished = ": 0123456789012345678901";
    for cut in 0..fits.len() {
        let run = |text: &str| {
            let mut decoder = Decoder::with_limit(20);
            decoder.push(&text.as_bytes()[..cut]);
            let first = decoder.poll();
            decoder.push(&text.as_bytes()[cut..]);
            first.and_then(|found| Ok(found.or(decoder.poll()?)))
        };
        assert_eq!(run(fits), Ok(Some(Decoded::Skipped)), "cut at {cut}");
        assert_eq!(
            run(too_large),
            Err(DecodeError::TooLarge { limit: 20 }),
            "cut at {cut}"
        );
        if cut <= unfinished.len() {
            assert_eq!(
                run(unfinished),
                Err(DecodeError::TooLarge { limit: 20 }),
                "cut at {cut}"
            );
        }
    }
}

#[test]
fn a_comment_cannot_break_out_of_its_line() {
    assert_eq!(encode_comment("ping"), ": ping\n\n");
    assert_eq!(
        decode(&encode_comment("a\r\nevent: end\n\n")),
        [Decoded::Comment]
    );
}

#[test]
fn a_number_that_passes_through_text_stays_the_number_it_is() {
    // Found by `fuzz/`: a reader that rounds the last digit hands on another number at each hop.
    for number in [
        "1.5555555555555557e56",
        "0.1",
        "2.2250738585072014e-308",
        "123456789.12345679",
        "9007199254740993.5",
    ] {
        let value: Value = serde_json::from_str(number).unwrap();
        assert_eq!(value.as_f64(), number.parse().ok(), "{number}");
        let chunk = json!({"type": "output", "agentId": "s", "output": value});
        let frame = Frame::Chunk {
            sequence: 1,
            chunk: serde_json::from_value(chunk).unwrap(),
        };
        assert_eq!(only_frame(&encode_frame(&frame).unwrap()), frame);
    }
    let mut numbers = Numbers(7);
    for _ in 0..2000 {
        let bits = numbers.0.rotate_left(17) ^ numbers.below(1 << 30) as u64;
        let number = f64::from_bits(bits);
        if number.is_finite() {
            let text = json!(number).to_string();
            let read: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(
                read.as_f64().map(f64::to_bits),
                Some(number.to_bits()),
                "{text}"
            );
        }
    }
}
