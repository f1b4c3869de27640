/* The cells of a planner's page: the steps that were run, what their logs come to, what is said of each, and which
   others would do. Every number is a cell's, or is summed up from the holds and frees of its log. Must not know the screen. */

"use strict";

const Cells = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { total } = Draw;
  const { axes, memory, reserve } = data;
  const size = Draw.short;
  const AXES = ["row", "ranks", "rows", "sequence", "checkpoint"];
  const plural = (count, one) => `${count.toLocaleString("en-US")} ${one}${count === 1 ? "" : "s"}`;
  const whole = (count) => count.toLocaleString("en-US");

  // -- cells

  const key = (place) => AXES.map((axis) => place[axis]).join(" ");
  const cells = new Map(
    data.cells.map((values) => {
      const cell = Object.fromEntries(data.fields.map((field, i) => [field, values[i]]));
      return [key(cell), cell];
    }),
  );
  const cellAt = (place) => cells.get(key(place)) ?? null;

  /** What a cell held before its first hold or free and after each, by band, with their units and phases. */
  const logs = new Map();
  function logOf(cell) {
    if (!logs.has(cell)) logs.set(cell, replay(cell));
    return logs.get(cell);
  }
  function replay({ moves, sizes, resident, peak }) {
    const places = [];
    const unfold = (loops) => {
      for (const item of loops) {
        if (typeof item === "number") places.push(item);
        else for (let i = 0; i < item[0]; i++) unfold(item[1]);
      }
    };
    unfold(data.logs[moves]);
    const held = { ...resident }; // a step begins with what it ends with, less what it changed
    for (const place of places) {
      const [sign, band, , , which] = data.moves[place];
      const name = data.counted[band];
      held[name] = (held[name] ?? 0) - sign * sizes[which];
    }
    const moments = [{ ...held }];
    const said = [{ change: 0, band: "", unit: "", phase: "" }];
    let unit = 0;
    let top = total(held) === peak ? 0 : -1;
    for (const place of places) {
      const [sign, band, phase, step, which] = data.moves[place];
      const name = data.counted[band];
      unit += step;
      held[name] += sign * sizes[which];
      moments.push({ ...held });
      said.push({ change: sign * sizes[which], band: name, unit: data.units[unit], phase: data.phases[phase] });
      if (top < 0 && total(held) === peak) top = moments.length - 1;
    }
    return { moments, said, top, phases: phasesOf(said) };
  }

  /** Stretches of one phase; what is sent or belongs to none is counted to the phase that it interrupts. */
  function phasesOf(said) {
    const found = [];
    said.forEach(({ phase }, moment) => {
      const name = ["forward", "backward", "optimizer"].includes(phase) ? phase : (found.at(-1)?.name ?? "");
      if (found.at(-1)?.name === name) found.at(-1).to = moment + 1;
      else found.push({ from: moment, to: moment + 1, name });
    });
    return found;
  }

  // -- words

  const value = (place, axis) => axes[axis][place[axis]];
  function named(place) {
    const words = [value(place, "row"), `${plural(value(place, "ranks"), "GPU")}`, `micro-batch ${whole(value(place, "rows"))}`];
    if (value(place, "sequence") !== null) words.push(`${whole(value(place, "sequence"))} tokens a row`);
    return [...words, checkpointing(value(place, "checkpoint"))];
  }
  const checkpointing = (name) => (name === "none" ? "no checkpointing" : `${name} checkpointing`);
  function seconds(count) {
    const [factor, unit] = [[1, "s"], [1e3, "ms"], [1e6, "µs"]].find(([factor]) => count * factor >= 1) ?? [1e9, "ns"];
    return `${Number((count * factor).toPrecision(3))} ${unit}`;
  }
  function instant({ unit, phase }) {
    if (phase === "other") return unit ? `in the ${unit}` : "between steps";
    return unit ? `in the ${phase} of ${unit}` : `in the ${phase}`;
  }
  function verdictOf(cell) {
    if (!cell) return "– not run: on so many GPUs it is another of these schemes, or was left out (what was not run, below, says why)";
    const takes = `${size(cell.peak)} at the peak`;
    if (cell.verdict === "fits") return `✓ fits: ${takes}, ${size(cell.room)} to spare`;
    if (cell.verdict === "tight") return `~ tight: ${takes}, ${size(cell.room)} to spare of the ${size(reserve)} reserved`;
    if (cell.verdict === "none") return `✗ does not fit: ${takes}, ${size(-cell.room)} more than the card has`;
    if (cell.verdict === "host") return `✗ does not fit: the host of a node is ${size(-cell.host[1])} short`;
    return memory ? `– not known: ${size(cell.peak)} of model states alone` : `${takes}`;
  }
  function factsOf(cell) {
    if (!cell) return "";
    const facts = [`at rest ${size(cell.rest)}`, `the peak is ${instant(cell)}`, `${size(cell.sent)} sent by each GPU in a step`];
    if (cell.host) facts.push(`${size(cell.host[0])} on the host`);
    if (cell.about !== null) {
      const speed = cell.tokens === null ? "" : `, ${whole(Number((cell.tokens / cell.about).toPrecision(2)))} tokens a second`;
      facts.push(`a step takes about ${seconds(cell.about)} (at least ${seconds(cell.least)})${speed}`);
    }
    return facts.join(" · ");
  }

  // -- advice: other cells of the grid that would do

  const NOTABLE = 0.95; // of the time: an estimate does not tell what differs less
  const differing = (place, other) => AXES.filter((axis) => place[axis] !== other[axis]);
  const cost = (cell) => (cell.tokens === null || cell.about === null ? cell.ranks : (cell.about * value(cell, "ranks")) / cell.tokens);
  const cheapest = (found) => found.reduce((best, cell) => (!best || cost(cell) < cost(best) ? cell : best), null);
  const WORDS = {
    row: (cell) => value(cell, "row"),
    ranks: (cell) => plural(value(cell, "ranks"), "GPU"),
    rows: (cell) => `micro-batch ${whole(value(cell, "rows"))}`,
    sequence: (cell) => `${whole(value(cell, "sequence"))} tokens a row`,
    checkpoint: (cell) => checkpointing(value(cell, "checkpoint")),
  };
  const words = (cell, axis) => axis.map((each) => WORDS[each](cell)).join(" and ");

  function adviceFor(place) {
    const cell = cellAt(place);
    const advice = [];
    const add = (target, before, after) => advice.push({ target, before, after });
    const fitting = [...cells.values()].filter((each) => each.verdict === "fits");
    const along = (axis) => fitting.filter((each) => differing(place, each).join() === axis);
    if (!memory) return [{ after: "Name a card to see what fits: zerosim plan … --card H100." }];
    if (cell?.verdict === "") return [{ after: "What a step of this model adds to its states is not known, so that nothing is said of what fits." }];
    if (cell?.verdict === "fits") {
      const more = along("rows").filter((each) => each.rows > place.rows).at(-1);
      if (more) add(more, "", `fits too: ${size(more.peak)}`);
      const fewer = along("ranks").find((each) => each.ranks < place.ranks);
      if (fewer) add(fewer, "", `are enough: ${size(fewer.peak)}`);
      const faster = cheapest(along("checkpoint").filter((each) => cost(each) < NOTABLE * cost(cell)));
      if (faster) add(faster, "", `fits too: ${size(faster.peak)}, and a step takes about ${seconds(faster.about)} instead of ${seconds(cell.about)}`);
      const less = along("row").filter((each) => each.sent < cell.sent).sort((a, b) => a.sent - b.sent)[0];
      if (less) add(less, "", `fits too, and sends ${size(less.sent)} a step instead of ${size(cell.sent)}`);
      if (!advice.length) add(null, "", "Nothing next to it in this grid that fits would send less, take less time or need fewer GPUs.");
      return advice;
    }
    const longer = along("sequence").at(-1);
    const steps = [cheapest(along("checkpoint")), cheapest(along("row")), along("rows").at(-1), along("ranks")[0], longer];
    for (const step of steps.filter(Boolean)) add(step, "", `${differing(place, step)[0] === "ranks" ? "are enough" : "fits"}: ${size(step.peak)}${cell?.about && step.about ? `, a step of about ${seconds(step.about)}` : ""}`);
    if (!advice.length && fitting.length) {
      const least = Math.min(...fitting.map((each) => differing(place, each).length));
      const near = fitting.filter((each) => differing(place, each).length === least);
      const step = near.reduce((best, each) => (each.ranks < best.ranks ? each : best));
      add(step, "", `fit together: ${size(step.peak)}`);
    }
    if (!fitting.length) {
      const lowest = [...cells.values()].reduce((best, each) => (each.peak < best.peak ? each : best));
      add(lowest, "Nothing in this grid fits. The least is taken by", `${size(lowest.peak)}`);
    }
    if (cell) {
      const [most, held] = Object.entries(logOf(cell).moments[logOf(cell).top]).reduce((best, each) => (each[1] > best[1] ? each : best));
      const remedy = Draw.own(data.remedies, most);
      add(null, "", `Most of the peak is ${most}, ${size(held)}.${remedy ? ` What makes it less: ${remedy}.` : ""}`);
    }
    return advice;
  }

  return { data, AXES, plural, whole, cellAt, logOf, value, named, seconds, instant, verdictOf, factsOf, differing, words, adviceFor };
})();
