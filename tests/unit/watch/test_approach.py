from __future__ import annotations

import pytest

from holdall.machine import Limit
from holdall.tools.watch.guard import LimitTracker, choose_nearest

MIB = 2**20


def limit(left: int, total: int = 600, name: str = "group") -> Limit:
    return Limit(name, left * MIB, total * MIB)


def test_a_limit_is_near_from_its_share_on_and_a_second_before() -> None:
    still = LimitTracker(0.9)
    assert not choose_nearest(still.follow([limit(61)], 0.0)).is_near
    assert choose_nearest(still.follow([limit(59)], 0.0)).is_near
    coming = LimitTracker(0.9)
    assert not choose_nearest(coming.follow([limit(400)], 0.0)).is_near
    assert not choose_nearest(coming.follow([limit(350)], 0.5)).is_near  # 100 MiB a second, and 290 to go
    assert choose_nearest(coming.follow([limit(150)], 1.5)).is_near  # 200 MiB a second, and 90 to go


def test_the_first_rate_that_is_measured_counts_whole_and_a_lower_one_by_and_by() -> None:
    approach = LimitTracker(0.9)
    rates = [
        choose_nearest(approach.follow([limit(left)], now)).bytes_per_second / MIB
        for now, left in enumerate((500, 300, 300, 250))
    ]
    assert rates == [0, 200, 100, 75]
    assert choose_nearest(approach.follow([limit(400)], 9.0)).bytes_per_second / MIB == pytest.approx(
        37.5
    )  # memory that comes free is no rate


def test_a_limit_that_was_not_the_nearest_before_is_known_all_the_same() -> None:
    approach = LimitTracker(0.9)
    machine = Limit("machine", 500 * MIB, 4000 * MIB)
    assert choose_nearest(approach.follow([machine, limit(590)], 0.0)).limit is machine
    near = choose_nearest(approach.follow([machine, limit(190)], 1.0))
    assert (near.limit.name, near.bytes_per_second, near.is_near) == ("group", 400 * MIB, True)


def test_what_comes_fast_or_is_close_is_looked_at_often() -> None:
    approach = LimitTracker(0.9)
    assert choose_nearest(approach.follow([limit(9_000, 10_000)], 0.0)).pause_s == 0.5
    assert (
        choose_nearest(approach.follow([limit(188)], 0.0)).pause_s == 0.25
    )  # 128 MiB to go, which 512 a second would take
    assert choose_nearest(approach.follow([limit(60)], 0.5)).pause_s == 0.02


def test_two_looks_at_nearly_the_same_moment_give_no_rate_of_their_own() -> None:
    """A page that is taken between them would be gigabytes a second. It counts in the next rate."""
    approach = LimitTracker(0.9)
    approach.follow([limit(400)], 0.0)
    assert choose_nearest(approach.follow([limit(390)], 1.0)).bytes_per_second == 10 * MIB
    hurried = choose_nearest(approach.follow([limit(380)], 1.00001))
    assert (hurried.bytes_per_second, hurried.is_near) == (10 * MIB, False)
    assert choose_nearest(approach.follow([limit(350)], 1.5)).bytes_per_second == 80 * MIB
