"""What the ranks are held to: the same runs in the simulator, in a process of its own.

A process of its own because linear algebra on another number of threads may sum in another
order: here it has one, as every rank has. Owns the simulated side of a comparison; must not
know torch, nor what the ranks said.
"""

from __future__ import annotations

from zerosim.checks import compare as checks
from zerosim.real_ranks.cases import COLLECTIVES, booked, cases, data, model
from zerosim.real_ranks.connection import Connection, Go, Heartbeats, Job, Simulated
from zerosim.records.real_ranks import NATIVE
from zerosim.worlds.native import LocalCollectives


def serve(connection: Connection, heartbeats: Heartbeats, rank: int) -> None:
    """Do one job after another, until the connection is closed: a step for every Go."""
    while True:
        try:
            job = connection.receive()
            assert isinstance(job, Job)
            _simulate(connection, job)
        except EOFError:
            return


def _simulate(connection: Connection, job: Job) -> None:
    """All runs of the job.

    The bits are those of the plain simulator, whichever the collectives. A simulated library
    with the layout of a real one says what is held and counted where they are handed over whole.
    """
    settings, n = job.settings, job.world
    trained, batches = model(settings), data(settings)
    for case in cases(settings):
        options = settings.options(case.precision)
        plain = twin = case.row(trained, n, options)
        if case.collectives == NATIVE:
            twin = case.row(trained, n, options, ring=LocalCollectives(n), collectives=COLLECTIVES[NATIVE])
        for batch in batches:
            message = connection.receive()
            assert isinstance(message, Go)
            loss = plain.step(batch)
            if twin is not plain:
                twin.step(batch)
            report = twin.reports[-1]
            connection.send(
                Simulated(
                    loss=loss,
                    states={
                        str(band): [bucket.states[band].tobytes() for bucket in plain.buckets]
                        for band in plain.states
                        if band in checks.COMPARED
                    },
                    traffic=[booked(report, each) for each in range(n)],
                    resident=dict(report.resident),
                    peak=dict(report.peak.by_band),
                )
            )
