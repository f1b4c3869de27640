"""What a recipe of mixed precision keeps, and in which dtype."""

import pytest

from zerosim.bands import BF16, FP16, FP32, PRECISIONS, WIRES, Band, DType

# By recipe: the states in order with their dtypes, what forward reads, and what backward writes.
RECIPES: dict[str, tuple[list[tuple[Band, DType]], DType, DType]] = {
    "mixed": ([(Band.PARAMS, FP16), (Band.GRADS, FP16), (Band.MASTER, FP32)], FP16, FP16),
    "bf16": ([(Band.PARAMS, BF16), (Band.GRADS, BF16), (Band.MASTER, FP32)], BF16, BF16),
    "fp32": ([(Band.PARAMS, FP32), (Band.GRADS, FP32)], FP32, FP32),
    "bf16-fp32-grads": ([(Band.PARAMS, BF16), (Band.GRADS, FP32), (Band.MASTER, FP32)], BF16, FP32),
    "mixed-main-grads": (
        [(Band.PARAMS, FP16), (Band.GRADS, FP16), (Band.MAIN_GRADS, FP32), (Band.MASTER, FP32)], FP16, FP16,
    ),
    "fsdp": ([(Band.PARAMS, FP32), (Band.GRADS, FP32)], BF16, BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_recipe_keeps_what_it_says(name: str) -> None:
    """Each state in its dtype; what is gathered is what forward reads; the wire's blocks are the wire's."""
    states, reads, writes = RECIPES[name]
    recipe = PRECISIONS[name]
    for wire in WIRES.values():
        dtypes = recipe.dtypes(wire)
        assert [(band, dtypes[band]) for band in recipe.states] == states
        assert (recipe.working, dtypes[Band.GATHERED], dtypes[Band.SECONDARY]) == (reads,) * 3
        assert (dtypes[Band.UNREDUCED], dtypes[Band.BUCKET]) == (writes, dtypes[Band.GRADS])
        assert (dtypes[Band.BLOCKS], dtypes[Band.PARTIAL]) == (wire, wire)
        assert {dtypes[band] for band in (Band.EXP_AVG, Band.EXP_AVG_SQ, Band.SCALARS, Band.ACTIVATIONS)} == {FP32}


def test_a_recipe_is_everyones_if_what_is_kept_is_what_is_read() -> None:
    """All but FSDP2's, whose fp32 parameters are cast as they are gathered."""
    assert [name for name, recipe in PRECISIONS.items() if not recipe.everywhere] == ["fsdp"]
    assert [name for name, recipe in PRECISIONS.items() if not recipe.master] == ["fp32", "fsdp"]
