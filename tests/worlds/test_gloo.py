"""The model of gloo: where it cuts a buffer, and the bytes and messages that it sends for it."""

import pytest

from zerosim.worlds import gloo
from zerosim.worlds.gloo import HEADER, MAX_SEGMENT, Call, Moved, Op


def test_a_message_costs_three_headers() -> None:
    """Its source sends two headers and its destination one, so that who sends and receives one pays for three."""
    assert Moved(messages_sent=1).framing() == (2 * HEADER, HEADER)
    assert Moved(messages_received=1).framing() == (HEADER, 2 * HEADER)
    assert Moved(messages_sent=5, messages_received=5).framing() == (5 * 3 * HEADER,) * 2


@pytest.mark.parametrize(
    ("op", "nbytes", "payload", "messages"),
    [
        (Op.ALL_REDUCE, 16_000, 2 * 3 * 4_000, 2 * 3 * 2),
        (Op.REDUCE_SCATTER, 16_000, 2 * 3 * 4_000, 2 * 3 * 2),
        (Op.ALL_GATHER, 16_000, 3 * 4_000, 3 * 2),
        (Op.ALL_REDUCE, 4 * 3 * MAX_SEGMENT, 2 * 3 * 3 * MAX_SEGMENT, 2 * 3 * 3),
        (Op.ALL_REDUCE, 4 * 2 * MAX_SEGMENT + 16, 2 * 3 * (2 * MAX_SEGMENT + 4), 2 * 3 * 3),
        (Op.ALL_GATHER, 4 * 3 * MAX_SEGMENT, 3 * 3 * MAX_SEGMENT, 3 * 2),
    ],
)
def test_gloo_moves_this_on_four_ranks(op: Op, nbytes: int, payload: int, messages: int) -> None:
    """Payload and messages of each collective, both ways; a chunk goes in two segments, or more of 1 MiB at most."""
    assert gloo.moved(Call(op, nbytes), 1, 4) == (payload, payload, messages, messages)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_only_reduce_scatter_departs_from_the_textbook(size: int) -> None:
    """gloo's payloads are the textbook's, but a reduce-scatter costs as much as the all-reduce that it is."""
    nbytes = size * 2 * 1013  # a whole number of segments to a chunk
    for op in Op:
        expected = gloo.textbook(Call(Op.ALL_REDUCE if op is Op.REDUCE_SCATTER else op, nbytes), 1, size)
        moved = gloo.moved(Call(op, nbytes), 1, size)
        assert moved
        assert moved[:2] == expected[:2]
    scatter = Call(Op.REDUCE_SCATTER, nbytes)
    assert gloo.textbook(scatter, 0, size).sent == (size - 1) * 2 * 1013
    assert gloo.total([gloo.moved(scatter, 0, size) or Moved()]).sent == 2 * (size - 1) * 2 * 1013


def test_totals_add_up_field_by_field() -> None:
    """A hop is what was sent and what was received, and the total of nothing is nothing."""
    hop = gloo.total([gloo.textbook(Call(Op.SEND, 7), 0, 3), gloo.textbook(Call(Op.RECEIVE, 11), 0, 3)])
    assert hop == Moved(sent=7, received=11, messages_sent=1, messages_received=1)
    assert gloo.total([]) == Moved()


def test_what_is_not_known_is_not_guessed() -> None:
    """An operation without a model moves None, and the textbook has nothing on it."""
    assert gloo.moved(Call("alltoall_", 7), 0, 3) is None
    assert gloo.textbook(Call("alltoall_", 7), 0, 3) == Moved()
