"""How near a limit is: its spare bytes, and the rate at which they are taken."""

from __future__ import annotations

from holdall.machine import Limit
from holdall.tools.watch.guard import ApproachedLimit, LimitTracker, choose_nearest

MIB = 2**20


def make_limit(free_mib: int, total_mib: int = 600, name: str = "group") -> Limit:
    return Limit(name, free_mib * MIB, total_mib * MIB)


def follow(tracker: LimitTracker, free_mib: int, now: float) -> ApproachedLimit:
    """Return a limit of 600 MiB of which `free_mib` are free. It is near when 60 MiB are free."""
    (approached,) = tracker.follow([make_limit(free_mib)], now)
    return approached


def test_a_limit_is_near_at_its_share() -> None:
    tracker = LimitTracker(0.9)
    assert not follow(tracker, 61, 0.0).is_near
    assert follow(tracker, 59, 0.0).is_near


def test_a_limit_is_near_one_second_before_it_reaches_its_share() -> None:
    tracker = LimitTracker(0.9)
    assert not follow(tracker, 400, 0.0).is_near
    assert not follow(tracker, 350, 0.5).is_near  # 290 MiB are spare, and 100 MiB are taken per second.
    assert follow(tracker, 150, 1.5).is_near  # 90 MiB are spare, and 200 MiB are taken per second.


def test_a_rising_rate_counts_at_once_and_a_falling_one_slowly() -> None:
    tracker = LimitTracker(0.9)
    rates = [follow(tracker, free, now).bytes_per_second / MIB for now, free in enumerate((500, 300, 300, 250))]
    assert rates == [0, 200, 100, 75]
    assert follow(tracker, 400, 9.0).bytes_per_second / MIB == 37.5  # Freed memory counts as a rate of 0.


def test_the_rate_of_a_limit_is_measured_while_another_limit_is_nearer() -> None:
    tracker = LimitTracker(0.9)
    machine = Limit("machine", 500 * MIB, 4000 * MIB)
    assert choose_nearest(tracker.follow([machine, make_limit(590)], 0.0)).limit is machine
    near = choose_nearest(tracker.follow([machine, make_limit(190)], 1.0))
    assert (near.limit.name, near.bytes_per_second, near.is_near) == ("group", 400 * MIB, True)


def test_a_close_limit_is_checked_often() -> None:
    tracker = LimitTracker(0.9)
    (far,) = tracker.follow([make_limit(9_000, 10_000)], 0.0)
    assert far.pause_s == 0.5
    assert follow(LimitTracker(0.9), 188, 0.0).pause_s == 0.25  # 128 MiB are spare. A process may take 512 per second.
    assert follow(LimitTracker(0.9), 60, 0.0).pause_s == 0.02


def test_two_checks_at_nearly_the_same_time_keep_the_previous_rate() -> None:
    """A page that is taken between them would be gigabytes per second. It counts in the next rate."""
    tracker = LimitTracker(0.9)
    follow(tracker, 400, 0.0)
    assert follow(tracker, 390, 1.0).bytes_per_second == 10 * MIB
    hurried = follow(tracker, 380, 1.00001)
    assert (hurried.bytes_per_second, hurried.is_near) == (10 * MIB, False)
    assert follow(tracker, 350, 1.5).bytes_per_second == 80 * MIB
