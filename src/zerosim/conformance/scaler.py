"""The loss scale of each step, by the rules of torch.amp.GradScaler. Must not know when a number is not finite."""

from __future__ import annotations

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


class Scaler:
    """``scale`` is this step's; 0 where there is none. A number is where it starts, and ``dynamic`` whether it moves."""

    def __init__(self, start: float, *, dynamic: bool = True) -> None:
        self.scale, self._dynamic, self._good = start, dynamic, 0

    def went_well(self) -> None:
        """A step whose gradients were finite."""
        self._good += 1
        if self._dynamic and self.scale and self._good == INTERVAL:
            self.scale, self._good = self.scale * GROWTH, 0

    def overflowed(self) -> None:
        """A step that was skipped."""
        self._good = 0
        if self._dynamic:
            self.scale *= BACKOFF
