"""Rooms read no worse than they did: vague names, riddles, comments, errors and the length of pages.

The limits may only get stricter. A word that is vague or points elsewhere goes into the lists of `tests/words.py`.
"""

from functools import cache
from typing import NamedTuple

import pytest

from tests.words import ROOT, RoomWords, is_vague, measure_rooms, page_words

FOLDERS = ("fpipe", "tests", "property_tests", "examples", "benchmarks")


class Limits(NamedTuple):
    """The most vague names and riddles, in percent, and the fewest comments for each thousand lines."""

    vague: float
    riddles: float
    comments: float


LIMITS = {
    "fpipe": Limits(0.5, 0.1, 31),
    "fpipe/*.py": Limits(1.4, 0, 25),
    "fpipe/callbacks": Limits(0, 0, 10),
    "fpipe/cli": Limits(0.9, 0, 21),
    "fpipe/derived": Limits(0, 0, 30),
    "fpipe/finding": Limits(1, 0, 29),
    "fpipe/graphs": Limits(0.2, 0, 36),
    "fpipe/integrations": Limits(0, 0, 10),
    "fpipe/interop": Limits(0, 0, 27),
    "fpipe/meaning": Limits(0.2, 0, 27),
    "fpipe/measuring": Limits(0.7, 0, 27),
    "fpipe/models": Limits(0.4, 0, 32),
    "fpipe/oracle": Limits(0.3, 0, 26),
    "fpipe/pictures": Limits(0.6, 0, 30),
    "fpipe/planning": Limits(1, 0, 26),
    "fpipe/recording": Limits(0.5, 0, 25),
    "fpipe/runtimes": Limits(0.4, 0, 41),
    "fpipe/schedules": Limits(0.5, 0.8, 29),
    "fpipe/testing": Limits(0, 0, 26),
    "fpipe/timing": Limits(0.4, 0, 35),
    "fpipe/torch_private": Limits(0.8, 0, 26),
    "fpipe/transforms": Limits(0.6, 0, 25),
    "fpipe/verification": Limits(0.5, 0, 29),
    "tests": Limits(0.4, 0.5, 3),
    "tests/*.py": Limits(0.4, 0.5, 3),
    "tests/fake_accelerator": Limits(0, 0, 4),
    "property_tests": Limits(0.6, 0, 2),
    "property_tests/*.py": Limits(0.6, 0, 2),
    "examples": Limits(0.3, 1.5, 2),
    "examples/*.py": Limits(0.3, 1.5, 2),
    "benchmarks": Limits(0.1, 0, 2),
    "benchmarks/*.py": Limits(0.1, 0, 2),
}

measured_rooms = cache(measure_rooms)


@pytest.mark.parametrize("room", LIMITS)
def test_a_room_reads_no_worse_than_before(room: str):
    words, limits = room_words(room), LIMITS[room]
    assert words.vague <= limits.vague
    assert words.riddles <= limits.riddles
    assert words.comments_per_thousand >= limits.comments


def room_words(room: str) -> RoomWords:
    return measured_rooms(room.partition("/")[0])[room]


def test_every_room_has_limits():
    assert sorted(LIMITS) == sorted(room for folder in FOLDERS for room in measured_rooms(folder))


def test_errors_are_short():
    """Half of the messages have at most 10 words, nine of ten at most 18, and all at most 30."""
    package = room_words("fpipe")
    for share, limit in ((0.5, 10), (0.9, 18), (1, 30)):
        assert package.errors_at(share) <= limit


def test_pages_are_short():
    """README and pages have at most 28,000 words outside of code blocks."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(map(page_words, pages)) <= 28_000


@pytest.mark.parametrize("name", ["found", "_made_one", "each", "whatLeft", "item"])
def test_names_that_say_nothing_are_vague(name: str):
    assert is_vague(name)


@pytest.mark.parametrize("name", ["last_reader", "made_on_meta", "grads_by_stage", "x", "FirstStep"])
def test_names_with_a_noun_are_not(name: str):
    assert not is_vague(name)
