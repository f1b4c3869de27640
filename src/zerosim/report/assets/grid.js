/* The grid of ownership: ranks down, layers across, for parameters, gradients and the optimizer's states.

   A cell is a layer on a rank, and its width the layer. It is filled where the rank holds its shard, hatched where the
   rank has more of the layer for a while, and with each hop of a collective blocks move from rank to rank. Who owns
   what is the row's declaration; what is there for a while, and which collective runs, are the recorded events. */

"use strict";

const Grid = (() => {
  const { own } = Page;
  const { shape } = Draw;
  const MOST = 64; // ranks that are drawn
  const TITLES = { params: "parameters", grads: "gradients", optimizer: "optimizer states" };
  const PASSING = { "gathered params": "params", "second params": "params", "unreduced grads": "grads", "partial grads": "grads" };
  const color = (name) => Page.data.bands.find((band) => band.name === name)?.color ?? "var(--band-unknown)";
  const id = (band) => `hatch-${Object.keys(PASSING).indexOf(band)}`;

  function make(host) {
    let [run, index, hops, plan, moving] = [null, 0, 0, null, null];

    const redraw = Draw.responsive(host, (width) => {
      plan = run && Replay.units.length ? layout(width) : null; // a run may end before it has computed anything
      if (!plan) return [];
      const svg = Draw.canvas(width, plan.height, described());
      for (const band of Object.keys(PASSING)) Draw.hatch(svg, id(band), color(band));
      plan.kinds.forEach((kind) => still(svg, kind));
      moving = svg.appendChild(shape("g", {}));
      move();
      return svg;
    });

    /** Where everything stands: the three kinds of state side by side, or below each other where that is too narrow. */
    function layout(width) {
      const [ranks, units] = [Math.min(run.ranks, MOST), Replay.units];
      const beside = width >= 720;
      const [left, top, gap] = [30, 38, beside ? 26 : 16];
      const kinds = Object.keys(TITLES);
      const wide = (width - left - (beside ? gap * (kinds.length - 1) : 0)) / (beside ? kinds.length : 1);
      const tall = Math.max(3, Math.min(22, Math.floor((beside ? 264 : 150) / ranks)));
      const between = Math.max(2, Math.min(8, wide / units.length / 12));
      const cell = (wide - between * (units.length - 1)) / units.length;
      const full = top + tall * ranks + 6;
      return {
        ranks, tall, cell, height: beside ? full : full * kinds.length,
        kinds: kinds.map((name, i) => {
          const [x, y] = beside ? [left + i * (wide + gap), top] : [left, top + i * full];
          return { name, x, y, wide, numbered: !beside || i === 0, at: (unit) => x + units.indexOf(unit) * (cell + between) };
        }),
      };
    }

    const box = (x, y, wide, tall) => `M${x.toFixed(2)} ${y.toFixed(2)}h${wide.toFixed(2)}v${tall.toFixed(2)}h${(-wide).toFixed(2)}z`;
    const inset = () => (plan.tall >= 6 ? 1 : 0); // between rows, where there is room

    /** A part of a layer on a rank, as a piece of a path. */
    function part(kind, unit, rank, [from, to]) {
      const wide = Math.max(1.2, (to - from) * plan.cell);
      return box(kind.at(unit) + from * plan.cell, kind.y + rank * plan.tall, wide, plan.tall - inset());
    }

    function still(svg, kind) {
      const piece = run.row.pieces[kind.name];
      svg.append(Draw.text(kind.x, kind.y - 22, `${TITLES[kind.name]}${piece.host ? ", on the host" : ""}`, { class: "strong" }));
      const held = Page.data.kinds[kind.name].filter((band) => run.frames.some((frame) => own(frame.held, band)));
      Replay.units.forEach((unit) => {
        const name = Draw.breadth(unit) < plan.cell ? unit : unit.replace(/^.*?(\d+)$/, "$1");
        if (Draw.breadth(name) < plan.cell + 2) svg.append(Draw.text(kind.at(unit), kind.y - 6, name));
      });
      for (let rank = 0; rank < plan.ranks; rank++) {
        const y = kind.y + rank * plan.tall;
        if (kind.numbered && rank % Math.ceil(13 / plan.tall) === 0) svg.append(Draw.text(kind.x - 6, y + plan.tall / 2 + 4, rank, { "text-anchor": "end" }));
        if (rank && rank % run.row.node === 0) svg.append(shape("path", { class: "axis", d: `M${kind.x - 4} ${y - inset() / 2}h${kind.wide + 8}` }));
        const cells = Replay.units.map((unit) => part(kind, unit, rank, [0, 1])).join("");
        svg.append(shape("path", { class: "cell", d: cells }));
        for (const unit of Replay.units) {
          const [from, to] = [piece.owned[rank] / piece.of, (piece.owned[rank] + 1) / piece.of];
          const told = { "data-kind": kind.name, "data-unit": unit, "data-rank": rank, "data-piece": `${piece.owned[rank]}/${piece.of}` };
          const [x, wide] = [kind.at(unit) + from * plan.cell, Math.max(1.2, (to - from) * plan.cell)];
          const shown = piece.host ? [null] : plan.tall - inset() >= 2 * held.length ? held : held.slice(0, 1);
          const each = (plan.tall - inset()) / Math.max(1, shown.length);
          shown.forEach((band, i) => {
            const style = band ? { fill: color(band) } : { fill: "none" };
            svg.append(shape("rect", { class: band ? "owned" : "owned host", ...told, "data-band": band ?? "host", x, y: y + i * each, width: wide, height: each, style }));
          });
        }
      }
    }

    /** Which parts of a layer a rank has beyond its shard: all, its group's part, its own, or what has arrived. */
    function passing(band, unit, bytes, rank) {
      const { collective } = run.frames[index];
      const { node, pieces } = run.row;
      const group = [(rank % node) / node, ((rank % node) + 1) / node];
      if (band === "partial grads" || band === "second params") return [group];
      const filling = collective?.job === "gather" && collective.kind === PASSING[band] && collective.unit === unit && index < collective.done;
      if (filling) return Replay.arrived(collective, rank, reached(collective)).map((chunk) => collective.ring.span(rank, chunk));
      if (bytes === Replay.largest(run, band, unit) && (run.row.gathers || PASSING[band] === "grads")) return [[0, 1]];
      if (!run.row.gathers && PASSING[band] === "params") return [group];
      const { of, owned } = pieces[PASSING[band]];
      return [[owned[rank] / of, (owned[rank] + 1) / of]];
    }

    /** How many hops have been made: none before the blocks are there, all once they are given back. */
    function reached({ flight, ring }) {
      return index < flight ? 0 : index > flight ? ring.size - 1 : Math.min(Math.floor(hops), ring.size - 1);
    }

    function move() {
      if (!moving) return;
      const parts = [];
      for (const [band, units] of Object.entries(Replay.byUnit(run, index))) {
        const kind = plan.kinds.find(({ name }) => name === own(PASSING, band));
        if (!kind) continue;
        const there = Replay.units.filter((unit) => units[unit] > 0);
        if (!there.length) continue;
        let d = "";
        for (const unit of there)
          for (let rank = 0; rank < plan.ranks; rank++)
            for (const span of passing(band, unit, units[unit], rank)) d += part(kind, unit, rank, span);
        parts.push(shape("path", { class: "passing", "data-band": band, "data-units": JSON.stringify(there), d, style: { fill: `url(#${id(band)})`, stroke: color(band) } }));
      }
      moving.replaceChildren(...parts, ...blocks());
    }

    /** The blocks in flight, each on its way from a rank to the one that takes it; over the ends of a ring they fade. */
    function blocks() {
      const { collective } = run.frames[index];
      if (!collective?.job || index !== collective.flight || !Replay.units.includes(collective.unit)) return [];
      const { ring } = collective;
      const [hop, way] = [Math.floor(hops), hops % 1];
      if (hop >= ring.size - 1) return [];
      const kind = plan.kinds.find(({ name }) => name === collective.kind);
      const made = [];
      for (let rank = 0; rank < run.ranks; rank++) {
        const [chunk, to] = [Replay.handed(collective, rank, hop), ring.step(rank, -1)];
        if (rank >= plan.ranks) continue;
        const [from, end] = ring.span(rank, chunk);
        const wide = Math.max(2, (end - from) * plan.cell);
        const block = (row, opacity) =>
          shape("rect", {
            class: "block", "data-rank": rank, "data-to": to, "data-chunk": `${chunk}/${ring.size}`, opacity, x: kind.at(collective.unit) + from * plan.cell,
            y: kind.y + row * plan.tall - 0.5, width: wide, height: plan.tall - inset() + 1, style: { fill: color("ring blocks") },
          });
        if (to < rank) made.push(block(rank + (to - rank) * way, 1));
        else made.push(block(rank - way, 1 - way), ...(way && to < plan.ranks ? [block(to + 1 - way, way)] : []));
      }
      return made;
    }

    const described = () => {
      const cut = Object.entries(run.row.pieces).map(([kind, { of, host }]) => `${TITLES[kind]} ${of === 1 ? "whole on every rank" : `in ${of} pieces`}${host ? ", on the host" : ""}`);
      return `Who owns what under ${run.scheme} on ${run.ranks} ranks: ${cut.join("; ")}. Layers: ${Replay.units.join(", ")}.`;
    };

    return {
      set(next) {
        run = next;
        index = 0;
        redraw();
      },
      show(frame, at) {
        [index, hops] = [frame, at];
        if (plan) move();
      },
      left: () => Math.max(0, (run?.ranks ?? 0) - MOST),
    };
  }

  return { make, color };
})();
