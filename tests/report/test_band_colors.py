"""On a page every band shows, by day and by night, in a colour that is still its own."""

from __future__ import annotations

import re

import pytest

from zerosim.report import band_colors
from zerosim.report.band_colors import GROUNDS, contrast, variable, visible
from zerosim.report.colors import BANDS


@pytest.mark.parametrize("ground", GROUNDS.values())
@pytest.mark.parametrize("band", BANDS)
def test_every_band_stands_out(band: str, ground: str) -> None:
    """3 to 1 with the ground (WCAG 1.4.11), and a colour that had it already stays what it was."""
    shown = visible(BANDS[band], ground)
    assert contrast(shown, ground) >= 3
    assert (shown == BANDS[band].lower()) is (contrast(BANDS[band], ground) >= band_colors.LEAST)


def test_contrast_is_that_of_the_guidelines() -> None:
    """Black on white is 21 to 1; #767676 is the last grey that passes on white at 4.5, #949494 the last at 3."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") > 4.5 > contrast("#777777", "#ffffff")
    assert contrast("#949494", "#ffffff") > 3 > contrast("#959595", "#ffffff")


def test_a_style_sheet_names_every_band_twice() -> None:
    """Each band, and one that the palette does not have, has a colour by day and one at night."""
    named = re.findall(r"(--band-[a-z-]+): #[0-9a-f]{6};", band_colors.variables())
    assert sorted(named) == sorted(2 * [*map(variable, BANDS), "--band-unknown"])
    assert variable("</style>") == "--band-unknown"
