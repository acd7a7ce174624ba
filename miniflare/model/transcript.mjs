// A run with a real model as a person reads it: what was asked, and each answer.

/** @returns {string}  Markdown; long values are shortened. */
export function transcriptOf({ topic, answers, output }) {
  const lines = [`Topic: ${topic}`, ""];
  answers.filter(({ error }) => !error).forEach(({ asked, text, calls, usage }, at) => {
    const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: { cached_tokens: cached } } = usage;
    lines.push(`${at + 1}. ${agentOf(asked)} (${prompt} tokens read, ${cached} of them cached; ${written} written)`);
    const latest = asked.messages.at(-1);
    lines.push(`   - ${latest.role}: ${shortened(latest.content)}`);
    if (text) lines.push(`   - says: ${shortened(text)}`);
    for (const call of calls) lines.push(`   - calls \`${call.name}\`: ${shortened(JSON.stringify(call.arguments))}`);
  });
  return `${lines.join("\n")}\n\nReport:\n\n\`\`\`json\n${JSON.stringify(output, undefined, 2)}\n\`\`\`\n`;
}

function agentOf({ tools }) {
  const names = tools.map((tool) => tool.function.name);
  return names.includes("subagent__research") ? "writer" : names.includes("plan") ? "planner" : "researcher";
}

function shortened(text) {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > 200 ? `${line.slice(0, 200)}…` : line;
}
