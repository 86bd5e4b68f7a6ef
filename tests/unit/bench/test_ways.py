import pytest
from gymnasium import spaces

from holdall.bench.buffers.ways import WAYS, Way, ways_of
from holdall.errors import ArgumentError


def test_a_librarys_name_stands_for_all_of_its_ways() -> None:
    assert [way.name for way in ways_of(["holdall", "sb3"])] == [
        "holdall",
        "holdall compressed",
        "sb3",
        "sb3 optimize_memory_usage",
    ]
    assert ways_of(["all"]) == list(WAYS.values())
    assert [way.name for way in ways_of(["sb3 optimize_memory_usage"])] == ["sb3 optimize_memory_usage"]


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ArgumentError, match=r"libraries \('reverb'\) must be among all, sb3, "):
        ways_of(["reverb"])


def test_what_is_missing_is_said() -> None:
    assert Way("no", "no-such-distribution", "none").missing() == "no-such-distribution is not installed"
    one = Way("one", "holdall", "none", is_box_only=True)
    assert one.missing() is None
    assert one.missing(spaces.Dict()) == "it takes no Dict observations"
