// A built Worker with one more path, which collects JavaScript's garbage and tells what is left.

import { counts } from "./counts.mjs";
import Worker from "./index.js";

export * from "./index.js";

export default class extends Worker {
  fetch(request) {
    if (new URL(request.url).pathname !== "/measures") return super.fetch(request);
    if (new URL(request.url).search !== "?kept") gc();
    return Response.json({ memory: counts.memory.buffer.byteLength, objects: counts.objects });
  }
}
