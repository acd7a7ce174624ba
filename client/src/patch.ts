// JSON patches (RFC 6902) on values that are never changed in place: a patch makes a new document that shares with the old
// one what it did not touch, so a patch that fails half-way leaves nothing behind.

import type { Json, PatchOperation } from "./wire.ts";

/** A patch that does not apply; nothing was changed. */
export class PatchError extends Error {
  override name = "PatchError";
  readonly operation: number;

  constructor(operation: number, message: string) {
    super(`operation ${operation} of a patch does not apply: ${message}`);
    this.operation = operation;
  }
}

// The same bounds as in Rust: how deep a placed value may nest, from the root, and how much a patch may copy.
const DEEPEST = 127;
const MOST_COPIED = 8 * 1024 * 1024;

/** What a patch may still copy, in characters of JSON, about. */
interface Room {
  left: number;
}

/** The document after the operations, which may neither nest deeper than 127 nor copy more than 8 MiB. @throws {PatchError} */
export function applyPatch(document: Json, operations: readonly PatchOperation[]): Json {
  const room = { left: MOST_COPIED };
  const attempt = <T>(at: number, work: () => T): T => {
    try {
      return work();
    } catch (error) {
      throw new PatchError(at, error instanceof Error ? error.message : String(error));
    }
  };
  const after = operations.reduce((before, operation, at) => attempt(at, () => applyOne(before, operation, room)), document);
  if (room.left < MOST_COPIED) attempt(operations.length - 1, () => take(after, { left: MOST_COPIED }));
  return after;
}

/** @throws where a value of the document would nest too deeply */
function placed(path: readonly string[], value: Json): Json {
  if (isDeeper(value, DEEPEST - path.length)) throw new Error("the document would nest too deeply");
  return value;
}

function isDeeper(value: Json, left: number): boolean {
  if (typeof value !== "object" || value === null) return left < 0;
  return left <= 0 || Object.values(value).some((inner) => isDeeper(inner, left - 1));
}

/** Takes the size of a value from what is left. @throws where that is not enough */
function take(value: Json, room: Room): Json {
  room.left -= 4;
  if (typeof value === "string") room.left -= value.length;
  else if (typeof value === "object" && value !== null && !Array.isArray(value)) {
    for (const key of Object.keys(value)) room.left -= key.length;
  }
  if (room.left < 0) throw new Error("the document would become too large");
  if (typeof value === "object" && value !== null) {
    for (const inner of Object.values(value)) take(inner, room);
  }
  return value;
}

function applyOne(document: Json, { op, path, from, value }: PatchOperation, room: Room): Json {
  const to = tokens(path);
  switch (op) {
    case "add":
      return change(document, to, insert(placed(to, given(value))));
    case "replace":
      return change(document, to, replace(placed(to, given(value))));
    case "remove":
      return change(document, to, remove);
    case "test": {
      if (!equal(at(document, to), given(value))) throw new Error(`${path} has another value`);
      return document;
    }
    case "copy":
      return change(document, to, insert(take(placed(to, at(document, tokens(from))), room)));
    case "move": {
      const source = tokens(from);
      if (source.length < to.length && source.every((token, n) => token === to[n])) throw new Error(`${path} lies within ${from}`);
      const moved = placed(to, at(document, source));
      return change(change(document, source, remove), to, insert(moved));
    }
    default:
      throw new Error(`${op} is no operation`);
  }
}

function given(value: Json | undefined): Json {
  if (value === undefined) throw new Error("the value is missing");
  return value;
}

function tokens(pointer: string | undefined): string[] {
  if (typeof pointer !== "string") throw new Error("a pointer is missing");
  if (pointer === "") return [];
  if (!pointer.startsWith("/") || /~(?![01])/.test(pointer)) throw new Error(`${pointer} is no pointer`);
  return pointer
    .slice(1)
    .split("/")
    .map((token) => token.replaceAll("~1", "/").replaceAll("~0", "~"));
}

function at(document: Json, path: readonly string[]): Json {
  return path.reduce((value, token) => child(value, token), document);
}

function child(value: Json, token: string): Json {
  if (Array.isArray(value)) return value[index(token, value.length - 1)] as Json;
  if (typeof value === "object" && value !== null && Object.hasOwn(value, token)) return value[token] as Json;
  throw new Error(`nothing is at ${token}`);
}

function index(token: string, last: number): number {
  const number = Number(token);
  if (!/^(0|[1-9]\d*)$/.test(token) || number > last) throw new Error(`${token} is no index up to ${last}`);
  return number;
}

/** What becomes of a place: of the root, of an array's element, of an object's member. */
interface Edit {
  root(): Json;
  element(array: Json[], token: string): void;
  member(object: Map<string, Json>, token: string): void;
}

function insert(value: Json): Edit {
  return {
    root: () => value,
    element: (array, token) => void array.splice(token === "-" ? array.length : index(token, array.length), 0, value),
    member: (object, token) => void object.set(token, value),
  };
}

function replace(value: Json): Edit {
  return {
    root: () => value,
    element: (array, token) => void (array[index(token, array.length - 1)] = value),
    member: (object, token) => {
      if (!object.has(token)) throw new Error(`nothing is at ${token}`);
      object.set(token, value);
    },
  };
}

const remove: Edit = {
  root: () => {
    throw new Error("the document itself cannot be removed");
  },
  element: (array, token) => void array.splice(index(token, array.length - 1), 1),
  member: (object, token) => {
    if (!object.delete(token)) throw new Error(`nothing is at ${token}`);
  },
};

/** The document with one place edited; everything beside the way to it is shared with the old one. */
function change(document: Json, path: readonly string[], edit: Edit): Json {
  const [token, ...rest] = path;
  if (token === undefined) return edit.root();
  if (Array.isArray(document)) {
    const copy = [...document];
    if (rest.length === 0) edit.element(copy, token);
    else copy[index(token, copy.length - 1)] = change(child(document, token), rest, edit);
    return copy;
  }
  if (typeof document !== "object" || document === null) throw new Error(`${token} is looked for in a plain value`);
  // A map on the way: a member may be called `__proto__`.
  const copy = new Map(Object.entries(document));
  if (rest.length === 0) edit.member(copy, token);
  else copy.set(token, change(child(document, token), rest, edit));
  return Object.fromEntries(copy);
}

/** Whether two JSON values are equal; the order of an object's members does not matter. */
export function equal(a: Json, b: Json): boolean {
  if (a === b) return true;
  if (typeof a !== "object" || typeof b !== "object" || a === null || b === null) return false;
  if (Array.isArray(a) || Array.isArray(b)) {
    return Array.isArray(a) && Array.isArray(b) && a.length === b.length && a.every((value, n) => equal(value, b[n] as Json));
  }
  const keys = Object.keys(a);
  return keys.length === Object.keys(b).length && keys.every((key) => Object.hasOwn(b, key) && equal(a[key] as Json, b[key] as Json));
}
