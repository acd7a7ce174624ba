// The finished report, its quotations linked to the documents they are from.

import type { Json } from "../../client/src/index.ts";
import type { Source } from "./api.ts";
import { el } from "./dom.ts";

interface Report {
  topic: string;
  summary: string;
  sections: { question: string; findings: { documentId: string; quote: string }[] }[];
  sources: { documentId: string }[];
}

function isReport(output: unknown): output is Report {
  const report = output as Partial<Report> | null;
  return typeof report === "object" && report !== null && Array.isArray(report.sections) && Array.isArray(report.sources);
}

/** Draws the report. `documents` are those that the job was started with; others are not shown but for their quotations. */
export function drawReport(into: HTMLElement, session: string, output: Json | undefined, documents: Source[]): void {
  into.hidden = output === undefined;
  if (output === undefined) return;
  const title = (text: string) => el("h2", { id: "report-title" }, text);
  if (!isReport(output)) {
    into.replaceChildren(title("Output"), el("pre", {}, typeof output === "string" ? output : JSON.stringify(output, null, 2)));
    return;
  }
  const place = (id: string) => String(output.sources.findIndex((source) => source.documentId === id));
  const address = (id: string) => `#${new URLSearchParams({ session, document: place(id) })}`;
  const name = (id: string) => documents.find((document) => document.id === id)?.title ?? id;
  const sections = output.sections.map(({ question, findings }) =>
    el(
      "section",
      {},
      el("h3", {}, question),
      ...findings.map(({ documentId, quote }) => {
        const source = el("a", { href: address(documentId), "data-document": place(documentId) }, name(documentId));
        return el("blockquote", {}, quote, " ", el("cite", {}, "— ", source));
      }),
      findings.length === 0 && el("p", { class: "quiet" }, "Nothing was found."),
    ),
  );
  const quotes = (id: string) => output.sections.flatMap(({ findings }) => findings.filter((finding) => finding.documentId === id).map(({ quote }) => quote));
  const sources = output.sources.map(({ documentId }) => {
    const text = documents.find((document) => document.id === documentId)?.text;
    const body = text === undefined ? el("ul", {}, ...quotes(documentId).map((quote) => el("li", {}, el("mark", {}, quote)))) : marked(text, quotes(documentId));
    return el("details", { id: `document-${place(documentId)}`, class: "card" }, el("summary", {}, name(documentId)), body);
  });
  into.replaceChildren(title(output.topic), el("p", {}, output.summary), ...sections, el("h3", {}, "Documents"), ...sources);
  into.onclick = (event) => {
    // The address may be there already, and then nothing else would happen.
    const link = event.target instanceof Element ? event.target.closest<HTMLElement>("a[data-document]") : null;
    const { ctrlKey, metaKey, shiftKey } = event;
    if (link?.dataset.document !== undefined && !ctrlKey && !metaKey && !shiftKey) openDocument(link.dataset.document);
  };
}

/** Opens the document at a place of the report, where a quotation leads to. */
export function openDocument(place: string): void {
  const target = document.getElementById(`document-${place}`);
  if (!(target instanceof HTMLDetailsElement)) return;
  target.open = true;
  target.scrollIntoView();
  target.querySelector("summary")?.focus();
}

/** The text with its quotations marked. */
function marked(text: string, quotes: string[]): HTMLElement {
  const spans = quotes
    .map((quote) => ({ from: text.indexOf(quote), length: quote.length }))
    .filter(({ from }) => from >= 0)
    .sort((a, b) => a.from - b.from);
  const whole = el("p", { class: "said" });
  let at = 0;
  for (const { from, length } of spans) {
    if (from < at) continue;
    whole.append(text.slice(at, from), el("mark", {}, text.slice(from, from + length)));
    at = from + length;
  }
  whole.append(text.slice(at));
  return whole;
}
