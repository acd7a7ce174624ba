// The scripts that the Rust filter is put through as well.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { PatchFilter } from "../src/index.ts";

const { scripts } = JSON.parse(readFileSync(new URL("../../tests/vectors/filter.json", import.meta.url), "utf8"));

const tell = {
  baseline: (filter, { snapshot }) => filter.baseline(snapshot),
  forget: (filter, { session }) => filter.forget(session),
  chunk: (filter, { reading, sequence, chunk }) => filter.judge(reading, sequence, chunk),
};

assert.ok(scripts.length > 0);
for (const { name, events } of scripts) {
  test(name, () => {
    const filter = new PatchFilter();
    events.forEach((event, at) => assert.deepEqual(tell[event.op](filter, event), event.then, `event ${at}: ${JSON.stringify(event)}`));
  });
}
