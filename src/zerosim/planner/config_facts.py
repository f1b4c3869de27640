"""What a configuration says of its model whatever is asked of it.

Owns the record. Must not know where the configuration comes from, nor how it is read.
"""

from __future__ import annotations

import msgspec


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model whatever is asked of it.

    ``name`` is the class; ``most`` the tokens of a row that it was made for, and ``table`` whether it has no positions
    beyond; ``length`` whether its rows have a length at all; ``attention`` and ``call`` say how it runs: the
    implementation, and which of the things that it may be called with. ``runs`` is False where it can't
    be run on shapes: then only its parameters are known. ``dense_decoder``: it is one, of text.
    """

    name: str
    most: int | None
    table: bool
    length: bool
    attention: str
    call: int
    largest_module: int
    notes: tuple[str, ...]
    runs: bool = True
    dense_decoder: bool = False
