"""The moving picture of README.md: what it plays is what was recorded, and the file is of that recording."""

from itertools import pairwise

import msgspec
import numpy as np
import PIL
import pytest
from PIL import Image, ImageSequence

import moving_picture
import record
from helpers import by_night
from moving_steps import Hop, Story, stories
from zerosim.bands import Band
from zerosim.records.results import Results, SchemeRecord
from zerosim.stages import Over


def recorded(name: str = moving_picture.RECORDING) -> Results:
    found = record.load(name)
    assert isinstance(found, Results)
    return found


RESULTS = recorded()
RANKS = RESULTS.settings.ranks
TOLD = list(zip(RESULTS.schemes, stories(RESULTS), strict=True))

each_scheme = pytest.mark.parametrize(("scheme", "story"), TOLD, ids=lambda each: each.name.replace(" ", "-"))


def collectives(story: Story) -> list[list[Hop]]:
    """The hops of a story, those of one collective together."""
    found: list[list[Hop]] = []
    for hop in (instant.hop for instant in story.instants if instant.hop):
        if hop.done == 1:
            found.append([])
        found[-1].append(hop)
    return found


# -- the file


@pytest.mark.parametrize("every", [7, *by_night(1)])  # by day a frame in seven, which are of all phases and schemes
def test_the_picture_is_what_the_recording_says(every: int) -> None:
    """Drawn anew, every frame is the one that is committed, up to a few rounded pixels, for as long as it is shown."""
    picture = moving_picture.Picture(RESULTS)
    with Image.open(moving_picture.PICTURE) as shown:
        if PIL.__version__ not in shown.info["comment"].decode():
            pytest.skip(f"{shown.info['comment'].decode()}; {PIL.__version__} may set type differently")
        frames = [(frame.convert("RGB"), frame.info["duration"]) for frame in ImageSequence.Iterator(shown)]
    assert len(frames) == picture.slots, "run `make readme`"
    for slot, (frame, milliseconds) in enumerate(frames):
        assert milliseconds == picture.milliseconds()[slot], "run `make readme`"
        if slot % every:
            continue
        fresh = np.asarray(picture.frame(slot).image.convert("RGB")).astype(int)
        committed = np.asarray(frame).astype(int)
        assert fresh.shape == committed.shape, "run `make readme`"
        assert np.mean(np.abs(fresh - committed) > 16) < 2e-5, f"slot {slot}: run `make readme`"


def test_the_picture_is_small_and_goes_on() -> None:
    """Under 1.5 MB, two pixels for each of 800 points, played for ever in less than half a minute."""
    with Image.open(moving_picture.PICTURE) as shown:
        assert shown.width == 2 * 800
        assert shown.info["loop"] == 0
        assert 5_000 < sum(frame.info["duration"] for frame in ImageSequence.Iterator(shown)) < 30_000
    assert moving_picture.PICTURE.stat().st_size < 1_500_000


# -- what it plays


@each_scheme
def test_it_begins_and_ends_at_rest_and_reaches_the_recorded_peak(scheme: SchemeRecord, story: Story) -> None:
    """No instant holds more than the peak that was measured, and one holds just that."""
    last = scheme.steps[-1]
    assert story.instants[0].held == story.instants[-1].held == last.resident
    assert max(instant.total for instant in story.instants) == story.peak == last.peak.total


@each_scheme
def test_the_hops_are_those_that_were_counted(scheme: SchemeRecord, story: Story) -> None:
    """Of every collective there are as many hops as messages were counted, and of every layer as many as one sends."""
    counted = {moved.collective: moved.messages for moved in scheme.steps[-1].traffic}
    played = [hop for hops in collectives(story) for hop in hops]
    assert {name: sum(hop.collective == name for hop in played) for name in counted} == counted
    assert {len(hops) for hops in collectives(story)} == {RANKS - 1}


@each_scheme
def test_a_collective_leaves_every_rank_with_what_it_is_for(scheme: SchemeRecord, story: Story) -> None:
    """A sum ends with its owner; what is gathered is all there, and a block moves on by one rank at each hop."""
    for hops in collectives(story):
        for one, other in pairwise(hops):
            assert all(one.chunk(rank + 1, RANKS) == other.chunk(rank, RANKS) for rank in range(RANKS - 1))
        for rank in range(RANKS):
            if hops[-1].sums:
                assert hops[-1].chunk(rank, RANKS) == rank
            else:
                assert hops[-1].arrived(rank, RANKS) == set(range(RANKS))


@each_scheme
def test_a_layer_is_whole_only_for_a_while_and_only_where_that_is_sharded(scheme: SchemeRecord, story: Story) -> None:
    """Parameters are gathered where a row shards them, gradients are unreduced where it shards those."""
    seen = {band for instant in story.instants for band, _ in instant.whole}
    assert (Band.GATHERED in seen) == (scheme.row.params is Over.ALL)
    assert (Band.UNREDUCED in seen) == (scheme.row.grads is Over.ALL)
    assert not story.instants[0].whole | story.instants[-1].whole


def test_all_schemes_are_in_lockstep() -> None:
    """In every slot all compute the same, or none does."""
    for together in zip(*(story.instants for _, story in TOLD), strict=True):
        assert len({(instant.computed, instant.phase if instant.computed else "") for instant in together}) == 1


def test_names_decide_nothing() -> None:
    """With other names for the schemes the same is played."""
    renamed = msgspec.json.encode(RESULTS)
    for number, record_ in enumerate(RESULTS.schemes):
        renamed = renamed.replace(f'"{record_.name}"'.encode(), f'"row {number}"'.encode())
    other = stories(msgspec.json.decode(renamed, type=Results))
    assert [story.name for story in other] == [f"row {number}" for number in range(len(TOLD))]
    assert [story.instants for story in other] == [story.instants for _, story in TOLD]


def test_a_step_that_was_not_completed_is_refused() -> None:
    """Where a scheme ran out of memory there is no lockstep to show."""
    with pytest.raises(ValueError, match="data parallel has not"):
        stories(recorded("card"))
