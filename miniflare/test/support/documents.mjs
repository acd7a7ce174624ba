// Documents that a test makes up itself, the same for the same seed: words that nobody has written before, in paragraphs
// with the characters that careless code changes.

/** Numbers in [0, 1) from a 32-bit seed. */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

const SYLLABLES = "ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo zu bra cle dri fle gro pla ste tri".split(" ");
const ENDINGS = [". ", ". ", ".\n", ".\r\n", "! ", "? ", ".  ", ".\n\n", ".\r\n\r\n", ";\t", ".\u2028", ".\u00a0"];
const SPICE = [
  "Größe", "naïve", "e\u0301te\u0301", "日本語の文。", "שלום", "مرحبا", "👩‍👩‍👧‍👦", "𝔘𝔫𝔦", "<b>bold & brave</b>", "&amp;", "`code`",
  '"quoted"', "'single'", "back\\slash", "C:\\new\\table", "${not} #{a} %s", "{\"json\": [1, null]}", "https://example.com/?a=1&b=2",
  "data: x", "event: end", "id: 7", "100%", "1,234.5", "—", "“smart”", "\u200b", "\ufeff", "\u0001", "*", "_x_", "[1](2)", "OR", "NEAR(", "\"\"",
];

/**
 * @param {number} seed
 * @param {{documents?: number, sentences?: number, questions?: number}} [size]  Sentences of each document, of about 70
 *        characters, and questions of the topic.
 * @returns {{documents: {id: string, title: string, text: string}[], topic: string}}  `topic` asks about words that the
 *          documents hold.
 */
export function research(seed, { documents: count = 4, sentences = 12, questions = 2 } = {}) {
  const next = random(seed);
  const pick = (list) => list[Math.floor(next() * list.length)];
  const word = () => Array.from({ length: 2 + Math.floor(next() * 3) }, () => pick(SYLLABLES)).join("");
  const words = Array.from({ length: 60 }, word);
  const subjects = Array.from({ length: questions }, (_, at) => `${word()}${SYLLABLES[at]}ix`);
  const sentence = () => {
    const length = 6 + Math.floor(next() * 8);
    const parts = Array.from({ length }, () => (next() < 0.15 ? pick(SPICE) : pick(words)));
    if (next() < 0.35) parts[Math.floor(next() * length)] = pick(subjects);
    return parts.join(" ") + pick(ENDINGS);
  };
  const documents = Array.from({ length: count }, (_, at) => ({
    id: `doc ${at}/${seed} ü`,
    title: `${word()} ${pick(SPICE)} ${at}`,
    text: `${subjects.join(" and ")} ${pick(SPICE)} ${at}. ` + Array.from({ length: sentences }, sentence).join(""),
  }));
  return { documents, topic: `What is ${subjects.slice(0, -1).join(", what is ")} and how does ${subjects.at(-1)} work?` };
}

/** Documents that keep six researchers busy for a while, and still fit into one request. */
export function slowResearch(seed) {
  return research(seed, { documents: 10, sentences: 1000, questions: 6 });
}

/** Every quotation of a report with the section it stands in. */
export function quotationsOf(report) {
  return report.sections.flatMap((section) => section.findings.map((finding) => ({ section, ...finding })));
}
