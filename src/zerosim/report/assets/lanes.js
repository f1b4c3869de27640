/* Computing and sending as two lanes in time. Knows pieces of work and when they could have run; draws in ink.

   A message is hatched where a computation could have run beside it, and a thin line shows from when until when. */

"use strict";

const Lanes = (() => {
  const { shape } = Draw;
  const FIELDS = ["lane", "name", "unit", "begin", "end", "event", "since", "until", "beside"];
  const pieces = (run) => run.lanes.map((piece) => Object.fromEntries(FIELDS.map((field, i) => [field, piece[i]])));
  const ms = (seconds) => `${(1e3 * seconds).toFixed(2)} ms`;

  /** What can be said of the messages together. */
  function sum(run) {
    const sent = pieces(run).filter(({ lane }) => lane !== "compute");
    if (!sent.length) return "Nothing is sent.";
    const free = sent.filter(({ beside }) => beside.length).length;
    return `Of ${sent.length} messages ${free} could run beside a computation (hatched; the thin line is the time in which it could); for the other ${sent.length - free} the ranks must wait.`;
  }

  const words = ({ lane, name, unit, begin, end, beside }) => {
    const what = `${name}${unit ? ` of ${unit}` : ""}, ${ms(end - begin)}`;
    if (lane === "compute") return `computing ${what}`;
    return `sending ${what}; ${beside.length ? `could run beside ${beside.join(", ")}` : "nothing to run beside"}`;
  };

  /** The lanes of a run; jump(event) is called for the piece that is chosen. Returns { element, show(event) }. */
  function make(run, jump) {
    const all = pieces(run);
    const last = Math.max(...all.map(({ end }) => end), 1e-9);
    let [at, head, place] = [0, null, null];
    const readout = Draw.element("output", { class: "readout", role: "status", "aria-live": "polite", "data-hint": "Point at a piece of work, or use the arrow keys, to read it." });
    const surface = Draw.element("div", {});
    const chart = Draw.element("div", { class: "chart lanes", tabindex: 0, role: "group", "aria-label": `Computing and sending in time, ${run.scheme}` }, surface, readout);
    let read = -1;
    const redraw = Draw.responsive(surface, (width) => {
      const [left, tall, height] = [76, 34, 148];
      const svg = Draw.canvas(width, height, `Computing and sending in time. ${sum(run)}`);
      place = Draw.linear([0, last], [left, width - 4]);
      Draw.hatch(svg, "hatch-message", "var(--ink)");
      ["computing", "sending"].forEach((name, i) => svg.append(Draw.text(0, 14 + i * 48 + tall / 2 + 4, name, { class: "strong" })));
      for (const value of place.ticks(Math.max(2, Math.floor(width / 110)))) {
        svg.append(shape("path", { class: "rule", d: `M${place(value)} 8V${height - 20}` }));
        svg.append(Draw.text(place(value), height - 5, `${Draw.number(1e3 * value, 3)} ms`, { "text-anchor": "middle" }));
      }
      let windows = 0;
      all.forEach((piece, i) => {
        const [x, wide] = [place(piece.begin), Math.max(1.5, place(piece.end) - place(piece.begin))];
        const computes = piece.lane === "compute";
        const y = computes ? 14 : 62;
        const kind = computes ? "work" : piece.beside.length ? "message free" : "message";
        const style = piece.beside.length ? { fill: "url(#hatch-message)" } : {};
        if (piece.beside.length) {
          const under = y + tall + 6 + (windows++ % 4) * 6; // one below the other, as they overlap
          svg.append(shape("path", { class: "window", d: `M${place(piece.since)} ${under - 2.5}v5m0 -2.5H${place(piece.until)}m0 -2.5v5M${x} ${under}V${y + tall}` }));
        }
        const bar = shape("rect", { class: kind, x, y, width: wide, height: tall, "data-event": piece.event, "data-piece": i, style });
        svg.append(bar);
        const label = `${piece.name} ${piece.unit}`;
        const fits = [label, piece.unit, piece.name].find((text) => text && Draw.breadth(text) < wide - 6);
        if (computes && fits) svg.append(Draw.text(x + wide / 2, y + tall / 2 + 4, fits, { "text-anchor": "middle", class: "strong" }));
      });
      head = shape("path", { class: "head" });
      svg.append(head);
      svg.addEventListener("pointermove", ({ target }) => target.dataset.piece && tell(Number(target.dataset.piece)));
      svg.addEventListener("click", ({ target }) => target.dataset.event && jump(Number(target.dataset.event)));
      show(at);
      return svg;
    });
    function tell(piece) {
      read = piece;
      readout.textContent = words(all[piece]);
    }
    chart.addEventListener("keydown", (event) => {
      const to = { ArrowRight: read + 1, ArrowLeft: read - 1, Home: 0, End: all.length - 1 }[event.key];
      if (to === undefined || !all.length || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      tell(Math.max(0, Math.min(all.length - 1, to)));
      jump(all[read].event);
    });
    function show(index) {
      at = index;
      if (!head) return;
      const time = run.events[Math.min(index, run.events.length) - 1]?.[5] ?? 0;
      head.setAttribute("d", `M${place(Math.min(time, last))} 8V124`);
    }
    return { element: chart, show, redraw };
  }

  return { make, sum };
})();
