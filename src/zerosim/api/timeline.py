"""The timeline of one step: what a rank held from event to event, as a figure, a trace or numbers.

Owns ``Timeline``. It is made of records, so what is drawn is what was recorded when it was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerosim.api import recording
from zerosim.lab.as_records import event_records
from zerosim.records.files import write_whole
from zerosim.records.results import EventRecord, SchemeRecord
from zerosim.util import sizes
from zerosim.util.arguments import installed, instance_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from zerosim.schemes import Scheme

PICTURES = (".png", ".svg", ".pdf")


class Timeline:
    """What a rank of ``run`` held from event to event of a step: made by ``run.timeline()``.

    IndexError for a step that was not made, ValueError for one whose log is gone.

    >>> import zerosim as zs
    >>> run = zs.ZeRO2(zs.MLP(), ranks=8)
    >>> loss = run.step(*zs.batches(ranks=8))
    >>> run.timeline()
    Timeline(ZeRO-2 on 8 ranks, step 1: 61 events; 124 kB at rest, 184 kB at the peak, in the communication of layer 2)
    >>> run.timeline().save("step.png")
    """

    def __init__(self, run: Scheme, step: int = -1) -> None:
        if not run.reports:
            raise IndexError("timeline(step): no step has been made. Call step(batch) first.")
        instance_of("timeline", "step", step, int)
        kept = run.reports  # the last ones
        at = step + len(kept) if step < 0 else step - kept[0].step
        if step == 0 or not 0 <= at < len(kept):
            raise IndexError(
                f"timeline(step): steps are {kept[0].step} to {kept[-1].step}, or -1 for the last; got {step}."
            )
        report = kept[at]
        if not report.events:
            raise ValueError(f"timeline(step): the log of step {report.step} is not kept. Ask for a later one.")
        self.step, self.events = report.step, event_records(report)
        done = [*kept[:at], replace(report, complete=True)]  # also one that ended early
        settings = recording.settings_of(run.model, run.ring.size, run.options, steps=len(done))
        self._results = recording.results(
            settings, run.model.n_params, [recording.scheme_record(run.stage, done, report, uneven=run.options.uneven)]
        )
        self.peak = report.peak

    @property
    def name(self) -> str:
        """The scheme's."""
        return self._record.name

    @property
    def _record(self) -> SchemeRecord:
        return self._results.schemes[0]

    def held(self) -> list[dict[str, int]]:
        """Bytes that a rank holds by band, before the first event and after each."""
        resident: dict[str, int] = dict(self._record.steps[-1].resident)
        for event in self.events:
            resident[event.name] = resident.get(event.name, 0) - _change(event)
        levels = [{band: nbytes for band, nbytes in resident.items() if nbytes}]
        for event in self.events:
            after = dict(levels[-1])
            if change := _change(event):
                after[event.name] = after.get(event.name, 0) + change
            levels.append({band: nbytes for band, nbytes in after.items() if nbytes})
        return levels

    def plot(self) -> Figure:
        """The figure: every band upon the other, event by event, with the phases and the peak.

        ModuleNotFoundError without matplotlib, which the extra ``plots`` installs.
        """
        installed("Timeline.plot", "matplotlib", extra="plots")
        from zerosim.report.timeline import timeline

        return timeline(self._results)

    def save(self, path: str | Path) -> None:
        """Write it to a file, whole or not at all: a figure (.png, .svg, .pdf), or a trace for Perfetto (.json).

        ValueError for another kind of file, OSError if it cannot be written.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind == ".json":
            from zerosim.report.trace import save_trace

            save_trace(self._results, path)
            return
        if kind not in PICTURES:
            raise ValueError(
                f"Timeline.save(path): a figure, {', '.join(PICTURES)}, or a trace, .json; got {path.name!r}."
            )
        write_whole(path, _drawn(self.plot, kind[1:]))

    def __repr__(self) -> str:
        peak = self.peak
        place = f"in the {peak.phase} of {peak.unit}" if peak.unit else "between steps"
        rest = sizes.text(sum(self._record.steps[-1].resident.values()))
        ranks = self._results.settings.ranks
        return (
            f"Timeline({self.name} on {ranks} ranks, step {self.step}: {len(self.events)} events; "
            f"{rest} at rest, {sizes.text(peak.total)} at the peak, {place})"
        )

    def _repr_png_(self) -> bytes:
        return _drawn(self.plot, "png")


def _change(event: EventRecord) -> int:
    return {"hold": 1, "free": -1}.get(event.kind, 0) * event.nbytes


def _drawn(plot: Callable[[], Any], kind: str) -> bytes:
    from zerosim.report.figure_style import encoded

    return encoded(plot(), kind)
