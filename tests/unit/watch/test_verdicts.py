from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from holdall.tools.watch.reading import AttributedPart, GpuMemory, LiveObjects, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import FillingBuffer, WatchVerdict, compute_distance, judge

MIB = 2**20
STEPS = 100  # between two readings


def reading(number: int, parts: list[AttributedPart], **changed: Any) -> MemoryReading:
    words: dict[str, Any] = {
        "time": 1000.0 + number,
        "pss": sum(part.resident for part in parts),
        "peak": 0,
        "parts": tuple(parts),
        "step": number * STEPS,
        "goal": 10**9,
        "steps_per_second": float(STEPS),
        "threads": 4,
        "cores": 4,
        "headroom": {"free memory of this machine": 10**12},
    }
    return MemoryReading(**(words | changed))


def history_of(count: int, parts: Callable[[int], list[AttributedPart]], **changed: Any) -> ReadingHistory:
    history = ReadingHistory()
    for number in range(count):
        history.add(reading(number, parts(number), **changed))
    return history


def base(resident: int = 300 * MIB) -> AttributedPart:
    return AttributedPart("libraries", "torch", resident, resident)


def buffer(fill: float, of: int = 1000 * MIB) -> AttributedPart:
    return AttributedPart("buffers", "replay.observations", int(fill * of), of, fill)


def named(verdicts: list[WatchVerdict], name: str) -> WatchVerdict:
    found = [verdict for verdict in verdicts if verdict.name == name]
    assert len(found) == 1, [verdict.name for verdict in verdicts]
    return found[0]


def names(verdicts: list[WatchVerdict]) -> set[str]:
    return {verdict.name for verdict in verdicts}


def test_a_buffer_that_fills_is_told_with_its_end_and_its_size() -> None:
    history = history_of(40, lambda i: [base(), buffer(i / 100)])
    verdict = named(judge(history), "filling")
    assert verdict.evidence["left"] == pytest.approx(61 * STEPS, rel=0.01)
    assert verdict.evidence["final"] == pytest.approx(1000 * MIB, rel=0.01)
    assert verdict.evidence["final_pss"] == pytest.approx(1300 * MIB, rel=0.01)
    assert verdict.evidence["unit"] == "B a step"
    assert "leak" not in names(judge(history))


def test_a_full_buffer_takes_what_was_allocated_for_it_however_few_pages_were_touched() -> None:
    def some(i: int, resident: int) -> AttributedPart:
        return AttributedPart("buffers", "replay.observations", resident, 10 * MIB, i / 1000)

    for touched in (MIB, 10 * MIB):
        filling = named(judge(history_of(40, lambda i, touched=touched: [base(), some(i, touched)])), "filling")  # type: ignore[misc]
        assert filling.evidence["final"] == pytest.approx(10 * MIB)


def test_a_full_buffer_and_a_rollout_that_begins_anew_do_not_fill() -> None:
    assert "filling" not in names(judge(history_of(40, lambda _: [base(), buffer(1.0)])))
    assert "filling" not in names(judge(history_of(40, lambda i: [base(), buffer(i % 10 / 10)])))


def test_steady_memory_is_a_plateau() -> None:
    verdicts = judge(history_of(60, lambda i: [base(300 * MIB + i % 3 * MIB)]))
    assert names(verdicts) == {"plateau"}


def test_up_and_down_is_a_sawtooth_and_no_leak() -> None:
    verdicts = judge(history_of(60, lambda i: [base(), AttributedPart("torch", "heap", (i % 4) * 100 * MIB, 0)]))
    assert names(verdicts) == {"sawtooth"}


def test_kept_heap_is_told_with_what_a_trim_would_return() -> None:
    kept = AttributedPart("heap_retained", "free", 128 * MIB, 128 * MIB)
    verdict = named(judge(history_of(3, lambda _: [base(), kept])), "retained heap")
    assert verdict.evidence["retained"] == 128 * MIB
    assert "heap_trim" in verdict.remedy


def test_threads_are_told_with_what_their_stacks_take() -> None:
    stacks = AttributedPart("stacks", "threads", MIB, 480 * MIB)
    verdict = named(judge(history_of(3, lambda _: [base(), stacks], threads=60)), "threads")
    assert verdict.evidence["stacks_resident"] == MIB
    assert "1.0 MiB" in verdict.text
    assert "480.0 MiB" in verdict.text


def leaking(history: ReadingHistory, slope: float, noise: float, seed: int = 0, count: int = 200) -> None:
    """Add what live objects take, told four times as often as it is read."""
    rng = random.Random(seed)
    for i in range(count):
        step = i * STEPS // 4
        history.add_live(
            LiveObjects(1000.0 + i / 4, step, None, int(200 * MIB + slope * step + rng.gauss(0, noise)), 600_000)
        )


@pytest.mark.parametrize("slope", [512.0, 2048.0])
def test_a_leak_is_found_while_a_buffer_fills(slope: float) -> None:
    history = history_of(
        200, lambda i: [base(), buffer(i / 400), AttributedPart("torch", "heap", int(slope * i * STEPS), 0)]
    )
    leaking(history, slope, noise=300_000.0, count=800)
    verdict = named(judge(history), "leak")
    assert verdict.evidence["slope"] == pytest.approx(slope, rel=0.15)
    assert 0 < verdict.evidence["low"] <= slope <= verdict.evidence["high"]
    assert "filling" in names(judge(history))


def test_small_objects_that_are_kept_are_counted() -> None:
    history = history_of(200, lambda _: [base()])
    for i in range(800):  # One object for every step, in the noise of objects that come and go.
        step = i * STEPS // 4
        history.add_live(LiveObjects(1000.0 + i / 4, step, None, 200 * MIB, 600_000 + step + i % 7 * 50))
    verdict = named(judge(history), "leak")
    assert verdict.evidence["slope"] == pytest.approx(1.0, rel=0.02)
    assert verdict.evidence["unit"] == "objects a step"
    assert verdict.text.startswith("Python keeps 1.0 more objects a step")


def test_the_returns_of_episodes_are_no_leak() -> None:
    history = history_of(200, lambda _: [base()])
    for i in range(800):  # Three objects for every episode of ten steps.
        step = i * STEPS // 4
        history.add_live(LiveObjects(1000.0 + i / 4, step, None, 200 * MIB, 600_000 + 3 * step // 10))
    assert "leak" not in names(judge(history))


@pytest.mark.parametrize("seed", range(20))
def test_no_leak_is_told_where_there_is_none(seed: int) -> None:
    history = history_of(200, lambda i: [base(), buffer(i / 400)])
    leaking(history, 0.0, noise=2e6, seed=seed, count=800)
    assert "leak" not in names(judge(history))


def test_objects_that_are_made_once_are_no_leak() -> None:
    history = history_of(100, lambda _: [base()])
    for i in range(400):
        history.add_live(LiveObjects(1000.0 + i, i * STEPS, None, 200 * MIB + (64 * MIB if i > 150 else 0), 0))
    assert "leak" not in names(judge(history))


def test_only_one_phase_is_looked_at() -> None:
    history = history_of(10, lambda _: [base()])
    for i in range(400):  # ever more of what is told is told in the phase that takes more
        phase = "train" if i % 10 < i / 60 else "collect"
        history.add_live(
            LiveObjects(1000.0 + i, i * STEPS, phase, 200 * MIB + (90 * MIB if phase == "train" else 0), 0)
        )
    assert "leak" not in names(judge(history))


def test_a_process_that_tells_no_steps_is_judged_by_time() -> None:
    history = history_of(
        100, lambda i: [base(), AttributedPart("python", "C heap, in use and kept", i * MIB, 0)], step=None, goal=None
    )
    verdict = named(judge(history), "leak")
    assert verdict.evidence["unit"] == "B a second"
    assert verdict.evidence["slope"] == pytest.approx(MIB, rel=0.01)


def test_nothing_is_a_leak_before_the_first_step() -> None:
    history = history_of(100, lambda i: [base(), AttributedPart("workers", "1 python", i * 4 * MIB, 0)], step=0)
    for i in range(400):  # imports and models, and then a first step
        history.add_live(LiveObjects(1000.0 + i / 4, 0 if i else None, None, (200 + i) * MIB, 0))
    assert "leak" not in names(judge(history))
    history.add(reading(100, [base()], step=1))
    history.add_live(LiveObjects(1101.0, 1, None, 600 * MIB, 0))
    assert "leak" not in names(judge(history))


def test_imports_are_no_leak() -> None:
    history = history_of(200, lambda _: [base()], step=None, goal=None)
    for i in range(400):
        phase = None if i % 5 == 0 else "import"  # There is no phase between two imports.
        history.add_live(LiveObjects(1000.0 + i / 2, None, phase, (200 + i) * MIB, 10_000 * i))
    assert "leak" not in names(judge(history))
    for i in range(200):  # and then something grows
        history.add_live(LiveObjects(1200.0 + i / 2, None, None, (600 + i) * MIB, 10_000 * i))
    assert named(judge(history), "leak").evidence["from"] >= 1200.0


def test_a_short_time_without_steps_is_not_judged() -> None:
    history = history_of(20, lambda _: [base()], step=None, goal=None)
    for i in range(40):  # 20 s: a data set that is read
        history.add_live(LiveObjects(1000.0 + i / 2, None, None, (200 + 10 * i) * MIB, 0))
    assert "leak" not in names(judge(history))


def test_a_buffer_is_never_foretold_more_than_was_allocated_for_it() -> None:
    def ahead(i: int, *, grows: bool) -> AttributedPart:  # pages are read later than how full it is
        return AttributedPart("buffers", "replay.camera", int(0.02 * i * 1000 * MIB), 1000 * MIB, i / 100, grows)

    fixed = named(judge(history_of(40, lambda i: [base(), ahead(i, grows=False)])), "filling")
    assert fixed.evidence["final"] == pytest.approx(1000 * MIB)
    assert fixed.evidence["final_pss"] == pytest.approx(1300 * MIB)
    growing = named(judge(history_of(40, lambda i: [base(), ahead(i, grows=True)])), "filling")
    assert growing.evidence["final"] == pytest.approx(2000 * MIB, rel=0.01)


def test_a_leak_names_the_command_that_finds_its_line() -> None:
    history = history_of(200, lambda _: [base()])
    leaking(history, 2048.0, noise=3e5, count=800)
    verdict = named(judge(history, ["/usr/bin/python3", "train.py", "--lr", "3e-4"]), "leak")
    assert verdict.evidence["profile"] == (
        "/usr/bin/python3 -m memray run --trace-python-allocators -fo leak.bin train.py --lr 3e-4; "
        "/usr/bin/python3 -m memray flamegraph --leaks -fo leak.html leak.bin"
    )
    assert verdict.evidence["profile"] in verdict.remedy
    assert "profile" not in named(judge(history, ["./train.sh"]), "leak").evidence


def test_the_forecast_of_a_memory_ends_at_its_budget() -> None:
    def memory(i: int) -> list[AttributedPart]:
        return [base(), AttributedPart("buffers", "replay.obs", i * 2 * MIB, i * 2 * MIB, i / 1000, True, 300 * MIB)]

    history = history_of(100, memory)
    filling = named(judge(history), "filling")
    assert filling.evidence["final"] == 300 * MIB
    assert filling.evidence["final_pss"] == 600 * MIB
    assert "300.0 MiB (its budget)" in filling.text
    history.add(reading(100, memory(100), headroom={"control group x": 150 * MIB}))
    assert "running out" not in names(judge(history))
    history.add(reading(101, memory(101), headroom={"control group x": 50 * MIB}))
    assert named(judge(history), "running out").evidence["step"] == pytest.approx(126 * STEPS, rel=0.01)


def test_one_is_written_without_an_s() -> None:
    stacks = AttributedPart("stacks", "threads", MIB, 480 * MIB)
    verdict = named(judge(history_of(3, lambda _: [base(), stacks], threads=60, cores=1)), "threads")
    assert "60 threads for 1 core;" in verdict.text


def test_the_step_at_which_a_limit_is_reached_is_told() -> None:
    history = history_of(40, lambda i: [base(), buffer(i / 100)])
    left = 305 * MIB  # at 10 MiB a reading of 100 steps
    history.add(reading(40, [base(), buffer(0.40)], headroom={"control group x": left}))
    verdict = named(judge(history), "running out")
    assert verdict.severity == "error"
    assert verdict.evidence["step"] == pytest.approx(40 * STEPS + 30.5 * STEPS, rel=0.02)
    assert verdict.evidence["limit"] == "control group x"
    assert verdict.text == "control group x: 305.0 MiB are left, used up at step 7,050, in 30 s"


def test_a_gpu_and_a_disk_run_out_too() -> None:
    gpu = {"requested": 0, "allocated": 0, "fragmented": 0, "other": 100 * MIB, "limit": 1000 * MIB}
    history = ReadingHistory()
    for i in range(40):
        history.add(reading(i, [base()], gpu=GpuMemory(**gpu, reserved=(100 + 10 * i) * MIB)))
    verdict = named(judge(history), "running out")
    assert verdict.evidence["limit"] == "GPU memory"
    assert verdict.evidence["step"] == pytest.approx(80 * STEPS, rel=0.02)
    history = ReadingHistory()
    for i in range(40):
        history.add(reading(i, [base()], spilled=i * MIB, disk_free=100 * MIB))
    verdict = named(judge(history), "running out")
    assert verdict.evidence["limit"] == "disk that memories spill to"
    assert verdict.evidence["distance"] == pytest.approx(100 * STEPS, rel=0.02)


def test_a_limit_beyond_the_end_of_the_training_is_not_told() -> None:
    history = history_of(40, lambda i: [base(), buffer(i / 100)], goal=5000)
    history.add(reading(40, [base(), buffer(0.40)], goal=5000, headroom={"control group x": 305 * MIB}))
    assert "running out" not in names(judge(history))


def test_a_buffer_grows_until_it_is_full_and_a_leak_for_ever() -> None:
    fills = [FillingBuffer("a", 0.5, 0, slope=10.0, left=100.0), FillingBuffer("b", 0.5, 0, slope=5.0, left=10.0)]
    assert compute_distance(100.0, fills, 0.0) == pytest.approx(100 / 15)
    assert compute_distance(150.0 + 300.0, fills, 0.0) == pytest.approx(10 + 30)
    assert compute_distance(150.0 + 900.0 + 1.0, fills, 0.0) == math.inf
    assert compute_distance(150.0 + 900.0 + 100.0 + 40.0, fills, 1.0) == pytest.approx(140.0)
    assert compute_distance(-1.0, fills, 0.0) == 0.0


def test_a_history_is_bounded_and_keeps_its_beginning() -> None:
    history = ReadingHistory(max_readings=100)
    for number in range(5000):
        history.add(reading(number, [base()]))
    assert len(history.readings) <= 100
    assert history.readings[0].step == 0
    assert history.newest.step == 4999 * STEPS
    steps = [one.step or 0 for one in history.readings]
    assert steps == sorted(steps)
