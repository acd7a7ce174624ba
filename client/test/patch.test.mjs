// The patch code against the published suite of RFC 6902, and against another implementation.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { test } from "node:test";
import fastJsonPatch from "fast-json-patch";
import { applyPatch, PatchError } from "../src/index.ts";

const require = createRequire(import.meta.url);
const suite = (name) => JSON.parse(readFileSync(require.resolve(`json-patch-test-suite/${name}`), "utf8"));

for (const name of ["tests.json", "spec_tests.json"]) {
  const cases = suite(name).filter(({ disabled, patch }) => !disabled && patch);
  test(`${name}: ${cases.length} cases of the published suite`, () => {
    assert.ok(cases.length > 15);
    for (const { doc, patch, expected, error, comment } of cases) {
      const before = structuredClone(doc);
      const what = `${comment ?? ""} ${JSON.stringify(patch)}`;
      if (error === undefined) {
        const after = applyPatch(doc, patch);
        if (expected !== undefined) assert.deepEqual(after, expected, what);
      } else {
        assert.throws(() => applyPatch(doc, patch), PatchError, what);
      }
      assert.deepEqual(doc, before, `${what}: the document is left as it was`);
    }
  });
}

/** Small numbers from a seed. */
function random(seed) {
  let state = seed;
  return (below) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

test("2000 random documents: a patch made by fast-json-patch leads to the same document", () => {
  for (let seed = 1; seed <= 2000; seed += 1) {
    const next = random(seed);
    const value = (depth) => {
      const kind = next(depth > 2 ? 3 : 5);
      if (kind === 0) return next(5);
      if (kind === 1) return ["a", "b/c", "~", ""][next(4)];
      if (kind === 2) return [null, true, false][next(3)];
      if (kind === 3) return Array.from({ length: next(4) }, () => value(depth + 1));
      return Object.fromEntries(Array.from({ length: next(4) }, () => [["x", "y/z", "~t", "0"][next(4)], value(depth + 1)]));
    };
    const [from, to] = [{ root: value(0) }, { root: value(0) }];
    const patch = fastJsonPatch.compare(from, to);
    assert.deepEqual(applyPatch(from, patch), to, `seed ${seed}: ${JSON.stringify({ from, patch })}`);
  }
});

test("a member may be called like something that every object has", () => {
  const patch = [{ op: "add", path: "/__proto__", value: { polluted: true } }];
  const after = applyPatch({}, patch);
  assert.deepEqual(Object.keys(after), ["__proto__"]);
  assert.equal({}.polluted, undefined);
  assert.throws(() => applyPatch({}, [{ op: "remove", path: "/toString" }]), PatchError);
});

test("a patch that nests too deeply, copies too much or removes the document does not apply", () => {
  const copies = (path, count) => Array.from({ length: count }, () => ({ op: "copy", from: "", path }));
  const deep = (levels) => Array.from({ length: levels }, (_, n) => ({ op: "add", path: "/a".repeat(n + 1), value: {} }));
  assert.throws(() => applyPatch({ a: [] }, copies("/a/-", 40)), /too large/);
  assert.throws(() => applyPatch({}, deep(127)), /too deeply/);
  assert.equal(JSON.stringify(applyPatch({}, deep(126))).split("{").length, 128);
  assert.throws(() => applyPatch({ a: ["x".repeat(1000)] }, Array(10_000).fill({ op: "copy", from: "/a/0", path: "/a/-" })), /too large/);
  assert.throws(() => applyPatch({ a: 1 }, [{ op: "remove", path: "" }]), PatchError);
});
