"""Who owns which piece of a layer, as the page draws it: from a row's declaration, resolved on so many ranks.

Owns how a row is written down for drawing. Must not know how anything is drawn, nor any row by its name.
"""

from __future__ import annotations

from typing import Any

from zerosim.bands import MODEL_STATES, Band
from zerosim.stages import Over, Stage, kind_of

KINDS = {"params": Band.PARAMS, "grads": Band.GRADS, "optimizer": Band.MASTER}  # of state, each by one of its bands


def bands_of() -> dict[str, list[str]]:
    """The bands of each kind of state.

    >>> bands_of()["optimizer"]
    ['main grads', 'master', 'exp_avg', 'exp_avg_sq', 'momentum']
    """
    return {kind: [str(band) for band in MODEL_STATES if kind_of(band) == kind] for kind in KINDS}


def declared(row: Stage, ranks: int, node: int | None) -> dict[str, Any]:
    """For each kind of state into how many pieces a layer is cut and which of them each rank owns, and where it is.

    >>> mine = Stage("mine", optimizer="all", grads="group")
    >>> declared(mine, ranks=4, node=2)["pieces"]["grads"]
    {'of': 2, 'owned': [0, 1, 0, 1], 'host': False}
    """
    here = row.on(ranks, node, gathers="params" in row.offload)
    pieces = {}
    for kind, band in KINDS.items():
        owned = [here.piece(band, rank, ranks, node) for rank in range(ranks)]
        pieces[kind] = {"of": owned[0][1], "owned": [piece for piece, _ in owned], "host": here.offloads(band)}
    return {
        "pieces": pieces,
        "node": node or ranks,
        "gathers": here.params is not Over.NOBODY,  # whole parameters exist only for a while
    }
