"""Bytes as people write and read them: GB is a power of ten, GiB a power of two, and both say which they are.

Owns the units. Knows nothing else.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("kMGTP", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGTP", 1)},
}


def parse(text: str) -> int:
    """Bytes of a number with its unit, as in 80GB, 80 GiB or 1.5MB; a part of a byte is cut off.

    ValueError if there is no unit, or one of bits, as in 80Gb, or no number, or less than a byte or
    more than 2**63.
    """
    number = text.strip().rstrip("bBiIkKmMgGtTpP ")
    unit = text.strip()[len(number) :].strip()
    factor = {name.lower(): factor for name, factor in UNITS.items()}.get(unit.lower())
    try:
        value = Decimal(number)
        known = value.is_finite() and value > 0
    except InvalidOperation:
        known = False
    if known and value * (factor or 1) >= 2**63:
        raise ValueError(f"{text!r} is more than any machine has. Give less than 8192PiB.")
    if known and not unit:
        raise ValueError(
            f"{text!r} has no unit: {number}GB is {_whole(value * 1000**3):,} bytes and {number}GiB is "
            f"{_whole(value * 1024**3):,}. Say which, as in {number}GB."
        )
    if unit.endswith("b") and unit != unit.lower():  # who writes all in small letters has not chosen a small b
        raise ValueError(f"{text!r} is in bits, of which a byte has eight. Give bytes, with a capital B, as in 80GB.")
    nbytes = _whole(value * factor) if known and factor else 0
    if nbytes < 1:
        raise ValueError(
            f"{text!r} is not a size of at least one byte. Give a number and one of {', '.join(UNITS)}, as in 2MB."
        )
    return nbytes


def _whole(value: Decimal) -> int:
    return int(value)


def unit(nbytes: int, *, binary: bool = False, digits: int = 3) -> tuple[int, str]:
    """The unit that ``text`` gives so many bytes in: its size in bytes, and its name.

    It is the largest that they reach once they are rounded to ``digits``.

    >>> unit(999_960), unit(80 * 2**30, binary=True)
    ((1000000, 'MB'), (1073741824, 'GiB'))
    """
    base = 1024 if binary else 1000
    names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"] if binary else ["B", "kB", "MB", "GB", "TB", "PB"]
    power = 0
    while power < len(names) - 1 and float(f"{abs(nbytes) / base**power:.{digits}g}") >= base:
        power += 1
    return base**power, names[power]


def text(nbytes: int, *, binary: bool = False, digits: int = 3) -> str:
    """Bytes for a reader in the largest unit that they reach: powers of ten, or of two if ``binary``.

    >>> text(529_408), text(999_960), text(80 * 2**30, binary=True)
    ('529 kB', '1.00 MB', '80.0 GiB')
    """
    size, name = unit(nbytes, binary=binary, digits=digits)
    if size == 1:
        return f"{nbytes:,} B"
    value = nbytes / size
    decimals = max(0, digits - len(str(int(float(f"{abs(value):.{digits}g}")))))
    return f"{value:,.{decimals}f} {name}"


def both(nbytes: int, digits: int = 3) -> str:
    """Bytes in powers of ten, and in powers of two beside it."""
    return f"{text(nbytes, digits=digits)} ({text(nbytes, binary=True, digits=digits)})"
