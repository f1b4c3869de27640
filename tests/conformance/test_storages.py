"""What a rank's tensors hold: what is alive, and nothing that is over."""

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from zerosim.conformance.storages import Storages  # noqa: E402


def test_what_another_thread_gives_up_in_a_moment_is_not_at_rest() -> None:
    """As a collective's own does after the collective: it is waited for, and what stays is counted."""
    storages = Storages({}, counting=True)
    stays, passes = torch.zeros(3), [torch.zeros(10)]
    storages.see([stays, *passes])

    def give_up() -> None:
        time.sleep(0.003)
        passes.clear()

    giving = threading.Thread(target=give_up)
    giving.start()
    held = storages.held({})
    giving.join()
    assert held is not None
    assert held.rest == {"elsewhere": 12}
    assert held.peak == 52
