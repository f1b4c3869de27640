"""A user's own ZeRO or FSDP held to the simulator: ``check``, its recording, and ranks to run it on.

Conformance, as one tests an implementation against a specification; ``checks`` are those that the simulator passes itself.
"""

from zerosim.conformance.check import Check, check

__all__ = ["Check", "check"]
