"""A user's own ZeRO or FSDP held to the simulator: ``check``, its recording, and ranks to run it on.

Conformance, as one tests an implementation against a specification; ``checks`` are those that the simulator itself
passes.
"""

from zerosim.conformance.check import Check, check
from zerosim.conformance.launch import Ran, run_ranks

__all__ = ["Check", "Ran", "check", "run_ranks"]
