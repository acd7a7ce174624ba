// The Worker that is built for tests alone: the suites that any implementation is put through.

const OBJECTS = { CONTRACT: "ContractObject", LIFE: "LifeObject", BINDING: "BindingAgents", HTTP: "HttpAgents", STUB: "StubAgents" };

/**
 * One instance of it.
 *
 * @param {string} [name]  Instances of different names have objects of their own.
 * @param {string} [far]   The Worker behind its binding `FAR`: where its children live. Default: itself.
 * @param {object} [vars]
 * @returns {import("../../harness.mjs").ExtraWorker}
 */
export function contract(name = "contract", far = name, vars = {}) {
  return { name, built: "miniflare/contract-worker", objects: OBJECTS, services: { FAR: { to: far } }, vars };
}
