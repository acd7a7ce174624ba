// The grammar of a call's arguments: what the tool's schema allows, in words of the model's own where nothing is given, and
// only as it stands where a tool or the user has said it before. So a small model can choose, and cannot misquote.

/** The longest text of the model's own, in characters. */
const LONGEST = 80;
/** As many of the items that were found may be handed on. */
const MOST_ITEMS = 2;

/**
 * @param {object} schema   JSON Schema of the arguments, as a request's `tools` have it.
 * @param {unknown[]} said  What the results and the user said, the latest first.
 * @param {object[]} used   Arguments that are not to be given again.
 * @returns {object}  A schema for `node-llama-cpp`, whose objects have all their fields.
 */
export function grounded(schema, said, used = []) {
  return narrow(schema, { defs: schema.$defs ?? {}, said, used });
}

/** How many different arguments there are to choose from; none where they are the model's own words. */
export function choices(schema, said) {
  return candidates(schema, said).length;
}

function narrow(schema, around, name) {
  if (schema.$ref) return narrow(around.defs[schema.$ref.split("/").at(-1)], around, name);
  if (schema.enum || schema.const !== undefined || schema.oneOf) return schema;
  if (schema.type === "object") return object(schema, around);
  if (schema.type === "array") return array(schema, around);
  const values = latest(around.said, (value) => (name !== undefined && isScalar(value[name]) ? [value[name]] : []));
  if (values.length > 0) return { enum: values };
  return schema.type === "string" ? { type: "string", minLength: 3, maxLength: LONGEST } : { type: schema.type };
}

function object(schema, around) {
  const found = candidates(schema, around.said);
  const fresh = found.filter((value) => !around.used.some((other) => same(value, other)));
  if (found.length > 0) return { oneOf: (fresh.length > 0 ? fresh : found).map(exactly) };
  const properties = Object.entries(schema.properties ?? {}).map(([name, inner]) => [name, narrow(inner, around, name)]);
  return { type: "object", properties: Object.fromEntries(properties) };
}

/** One or more of what was found, in its order; nothing where nothing was. */
function array({ items }, around) {
  const inner = items.$ref ? around.defs[items.$ref.split("/").at(-1)] : items;
  const found = candidates(inner, around.said).slice(0, MOST_ITEMS);
  const subsets = found.reduce((all, value) => [...all, ...all.map((some) => [...some, value])], [[]]);
  return { oneOf: subsets.slice(found.length > 0 ? 1 : 0).map(exactly) };
}

/** The objects that fit, of the latest that said any. */
function candidates({ properties = {} }, said) {
  const names = Object.keys(properties);
  if (names.length === 0) return [];
  return latest(said, (value) => (names.every((name) => name in value) ? [Object.fromEntries(names.map((name) => [name, value[name]]))] : []));
}

function latest(said, read) {
  for (const value of said) {
    const found = [...objects(value)].flatMap(read);
    if (found.length > 0) return found.filter((one, at) => found.findIndex((other) => same(one, other)) === at);
  }
  return [];
}

function* objects(value) {
  if (value === null || typeof value !== "object") return;
  if (!Array.isArray(value)) yield value;
  for (const inner of Object.values(value)) yield* objects(inner);
}

/** This value and no other. */
function exactly(value) {
  if (isScalar(value)) return { const: value };
  if (Array.isArray(value)) return { type: "array", prefixItems: value.map(exactly), minItems: value.length, maxItems: value.length };
  return { type: "object", properties: Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, exactly(inner)])) };
}

const isScalar = (value) => value === null || ["string", "number", "boolean"].includes(typeof value);
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
