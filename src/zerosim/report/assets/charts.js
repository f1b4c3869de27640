/* The charts over N and over the steps. Schemes are told apart by dash, mark and name; colour is left to bands. */

"use strict";

const Charts = (() => {
  const { data, find, unique, look, own } = Page;
  const { exact, number } = Draw;
  const P = data.parameters * data.itemsize; // all parameters once, as they travel
  const schemes = Object.keys(data.losses);
  const rowsOf = (scheme) => data.sweep.filter((row) => row.scheme === scheme && row.fits);
  const said = (value) => (Number.isFinite(value) ? String(value) : "not a finite number"); // JSON has null for it

  /** Of marks that may lie upon each other each is smaller than those before it. */
  const nested = (place, count, least, most) => least + (count - 1 - place) * Math.min(1.8, (most - least) / Math.max(count - 1, 1));
  const dressed = (scheme, place, count) => ({ name: scheme, ...look(scheme), size: nested(place, count, 3, 9) });

  /** What is said of a point: names of all whose value is the same stand together. */
  function grouped(here, value) {
    const groups = new Map();
    for (const { series, point } of here) {
      if (series.unread) continue;
      const text = value(point, series);
      groups.set(text, [...(groups.get(text) ?? []), series.name]);
    }
    return [...groups].map(([text, names]) => `${names.join(", ")}: ${text}`).join("\n");
  }

  const EMPTY = "Every scheme ran out of memory.";
  const put = (id, series, rest) => {
    const some = series.some(({ points }) => points.some(({ y }) => y !== null));
    find(id).replaceChildren(some ? Draw.chart({ series, hint: "Point at the chart, or focus it and press ← and →, for exact numbers.", ...rest }) : EMPTY);
  };

  function overRanks() {
    const every = unique(data.sweep.map(({ ranks }) => ranks)).sort((a, b) => a - b);
    return { scale: "log", base: 2, domain: [every[0] ?? 1, Math.max(every.at(-1) ?? 2, 2 * (every[0] ?? 1))], ticks: every, format: String, title: "N, number of ranks" };
  }

  function memory() {
    const [inParameters, field] = [find("memory-unit").value === "parameter", find("memory-of").value];
    const size = inParameters ? data.parameters : 1;
    const told = find("memory-predicted").checked;
    const shown = (value) => (value > 0 ? value : null); // nothing has no place on a scale of powers; it is read out
    const series = schemes.map((scheme, i) => ({ ...dressed(scheme, i, schemes.length), points: rowsOf(scheme).map((row) => ({ x: row.ranks, y: shown(row[field] / size), row })) }));
    const crosses = told ? series.map(({ name, points }) => ({ name: `${name}, predicted`, mark: "x", size: 3, lined: false, label: false, unread: true, points: points.map(({ x, row }) => ({ x, y: shown(row[`${field}_predicted`] / size) })) })) : [];
    const values = [...series, ...crosses].flatMap(({ points }) => points.map(({ y }) => y)).filter((y) => y > 0);
    const base = inParameters ? 2 : 10;
    const domain = values.length ? [base ** Math.floor(Math.log(Math.min(...values)) / Math.log(base)), Math.max(...values) * 1.15] : [1, base];
    put("memory", [...series, ...crosses], {
      label: `Memory of one rank over the number of ranks: ${find("memory-of").selectedOptions[0].text}`,
      x: overRanks(),
      y: { scale: "log", base, domain, title: inParameters ? "bytes per parameter (log scale)" : "bytes (log scale)", format: inParameters ? (value) => number(value) : Draw.short },
      reading: (n, here) => `N = ${n}\n${grouped(here, ({ row }) => `${exact(row[field])}, ${(row[field] / data.parameters).toFixed(4)} B per parameter, predicted ${exact(row[`${field}_predicted`])}`)}`,
    });
  }

  function traffic() {
    const inP = find("traffic-unit").value === "P";
    const size = inP ? P : 1;
    const [least, most] = overRanks().domain;
    const curve = Array.from({ length: 61 }, (_, i) => least * (most / least) ** (i / 60));
    const forms = [2, 3].map((factor) => ({ name: `${factor}(N−1)/N`, quiet: true, unread: true, dash: "1 3", points: curve.map((x) => ({ x, y: (P * factor * (x - 1)) / x / size })) }));
    const series = schemes.map((scheme, i) => ({ ...dressed(scheme, i, schemes.length), points: rowsOf(scheme).map((row) => ({ x: row.ranks, y: row.sent / size, row })) }));
    const high = Math.max(3 * P, ...data.sweep.map(({ sent }) => sent)) * 1.08;
    put("traffic", [...series, ...forms], {
      label: "Bytes that one rank sends in a step over the number of ranks",
      x: overRanks(),
      y: { scale: "linear", domain: [0, high / size], title: inP ? `in P × ${data.itemsize} bytes (P parameters)` : "bytes", format: inP ? (value) => number(value) : Draw.short },
      reading: (n, here) => (here.every(({ series: { unread } }) => unread) ? "" : `N = ${n}\n${grouped(here, ({ row }) => `sent ${exact(row.sent)}, ${(row.sent / P).toFixed(4)} P, predicted ${exact(row.sent_predicted)}`)}`),
      snap: unique(data.sweep.map(({ ranks }) => ranks)),
    });
  }

  const overSteps = () => {
    const { steps } = data.settings;
    return { scale: "linear", domain: [1, Math.max(2, steps)], ticks: steps <= 12 ? Array.from({ length: steps }, (_, i) => i + 1) : undefined, format: String, title: "step" };
  };
  const stepped = (values, at = (value) => ({ y: Number.isFinite(value) ? value : null, value })) => values.map((value, step) => ({ x: step + 1, ...at(value, step) }));
  const BROKEN = ["3 3", "1 3", "6 2 1 2", "12 3", "2 6"];

  /** The runs with a rule broken on purpose: a name, its losses and, where it was measured, how far it drifted. */
  function broken() {
    const { narrow_wire: wire, whole_model_bucket: buckets, int8_params: int8 } = data.ablations;
    return [
      ...(wire ? [{ name: `broken: ${wire.wire} wire`, losses: wire.drift.losses, drift: wire.drift }] : []),
      ...Object.entries(buckets).map(([precision, drift]) => ({ name: `broken: one bucket, ${precision}`, losses: drift.losses, drift })),
      ...(int8 ? [{ name: "broken: int8 parameters", losses: int8.losses, drift: null }] : []),
    ].map((each, i) => ({ ...each, dash: BROKEN[i % BROKEN.length], mark: "x", size: 3.5, quiet: true }));
  }

  function loss() {
    const series = [
      ...schemes.map((scheme, i) => ({ ...dressed(scheme, i, schemes.length), points: stepped(data.losses[scheme]) })),
      ...broken().filter(({ losses }) => losses.length).map((each) => ({ ...each, points: stepped(each.losses) })),
    ];
    const values = series.flatMap(({ points }) => points.map(({ y }) => y)).filter((y) => y !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    put("loss", series, {
      label: "Training loss over the steps, of every scheme and with a rule broken",
      x: overSteps(),
      y: { scale: "linear", domain: [low - room, high + room], title: "loss, mean over the ranks" },
      reading: (step, here) => `step ${step}\n${grouped(here, ({ value }) => `loss ${said(value)}`)}`,
    });
  }

  /** Largest differences on a logarithmic scale with a place for zero, and for contrast what broken rules do. */
  function difference() {
    const quantity = find("difference-of").value;
    const distance = (a, b) => (a === null || b === null ? null : Math.abs(a - b));
    const reference = Object.values(data.losses).find((losses) => losses.length) ?? [];
    const apart = (losses) => losses.map((value, step) => [step + 1, distance(value, reference[step] ?? null), null]);
    const curves = schemes.map((scheme, i) => ({
      ...dressed(scheme, i, schemes.length),
      found: quantity === "loss" ? apart(data.losses[scheme]) : data.differences.filter((each) => each.scheme === scheme).map((each) => [each.step, own(each.largest, quantity), own(each.differing, quantity)]),
    }));
    for (const each of broken()) {
      if (quantity === "loss") curves.push({ ...each, found: apart(each.losses) });
      else if (each.drift && (quantity === "master" || quantity === "params")) curves.push({ ...each, found: each.drift.largest.map((value, step) => [step + 1, value, each.drift.differing[step]]) });
    }
    const positive = curves.flatMap(({ found }) => found.map(([, value]) => value)).filter((value) => value > 0);
    const low = positive.length ? Math.floor(Math.log10(Math.min(...positive))) : -8;
    const high = positive.length ? Math.ceil(Math.log10(Math.max(...positive)) + 0.1) : 0;
    const zero = low - 1.5;
    const place = (value) => (value === 0 ? zero : value === null ? high : Math.log10(value));
    const every = Math.max(1, Math.ceil((high - low) / 6));
    const powers = Array.from({ length: Math.floor((high - low) / every) + 1 }, (_, i) => low + i * every);
    const raised = (power) => `1e${power}`.replace("-", "−");
    put("difference", curves.map(({ found, ...rest }) => ({ ...rest, points: found.map(([x, value, count]) => ({ x, y: place(value), value, count })) })), {
      label: `Largest difference of ${quantity} from the first scheme over the steps, and with a rule broken`,
      x: overSteps(),
      y: { scale: "linear", domain: [zero - 0.4, high + 0.2], ticks: [zero, ...powers], format: (value) => (value === zero ? "0" : raised(value)), title: "largest difference" },
      reading: (step, here) => `step ${step}\n${grouped(here, ({ value, count }) => `${said(value)}${count === null ? "" : `, ${count.toLocaleString("en-US")} values differ`}`)}`,
    });
  }

  function start() {
    const quantities = [...unique(data.differences.flatMap(({ largest }) => Object.keys(largest))), "loss"];
    const preferred = ["master", "params"].find((name) => quantities.includes(name));
    find("difference-of").append(...quantities.map((name) => Draw.element("option", { text: name, value: name, selected: name === preferred })));
    // What was not run has no chart: other N, or schemes to compare with.
    const drawn = { memory: data.sweep.length && memory, traffic: data.sweep.length && traffic, loss, difference: schemes.length > 1 && difference };
    for (const [id, chart] of Object.entries(drawn)) {
      const figure = find(id).closest("figure");
      figure.hidden = !chart;
      if (!chart) continue;
      figure.addEventListener("change", chart);
      chart();
    }
  }

  return { start };
})();
