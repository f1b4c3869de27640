/* One axis for runs with different numbers of events: what they all compute, they compute at the same moment.

   Between two computations each run's events are spread over as many moments as the busiest run needs there, so a run
   with fewer waits. Knows frames; must not know the screen. */

"use strict";

const Lockstep = (() => {
  const UPDATE = "optimizer";

  /** What a frame computes, the same in every run; an update is one wherever it is made. */
  function job({ event }) {
    if (event?.kind !== "compute") return null;
    return JSON.stringify([event.name.startsWith(UPDATE) ? UPDATE : event.name, event.unit]);
  }

  /** The longest list of jobs that both have in this order. */
  function common(one, other) {
    const best = Array.from({ length: one.length + 1 }, () => new Array(other.length + 1).fill(0));
    for (let i = one.length - 1; i >= 0; i--)
      for (let k = other.length - 1; k >= 0; k--)
        best[i][k] = one[i] === other[k] ? best[i + 1][k + 1] + 1 : Math.max(best[i + 1][k], best[i][k + 1]);
    const found = [];
    for (let i = 0, k = 0; i < one.length && k < other.length; ) {
      if (one[i] === other[k]) {
        found.push(one[i++]);
        k++;
      } else if (best[i + 1][k] >= best[i][k + 1]) i++;
      else k++;
    }
    return found;
  }

  /** The moments of several runs: shown[run][moment] is the frame to show; names[moment] is { phase, text }, where in the step it is;
      phases are stretches of moments; marks[run][job] is the frame that computed it. */
  function together(runs) {
    const jobs = runs.map(({ frames }) => frames.map(job).filter(Boolean));
    // A run that ended early has fewer jobs, and must not take theirs from the others.
    const whole = jobs.filter((_, i) => !runs[i].shortage);
    const shared = whole.length ? whole.reduce(common) : jobs.reduce((best, each) => (each.length > best.length ? each : best), []);
    const marks = runs.map(({ frames }) => {
      const found = [];
      frames.forEach((frame, index) => job(frame) === shared[found.length] && shared.length > found.length && found.push(index));
      return found;
    });
    const cuts = runs.map(({ frames }, i) => {
      const cut = [0, ...marks[i], ...Array(shared.length - marks[i].length).fill(frames.length - 1)];
      return [...cut, frames.length - 1]; // a run that ended early stays where it is
    });
    const shown = runs.map(() => [0]);
    const steps = shared.map((each) => where(each));
    const names = [{ phase: steps[0]?.phase ?? "the step", text: between(null, steps[0]) }];
    for (let s = 0; s <= shared.length; s++) {
      const moments = Math.max(...cuts.map((cut) => cut[s + 1] - cut[s]));
      for (let moment = 1; moment <= moments; moment++) {
        cuts.forEach((cut, i) => shown[i].push(cut[s] + Math.floor(((cut[s + 1] - cut[s]) * moment) / moments)));
        const [before, next] = [steps[s - 1], steps[s]];
        const phase = (next ?? before)?.phase ?? "the step";
        names.push({ phase, text: next && moment === moments ? said(next) : between(before, next) });
      }
    }
    return { count: names.length, shown, names, phases: phases(names), peaks: peaks(runs, shown) };
  }

  const NAMES = { [UPDATE]: "update" };
  function where(job) {
    const [phase, unit] = JSON.parse(job);
    return { phase: Object.hasOwn(NAMES, phase) ? NAMES[phase] : phase, unit };
  }

  const said = ({ phase, unit }) => [phase, unit].filter(Boolean).join(" · ");

  /** Where a moment is that is no computation of all: after one, on the way to the next. */
  function between(before, next) {
    if (!before || !next) return `${before ? said(before) : "start"} → ${next ? said(next) : "end"}`;
    return before.phase === next.phase ? `${said(before)} → ${next.unit}` : `${said(before)} → ${said(next)}`;
  }

  function phases(names) {
    const found = [];
    names.forEach(({ phase }, at) => {
      if (found.at(-1)?.name === phase) found.at(-1).to = at + 1;
      else found.push({ from: at, to: at + 1, name: phase });
    });
    return found;
  }

  /** For each run the moment of its peak. */
  const peaks = (runs, shown) => runs.map(({ top }, i) => shown[i].indexOf(top));

  return { together };
})();
