/* Our own drawing of charts, in SVG. It knows shapes, scales and bytes; not what is measured, nor any page.

   A list of bands is [{ name, color }, ...] in the order of a stack, from the bottom; color is any CSS colour, such as
   "var(--band-params)". A series is drawn in ink and told from others by dash, mark and its name.

   element(tag, properties, ...children)  an HTML element. properties: text, class, vars (CSS variables), on (listeners),
                                          all else an attribute; false and null are left out
   shape(tag, attributes, ...children)    an SVG element; style may be an object
   exact(bytes), short(bytes)             "12,345 B", "12.3 kB"
   breadth(text, weight)                  pixels that a text of a drawing takes
   number(value, digits = 4)              significant digits, with separators
   linear(domain, range), log(domain, range, base = 10)
                                          a scale: scale(value) is a place. scale.ticks(about) are tidy values
   path(points)                           "M…L…" through [[x, y], ...]
   responsive(host, render)               render(width) gives what host contains, again at each new width; returns redraw
   canvas(width, height, label)           an <svg class="drawn">; with a label role="img", without it hidden from readers
   axes(svg, box, x, y)                   grid, ticks and titles. box: { left, top, right, bottom } in pixels;
                                          x, y: { scale, ticks, format, title }
   hatch(svg, id, color)                  defines a pattern of slanted lines; fill with url(#id)
   mark(name, x, y, size, classes)        a point: circle square triangle-up diamond triangle-down cross x star pentagon
                                          hexagon triangle-left
   legend(bands)                          a list of bands with their colours
   sample(series), key(series)            a short line with its dash and mark; a list of them with their names
   bars({ rows, bands, most, label, format })
                                          a stack for each row, lying. rows: [{ name, stacks: [{ name, held: { band: bytes }}]}];
                                          returns a <dl>; each stack says its sum beside it
   strip({ held, bands, most, peak, phases, limit, height, label, move })
                                          memory over the moments of a step, stacked by band. held: [{ band: bytes }, ...],
                                          most: bytes at the top, peak: { at, text } marked, phases: [{ from, to, name }],
                                          limit: { bytes, text } or null, move(at): called while it is dragged.
                                          Returns { element, show(at) }
   chart(...)                             see chart.js                                                                  */

"use strict";

const Draw = (() => {
  const SPACE = "http://www.w3.org/2000/svg";

  function element(tag, properties = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties)) {
      if (name === "text") made.textContent = value;
      else if (name === "class") made.className = value;
      else if (name === "vars") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
      else if (name === "on") for (const [key, each] of Object.entries(value)) made.addEventListener(key, each);
      else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children.filter((child) => child !== null));
    return made;
  }

  function shape(tag, attributes = {}, ...children) {
    const made = document.createElementNS(SPACE, tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style" && typeof value === "object") for (const [key, each] of Object.entries(value)) made.style.setProperty(key, each);
      else if (value !== null) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  // -- numbers

  const total = (held) => Object.values(held).reduce((sum, count) => sum + count, 0);
  const own = (table, key) => (Object.hasOwn(table, key) ? table[key] : 0); // a band's name may be anything
  const exact = (bytes) => `${bytes.toLocaleString("en-US")} B`;
  const number = (value, digits = 4) => value.toLocaleString("en-US", { maximumSignificantDigits: digits });

  function short(bytes) {
    const units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"];
    let power = 0;
    while (power < units.length - 1 && Number((bytes / 1000 ** power).toPrecision(3)) >= 1000) power++;
    return `${Number((bytes / 1000 ** power).toPrecision(3))} ${units[power]}`;
  }

  function linear([low, high], [from, to]) {
    const span = high - low || 1;
    const scale = (value) => from + ((value - low) / span) * (to - from);
    scale.ticks = (about = 5) => {
      const rough = span / about;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
      const first = Math.ceil(low / step - 1e-9);
      return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => (first + i) * step);
    };
    return scale;
  }

  function log([low, high], range, base = 10) {
    const place = (value) => Math.log(value) / Math.log(base);
    const inner = linear([place(low), place(high)], range);
    const scale = (value) => inner(place(value));
    scale.ticks = (about = 8) => {
      const [first, last] = [Math.ceil(place(low) - 1e-9), Math.floor(place(high) + 1e-9)];
      const every = Math.max(1, Math.ceil((last - first + 1) / about));
      return Array.from({ length: Math.max(0, Math.floor((last - first) / every) + 1) }, (_, i) => base ** (first + i * every));
    };
    return scale;
  }

  // -- surfaces

  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  function responsive(host, render) {
    let width = 0;
    const draw = () => width && host.replaceChildren(...[render(width)].flat());
    new ResizeObserver(([{ contentRect }]) => {
      const now = Math.floor(contentRect.width);
      if (now && now !== width) {
        width = now;
        draw();
      }
    }).observe(host);
    return draw;
  }

  function canvas(width, height, label) {
    const named = label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" };
    return shape("svg", { class: "drawn", viewBox: `0 0 ${width} ${height}`, width, height, ...named });
  }

  const text = (x, y, content, attributes = {}) => {
    const made = shape("text", { x, y, ...attributes });
    made.textContent = content;
    return made;
  };

  const ruler = document.createElement("canvas").getContext("2d");
  function breadth(content, weight = 400) {
    ruler.font = `${weight} 12px ${getComputedStyle(document.body).fontFamily}`;
    return ruler.measureText(content).width;
  }

  function hatch(svg, id, color) {
    const line = shape("path", { d: "M-1 1l2-2M0 6l6-6M5 7l2-2", style: { stroke: color, "stroke-width": 1.6 } });
    svg.append(shape("defs", {}, shape("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, line)));
  }

  function axes(svg, box, x, y) {
    for (const value of y.ticks) {
      const at = y.scale(value);
      svg.append(shape("path", { class: "rule", d: `M${box.left} ${at}H${box.right}` }));
      svg.append(text(box.left - 6, at + 4, y.format(value), { "text-anchor": "end" }));
    }
    svg.append(shape("path", { class: "axis", d: `M${box.left} ${box.bottom}H${box.right}` }));
    let free = -Infinity; // a label that would touch the one before it is left out
    for (const value of x.ticks) {
      const [at, half] = [x.scale(value), breadth(x.format(value)) / 2];
      svg.append(shape("path", { class: "axis", d: `M${at} ${box.bottom}v4` }));
      if (at - half < free) continue;
      svg.append(text(at, box.bottom + 17, x.format(value), { "text-anchor": "middle" }));
      free = at + half + 6;
    }
    svg.append(text((box.left + box.right) / 2, box.bottom + 34, x.title, { "text-anchor": "middle" }));
    svg.append(text(0, box.top - 10, y.title));
  }

  // -- marks, legends

  /** The corners of a regular form around 0, the first of them up when turn is 0; of a star every second is inner. */
  function ring(corners, turn, inner = 1) {
    return Array.from({ length: corners }, (_, i) => {
      const [angle, far] = [turn + (2 * Math.PI * i) / corners, i % 2 ? inner : 1];
      return [Math.sin(angle) * far, -Math.cos(angle) * far];
    });
  }
  const FORMS = {
    square: ring(4, Math.PI / 4),
    "triangle-up": ring(3, 0),
    diamond: ring(4, 0),
    "triangle-down": ring(3, Math.PI),
    star: ring(10, 0, 0.45),
    pentagon: ring(5, 0),
    hexagon: ring(6, 0),
    "triangle-left": ring(3, -Math.PI / 2),
  };

  function mark(name, x, y, size, classes = "mark") {
    if (name === "cross" || name === "x") {
      const far = size * 0.9;
      const d = name === "x" ? `M${x - far} ${y - far}L${x + far} ${y + far}M${x - far} ${y + far}L${x + far} ${y - far}` : `M${x - far} ${y}H${x + far}M${x} ${y - far}V${y + far}`;
      return shape("path", { class: classes, d });
    }
    if (!Object.hasOwn(FORMS, name)) return shape("circle", { class: classes, cx: x, cy: y, r: size });
    return shape("path", { class: classes, d: `${path(FORMS[name].map(([dx, dy]) => [x + dx * size * 1.2, y + dy * size * 1.2]))}Z` });
  }

  const legend = (bands) =>
    element("ul", { class: "legend" }, ...bands.map(({ name, color }) => element("li", { vars: { "--band": color } }, element("i"), name)));

  function sample({ dash, mark: form, quiet, lined }) {
    const svg = canvas(34, 12);
    if (lined !== false) svg.append(shape("path", { class: quiet ? "curve quiet" : "curve", d: "M0 6H34", "stroke-dasharray": dash ?? null }));
    if (form) svg.append(mark(form, 17, 6, 4, quiet ? "mark quiet" : "mark"));
    return svg;
  }

  const key = (series) => element("ul", { class: "legend" }, ...series.map((each) => element("li", {}, sample(each), each.name)));

  // -- stacks of bands

  function bars({ rows, bands, most, label, format = short }) {
    const list = element("dl", { class: "bars", "aria-label": label });
    for (const { name, stacks } of rows) {
      const host = element("dd");
      const said = stacks.map((stack) => `${stack.name} ${exact(total(stack.held))}`).join(", ");
      responsive(host, (width) => {
        const [tall, aside] = [22, Math.max(...stacks.map((stack) => breadth(`${stack.name} ${format(total(stack.held))}`))) + 14];
        const svg = canvas(width, stacks.length * (tall + 4) + 4, `${name}: ${said}`);
        const scale = linear([0, most], [0, Math.max(40, width - aside)]);
        stacks.forEach((stack, i) => {
          let at = 0;
          const y = 2 + i * (tall + 4);
          for (const band of bands) {
            const count = own(stack.held, band.name);
            if (!count) continue;
            const part = shape("rect", { class: "seam", x: scale(at), y, width: Math.max(1, scale(count)), height: tall, style: { fill: band.color }, "data-band": band.name, "data-bytes": count });
            part.append(shape("title"));
            part.firstChild.textContent = `${band.name}: ${exact(count)}`;
            svg.append(part);
            at += count;
          }
          const words = text(scale(at) + 6, y + 15, `${stack.name} `);
          const sum = shape("tspan", { class: "strong" });
          sum.textContent = format(at);
          words.append(sum);
          svg.append(words);
        });
        return svg;
      });
      list.append(element("dt", { text: name }), host);
    }
    return list;
  }

  function strip({ held, bands, most, peak, phases = [], limit = null, height = 160, label, move = null }) {
    const host = element("div", { class: "strip", "data-moments": held.length });
    let [at, place, head] = [0, null, null];
    const show = (moment) => {
      at = moment;
      if (!head) return;
      head.setAttribute("x", place(at));
      head.setAttribute("width", Math.max(2, place(at + 1) - place(at)));
    };
    responsive(host, (width) => {
      const box = { left: 52, top: 16, right: width - 4, bottom: height - 18 };
      const svg = canvas(width, height, label);
      place = linear([0, held.length], [box.left, box.right]);
      const y = linear([0, most], [box.bottom, box.top]);
      for (const value of y.ticks(3)) {
        svg.append(shape("path", { class: "rule", d: `M${box.left} ${y(value)}H${box.right}` }));
        svg.append(text(box.left - 6, y(value) + 4, short(value), { "text-anchor": "end" }));
      }
      phases.forEach(({ from, to, name }, i) => {
        if (i % 2) svg.append(shape("rect", { class: "shade", x: place(from), y: box.top, width: place(to) - place(from), height: box.bottom - box.top }));
        const room = place(to) - place(from);
        if (breadth(name) < room - 4) svg.append(text((place(from) + place(to)) / 2, height - 4, name, { "text-anchor": "middle" }));
      });
      const base = held.map(() => 0);
      for (const { name, color } of bands) {
        const under = [...base];
        held.forEach((each, i) => (base[i] += own(each, name)));
        if (base.every((level, i) => level === under[i])) continue;
        const over = base.map((level, i) => `L${place(i).toFixed(1)} ${y(level).toFixed(1)}H${place(i + 1).toFixed(1)}`).join("");
        const back = under.map((level, i) => `L${place(i + 1).toFixed(1)} ${y(level).toFixed(1)}H${place(i).toFixed(1)}`).reverse().join("");
        svg.append(shape("path", { "data-band": name, d: `M${box.left} ${box.bottom}${over}${back}Z`, style: { fill: color } }));
      }
      if (limit) {
        svg.append(shape("path", { class: "head", d: `M${box.left} ${y(limit.bytes)}H${box.right}`, "stroke-dasharray": "6 4" }));
        const across = peak ? place(peak.at + 0.5) - breadth(peak.text, 600) / 2 < box.left + breadth(limit.text, 600) + 12 : false;
        const side = across ? [box.right - 4, { "text-anchor": "end" }] : [box.left + 4, {}]; // clear of the peak's label
        svg.append(text(side[0], y(limit.bytes) - 4, limit.text, { class: "strong", ...side[1] }));
      }
      if (peak) {
        const [x, top] = [place(peak.at + 0.5), y(total(held[peak.at]))];
        const half = breadth(peak.text, 600) / 2;
        svg.append(shape("path", { class: "peak", d: `M${x - 5} ${top - 8}h10l-5 7z`, style: { fill: "var(--ink)" } }));
        const near = Math.min(Math.max(x, box.left + half), box.right - half);
        svg.append(text(near, Math.max(11, top - 11), peak.text, { class: "strong", "text-anchor": "middle" }));
      }
      head = shape("rect", { class: "head", y: box.top - 3, height: box.bottom - box.top + 6, rx: 2 });
      svg.append(head);
      show(at);
      return svg;
    });
    if (move) {
      const drag = ({ clientX }) => {
        const { left } = host.getBoundingClientRect();
        const [from, to] = [place(0), place(held.length)];
        move(Math.max(0, Math.min(held.length - 1, Math.floor(((clientX - left - from) / (to - from)) * held.length))));
      };
      host.addEventListener("pointerdown", (event) => {
        host.setPointerCapture(event.pointerId);
        drag(event);
      });
      host.addEventListener("pointermove", (event) => host.hasPointerCapture(event.pointerId) && drag(event));
    }
    return { element: host, show };
  }

  return { element, shape, exact, short, number, total, own, linear, log, path, responsive, canvas, text, breadth, axes, hatch, mark, legend, sample, key, bars, strip };
})();
