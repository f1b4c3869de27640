"""The colours of bands on a page: the palette's own, made darker by daylight and lighter at night until they show.

Owns that rule and the names of the variables that styles and scripts use. Must not know what is drawn.

What is drawn must stand out from its ground by 3 to 1 (WCAG 2, 1.4.11), by day and by night. The hue and, as far as
a screen has it, the strength of a colour stay (OKLab: Ottosson 2020); only its lightness moves, and only where it must.
"""

from __future__ import annotations

import re
from itertools import pairwise

from zerosim.report.colors import BANDS

GROUNDS = {"light": "#ffffff", "dark": "#15171a"}
LEAST = 3.1  # a little more than is asked for, as colours are rounded
UNKNOWN = "#777777"  # a band that the palette does not have

Triple = tuple[float, float, float]
_TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
_TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)
_FROM_LAB = ((1, 0.3963377774, 0.2158037573), (1, -0.1055613458, -0.0638541728), (1, -0.0894841775, -1.2914855480))
_FROM_CONES = (
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)


def variable(band: str) -> str:
    """The name of a band's variable.

    >>> variable("gathered params")
    '--band-gathered-params'
    """
    return "--band-" + (re.sub(r"[^a-z]+", "-", band) if band in BANDS else "unknown")


def variables() -> str:
    """A style sheet that gives every band its colour, by day and by night."""
    light, dark = (
        " ".join(f"{name}: {visible(color, ground)};" for name, color in _every().items())
        for ground in GROUNDS.values()
    )
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"


def _every() -> dict[str, str]:
    return {variable(band): color for band, color in BANDS.items()} | {variable(""): UNKNOWN}


def visible(color: str, ground: str) -> str:
    """The colour, or the nearest of its hue that stands out from the ground.

    >>> visible("#4050B8", "#ffffff"), visible("#4050B8", "#15171a")
    ('#4050b8', '#4a5cc5')
    """
    if contrast(color, ground) >= LEAST:
        return color.lower()
    lightness, a, b = _apply(_TO_LAB, _cubes(_apply(_TO_CONES, _linear(color)), 1 / 3))
    end = 0.0 if _luminance(ground) > 0.2 else 1.0
    near, far = lightness, end
    for _ in range(20):
        middle = (near + far) / 2
        enough = contrast(_hex(middle, a, b), ground) >= LEAST
        near, far = (near, middle) if enough else (middle, far)
    return _hex(far, a, b)


def contrast(color: str, other: str) -> float:
    """How far two colours stand apart, from 1 to 21 (WCAG 2)."""
    dim, bright = sorted(map(_luminance, (color, other)))
    return (bright + 0.05) / (dim + 0.05)


def _luminance(color: str) -> float:
    red, green, blue = _linear(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(color: str) -> Triple:
    red, green, blue = (int(color[at:to], 16) / 255 for at, to in pairwise((1, 3, 5, 7)))
    return _each(red), _each(green), _each(blue)


def _each(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def _hex(lightness: float, a: float, b: float) -> str:
    """A colour of OKLab on a screen; what that does not have is cut off."""
    channels = _apply(_FROM_CONES, _cubes(_apply(_FROM_LAB, (lightness, a, b)), 3))
    shown = (min(max(channel, 0.0), 1.0) for channel in channels)
    coded = (12.92 * each if each <= 0.0031308 else 1.055 * each ** (1 / 2.4) - 0.055 for each in shown)
    return "#" + "".join(f"{round(255 * each):02x}" for each in coded)


def _apply(matrix: tuple[Triple, Triple, Triple], values: Triple) -> Triple:
    first, second, third = (sum(factor * value for factor, value in zip(row, values, strict=True)) for row in matrix)
    return first, second, third


def _cubes(values: Triple, power: float) -> Triple:
    first, second, third = (max(value, 0.0) ** power if power < 1 else value**power for value in values)
    return first, second, third
