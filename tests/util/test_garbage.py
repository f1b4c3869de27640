"""Putting off Python's search for garbage."""

import gc

import pytest

from zerosim.util.garbage import collection_paused


@collection_paused()
def looked_up(found: dict[str, int]) -> int:
    assert not gc.isenabled()
    return found["missing"]


@pytest.mark.parametrize("searched", [True, False])
def test_garbage_is_looked_for_again_afterwards(searched: bool) -> None:
    """Not within the block; after it as before it, which may be not at all, and after an error too."""
    before = gc.isenabled()
    try:
        (gc.enable if searched else gc.disable)()
        with pytest.raises(KeyError):
            looked_up({})
        assert gc.isenabled() == searched
    finally:
        (gc.enable if before else gc.disable)()
