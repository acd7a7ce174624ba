// The page in a real browser, with both Workers in workerd behind it.

import assert from "node:assert/strict";
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { isDeepStrictEqual } from "node:util";
import puppeteer from "puppeteer-core";
import { ROOT } from "../harness.mjs";
import { startCuts } from "../test/support/cuts.mjs";
import { research } from "../test/support/documents.mjs";
import { startGated } from "../test/support/gate.mjs";
import { send } from "../test/support/http.mjs";
import { nodesOf } from "../test/support/tree.mjs";
import { eventually, newSession, settled, startWorld } from "../test/support/world.mjs";

/** For a person to look at. */
const PICTURES = join(ROOT, "target/pages");
const SECONDS = 120;

let world;
/** Another one, at the gate of whose model a test holds whom it wants to see at work. */
let held;
let browser;
/** Lines that can be cut, in front of the consumers. */
let cuts;
let heldCuts;
const complaints = [];

before(async () => {
  mkdirSync(PICTURES, { recursive: true });
  world = await startWorld();
  held = await startGated({ apiKey: world.workers.apiKey });
  cuts = await startCuts(world.workers.urls.consumer);
  heldCuts = await startCuts(held.workers.urls.consumer);
  browser = await puppeteer.launch({
    executablePath: process.env.CHROME?.includes("/") ? process.env.CHROME : await which(process.env.CHROME ?? "chromium"),
    args: ["--no-sandbox", "--disable-dev-shm-usage"],
  });
});
after(async () => {
  await browser?.close();
  await cuts?.stop();
  await heldCuts?.stop();
  await held?.stop();
  await world?.stop();
});

async function which(program) {
  const { execFileSync } = await import("node:child_process");
  return execFileSync("which", [program], { encoding: "utf8" }).trim();
}

/** A tab of its own storage, as of another person, with the key in place when `key`. */
async function open({ session, key = true, context, base = world.workers.urls.consumer } = {}) {
  const own = context ?? (await browser.createBrowserContext());
  const tab = await own.newPage();
  tab.on("pageerror", (error) => complaints.push(`error: ${error}`));
  tab.on("console", (message) => {
    const text = message.text();
    // The network's own lines: refused answers and the connection that a test cuts.
    if (message.type() === "error" && !text.startsWith("Failed to load resource")) complaints.push(`console: ${text}`);
  });
  const { apiKey } = world.workers;
  if (key) await tab.evaluateOnNewDocument((key) => sessionStorage.setItem("remote-agents-key", key), apiKey);
  await tab.goto(`${base}/${session === undefined ? "" : `#session=${session}`}`);
  return tab;
}

/** What the page shows of the tree: per session its labels and its state as text. */
function shown(tab) {
  return tab.$$eval("article[data-session]", (cards) =>
    Object.fromEntries(
      cards.map((card) => {
        const own = (selector) => [...card.querySelectorAll(selector)].filter((element) => element.closest("article") === card);
        const state = own("tbody tr").map((row) => [row.querySelector("th").textContent, row.querySelector("td").textContent]);
        const parent = card.parentElement.closest("article");
        return [card.dataset.session, { labels: own(".pill").map((pill) => pill.textContent), state: Object.fromEntries(state), parent: parent?.dataset.session }];
      }),
    ),
  );
}

/** The same as the page writes it, from a snapshot. */
function written(state) {
  return Object.fromEntries(Object.entries(state).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value, null, 1)]));
}

function waitFor(tab, what, check, ...values) {
  return tab.waitForFunction(check, { timeout: SECONDS * 1000, polling: "mutation" }, ...values).catch((error) => {
    throw new Error(`the page never showed ${what}: ${error}`);
  });
}

const isLine = (text) => document.querySelector("#line")?.textContent === text;
const hasAgents = (count) => document.querySelectorAll("article[data-session]").length >= count;
/** Every card says that its state is the last one. */
const isFinal = () => {
  const cards = [...document.querySelectorAll("article[data-session]")];
  return cards.length > 0 && cards.every((card) => [...card.querySelectorAll(":scope > .bar > .pill")].some((pill) => pill.textContent === "final"));
};

async function start(session, { documents, topic }, { writer } = world) {
  const { status, text } = await writer.start({ sessionId: session, message: topic, state: { documents } });
  assert.equal(status, 200, text);
}

/** Researchers wait once they have searched, so that there is a state to see. */
function holdResearchers() {
  held.gate.hold("thread-researcher", { which: ({ messages }) => messages.some(({ role }) => role === "tool") });
}

/** Waits until every tab shows the agents, places, statuses and states that the tree route tells, and all the same labels. */
async function showTheTree(tabs, session, { writer } = world) {
  const told = nodesOf((await writer.tree(session)).json);
  const expected = Object.fromEntries(told.map(({ sessionId, parent, status, state }) => [sessionId, { parent, status, state: written(state) }]));
  const seen = (tree) => Object.fromEntries(Object.entries(tree).map(([id, { parent, labels, state }]) => [id, { parent, status: labels[0], state }]));
  let trees;
  const isShown = async () => {
    trees = await Promise.all(tabs.map(shown));
    return trees.every((tree) => isDeepStrictEqual(seen(tree), expected) && isDeepStrictEqual(tree, trees[0])) || undefined;
  };
  await eventually("every tab shows the tree", isShown, 20).catch(() => {
    for (const tree of trees) assert.deepEqual(seen(tree), expected);
    for (const tree of trees) assert.deepEqual(tree, trees[0]);
  });
  return Object.fromEntries(told.map(({ sessionId, status }) => [sessionId, status]));
}

/** The tree of a finished job as the service has it. */
async function assertIsTheTruth(tree, session, { writer, child } = world) {
  assert.ok(Object.keys(tree).length >= 4, `writer, planner and researchers: ${Object.keys(tree)}`);
  for (const [id, card] of Object.entries(tree)) {
    const type = card.parent === undefined ? "writer" : card.parent === session ? "planner" : "thread-researcher";
    const { json } = id === session ? await writer.snapshot(id) : await child.snapshot(id, type);
    assert.deepEqual(card.state, written(json.state), id);
  }
  // The tree route has the same sessions in the same places, with the same states.
  const { json } = await writer.tree(session);
  const nodes = nodesOf(json).map(({ sessionId, parent, state }) => [sessionId, { parent, state: written(state) }]);
  const cards = Object.entries(tree).map(([id, { parent, state }]) => [id, { parent, state }]);
  assert.deepEqual(Object.fromEntries(cards), Object.fromEntries(nodes));
}

/** What the page shows of the conversation. */
function spoken(tab) {
  return tab.$$eval("#messages > li", (items) => items.map((item) => [item.querySelector("strong").textContent, item.querySelector(".said")?.textContent ?? ""]));
}

/** The conversation as the service has it, as the page shows it. */
async function conversationOf(session, { writer } = world) {
  const { json } = await writer.messages(session, { limit: 200 });
  const told = json.messages.filter(({ role }) => role !== "tool");
  return told.map(({ role, text }) => [role === "user" ? "You" : "Writer", text.trim()]);
}

const hasSaid = (count) => document.querySelectorAll("#messages > li").length >= count;

describe("the page's files", () => {
  test("come with the headers that a browser needs", async () => {
    for (const [path, type] of Object.entries({ "/": "text/html", "/app.js": "text/javascript", "/style.css": "text/css", "/icon.svg": "image/svg+xml" })) {
      const { status, headers, bytes } = await send(world.workers.urls.consumer, { path });
      assert.equal(status, 200, path);
      assert.ok(bytes.length > 100, path);
      assert.ok(headers["content-type"].startsWith(type), `${path}: ${headers["content-type"]}`);
      assert.match(headers["content-security-policy"], /^default-src 'self';/);
      assert.equal(headers["x-content-type-options"], "nosniff");
    }
    const { status, json } = await send(world.workers.urls.consumer, { path: "/app.css" });
    assert.deepEqual([status, json.code], [404, "NOT_FOUND"]);
  });

  test("are not needed by anything else", async () => {
    const bare = await startWorld({ assets: false });
    try {
      const { status, json } = await send(bare.workers.urls.consumer, { path: "/" });
      assert.deepEqual([status, json.code], [404, "NOT_FOUND"]);
      assert.equal((await bare.writer.list()).status, 200);
    } finally {
      await bare.stop();
    }
  });
});

describe("the page", () => {
  test("asks for the key once, and starts a job on pasted documents", async () => {
    const tab = await open({ key: false });
    await waitFor(tab, "the question for the key", () => !document.querySelector("#key-form").hidden);
    await tab.screenshot({ path: join(PICTURES, "key.png") });
    await tab.type("#key", "not-the-key");
    await tab.keyboard.press("Enter");
    await waitFor(tab, "a refusal", () => document.querySelector("#notice").textContent.includes("key"));
    await tab.type("#key", world.workers.apiKey);
    await tab.keyboard.press("Enter");
    await waitFor(tab, "the new job", () => !document.querySelector("#job-form").hidden);
    // By the keyboard alone: the topic has the focus.
    const script = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>";
    await tab.keyboard.type(`What is a zorblax ${script}?`);
    await tab.$eval("#pasted", (pasted, text) => (pasted.value = text), `A zorblax is a lamp ${script} of brass. Every zorblax burns oil.`);
    await tab.focus("#add-pasted");
    await tab.keyboard.press("Enter");
    // Not added, and not lost.
    await tab.$eval("#pasted", (pasted) => (pasted.value = "Another zorblax is a coil."));
    await tab.focus("#job-form > button[type=submit]");
    await tab.keyboard.press("Enter");
    await waitFor(tab, "the end", isLine, "completed");
    assert.equal(await tab.evaluate(() => document.activeElement.id), "job-title", "the focus goes to the job");
    const session = await tab.evaluate(() => new URLSearchParams(location.hash.slice(1)).get("session"));
    const { json } = await send(world.workers.urls.consumer, { path: `/api/documents?sessionId=${session}`, headers: world.workers.authorization });
    assert.deepEqual(json.documents.map(({ title }) => title).at(-1), "Another zorblax is a coil.");
    await waitFor(tab, "last states", isFinal);
    await waitFor(tab, "the report", () => !document.querySelector("#report").hidden);
    // Read from the service when the job has ended, so it stands there a request later.
    await waitFor(tab, "what the job has cost", () => /^[1-9]\d* tokens/.test(document.querySelector("#usage").textContent));
    assert.match(await tab.$eval("#report", (report) => report.textContent), /burns oil/);
    assert.match(await tab.$eval("#report", (report) => report.textContent), /<script>window\.hacked/);
    assert.equal(await tab.evaluate(() => window.hacked), undefined, "markup is text");
    assert.equal(await tab.$$eval("main script, main img", (found) => found.length), 0);
    await tab.click("#report blockquote a");
    assert.equal(await tab.$$eval("#report details[open]", (details) => details.length), 1, "a quotation leads to its document");
    // Its address leads there as well, in a tab of its own.
    const other = await open();
    await other.goto(await tab.$eval("#report blockquote a", ({ href }) => href));
    await waitFor(other, "the document of the quotation", () => document.querySelector("#report details[open]") !== null);
    assert.equal(await other.$eval("#job", ({ hidden }) => hidden), false);
    await other.close();
    assert.ok(!tab.url().includes(world.workers.apiKey), "the key is in no address");
    await tab.screenshot({ path: join(PICTURES, "finished.png"), fullPage: true });
    await tab.close();
  });

  test("shows the same tree to who joins late, reloads, or loses the network", async () => {
    const session = newSession("watched");
    const [first, second] = [await open({ base: held.workers.urls.consumer }), await open({ base: heldCuts.url })];
    holdResearchers();
    await start(session, research(3), held);
    await first.goto(`${held.workers.urls.consumer}/#session=${session}`);
    await waitFor(first, "some agents", hasAgents, 4);
    await first.screenshot({ path: join(PICTURES, "running.png"), fullPage: true });

    await second.goto(`${heldCuts.url}/#session=${session}`);
    await waitFor(second, "the agents that it missed", hasAgents, 4);
    heldCuts.cut();
    await waitFor(second, "that its connection is lost", isLine, "connection lost, trying again");
    await first.reload();
    await waitFor(first, "the tree again", hasAgents, 4);
    heldCuts.mend();
    held.gate.open();

    for (const tab of [first, second]) {
      await waitFor(tab, "the end", isLine, "completed");
      await waitFor(tab, "last states", isFinal);
    }
    await showTheTree([first, second], session, held);
    await assertIsTheTruth(await shown(first), session, held);
    assert.equal(await second.$eval("#notice", (notice) => notice.textContent), "", "nothing is said of a line that is there again");
    const conversation = await conversationOf(session, held);
    for (const tab of [first, second]) {
      await waitFor(tab, "the whole conversation", hasSaid, conversation.length);
      assert.deepEqual(await spoken(tab), conversation);
    }
    await first.close();
    await second.close();
  });

  test("shows who comes late the conversation, and the documents with their quotations marked", async () => {
    const session = newSession("late");
    const script = "<script>window.hacked = 1</script>";
    const text = `A zorblax is a lamp ${script} of brass. Every zorblax burns oil. Nobody quotes this last one.`;
    const topic = `What is a zorblax ${script}?`;
    await start(session, { topic, documents: [{ id: "lamps", title: `Of lamps ${script}`, text }] });
    await settled(world.writer, session, "completed");
    const more = await world.writer.post("resume", { sessionId: session, mode: "with_message", message: "And what does a zorblax burn?" });
    assert.equal(more.status, 200, more.text);
    await settled(world.writer, session, "completed");
    const tab = await open({ session });
    await waitFor(tab, "the end", isLine, "completed");
    await waitFor(tab, "the report", () => !document.querySelector("#report").hidden);
    const conversation = await conversationOf(session);
    assert.deepEqual(conversation.filter(([who]) => who === "You").map(([, said]) => said), [topic, "And what does a zorblax burn?"]);
    await waitFor(tab, "the conversation", hasSaid, conversation.length);
    assert.deepEqual(await spoken(tab), conversation, "markup in it is text");
    await tab.click("#report blockquote a");
    const quoted = await tab.$eval("#report details[open]", (details) => ({
      title: details.querySelector("summary").textContent,
      text: details.querySelector(".said").textContent,
      marks: [...details.querySelectorAll("mark")].map((mark) => mark.textContent),
    }));
    assert.deepEqual([quoted.title, quoted.text], [`Of lamps ${script}`, text], "the whole document, in a tab that did not start the job");
    assert.ok(quoted.marks.length > 0 && quoted.marks.every((mark) => text.includes(mark)));
    assert.equal(await tab.evaluate(() => window.hacked), undefined);
    assert.equal(await tab.$$eval("main script, main img", (found) => found.length), 0);
    await tab.screenshot({ path: join(PICTURES, "late.png"), fullPage: true });
    await tab.close();
  });

  test("stops a run and goes on with it, and so does the tab that watches", async () => {
    const session = newSession("stopped");
    holdResearchers();
    await start(session, research(4), held);
    const base = held.workers.urls.consumer;
    const [tab, watching] = [await open({ session, base }), await open({ session, base })];
    for (const each of [tab, watching]) await waitFor(each, "the agents", hasAgents, 4);
    await tab.click("#stop");
    for (const each of [tab, watching]) await waitFor(each, "the stop", isLine, "interrupted");
    assert.equal((await held.writer.status(session)).json.status, "interrupted");
    const stopped = await showTheTree([tab, watching], session, held);
    assert.deepEqual(new Set([...Object.values(stopped), "completed"]), new Set(["interrupted", "completed"]), "nobody failed");
    await tab.screenshot({ path: join(PICTURES, "stopped.png"), fullPage: true });
    await tab.waitForSelector("#go-on:not([hidden])");
    held.gate.open();
    await tab.click("#go-on");
    for (const each of [tab, watching]) await waitFor(each, "the end", isLine, "completed");
    await settled(held.writer, session, "completed");
    const ended = await showTheTree([tab, watching], session, held);
    assert.ok(Object.keys(ended).length > Object.keys(stopped).length, "it went on with other agents");
    await tab.close();
    await watching.close();
  });

  test("shows the next run to a tab that has seen the end of the one before", async () => {
    const session = newSession("next");
    await start(session, research(7));
    const [asking, watching] = [await open({ session }), await open({ session })];
    for (const tab of [asking, watching]) await waitFor(tab, "the end", isLine, "completed");
    const before = await conversationOf(session);
    await asking.type("#message", "And what about brass?");
    await asking.click("#message-form button");
    for (const tab of [asking, watching]) {
      await waitFor(tab, "the follow-up", hasSaid, before.length + 1);
      await waitFor(tab, "its end", isLine, "completed");
    }
    await settled(world.writer, session, "completed");
    await showTheTree([asking, watching], session);
    const conversation = await conversationOf(session);
    for (const tab of [asking, watching]) {
      await waitFor(tab, "the whole conversation", hasSaid, conversation.length);
      assert.deepEqual(await spoken(tab), conversation);
    }
    await asking.close();
    await watching.close();
  });

  test("reads again what broke off, and says what it could not read", async () => {
    const session = newSession("broken");
    await start(session, research(11));
    await settled(world.writer, session, "completed");
    const conversation = await conversationOf(session);
    for (const path of ["/usage", "/messages", "/api/documents"]) cuts.breakOff(path, 1);
    const mended = await open({ session, base: cuts.url });
    await waitFor(mended, "what the job has cost", () => /^[1-9]\d* tokens/.test(document.querySelector("#usage").textContent));
    await waitFor(mended, "the conversation", hasSaid, conversation.length);
    await waitFor(mended, "the whole documents", () => document.querySelector("#report details .said") !== null);
    assert.deepEqual(["/usage", "/messages", "/api/documents"].map(cuts.left), [0, 0, 0], "each was broken off once");
    await mended.close();

    const said = { usage: "What the job has cost", messages: "The conversation", documents: "The documents" };
    const tellsOf = async ([route, what]) => {
      const job = newSession(route);
      await start(job, research(12));
      await settled(world.writer, job, "completed");
      cuts.breakOff(`/${route}?sessionId=${job}`, Infinity);
      const tab = await open({ session: job, base: cuts.url });
      await waitFor(tab, `that ${route} cannot be read`, (what) => document.querySelector("#notice").textContent.startsWith(`${what} could not be read.`), what);
      await waitFor(tab, "the end", isLine, "completed");
      if (route === "usage") assert.equal(await tab.$eval("#usage", (usage) => usage.textContent), "", "no number is made up");
      await tab.close();
    };
    await Promise.all(Object.entries(said).map(tellsOf));

    // A start whose answer breaks off is sent again under its key, and is one start.
    cuts.breakOff("/start", 1);
    const tab = await open({ base: cuts.url });
    await tab.type("#topic", "What is a tide?");
    await tab.click("#job-form > button[type=submit]");
    await waitFor(tab, "the end", isLine, "completed");
    assert.equal(cuts.left("/start"), 0);
    await tab.close();
  });

  test("shows what a run has cost while it works, with one reading in two seconds", async () => {
    const session = newSession("cost");
    holdResearchers();
    await start(session, research(12), held);
    const from = heldCuts.requests.length;
    const tab = await open({ session, base: heldCuts.url });
    await waitFor(tab, "a cost while it works", () => /^[1-9]\d* tokens/.test(document.querySelector("#usage").textContent) && ["joining", "live"].includes(document.querySelector("#line").textContent));
    held.gate.open();
    await waitFor(tab, "the end", isLine, "completed");
    const { rollup } = (await held.writer.usage(session)).json;
    await waitFor(tab, "the cost of all", (total) => document.querySelector("#usage").textContent.startsWith(`${total} tokens`), rollup.tokens.total);
    const times = heldCuts.requests.slice(from).filter(({ path }) => path.includes("/usage?")).map(({ at }) => at);
    const gaps = times.slice(1).map((at, index) => at - times[index]);
    // Two seconds in the page; on the way here one request may take longer than another.
    assert.ok(gaps.length > 0 && gaps.every((gap) => gap > 1000), `apart from each other: ${gaps}`);
    await tab.close();
  });

  test("keeps a message that is refused because the agents are busy, and offers it again", async () => {
    const session = newSession("busy");
    await start(session, research(8), held);
    await settled(held.writer, session, "completed");
    const tab = await open({ session, base: held.workers.urls.consumer });
    await waitFor(tab, "the end", isLine, "completed");
    // Somebody else is faster.
    await tab.type("#message", "And what about brass?");
    held.gate.hold("writer");
    const more = await held.writer.post("resume", { sessionId: session, mode: "with_message", message: "And what about copper?" });
    assert.equal(more.status, 200, more.text);
    await tab.click("#message-form button");
    await waitFor(tab, "a refusal", () => document.querySelector("#notice").textContent.includes("kept"));
    assert.equal(await tab.$eval("#message", (message) => message.value), "And what about brass?");
    held.gate.open();
    await waitFor(tab, "the offer, when the run that it found has ended", () => document.querySelector("#notice").textContent.includes("can be sent now"));
    assert.deepEqual(await tab.$eval("#send-message", ({ disabled }) => disabled), false);
    assert.deepEqual(await spoken(tab), await conversationOf(session, held), "it shows the run that was faster");
    await tab.reload();
    await waitFor(tab, "the end again", isLine, "completed");
    assert.equal(await tab.$eval("#message", (message) => message.value), "And what about brass?", "kept over a reload");
    await tab.click("#message-form button");
    await eventually("the message is taken", async () => ((await tab.$eval("#message", (message) => message.value)) === "" ? true : undefined));
    await waitFor(tab, "the end", isLine, "completed");
    await tab.reload();
    await waitFor(tab, "the end", isLine, "completed");
    assert.equal(await tab.$eval("#message", (message) => message.value), "", "what is sent is not kept");
    await tab.close();
  });

  test("works on a phone and in the dark", async () => {
    const session = newSession("phone");
    await start(session, research(10));
    await settled(world.writer, session, "completed");
    const tab = await open({ session });
    await tab.setViewport({ width: 360, height: 740, isMobile: true, deviceScaleFactor: 2 });
    await tab.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
    await waitFor(tab, "the end", isLine, "completed");
    await waitFor(tab, "last states", isFinal);
    const width = await tab.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(width <= 360, `nothing sticks out to the side: ${width}`);
    const [ink, paper] = await tab.evaluate(() => [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]);
    const light = (colour) => colour.match(/\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0);
    assert.ok(light(ink) > light(paper), "light on dark");
    await tab.screenshot({ path: join(PICTURES, "phone-dark.png"), fullPage: true });
    await tab.close();
  });

  test("complained of nothing meanwhile", () => {
    assert.deepEqual(complaints, []);
  });
});
