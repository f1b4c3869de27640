"""A step on shapes: nothing is allocated but counted all the same, so that a thousand ranks take a second.

Owns ``dry``. Must not know the schedule.
"""

from __future__ import annotations

from typing import Any

from zerosim.api.models import is_module
from zerosim.counts import Report
from zerosim.model import MLP
from zerosim.options import Options, chosen, with_options
from zerosim.util.rows import Said, one
from zerosim.worlds.dry import DryRing, Shapes


@with_options
def dry(
    model: Any,
    row: Said,
    *,
    ranks: int,
    rows: int = 8,
    batch: tuple[Any, Any] | None = None,
    wrap: Any = None,
    loss: Any = None,
    options: Options | None = None,
    **keywords: Any,
) -> Report:
    """One step of ``model`` under ``row`` on N ``ranks``, on shapes alone: its report, to the byte that of a real step.

    * ``model``: an ``MLP``, which is given ``rows`` rows per rank; or a ``torch.nn.Module``, on any device, with
      one rank's ``batch`` (x, y) as an example, and ``wrap`` and ``loss`` as in ``compare``.
    * ``row``: a row, or its name, as in ``"zero-3"``.
    * Options come as keywords, as one record, or as both.

    OutOfMemory, as in a real step, if ``capacity`` would be passed; ValueError or TypeError for what cannot be run.

    >>> import zerosim as zs
    >>> report = zs.dry(zs.MLP((4096, 16384, 4096)), zs.ZeRO3, ranks=1024)
    >>> sum(report.resident.values()), report.peak.unit
    (2097472, 'layer 2')
    """
    stage, asked = one("dry", "row", row), chosen(options, keywords)
    if asked.uneven:
        raise ValueError("dry(uneven): on shapes one rank stands for all, so all have its rows. Leave uneven out.")
    if isinstance(model, MLP):
        shapes = Shapes(model)
        given: Any = shapes.batch(rows * asked.accumulate)
    elif is_module(model):
        shapes, given = _measured(model, batch, wrap, loss, asked)
    else:
        raise TypeError(f"dry(model): a model is an MLP or a torch.nn.Module; got {type(model).__name__}.")
    scheme = stage(shapes, ranks, asked, ring=DryRing(ranks))
    scheme.step(given)
    return scheme.reports[-1]


def _measured(module: Any, batch: tuple[Any, Any] | None, wrap: Any, loss: Any, options: Options) -> tuple[Any, Any]:
    """The module's shapes, and a batch of them."""
    from zerosim.torch_models.losses import cross_entropy
    from zerosim.torch_models.model import shapes_of
    from zerosim.worlds.shapes import ShapeModel

    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            f"dry(batch): a module needs an example of one rank's (x, y); got {type(batch).__name__}. Empty tensors of "
            f"the right shapes, on torch.device('meta') say, will do."
        )
    model = ShapeModel(shapes_of(module, batch[0], wrap, loss=loss or cross_entropy, target=batch[1]))
    return model, model.batch(options.accumulate)
