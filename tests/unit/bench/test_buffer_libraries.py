"""The setups of libraries that are compared."""

import pytest
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.tools.bench.buffer_libraries import BUFFER_SETUPS, BufferSetup, find_setups, open_holdall


def test_the_name_of_a_library_selects_all_of_its_setups() -> None:
    assert [setup.name for setup in find_setups(["holdall", "sb3"])] == [
        "holdall",
        "holdall compressed",
        "sb3",
        "sb3 optimize_memory_usage",
    ]
    assert find_setups(["all"]) == list(BUFFER_SETUPS.values())
    assert [setup.name for setup in find_setups(["sb3 optimize_memory_usage"])] == ["sb3 optimize_memory_usage"]


def test_an_unknown_library_is_refused_with_the_known_names() -> None:
    with pytest.raises(ArgumentError, match=r"libraries \('reverb'\) must be among all, sb3, "):
        find_setups(["reverb"])


def test_a_missing_library_is_reported() -> None:
    missing = BufferSetup("no", "no-such-distribution", open_holdall)
    assert missing.explain_absence() == "no-such-distribution is not installed"


def test_a_setup_for_boxes_is_not_measured_with_a_dict() -> None:
    setup = BufferSetup("one", "holdall", open_holdall, is_box_only=True)
    assert setup.explain_absence() is None
    assert setup.explain_absence(spaces.Dict()) == "it takes no Dict observations"
