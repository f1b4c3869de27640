"""jaxtyping's names for the shapes in signatures, where something is there to check them.

Owns when jaxtyping is loaded: by type checkers, and where a program has loaded it already, as the tests do.
Elsewhere nobody reads the signatures, and an eighth of a second is saved. Must not know any signature.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Float, Float32, Int8, Shaped
else:

    class Shaped:
        """An array of any shape: ``typing.get_type_hints`` reads a signature so."""

        def __class_getitem__(cls, _: object) -> Any:
            return Any

    Float = Float32 = Int8 = Shaped

__all__ = ["Float", "Float32", "Int8", "Shaped"]
