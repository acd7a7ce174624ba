// The harness and the event reader themselves; what the Workers do is tested in `test/`.

import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { test } from "node:test";
import { internalCaller, startWorkers } from "./harness.mjs";
import { openEvents, parseEvents, readEvents } from "./sse.mjs";

const echo = {
  name: "echo",
  script: `export default { async fetch(request, env, ctx) {
    const { pathname } = new URL(request.url);
    if (pathname === "/log") { console.log("a line of the echo worker"); return new Response("logged"); }
    if (pathname === "/outside") return fetch("https://example.com/a");
    if (pathname === "/events") {
      const encoder = new TextEncoder();
      return new Response(new ReadableStream({
        start(controller) { controller.enqueue(encoder.encode("id: 1\\nevent: chunk\\ndata: {}\\n\\n")); },
      }), { headers: { "content-type": "text/event-stream" } });
    }
    return Response.json({ props: ctx.props ?? {}, colour: env.COLOUR });
  } };`,
  vars: { COLOUR: "blue" },
};
const toEcho = {
  name: "to-echo",
  script: "export default { fetch(request, env) { return env.ECHO.fetch(request); } };",
  services: { ECHO: { to: "echo", props: { mount: "internal" } } },
};

async function collect(...chunks) {
  const events = [];
  for await (const event of parseEvents(chunks.map((chunk) => Buffer.from(chunk)))) events.push(event);
  return events;
}

test("events are read however the bytes are cut", async () => {
  const text = "\uFEFFid: 7\r\nevent: chunk\r\ndata: ä\r\ndata:b\r\n\r\n: ping\n\nretry\ndata\n\n";
  const bytes = [...Buffer.from(text)];
  const whole = await collect(text);
  const cut = await collect(...bytes.map((byte) => [byte]));
  assert.deepEqual(cut, whole);
  assert.deepEqual(
    whole.map(({ event, id, data, comments }) => ({ event, id, data, comments })),
    [
      { event: "chunk", id: "7", data: "ä\nb", comments: [] },
      { event: "message", id: undefined, data: undefined, comments: ["ping"] },
      { event: "message", id: undefined, data: "", comments: [] },
    ],
  );
  assert.deepEqual(Buffer.concat(whole.map((event) => event.bytes)), Buffer.from(bytes));
});

test("an event cut short by the end of the stream is told apart", async () => {
  const events = await collect("data: 1\n\n", "data: 2\n");
  assert.deepEqual(events.map(({ data, partial = false }) => [data, partial]), [["1", false], ["2", true]]);
  assert.equal((await collect("data: 3\r\r"))[0].partial, undefined);
});

test("both Workers and extra ones run, crash and come back on the same data and ports", async (t) => {
  const lines = [];
  const logged = Promise.withResolvers();
  const workers = await startWorkers({
    extra: [echo, toEcho, internalCaller()],
    onLog: (line) => {
      lines.push(line);
      if (line.includes("echo worker")) logged.resolve();
    },
  });
  t.after(() => workers.stop());
  const json = async (url) => (await fetch(url)).json();

  for (const role of ["producer", "consumer"]) {
    const response = await fetch(`${workers.urls[role]}/no-such-path`);
    assert.equal(response.status, 404, `${role} answers`);
  }
  assert.deepEqual(await json(workers.urls.echo), { props: {}, colour: "blue" });
  assert.deepEqual(await json(workers.urls["to-echo"]), { props: { mount: "internal" }, colour: "blue" });

  assert.equal((await fetch(`${workers.urls.echo}/outside`)).status, 502);
  assert.deepEqual(workers.blocked, ["https://example.com/a"]);

  await fetch(`${workers.urls.echo}/log`);
  await logged.promise;
  assert.deepEqual(workers.logs, lines);

  const { events } = await readEvents(`${workers.urls.echo}/events`, {}, ({ event }) => event === "chunk");
  assert.equal(events[0].raw, "id: 1\nevent: chunk\ndata: {}\n\n");

  const [pid, ...others] = workers.workerdPids();
  assert.deepEqual(others, []);
  const urls = { ...workers.urls };
  const stream = await openEvents(`${workers.urls.echo}/events`);
  const broken = assert.rejects(async () => {
    for await (const _ of stream.events);
  });
  await workers.kill();
  await broken;
  assert.deepEqual(workers.workerdPids(), []);
  assert.throws(() => process.kill(pid, 0), { code: "ESRCH" });
  await workers.start();
  assert.deepEqual(workers.urls, urls);
  assert.deepEqual(await json(workers.urls.echo), { props: {}, colour: "blue" });
  assert.ok(existsSync(workers.data));
  await workers.stop();
  assert.ok(!existsSync(workers.data));
});
