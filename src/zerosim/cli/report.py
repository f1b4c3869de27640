"""``zerosim report``: the page and the trace from a results file. Parse, call, print.

Exit codes: 0 they are written; 2 they cannot be. Heavy imports wait until it runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from zerosim.cli import options as shared
from zerosim.cli.errors import errors_for_people, printing, replacing, writable
from zerosim.records.results import Results

PAGE = ("report.html", "trace.json")


@click.command()
@click.argument("recorded", metavar="RESULTS", type=click.Path(dir_okay=False, path_type=Path))
@shared.out("Folder for report.html and trace.json.  [default: that of RESULTS]", default=None)
def report(recorded: Path, out: Path | None) -> None:
    """Write the page and the trace of a results.json of the lab's.

    They are report.html and trace.json. The page opens offline: verdicts, tables, charts, and a
    player that replays the events of a step. The trace opens in Perfetto or chrome://tracing.
    """
    from zerosim.lab.record import load

    out = out or recorded.parent
    with errors_for_people():
        found = load(recorded)
        writable(out, "report", *PAGE)
        try:
            with replacing(out) as staging:
                save_pages(found, staging)
        except (LookupError, ArithmeticError) as error:
            raise ValueError(f"{recorded}: its parts do not fit together ({error!r}). Run the lab again.") from error
    with printing():
        click.echo(f"written to {out}/: {' and '.join(PAGE)}")


def save_pages(found: Results, out: Path) -> None:
    """Write the page and the trace, whose libraries nothing else needs, to a folder."""
    from zerosim.report.page import save_page
    from zerosim.report.trace import save_trace

    for save_one, name in zip((save_page, save_trace), PAGE, strict=True):
        save_one(found, out / name)
