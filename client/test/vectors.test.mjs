// The scripts that the Rust document is put through as well.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { Document } from "../src/index.ts";

const { scripts } = JSON.parse(readFileSync(new URL("../../tests/vectors/reconstruct.json", import.meta.url), "utf8"));

const tell = {
  request: (document) => assert.ok(document.takeRequest()),
  baseline: (document, { snapshot, ended }) => document.baseline(snapshot, ended),
  chunk: (document, { reading, sequence, chunk }) => document.observe(reading, sequence, chunk),
  end: (document, { end }) => document.observeEnd(end),
  boundary: (document) => document.boundary(),
};

assert.ok(scripts.length > 0);
for (const { name, session, events } of scripts) {
  test(name, () => {
    const document = new Document(session);
    events.forEach((event, at) => {
      tell[event.op](document, event);
      const { status, state, attachAt, wants } = document;
      assert.deepEqual({ status, state, attachAt, wants }, event.then, `event ${at}: ${JSON.stringify(event).slice(0, 600)}`);
    });
  });
}
