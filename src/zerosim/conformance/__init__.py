"""A user's own ZeRO or FSDP held to the simulator: ``check``, its recording, and ranks to run it on.

Conformance, as one tests an implementation against a specification; ``checks`` are those that the simulator itself
passes.
"""

from zerosim.util.arguments import installed

installed("check", "torch", extra="torch")  # before anything here imports it

from zerosim.conformance.check import Check, check  # noqa: E402
from zerosim.conformance.launch import Ran, run_ranks  # noqa: E402

__all__ = ["Check", "Ran", "check", "run_ranks"]
