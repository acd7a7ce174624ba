// A built Worker with one more path, which tells what its module has taken and, if asked to, collects JavaScript's garbage
// before or counts what is used.

import { counts, taken, used } from "./counts.mjs";
import Worker from "./index.js";

export * from "./index.js";

export default class extends Worker {
  fetch(request) {
    const { pathname, search } = new URL(request.url);
    if (pathname !== "/measures") return super.fetch(request);
    if (search === "?collect") gc();
    const measures = { objects: counts.objects, taken: taken() };
    return Response.json(search === "?used" ? { ...measures, used: used() } : measures);
  }
}
