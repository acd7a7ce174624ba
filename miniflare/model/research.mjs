// Which tools the agents of the research job may call next: the order of their instructions, for a model that is too small to
// keep to one by itself.

/** As many threads are researched, and as many quotations are recorded of each. */
const MOST = 2;
const FINISH = { of: ["finish"], speaks: true };

/** @type {Parameters<typeof import("./endpoint.mjs").startEndpoint>[1]} */
export function nextOfResearch({ tools, results }) {
  const first = (order) => order.find((name) => results(name).length === 0);
  if (tools.includes("subagent__research")) return first(["subagent__research"]) ? { of: ["subagent__research"] } : FINISH;
  if (tools.includes("plan")) {
    const name = first(["plan", "subagent__thread-researcher", "compose"]);
    return name ? { of: [name], most: name === "subagent__thread-researcher" ? MOST : 1 } : FINISH;
  }
  const searches = results("search");
  if (searches.length === 0) return { of: ["search"] };
  if (results("record_finding").length > 0) return FINISH;
  const isFound = searches.at(-1).passages?.length > 0;
  if (searches.length < MOST) return { of: isFound ? ["record_finding", "search"] : ["search"], most: MOST };
  return isFound ? { of: ["record_finding"], most: MOST } : FINISH;
}
