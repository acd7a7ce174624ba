// What a Worker's module has taken and which of its objects are not yet freed, seen from outside: the module is the one that
// is deployed. It must be evaluated before that.

export const counts = { memory: undefined, objects: 0 };

WebAssembly.Instance = class extends WebAssembly.Instance {
  constructor(module, imports) {
    super(module, imports);
    counts.memory = this.exports.memory;
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
