"""What the ranks are held to: the same runs in the simulator, in a process of its own.

A process of its own because linear algebra on another number of threads may sum in another
order: here it has one, as every rank has. Owns the simulated side of a comparison; must not
know torch, nor what the ranks said.
"""

from __future__ import annotations

from zerosim.checks import compare as checks
from zerosim.real_ranks import setup as agreed
from zerosim.real_ranks.messages import Board, Go, Job, Line, Simulated
from zerosim.records.real_ranks import NATIVE, RING
from zerosim.worlds.native import LocalCollectives


def serve(line: Line, board: Board, rank: int) -> None:
    """Do one job after another, until the line is closed: a step for every Go."""
    while True:
        try:
            job = line.receive()
            assert isinstance(job, Job)
            _simulate(line, job)
        except EOFError:
            return


def _simulate(line: Line, job: Job) -> None:
    """All runs of the job.

    The bits are those of the plain simulator, whichever the collectives. A simulated library
    with the layout of a real one says what is held and counted where they are handed over whole.
    """
    settings, n = job.settings, job.world
    model, batches = agreed.model(settings), agreed.data(settings)
    for plan in agreed.plans(settings):
        options = agreed.options(settings, plan)
        plain = twin = plan.stage(model, n, **options | {"collectives": agreed.COLLECTIVES[RING]})
        if plan.collectives == NATIVE:
            twin = plan.stage(model, n, ring=LocalCollectives(n), **options)
        for batch in batches:
            message = line.receive()
            assert isinstance(message, Go)
            loss = plain.step(batch)
            if twin is not plain:
                twin.step(batch)
            report = twin.reports[-1]
            line.send(
                Simulated(
                    loss=loss,
                    states={
                        str(band): [bucket.states[band].tobytes() for bucket in plain.buckets]
                        for band in plain.states
                        if band in checks.COMPARED
                    },
                    traffic=[agreed.booked(report, each) for each in range(n)],
                    resident=dict(report.resident),
                    peak=dict(report.peak.by_band),
                )
            )
