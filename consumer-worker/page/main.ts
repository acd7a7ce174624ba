// The page: the key, a new job, and the job under way. The job's id is in the address, so that a reload and another tab
// show the same tree; the key is in this tab's storage alone and is sent as a header.

import { Follower, httpSource, SourceError, type FollowerEvent, type Json } from "../../client/src/index.ts";
import { Api, Refusal, type Source } from "./api.ts";
import { Conversation } from "./conversation.ts";
import { byId, el, setText } from "./dom.ts";
import { drawReport } from "./report.ts";
import { Tree } from "./tree.ts";

const KEY = "remote-agents-key";
const AGENT_TYPE = "writer";
/** Chunks of the writer behind which its conversation is longer. */
const SPOKEN = new Set(["run_started", "run_resumed", "step_committed"]);

const notice = byId("notice");
const tree = new Tree(byId("tree"));
const conversation = new Conversation(byId("conversation"), byId("messages"));
const stop = byId<HTMLButtonElement>("stop");
const goOn = byId<HTMLButtonElement>("go-on");
const messageForm = byId<HTMLFormElement>("message-form");
const message = byId<HTMLTextAreaElement>("message");

let api: Api | undefined;
let documents: Source[] = [];
let following = new AbortController();

function say(text: string): void {
  setText(notice, text);
  notice.hidden = text === "";
}

/** Shows one of the page's three faces. */
function show(face: "key-form" | "job-form" | "job"): void {
  for (const id of ["key-form", "job-form", "job"]) byId(id).hidden = id !== face;
  byId("forget-key").hidden = face === "key-form";
}

function sessionOfAddress(): string | undefined {
  return new URLSearchParams(location.hash.slice(1)).get("session") ?? undefined;
}

function route(): void {
  following.abort();
  const key = sessionStorage.getItem(KEY);
  if (key === null) {
    show("key-form");
    byId("key").focus();
    return;
  }
  api = new Api(key);
  const session = sessionOfAddress();
  if (session === undefined) {
    show("job-form");
    byId("topic").focus();
  } else {
    show("job");
    following = new AbortController();
    void follow(api, session, following.signal);
  }
}

function forgetKey(): void {
  sessionStorage.removeItem(KEY);
  route();
}

/** What went wrong, for a person. A key that is refused is asked for again. */
function fail(error: unknown): void {
  const status = error instanceof Refusal || error instanceof SourceError ? error.status : 0;
  if (status === 401) forgetKey();
  const texts: Record<number, string> = { 401: "The key is not the right one.", 404: "There is no such job." };
  say(texts[status] ?? (error instanceof Error ? error.message : String(error)));
}

async function follow(api: Api, session: string, signal: AbortSignal): Promise<void> {
  const source = httpSource(session, { headers: () => api.headers(), childSnapshotPath: "/api/child-snapshot" });
  const follower = new Follower(source, { session, agentType: AGENT_TYPE });
  const line = byId("line");
  tree.reset(follower);
  drawReport(byId("report"), undefined, []);
  conversation.reset(api, session);
  byId("threads").replaceChildren();
  setText(byId("usage"), "");
  setText(line, "joining");
  stop.disabled = false;
  goOn.hidden = true;
  messageForm.hidden = true;
  say("");
  try {
    for await (const event of follower.follow(signal)) {
      if (event.kind === "node") tree.node(event.node);
      else if (event.kind === "restarted") {
        tree.reset(follower);
        tree.node(follower.root);
      }
      else if (event.kind === "chunk") {
        tree.chunk(event.chunk);
        if (event.chunk.agentId === session && SPOKEN.has(event.chunk.type)) void conversation.readOn().catch((error: unknown) => signal.aborted || fail(error));
      }
      else if (event.kind === "document") {
        tree.touch(event.node.session);
        drawThreads(follower);
        if (event.node === follower.root) drawTitle(follower);
      } else drawLine(event, line);
      if (event.kind === "end" || event.kind === "failed") ended(event, follower);
      if (event.kind === "end" && event.end.output !== undefined) void drawQuoting(api, session, event.end.output, signal);
    }
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
  if (!signal.aborted) await api.usage(session).then(drawUsage, fail);
}

function drawLine(event: FollowerEvent, line: HTMLElement): void {
  if (event.kind === "caught_up") setText(line, "live");
  else if (event.kind === "reconnecting") setText(line, "connection lost, trying again");
  else if (event.kind === "end") setText(line, event.end.status);
  else if (event.kind === "failed") setText(line, "failed");
}

function drawTitle({ root }: Follower): void {
  const topic = (root.document.state as { topic?: unknown } | null)?.topic;
  setText(byId("job-title"), typeof topic === "string" && topic !== "" ? topic : "Job");
}

/** The threads of each agent that has some: how many are done. */
function drawThreads(follower: Follower): void {
  const lists = follower.nodes.flatMap(({ document }) => {
    const threads = (document.state as { threads?: unknown } | null)?.threads;
    return Array.isArray(threads) ? [threads as { question?: unknown; status?: unknown }[]] : [];
  });
  byId("threads").replaceChildren(
    ...lists
      .filter((threads) => threads.length > 0)
      .map((threads) => {
        const done = threads.filter(({ status }) => status !== "pending").length;
        const label = `${done} of ${threads.length} threads are researched`;
        return el("p", {}, label, el("progress", { value: done, max: threads.length, "aria-label": label }));
      }),
  );
}

function ended(event: FollowerEvent, follower: Follower): void {
  const status = event.kind === "end" ? event.end.status : "failed";
  tree.ended(status === "paused" ? "interrupted" : status);
  stop.disabled = true;
  goOn.hidden = status !== "interrupted" && status !== "failed";
  messageForm.hidden = false;
  if (event.kind === "failed") say(`The job failed: ${event.error.error}`);
  drawTitle(follower);
}

/** The report, its quotations in the documents that they are from: the service has them, whoever started the job. */
async function drawQuoting(api: Api, session: string, output: Json, signal: AbortSignal): Promise<void> {
  const quoted = await api.documents(session).catch(() => []);
  if (!signal.aborted) drawReport(byId("report"), output, quoted);
}

function drawUsage(rollup: unknown): void {
  const usage = rollup as { tokens?: { total?: number }; steps?: number; tools?: { calls?: number }; subAgents?: { calls?: number } } | undefined;
  const { tokens, steps, tools, subAgents } = usage ?? {};
  const text = `${tokens?.total ?? 0} tokens, ${steps ?? 0} steps, ${tools?.calls ?? 0} tool calls and ${subAgents?.calls ?? 0} calls of sub-agents, in the whole tree`;
  setText(byId("usage"), text);
}

function drawDocuments(): void {
  byId("documents").replaceChildren(
    ...documents.map((document) => {
      const remove = () => {
        documents = documents.filter((other) => other !== document);
        drawDocuments();
      };
      const button = el("button", { type: "button", "aria-label": `Remove ${document.title}`, onclick: remove }, "Remove");
      return el("li", {}, `${document.title} (${document.text.length} characters) `, button);
    }),
  );
}

function addDocument(title: string, text: string): void {
  if (text.trim() === "") return;
  const taken = new Set(documents.map(({ id }) => id));
  const base = title.replaceAll(/[^A-Za-z0-9._-]+/g, "-").slice(0, 60) || "document";
  let id = base;
  for (let n = 2; taken.has(id); n += 1) id = `${base}-${n}`;
  documents = [...documents, { id, title, text }];
  drawDocuments();
}

async function addFiles(files: Iterable<File>): Promise<void> {
  for (const file of files) addDocument(file.name, await file.text());
}

byId<HTMLFormElement>("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = byId<HTMLInputElement>("key");
  const key = input.value;
  input.value = "";
  new Api(key).check().then(() => {
    sessionStorage.setItem(KEY, key);
    say("");
    route();
  }, fail);
});

byId<HTMLFormElement>("job-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const session = `job-${crypto.randomUUID()}`;
  const submit = byId<HTMLFormElement>("job-form").querySelector<HTMLButtonElement>("button[type=submit]");
  if (submit) submit.disabled = true;
  api
    ?.start(session, byId<HTMLTextAreaElement>("topic").value, documents)
    .then(() => (location.hash = new URLSearchParams({ session }).toString()), fail)
    .finally(() => submit && (submit.disabled = false));
});

messageForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const session = sessionOfAddress();
  if (!api || session === undefined) return;
  api.resume(session, message.value).then(
    () => {
      message.value = "";
      route();
    },
    (error: unknown) => {
      // The text stays where it is, so that it can be sent again.
      fail(error);
      const isBusy = error instanceof Refusal && error.status === 409;
      if (isBusy) say("The agents are still at work. Your message is kept: send it again when they are done.");
    },
  );
});

stop.addEventListener("click", () => {
  const session = sessionOfAddress();
  stop.disabled = true;
  if (session !== undefined) api?.interrupt(session).catch(fail);
});

goOn.addEventListener("click", () => {
  const session = sessionOfAddress();
  if (session !== undefined) api?.resume(session).then(route, fail);
});

byId("another").addEventListener("click", () => (location.hash = ""));
byId("forget-key").addEventListener("click", forgetKey);
byId("add-pasted").addEventListener("click", () => {
  const pasted = byId<HTMLTextAreaElement>("pasted");
  addDocument(pasted.value.trim().split("\n", 1)[0]?.slice(0, 80) || "Pasted text", pasted.value);
  pasted.value = "";
});
byId<HTMLInputElement>("files").addEventListener("change", (event) => {
  const input = event.target as HTMLInputElement;
  void addFiles(input.files ?? []).then(() => (input.value = ""), fail);
});

const drop = byId("drop");
for (const type of ["dragover", "dragleave", "drop"]) {
  drop.addEventListener(type, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", type === "dragover");
    if (type === "drop") void addFiles((event as DragEvent).dataTransfer?.files ?? []).catch(fail);
  });
}

addEventListener("hashchange", () => {
  // A quotation's anchor is no other job.
  if (!location.hash.startsWith("#document-")) route();
});
route();

