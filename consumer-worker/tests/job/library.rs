//! Documents that nobody wrote: made from a seed, of every kind of text.

use serde_json::{Value, json};

/// A generator of numbers, the same for the same seed.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % sides
    }

    pub fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.roll(from.len())]
    }
}

/// Six subjects, each a thread of the job.
pub const SUBJECTS: [&str; 6] = [
    "lighthouses",
    "tidal charts",
    "Brückenbau",
    "水路",
    "маяки",
    "rope knots",
];

const WORDS: [&str; 28] = [
    "keeper",
    "storm",
    "naïve",
    "señal",
    "Größe",
    "東京",
    "океан",
    "שלום",
    "e\u{301}tude",
    "🚢",
    "👩\u{200d}🚀",
    "<b>bold</b>",
    "*starred*",
    "`code`",
    "[link](http://x/?a=1&b=2)",
    "\"quoted\"",
    "back\\slash",
    "'single'",
    "&amp;",
    "a/b",
    "x_y",
    "100%",
    "—",
    "it’s",
    "\u{feff}mark",
    "O'Neil",
    "tab\there",
    "nbsp\u{a0}here",
];

const ENDS: [&str; 8] = [
    ". ",
    "! ",
    "? ",
    ".\r\n",
    ".\n\n",
    "…\n",
    ".\r\n\r\n- ",
    "。",
];

/// A topic that asks for all of the subjects.
pub fn topic() -> String {
    SUBJECTS.join(" and ")
}

/// Documents of random texts, each about some of the subjects; at least one about each.
pub fn documents(seed: u64, count: usize) -> Vec<Value> {
    let mut dice = Dice::new(seed);
    (0..count)
        .map(|number| {
            let mut text = String::new();
            for sentence in 0..4 + dice.roll(12) {
                let subject = if sentence == 0 {
                    SUBJECTS[number % SUBJECTS.len()]
                } else {
                    dice.pick(&SUBJECTS)
                };
                for _ in 0..dice.roll(6) {
                    text.push_str(dice.pick(&WORDS));
                    text.push(' ');
                }
                text.push_str(subject);
                for _ in 0..dice.roll(9) {
                    text.push(' ');
                    text.push_str(dice.pick(&WORDS));
                }
                text.push_str(dice.pick(&ENDS));
            }
            json!({ "id": format!("doc {number}/é"), "title": format!("Title {number}"), "text": text })
        })
        .collect()
}

/// Two short documents for many runs of a job with two threads.
pub fn few() -> (&'static str, Vec<Value>) {
    let documents = json!([
        { "id": "a", "title": "A", "text": "Lighthouses burn oil.\r\nA keeper trims the wick." },
        { "id": "b", "title": "B", "text": "Knots hold ropes, \"fest\" 結び." },
    ]);
    let Value::Array(documents) = documents else {
        panic!()
    };
    ("lighthouses and knots", documents)
}
