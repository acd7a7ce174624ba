// What `cargo xtask dev` ends in: both Workers in workerd, their data and the development key under `--data`, and a
// first job to copy. Ctrl-C (or a plain kill) ends workerd and then this program.

import { randomBytes } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { startWorkers } from "./harness.mjs";

const { values } = parseArgs({ options: { port: { type: "string", default: "8787" }, data: { type: "string", default: ".data" } } });
const port = Number(values.port);

// What chooses the model of both Workers, where the environment has it; what each is, README says.
const MODEL = ["MODEL_PROVIDER", "MODEL_NAME", "MODEL_MAX_TOKENS", "MODEL_THINKING", "MODEL_STRUCTURED_OUTPUT", "OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"];
const model = Object.fromEntries(MODEL.filter((name) => process.env[name]).map((name) => [name, process.env[name]]));

const apiKey = developmentKey(values.data);
const started = performance.now();
let workers;
try {
  workers = await startWorkers({
    persist: join(values.data, "objects"),
    ports: { consumer: port, producer: port + 1 },
    apiKey,
    vars: { producer: model, consumer: model },
    outbound: "allow",
    onLog: (line) => console.log(`  | ${line}`),
  });
} catch (error) {
  console.error(`\nerror: the Workers could not be started: ${error.message}`);
  console.error("  what to do: see that the ports are free (`--port N` chooses others); `cargo xtask dev --fresh` forgets old data");
  process.exit(1);
}
console.log(`  ${"start both Workers".padEnd(50)} ${`${((performance.now() - started) / 1000).toFixed(1)} s`.padStart(8)}`);
console.log(firstJob(workers.urls, apiKey));

let isStopping = false;
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) {
  // Miniflare's own listeners would end this process before workerd has ended.
  process.removeAllListeners(signal);
  process.on(signal, async () => {
    if (isStopping) return;
    isStopping = true;
    await workers.stop();
    console.log("\nstopped; the data is kept in " + values.data);
    process.exit(0);
  });
}

/** A random key, made once and readable by its owner alone. */
function developmentKey(data) {
  const file = join(data, "api-key");
  if (!existsSync(file)) {
    mkdirSync(data, { recursive: true, mode: 0o700 });
    writeFileSync(file, `${randomBytes(24).toString("base64url")}\n`, { mode: 0o600, flag: "wx" });
  }
  return readFileSync(file, "utf8").trim();
}

/** Each step of a first job as a command that can be pasted into a shell. */
function firstJob({ consumer, producer }, key) {
  const sessionId = `demo-${randomBytes(3).toString("hex")}`;
  const body = {
    sessionId,
    message: "How do tides arise, and when are tides highest?",
    state: {
      documents: [
        {
          id: "moon",
          title: "The Moon and the sea",
          text: "Tides arise because the Moon pulls the near side of the Earth harder than its far side. The sea swells on both sides, so most coasts see two high tides a day.",
        },
        {
          id: "springs",
          title: "Spring tides",
          text: "When Sun and Moon stand in one line their pulls add up. Such spring tides are the highest of the month; neap tides follow a week later.",
        },
      ],
    },
  };
  return `
  consumer                ${consumer}
  producer, public mount  ${producer}
  development key         ${key}

A page to start jobs on and to watch them; it asks for the key once:

  ${consumer}/

A first job by hand. Paste this once:

  export KEY='${key}'

Start the writer on two documents of its own:

  curl -sS -X POST '${consumer}/agents/writer/start' -H "Authorization: Bearer $KEY" -H 'Content-Type: application/json' -d '${JSON.stringify(body)}'

Follow what it and its sub-agents do, to the end:

  curl -sSN '${consumer}/agents/writer/sse?sessionId=${sessionId}' -H "Authorization: Bearer $KEY"

The same as a UI message stream of the AI SDK:

  curl -sSN '${consumer}/agents/writer/ui?sessionId=${sessionId}' -H "Authorization: Bearer $KEY"

Its status with the report, its state, what it cost:

  curl -sS '${consumer}/agents/writer/status?sessionId=${sessionId}' -H "Authorization: Bearer $KEY"
  curl -sS '${consumer}/agents/writer/snapshot?sessionId=${sessionId}' -H "Authorization: Bearer $KEY"
  curl -sS '${consumer}/agents/writer/usage?sessionId=${sessionId}' -H "Authorization: Bearer $KEY"

What the producer offers to the public, a planner whose state is projected:

  curl -sS '${producer}/agents' -H "Authorization: Bearer $KEY"

Ctrl-C ends both.
`;
}
