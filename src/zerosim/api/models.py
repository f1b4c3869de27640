"""What a caller brings, made ready for the simulator: a perceptron, any ``nn.Module``, arrays or torch's tensors.

Owns the coupling to torch: nothing here loads it, a caller's module or tensor has. Must not know
what the model is trained for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerosim.bands import Array
from zerosim.layers import Model
from zerosim.util.arguments import as_array, integer, one_of

Batch = list[tuple[Any, Any]]


def is_module(model: object) -> bool:
    """Whether it is a torch module."""
    return any(f"{kind.__module__}.{kind.__name__}" == "torch.nn.modules.module.Module" for kind in type(model).__mro__)


def model_for(call: str, model: Any, x: Any, *, wrap: Any = None, loss: Any = None) -> Model:
    """The model, or a module made one: cut into units by ``wrap``, trained to ``loss``, called on ``x``.

    TypeError for what is neither, ValueError for a module that cannot be cut so.
    """
    if is_module(model):
        from zerosim.torch_models.losses import cross_entropy
        from zerosim.torch_models.model import TorchModel

        return TorchModel(model, x, wrap, loss=loss or cross_entropy)
    if not isinstance(model, Model):
        raise TypeError(
            f"{call}(model): a model is an MLP or a torch.nn.Module; got {type(model).__name__}. For a list of layer "
            f"sizes pass zs.MLP(sizes)."
        )
    if wrap is not None or loss is not None:
        raise ValueError(
            f"{call}({'wrap' if wrap is not None else 'loss'}): {type(model).__name__} has its own layers and loss. "
            f"Leave it out, or pass a torch.nn.Module."
        )
    return model


def batches_for(call: str, batches: Iterable[Any], ranks: int) -> list[Batch]:
    """The batches as lists of one (x, y) of arrays per rank; a single batch is taken for what it is.

    ValueError or TypeError for anything else, in the words of the call.
    """
    try:
        given = list(batches)
    except TypeError:
        given = []
    for batch in (given, *given):
        if isinstance(batch, list) and batch and all(map(_is_longer, batch)):
            raise ValueError(
                f"{call}(batches): a rank's entry is one pair (x, y); got one of {len(batch[0])}. Several inputs go in "
                f"a tuple, as in ((a, b), y), or by name, as in ({{'a': a, 'b': b}}, y)."
            )
    several = all(isinstance(batch, Sequence) and all(map(_is_pair, batch)) for batch in given)
    if given and not several and all(map(_is_pair, given)):
        given, several = [given], True
    if not given or not several:
        raise ValueError(
            f"{call}(batches): a list of batches, each a list of one (x, y) per rank, as in "
            f"zs.batches(ranks={ranks}); got {type(batches).__name__}."
        )
    wrong = next((len(batch) for batch in given if len(batch) != ranks), ranks)
    if wrong != ranks:
        raise ValueError(
            f"{call}(batches): each batch has one (x, y) per rank, {ranks} in all; got one of {wrong}. Pass "
            f"ranks={wrong}, or other batches."
        )
    return [[(_arrays(x), _arrays(y)) for x, y in batch] for batch in given]


def rows_of(batches: Sequence[Batch]) -> int:
    """Rows of each rank's batch, or 0 where they are not always the same."""
    rows = {len(_parts(x)[0]) for batch in batches for x, _ in batch}
    return rows.pop() if len(rows) == 1 else 0


def _is_pair(value: Any) -> bool:
    """Whether it is an (x, y), each an array, or several in a tuple or by name."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_data, value))


def _is_longer(value: Any) -> bool:
    """Whether it is what a pair would be whose inputs were not put in a tuple: (a, b, y)."""
    return isinstance(value, tuple) and len(value) > 2 and _is_data(value)


def _is_data(value: Any) -> bool:
    return len(_parts(value)) > 0 and all(hasattr(each, "shape") for each in _parts(value))


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else [value]


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: as_array(each) for name, each in value.items()}
    return tuple(map(as_array, value)) if isinstance(value, tuple) else as_array(value)


def batches(
    ranks: int, steps: int = 1, *, rows: int = 8, widths: tuple[int, int] = (64, 64), data: str = "noise", seed: int = 7
) -> list[list[tuple[Array, Array]]]:
    """For each step one (x [rows, in], y [rows, out]) of float32 per rank, the same for a seed.

    ``data`` is ``"noise"``, standard normal numbers, or ``"digits"``, handwritten digits to be reproduced
    (needs scikit-learn, and widths of 64). ValueError for anything else.

    >>> import zerosim as zs
    >>> batch, = zs.batches(ranks=4)
    >>> len(batch), batch[0][0].shape
    (4, (8, 64))
    """
    from zerosim.lab.data import DATA, batches

    one_of("batches", "data", data, DATA)
    for name, value in (("ranks", ranks), ("steps", steps), ("rows", rows)):
        integer("batches", name, value)
    if not isinstance(widths, tuple | list) or len(widths) != 2:
        raise ValueError(f"batches(widths): two widths, of x and of y, as in (64, 64); got {widths!r}.")
    for width in widths:
        integer("batches", "widths", width)
    return list(batches(data, ranks, steps, rows, widths, seed))
