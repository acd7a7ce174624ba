// What a Worker's module has taken and which of its objects are not yet freed, seen from outside: the module is the one that
// is deployed. It must be evaluated before that.

export const counts = { module: undefined, objects: 0 };

/** The module's free memory is counted in blocks of so many bytes, of which its allocator has some for itself. */
const [BLOCK, HEAD] = [64, 8];

/** What the module has taken, in bytes; it never gives any back, so that this is the most that it needed at once. */
export const taken = () => counts.module.memory.buffer.byteLength;

/** What of it is not free, in bytes: blocks are allocated until it takes more. */
export function used() {
  const { __wbindgen_malloc: allocate, __wbindgen_free: free } = counts.module;
  const [all, blocks] = [taken(), []];
  while (taken() === all) blocks.push(allocate(BLOCK - HEAD, 8));
  for (const block of blocks) free(block, BLOCK - HEAD, 8);
  return all - (blocks.length - 1) * BLOCK;
}

WebAssembly.Instance = class extends WebAssembly.Instance {
  constructor(module, imports) {
    super(module, imports);
    counts.module = this.exports;
  }
};

/** An object's value in Rust is freed by wasm-bindgen's registry, once its handle in JavaScript was collected. */
globalThis.FinalizationRegistry = class extends FinalizationRegistry {
  constructor(free) {
    super(({ held, isObject }) => {
      free(held);
      if (isObject) counts.objects -= 1;
    });
  }

  register(target, held, token) {
    const isObject = typeof target.alarm === "function";
    if (isObject) counts.objects += 1;
    super.register(target, { held, isObject }, token);
  }
};
