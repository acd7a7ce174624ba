// The contestants in workerd: ours, the two hand-written peers, and the one on the npm package `agents`.

import { buildSync } from "esbuild";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { Log, LogLevel, Miniflare } from "miniflare";
import { parse } from "smol-toml";

const HERE = dirname(fileURLToPath(import.meta.url));
const ROOT = resolve(HERE, "../..");
const WORKERD = createRequire(import.meta.url)("workerd").default;
const PLATFORM = parse(readFileSync(join(ROOT, "wrangler.toml"), "utf8"));

const source = (name) => ({ type: "ESModule", path: join(HERE, name), contents: readFileSync(join(HERE, name), "utf8") });

/** Modules of a Worker whose object class is `className` of `module`, and `Counted` the same class with counted statements. */
function modules(root, module, className, rest) {
  const entry = `import worker, { ${className} as Inner } from "./${module}";
import { counted } from "./counted.mjs";
export default worker;
export { Inner };
export const Counted = counted(Inner);`;
  const at = (item) => ({ ...item, path: join(root, item.path.split("/").pop()) });
  return {
    modulesRoot: root,
    modules: [{ type: "ESModule", path: join(root, "entry.mjs"), contents: entry }, ...[...rest, source("counted.mjs")].map(at)],
  };
}

/** One way of keeping a log: how it is reached and what its frames hold. */
class Contestant {
  constructor(name, title, worker, { paths = peerPaths, perFrame = 1 } = {}) {
    Object.assign(this, { name, title, worker, paths, perFrame });
  }

  /** The stream of what comes after `from`. */
  sse(id, from) {
    return this.paths.sse(id, this.perFrame === 1 ? from : Math.floor(from / this.perFrame));
  }

  status(id) {
    return this.paths.status(id);
  }

  act(id, action, query = {}) {
    return this.paths.act(id, `${action}?${new URLSearchParams(query)}`);
  }
}

const peerPaths = {
  act: (id, action) => `/${id}/${action}`,
  status: (id) => `/${id}/status`,
  sse: (id, from) => `/${id}/sse?from=${from}`,
};

const ourPaths = {
  act: (id, action) => `/bench/${id}/${action}`,
  status: (id) => `/agents/bench/status?sessionId=${id}`,
  sse: (id, from) => `/agents/bench/sse?sessionId=${id}&fromSequence=${from}`,
};

/** All contestants whose modules can be found; `missing` says which cannot, and why. */
export function contestants(scratch) {
  const build = join(HERE, "worker/build");
  const file = (name, type) => ({ type, path: join(build, name) });
  const ours = modules(build, "index.js", "BenchAgents", [file("index.js", "ESModule"), file("index_bg.wasm", "CompiledWasm")]);
  const peers = (className) => modules(HERE, "peers.mjs", className, [source("peers.mjs")]);
  const all = [
    new Contestant("ours", "remote-agents", ours, { paths: ourPaths }),
    new Contestant("B", "JavaScript, a row per chunk", peers("B")),
    new Contestant("B2", "JavaScript, a row per commit", peers("B2")),
  ];
  const missing = {};
  try {
    const bundle = join(scratch, "agents.mjs");
    mkdirSync(scratch, { recursive: true });
    buildSync({
      entryPoints: [join(HERE, "agents.mjs")],
      outfile: bundle,
      bundle: true,
      format: "esm",
      platform: "neutral",
      mainFields: ["module", "main"],
      conditions: ["workerd", "worker", "import"],
      external: ["cloudflare:*", "node:*"],
      logLevel: "silent",
    });
    const module = { type: "ESModule", path: bundle, contents: readFileSync(bundle, "utf8") };
    all.push(new Contestant("A10", "agents 0.32.0, ten to a segment", modules(scratch, "agents.mjs", "Packed", [module]), { perFrame: 10 }));
  } catch (error) {
    missing.A10 = `agents 0.32.0 cannot be bundled: ${error.message.split("\n")[0]}`;
  }
  return { all, missing };
}

/**
 * Starts workerd with some contestants, each behind a URL of its own and with a hop before it.
 *
 * @param {Contestant[]} chosen
 * @param {{data: string, counted?: boolean, inspect?: boolean}} options  `data`: the folder of the databases;
 *   `inspect`: with the inspector, for a profiler.
 */
export async function startWorld(chosen, { data, counted = false, inspect = false }) {
  process.env.MINIFLARE_WORKERD_PATH = WORKERD;
  const earlier = new Set(children());
  const common = (name) => ({
    name,
    compatibilityDate: PLATFORM.compatibility_date,
    compatibilityFlags: PLATFORM.compatibility_flags,
    unsafeDirectSockets: [{ host: "127.0.0.1", port: 0 }],
  });
  const logs = [];
  const miniflare = new Miniflare({
    cf: false,
    host: "127.0.0.1",
    port: 0,
    log: new Log(LogLevel.NONE),
    durableObjectsPersist: data,
    ...(inspect ? { inspectorPort: 0 } : {}),
    handleRuntimeStdio: (...streams) => streams.forEach((stream) => stream.on("data", (text) => logs.push(String(text)))),
    workers: chosen.flatMap(({ name, worker }) => [
      {
        ...common(name),
        ...worker,
        durableObjects: { OBJECTS: { className: counted ? "Counted" : "Inner", useSQLite: true } },
      },
      { ...common(`${name}-hop`), ...worker, serviceBindings: { UP: { name } } },
    ]),
  });
  await miniflare.ready;
  const urls = {};
  const hops = {};
  for (const { name } of chosen) {
    urls[name] = (await miniflare.unsafeGetDirectURL(name)).origin;
    hops[name] = (await miniflare.unsafeGetDirectURL(`${name}-hop`)).origin;
  }
  const pid = children().find((child) => !earlier.has(child));
  const inspector = inspect ? await miniflare.getInspectorURL() : undefined;
  return { urls, hops, pid, logs, data, inspector, stop: () => miniflare.dispose() };
}

/** A fresh folder for databases: on disk under `scratch`, or backed by memory. */
export function freshData(scratch, storage) {
  const parent = storage === "disk" ? scratch : MEMORY;
  mkdirSync(parent, { recursive: true });
  return mkdtempSync(join(parent, "remote-agents-bench-"));
}

export const removeData = (folder) => rmSync(folder, { recursive: true, force: true });

const MEMORY = readdirSync("/").includes("dev") && exists("/dev/shm") ? "/dev/shm" : tmpdir();

function exists(folder) {
  try {
    readdirSync(folder);
    return true;
  } catch {
    return false;
  }
}

/** workerd processes that this program started. */
function children() {
  return readdirSync("/proc")
    .filter((entry) => /^\d+$/.test(entry))
    .filter((pid) => {
      try {
        const [, name, rest] = /^\d+ \((.*)\) (.*)$/s.exec(readFileSync(`/proc/${pid}/stat`, "utf8"));
        return Number(rest.split(" ")[1]) === process.pid && name.startsWith("workerd");
      } catch {
        return false;
      }
    })
    .map(Number);
}

/** Resident memory of a process, in MiB. */
export function residentMiB(pid) {
  return Number(/^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, "utf8"))[1]) / 1024;
}

/** Bytes that a process has caused to be written to storage. */
export function bytesWritten(pid) {
  return Number(/^write_bytes: (\d+)$/m.exec(readFileSync(`/proc/${pid}/io`, "utf8"))[1]);
}
