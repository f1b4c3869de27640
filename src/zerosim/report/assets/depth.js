/* One scheme in depth, on demand: its two lanes, what it holds now by band, and every event. */

"use strict";

const Depth = (() => {
  const { element, exact } = Draw;
  const { own, find } = Page;

  /** Fills the element "depth" with a run; jump(frame) moves the player there. */
  function make(jump) {
    const details = find("depth");
    let [run, index, lanes, rows, stale] = [null, 0, null, [], true];

    function build() {
      stale = false;
      lanes = Lanes.make(run, jump);
      find("lanes").replaceChildren(lanes.element);
      find("lanes-sum").textContent = Lanes.sum(run);
      rows = run.frames.map(({ event, total, around }, at) => {
        const go = element("button", { type: "button", text: at, "aria-label": `Go to event ${at}`, on: { click: () => jump(at) } });
        const what = event ? [event.kind, event.name ?? event.band, event.unit] : ["start", "", ""];
        const moved = event?.sign ? `${event.sign > 0 ? "+" : "−"}${exact(event.nbytes)}` : event?.nbytes ? exact(event.nbytes) : "";
        const cells = [...what, around, moved, exact(total)].map((text) => element("td", { text }));
        return element("tr", {}, element("th", { scope: "row" }, go), ...cells);
      });
      find("events").tBodies[0].replaceChildren(...rows);
    }

    function show() {
      if (!details.open || !run) return;
      if (stale) build();
      lanes.show(index);
      rows.forEach((row, at) => (at === index ? row.setAttribute("aria-current", "step") : row.removeAttribute("aria-current")));
      const frame = find("events").closest(".scroll");
      frame.scrollTop = rows[index].offsetTop - frame.clientHeight / 2;
      find("now").tBodies[0].replaceChildren(...now());
    }

    /** Bytes by band at this event, at rest and at the peak. */
    function now() {
      const sides = [run.frames[index].held, run.start, run.frames[run.top].held];
      const bands = Replay.bands.filter(({ name }) => run.frames.some(({ held }) => own(held, name)));
      const line = (name, counts, color) =>
        element(
          "tr",
          { class: color ? "" : "sum", vars: color ? { "--band": color } : {} },
          element("th", { scope: "row" }, ...(color ? [element("i")] : []), name),
          ...counts.map((count) => element("td", { text: exact(count) })),
        );
      return [...bands.map(({ name, color }) => line(name, sides.map((held) => own(held, name)), color)), line("total", sides.map(Draw.total))];
    }

    details.addEventListener("toggle", show);
    return {
      set(next) {
        [run, stale] = [next, true];
        find("depth-title").textContent = `One scheme in depth: ${next.scheme} on ${next.ranks} rank${next.ranks === 1 ? "" : "s"}`;
      },
      show(frame) {
        index = frame;
        show();
      },
    };
  }

  return { make };
})();
