/* The planner's page: sliders over a grid of steps that were run, whose cells it shows. What is chosen stands in the
   address. */

"use strict";

(() => {
  const { data, AXES, plural, whole, cellAt, logOf, value, named, seconds, instant, verdictOf, factsOf, differing, words, adviceFor } = Cells;
  const { element, shape, exact, total } = Draw;
  const { axes, memory } = data;
  const size = Draw.short;
  const at = (id) => document.getElementById(id);
  const NAMES = { row: "scheme", ranks: "gpus", rows: "micro-batch", sequence: "seq", checkpoint: "checkpoint" };
  const SIGNS = { fits: "✓", tight: "~", none: "✗", host: "✗", "": "–" };
  const chosen = { ...data.asked };

  function showAdvice(advice) {
    const lines = advice.map(({ target, before, after }) => {
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
    const present = data.bands.filter(({ name }) => Draw.own(cell.resident, name) || log.moments.some((held) => Draw.own(held, name)));
    view = { cell, log, from, present };
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
    const { cell, log, present } = view;
    const [top, now] = [log.moments[log.top], log.moments[moment]];
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
    const advice = adviceFor(chosen);
    const first = advice[0]?.target ? `${words(advice[0].target, differing(chosen, advice[0].target))} ${advice[0].after}.` : "";
    at("spoken").textContent = `${named(chosen).join(", ")}: ${verdictOf(cell)}. ${first}`;
    showAdvice(advice);
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
