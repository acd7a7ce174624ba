// Results as Markdown.

import { median } from "./measures.mjs";

const number = (value) => {
  if (value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", " ");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
};

/** Median, and the least and greatest in brackets. */
const spread = (values) => {
  if (!values) return "–";
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return values.length === 1 ? number(values[0]) : `${number(median(values))} (${number(low)}–${number(high)})`;
};

const UNITS = {
  chunksPerSecond: "chunks/s",
  microsecondsPerCommit: "µs a commit",
  p50: "p50 ms",
  p99: "p99 ms",
  writerLate: "ms the writer is late, p99",
  total: "ms",
  firstByte: "ms to the first chunk",
  mbPerSecond: "MB/s",
  worstWait: "ms, worst wait of another request",
  attach: "ms",
  withIsolate: "ms, the first object of a new isolate",
  kbPerTurn: "KB written a turn",
  mib: "MiB",
  perStep: "ms a step",
  turnPerSecond: "chunks/s through the loop",
  status: "ms more a status",
};

export function markdown(results) {
  const { about, contestants, samples, facts, goals, missing } = results;
  const lines = ["# Benchmark", ""];
  lines.push(
    `${about.runs} run${about.runs === 1 ? "" : "s"}${about.quick ? ", quick (a smoke run: its numbers mean little)" : ""}, ${about.seconds} s, ${about.cores} × ${about.cpu}, load ${number(about.load)}, Node ${about.node}, commit ${about.commit}.`,
    "Median, with the least and the greatest in brackets. Only ratios within one run mean something.",
    "",
  );
  for (const { name, title } of contestants) lines.push(`- **${name}**: ${title}`);
  for (const [name, why] of Object.entries(missing)) lines.push(`- **${name}** is missing: ${why}`);
  lines.push("", "## Goals", "", "| goal | storage | wanted | got | |", "|---|---|---|---|---|");
  for (const { goal, storage, wanted, got, met } of goals) {
    lines.push(`| ${goal} | ${storage ?? ""} | ${wanted} | ${number(got)} | ${met === undefined ? "not measured" : met ? "met" : "**missed**"} |`);
  }
  for (const [storage, measures] of Object.entries(samples)) {
    lines.push("", `## ${storage === "disk" ? "On disk" : "Backed by memory"}`, "");
    lines.push(`| | | ${contestants.map(({ name }) => name).join(" | ")} |`, `|---|---|${contestants.map(() => "---|").join("")}`);
    for (const [what, byName] of Object.entries(measures)) {
      const units = [...new Set(Object.values(byName).flatMap(Object.keys))];
      for (const unit of units) {
        lines.push(`| ${what} | ${UNITS[unit] ?? unit} | ${contestants.map(({ name }) => spread(byName[name]?.[unit])).join(" | ")} |`);
      }
    }
  }
  if (facts.rows) {
    lines.push("", "## Rows", "", "Written by a turn of 400 chunks of 200 bytes, ten to a commit; the database holds 100 000 chunks.", "");
    lines.push("| | log rows | all rows | database / JSON | rows by compaction a row | |", "|---|---|---|---|---|---|");
    for (const [name, { logRows, allRows, sizeRatio, extraRows, rows }] of Object.entries(facts.rows)) {
      const each = Object.entries(rows).map(([what, count]) => `${what} ${count}`);
      lines.push(`| ${name} | ${logRows} | ${allRows} | ${number(sizeRatio)} | ${number(extraRows)} | ${each.join(", ")} |`);
    }
  }
  for (const failure of facts.failures ?? []) lines.push("", `Failed: ${failure}`);
  return `${lines.join("\n")}\n`;
}
