/* Puts the page's parts to work: the bars that it opens with, the player and the charts. */

"use strict";

(() => {
  const { data, find } = Page;

  /** What each scheme holds at rest and at its peak, by band; where memory ran out, what it held then. */
  function opening() {
    const stacks = ({ rest, peak, shortage }) =>
      shortage ? [{ name: `out of memory: ${Draw.short(shortage.asked)} more did not fit beside`, held: peak }] : [{ name: "at rest", held: rest }, { name: "at the peak", held: peak }];
    const rows = data.held.map((each) => ({ name: each.scheme, stacks: stacks(each) }));
    const most = Math.max(1, ...rows.flatMap((row) => row.stacks.map(({ held }) => Draw.total(held))));
    const there = data.bands.filter(({ name }) => data.held.some(({ rest, peak }) => Page.own(rest, name) || Page.own(peak, name)));
    find("bars").replaceChildren(
      Draw.legend(there),
      Draw.bars({ rows, bands: there, most, label: "Bytes that each rank holds, by scheme" }),
      Draw.element("p", { class: "note kinds", text: meant(there) }),
    );
  }

  /** Which of the bands are which part of the model state, for who does not know their names. */
  function meant(bands) {
    const optimizer = bands.filter(({ name }) => data.kinds.optimizer.includes(name)).map(({ name }) => name);
    const passing = bands.filter(({ name }) => !data.states.includes(name)).map(({ name }) => name);
    const said = [
      ...(optimizer.length ? [`${optimizer.join(", ")}: what the optimizer remembers`] : []),
      ...(passing.length ? [`${passing.join(", ")}: there for a part of a step only`] : []),
    ];
    return `Bytes on one rank. ${said.join("; ")}.`;
  }

  opening();
  if (Replay.runs.length) {
    Player.start();
    find("bands").append(Draw.legend(Replay.bands));
  }
  Charts.start();
  document.documentElement.dataset.ready = "true";
})();
