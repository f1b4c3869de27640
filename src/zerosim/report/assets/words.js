/* A frame in words: a verb and a sentence. Knows frames; must not know the screen. */

"use strict";

const Words = (() => {
  const { exact, total, own } = Draw;

  const HOLDS = {
    "gathered params": ["gather", (unit) => `Each rank makes room for whole parameters of ${unit}.`],
    "second params": ["hold", (unit) => `Each rank keeps its part of a second copy of the parameters of ${unit}.`],
    "unreduced grads": ["hold", (unit) => `Each rank makes room for all gradients of ${unit}, to be reduced and released.`],
    "partial grads": ["hold", (unit) => `Each rank makes room for its part of the average over its node, of ${unit}.`],
    "ring blocks": ["hold", (unit, job) => `Each rank takes a block for the ring: ${job} of ${unit}.`],
    activations: ["hold", (unit) => `Each rank keeps activations of ${unit}.`],
  };
  const FREES = {
    "gathered params": ["release", (unit) => `Each rank releases the parameters of ${unit} that it had gathered; its own share stays.`],
    "second params": ["release", (unit) => `Each rank releases its part of the second copy of ${unit}.`],
    "unreduced grads": ["release", (unit) => `Each rank releases the gradients of ${unit}; its own share of their average stays.`],
    "partial grads": ["release", (unit) => `Each rank releases its part of the average over its node, of ${unit}.`],
    "ring blocks": ["release", (unit, job) => `Each rank gives back a block of the ring: ${job} of ${unit}.`],
    activations: ["release", (unit) => `Each rank drops activations of ${unit}.`],
  };
  const COMPUTES = {
    forward: (unit) => `Each rank computes the forward of ${unit} on its own rows.`,
    backward: (unit) => `Each rank computes the backward of ${unit} on its own rows.`,
    optimizer: (unit) => `Each rank updates what it owns of ${unit}.`,
  };
  const VERBS = { "all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce" };

  const some = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

  /** What a collective is, in which half of an all-reduce, and over whom. */
  function collective({ name, ring, second, job }) {
    const half = name !== "all-reduce" ? "" : second ? ", second half" : ", first half";
    return `${name}${half}${job ? RINGS[ring.name] : ""}`;
  }
  const RINGS = { all: "", node: " within each node", replicas: " across the nodes" };

  function say(run, frame) {
    const { event } = frame;
    if (!event) return ["rest", `Before the step: each rank holds ${exact(frame.total)}.`];
    const { kind, name, nbytes } = event;
    const unit = event.unit || "the model";
    const job = frame.collective ? collective(frame.collective) : "a collective";
    if (kind === "shortage") {
      const where = event.place === "host" ? " on the host" : "";
      const asked = `${exact(event.asked)} of ${event.band} were asked for ${unit}`;
      return ["out of memory", `${asked} on top of ${exact(total(event.held))}${where}: the run ends here.`];
    }
    if (kind === "hold" || kind === "free") {
      const known = own(kind === "hold" ? HOLDS : FREES, name);
      const [verb, text] = known || [kind === "hold" ? "hold" : "release", () => `Each rank holds ${kind === "hold" ? "more" : "less"} of ${name} for ${unit}.`];
      return [verb, `${text(unit, job)} ${kind === "hold" ? "+" : "−"}${exact(nbytes)} of ${name}.`];
    }
    if (kind === "send") {
      const hops = some(frame.collective.ring.size - 1, "hop");
      return [own(VERBS, name) || "send", `The ${job} of ${unit} is done: each rank has sent ${exact(nbytes)}${frame.collective.job ? ` in ${hops}` : ""}.`];
    }
    if (kind === "compute") return ["compute", (own(COMPUTES, name) || ((each) => `Each rank computes ${name} of ${each}.`))(unit)];
    if (kind === "copy") return ["copy", `Each rank copies ${exact(nbytes)} of ${unit} over its host link to the ${name}.`];
    if (kind === "host hold") return ["host", `Each rank's part of the host holds ${exact(nbytes)} more of ${name} for ${unit}.`];
    if (kind === "host free") return ["host", `Each rank's part of the host holds ${exact(nbytes)} less of ${name} for ${unit}.`];
    return [kind, `${name}, ${unit}, ${exact(nbytes)}.`];
  }

  /** What the ring is doing after so many hops, for the picture of who owns what. */
  function ring(moving, hops) {
    const [last, what] = [moving.ring.size - 1, `${collective(moving)} of ${moving.unit || "the model"}`];
    if (!moving.job) return `${what}: a few numbers that every rank needs.`;
    const done = `${what}, hop ${Math.min(hops, last)} of ${last}`;
    if (moving.job === "reduce")
      return `${done}: each rank hands a partial sum of one piece to the next of its ring, upwards in the picture, which adds its own; after the last hop each owner has the whole sum of its piece.`;
    return `${done}: each rank hands the piece that it owns, and then whatever arrived, to the next of its ring, upwards in the picture; after the last hop every rank has all of them.`;
  }

  return { say, ring, collective };
})();
