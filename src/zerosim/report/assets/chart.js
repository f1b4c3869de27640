/* Lines with marks, on top of draw.js. It knows shapes and scales; not what is measured, nor any page.

   Draw.chart({ label, x, y, series, height = 320, reading, hint, snap, rules = [] })  returns an element
     x, y      { scale: "linear" | "log", base, domain: [low, high], ticks, format, title }; ticks and format may be left out
     series    [{ name, points: [{ x, y, ... }], dash, mark, size, quiet, lined, label }]: y null is a gap; dash as in
               stroke-dasharray; mark as in Draw.mark; lined: false leaves out the line, label: false the name beside it;
               quiet is fainter. Told apart by dash, mark and the name at the line's end, or below where that has no room
     rules     [{ y, text }]: levels that are drawn across
     reading   (x, [{ series, point }, ...]) => text, read out for the pointer and for the arrow keys
     hint      what stands where nothing is read out yet
     snap      the x that can be read out; without it those of all points                                            */

"use strict";

Draw.chart = ({ label, x, y, series, height = 320, reading, hint = "", snap, rules = [] }) => {
  const { element, shape } = Draw;
  const every = snap ? [...snap].sort((a, b) => a - b) : [...new Set(series.flatMap(({ points }) => points.map((point) => point.x)))].sort((a, b) => a - b);
  const named = series.filter((each) => each.label !== false && each.points.some((point) => point.y !== null));
  const tall = Math.max(height, 14 * named.length + 84); // room for every name
  const readout = element("output", { class: "readout", "data-hint": hint, role: "status", "aria-live": "polite" });
  const surface = element("div", { class: "surface" });
  const chart = element("div", { class: "chart", tabindex: 0, role: "group", "aria-label": label }, surface, readout);
  let [read, across, pointed] = [-1, null, null];

  const made = ({ scale, base, domain, ticks, format, ...rest }, range, about) => {
    const built = scale === "log" ? Draw.log(domain, range, base) : Draw.linear(domain, range);
    return { ...rest, scale: built, ticks: ticks ?? built.ticks(about), format: format ?? ((value) => Draw.number(value)) };
  };

  Draw.responsive(surface, (width) => {
    const beside = width >= 520;
    const names = Math.max(0, ...named.map(({ name }) => Draw.breadth(name, 600)));
    const rough = made(y, [1, 0], 6);
    const left = Math.max(...rough.ticks.map((value) => Draw.breadth(rough.format(value)))) + 12;
    const right = beside ? Math.min(names + 26, width * 0.4) : 10;
    const box = { left, top: 28, right: width - right, bottom: tall - 42 };
    const down = made(y, [box.bottom, box.top], Math.max(3, Math.round(tall / 55)));
    const over = made(x, [box.left + 12, box.right], Math.max(3, Math.round(width / 90)));
    across = over.scale;
    const svg = Draw.canvas(width, tall, label);
    Draw.axes(svg, box, over, down);
    for (const { y: level, text } of rules) {
      svg.append(shape("path", { class: "curve quiet", d: `M${box.left} ${down.scale(level)}H${box.right}`, "stroke-dasharray": "1 4" }));
      svg.append(Draw.text(box.left + 4, down.scale(level) - 4, text));
    }
    const ends = [];
    for (const each of series) {
      const group = shape("g", { "data-series": each.name });
      const placed = each.points.map((point) => (point.y === null ? null : [over.scale(point.x), down.scale(point.y)]));
      if (each.lined !== false) {
        const runs = [[]];
        for (const place of placed) place ? runs.at(-1).push(place) : runs.push([]);
        const d = runs.map(Draw.path).join("");
        if (d) group.append(shape("path", { class: each.quiet ? "curve quiet" : "curve", d, "stroke-dasharray": each.dash ?? null }));
      }
      placed.forEach((place, i) => {
        if (!place || !each.mark) return;
        const drawn = Draw.mark(each.mark, ...place, each.size ?? 4, `mark${each.quiet ? " quiet" : ""}${each.full ? " full" : ""}`);
        drawn.dataset.x = each.points[i].x;
        drawn.dataset.y = each.points[i].y;
        group.append(drawn);
      });
      svg.append(group);
      const last = placed.filter(Boolean).at(-1);
      if (named.includes(each) && last) ends.push({ name: each.name, x: last[0], y: last[1] });
    }
    pointed = shape("path", { class: "curve quiet", "stroke-width": 1, visibility: "hidden" });
    svg.append(pointed);
    pointed.dataset.top = box.top;
    pointed.dataset.bottom = box.bottom;
    show(read);
    if (!beside) return [svg, Draw.key(named)];
    spread(ends, box).forEach(({ name, x: from, y: level, at }) => {
      svg.append(shape("path", { class: "rule", d: `M${from + 5} ${level}L${box.right + 18} ${at}` }));
      svg.append(Draw.text(box.right + 21, at + 4, name, { class: "strong" }));
    });
    return svg;
  });

  /** Names at the ends of their lines, as near as they go without touching. */
  function spread(ends, box) {
    const sorted = [...ends].sort((a, b) => a.y - b.y).map((end) => ({ ...end, at: end.y }));
    for (let i = 1; i < sorted.length; i++) sorted[i].at = Math.max(sorted[i].at, sorted[i - 1].at + 14);
    const over = Math.max(0, (sorted.at(-1)?.at ?? 0) - box.bottom);
    for (let i = sorted.length - 1, most = Infinity; i >= 0; i--) {
      sorted[i].at = Math.min(sorted[i].at, most, i === sorted.length - 1 ? sorted[i].at - over : Infinity);
      most = sorted[i].at - 14;
    }
    return sorted;
  }

  function show(index) {
    read = index;
    if (!pointed) return;
    pointed.setAttribute("visibility", index < 0 ? "hidden" : "visible");
    if (index < 0) return void (readout.textContent = "");
    const [value, { top, bottom }] = [every[index], pointed.dataset];
    pointed.setAttribute("d", `M${across(value)} ${top}V${bottom}`);
    const here = series.flatMap((each) => each.points.filter((point) => point.x === value).map((point) => ({ series: each, point })));
    const text = reading(value, here);
    if (readout.textContent !== text) readout.textContent = text;
  }

  const nearest = ({ clientX }) => {
    const at = clientX - surface.getBoundingClientRect().left;
    return every.reduce((best, value, i) => (Math.abs(across(value) - at) < Math.abs(across(every[best]) - at) ? i : best), 0);
  };
  if (reading && every.length) {
    for (const kind of ["pointermove", "pointerdown"]) surface.addEventListener(kind, (event) => across && show(nearest(event)));
    chart.addEventListener("keydown", (event) => {
      const to = { ArrowRight: read + 1, ArrowLeft: read < 0 ? every.length - 1 : read - 1, Home: 0, End: every.length - 1, Escape: -1 }[event.key];
      if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      show(event.key === "Escape" ? -1 : Math.max(0, Math.min(every.length - 1, to)));
    });
  }
  return chart;
};
