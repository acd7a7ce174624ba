// `cargo xtask bench`: measures, then prints a table and which goals are met. Results go to `target/bench`.
//
// Contestants take turns within each run, in an order that turns with it, so that what else the machine does falls on all
// of them. Times differ from machine to machine and hour to hour: only the ratios of one run mean something.

import { execFileSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { cpus, loadavg } from "node:os";
import { join, resolve } from "node:path";
import { parseArgs } from "node:util";
import { contestants, freshData, removeData, startWorld } from "./runtime.mjs";
import * as measure from "./measures.mjs";
import { Site } from "./measures.mjs";
import { goals } from "./goals.mjs";
import { markdown } from "./report.mjs";
import { picture } from "./picture.mjs";

const { values: asked } = parseArgs({
  options: {
    out: { type: "string", default: "target/bench" },
    quick: { type: "boolean", default: false },
    runs: { type: "string" },
    storage: { type: "string", default: "memory,disk" },
    only: { type: "string" },
    without: { type: "string", default: "" },
    attaches: { type: "string" },
    longest: { type: "string" },
  },
});

const quick = asked.quick;
const runs = Number(asked.runs ?? (quick ? 1 : 5));
const storages = quick ? ["memory"] : asked.storage.split(",");
const scale = quick ? 0.1 : 1;
const LENGTHS = [1_000, 10_000, 100_000, 1_000_000].filter((n) => n <= Number(asked.longest ?? (quick ? 10_000 : 1_000_000)));
const REPLAYED = quick ? 10_000 : 100_000;
const ATTACHES = Number(asked.attaches ?? (quick ? 200 : 10_000));
const PARTS = ["append", "live", "log", "cold", "rows", "memory", "loop"];
const parts = asked.only?.split(",") ?? PARTS;
for (const part of parts) if (!PARTS.includes(part)) throw new Error(`--only knows ${PARTS.join(", ")}`);

const out = resolve(asked.out);
mkdirSync(out, { recursive: true });
const { all: found, missing } = contestants(join(out, "scratch"));
const chosen = found.filter(({ name }) => !asked.without.split(",").includes(name));
const say = (text) => process.stderr.write(`${text}\n`);
for (const why of Object.values(missing)) say(why);

/** Values by storage, measure, contestant and number: `samples.memory["append 1 x 200"].ours.chunksPerSecond = [..]`. */
const samples = {};
const facts = {};

function keep(storage, what, name, numbers) {
  const place = (((samples[storage] ??= {})[what] ??= {})[name] ??= {});
  for (const [number, value] of Object.entries(numbers)) (place[number] ??= []).push(value);
}

/** Whatever fails is told in the end; the rest goes on. */
function failed(what, error) {
  say(`${what}: ${error.stack}`);
  (facts.failures ??= []).push(`${what}: ${error.message}`);
}

/** Runs `work` for each contestant in turn, `times` times. */
async function alternate(storage, what, times, who, work) {
  const began = performance.now();
  for (let run = 0; run < times; run += 1) {
    for (let n = 0; n < who.length; n += 1) {
      const one = who[(n + run) % who.length];
      try {
        keep(storage, what, one.name, await work(one));
      } catch (error) {
        failed(`${storage}, ${what}, ${one.name}`, error);
      }
    }
  }
  say(`${storage}: ${what} (${((performance.now() - began) / 1000).toFixed(1)} s)`);
}

/** A folder of its own for each use, removed afterwards. */
async function withData(storage, work) {
  const data = freshData(join(out, "scratch"), storage);
  try {
    return await work(data);
  } finally {
    removeData(data);
  }
}

async function inOneWorld(storage) {
  await withData(storage, async (data) => {
    const world = await startWorld(chosen, { data });
    const sites = chosen.map((contestant) => new Site(contestant, world));
    const inOrder = { append: appends, live: lives, log: logs, loop: loops };
    try {
      // Compilers make code fast in stages: nobody is measured in the first one.
      for (const site of sites) await measure.append(site, { per: 10, bytes: 200, commits: 500 });
      for (const [part, work] of Object.entries(inOrder)) {
        if (parts.includes(part)) await work(storage, sites).catch((error) => failed(`${storage}, ${part}`, error));
      }
      if (facts.failures) say(world.logs.filter((line) => !line.includes('"level":"info"')).join("").slice(-4000));
    } finally {
      await world.stop();
    }
  });
}

async function appends(storage, sites) {
  for (const bytes of [200, 4000]) {
    for (const per of [1, 10, 100]) {
      const commits = Math.ceil({ 1: 2000, 10: 1000, 100: 200 }[per] * scale * (bytes > 200 && per === 100 ? 0.5 : 1));
      // Short and often: what else the machine does comes and goes within a second.
      await alternate(storage, `append ${per} x ${bytes}`, quick ? 1 : runs * 3, sites, (site) => measure.append(site, { per, bytes, commits }));
    }
  }
  if (storage === "disk") {
    await alternate(storage, "written", runs, sites, (site) => measure.written(site, { turns: 10 }));
  }
}

async function lives(storage, sites) {
  for (const readers of [1, 10, 100]) {
    const ticks = Math.ceil(400 * (quick ? 0.25 : 1));
    await alternate(storage, `live ${readers}`, runs, sites, (site) => measure.live(site, { readers, ticks, everyMs: 5 }));
  }
}

async function logs(storage, sites) {
  const last = {};
  for (const length of LENGTHS) {
    const who = [];
    for (const site of sites) {
      const began = performance.now();
      try {
        (last[site.name] ??= {})[length] = await site.fill(`log-${length}`, length);
        who.push(site);
      } catch (error) {
        failed(`${storage}, a log of ${length}, ${site.name}`, error);
      }
      say(`${storage}: ${site.name} filled with ${length} (${((performance.now() - began) / 1000).toFixed(1)} s)`);
    }
    const id = `log-${length}`;
    // First, while no reader has come and gone: one that is forgotten could slow appends down.
    await alternate(storage, `append at ${length}`, runs, who, async (site) => {
      const { ms, last: newest } = await site.post(id, "append", { commits: Math.ceil(300 * scale), per: 10, bytes: 200 });
      last[site.name][length] = newest;
      return { microsecondsPerCommit: (ms * 1000) / Math.ceil(300 * scale) };
    });
    await alternate(storage, `attach ${length}`, runs, who, (site) =>
      measure.attach(site, { id, last: last[site.name][length], times: quick ? 5 : 20 }),
    );
    if (length === REPLAYED) {
      await alternate(storage, "replay", runs, who, (site) => measure.replay(site, { id, last: last[site.name][length] }));
      await alternate(storage, "replay over a hop", runs, who, (site) =>
        measure.replay(site, { id, last: last[site.name][length], base: site.hop }),
      );
      await alternate(storage, "hop", runs, who, (site) => measure.hop(site, { id, last: last[site.name][length], times: quick ? 10 : 50 }));
    }
    for (const site of who) await site.post(id, "finish");
  }
}

async function loops(storage, sites) {
  const ours = sites.filter(({ name }) => name === "ours");
  await alternate(storage, "loop", runs, ours, (site) => measure.loop(site, { steps: Math.ceil(100 * scale) }));
  await alternate(storage, "live over a hop", runs, sites, (site) =>
    measure.live(site, { readers: 1, ticks: Math.ceil(400 * scale), everyMs: 5, base: site.hop }),
  );
}

const started = performance.now();
for (const storage of storages) {
  await inOneWorld(storage);
  write();
}
if (parts.includes("cold")) {
  await alternate("disk", "cold", quick ? 1 : Math.min(runs, 3), chosen, (contestant) =>
    withData("disk", (data) => measure.cold(contestant, { data, objects: quick ? 3 : 10 })),
  );
}
if (parts.includes("rows")) {
  for (const contestant of chosen) {
    facts.rows ??= {};
    try {
      facts.rows[contestant.name] = await withData("memory", (data) => measure.rows(contestant, { data }));
    } catch (error) {
      failed(`rows, ${contestant.name}`, error);
    }
  }
}
if (parts.includes("memory")) {
  await alternate("memory", "unread", quick ? 1 : runs, chosen, (contestant) =>
    withData("memory", (data) => measure.unread(contestant, { data, chunks: REPLAYED })),
  );
  facts.attaches = ATTACHES;
  await alternate("memory", "churn", quick ? 1 : Math.min(runs, 3), chosen, (contestant) =>
    withData("memory", (data) => measure.churn(contestant, { data, times: ATTACHES })),
  );
}

const table = write();
removeData(join(out, "scratch"));
process.stdout.write(`${table}\n`);
if (facts.failures) process.exitCode = 1;

/** Writes what there is so far; gives the table. */
function write() {
  const results = {
    about: {
      quick,
      runs,
      parts,
      storages,
      lengths: LENGTHS,
      replayed: REPLAYED,
      seconds: Math.round((performance.now() - started) / 1000),
      cpu: cpus()[0]?.model,
      cores: cpus().length,
      load: loadavg()[0],
      node: process.version,
      commit: commit(),
    },
    contestants: chosen.map(({ name, title }) => ({ name, title })),
    missing,
    facts,
    samples,
  };
  results.goals = goals(results);
  const text = markdown(results);
  writeFileSync(join(out, "results.json"), `${JSON.stringify(results, null, 1)}\n`);
  writeFileSync(join(out, "results.md"), text);
  writeFileSync(join(out, "cost.svg"), picture(results));
  return text;
}

function commit() {
  try {
    return execFileSync("git", ["describe", "--always", "--dirty"], { encoding: "utf8" }).trim();
  } catch {
    return undefined;
  }
}
