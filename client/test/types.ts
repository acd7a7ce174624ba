// Compiled, not run: the client's types are what the package `ai` asks for. The example of the README is here.

import { AbstractChat, type ChatTransport, type UIMessage, type UIMessageChunk } from "ai";
import { chatTransport, type StatePatchPartData, type UiDataParts, type UiMetadata, type UiPart } from "../src/index.ts";

type AgentMessage = UIMessage<UiMetadata, UiDataParts>;

const transport = chatTransport({
  agentType: "writer",
  headers: () => ({ authorization: `Bearer ${sessionStorage.getItem("key")}` }),
});

// What `useChat<AgentMessage>({ id, transport })` and `new Chat<AgentMessage>({ id, transport })` take.
export const typed: ChatTransport<AgentMessage> = transport;
export const plain: ChatTransport<UIMessage> = transport;
export const init: ConstructorParameters<typeof AbstractChat<AgentMessage>>[0]["transport"] = transport;

// Each part is one that the package knows.
export const known = (part: UiPart): UIMessageChunk<UiMetadata, UiDataParts> => part;

// A message's parts are typed by their names.
export function patches(message: AgentMessage, document: string): StatePatchPartData[] {
  return message.parts.flatMap((part) => (part.type === "data-state-patch" && part.data.agentId === document ? [part.data] : []));
}
