// One picture: how the cost of an append and of an attach grows with the length of the log.

import { median } from "./measures.mjs";

const COLOURS = { ours: "#0b6e4f", B: "#d08c2c", B2: "#3f6fb5", A10: "#b3403a" };
const [WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM] = [420, 300, 58, 48, 20, 46];

export function picture({ samples, contestants, about }) {
  const storage = samples.memory ? "memory" : "disk";
  const panels = [
    ["append at", "microsecondsPerCommit", "Append of ten chunks, µs"],
    ["attach", "attach", "Attach near the tail, ms"],
  ];
  const drawn = panels.map(([what, unit, title], n) => {
    const lines = contestants.map(({ name }) => ({
      name,
      points: about.lengths.flatMap((length) => {
        const values = samples[storage]?.[`${what} ${length}`]?.[name]?.[unit];
        return values ? [[length, median(values)]] : [];
      }),
    }));
    return `<g transform="translate(${n * WIDTH} 0)">${panel(title, lines, about.lengths)}</g>`;
  });
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${WIDTH * panels.length} ${HEIGHT}" font-family="system-ui, sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#fff"/>
${drawn.join("\n")}
</svg>
`;
}

function panel(title, lines, lengths) {
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value)).filter((value) => value > 0);
  if (values.length === 0) return `<text x="${LEFT}" y="24">${title}: not measured</text>`;
  const decades = [Math.floor(Math.log10(Math.min(...values))), Math.ceil(Math.log10(Math.max(...values)))];
  if (decades[0] === decades[1]) decades[1] += 1;
  const [shortest, longest] = [Math.log10(Math.min(...lengths)), Math.log10(Math.max(...lengths))];
  const x = (length) => LEFT + ((Math.log10(length) - shortest) / Math.max(0.001, longest - shortest)) * (WIDTH - LEFT - RIGHT - 70);
  const y = (value) => HEIGHT - BOTTOM - ((Math.log10(value) - decades[0]) / (decades[1] - decades[0])) * (HEIGHT - TOP - BOTTOM);
  const parts = [`<text x="${LEFT}" y="24" font-size="14" font-weight="600">${title}</text>`];
  for (let decade = decades[0]; decade <= decades[1]; decade += 1) {
    const at = y(10 ** decade).toFixed(1);
    parts.push(`<line x1="${LEFT}" x2="${WIDTH - RIGHT - 70}" y1="${at}" y2="${at}" stroke="#ddd"/>`);
    parts.push(`<text x="${LEFT - 8}" y="${Number(at) + 4}" text-anchor="end" fill="#555">${Number((10 ** decade).toPrecision(1))}</text>`);
  }
  for (const length of lengths) {
    const label = length >= 1_000_000 ? `${length / 1_000_000}M` : `${length / 1000}k`;
    parts.push(`<text x="${x(length).toFixed(1)}" y="${HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555">${label}</text>`);
  }
  parts.push(`<text x="${LEFT}" y="${HEIGHT - 10}" fill="#555">chunks in the log; both axes logarithmic</text>`);
  const names = [];
  for (const { name, points } of lines) {
    if (points.length === 0) continue;
    const path = points.map(([length, value]) => `${x(length).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    parts.push(`<polyline points="${path}" fill="none" stroke="${COLOURS[name] ?? "#666"}" stroke-width="${name === "ours" ? 3 : 1.5}"/>`);
    const [length, value] = points.at(-1);
    names.push({ name, x: x(length) + 6, y: y(value) + 4 });
  }
  // Names of lines that end at one place are set below each other.
  names.sort((a, b) => a.y - b.y);
  names.forEach((label, n) => (label.y = Math.max(label.y, (names[n - 1]?.y ?? -99) + 13)));
  for (const { name, x: left, y: top } of names) {
    parts.push(`<text x="${left.toFixed(1)}" y="${top.toFixed(1)}" fill="${COLOURS[name] ?? "#666"}">${name}</text>`);
  }
  return parts.join("\n");
}
