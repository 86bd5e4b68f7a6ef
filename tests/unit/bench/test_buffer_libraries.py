import pytest
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.bench.buffer_libraries import BUFFER_SETUPS, BufferSetup, find_setups, open_holdall


def test_a_librarys_name_stands_for_all_of_its_ways() -> None:
    assert [way.name for way in find_setups(["holdall", "sb3"])] == [
        "holdall",
        "holdall compressed",
        "sb3",
        "sb3 optimize_memory_usage",
    ]
    assert find_setups(["all"]) == list(BUFFER_SETUPS.values())
    assert [way.name for way in find_setups(["sb3 optimize_memory_usage"])] == ["sb3 optimize_memory_usage"]


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ArgumentError, match=r"libraries \('reverb'\) must be among all, sb3, "):
        find_setups(["reverb"])


def test_what_is_missing_is_said() -> None:
    assert (
        BufferSetup("no", "no-such-distribution", open_holdall).explain_absence()
        == "no-such-distribution is not installed"
    )
    one = BufferSetup("one", "holdall", open_holdall, is_box_only=True)
    assert one.explain_absence() is None
    assert one.explain_absence(spaces.Dict()) == "it takes no Dict observations"
