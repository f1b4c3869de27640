"""The paper of the moving picture: rectangles, stripes and type in palette colors, and frames that become a GIF.

Owns pixels and the file's format; everything is in points, of which each is ``SCALE`` pixels. Must not know what is
drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageFont

from zerosim.bands import Array
from zerosim.report.colors import BANDS
from zerosim.report.figure_style import FAINT, INK

SCALE = 2  # pixels for each point: sharp also where a screen has two for one
PALE = 0.25  # how much of a color is left of it where it is still to come
SHADES = 8  # between the paper and the ink, for type
WHITE, EMPTY = "#FFFFFF", "#F1F1F1"
TINTS = ("#F6F6F6", "#E8E8E8")


def blend(color: str, share: float, paper: str = WHITE) -> str:
    """A color with some of the paper's: all of it for 0."""
    pairs = zip(bytes.fromhex(color[1:]), bytes.fromhex(paper[1:]), strict=True)
    return "#" + "".join(f"{round(ink * share + white * (1 - share)):02X}" for ink, white in pairs)


PALETTE = list(
    dict.fromkeys(
        [
            *(blend(INK, shade / (SHADES - 1)) for shade in range(SHADES)),
            EMPTY, FAINT, *TINTS, *BANDS.values(), *(blend(color, PALE) for color in BANDS.values()),
        ]
    )
)  # fmt: skip
CLEAR = 255  # stands for what the frame before had in this place


def ink(color: str) -> int:
    """The number of a color."""
    return PALETTE.index(color)


@cache
def font(size: float, *, bold: bool) -> ImageFont.FreeTypeFont:
    """The type that the figures are set in."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size * SCALE)


class Sheet:
    """A picture in palette colors, in points."""

    def __init__(self, width: int, height: int, image: Image.Image | None = None) -> None:
        self.width, self.height = width, height
        self.image = image or Image.new("P", (width * SCALE, height * SCALE), ink(WHITE))
        self.image.putpalette(b"".join(bytes.fromhex(color[1:]) for color in PALETTE))
        self._draw = ImageDraw.Draw(self.image)

    @classmethod
    def of(cls, pixels: Array) -> Sheet:
        """One with these palette colors."""
        height, width = pixels.shape
        return cls(width // SCALE, height // SCALE, Image.frombytes("P", (width, height), pixels.tobytes()))

    def copy(self) -> Sheet:
        """Another of the same."""
        return Sheet(self.width, self.height, self.image.copy())

    def box(self, x: float, y: float, width: float, height: float, color: str, *, hatched: bool = False) -> None:
        """A filled rectangle, or one of slanted stripes."""
        left, top, right, bottom = (round(SCALE * at) for at in (x, y, x + width, y + height))
        if right <= left or bottom <= top:
            return
        if not hatched:
            self._draw.rectangle((left, top, right - 1, bottom - 1), ink(color))
            return
        self.image.paste(_stripes(ink(color), left % 6, top % 6, right - left, bottom - top), (left, top))

    def frame(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """The outline of a rectangle, around it."""
        left, top, right, bottom = (round(SCALE * at) for at in (x, y, x + width, y + height))
        self._draw.rectangle((left - 3, top - 3, right + 2, bottom + 2), outline=ink(color), width=2)

    def paste(self, other: Sheet, x: float, y: float, width: float, height: float) -> None:
        """What another sheet has in a rectangle."""
        left, top, right, bottom = (round(SCALE * at) for at in (x, y, x + width, y + height))
        self.image.paste(other.image.crop((left, top, right, bottom)), (left, top))

    def text(self, x: float, y: float, text: str, size: float, *, bold: bool = False, anchor: str = "ls") -> None:
        """A line of type in ink: at its left end, or as the anchor says, on the base line."""
        letters = font(size, bold=bold)
        left, top, right, bottom = (int(each) for each in letters.getbbox(text, anchor=anchor))
        cover = Image.new("L", (right - left + 2, bottom - top + 2))
        ImageDraw.Draw(cover).text((-left, -top), text, 255, letters, anchor=anchor)
        place = round(SCALE * x) + left, round(SCALE * y) + top
        shades = cover.point([round(level * (SHADES - 1) / 255) for level in range(256)])
        self.image.paste(shades, place, cover.point([255 * (level > 255 / SHADES / 2) for level in range(256)]))


@cache
def _stripes(color: int, left: int, top: int, width: int, height: int) -> Image.Image:
    """Stripes that go on from one rectangle to the next."""
    pixels = bytes(
        color if (left + x + top + y) % 6 < 3 else ink(WHITE) for y in range(height) for x in range(width)
    )  # fmt: skip
    return Image.frombytes("P", (width, height), pixels)


def gif(sheets: Sequence[Sheet], milliseconds: Sequence[int]) -> bytes:
    """Sheets as a GIF that goes on for ever: of each but the first only what has changed, which keeps it small."""
    frames = [np.asarray(sheet.image) for sheet in sheets]
    changes = [np.where(after == before, CLEAR, after) for before, after in pairwise(frames)]
    first, *others = (Sheet.of(pixels).image for pixels in [frames[0], *changes])
    content = io.BytesIO()
    first.save(
        content, "GIF", save_all=True, append_images=others, duration=milliseconds, loop=0, optimize=False,
        transparency=CLEAR, disposal=1, comment=f"drawn by Pillow {PIL.__version__}",
    )  # fmt: skip
    return content.getvalue()
