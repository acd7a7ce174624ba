// A scripted model for the research job, as a function from a request (as chat completions have it) to an answer of aimock.
// It quotes the first two passages of each search and hands everything else on as it got it, so that the report of a job
// is known beforehand: `expected` computes it from what the tools said.

const QUOTED = 2;

/** What each answer costs, in tokens. */
export const COST = 15;
const usage = { prompt_tokens: 10, completion_tokens: 5, total_tokens: COST };

/** Answers with the next step of whichever agent asks; `script.searches` has what each thread was given and found. */
export function researchScript() {
  const searches = new Map();
  return { searches, answer: (request) => ({ usage, ...AGENTS[agentTypeOf(request)]({ ...history(request), searches }) }) };
}

/** The sections that the script implies, by what it read of the searches. */
export function expectedSections(searches) {
  return [...searches.values()]
    .map(({ threadId, question, quoted }) => ({ threadId, question, findings: quoted }))
    .sort((a, b) => a.threadId.localeCompare(b.threadId));
}

/** The type of the agent that asks, by its tools. */
export function agentTypeOf({ tools }) {
  const names = new Set(tools.map((tool) => tool.function.name));
  const [, agentType] = Object.entries(OWN_TOOLS).find(([tool]) => names.has(tool)) ?? [];
  if (!agentType) throw new Error(`an agent of nobody's, with the tools ${[...names].join(", ")}`);
  return agentType;
}

const OWN_TOOLS = { subagent__research: "writer", plan: "planner", search: "thread-researcher" };
const AGENTS = { writer, planner, "thread-researcher": researcher };

/** The first words of the user, and the results by the name of their tool, in order. */
function history({ messages }) {
  const names = new Map(messages.flatMap(({ tool_calls: calls = [] }) => calls ?? []).map((call) => [call.id, call.function.name]));
  const results = messages
    .filter(({ role }) => role === "tool")
    .map(({ tool_call_id: id, content }) => ({ name: names.get(id), value: parse(content) }));
  const of = (name) => results.filter((result) => result.name === name).map(({ value }) => value);
  const said = messages.find(({ role }) => role === "user").content;
  return { said: typeof said === "string" ? said : said.map(({ text }) => text ?? "").join(""), of };
}

function writer({ said, of }) {
  // A call that was stopped has a result, too.
  const results = of("subagent__research");
  const report = results.map((result) => find(result, "sections")).find(Boolean);
  if (!report && results.length > 1) throw new Error(`no report: ${JSON.stringify(results)}`);
  if (!report) return calls(["subagent__research", { message: said }]);
  return { content: `# ${report.topic}\n\n${report.summary}`, ...calls(["finish", report]) };
}

function planner({ said, of }) {
  const [plan] = of("plan");
  if (!plan) return calls(["plan", { topic: said }]);
  // Those that were stopped had nothing to report.
  if (!of("subagent__thread-researcher").some((result) => find(result, "findings"))) {
    return calls(...find(plan, "threads").threads.map(({ threadId, question }) => ["subagent__thread-researcher", { threadId, question }]));
  }
  const [report] = of("compose");
  if (!report) return calls(["compose", {}]);
  return { content: "The report.", ...calls(["finish", find(report, "sections")]) };
}

function researcher({ said, of, searches }) {
  const { threadId, question } = JSON.parse(said);
  const [found] = of("search");
  if (!found) return calls(["search", { query: question }]);
  const quoted = find(found, "passages").passages.slice(0, QUOTED);
  searches.set(threadId, { threadId, question, quoted });
  if (quoted.length > 0 && of("record_finding").length === 0) return calls(...quoted.map((quotation) => ["record_finding", quotation]));
  return { content: "Found.", ...calls(["finish", { threadId, question, findings: quoted }]) };
}

const calls = (...list) => ({ toolCalls: list.map(([name, value]) => ({ name, arguments: JSON.stringify(value) })) });

/** The object with this field, wherever it stands in a result. */
function find(value, field) {
  if (value === null || typeof value !== "object") return undefined;
  if (field in value) return value;
  for (const inner of Object.values(value)) {
    const found = find(inner, field);
    if (found) return found;
  }
  return undefined;
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
