/* One transport for all schemes: it moves a moment along their common axis and shows each scheme there.

   Owns the state of the player and its controls. What a moment means is lockstep.js's affair. */

"use strict";

const Player = (() => {
  const { data, find, own, unique, look } = Page;
  const { element, shape, exact } = Draw;
  const SPEEDS = [0.5, 1, 2, 4, 8];
  const STAY = 420; // milliseconds at a moment, at speed 1
  const FLIGHT = 1900; // and at one in which a collective runs
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const ICONS = {
    first: "M5 4v16M19 5v14L8 12z", back: "M16 5v14L6 12z", play: "M7 4v16l13-8z", pause: "M6 4h4v16H6zM14 4h4v16h-4z",
    next: "M8 5v14l10-7z", last: "M19 4v16M5 5v14l11-7z", peak: "M12 20l-6-8h12zM4 5h16",
  };
  const icon = (name) => shape("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, shape("path", { d: ICONS[name], fill: "currentColor", stroke: "currentColor", "stroke-width": 2 }));

  function start() {
    const state = { moment: 0, hops: 0, playing: false, timer: 0, frame: 0 };
    const grid = Grid.make(find("grid"));
    const depth = Depth.make((index) => go(axis.shown[focused()].indexOf(index)));
    let [runs, axis, panels] = [[], null, []];
    const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
    const focused = () => Math.max(0, runs.findIndex(({ scheme }) => scheme === chosen("focus")));
    const frameOf = (i) => runs[i].frames[axis.shown[i][state.moment]];

    // -- what is shown

    /** All schemes on so many ranks, afresh. */
    function gather() {
      runs = Replay.runs.filter(({ ranks }) => ranks === Number(find("ranks").value));
      axis = Lockstep.together(runs);
      const list = find("focus");
      const before = list.querySelector("input:checked")?.value;
      const pieces = ({ row }) => Object.values(row.pieces).reduce((sum, { of }) => sum + of, 0);
      const most = runs.reduce((best, run) => (pieces(run) >= pieces(best) ? run : best), runs[0]).scheme;
      const focus = runs.some(({ scheme }) => scheme === before) ? before : most;
      list.replaceChildren(
        list.firstElementChild,
        ...runs.map(({ scheme }) => element("label", {}, element("input", { type: "radio", name: "focus", value: scheme, checked: scheme === focus }), element("span", { text: scheme }))),
      );
      find("scrub").max = axis.count - 1;
      strips();
      refocus();
    }

    function strips() {
      const all = chosen("shown") === "all";
      const bands = Replay.bands.filter(({ name }) => all || !data.states.includes(name));
      const sum = (held) => bands.reduce((count, { name }) => count + own(held, name), 0);
      const asked = ({ shortage }) => (all && shortage?.place === "card" ? Draw.total(shortage.held) + shortage.asked : 0);
      const tops = runs.map((run) => Math.max(1, asked(run), ...run.frames.map(({ held }) => sum(held))));
      const shared = chosen("scale") === "shared";
      panels = runs.map((run, i) => {
        const most = (shared ? Math.max(...tops) : tops[i]) * 1.02;
        const held = axis.shown[i].map((index) => run.frames[index].held);
        const sums = held.map(sum);
        const at = sums.indexOf(Math.max(...sums));
        const { capacity } = data.settings;
        const limit = all && capacity !== null && capacity <= most ? { bytes: capacity, text: `card ${exact(capacity)}` } : null;
        const drawn = Draw.strip({
          held, bands, most, phases: axis.phases, limit, move: (to) => go(to),
          peak: { at, text: `${all ? "peak" : "most"} ${exact(sums[at])}` },
          label: `${run.scheme}: bytes held over the step by band, ${all ? "peak" : "at most"} ${exact(sums[at])}`,
        });
        return panel(run, drawn, sum);
      });
      find("panels").replaceChildren(...panels.map(({ element: each }) => each));
    }

    function panel(run, drawn, sum) {
      const [now, rate, verb, sentence] = ["b", "span", "span", "span"].map((tag) => element(tag));
      verb.className = "verb";
      const made = element(
        "article",
        { class: "panel", "data-scheme": run.scheme, "data-ranks": run.ranks, "aria-label": `${run.scheme} on ${run.ranks} ranks` },
        element("h3", { class: "sample" }, Draw.sample(look(run.scheme)), run.scheme),
        element("p", { class: "now" }, now, rate),
        drawn.element,
        element("p", { class: "words" }, verb, " ", sentence),
      );
      return {
        element: made,
        show(index, moment) {
          const frame = run.frames[index];
          Object.assign(made.dataset, { event: index, held: frame.total });
          made.classList.toggle("at-peak", index === run.top);
          now.textContent = exact(frame.total);
          const part = chosen("shown") === "all" ? "" : `, of which ${exact(sum(frame.held))} not model states`;
          rate.textContent = ` on each rank, ${(frame.total / data.parameters).toFixed(2)} B per parameter${part}`;
          [verb.textContent, sentence.textContent] = Words.say(run, frame);
          drawn.show(moment);
        },
      };
    }

    function refocus() {
      const run = runs[focused()];
      grid.set(run);
      depth.set(run);
      find("owner").textContent = `Who owns what: ${run.scheme} on ${run.ranks} rank${run.ranks === 1 ? "" : "s"}`;
      find("ranks-left").textContent = grid.left() ? `The first ${run.ranks - grid.left()} of ${run.ranks} ranks are drawn.` : "";
      show(true);
    }

    // -- where it is

    /** Shows the moment; a reader hears of it when it was asked for, not while it plays. */
    function show(spoken) {
      const index = axis.shown[focused()][state.moment];
      panels.forEach((each, i) => each.show(axis.shown[i][state.moment], state.moment));
      depth.show(index);
      const where = `${axis.names[state.moment].text}, moment ${state.moment} of ${axis.count - 1}`;
      find("position").textContent = where;
      find("scrub").value = state.moment;
      find("scrub").setAttribute("aria-valuetext", where);
      ring();
      const peaked = runs.filter((_, i) => axis.peaks[i] === state.moment).map(({ scheme }) => scheme);
      find("peaked").textContent = peaked.length ? `Peak of ${peaked.join(", ")}` : "";
      if (!spoken) return;
      const said = runs.map((run, i) => `${run.scheme}: ${exact(frameOf(i).total)} held`).join("; ");
      const [verb, sentence] = Words.say(runs[focused()], frameOf(focused()));
      find("spoken").textContent = `${where}. ${find("peaked").textContent} ${said}. ${runs[focused()].scheme}: ${verb}. ${sentence}`;
    }

    /** The grid, and the hop that it is at. */
    function ring() {
      const [run, frame] = [runs[focused()], frameOf(focused())];
      const { collective } = frame;
      const index = axis.shown[focused()][state.moment];
      const flying = Boolean(collective?.job) && index === collective.flight;
      const size = collective?.ring.size ?? 1;
      const made = collective && index > collective.flight ? size - 1 : flying ? state.hops : 0;
      grid.show(index, made);
      const hop = find("hop");
      hop.disabled = !flying;
      hop.max = flying ? size - 1 : 0;
      hop.value = flying ? Math.floor(made) : 0;
      const text = collective ? Words.ring(collective, Math.floor(made)) : `Nothing is sent now. ${Words.say(run, frame)[1]}`;
      if (find("ring").textContent !== text) find("ring").textContent = text;
      hop.setAttribute("aria-valuetext", flying ? text : "no collective is under way");
    }

    function go(moment, spoken = true) {
      state.moment = Math.max(0, Math.min(axis.count - 1, moment));
      state.hops = 0;
      cancelAnimationFrame(state.frame);
      show(spoken);
      if (!calm.matches && !find("hop").disabled) fly();
    }

    /** The hops of a collective, one after the other. */
    function fly() {
      const [began, hops] = [performance.now(), Number(find("hop").max)];
      const whole = FLIGHT / (state.playing ? Number(find("speed").value) : 1);
      const draw = (time) => {
        state.hops = Math.min(hops, (hops * Math.max(0, time - began)) / whole);
        ring();
        if (state.hops < hops) state.frame = requestAnimationFrame(draw);
      };
      state.frame = requestAnimationFrame(draw);
    }

    // -- playing

    function play() {
      if (state.moment === axis.count - 1) go(0, false);
      state.playing = true;
      face();
      wait();
    }

    function wait() {
      const flying = !find("hop").disabled && !calm.matches;
      state.timer = setTimeout(() => {
        go(state.moment + 1, false);
        const peak = find("peaks").checked && axis.peaks.includes(state.moment);
        if (peak || state.moment === axis.count - 1) stop();
        else wait();
      }, (flying ? FLIGHT * 1.1 : STAY) / Number(find("speed").value));
    }

    function stop() {
      clearTimeout(state.timer);
      if (!state.playing) return;
      state.playing = false;
      face();
      show(true);
    }

    function face() {
      find("play").replaceChildren(icon(state.playing ? "pause" : "play"));
      find("play").setAttribute("aria-label", state.playing ? "Pause" : "Play");
    }

    const later = (from) => axis.peaks.filter((at) => at > from).sort((a, b) => a - b)[0] ?? Math.min(...axis.peaks);
    const MOVES = {
      first: () => 0, back: () => state.moment - 1, next: () => state.moment + 1, last: () => axis.count - 1,
      peak: () => later(state.moment),
    };
    const press = (name) => {
      stop();
      go(MOVES[name]());
    };

    // -- controls

    find("ranks").append(...unique(Replay.runs.map(({ ranks }) => ranks)).sort((a, b) => a - b).map((n) => element("option", { text: n, value: n, selected: n === Replay.runs[0].ranks })));
    find("speed").append(...SPEEDS.map((speed) => element("option", { text: `${speed}×`, value: speed, selected: speed === 1 })));
    for (const name of Object.keys(MOVES)) {
      find(name).append(icon(name));
      find(name).addEventListener("click", () => press(name));
    }
    find("play").addEventListener("click", () => (state.playing ? stop() : play()));
    find("scrub").addEventListener("input", ({ target }) => {
      const to = Number(target.value);
      stop();
      go(to);
    });
    find("hop").addEventListener("input", ({ target }) => {
      const hops = Number(target.value);
      cancelAnimationFrame(state.frame);
      stop();
      state.hops = hops;
      ring();
    });
    find("ranks").addEventListener("change", () => {
      stop();
      state.moment = 0;
      gather();
    });
    find("focus").addEventListener("change", refocus);
    for (const name of ["scale", "shown"]) find(name).addEventListener("change", () => (strips(), show(false)));
    const KEYS = { ArrowLeft: "back", ArrowRight: "next", Home: "first", End: "last", p: "peak", P: "peak" };
    find("player").addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
      const { target, key } = event;
      if (target.matches("select, input[type=radio], input#hop") && key !== "p" && key !== "P") return;
      if (key === " " && !target.matches("button, input[type=checkbox], summary")) state.playing ? stop() : play();
      else if (Object.hasOwn(KEYS, key)) press(KEYS[key]);
      else return;
      event.preventDefault();
    });
    face();
    find("player").hidden = false;
    gather();
    return { legend: () => Draw.legend(Replay.bands) };
  }

  return { start };
})();
