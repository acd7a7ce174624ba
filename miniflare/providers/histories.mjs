// Reads the conversations that are sent to a model's provider: each tool call in them must have exactly one result, right
// behind the answer that made it.

/**
 * What is wrong with the conversation of a request's body, in the dialect of chat completions or of Anthropic's messages.
 *
 * @param {{messages: object[]}} body
 * @returns {string[]}  Nothing when each call is answered once.
 */
export function violationsOf({ messages }) {
  const wrong = [];
  const used = new Set();
  let open;
  const close = (at) => {
    for (const [id, answers] of open ?? []) if (answers !== 1) wrong.push(`before message ${at}: call ${id} has ${answers} results`);
    open = undefined;
  };
  messages.forEach((message, at) => {
    const { calls, results, isResult, says } = read(message);
    if (!isResult) close(at);
    for (const id of results) {
      if (open?.has(id)) open.set(id, open.get(id) + 1);
      else wrong.push(`message ${at}: a result of ${id}, which was not called right before`);
    }
    // What a user says in the message of the results stands behind them.
    if (isResult && says) close(at);
    for (const id of calls) {
      if (used.has(id)) wrong.push(`message ${at}: the id ${id} is used twice`);
      used.add(id);
    }
    if (calls.length > 0) open = new Map(calls.map((id) => [id, 0]));
  });
  close("the end");
  return wrong;
}

function read({ role, content, tool_calls: toolCalls, tool_call_id: toolCallId }) {
  if (role === "tool") return { calls: [], results: [toolCallId], isResult: true, says: false };
  const blocks = Array.isArray(content) ? content : [];
  const results = blocks.filter(({ type }) => type === "tool_result").map((block) => block.tool_use_id);
  const calls = [
    ...(toolCalls ?? []).map(({ id }) => id),
    ...blocks.filter(({ type }) => type === "tool_use").map(({ id }) => id),
  ];
  return { calls, results, isResult: results.length > 0, says: blocks.some(({ type }) => type === "text") };
}
