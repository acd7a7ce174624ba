// Compiled, not run: the client's types are what the package `ai` asks for. The example of the README stands here, too.

import { chatTransport, type UiDataParts, type UiMetadata, type UiPart } from "../src/index.ts";
import type { AbstractChat, ChatTransport, UIMessage, UIMessageChunk } from "ai";

type AgentMessage = UIMessage<UiMetadata, UiDataParts>;

const transport = chatTransport({
  agentType: "writer",
  headers: () => ({ authorization: `Bearer ${sessionStorage.getItem("key")}` }),
});

/** The changes of one session's state. Parts of other sessions are not its business. */
function patches(message: AgentMessage, document: string) {
  return message.parts.flatMap((part) => (part.type === "data-state-patch" && part.data.agentId === document ? [part.data] : []));
}

// What `useChat<AgentMessage>({ id, transport })` and `new Chat<AgentMessage>({ id, transport })` take.
export const typed: ChatTransport<AgentMessage> = transport;
export const plain: ChatTransport<UIMessage> = transport;
export const init: ConstructorParameters<typeof AbstractChat<AgentMessage>>[0]["transport"] = transport;

// Each part is one that the package knows, and its data have their types.
export const known = (part: UiPart): UIMessageChunk<UiMetadata, UiDataParts> => part;
export const ordinals = (message: AgentMessage): (number | undefined)[] => patches(message, "s").map(({ patchOrdinal }) => patchOrdinal);

// A part that the package does not know is refused: the check above can fail.
// @ts-expect-error
export const unknown: UIMessageChunk = { type: "text-begin", id: "t" };
