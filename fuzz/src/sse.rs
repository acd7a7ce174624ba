//! The decoder of streams: the same at every cut, and what a plain reader of the standard reads.

use remote_agents::protocol::frame::Frame;
use remote_agents::protocol::sse::{DecodeError, Decoded, Decoder, encode_frame};
use serde_json::Value;

use super::input::{cuts, owned};
use super::reference::{Event, Item, items, object};

const MOST: u64 = (1 << 53) - 1;

/// What a decoder found, and the error that ended it.
type Read = (Vec<Decoded>, Option<DecodeError>);

fn read(mut decoder: Decoder, parts: &[bytes::Bytes]) -> Read {
    let mut found = Vec::new();
    for part in parts {
        decoder.push(part);
        loop {
            match decoder.poll() {
                Ok(Some(decoded)) => found.push(decoded),
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(decoder.poll(), Err(error.clone()), "an error stays");
                    return (found, Some(error));
                }
            }
        }
    }
    (found, None)
}

pub(crate) fn decoder(data: &[u8]) {
    let whole = read(Decoder::new(), &[owned(data)]);
    let small = read(Decoder::with_limit(40), &[owned(data)]);
    for parts in cuts(data) {
        assert_eq!(read(Decoder::new(), &parts), whole, "cut as {parts:?}");
        assert_eq!(
            read(Decoder::with_limit(40), &parts),
            small,
            "cut as {parts:?}"
        );
    }
    agrees(&items(data), &whole);
    for decoded in whole.0 {
        if let Decoded::Frame(frame) = decoded {
            let text = encode_frame(&frame).expect("what was read can be written");
            let again = read(Decoder::new(), &[owned(text.as_bytes())]);
            assert_eq!(again, (vec![Decoded::Frame(frame)], None));
        }
    }
}

fn agrees(items: &[Item], (found, error): &Read) {
    for (n, item) in items.iter().enumerate() {
        let decoded = found.get(n);
        match item {
            Item::Comment => assert_eq!(decoded, Some(&Decoded::Comment)),
            Item::Broken => assert!(decoded.is_none() && error.is_some()),
            Item::Event(event) => match decoded {
                Some(decoded) => means(event, decoded),
                None => {
                    assert!(error.is_some(), "{event:?} was not read");
                    assert!(!is_whole(event), "{event:?} was refused");
                    return;
                }
            },
        }
    }
    let broken = items.contains(&Item::Broken);
    assert_eq!(found.len(), items.len() - usize::from(broken));
    assert_eq!(error.is_some(), broken);
}

/// What an event means was read out of it.
fn means(event: &Event, decoded: &Decoded) {
    let data = object(event.data.as_deref().unwrap_or_default());
    let field = |name: &str| data.as_ref().and_then(|data| data.get(name));
    let text = |name: &str| field(name).and_then(Value::as_str);
    match (event.name.as_str(), decoded) {
        ("chunk", Decoded::Frame(Frame::Chunk { sequence, chunk })) => {
            assert_eq!(field("sequence").and_then(Value::as_u64), Some(*sequence));
            assert_eq!(field("chunk").and_then(Value::as_object), Some(&chunk.0));
            assert!((1..=MOST).contains(sequence));
            let id = event.id.as_ref();
            assert!(id.is_none_or(|id| *id == sequence.to_string()));
        }
        ("caught-up", Decoded::Frame(Frame::CaughtUp { sequence })) => {
            assert_eq!(field("sequence").and_then(Value::as_u64), Some(*sequence));
        }
        ("end", Decoded::Frame(Frame::End(end))) => {
            let told = field("output").filter(|output| !output.is_null());
            assert_eq!(end.output.as_ref(), told);
            assert!(text("status").is_some());
        }
        ("error" | "fail", Decoded::Frame(Frame::Error(error))) => {
            assert_eq!(text("error"), Some(error.error.as_str()));
            let recoverable = field("recoverable") == Some(&Value::Bool(true));
            assert_eq!(error.recoverable, recoverable);
        }
        ("truncated", Decoded::Frame(Frame::Error(error))) => {
            assert!(error.code == "TRUNCATED" && !error.recoverable);
        }
        ("rewound", Decoded::Rewound) => {}
        (name, Decoded::Skipped) => {
            let known = [
                "chunk",
                "caught-up",
                "end",
                "error",
                "fail",
                "truncated",
                "rewound",
            ];
            assert!(!known.contains(&name), "{name} was skipped");
        }
        (name, decoded) => panic!("{name} was read as {decoded:?}"),
    }
}

/// Whether an event must be readable: it is what our own encoder could have written.
fn is_whole(event: &Event) -> bool {
    let text = event.data.as_deref().unwrap_or_default();
    let Some(data) = object(text) else {
        return ["", "rewound"].contains(&event.name.as_str());
    };
    // No key stands twice where the text is what the values give.
    if serde_json::to_string(&data).ok().as_deref() != Some(text) {
        return false;
    }
    let sequence = data.get("sequence").and_then(Value::as_u64);
    match event.name.as_str() {
        "chunk" => {
            let id = event.id.as_ref();
            data.get("chunk").is_some_and(Value::is_object)
                && sequence.is_some_and(|n| {
                    (1..=MOST).contains(&n) && id.is_none_or(|id| *id == n.to_string())
                })
        }
        "caught-up" => sequence.is_some_and(|n| n <= MOST),
        "error" | "fail" => data.get("error").is_some_and(Value::is_string),
        "end" => false,
        _ => true,
    }
}
