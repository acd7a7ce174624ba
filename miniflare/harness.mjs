// Both Workers in workerd, for the tests and for `cargo xtask dev`. This file and bench/runtime.mjs alone know Miniflare's
// API (version 4; with version 5 only `miniflareOptions` and `start` should have to change).
//
// Names, compatibility date and flags, classes, services with their props and variables come from `wrangler.toml`;
// the modules are those that `cargo xtask build` left in each Worker's `build` folder.

import { execFileSync } from "node:child_process";
import { randomBytes } from "node:crypto";
import { existsSync, mkdtempSync, readFileSync, readdirSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { basename, dirname, join, resolve } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { Log, LogLevel, Miniflare } from "miniflare";
import { parse } from "smol-toml";

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "..");
export const ROLES = ["producer", "consumer"];

// Miniflare brings a workerd of its own age; the one named in package.json is newer and knows our compatibility date.
const WORKERD = createRequire(import.meta.url)("workerd").default;

/**
 * @typedef {object} ExtraWorker  A Worker that runs beside the two.
 * @property {string} name
 * @property {string} [script]    An ES module with a default export.
 * @property {string} [built]     Instead of a script: the folder of a Worker that `cargo xtask build` has built.
 * @property {object} [objects]   Its classes of SQLite-backed objects by binding; `{of, className}` binds to those of
 *                                another extra Worker.
 * @property {object} [services]  Bindings: `{PRODUCER: {to: "producer", props: {mount: "internal"}}}`. `to` is
 *                                `"producer"`, `"consumer"` or another extra Worker's name.
 * @property {object} [vars]
 * @property {string[]} [kv]      Its namespaces of keys and values, by binding.
 * @property {string[]} [flags]   Compatibility flags beside those of `wrangler.toml`.
 *
 * @typedef {object} Options
 * @property {string} [root]      The folder of `wrangler.toml`.
 * @property {string} [persist]   Where the objects' databases live. Without it: a new folder, removed by `stop`.
 * @property {string | null} [apiKey]  The secret of both Workers; `null` leaves it unset. Default: random.
 * @property {{producer?: number, consumer?: number}} [ports]  Default: free ones.
 * @property {{producer?: object, consumer?: object}} [vars]   Added to the variables of `wrangler.toml`.
 * @property {{producer?: object, consumer?: object}} [ratelimits]  Added to the rate limiters of `wrangler.toml`, by
 *                                binding: `{RATE_LIMIT: {limit: 3, period: 60}}`.
 * @property {boolean} [assets]   `false` leaves the static files out.
 * @property {("producer" | "consumer")[]} [roles]  Which of the two run. Default: both. A consumer needs its producer.
 * @property {ExtraWorker[]} [extra]
 * @property {string} [producerVia]  An extra Worker that stands between the consumer and its `PRODUCER` binding. Give
 *                                   it a service to the producer with the props itself.
 * @property {"block" | "allow" | ((request: Request) => Response | Promise<Response>)} [outbound]  What becomes of
 *                                   requests to the outside. `"block"`, the default, answers 502 and counts them.
 * @property {string} [workersAi]  Where chat completions are that a binding `AI` of every Worker leads to, as the binding
 *                                 of Workers AI would to Cloudflare. Without it there is no such binding.
 * @property {boolean} [measured]  Has each built Worker tell at `/measures` what its module has taken (`miniflare/measured`).
 * @property {(line: string) => void} [onLog]  Told each line that workerd writes.
 */

/** Starts both Workers and waits until they take requests. @param {Options} [options] */
export async function startWorkers(options = {}) {
  const workers = new Workers(options);
  await workers.start();
  return workers;
}

/**
 * A free port below those that the system hands out for outgoing connections: one of those could be taken by any
 * program between a kill and the start after it.
 */
async function freePort() {
  for (let tries = 0; tries < 100; tries++) {
    const port = 20000 + Math.floor(Math.random() * 12000);
    const server = createServer();
    const free = await new Promise((done) => {
      server.once("error", () => done(false));
      server.listen(port, "127.0.0.1", () => server.close(() => done(true)));
    });
    if (free) return port;
  }
  throw new Error("no port from 20000 to 31999 is free on 127.0.0.1");
}

/** A request for the producer's raw mount, as the consumer's binding makes it; see `internalCaller`. */
const CALLER_SCRIPT = `export default {
  fetch(request, env) { return env.PRODUCER.fetch(request); },
};`;

/** A binding of Workers AI whose models are elsewhere; the name of one may be its address. */
const WORKERS_AI_SCRIPT = `export default (env) => ({
  run(model, inputs, { signal }) {
    const base = model.startsWith("http:") ? model : env.BASE_URL;
    const body = JSON.stringify({ model, ...inputs });
    return fetch(base + "/chat/completions", { method: "POST", headers: { "content-type": "application/json" }, body, signal, redirect: "manual" });
  },
});`;
const WORKERS_AI = "workers-ai";

/** An extra Worker whose URL reaches the producer with the props that open its internal mount. */
export function internalCaller(name = "caller") {
  return { name, script: CALLER_SCRIPT, services: { PRODUCER: { to: "producer", props: { mount: "internal" } } } };
}

class Workers {
  #options;
  #config;
  #miniflare;
  #ownsData;
  #ports;
  #pids = [];

  /** @param {Options} options */
  constructor(options) {
    this.#options = options;
    this.#config = parse(readFileSync(join(this.root, "wrangler.toml"), "utf8"));
    this.#ports = { ...options.ports };
    this.#ownsData = options.persist === undefined;
    /** The folder of the objects' databases. */
    this.data = options.persist ?? mkdtempSync(join(tmpdir(), "remote-agents-"));
    this.apiKey = options.apiKey === undefined ? randomBytes(16).toString("hex") : options.apiKey;
    /** Every line that workerd wrote to its standard output or error, over all restarts. @type {string[]} */
    this.logs = [];
    /** URLs of requests to the outside that were refused. @type {string[]} */
    this.blocked = [];
    /** Base URLs without a last slash: `urls.producer`, `urls.consumer`, and one per extra Worker. */
    this.urls = {};
  }

  get root() {
    return this.#options.root ?? ROOT;
  }

  /** The header that opens the mounts. */
  get authorization() {
    return { authorization: `Bearer ${this.apiKey}` };
  }

  /** Starts again on the same data and the same ports, after `kill`. */
  start() {
    return oneAtATime(() => this.#start());
  }

  async #start() {
    process.env.MINIFLARE_WORKERD_PATH = WORKERD;
    process.env.MINIFLARE_WORKERD_V8_FLAGS = this.#options.measured ? "--expose-gc" : "";
    const earlier = new Set(childPids().map(({ pid }) => pid));
    for (const name of [...this.#roles, ...this.#extra.map((worker) => worker.name)]) {
      this.#ports[name] ??= await freePort();
    }
    const miniflare = new Miniflare(this.#miniflareOptions());
    try {
      await miniflare.ready;
      for (const name of [...this.#roles, ...this.#extra.map((worker) => worker.name)]) {
        const url = await miniflare.unsafeGetDirectURL(this.#workerName(name));
        this.urls[name] = url.origin;
      }
    } catch (error) {
      await miniflare.dispose().catch(() => {});
      if (error.code === "ERR_ADDRESS_IN_USE") error.message = `A port is in use already. ${error.message}`;
      throw error;
    }
    this.#miniflare = miniflare;
    this.#pids = childPids()
      .filter(({ pid, name }) => name.startsWith("workerd") && !earlier.has(pid))
      .map(({ pid }) => pid);
  }

  /** Kills workerd at once, as a crash does: nothing is flushed, every connection breaks. `start` brings it back. */
  async kill() {
    for (const pid of this.workerdPids()) process.kill(pid, "SIGKILL");
    await this.#dispose();
  }

  async restart() {
    await this.kill();
    await this.start();
  }

  /** Ends workerd and removes the data if it was only this run's. */
  async stop() {
    await this.#dispose();
    if (this.#ownsData) rmSync(this.data, { recursive: true, force: true });
  }

  /** The process ids of workerd: one, none after `kill`. */
  workerdPids() {
    return this.#miniflare ? this.#pids : [];
  }

  /** The objects' databases on disk: `{role, className, path}` each; the role of an extra Worker's is its name. */
  databases() {
    return this.dataFiles()
      .filter((path) => path.endsWith(".sqlite"))
      .map((path) => {
        const folder = dirname(path);
        const worker = this.#classes.find(({ key }) => folder.endsWith(key));
        return { role: worker?.role, className: worker?.className, path };
      })
      .filter(({ role, path }) => role !== undefined && !path.endsWith("metadata.sqlite"));
  }

  /** Every file of the objects' data, write-ahead logs included. */
  dataFiles() {
    if (!existsSync(this.data)) return [];
    return readdirSync(this.data, { recursive: true, withFileTypes: true })
      .filter((entry) => entry.isFile())
      .map((entry) => join(entry.parentPath, entry.name));
  }

  get #roles() {
    return this.#options.roles ?? ROLES;
  }

  get #extra() {
    return this.#options.extra ?? [];
  }

  get #classes() {
    const ofRole = (role) => this.#environment(role).durable_objects.bindings.map(({ class_name: className }) => [role, className]);
    const ofExtra = ({ name, objects = {} }) => Object.values(objects).filter((own) => typeof own === "string").map((className) => [name, className]);
    return [...this.#roles.flatMap(ofRole), ...this.#extra.flatMap(ofExtra)].map(([role, className]) => ({
      role,
      className,
      key: `${this.#workerName(role)}-${className}`,
    }));
  }

  #environment(role) {
    const environment = this.#config.env?.[role];
    if (!environment) throw new Error(`wrangler.toml has no [env.${role}]`);
    return environment;
  }

  #workerName(role) {
    return ROLES.includes(role) ? this.#environment(role).name : role;
  }

  #miniflareOptions() {
    return {
      cf: false,
      host: "127.0.0.1",
      port: 0,
      log: new Log(LogLevel.NONE),
      durableObjectsPersist: this.data,
      handleRuntimeStdio: (...streams) => {
        for (const input of streams) createInterface({ input }).on("line", (line) => this.#log(line));
      },
      workers: [
        ...this.#roles.map((role) => this.#workerOptions(role)),
        ...this.#extra.map((worker) => this.#extraOptions(worker)),
        ...this.#workersAi(),
      ],
    };
  }

  #workerOptions(role) {
    const environment = this.#environment(role);
    const services = Object.fromEntries(
      (environment.services ?? []).map(({ binding, service, props }) => [binding, { name: service, props }]),
    );
    if (role === "consumer" && this.#options.producerVia) services.PRODUCER = { name: this.#options.producerVia };
    const secrets = this.apiKey === null ? {} : { API_KEY: this.apiKey };
    return {
      ...this.#assets(environment),
      ...this.#common(role),
      ...this.#built(resolve(this.root, environment.main)),
      bindings: { ...environment.vars, ...secrets, ...this.#options.vars?.[role] },
      durableObjects: classes(
        Object.fromEntries(environment.durable_objects.bindings.map(({ name, class_name: className }) => [name, className])),
      ),
      serviceBindings: services,
      ratelimits: Object.fromEntries(
        [...(environment.ratelimits ?? []).map(({ name, simple }) => [name, simple]), ...Object.entries(this.#options.ratelimits?.[role] ?? {})].map(
          ([name, simple]) => [name, { namespace_id: name, simple }],
        ),
      ),
    };
  }

  /** The static files of a Worker that runs before them, as `run_worker_first` says. */
  #assets({ assets }) {
    if (!assets || this.#options.assets === false) return {};
    const { directory, binding } = assets;
    const routerConfig = { invoke_user_worker_ahead_of_assets: true, has_user_worker: true };
    return { assets: { directory: resolve(this.root, directory), binding, routerConfig } };
  }

  #extraOptions({ name, script, built, objects = {}, services = {}, vars = {}, kv = [], flags = [] }) {
    return {
      ...this.#common(name, flags),
      ...(built === undefined
        ? { modules: [{ type: "ESModule", path: `${name}.mjs`, contents: script }] }
        : this.#built(resolve(this.root, built, "build/index.js"), `cargo xtask build ${name}`)),
      bindings: vars,
      kvNamespaces: kv,
      durableObjects: classes(objects),
      serviceBindings: Object.fromEntries(
        Object.entries(services).map(([binding, { to, props }]) => [binding, { name: this.#workerName(to), props }]),
      ),
    };
  }

  /** The modules of a built Worker. */
  #built(main, command = "cargo xtask build") {
    const wasm = join(dirname(main), "index_bg.wasm");
    for (const file of [main, wasm]) {
      if (!existsSync(file)) throw new Error(`${file} is missing: run \`${command}\``);
    }
    const measuring = ["entry.mjs", "counts.mjs"].map((name) => ({
      type: "ESModule",
      path: join(dirname(main), name),
      contents: readFileSync(join(ROOT, "miniflare/measured", name), "utf8"),
    }));
    return {
      modulesRoot: dirname(main),
      modules: [
        ...(this.#options.measured ? measuring : []),
        { type: "ESModule", path: main },
        { type: "CompiledWasm", path: wasm },
      ],
    };
  }

  #common(name, flags = []) {
    const { outbound = "block" } = this.#options;
    const options = {
      name: this.#workerName(name),
      compatibilityDate: this.#config.compatibility_date,
      compatibilityFlags: [...this.#config.compatibility_flags, ...flags],
      unsafeDirectSockets: [{ host: "127.0.0.1", port: this.#ports[name] }],
    };
    if (this.#options.workersAi) {
      options.wrappedBindings = { AI: { scriptName: WORKERS_AI, bindings: { BASE_URL: this.#options.workersAi } } };
    }
    if (outbound === "allow") return options;
    return { ...options, outboundService: outbound === "block" ? (request) => this.#refuse(request) : outbound };
  }

  /** What is behind the binding of Workers AI. */
  #workersAi() {
    if (!this.#options.workersAi) return [];
    return [{ name: WORKERS_AI, modules: [{ type: "ESModule", path: `${WORKERS_AI}.mjs`, contents: WORKERS_AI_SCRIPT }] }];
  }

  #refuse(request) {
    this.blocked.push(request.url);
    return new Response("requests to the outside are blocked", { status: 502 });
  }

  #log(line) {
    this.logs.push(line);
    this.#options.onLog?.(line);
  }

  async #dispose() {
    const miniflare = this.#miniflare;
    this.#miniflare = undefined;
    await miniflare?.dispose();
  }
}

/** One start after the other: what a start adds to this program's children is then its own. */
let turn = Promise.resolve();
function oneAtATime(work) {
  const done = turn.then(work);
  turn = done.catch(() => {});
  return done;
}

/** SQLite-backed classes by binding, as Miniflare wants them. */
function classes(byBinding) {
  return Object.fromEntries(
    Object.entries(byBinding).map(([binding, bound]) => {
      const { className = bound, of: scriptName } = bound;
      return [binding, { className, scriptName, useSQLite: true }];
    }),
  );
}

/** This process's children, from /proc where there is one, else from `ps`. */
function childPids() {
  if (!existsSync("/proc/self/stat")) return childPidsFromPs();
  return readdirSync("/proc")
    .filter((entry) => /^\d+$/.test(entry))
    .flatMap((entry) => {
      try {
        const stat = readFileSync(`/proc/${entry}/stat`, "utf8");
        // "pid (name) state ppid ..."; the name itself may hold parentheses and spaces.
        const [, name, rest] = /^\d+ \((.*)\) (.*)$/s.exec(stat);
        return Number(rest.split(" ")[1]) === process.pid ? [{ pid: Number(entry), name }] : [];
      } catch {
        return []; // The process ended between the two reads.
      }
    });
}

function childPidsFromPs() {
  const lines = execFileSync("ps", ["-axo", "pid=,ppid=,comm="], { encoding: "utf8" }).trim().split("\n");
  return lines
    .map((line) => /^\s*(\d+)\s+(\d+)\s+(.*)$/.exec(line))
    .filter((match) => match && Number(match[2]) === process.pid)
    .map(([, pid, , command]) => ({ pid: Number(pid), name: basename(command) }));
}
