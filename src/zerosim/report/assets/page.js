/* The page's moving parts: the step player and the charts.

   Everything drawn comes from the records in the element "data"; nothing is computed but units, running
   sums of what the events say, and where things stand on the screen. Text from the records becomes text
   nodes, or goes through plain() on its way to Plotly, which reads tags in its labels. */

"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const find = (id) => document.getElementById(id);
  const bytes = (count) => `${count.toLocaleString("en-US")} B`;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 40rem)");
  const wide = matchMedia("(min-width: 60rem)");

  /** An element with properties (class, text, style variables, attributes) and children. */
  function make(tag, { text, class: name, vars, ...attributes } = {}, ...children) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    for (const [key, value] of Object.entries(vars ?? {})) element.style.setProperty(key, value);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function draw(tag, attributes, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  const total = (held) => Object.values(held).reduce((sum, count) => sum + count, 0);
  const unique = (values) => [...new Set(values)];
  const own = (table, key) => (Object.hasOwn(table, key) ? table[key] : undefined); // names may be anything

  // -- what a run replays

  /** A step as frames: what a rank holds before the first event and after each. The total is the recorded one. */
  function replay({ start, events, shortage, ...run }) {
    const frames = [{ held: start, total: total(start), event: null }];
    for (const [kind, name, unit, nbytes, after, , phase] of events) {
      const before = frames.at(-1).held;
      const sign = own({ hold: 1, free: -1 }, kind) ?? 0;
      const held = sign ? { ...before, [name]: (own(before, name) ?? 0) + sign * nbytes } : before;
      frames.push({ held, total: after, event: { kind, name, unit, nbytes, phase, sign } });
    }
    if (shortage) {
      const held = shortage.on_card;
      frames.push({ held, total: total(held), event: { kind: "shortage", ...shortage, sign: 0 } });
    }
    const top = frames.reduce((best, frame, index) => (frame.total > frames[best].total ? index : best), 0);
    run = { ...run, frames, shortage, top, peak: run.peak ?? frames[top].total };
    frames.forEach((frame, index) => Object.assign(frame, work(run, index)));
    return run;
  }

  /** What a frame is part of: the computation or collective that is logged next, and the phase around it. */
  function work({ frames }, index) {
    const phase = frames[index].event?.phase;
    let around = "";
    for (let i = index; i > 0 && !around; i--) {
      const here = frames[i].event.phase;
      if (here && here !== "communication" && here !== "other") around = here;
    }
    for (let i = index; phase && i < frames.length && frames[i].event?.phase === phase; i++) {
      const { kind, name, unit } = frames[i].event;
      if (kind === "send" || kind === "compute") return { around, busy: kind, job: name, on: unit };
    }
    return { around, busy: "", job: "", on: "" };
  }

  /** Several runs on one timeline: what they all compute, they compute in the same slot.

      Between two computations each run's events are spread over as many slots as the busiest run needs.
      Returns the number of slots and, for each run, the frame that it shows in each slot. */
  function lockstep(runs) {
    const marks = runs.map(({ frames }) =>
      frames.flatMap((frame, index) => (frame.event?.kind === "compute" ? [index] : [])),
    );
    const names = marks.map((mine, i) =>
      mine.map((index) => {
        const { name, unit } = runs[i].frames[index].event;
        return JSON.stringify([name, unit]);
      }),
    );
    const longest = names.reduce((best, mine) => (mine.length > best.length ? mine : best), []);
    const alike = names.every((mine) => mine.every((name, i) => name === longest[i]));
    const segments = alike ? longest.length + 1 : 1;
    const cuts = runs.map(({ frames }, i) => {
      const end = frames.length - 1;
      const cut = [0, ...(alike ? marks[i] : []), end];
      return [...cut, ...Array(segments + 1 - cut.length).fill(end)]; // a run that ended early stays where it is
    });
    const shown = runs.map(() => [0]);
    for (let s = 0; s < segments; s++) {
      const slots = Math.max(...cuts.map((cut) => cut[s + 1] - cut[s]));
      for (let slot = 1; slot <= slots; slot++) {
        cuts.forEach((cut, i) => shown[i].push(cut[s] + Math.floor(((cut[s + 1] - cut[s]) * slot) / slots)));
      }
    }
    return { slots: shown[0].length - 1, shown };
  }

  // -- what is said

  const HOLDS = {
    "gathered params": ["gather", (unit) => `Each rank makes room for all parameters of ${unit}.`],
    "unreduced grads": [
      "hold",
      (unit) => `Each rank makes room for all gradients of ${unit}, to be reduced and released.`,
    ],
    "ring blocks": [
      "hold",
      (unit, job) => `Each rank takes a block for the ring: ${job || "a collective"} of ${unit}.`,
    ],
    activations: ["hold", (unit) => `Each rank keeps activations of ${unit}.`],
  };
  const FREES = {
    "gathered params": [
      "release",
      (unit) => `Each rank releases the parameters of ${unit} that it had gathered; its own share stays.`,
    ],
    "unreduced grads": [
      "release",
      (unit) => `Each rank releases the gradients of ${unit}; its own share of their average stays.`,
    ],
    "ring blocks": [
      "release",
      (unit, job) => `Each rank gives back a block of the ring: ${job || "a collective"} of ${unit}.`,
    ],
    activations: ["release", (unit) => `Each rank drops activations of ${unit}.`],
  };
  const COMPUTES = {
    forward: (unit) => `Each rank computes the forward of ${unit} on its own rows.`,
    backward: (unit) => `Each rank computes the backward of ${unit} on its own rows.`,
    optimizer: (unit) => `Each rank updates what it owns of ${unit}.`,
  };
  const SENDS = {
    "all-gather": "gather",
    "reduce-scatter": "reduce",
    "all-reduce": "reduce",
  };

  /** A frame in words: a verb and a sentence. */
  function say(run, frame) {
    const { event } = frame;
    if (!event) return ["rest", `Before the step: each rank holds ${bytes(frame.total)}.`];
    const { kind, name, nbytes } = event;
    const unit = event.unit || "the model";
    if (kind === "shortage") {
      const asked = `${bytes(event.asked)} of ${event.band} were asked for ${unit}`;
      const where = event.place === "host" ? " on the host" : "";
      return ["out of memory", `${asked} on top of ${bytes(total(event.held))}${where}: the run ends here.`];
    }
    if (kind === "hold") {
      const [verb, text] = own(HOLDS, name) ?? ["hold", () => `Each rank holds more of ${name} for ${unit}.`];
      return [verb, `${text(unit, frame.job)} +${bytes(nbytes)} of ${name}.`];
    }
    if (kind === "free") {
      const [verb, text] = own(FREES, name) ?? ["release", () => `Each rank holds less of ${name} for ${unit}.`];
      return [verb, `${text(unit, frame.job)} −${bytes(nbytes)} of ${name}.`];
    }
    if (kind === "send") {
      const hops = `${run.ranks - 1} ${run.ranks === 2 ? "hop" : "hops"}`;
      const sent = `each rank has sent ${bytes(nbytes)} to its lower neighbour`;
      return [
        own(SENDS, name) ?? "send",
        `The ${name} of ${unit} is done: ${sent} in ${name === "all-reduce" ? "twice " : ""}${hops}.`,
      ];
    }
    if (kind === "compute")
      return ["compute", (own(COMPUTES, name) ?? ((u) => `Each rank computes ${name} of ${u}.`))(unit)];
    return [kind, `${name}, ${unit}, ${bytes(nbytes)}.`];
  }

  const where = (frame) =>
    [frame.around, frame.event?.unit].filter(Boolean).join(" · ") || (frame.event ? "other" : "before the first event");

  // -- the bands and their colours

  const runs = data.runs.map(replay);
  const bands = unique([
    ...Object.keys(data.colours),
    ...runs.flatMap(({ frames }) => frames.flatMap(({ held }) => Object.keys(held))),
  ]).filter((band) => runs.some(({ frames }) => frames.some(({ held }) => own(held, band))));
  const colour = (band) => own(data.colours, band) ?? "#777777";
  const PLAIN = { color: "#777777", symbol: "circle", dash: "solid" };
  const look = (name) => own(data.looks, name) ?? PLAIN; // by its place among the schemes, as page.py has it
  const schemeColour = (name) => look(name).color;

  /** The size of one of many things that may lie upon each other: each is smaller than those before it. */
  const nested = (place, count, least, step, most) =>
    least + (count - 1 - place) * Math.min(step, (most - least) / Math.max(count - 1, 1));

  /** Black or white, whichever is the more legible on a colour (WCAG 2 relative luminance). */
  function inkOn(hex) {
    const [r, g, b] = [1, 3, 5]
      .map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
  }

  /** A stack of bands is one gradient, whose edges are variables of the panel: N ranks alike cost one change. */
  function dressStacks() {
    const edges = bands.map((_, i) => `--edge${i}`);
    for (const name of edges) {
      CSS.registerProperty?.({ name, syntax: "<percentage>", inherits: true, initialValue: "0%" });
    }
    const plainStops = bands.map((band, i) => `${colour(band)} 0 var(${edges[i]})`);
    // A hairline between two bands, but not at the cost of a thin one.
    const splitStops = bands.map((band, i) => {
      const [edge, below] = [`var(${edges[i]})`, i ? `var(${edges[i - 1]})` : "0%"];
      return `${colour(band)} 0 calc(${edge} - clamp(0px, ${edge} - ${below} - 3px, 1px)), var(--ground) 0 ${edge}`;
    });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(`
      .gpu { background-image: linear-gradient(to top, ${plainStops.join(", ")}, transparent 0); }
      .rank { background-image: linear-gradient(to top, ${splitStops.join(", ")}, transparent 0); }
      @media (prefers-reduced-motion: no-preference) {
        .panel { transition: ${edges.map((name) => `${name} var(--glide, 120ms) ease-out`).join(", ")}; }
      }`);
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  }

  // -- one run on the screen

  /** Steps of a scale from 0 to most: about four of 1, 2, 2.5 or 5 times a power of ten. */
  function ticks(most) {
    const rough = most / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough) * power;
    return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
  }

  function short(count) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let power = 0;
    while (power < units.length - 1 && Number((count / 1000 ** power).toPrecision(3)) >= 1000) power++;
    return `${Number((count / 1000 ** power).toPrecision(3))} ${units[power]}`;
  }

  class Panel {
    constructor(run, shown, state, scrub) {
      Object.assign(this, { run, shown, state });
      this.visible = bands.filter((band) => state.shown === "all" || !data.states.includes(band));
      this.sum = (frame) => this.visible.reduce((sum, band) => sum + (own(frame.held, band) ?? 0), 0);
      const height = (each) =>
        Math.max(
          ...each.frames.map((frame) => this.sum(frame)),
          each.shortage?.place === "card" && state.shown === "all" ? total(each.shortage.held) + each.shortage.asked : 0,
        );
      this.most = Math.max(...(state.scale === "fit" ? [run] : runs).map(height), 1);
      this.top = Math.max(...run.frames.map((frame) => this.sum(frame)));
      this.percent = (count) => `${(100 * count) / this.most}%`;
      this.element = make("article", {
        class: "panel",
        "data-scheme": run.scheme,
        "data-ranks": run.ranks,
        "aria-label": `${run.scheme} on ${run.ranks} ranks`,
        vars: { "--scheme": schemeColour(run.scheme) },
      });
      this.now = make("b");
      this.rate = make("span");
      this.where = make("p", { class: "where" });
      this.verb = make("span", { class: "verb" });
      this.sentence = make("span");
      this.element.append(
        make("h3", { text: run.scheme }),
        make("p", { class: "now" }, this.now, this.rate),
        this.where,
        make("p", { class: "words" }, this.verb, " ", this.sentence),
        (this.body = make("div", { class: "body" }, this.stage())),
        this.timeline(scrub),
      );
    }

    /** The bars: one rank enlarged, then all, on one scale with the peak. */
    stage() {
      const { run } = this;
      const line = (name, count, text) => {
        const element = make("div", { class: name }, make("span", { text }));
        element.style.bottom = this.percent(count);
        return element;
      };
      this.labels = this.visible.map((band) => {
        const i = bands.indexOf(band);
        const label = make("span", { text: band });
        label.style.bottom = `calc((var(--edge${i}) + ${i ? `var(--edge${i - 1})` : "0%"}) / 2)`;
        label.style.color = inkOn(colour(band));
        return label;
      });
      const columns = run.ranks <= 32 ? run.ranks : run.ranks <= 128 ? 32 : 64;
      const drawn = Math.min(run.ranks, 1024);
      const gpus = make(
        "div",
        { class: `gpus ${run.ranks > 8 ? "dense" : ""}`, vars: { "--columns": columns } },
        ...Array.from({ length: drawn }, () => make("i", { class: "gpu" })),
      );
      const plot = make(
        "div",
        { class: "plot" },
        ...ticks(this.most).map((count) => line("tick", count, short(count))),
        make("div", { class: "rank" }, ...this.labels),
        gpus,
        line("mark", this.top, `${this.state.shown === "all" ? "peak" : "most"} ${bytes(this.top)}`),
      );
      const { capacity } = data.settings;
      if (capacity !== null && capacity <= this.most && this.state.shown === "all") {
        // Where the card's line would cross the peak's label, that goes under its own.
        plot.lastChild.classList.toggle("under", capacity - this.top < 0.15 * this.most);
        plot.append(line("mark card", capacity, `card ${bytes(capacity)}`));
      }
      const all =
        run.ranks === 1
          ? "rank 0"
          : `ranks 0 to ${run.ranks - 1}, all alike${drawn < run.ranks ? `; ${drawn} drawn` : ""}`;
      this.wire = make("span");
      return make(
        "div",
        { class: run.ranks > 32 ? "stage rows" : "stage", "aria-hidden": "true" },
        plot,
        make(
          "div",
          { class: "feet" },
          make("div", { text: "one rank" }),
          make(
            "div",
            {},
            make("div", { class: run.ranks > 1 ? "wire" : "" }),
            make("div", { class: "caption" }, make("span", { text: all }), this.wire),
          ),
        ),
      );
    }

    /** The whole step as stacked areas over its slots, with the phases behind and a playhead; dragging scrubs. */
    timeline(scrub) {
      const slots = this.shown.length;
      const svg = draw("svg", {
        viewBox: `0 0 ${slots} ${this.most}`,
        preserveAspectRatio: "none",
        "aria-hidden": "true",
      });
      const frames = this.shown.map((index) => this.run.frames[index]);
      const labels = make("div", { class: "phases", "aria-hidden": "true" });
      for (let from = 0, to; from < slots; from = to) {
        const phase = frames[from].around;
        for (to = from + 1; to < slots && frames[to].around === phase; to++);
        if (!phase) continue;
        if (phase !== "backward")
          svg.append(draw("rect", { class: "phase", x: from, y: 0, width: to - from, height: this.most }));
        const label = make("span", { text: phase, title: phase });
        // The last phase is short: its name may begin before it does.
        if (to === slots) label.style.right = "0";
        else label.style.cssText = `left: ${(100 * from) / slots}%; width: ${(100 * (to - from)) / slots}%`;
        labels.append(label);
      }
      const base = frames.map(() => 0);
      for (const band of this.visible) {
        const floor = [...base];
        frames.forEach((frame, slot) => {
          base[slot] += own(frame.held, band) ?? 0;
        });
        const up = base.map((level, slot) => `H${slot}V${this.most - level}H${slot + 1}`).join("");
        const down = floor
          .map((level, slot) => `H${slot + 1}V${this.most - level}H${slot}`)
          .reverse()
          .join("");
        svg.append(draw("path", { d: `M0 ${this.most}${up}V${this.most}${down}Z`, fill: colour(band) }));
      }
      const at = frames.findIndex((frame) => this.sum(frame) === this.top);
      const top = make("div", { class: "top" });
      top.style.left = `${(100 * (at + 0.5)) / slots}%`;
      top.style.bottom = this.percent(this.top);
      this.playhead = make("div", { class: "playhead" });
      this.playhead.style.width = `max(3px, ${100 / slots}%)`;
      const strip = make("div", { class: "strip", title: "Drag to scrub" }, svg, top, this.playhead);
      const move = ({ clientX }) => {
        const { left, width } = strip.getBoundingClientRect();
        scrub(Math.max(0, Math.min(slots - 1, Math.floor(((clientX - left) / width) * slots))));
      };
      strip.addEventListener("pointerdown", (event) => {
        strip.setPointerCapture(event.pointerId);
        move(event);
      });
      strip.addEventListener("pointermove", (event) => {
        if (strip.hasPointerCapture(event.pointerId)) move(event);
      });
      return make("div", {}, strip, labels);
    }

    show(slot) {
      const { run } = this;
      const index = this.shown[slot];
      const frame = (this.frame = run.frames[index]);
      const tall = this.element.querySelector(".rank").clientHeight;
      let level = 0;
      bands.forEach((band, i) => {
        const count = this.visible.includes(band) ? (own(frame.held, band) ?? 0) : 0;
        level += count;
        this.element.style.setProperty(`--edge${i}`, this.percent(level));
        const label = this.labels[this.visible.indexOf(band)];
        if (label) label.style.visibility = (count / this.most) * tall >= 15 ? "visible" : "hidden";
      });
      Object.assign(this.element.dataset, { event: index, held: frame.total });
      this.element.classList.toggle("sending", frame.busy === "send");
      this.element.classList.toggle("ended", frame.event?.kind === "shortage");
      const part = this.state.shown === "all" ? "" : `, of which ${bytes(this.sum(frame))} not model states`;
      this.now.textContent = bytes(frame.total);
      this.rate.textContent = ` on each rank, ${(frame.total / data.parameters).toFixed(2)} B per parameter${part}`;
      this.wire.textContent =
        frame.busy === "send" ? `◂ ${frame.job}, ${frame.on || "the model"}` : run.ranks > 1 ? "wire idle" : "no wire";
      const [verb, sentence] = say(run, frame);
      this.where.textContent = where(frame);
      this.verb.textContent = verb;
      this.sentence.textContent = sentence;
      this.playhead.style.left = `${(100 * slot) / this.shown.length}%`;
      return `${run.scheme}: ${where(frame)}. ${sentence} ${bytes(frame.total)} held.`;
    }
  }

  // -- the player

  const ICONS = {
    first: "M6 5h2v14H6zM19 5v14L9 12z",
    back: "M17 5v14L7 12z",
    play: "M7 4v16l13-8z",
    pause: "M6 5h4v14H6zM14 5h4v14h-4z",
    next: "M7 5v14l10-7z",
    last: "M16 5h2v14h-2zM5 5v14l10-7z",
  };
  const icon = (name) => draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, draw("path", { d: ICONS[name] }));
  const PACE = 300; // milliseconds from one event to the next at speed 1

  class Player {
    constructor() {
      this.element = find("player");
      this.slider = find("scrub");
      this.held = find("now"); // it moves about, and is for moments in no document
      const largest = Math.max(...runs.map(({ ranks }) => ranks));
      const names = unique(runs.map(({ scheme }) => scheme));
      this.state = { scheme: names.at(-1), ranks: data.settings.ranks, shown: "all", speed: 1 };
      this.scales = { one: "fit", many: "shared" }; // the panels side by side are there to be compared
      if (!runs.some(({ ranks }) => ranks === this.state.ranks)) this.state.ranks = largest;
      this.slot = 0;
      this.timer = 0;
      const choices = names.map((name) => [name, name]);
      if (names.length > 1) choices.push(["", "all, in lockstep"]);
      find("scale").hidden = names.length < 2;
      for (const [value, text] of choices) {
        const input = make("input", { type: "radio", name: "scheme", value });
        input.checked = value === this.state.scheme;
        input.addEventListener("change", () => this.set({ scheme: value }));
        find("schemes").append(make("label", {}, input, make("span", { text })));
      }
      this.options(
        "ranks",
        unique(runs.map(({ ranks }) => ranks))
          .sort((a, b) => a - b)
          .map((n) => [n, String(n)]),
      );
      this.options(
        "speed",
        [0.25, 0.5, 1, 2, 4, 8].map((speed) => [speed, `${speed}×`]),
      );
      for (const input of find("shown").querySelectorAll("input")) {
        input.addEventListener("change", () => this.set({ shown: input.value }));
      }
      for (const input of find("scale").querySelectorAll("input")) {
        input.addEventListener("change", () => {
          this.scales[this.state.scheme ? "one" : "many"] = input.value;
          this.set({});
        });
      }
      const actions = {
        first: () => this.go(0),
        back: () => this.go(this.slot - 1),
        play: () => this.toggle(),
        next: () => this.go(this.slot + 1),
        last: () => this.go(this.slots),
      };
      for (const [id, action] of Object.entries(actions)) {
        find(id).append(icon(id));
        find(id).addEventListener("click", action);
      }
      this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
      this.element.addEventListener("keydown", (event) => this.key(event, actions));
      for (const query of [narrow, wide]) query.addEventListener("change", () => this.render());
      this.element.hidden = false;
      this.render();
    }

    options(id, entries) {
      const select = find(id);
      for (const [value, text] of entries) {
        const option = make("option", { text, value });
        option.selected = value === this.state[id];
        select.append(option);
      }
      select.addEventListener("change", () => this.set({ [id]: Number(select.value) }));
    }

    /** Arrows belong to a slider, choice or list that has the focus, and space to what it presses. */
    key(event, actions) {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const { target } = event;
      const own = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", " ": "play" }[event.key];
      const pressed = event.key === " " && target.matches("button, select, input[type=radio]");
      const moved = event.key !== " " && target.matches("select, input, .scroll");
      if (!own || pressed || moved) return;
      event.preventDefault();
      actions[own]();
    }

    at(ranks) {
      return runs.filter((run) => run.ranks === ranks);
    }

    /** Change a choice, and stay at the same moment of the step. */
    set(changes) {
      if ("speed" in changes) {
        Object.assign(this.state, changes);
        if (this.timer) this.start();
        return;
      }
      const before = this.panels[0];
      const here = before ? lockstep(this.at(before.run.ranks)) : { slots: 1, shown: [[0]] };
      const mine = before ? this.at(before.run.ranks).indexOf(before.run) : 0;
      const moment =
        this.state.scheme === "" ? this.slot : Math.max(0, here.shown[mine].indexOf(before?.shown[this.slot] ?? 0));
      Object.assign(this.state, changes);
      const there = lockstep(this.at(this.state.ranks));
      const slot = Math.round((moment / (here.slots || 1)) * there.slots);
      const run = this.at(this.state.ranks).findIndex(({ scheme }) => scheme === this.state.scheme);
      this.slot = run < 0 ? slot : there.shown[run][slot];
      this.render();
    }

    render() {
      const { scheme, ranks } = this.state;
      const chosen = this.at(ranks).filter((run) => !scheme || run.scheme === scheme);
      const { slots, shown } =
        chosen.length > 1
          ? lockstep(chosen)
          : { slots: (chosen[0]?.frames.length ?? 1) - 1, shown: chosen.map(({ frames }) => frames.map((_, i) => i)) };
      this.slots = slots;
      this.state.scale = this.scales[scheme ? "one" : "many"];
      for (const input of find("scale").querySelectorAll("input")) input.checked = input.value === this.state.scale;
      this.panels = chosen.map((run, i) => new Panel(run, shown[i], this.state, (slot) => this.drag(slot)));
      const missing = unique(runs.map((run) => run.scheme))
        .filter((name) => (!scheme || name === scheme) && !chosen.some((run) => run.scheme === name))
        .map((name) => make("p", { text: `${name} ran out of memory on ${ranks} ranks: there is no step to show.` }));
      find("panels").className = `panels ${scheme ? "one" : "many"}`;
      find("panels").replaceChildren(...this.panels.map(({ element }) => element), ...missing);
      this.slider.max = slots;
      // The table stands beside a single rank where there is room, or else below.
      (this.panels.length === 1 && wide.matches ? this.panels[0].body : find("below")).append(this.held);
      this.tabulate();
      this.go(this.slot);
    }

    /** The table of bands: what is held now, by one scheme beside its rest and peak, or by all schemes. */
    tabulate() {
      const one = this.panels.length === 1 ? this.panels[0].run : null;
      const still = one
        ? [
            ["before the step", one.frames[0]],
            ["at the peak", one.frames[one.top]],
          ]
        : [];
      const heads = [...this.panels.map(({ run }) => (one ? "now" : run.scheme)), ...still.map(([name]) => name)];
      this.cells = this.panels.map(() => new Map());
      const row = (band, level) => {
        const cells = this.panels.map((_, i) => {
          const cell = make("td");
          this.cells[i].set(band, cell);
          return cell;
        });
        const fixed = still.map(([, frame]) =>
          make("td", { text: bytes(level(frame)), class: level(frame) ? "" : "none" }),
        );
        const head = make("th", { scope: "row", text: band ?? "total" });
        if (band !== null) head.style.setProperty("--band", colour(band));
        return make("tr", { class: band === null ? "sum" : "" }, head, ...cells, ...fixed);
      };
      const used = bands.filter((band) =>
        this.panels.some(({ run }) => run.frames.some(({ held }) => own(held, band))),
      );
      this.held.firstElementChild.replaceChildren(
        make(
          "thead",
          {},
          make(
            "tr",
            {},
            make("th", { scope: "col", text: "bytes per rank" }),
            ...heads.map((text) => make("th", { scope: "col", text })),
          ),
        ),
        make(
          "tbody",
          {},
          ...[...used].reverse().map((band) => row(band, ({ held }) => own(held, band) ?? 0)),
          row(null, (frame) => frame.total),
        ),
      );
    }

    go(slot) {
      this.slot = Math.max(0, Math.min(this.slots, slot));
      this.slider.value = this.slot;
      const said = this.panels.map((panel) => panel.show(this.slot));
      this.panels.forEach(({ frame }, i) => {
        for (const [band, cell] of this.cells[i]) {
          const change =
            band !== null && frame.event?.sign && frame.event.name === band ? frame.event.sign * frame.event.nbytes : 0;
          const count = band === null ? frame.total : (own(frame.held, band) ?? 0);
          cell.replaceChildren(bytes(count));
          cell.classList.toggle("none", count === 0);
          if (change)
            cell.prepend(
              make("small", { text: `${change < 0 ? "−" : "+"}${Math.abs(change).toLocaleString("en-US")}` }),
              " ",
            );
          cell.classList.toggle("changed", change !== 0);
        }
      });
      const place =
        this.panels.length > 1 ? `moment ${this.slot} of ${this.slots}` : `event ${this.slot} of ${this.slots}`;
      find("position").textContent = place;
      this.slider.setAttribute("aria-valuetext", `${place}. ${said.join(" ")}`);
      if (!this.timer) find("spoken").textContent = said.join(" ");
      if (this.timer && this.slot === this.slots) this.stop();
    }

    /** The pointer is on a timeline: its keys are the slider's. */
    drag(slot) {
      this.slider.focus({ preventScroll: true });
      this.go(slot);
    }

    toggle() {
      if (this.timer) {
        this.stop();
        return;
      }
      if (this.slot === this.slots) this.go(0);
      this.start();
    }

    start() {
      clearInterval(this.timer);
      const pace = PACE / this.state.speed;
      this.element.style.setProperty("--glide", `${Math.min(150, 0.6 * pace)}ms`);
      this.timer = setInterval(() => this.go(this.slot + 1), pace);
      this.face("pause", "Pause");
    }

    stop() {
      clearInterval(this.timer);
      this.timer = 0;
      this.face("play", "Play");
      this.go(this.slot);
    }

    face(name, label) {
      find("play").replaceChildren(icon(name));
      find("play").setAttribute("aria-label", label);
      this.element.classList.toggle("playing", Boolean(this.timer));
    }
  }

  // -- the charts

  /** Text that Plotly shows as it is: it reads tags and entities in labels, and %{...} in what it shows on hover. */
  const plain = (text) => String(text).replace(/[&<>%]/g, (c) => `&#${c.charCodeAt(0)};`);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const exact = (value) => (Number.isFinite(value) ? String(value) : "not a finite number"); // JSON has null for it
  const per = (count) => `${(count / data.parameters).toFixed(4)} B per parameter`;
  const lines = (...parts) => parts.filter(Boolean).join("<br>");
  const schemes = unique(data.sweep.map(({ scheme }) => scheme));

  /** For curves that may lie upon each other: the names of all that pass through a point, as only one is pointed at. */
  function passing(curves) {
    const names = new Map();
    for (const [name, points] of curves) {
      for (const [x, y] of points) names.set(`${x} ${y}`, [...(names.get(`${x} ${y}`) ?? []), plain(name)]);
    }
    return (x, y) => names.get(`${x} ${y}`).join(", ");
  }

  /** A chart's layout; in its margin there is room for so many rows of legend, and above them for the buttons. */
  function layout(x, y, rows, more = {}) {
    const [ink, line, ground] = ["--ink", "--line", "--ground"].map(css);
    const family = getComputedStyle(document.body).fontFamily;
    const axis = {
      gridcolor: line,
      linecolor: line,
      zerolinecolor: line,
      tickcolor: line,
      automargin: true,
      fixedrange: narrow.matches,
    };
    return {
      autosize: true,
      font: { color: ink, size: 13, family },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      margin: { t: narrow.matches ? 10 : 40 + 20 * rows, r: 12, b: 45, l: 55 },
      hoverlabel: { bgcolor: ground, bordercolor: line, font: { color: ink, family }, align: "left" },
      modebar: { bgcolor: "transparent", color: css("--faint"), activecolor: css("--accent") },
      dragmode: narrow.matches ? false : "zoom",
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 } },
      xaxis: { ...axis, title: { text: x }, ...more.xaxis },
      yaxis: { ...axis, title: { text: y }, ...more.yaxis },
      shapes: more.shapes ?? [],
      showlegend: true,
    };
  }

  const EMPTY = [{ text: "Every scheme ran out of memory.", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];

  function show(id, traces, arrangement) {
    const drawn = traces.some(({ y }) => y.some((value) => value !== null));
    Plotly.react(
      find(id),
      traces,
      { ...arrangement, annotations: drawn ? [] : EMPTY },
      {
        responsive: true,
        displaylogo: false,
        displayModeBar: !narrow.matches,
        // Named one by one: among those left out is one that would send the chart to a server.
        modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
        typesetMath: false,
      },
    );
  }

  /** The axis of N: powers of two on a logarithmic scale. */
  function overRanks() {
    const every = unique(data.sweep.map(({ ranks }) => ranks)).sort((a, b) => a - b);
    // Of two labels that would touch, the larger number stays.
    const labelled = every.filter((n, i) => i === every.length - 1 || every[i + 1] > 1.3 * n);
    const margin = Math.log10(1.2);
    return {
      type: "log",
      tickvals: labelled,
      ticktext: labelled.map(String),
      tickangle: 0,
      range: [Math.log10(every[0] ?? 1) - margin, Math.log10(every.at(-1) ?? 1) + margin],
    };
  }

  const rowsOf = (scheme) => data.sweep.filter((row) => row.scheme === scheme && row.fits);

  const QUANTITIES = [
    ["at rest", "resident", "solid", ""],
    ["peak", "peak_without_activations", "dash", "-open"],
    ["peak with activations", "peak", "dot", "-open-dot"],
  ];

  function memory() {
    const inParameters = find("memory-unit").value === "parameter";
    const value = (count) => (inParameters ? count / data.parameters : count);
    const traces = [];
    const asked = [...find("memory-of").querySelectorAll("input:checked")].map((input) => input.value);
    for (const scheme of schemes) {
      const rows = rowsOf(scheme);
      if (!rows.length) continue;
      const x = rows.map((row) => row.ranks);
      const shared = { x, legendgroup: scheme, hovertemplate: "%{text}<extra></extra>" };
      const ink = schemeColour(scheme);
      const key = {
        ...shared,
        x: [null],
        y: [null],
        name: plain(scheme),
        mode: "lines+markers",
        line: { color: ink, width: 3 },
        marker: { color: ink, size: 8, symbol: look(scheme).symbol },
      };
      traces.push(key);
      for (const [what, field, dash, fill] of QUANTITIES.filter(([, field]) => asked.includes(field))) {
        const text = rows.map((row) =>
          lines(
            `${plain(scheme)}, N = ${row.ranks}, ${what}`,
            `measured ${bytes(row[field])}, ${per(row[field])}`,
            `predicted ${bytes(row[`${field}_predicted`])}`,
          ),
        );
        // Of curves that are one, each is drawn over a broader one.
        const curve = String(rows.map((row) => row[field]));
        const under = schemes
          .slice(schemes.indexOf(scheme) + 1)
          .filter((other) => String(rowsOf(other).map((row) => row[field])) === curve).length;
        const broad = Math.min(2.5 * under, 12);
        traces.push({
          ...shared,
          y: rows.map((row) => value(row[field])),
          text,
          mode: "lines+markers",
          showlegend: false,
          name: `${plain(scheme)}, ${what}`,
          line: { color: ink, dash, width: 2 + broad },
          marker: { color: ink, symbol: `${look(scheme).symbol}${fill}`, size: 8 + 1.6 * broad },
        });
        if (!asked.includes("predicted")) continue;
        traces.push({
          ...shared,
          y: rows.map((row) => value(row[`${field}_predicted`])),
          mode: "markers",
          showlegend: false,
          hoverinfo: "skip",
          hovertemplate: undefined,
          name: `${plain(scheme)}, ${what}, predicted`,
          marker: { color: css("--ink"), symbol: "x-thin-open", size: 7, line: { width: 1.5 } },
        });
      }
    }
    show(
      "memory",
      traces,
      layout("N, number of ranks", inParameters ? "bytes per parameter (log scale)" : "bytes (log scale)", 1, {
        xaxis: overRanks(),
        yaxis: inParameters
          ? { type: "log", dtick: Math.log10(2), tickformat: "~r" }
          : { type: "log", dtick: 1, tickformat: "~s" },
      }),
    );
  }

  function traffic() {
    const inP = find("traffic-unit").value === "P";
    const P = data.parameters * data.itemsize;
    const value = (count) => (inP ? count / P : count);
    const most = Math.max(1, ...data.sweep.map(({ ranks }) => ranks));
    const curve = Array.from({ length: 101 }, (_, i) => most ** (i / 100));
    const traces = [2, 3].map((factor) => ({
      x: curve,
      y: curve.map((n) => value((P * factor * (n - 1)) / n)),
      mode: "lines",
      hoverinfo: "skip",
      name: `${factor}(N−1)/N`,
      line: { color: css("--faint"), width: 1, dash: factor === 2 ? "solid" : "dash" },
    }));
    const names = passing(schemes.map((scheme) => [scheme, rowsOf(scheme).map(({ ranks, sent }) => [ranks, sent])]));
    schemes.forEach((scheme, i) => {
      const rows = rowsOf(scheme);
      traces.push({
        x: rows.map((row) => row.ranks),
        y: rows.map((row) => value(row.sent)),
        mode: "markers",
        name: plain(scheme),
        text: rows.map((row) =>
          lines(
            `${names(row.ranks, row.sent)}, N = ${row.ranks}`,
            `sent ${bytes(row.sent)}, ${(row.sent / P).toFixed(4)} P`,
            `predicted ${bytes(row.sent_predicted)}`,
          ),
        ),
        hovertemplate: "%{text}<extra></extra>",
        marker: {
          color: schemeColour(scheme),
          symbol: `${look(scheme).symbol}${i < schemes.length - 1 ? "-open" : ""}`,
          size: nested(i, schemes.length, 6, 4.5, 26),
          line: { width: schemes.length < 6 ? 2 : 1.2, color: schemeColour(scheme) },
        },
      });
    });
    const high = 1.08 * Math.max(3 * P, ...data.sweep.map(({ sent }) => sent));
    const shapes = [2, 3].map((factor) => ({
      type: "line",
      xref: "paper",
      x0: 0,
      x1: 1,
      y0: value(factor * P),
      y1: value(factor * P),
      line: { color: css("--faint"), width: 1, dash: "dot" },
    }));
    show(
      "traffic",
      traces,
      layout("N, number of ranks", inP ? `in P × ${data.itemsize} bytes (P parameters)` : "bytes", 2, {
        xaxis: overRanks(),
        yaxis: { range: [value(-0.04 * high), value(high)], ...(inP ? {} : { tickformat: "~s" }) },
        shapes,
      }),
    );
  }

  /** The axis of steps: whole numbers. */
  const overSteps = () => ({
    dtick: data.settings.steps <= 12 ? 1 : undefined,
    tickformat: "d",
    range: [0.5, data.settings.steps + 0.5],
  });
  const breadth = (place, count) => nested(place, count, 1.8, 2.7, 16); // of curves in one place each shows

  function loss() {
    const names = passing(
      Object.entries(data.losses).map(([scheme, losses]) => [scheme, losses.map((y, x) => [x, y])]),
    );
    const traces = Object.entries(data.losses).map(([scheme, losses], i, all) => ({
      x: losses.map((_, step) => step + 1),
      y: losses,
      mode: "lines+markers",
      name: plain(scheme),
      text: losses.map((value, step) => lines(`${names(step, value)}, step ${step + 1}`, `loss ${exact(value)}`)),
      hovertemplate: "%{text}<extra></extra>",
      line: { color: schemeColour(scheme), dash: look(scheme).dash, width: breadth(i, all.length) },
      marker: { color: schemeColour(scheme), symbol: look(scheme).symbol, size: breadth(i, all.length) + 1 },
    }));
    show("loss", traces, layout("step", "loss, mean over the ranks", 1, { xaxis: overSteps() }));
  }

  /** Largest differences on a logarithmic scale with a place for zero, and for contrast what broken rules do. */
  function difference() {
    const quantity = find("difference-of").value;
    const distance = (a, b) => (a === null || b === null ? null : Math.abs(a - b));
    const curves = Object.keys(data.losses).map((scheme, i, all) => {
      const mine = data.differences.filter((each) => each.scheme === scheme);
      const reference = Object.values(data.losses).find((losses) => losses.length) ?? [];
      const points =
        quantity === "loss"
          ? data.losses[scheme].map((value, step) => [step + 1, distance(value, reference[step]), null])
          : mine.map((each) => [each.step, each.largest[quantity], each.differing[quantity]]);
      return { name: scheme, points, colour: schemeColour(scheme), width: breadth(i, all.length), dash: look(scheme).dash };
    });
    const { narrow_wire: wire, whole_model_bucket: buckets } = data.ablations;
    if (quantity === "master" || quantity === "params") {
      const broken = [
        ...(wire ? [[`${wire.wire} wire`, wire.drift]] : []),
        ...Object.entries(buckets).map(([precision, drift]) => [`one bucket, ${precision}`, drift]),
      ];
      broken.forEach(([name, drift], i) =>
        curves.push({
          name: `broken: ${name}`,
          points: drift.largest.map((value, step) => [step + 1, value, drift.differing[step]]),
          colour: css("--faint"),
          width: 2,
          dash: ["dash", "dot", "dashdot"][i % 3],
        }),
      );
    }
    const positive = curves.flatMap(({ points }) => points.map(([, value]) => value)).filter((value) => value > 0);
    const low = positive.length ? Math.floor(Math.log10(Math.min(...positive))) : -8;
    const high = positive.length ? Math.ceil(Math.log10(Math.max(...positive)) + 0.1) : 0;
    const zero = low - 1.5;
    const place = (value) => (value === 0 ? zero : value === null ? high : Math.log10(value));
    const names = passing(curves.map(({ name, points }) => [name, points]));
    const traces = curves.map(({ name, points, colour: ink, width, dash }) => ({
      x: points.map(([step]) => step),
      y: points.map(([, value]) => place(value)),
      mode: "lines+markers",
      name: plain(name),
      text: points.map(([step, value, count]) =>
        lines(
          `${names(step, value)}, step ${step}`,
          `largest difference ${exact(value)}`,
          count === null ? "" : `${count.toLocaleString("en-US")} values differ`,
        ),
      ),
      hovertemplate: "%{text}<extra></extra>",
      line: { color: ink, width, dash },
      marker: { color: ink, size: width + 1 },
    }));
    const every = Math.max(1, Math.ceil((high - low) / 6));
    const powers = Array.from({ length: Math.floor((high - low) / every) + 1 }, (_, i) => low + i * every);
    show(
      "difference",
      traces,
      layout("step", "largest difference", 4, {
        xaxis: overSteps(),
        yaxis: {
          tickvals: [zero, ...powers],
          ticktext: ["0", ...powers.map((power) => `10<sup>${String(power).replace("-", "−")}</sup>`)],
          range: [zero - 0.6, high + 0.2],
          zeroline: false,
        },
      }),
    );
  }

  function charts() {
    const quantities = [...unique(data.differences.flatMap(({ largest }) => Object.keys(largest))), "loss"];
    const preferred = ["master", "params"].find((name) => quantities.includes(name));
    for (const name of quantities) {
      const option = make("option", { text: name, value: name });
      option.selected = name === preferred;
      find("difference-of").append(option);
    }
    find("memory-unit").addEventListener("change", memory);
    find("memory-of").addEventListener("change", memory);
    find("traffic-unit").addEventListener("change", traffic);
    find("difference-of").addEventListener("change", difference);
    // What was not run has no chart: other N, or schemes to compare with.
    const drawn = { memory, traffic, loss, difference };
    if (!data.sweep.length) for (const id of ["memory", "traffic"]) delete drawn[id];
    if (Object.keys(data.losses).length < 2) delete drawn.difference;
    for (const id of ["memory", "traffic", "difference"]) find(id).closest("figure").hidden = !(id in drawn);
    const all = () => Object.values(drawn).forEach((chart) => chart());
    for (const query of [dark, narrow]) query.addEventListener("change", all);
    all();
  }

  dressStacks();
  if (runs.length) new Player();
  charts();
  document.documentElement.dataset.ready = "true";
})();
