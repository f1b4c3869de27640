/* The planner's page: sliders over a grid of steps that were run. Every number is a cell's, or is summed up from the
   holds and frees of its log; a cell that was not run has no number. What is chosen stands in the address. */

"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { element, shape, exact, total } = Draw;
  const { axes, memory, reserve } = data;
  const size = Draw.short;
  const at = (id) => document.getElementById(id);
  const AXES = ["row", "ranks", "rows", "sequence", "checkpoint"];
  const NAMES = { row: "scheme", ranks: "gpus", rows: "micro-batch", sequence: "seq", checkpoint: "checkpoint" };
  const SIGNS = { fits: "✓", tight: "~", none: "✗", host: "✗", "": "–" };
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
  const chosen = { ...data.asked };

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

  function showAdvice() {
    const lines = adviceFor(chosen).map(({ target, before, after }) => {
      if (!target) return element("li", { text: after });
      const go = element("button", { type: "button", text: words(target, differing(chosen, target)), on: { click: () => choose(target, "#verdict") } });
      return element("li", {}, before, go, after);
    });
    at("advice-title").textContent = cellAt(chosen)?.verdict === "fits" ? "What else fits" : "What would help";
    at("steps").replaceChildren(...lines);
  }

  // -- the strip, and what is held at each moment

  let [strip, view, moment] = [null, null, 0];
  function showStrip() {
    const cell = cellAt(chosen);
    at("step").hidden = !cell;
    if (!cell) return;
    const log = logOf(cell);
    const around = document.querySelector("[name=shown]:checked").value === "peak";
    const reach = 40;
    const from = around ? Math.max(0, log.top - reach) : 0;
    const to = around ? Math.min(log.moments.length, log.top + reach + 1) : log.moments.length;
    view = { log, from, to };
    const inView = memory && memory < 3 * cell.peak;
    strip = Draw.strip({
      held: log.moments.slice(from, to),
      bands: data.bands,
      most: 1.12 * (inView ? Math.max(cell.peak, memory) : cell.peak),
      peak: { at: log.top - from, text: size(cell.peak) },
      phases: log.phases
        .filter((each) => each.to > from && each.from < to)
        .map((each) => ({ name: each.name, from: Math.max(each.from, from) - from, to: Math.min(each.to, to) - from })),
      limit: inView ? { bytes: memory, text: `${data.card || "card"}, ${size(memory)}` } : null,
      height: 300,
      label: `Memory of one GPU through the step, ${plural(log.moments.length, "moment")}, by band; the peak is ${exact(cell.peak)}, ${instant(cell)}`,
      move: (place) => showMoment(from + place),
    });
    at("strip").replaceChildren(strip.element);
    const slider = at("moment");
    slider.min = from;
    slider.max = to - 1;
    showMoment(Math.min(Math.max(log.top, from), to - 1));
  }

  function showMoment(place) {
    moment = place;
    const { log, from } = view;
    const { change, band, unit, phase } = log.said[place];
    const what = place ? `${change > 0 ? "holds" : "frees"} ${exact(Math.abs(change))} of ${band}${unit ? ` for ${unit}` : ""}${phase === "other" ? "" : `, ${phase}`}` : "before the step";
    const text = `${exact(total(log.moments[place]))} held at moment ${whole(place)} of ${whole(log.moments.length - 1)}${place === log.top ? ", the peak" : ""}\n${what}`;
    at("moment").value = place;
    at("moment").setAttribute("aria-valuetext", text);
    at("now").textContent = text;
    strip.show(place - from);
    showBands();
  }

  const headed = (...names) => element("thead", {}, element("tr", {}, ...names.map((text) => element("th", { scope: "col", text }))));
  function showBands() {
    const cell = cellAt(chosen);
    const { log } = view;
    const [top, now] = [log.moments[log.top], log.moments[moment]];
    const present = data.bands.filter(({ name }) => Draw.own(cell.resident, name) || log.moments.some((held) => Draw.own(held, name)));
    const count = (held, name) => element("td", { text: exact(Draw.own(held, name)) });
    const lines = present.map(({ name, color }) =>
      element("tr", { "data-band": name }, element("th", { scope: "row" }, element("i", { class: "swatch", vars: { "--band": color } }), name), count(cell.resident, name), count(top, name), count(now, name)),
    );
    const sums = [cell.resident, top, now].map((held) => element("td", { text: exact(total(held)) }));
    at("bands").replaceChildren(headed("band", "at rest", "at the peak", "at this moment"), element("tbody", {}, ...lines, element("tr", { class: "sum" }, element("th", { scope: "row", text: "in all" }), ...sums)));
  }

  // -- every scheme; what fits around

  function stackOf(cell, most) {
    const svg = shape("svg", { class: "stack", viewBox: "0 0 1000 22", preserveAspectRatio: "none", role: "img", "aria-label": `${size(cell.peak)} at the peak` });
    const log = logOf(cell);
    let left = 0;
    for (const { name, color } of data.bands) {
      const held = Draw.own(log.moments[log.top], name);
      if (!held) continue;
      const part = shape("rect", { x: (1000 * left) / most, y: 2, width: (1000 * held) / most, height: 18, style: { fill: color } }, shape("title"));
      part.firstChild.textContent = `${name}: ${exact(held)}`;
      svg.append(part);
      left += held;
    }
    if (memory && memory < most) svg.append(shape("path", { class: "card", d: `M${(1000 * memory) / most} 0v22`, "vector-effect": "non-scaling-stroke" }));
    return svg;
  }

  function showRows() {
    const found = axes.row.map((_, row) => cellAt({ ...chosen, row }));
    const highest = Math.max(...found.filter(Boolean).map((cell) => cell.peak));
    const most = 1.02 * (memory && memory < 3 * highest ? Math.max(highest, memory) : highest);
    const lines = axes.row.flatMap((name, row) => {
      const cell = found[row];
      if (!cell) return [];
      const go = element("button", { type: "button", text: name, "aria-pressed": String(row === chosen.row), on: { click: () => choose({ ...chosen, row }, "#every .chosen button") } });
      const room = cell.room === null ? "–" : cell.room >= 0 ? size(cell.room) : `${size(-cell.room)} short`;
      const texts = [`${SIGNS[cell.verdict]} ${cell.verdict === "tight" ? "tight, " : ""}${room}`, size(cell.rest), size(cell.peak), size(cell.sent), cell.about === null ? "–" : seconds(cell.about)];
      const [first, ...rest] = texts.map((text) => element("td", { text }));
      return [element("tr", { class: row === chosen.row ? "chosen" : "", "data-peak": cell.peak }, element("th", { scope: "row" }, go), element("td", {}, stackOf(cell, most)), ...(memory ? [first] : []), ...rest)];
    });
    const heads = ["scheme", "at the peak, by band", ...(memory ? ["room"] : []), "at rest", "peak", "sent a step", "about a step"];
    at("every").replaceChildren(headed(...heads), element("tbody", {}, ...lines));
    at("schemes").hidden = !lines.length;
  }

  function showMap() {
    const head = headed("GPUs", ...axes.rows.map((rows) => `micro-batch ${whole(rows)}`));
    const lines = axes.ranks.map((count, ranks) => {
      const tiles = axes.rows.map((_, rows) => {
        const place = { ...chosen, ranks, rows };
        const cell = cellAt(place);
        if (!cell) return element("td", { text: "–" });
        const here = ranks === chosen.ranks && rows === chosen.rows;
        const classes = `${cell.verdict === "none" || cell.verdict === "host" ? "no" : cell.verdict}${here ? " chosen" : ""}`;
        const said = `${verdictOf(cell)}, on ${plural(count, "GPU")} with micro-batch ${axes.rows[rows]}`;
        const go = element("button", { type: "button", "aria-label": said, "aria-pressed": String(here), text: `${SIGNS[cell.verdict]} ${size(cell.peak)}`, on: { click: () => choose(place, "#map .chosen button") } });
        return element("td", { class: classes, "data-peak": cell.peak }, go);
      });
      return element("tr", {}, element("th", { scope: "row", text: whole(count) }), ...tiles);
    });
    at("map").replaceChildren(head, element("tbody", {}, ...lines));
  }

  // -- choices

  const SLIDERS = [
    ["ranks", "GPUs", (count) => plural(count, "GPU")],
    ["rows", "Micro-batch, rows on each GPU at a time", (count) => plural(count, "row")],
    ["sequence", "Tokens in a row", (count) => plural(count, "token")],
  ];
  const sliders = {};
  const radios = {};

  function build() {
    for (const [axis, title, text] of SLIDERS) {
      const values = axes[axis];
      if (values.length === 1 && values[0] === null) continue;
      if (values.length === 1) {
        at("sliders").append(element("p", { class: "only" }, element("span", { class: "small", text: title }), element("b", { text: text(values[0]) })));
        continue;
      }
      const output = element("output", { for: NAMES[axis] });
      const input = element("input", { id: NAMES[axis], type: "range", min: 0, max: values.length - 1, step: 1 });
      input.addEventListener("input", () => choose({ ...chosen, [axis]: Number(input.value) }));
      const ticks = element("span", { class: "ticks", "aria-hidden": "true" }, ...values.map((each) => element("span", { text: whole(each) })));
      at("sliders").append(element("label", { for: NAMES[axis] }, element("span", { text: title }), output, input, ticks));
      sliders[axis] = { input, show: (place) => {
        input.value = place;
        output.textContent = text(values[place]);
        input.setAttribute("aria-valuetext", text(values[place]));
      } };
    }
    for (const [axis, group] of [["checkpoint", "checkpoint"], ["row", "scheme"]]) {
      radios[axis] = axes[axis].map((name, place) => {
        const input = element("input", { type: "radio", name: group, value: name });
        input.addEventListener("change", () => choose({ ...chosen, [axis]: place }));
        at(group).querySelector(".choice").append(element("label", {}, input, element("span", { text: name })));
        return input;
      });
    }
    at("asked").addEventListener("click", () => choose(data.asked));
    at("controls").addEventListener("submit", (event) => event.preventDefault());
    at("moment").addEventListener("input", (event) => showMoment(Number(event.target.value)));
    for (const radio of document.getElementsByName("shown")) radio.addEventListener("change", showStrip);
    addEventListener("hashchange", () => choose(fromAddress()));
  }

  /** Go to a place of the grid. What is drawn anew loses the focus, which then goes to ``focus``. */
  function choose(place, focus = "") {
    for (const axis of AXES) chosen[axis] = place[axis];
    const hash = toAddress();
    if (location.hash !== hash) history.replaceState(null, "", hash);
    show();
    if (focus) document.querySelector(focus)?.focus({ preventScroll: true });
  }

  function show() {
    const cell = cellAt(chosen);
    for (const [axis, slider] of Object.entries(sliders)) slider.show(chosen[axis]);
    for (const [axis, inputs] of Object.entries(radios)) inputs.forEach((input, place) => (input.checked = place === chosen[axis]));
    at("choice").textContent = named(chosen).join(" · ");
    at("verdict").textContent = verdictOf(cell);
    at("facts").textContent = factsOf(cell);
    at("answer").dataset.verdict = cell ? cell.verdict : "not run";
    for (const field of ["peak", "rest", "sent"]) at("answer").dataset[field] = cell ? cell[field] : "";
    at("here").href = toAddress();
    const steps = adviceFor(chosen);
    at("spoken").textContent = `${named(chosen).join(", ")}: ${verdictOf(cell)}. ${steps.length && steps[0].target ? `${words(steps[0].target, differing(chosen, steps[0].target))} ${steps[0].after}.` : ""}`;
    showAdvice();
    showRows();
    showMap();
    showStrip();
  }

  // -- the address

  function toAddress() {
    const pairs = AXES.filter((axis) => value(chosen, axis) !== null).map((axis) => [NAMES[axis], String(value(chosen, axis))]);
    return `#${new URLSearchParams(pairs)}`;
  }
  function fromAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    const place = { ...data.asked };
    for (const axis of AXES) {
      const found = axes[axis].findIndex((each) => String(each) === given.get(NAMES[axis]));
      if (found >= 0) place[axis] = found;
    }
    return place;
  }

  at("plan").hidden = false;
  build();
  choose(fromAddress());
  document.documentElement.dataset.ready = "true";
})();
