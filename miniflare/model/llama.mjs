// A language model in this process, on the processor alone: text in, the likeliest text out, held to a grammar where one is
// given.
//
// As a program it says `ready` where the package and the model in `MODEL_FILE` run, and fails where they do not.

import { fileURLToPath } from "node:url";
import { LlamaCompletion, LlamaLogLevel, getLlama } from "node-llama-cpp";

/** The longest conversation with its answer, in tokens. */
const CONTEXT = 4096;
/** Conversations that are kept evaluated, so that only what is new of each costs time. */
const CONVERSATIONS = 6;

export async function loadModel(modelPath) {
  // One thread: several wait for each other, and where the machine is busy that takes many times longer.
  const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.error, maxThreads: 1 });
  const model = await llama.loadModel({ modelPath });
  const context = await model.createContext({ contextSize: CONTEXT, sequences: CONVERSATIONS, threads: 1 });
  const idle = Array.from({ length: CONVERSATIONS }, () => {
    const sequence = context.getSequence();
    return { sequence, completion: new LlamaCompletion({ contextSequence: sequence }) };
  });
  /** By the name of a conversation, the one used last at the end. */
  const kept = new Map();
  const slotOf = (name) => {
    const [oldest] = kept.keys();
    const slot = kept.get(name) ?? idle.pop() ?? kept.get(oldest);
    if (!kept.has(name) && slot === kept.get(oldest)) kept.delete(oldest);
    kept.delete(name);
    kept.set(name, slot);
    return slot;
  };
  return {
    longest: CONTEXT,

    /** @returns {number[]}  Of text in which the names of `markers` are no special tokens. */
    tokens: (text, { markers = false } = {}) => model.tokenize(text, markers),

    /**
     * Goes on behind `tokens` until the JSON Schema, or the grammar in GBNF, is fulfilled, the model ends its turn, or `most` tokens are written.
     *
     * @param {string} name  Of the conversation: calls with one name share what they have in common.
     * @returns {Promise<{text: string, written: number, evaluated: number, isCut: boolean}>}  `evaluated` tokens
     *          were read that had not been before.
     */
    async write(name, tokens, { schema, grammar, most, signal, onText = () => {} }) {
      const { sequence, completion } = slotOf(name);
      const before = sequence.tokenMeter.getState();
      const held = schema ? await llama.createGrammarForJsonSchema(schema) : await llama.createGrammar({ grammar });
      const { response, metadata } = await completion.generateCompletionWithMeta(tokens, {
        grammar: held,
        maxTokens: most,
        temperature: 0,
        signal,
        onTextChunk: onText,
        disableContextShift: true,
      });
      const { usedInputTokens, usedOutputTokens } = sequence.tokenMeter.diff(before);
      return { text: response, evaluated: usedInputTokens, written: usedOutputTokens, isCut: metadata.stopReason === "maxTokens" };
    },

    stop: () => llama.dispose(),
  };
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const model = await loadModel(process.env.MODEL_FILE);
  await model.write("", model.tokens("The tide"), { most: 2, schema: { enum: ["rises", "falls"] } });
  await model.stop();
  console.log("ready");
}
