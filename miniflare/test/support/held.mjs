// Both Workers with a scripted model that keeps the researchers waiting until a test lets them go on, so that a job is
// sure to be at work while the test looks at it, however fast or slow the machine is.

import { startEndpoints } from "../../providers/endpoints.mjs";
import { researchScript } from "../../providers/research.mjs";
import { startWorld } from "./world.mjs";

/** @param {import("../../harness.mjs").Options} [options]  Without `vars` and `outbound`. */
export async function startHeldWorld(options = {}) {
  let open;
  let gate;
  let isHeld;
  // What a researcher says once it has searched.
  const isResearch = ({ messages, tools }) => tools.some((tool) => tool.function.name === "search") && messages.some(({ role }) => role === "tool");
  const hold = (which = isResearch) => {
    isHeld = which;
    gate = new Promise((resolve) => (open = resolve));
  };
  const release = () => open();
  hold();
  const endpoints = await startEndpoints(researchScript().answer, {}, (body) => (isHeld(body) ? gate : undefined));
  const vars = { MODEL_PROVIDER: "openai", MODEL_NAME: "scripted-1", OPENAI_BASE_URL: `${endpoints.aimock}/v1`, OPENAI_API_KEY: "no-secret" };
  const world = await startWorld({ ...options, vars: { producer: vars, consumer: vars }, outbound: "allow" });
  return Object.assign(world, {
    /** From now on researchers wait, or whose conversation `which` is true of; at first researchers do. */
    hold,
    /** Those that wait go on, and none waits any more. */
    release,
    async stop() {
      release();
      await world.workers.stop();
      await endpoints.stop();
    },
  });
}
