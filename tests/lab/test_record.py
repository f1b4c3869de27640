"""A lab's record, held to the settings that it names."""

from typing import Any

import pytest
from msgspec.structs import replace

from helpers import lab_settings
from zerosim.lab import record, suite
from zerosim.records.results import Results
from zerosim.stages import DP, ZeRO3

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
ASKED: list[dict[str, Any]] = [
    {},
    {"resume_at": 1, "resume_ranks": 3},
    {"uneven": True, "accumulate": 2, "batch": 4},
    {"capacity": 16 * (5 * 7 + 7 + 7 * 3 + 3) - 1},  # a byte less than data parallel keeps
]


def found(asked: dict[str, Any]) -> Results:
    return suite.run(lab_settings(ranks=2, widths=[5, 7, 3], **asked), rows=[DP, ZeRO3])


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_record_is_of_its_settings_or_is_said_not_to_be(asked: dict[str, Any]) -> None:
    """What was found contradicts nothing; under settings that would send other bytes each scheme that ended does."""
    results = found(asked)
    ended = [each.name for each in results.schemes if not each.out_of_memory]
    assert ended == [*["data parallel"] * ("capacity" not in asked), "ZeRO-3"]
    assert list(record.contradictions(results)) == []
    other = replace(results, settings=replace(results.settings, wire="fp16"))
    assert list(record.contradictions(other)) == [
        f"{name}: what is predicted of step 1 is not of these settings" for name in ended
    ]
