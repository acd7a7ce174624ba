// The page: the key, a new job, and the job under way. The job's id is in the address, so that a reload and another tab
// show the same tree; the key is in this tab's storage alone and is sent as a header.

import { Follower, httpSource, SourceError, type FollowerEvent, type Json } from "../../client/src/index.ts";
import { Api, Refusal, type Source } from "./api.ts";
import { Conversation } from "./conversation.ts";
import { byId, el, setText } from "./dom.ts";
import { drawReport, openDocument } from "./report.ts";
import { anotherRun } from "./runs.ts";
import { Tree } from "./tree.ts";
import { Usage } from "./usage.ts";

const KEY = "remote-agents-key";
const AGENT_TYPE = "writer";
/** Chunks of the writer behind which its conversation is longer. */
const SPOKEN = new Set(["run_started", "run_resumed", "step_committed"]);
/** Chunks behind which the tree has cost more. */
const COSTLY = new Set(["step_committed", "subagent_end"]);
/** How often the statuses of agents that come to their end are read, with a second between. */
const STATUS_READS = 10;
const BUSY = "The agents are still at work. Your message is kept: it can be sent when they are done.";

const notice = byId("notice");
const tree = new Tree(byId("tree"));
const conversation = new Conversation(byId("conversation"), byId("messages"));
const stop = byId<HTMLButtonElement>("stop");
const goOn = byId<HTMLButtonElement>("go-on");
const messageForm = byId<HTMLFormElement>("message-form");
const message = byId<HTMLTextAreaElement>("message");
const sendMessage = byId<HTMLButtonElement>("send-message");

let api: Api | undefined;
let documents: Source[] = [];
let following = new AbortController();
/** The job that is shown. */
let shown: string | undefined;
/** A message was refused because the agents are at work. */
let isWaiting = false;
/** What is said of a reading that failed: it is taken back when the line is there again. */
let unread = "";

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
  return new URLSearchParams(location.hash.slice(1)).get("session") || undefined;
}

/** The document that the address leads to, if there is such a one in the report. */
function openAddressed(): void {
  const document = new URLSearchParams(location.hash.slice(1)).get("document");
  if (document !== null) openDocument(document);
}

function route(): void {
  following.abort();
  say("");
  shown = undefined;
  isWaiting = false;
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
    return;
  }
  const isFromForm = ["key-form", "job-form"].some((id) => !byId(id).hidden);
  show("job");
  // What had the focus is not seen any more.
  if (isFromForm) byId("job-title").focus();
  shown = session;
  message.value = sessionStorage.getItem(draftOf(session)) ?? "";
  setText(byId("usage"), "");
  conversation.reset(api, session);
  attach(api, session);
}

/** Follows the job from its log on, in place of what was followed. */
function attach(api: Api, session: string): void {
  following.abort();
  following = new AbortController();
  void follow(api, session, following.signal);
}

/** Where a message that is not sent yet is kept over a reload. */
function draftOf(session: string): string {
  return `remote-agents-draft ${session}`;
}

function keepDraft(): void {
  if (shown === undefined) return;
  if (message.value === "") sessionStorage.removeItem(draftOf(shown));
  else sessionStorage.setItem(draftOf(shown), message.value);
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

/** Tells that something could not be read, unless nobody looks at it any more. */
function unreadable(what: string, signal: AbortSignal): (error: unknown) => void {
  return (error) => {
    if (signal.aborted) return;
    fail(error);
    if (error instanceof Refusal && error.status === 401) return;
    unread = `${what} could not be read. ${notice.textContent}`;
    say(unread);
  };
}

/** Follows one run after the other until the page leaves the job. */
async function follow(api: Api, session: string, signal: AbortSignal): Promise<void> {
  const usage = new Usage(api, session, signal, (text) => setText(byId("usage"), text));
  try {
    while (!signal.aborted) {
      const over = new AbortController();
      const runId = await followRun(api, session, usage, AbortSignal.any([signal, over.signal]));
      await anotherRun(api, session, runId, signal);
      over.abort();
    }
  } catch (error) {
    if (signal.aborted) return;
    stop.disabled = true;
    fail(error);
  }
}

/** Follows the present run to its end, and tells its id; an empty one where the line failed before. */
async function followRun(api: Api, session: string, usage: Usage, signal: AbortSignal): Promise<string | undefined> {
  const source = httpSource(session, { headers: () => api.headers(), childSnapshotPath: "/api/child-snapshot" });
  const follower = new Follower(source, { session, agentType: AGENT_TYPE });
  const line = byId("line");
  const readOn = () => void conversation.readOn().catch(unreadable("The conversation", signal));
  tree.reset(follower);
  drawReport(byId("report"), session, undefined, []);
  byId("threads").replaceChildren();
  setText(line, "joining");
  stop.disabled = false;
  goOn.hidden = true;
  sendMessage.disabled = true;
  messageForm.hidden = message.value === "";
  say(isWaiting ? BUSY : "");
  try {
    for await (const event of follower.follow(signal)) {
      if (event.kind === "node") tree.node(event.node);
      else if (event.kind === "restarted") {
        tree.reset(follower);
        tree.node(follower.root);
      }
      else if (event.kind === "chunk") {
        tree.chunk(event.chunk);
        if (event.chunk.agentId === session && SPOKEN.has(event.chunk.type)) readOn();
        if (COSTLY.has(event.chunk.type)) void usage.ask().catch(() => "the reading after the end tells");
      } else if (event.kind === "document") {
        tree.touch(event.node.session);
        drawThreads(follower);
        if (event.node === follower.root) drawTitle(follower);
      } else if (event.kind === "no_tree") unreadable("Agents that were called long ago", signal)(event.error);
      else drawLine(event, line);
      if (event.kind === "caught_up") {
        if (notice.textContent === unread) say("");
        readOn();
      }
      if (event.kind === "end" || event.kind === "failed") {
        ended(event, follower);
        void drawStatuses(api, session, signal).catch(unreadable("How each agent ended", signal));
        void usage.ask().catch(unreadable("What the job has cost", signal));
        if (event.kind === "failed") return event.error.runId;
        if (event.end.output !== undefined) void drawQuoting(api, session, event.end.output, signal);
        return event.end.runId;
      }
    }
  } catch (error) {
    if (signal.aborted) return "";
    if (!(error instanceof SourceError) || !error.retryable) throw error;
    setText(line, "connection lost, trying again");
    fail(error);
  }
  return "";
}

/** What each agent's own status is: a call that failed does not tell it. */
async function drawStatuses(api: Api, session: string, signal: AbortSignal): Promise<void> {
  for (let read = 0; read < STATUS_READS; read += 1) {
    const root = await api.tree(session);
    if (signal.aborted || tree.statuses(root)) return;
    await new Promise((resolve) => setTimeout(resolve, 1_000));
  }
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
  goOn.disabled = false;
  goOn.hidden = status !== "interrupted" && status !== "failed";
  messageForm.hidden = false;
  sendMessage.disabled = false;
  const offer = isWaiting ? "The run has ended: your message can be sent now." : "";
  isWaiting = false;
  say(event.kind === "failed" ? `The job failed: ${event.error.error} ${offer}` : offer);
  drawTitle(follower);
}

/** The report, its quotations in the documents that they are from: the service has them, whoever started the job. */
async function drawQuoting(api: Api, session: string, output: Json, signal: AbortSignal): Promise<void> {
  const quoted = await api.documents(session).catch((error: unknown) => {
    unreadable("The documents", signal)(error);
    return [];
  });
  if (signal.aborted) return;
  drawReport(byId("report"), session, output, quoted);
  openAddressed();
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

function addPasted(): void {
  const pasted = byId<HTMLTextAreaElement>("pasted");
  addDocument(pasted.value.trim().split("\n", 1)[0]?.slice(0, 80) || "Pasted text", pasted.value);
  pasted.value = "";
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
  addPasted();
  const submit = byId<HTMLFormElement>("job-form").querySelector<HTMLButtonElement>("button[type=submit]");
  if (submit) submit.disabled = true;
  api
    ?.start(session, byId<HTMLTextAreaElement>("topic").value, documents)
    .then(() => (location.hash = new URLSearchParams({ session }).toString()), fail)
    .finally(() => submit && (submit.disabled = false));
});

message.addEventListener("input", keepDraft);

messageForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const session = shown;
  // Return in a field may ask for it while the button is off.
  if (!api || session === undefined || sendMessage.disabled) return;
  const service = api;
  sendMessage.disabled = true;
  service.resume(session, message.value).then(
    () => {
      sessionStorage.removeItem(draftOf(session));
      if (session !== shown) return;
      message.value = "";
      attach(service, session);
    },
    (error: unknown) => {
      if (session !== shown) return;
      // The text stays where it is, so that it can be sent again.
      sendMessage.disabled = false;
      isWaiting = error instanceof Refusal && error.status === 409;
      if (isWaiting) attach(service, session);
      else fail(error);
    },
  );
});

stop.addEventListener("click", () => {
  stop.disabled = true;
  if (shown === undefined) return;
  api?.interrupt(shown).catch((error: unknown) => {
    stop.disabled = false;
    fail(error);
  });
});

goOn.addEventListener("click", () => {
  const [service, session] = [api, shown];
  if (!service || session === undefined) return;
  goOn.disabled = true;
  service.resume(session).then(
    () => session === shown && attach(service, session),
    (error: unknown) => {
      goOn.disabled = false;
      // Somebody else was faster.
      if (error instanceof Refusal && error.status === 409 && session === shown) attach(service, session);
      else fail(error);
    },
  );
});

byId("another").addEventListener("click", () => (location.hash = ""));
byId("forget-key").addEventListener("click", forgetKey);
byId("add-pasted").addEventListener("click", addPasted);
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
  // A quotation leads to a document of the same job.
  if (shown !== undefined && sessionOfAddress() === shown) openAddressed();
  else route();
});
route();
