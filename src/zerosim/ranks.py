"""What the ranks of this process hold.

Owns ``hold`` and ``free``, the only way memory comes and goes, and the memory limit of a
card. Must not know communication, models or schedules.

A band's arrays have the ranks as rows: ``Ranks`` allocates all of them at once, ``Rank`` is
a reading view of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import NamedTuple, overload

from zerosim.bands import Array, Band, DType, Place
from zerosim.kernels.operations import NUMPY, Kernels
from zerosim.ledger import Ledger
from zerosim.pool import Pool

# Of several dtypes, as parameters are if some are frozen and kept in another; what dtypes says is what is usual.
ANY_DTYPE = frozenset((Band.ACTIVATIONS, Band.BUFFERS, Band.BLOCKS, Band.PARAMS, Band.GATHERED, Band.SECONDARY))


_NEW, _CARD = tuple.__new__, Place.CARD  # by name, as in ledger.py


class OutOfMemory(MemoryError):
    """A hold would have passed the card's capacity. Nothing was allocated; the ledger stands as it was.

    Attributes: ``rank``, ``band``, ``unit`` (the layer), ``asked`` bytes, ``held`` bytes by
    band, ``capacity`` bytes, the ``place`` that was full, what was held ``on_card`` whichever it was, and
    ``ledger``, the run's record, which goes on.

    >>> import zerosim as zs
    >>> run = zs.ZeRO3(zs.MLP(), ranks=8, capacity=100_000)
    >>> try:
    ...     run.step(*zs.batches(ranks=8))
    ... except zs.OutOfMemory as error:
    ...     f"{error.asked:,} B of {error.band} for {error.unit}"
    '33,024 B of gathered params for layer 2'
    """

    def __init__(
        self, rank: int, band: Band, unit: str, asked: int, capacity: int, ledger: Ledger, place: Place = Place.CARD
    ) -> None:
        self.rank, self.band, self.unit, self.place = rank, band, unit, place
        self.asked, self.capacity, self.ledger = asked, capacity, ledger
        there = ledger.held if place is Place.CARD else ledger.host
        self.held = {name: nbytes for name, nbytes in there.items() if nbytes}
        self.on_card = {name: nbytes for name, nbytes in ledger.held.items() if nbytes}
        total, where = sum(self.held.values()), "the card" if place is Place.CARD else "its part of the host"
        held = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.held.items()) or "nothing"
        advice = "a higher stage or a larger card" if place is Place.CARD else "or offload less"
        super().__init__(
            f"Out of memory on rank {rank} (every rank here holds the same): tried to hold {asked:,} B of "
            f"{band}{f' for {unit}' if unit else ''}; {where} has {capacity:,} B, of which {total:,} B "
            f"are held ({held}) and {capacity - total:,} B free. Use more ranks, {advice}."
        )


class _Allocation(NamedTuple):
    array: Array
    band: Band
    unit: str
    number: int
    place: Place


class Ranks:
    """The memory of the ranks that live in this process, ``ids``; ``ranks[i]`` reads the i-th of them.

    ``dtypes`` gives each band's dtype; ``empty`` is how this world makes an array;
    ``capacity`` is the memory of one card in bytes, or None for no limit, and ``host_capacity`` that
    of the host for each rank; ``kernels`` is what computes there. ``exact`` says that a block of memory is
    of one shape and dtype for good.
    """

    def __init__(
        self,
        ids: Sequence[int],
        dtypes: Mapping[Band, DType],
        ledger: Ledger,
        empty: Callable[[tuple[int, ...], DType], Array],
        capacity: int | None = None,
        host_capacity: int | None = None,
        kernels: Kernels = NUMPY,
        *,
        exact: bool = True,
    ) -> None:
        self.kernels = kernels
        self.ids, self.dtypes, self.ledger, self.capacity, self._rows = ids, dtypes, ledger, capacity, len(ids)
        self.host_capacity = host_capacity
        self._pool = Pool(empty, exact=exact)
        self.allocations = 0  # so far, whether freed since or not
        self._live: dict[int, _Allocation] = {}  # in order of allocation

    def hold(
        self, band: Band, shape: tuple[int, ...], unit: str = "", dtype: DType | None = None, place: Place = Place.CARD
    ) -> Array:
        """Allocate [R, *shape] of the band's own dtype, so that nothing wider slips in; contents undefined.

        ``dtype`` may say another for the bands in ``ANY_DTYPE``; ValueError for the rest.
        Raises OutOfMemory, before allocating, if the capacity of the card, or of the host, would be passed.
        """
        if dtype is None:
            dtype = self.dtypes[band]
        elif band not in ANY_DTYPE and dtype != self.dtypes[band]:
            raise ValueError(
                f"Ranks.hold(dtype): {band} is held in {self.dtypes[band]} here; got {dtype}. Leave dtype out, or "
                f"choose another precision."
            )
        capacity = self.capacity if place is _CARD else self.host_capacity
        if capacity is not None:
            asked = dtype.itemsize * prod(shape)
            held = self.ledger.total if place is Place.CARD else sum(self.ledger.host.values())
            if held + asked > capacity:
                raise OutOfMemory(self.ids[0], band, unit, asked, capacity, self.ledger, place)
        array = self._pool.take((self._rows, *shape), dtype)
        self.allocations += 1
        self._live[id(array)] = _NEW(_Allocation, (array, band, unit, self.allocations, place))
        self.ledger.hold(band, array.nbytes // self._rows, unit, place)
        return array

    def free(self, array: Array) -> None:
        """Give back what ``hold`` returned: that array itself, not a view of it. ValueError otherwise."""
        allocation = self._live.pop(id(array), None)
        if allocation is None:
            raise ValueError(
                f"Ranks.free takes an array that hold returned and that is still held; got one of shape "
                f"{array.shape}. Pass the array itself, not a view, and only once."
            )
        self._pool.give(array)
        self.ledger.free(allocation.band, array.nbytes // self._rows, allocation.unit, allocation.place)

    def live(self, band: Band | None = None, place: Place | None = None) -> Iterator[tuple[Band, str, Array]]:
        """Everything held now (of ``band``, in ``place``): band, unit, and the [R, ...] array, as allocated."""
        for allocation in list(self._live.values()):
            if band in (None, allocation.band) and place in (None, allocation.place):
                yield allocation.band, allocation.unit, allocation.array

    def since(self, mark: int, band: Band) -> list[Array]:
        """What of ``band`` is held now and was allocated after the ``mark``-th allocation."""
        recent = takewhile(lambda allocation: allocation.number > mark, reversed(self._live.values()))
        return [allocation.array for allocation in recent if allocation.band is band]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Rank]:
        return (Rank(self, row) for row in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Rank: ...

    @overload
    def __getitem__(self, index: slice) -> list[Rank]: ...

    def __getitem__(self, index: int | slice) -> Rank | list[Rank]:
        try:
            rows = range(len(self))[index]
        except (IndexError, TypeError) as error:
            raise type(error)(f"ranks[{index!r}]: {len(self)} ranks are here. Use 0 to {len(self) - 1}.") from None
        return Rank(self, rows) if isinstance(rows, int) else [Rank(self, row) for row in rows]


class Rank(Mapping[str, list[Array]]):
    """One virtual GPU, for reading: row ``row`` of every band, as a mapping from the bands that it holds.

    ``rank["master"]`` is a list of arrays, one per bucket, in the order of allocation: views that
    cannot be written. KeyError for a band that there is not, or of which nothing is held.

    >>> import zerosim as zs
    >>> rank = zs.ZeRO1(zs.MLP(), ranks=8).ranks[3]
    >>> [array.shape for array in rank["master"]]
    [(1040,), (2064,), (1032,)]
    """

    def __init__(self, ranks: Ranks, row: int) -> None:
        self.id = ranks.ids[row]
        self._ranks, self._row = ranks, row

    def __repr__(self) -> str:
        return f"Rank({self.id}: {', '.join(f'{band} {nbytes:,} B' for band, nbytes in self.held().items())})"

    def __getitem__(self, band: str) -> list[Array]:
        views = []
        for held, _, array in self._ranks.live():
            if held == band:
                view = array[self._row]
                view.flags.writeable = False
                views.append(view)
        if not views:
            raise KeyError(f"rank {self.id} holds {', '.join(self) or 'nothing'}; it has no {band!r}")
        return views

    def __iter__(self) -> Iterator[str]:
        return iter(self.held())

    def __len__(self) -> int:
        return len(self.held())

    def held(self, place: Place | None = None) -> dict[str, int]:
        """Bytes by band (in one ``place``), counted anew from the arrays that exist, not read from the ledger."""
        held: dict[str, int] = {}
        for band, _, array in self._ranks.live(place=place):
            held[str(band)] = held.get(band, 0) + array[self._row].nbytes
        return held


class Workspace:
    """``hold`` and ``free`` for one band: what a room that allocates, but must not know bands, is handed.

    ``dtype`` is what it allocates unless told otherwise, if that is not the band's usual one; ``kernels`` is what
    computes on it. ``on_loss`` is called by a model of shapes when its loss is there, before the loss's backward.
    """

    kernels: Kernels = NUMPY
    on_loss: Callable[[], None] | None = None

    def __init__(self, ranks: Ranks, band: Band, dtype: DType | None = None) -> None:
        self._ranks, self._band, self._dtype, self.kernels = ranks, band, dtype, ranks.kernels
        self.unit = ""  # the layer or bucket that it is allocating for
        self.rows: Sequence[int] | None = None  # of the batch, those of each rank here, where they differ

    def hold(self, *shape: int, dtype: DType | None = None) -> Array:
        """Allocate [R, *shape] in the band."""
        return self._ranks.hold(self._band, shape, self.unit, dtype or self._dtype)

    def free(self, array: Array) -> None:
        """Give it back."""
        self._ranks.free(array)

    def mark(self) -> int:
        """The moment, for ``free_since``."""
        return self._ranks.allocations

    def free_since(self, mark: int, keep: Sequence[Array]) -> None:
        """Free what was allocated in the band since ``mark`` and is still held, all but ``keep``."""
        for array in self._ranks.since(mark, self._band):
            if not any(array is each for each in keep):
                self._ranks.free(array)

    def flops(self, count: int) -> None:
        """Book floating-point operations, per rank."""
        self._ranks.ledger.flops(count)
