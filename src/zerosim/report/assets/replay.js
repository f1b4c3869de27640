/* A recorded step as frames: what every rank holds after each event, and which collective is under way.

   Knows the records. Computes nothing but running sums of what the events say, and whose place in a ring is whose,
   from the row's own declaration. Must not know the screen. */

"use strict";

const Page = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const unique = (values) => [...new Set(values)];
  const { own } = Draw; // of a table of counts; names may be anything
  const PLAIN = { mark: "circle", dash: null };
  const look = (scheme) => (Object.hasOwn(data.looks, scheme) ? data.looks[scheme] : PLAIN);
  return { data, find, unique, own, look };
})();

const Replay = (() => {
  const { own, unique } = Page;
  const MOVES = { hold: 1, free: -1 };
  const REDUCES = ["reduce-scatter", "all-reduce"];

  /** A run with its frames: what a rank holds before the first event and after each. The total is the recorded one. */
  function replay(recorded) {
    const { start, events, shortage } = recorded;
    const frames = [{ held: start, total: Draw.total(start), event: null, collective: null }];
    for (const [kind, name, unit, nbytes, after, , phase, outside] of events) {
      const before = frames.at(-1).held;
      const sign = own(MOVES, kind);
      const held = sign ? { ...before, [name]: own(before, name) + sign * nbytes } : before;
      frames.push({ held, total: after, event: { kind, name, unit, nbytes, phase, outside, sign }, collective: null });
    }
    if (shortage) {
      const held = shortage.on_card;
      frames.push({ held, total: Draw.total(held), event: { kind: "shortage", phase: "", ...shortage, sign: 0 }, collective: null });
    }
    const top = frames.reduce((best, { total }, index) => (total > frames[best].total ? index : best), 0);
    const run = { ...recorded, frames, top, peak: recorded.peak ?? frames[top].total };
    frames.forEach((frame, index) => (frame.around = around(frames, index)));
    collectives(run);
    return run;
  }

  /** The phase that a frame belongs to: forward, backward or an update, whatever is sent in between. */
  function around(frames, index) {
    for (let i = index; i > 0; i--) {
      const { phase } = frames[i].event;
      if (phase && phase !== "communication" && phase !== "other") return phase;
    }
    return "";
  }

  /** Gives each frame of a collective what it is part of; in the frame "flight" both blocks are held and hops are made.

      An all-reduce is logged in two halves: a reduce-scatter and then an all-gather. */
  function collectives({ ranks, row, frames }) {
    let halves = "";
    frames.forEach((frame, done) => {
      const { event } = frame;
      if (event?.kind !== "send") return;
      let from = done;
      const inside = ({ event: each }) => each?.sign && each.phase === event.phase && each.unit === event.unit;
      while (inside(frames[from - 1])) from--;
      let flight = done;
      for (let i = done - 1; i >= from && flight === done; i--) if (frames[i].event.sign > 0) flight = i;
      const ring = ringOf(ranks, row.node, event);
      const half = JSON.stringify([event.name, event.unit, ring.name]);
      const second = event.name === "all-reduce" && halves === half;
      halves = second ? "" : half;
      const job = second || event.name === "all-gather" ? "gather" : REDUCES.includes(event.name) ? "reduce" : "";
      const kind = event.name === "all-gather" ? "params" : "grads";
      const collective = { from, flight, done, job, kind, second, ring, name: event.name, unit: event.unit, nbytes: event.nbytes };
      for (let i = from; i <= done; i++) frames[i].collective = collective;
    });
  }

  /** The ring that a message went round, from what left the node: nothing in a group's, one rank's share in that of
      all, every rank's in that of the replicas. place(rank) is its member, step(rank, by) the rank so many members
      further; span(rank, chunk) is where a chunk lies in the layer, from 0 to 1. */
  function ringOf(ranks, node, { nbytes, outside }) {
    const replicas = ranks / node;
    if (node === ranks || node === 1 || outside === nbytes) {
      const step = (rank, by) => (rank + by + ranks) % ranks;
      return { name: "all", size: ranks, place: (rank) => rank, step, span: (_, chunk) => [chunk / ranks, (chunk + 1) / ranks] };
    }
    if (outside === 0) {
      const step = (rank, by) => rank - (rank % node) + ((rank + by + node) % node);
      return { name: "node", size: node, place: (rank) => rank % node, step, span: (_, chunk) => [chunk / node, (chunk + 1) / node] };
    }
    const step = (rank, by) => (rank + by * node + ranks) % ranks;
    const span = (rank, chunk) => [0, 1].map((end) => ((rank % node) * replicas + chunk + end) / ranks);
    return { name: "replicas", size: replicas, place: (rank) => Math.floor(rank / node), step, span };
  }

  /** Which chunk a rank hands on in the hop after so many, and which it has from a gather by then. */
  function handed({ ring, job }, rank, hops) {
    return (ring.place(rank) + hops + (job === "reduce" ? 1 : 0)) % ring.size;
  }
  function arrived({ ring }, rank, hops) {
    return Array.from({ length: hops + 1 }, (_, hop) => (ring.place(rank) + hop) % ring.size);
  }

  /** Bytes by band and unit that the events up to a frame have brought: { band: { unit: bytes } }. */
  function byUnit({ frames }, index) {
    const held = {};
    for (let i = 1; i <= index; i++) {
      const { name, unit, nbytes, sign } = frames[i].event;
      if (!sign) continue;
      held[name] ??= Object.create(null);
      held[name][unit] = (held[name][unit] ?? 0) + sign * nbytes;
    }
    return held;
  }

  const runs = Page.data.runs.map(replay);

  /** The layers, or buckets, in the order of the model: what is updated; else what is computed going forward. */
  const units = (() => {
    const computed = (phases) =>
      unique(runs.flatMap(({ frames }) => frames.filter(({ event }) => event?.kind === "compute" && phases.includes(event.name)).map(({ event }) => event.unit)));
    const updated = computed(["optimizer", "optimizer on the host"]);
    return updated.length ? updated : computed(["forward"]);
  })();

  /** The most that was ever held of a band for a unit: all of it, where it is gathered. */
  const largest = (run, band, unit) => Math.max(0, ...run.frames.map(({ event }) => (event?.sign > 0 && event.name === band && event.unit === unit ? event.nbytes : 0)));

  const drawn = (band) => runs.some(({ frames }) => frames.some(({ held }) => own(held, band)));
  const bands = Page.data.bands.filter(({ name }) => drawn(name));

  return { runs, units, bands, byUnit, handed, arrived, largest };
})();
