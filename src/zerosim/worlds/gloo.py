"""What gloo makes of what it is handed: where it cuts a buffer, and the bytes and messages that it sends for it.

Owns the operations that torch can be handed, the model of gloo's ring, tree and framing, and the textbook's
count beside it. A message costs three headers: its source announces it, its destination asks for it, and it
travels behind a header of its own. The model is what was observed of torch 2.13; the comparison with the
kernel's counters is what checks it. Must not know torch, schemes or ledgers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

HEADER = 48  # bytes of gloo's preamble
MAX_SEGMENT = 2**20  # bytes of an all-reduce's segment at most


class Op(StrEnum):
    """What can be handed to torch."""

    SEND = "send"
    RECEIVE = "receive"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    BROADCAST = "broadcast"


class Call(NamedTuple):
    """One operation as it was asked for: which, the whole buffer's elements, bytes of one, a broadcast's root.

    ``op`` is an ``Op``, or the name of something that is not known. ``ring`` has the ranks that it runs over,
    in their order, and nothing if those are all; ``root`` is a place in it.
    """

    op: str
    elements: int
    itemsize: int = 1
    root: int = 0
    ring: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.elements * self.itemsize

    def place(self, rank: int, ranks: int) -> tuple[int, int]:
        """Which member of its ring a rank is, and how many there are.

        >>> Call(Op.ALL_REDUCE, 4000, 4, ring=(1, 3)).place(rank=3, ranks=4)
        (1, 2)
        """
        return (self.ring.index(rank), len(self.ring)) if self.ring else (rank, ranks)


class Moved(NamedTuple):
    """Bytes and messages that a rank sends and receives."""

    sent: int = 0
    received: int = 0
    messages_sent: int = 0
    messages_received: int = 0

    def framing(self) -> tuple[int, int]:
        """Bytes of headers (sent, received): two from a message's source, one from its destination.

        >>> Moved(messages_sent=1).framing()
        (96, 48)
        """
        out, into = self.messages_sent, self.messages_received
        return HEADER * (2 * out + into), HEADER * (out + 2 * into)


def total(parts: Iterable[Moved]) -> Moved:
    """The sum, field by field."""
    return Moved(*map(sum, zip(*parts, strict=True)))


# -- where a buffer is cut


def segments(elements: int, itemsize: int, ranks: int) -> tuple[int, int]:
    """How many segments gloo cuts a buffer into, a multiple of ``ranks``, and the elements of each but the last.

    >>> segments(33_088, 4, 4)
    (8, 4136)
    """
    wanted = max(-(-elements * itemsize // MAX_SEGMENT), 2 * ranks)
    count = -(-wanted // ranks) * ranks
    return count, -(-elements // count)


def chunk(elements: int, itemsize: int, ranks: int) -> int:
    """Elements of one of the ``ranks`` chunks into which gloo's all-reduce cuts a buffer; the last may be short."""
    count, segment = segments(elements, itemsize, ranks)
    return count // ranks * segment


# -- bytes and messages


def textbook(call: Call, rank: int, ranks: int) -> Moved:
    """What ``rank`` must send and receive: a ring's (Patarasuk and Yuan 2009), a broadcast's along its tree.

    Of what is not known it is nothing.
    """
    match call.op:
        case Op.SEND:
            return Moved(sent=call.nbytes, messages_sent=1)
        case Op.RECEIVE:
            return Moved(received=call.nbytes, messages_received=1)
        case Op.BROADCAST:
            return _broadcast(call, rank, ranks)
        case Op.ALL_REDUCE | Op.REDUCE_SCATTER | Op.ALL_GATHER:
            hops = (ranks - 1) * (2 if call.op == Op.ALL_REDUCE else 1)
            return Moved(*[hops * call.nbytes // ranks] * 2, *[hops] * 2)
        case _:
            return Moved()


def moved(call: Call, rank: int, ranks: int) -> Moved | None:
    """What gloo sends and receives for it on ``rank``, payload and messages; None if how it does so is not known.

    Its reduce-scatter is an all-reduce of which a slice is kept: twice the bytes. What lies beyond the
    buffer is not sent.

    >>> moved(Call(Op.ALL_REDUCE, 4000, 4), rank=1, ranks=4)
    Moved(sent=24000, received=24000, messages_sent=12, messages_received=12)
    """
    match call.op:
        case Op.SEND | Op.RECEIVE | Op.BROADCAST:
            return textbook(call, rank, ranks)
        case Op.ALL_REDUCE | Op.REDUCE_SCATTER:
            chunks = _chunks(call, ranks)
            # Scattering, a rank sends all chunks but its own; gathering, all but that of the rank below.
            # Its neighbour above does the same, and that is what it receives.
            return total((_hops(chunks, rank, rank + 1), _hops(chunks, rank - 1, rank)))
        case Op.ALL_GATHER:
            own = call.nbytes // ranks
            return _hops([[half for half in (own // 2, own - own // 2) if half]] * ranks, rank - 1, rank)
        case _:
            return None


def _chunks(call: Call, ranks: int) -> list[list[int]]:
    """For each chunk of an all-reduce the bytes of its segments, those beyond the buffer left out."""
    count, segment = segments(call.elements, call.itemsize, ranks)
    lengths = [min(segment, call.elements - index * segment) * call.itemsize for index in range(count)]
    each = count // ranks
    return [[length for length in lengths[c * each : (c + 1) * each] if length > 0] for c in range(ranks)]


def _hops(chunks: Sequence[Sequence[int]], kept: int, missed: int) -> Moved:
    """A turn of the ring: all chunks but ``kept`` are sent, all but ``missed`` received, a message per segment."""
    out = [segment for c, each in enumerate(chunks) if (c - kept) % len(chunks) for segment in each]
    into = [segment for c, each in enumerate(chunks) if (c - missed) % len(chunks) for segment in each]
    return Moved(sum(out), sum(into), len(out), len(into))


def _broadcast(call: Call, rank: int, ranks: int) -> Moved:
    """Down a binomial tree: the v-th rank from the root gets it from the one without v's highest bit."""
    v = (rank - call.root) % ranks
    below = sum(1 for power in range(ranks.bit_length()) if v < 1 << power and v + (1 << power) < ranks)
    return Moved(below * call.nbytes, call.nbytes if v else 0, below, 1 if v else 0)
