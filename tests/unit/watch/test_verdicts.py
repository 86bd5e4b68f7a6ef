"""Verdicts on the readings of made-up runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest

from holdall.tools.watch.reading import AttributedPart, GpuMemory, LiveObjects, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import FillingBuffer, WatchVerdict, compute_distance, judge

MIB = 2**20
STEPS = 100
"""Steps between two readings."""


def make_reading(number: int, parts: list[AttributedPart], **changed: Any) -> MemoryReading:
    values: dict[str, Any] = {
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
    return MemoryReading(**(values | changed))


def make_history(count: int, parts: Callable[[int], list[AttributedPart]], **changed: Any) -> ReadingHistory:
    history = ReadingHistory()
    for number in range(count):
        history.add(make_reading(number, parts(number), **changed))
    return history


def make_libraries(resident: int = 300 * MIB) -> AttributedPart:
    return AttributedPart("libraries", "torch", resident, resident)


def make_buffer(fill: float, of: int = 1000 * MIB) -> AttributedPart:
    return AttributedPart("buffers", "replay.observations", int(fill * of), of, fill)


def find_verdict(verdicts: list[WatchVerdict], name: str) -> WatchVerdict:
    found = [verdict for verdict in verdicts if verdict.name == name]
    assert len(found) == 1, [verdict.name for verdict in verdicts]
    return found[0]


def list_names(verdicts: list[WatchVerdict]) -> set[str]:
    return {verdict.name for verdict in verdicts}


def test_a_filling_buffer_is_extrapolated_to_its_final_size() -> None:
    history = make_history(40, lambda i: [make_libraries(), make_buffer(i / 100)])
    verdict = find_verdict(judge(history), "filling")
    assert verdict.evidence["left"] == pytest.approx(61 * STEPS, rel=0.01)
    assert verdict.evidence["final"] == pytest.approx(1000 * MIB, rel=0.01)
    assert verdict.evidence["final_pss"] == pytest.approx(1300 * MIB, rel=0.01)
    assert verdict.units["slope"] == "B a step"
    assert verdict.units["left"] == "steps"
    assert "leak" not in list_names(judge(history))


@pytest.mark.parametrize("touched", [MIB, 10 * MIB])
def test_the_final_size_of_a_buffer_is_its_allocation(touched: int) -> None:
    def list_parts(i: int) -> list[AttributedPart]:
        return [make_libraries(), AttributedPart("buffers", "replay.observations", touched, 10 * MIB, i / 1000)]

    filling = find_verdict(judge(make_history(40, list_parts)), "filling")
    assert filling.evidence["final"] == pytest.approx(10 * MIB)


def test_a_full_buffer_and_a_rollout_that_is_emptied_are_not_filling() -> None:
    assert "filling" not in list_names(judge(make_history(40, lambda _: [make_libraries(), make_buffer(1.0)])))
    assert "filling" not in list_names(judge(make_history(40, lambda i: [make_libraries(), make_buffer(i % 10 / 10)])))


def test_steady_memory_is_a_plateau() -> None:
    verdicts = judge(make_history(60, lambda i: [make_libraries(300 * MIB + i % 3 * MIB)]))
    assert list_names(verdicts) == {"plateau"}


def test_memory_that_rises_and_falls_is_a_sawtooth() -> None:
    verdicts = judge(
        make_history(60, lambda i: [make_libraries(), AttributedPart("torch", "heap", (i % 4) * 100 * MIB, 0)])
    )
    assert list_names(verdicts) == {"sawtooth"}


def test_retained_heap_is_reported_with_its_bytes() -> None:
    kept = AttributedPart("heap_retained", "free", 128 * MIB, 128 * MIB)
    verdict = find_verdict(judge(make_history(3, lambda _: [make_libraries(), kept])), "retained heap")
    assert verdict.evidence["retained"] == 128 * MIB
    assert "heap_trim" in verdict.remedy


def test_many_threads_are_reported_with_the_bytes_of_their_stacks() -> None:
    stacks = AttributedPart("stacks", "threads", MIB, 480 * MIB)
    verdict = find_verdict(judge(make_history(3, lambda _: [make_libraries(), stacks], threads=60)), "threads")
    assert verdict.evidence["stacks_resident"] == MIB
    assert "1.0 MiB" in verdict.text
    assert "480.0 MiB" in verdict.text


def add_live_objects(history: ReadingHistory, slope: float, noise: float, seed: int = 0, count: int = 200) -> None:
    """Add counts of live objects, four for every reading. Their heap grows by `slope` bytes per step."""
    rng = random.Random(seed)
    for i in range(count):
        step = i * STEPS // 4
        history.add_live(
            LiveObjects(1000.0 + i / 4, step, None, int(200 * MIB + slope * step + rng.gauss(0, noise)), 600_000)
        )


@pytest.mark.parametrize("slope", [512.0, 2048.0])
def test_a_leak_is_found_while_a_buffer_fills(slope: float) -> None:
    history = make_history(
        200,
        lambda i: [make_libraries(), make_buffer(i / 400), AttributedPart("torch", "heap", int(slope * i * STEPS), 0)],
    )
    add_live_objects(history, slope, noise=300_000.0, count=800)
    verdict = find_verdict(judge(history), "leak")
    assert verdict.evidence["slope"] == pytest.approx(slope, rel=0.15)
    assert 0 < verdict.evidence["low"] <= slope <= verdict.evidence["high"]
    assert "filling" in list_names(judge(history))


def test_a_leak_of_small_objects_is_found_by_their_count() -> None:
    history = make_history(200, lambda _: [make_libraries()])
    for i in range(800):  # One object is kept at every step, and other objects are made and deleted.
        step = i * STEPS // 4
        history.add_live(LiveObjects(1000.0 + i / 4, step, None, 200 * MIB, 600_000 + step + i % 7 * 50))
    verdict = find_verdict(judge(history), "leak")
    assert verdict.evidence["slope"] == pytest.approx(1.0, rel=0.02)
    assert verdict.units["slope"] == "objects a step"
    assert verdict.text.startswith("Python keeps 1.0 more objects a step")


def test_recorded_returns_of_episodes_are_not_a_leak() -> None:
    history = make_history(200, lambda _: [make_libraries()])
    for i in range(800):  # Three objects for every episode of ten steps.
        step = i * STEPS // 4
        history.add_live(LiveObjects(1000.0 + i / 4, step, None, 200 * MIB, 600_000 + 3 * step // 10))
    assert "leak" not in list_names(judge(history))


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_a_leak(seed: int) -> None:
    history = make_history(200, lambda i: [make_libraries(), make_buffer(i / 400)])
    add_live_objects(history, 0.0, noise=2e6, seed=seed, count=800)
    assert "leak" not in list_names(judge(history))


def test_objects_that_are_made_once_are_not_a_leak() -> None:
    history = make_history(100, lambda _: [make_libraries()])
    for i in range(400):
        history.add_live(LiveObjects(1000.0 + i, i * STEPS, None, 200 * MIB + (64 * MIB if i > 150 else 0), 0))
    assert "leak" not in list_names(judge(history))


def test_a_larger_phase_that_becomes_more_frequent_is_not_a_leak() -> None:
    history = make_history(10, lambda _: [make_libraries()])
    for i in range(400):  # The phase that takes more memory becomes more frequent.
        phase = "train" if i % 10 < i / 60 else "collect"
        history.add_live(
            LiveObjects(1000.0 + i, i * STEPS, phase, 200 * MIB + (90 * MIB if phase == "train" else 0), 0)
        )
    assert "leak" not in list_names(judge(history))


def test_a_process_without_steps_is_judged_by_time() -> None:
    history = make_history(
        100,
        lambda i: [make_libraries(), AttributedPart("python", "C heap, in use and kept", i * MIB, 0)],
        step=None,
        goal=None,
    )
    verdict = find_verdict(judge(history), "leak")
    assert verdict.units["slope"] == "B a second"
    assert verdict.evidence["slope"] == pytest.approx(MIB, rel=0.01)


def test_nothing_is_a_leak_before_the_first_step() -> None:
    history = make_history(
        100, lambda i: [make_libraries(), AttributedPart("workers", "1 python", i * 4 * MIB, 0)], step=0
    )
    for i in range(400):  # Before the first step, modules are imported and models are made.
        history.add_live(LiveObjects(1000.0 + i / 4, 0 if i else None, None, (200 + i) * MIB, 0))
    assert "leak" not in list_names(judge(history))
    history.add(make_reading(100, [make_libraries()], step=1))
    history.add_live(LiveObjects(1101.0, 1, None, 600 * MIB, 0))
    assert "leak" not in list_names(judge(history))


def test_imports_are_not_a_leak() -> None:
    history = make_history(200, lambda _: [make_libraries()], step=None, goal=None)
    for i in range(400):
        phase = None if i % 5 == 0 else "import"  # There is no phase between two imports.
        history.add_live(LiveObjects(1000.0 + i / 2, None, phase, (200 + i) * MIB, 10_000 * i))
    assert "leak" not in list_names(judge(history))
    for i in range(200):  # After the imports, memory grows.
        history.add_live(LiveObjects(1200.0 + i / 2, None, None, (600 + i) * MIB, 10_000 * i))
    assert find_verdict(judge(history), "leak").evidence["from"] >= 1200.0


def test_a_short_time_without_steps_is_not_judged() -> None:
    history = make_history(20, lambda _: [make_libraries()], step=None, goal=None)
    for i in range(40):  # For 20 s, a data set is read.
        history.add_live(LiveObjects(1000.0 + i / 2, None, None, (200 + 10 * i) * MIB, 0))
    assert "leak" not in list_names(judge(history))


def test_a_buffer_of_fixed_size_is_not_predicted_to_exceed_its_allocation() -> None:
    def ahead(i: int, *, grows: bool) -> AttributedPart:  # The pages are counted later than the fill.
        return AttributedPart("buffers", "replay.camera", int(0.02 * i * 1000 * MIB), 1000 * MIB, i / 100, grows)

    fixed = find_verdict(judge(make_history(40, lambda i: [make_libraries(), ahead(i, grows=False)])), "filling")
    assert fixed.evidence["final"] == pytest.approx(1000 * MIB)
    assert fixed.evidence["final_pss"] == pytest.approx(1300 * MIB)
    growing = find_verdict(judge(make_history(40, lambda i: [make_libraries(), ahead(i, grows=True)])), "filling")
    assert growing.evidence["final"] == pytest.approx(2000 * MIB, rel=0.01)


def test_a_leak_names_the_command_that_finds_its_line() -> None:
    history = make_history(200, lambda _: [make_libraries()])
    add_live_objects(history, 2048.0, noise=3e5, count=800)
    verdict = find_verdict(judge(history, ["/usr/bin/python3", "train.py", "--lr", "3e-4"]), "leak")
    assert verdict.evidence["profile"] == (
        "/usr/bin/python3 -m memray run --trace-python-allocators -fo leak.bin train.py --lr 3e-4; "
        "/usr/bin/python3 -m memray flamegraph --leaks -fo leak.html leak.bin"
    )
    assert verdict.evidence["profile"] in verdict.remedy
    assert "profile" not in find_verdict(judge(history, ["./train.sh"]), "leak").evidence


def test_a_memory_is_not_predicted_to_exceed_its_budget() -> None:
    def memory(i: int) -> list[AttributedPart]:
        return [
            make_libraries(),
            AttributedPart("buffers", "replay.obs", i * 2 * MIB, i * 2 * MIB, i / 1000, True, 300 * MIB),
        ]

    history = make_history(100, memory)
    filling = find_verdict(judge(history), "filling")
    assert filling.evidence["final"] == 300 * MIB
    assert filling.evidence["final_pss"] == 600 * MIB
    assert "300.0 MiB (its budget)" in filling.text
    history.add(make_reading(100, memory(100), headroom={"control group x": 150 * MIB}))
    assert "running out" not in list_names(judge(history))
    history.add(make_reading(101, memory(101), headroom={"control group x": 50 * MIB}))
    assert find_verdict(judge(history), "running out").evidence["step"] == pytest.approx(126 * STEPS, rel=0.01)


def test_one_core_is_written_in_the_singular() -> None:
    stacks = AttributedPart("stacks", "threads", MIB, 480 * MIB)
    verdict = find_verdict(judge(make_history(3, lambda _: [make_libraries(), stacks], threads=60, cores=1)), "threads")
    assert "60 threads for 1 core;" in verdict.text


def test_the_step_at_which_a_limit_is_reached_is_predicted() -> None:
    history = make_history(40, lambda i: [make_libraries(), make_buffer(i / 100)])
    left = 305 * MIB  # The buffer grows by 10 MiB per reading, which is 100 steps.
    history.add(make_reading(40, [make_libraries(), make_buffer(0.40)], headroom={"control group x": left}))
    verdict = find_verdict(judge(history), "running out")
    assert verdict.severity == "error"
    assert verdict.evidence["step"] == pytest.approx(40 * STEPS + 30.5 * STEPS, rel=0.02)
    assert verdict.evidence["limit"] == "control group x"
    assert verdict.text == "control group x: 305.0 MiB are left, used up at step 7,050, in 30 s"


def test_the_limits_of_a_gpu_and_a_disk_are_predicted() -> None:
    gpu = {"requested": 0, "allocated": 0, "fragmented": 0, "other": 100 * MIB, "limit": 1000 * MIB}
    history = ReadingHistory()
    for i in range(40):
        history.add(make_reading(i, [make_libraries()], gpu=GpuMemory(**gpu, reserved=(100 + 10 * i) * MIB)))
    verdict = find_verdict(judge(history), "running out")
    assert verdict.evidence["limit"] == "GPU memory"
    assert verdict.evidence["step"] == pytest.approx(80 * STEPS, rel=0.02)
    history = ReadingHistory()
    for i in range(40):
        history.add(make_reading(i, [make_libraries()], spilled=i * MIB, disk_free=100 * MIB))
    verdict = find_verdict(judge(history), "running out")
    assert verdict.evidence["limit"] == "disk that memories spill to"
    assert verdict.evidence["distance"] == pytest.approx(100 * STEPS, rel=0.02)


def test_a_limit_after_the_end_of_the_training_is_not_reported() -> None:
    history = make_history(40, lambda i: [make_libraries(), make_buffer(i / 100)], goal=5000)
    history.add(
        make_reading(40, [make_libraries(), make_buffer(0.40)], goal=5000, headroom={"control group x": 305 * MIB})
    )
    assert "running out" not in list_names(judge(history))


def test_buffers_grow_until_they_are_full_and_leaks_without_end() -> None:
    fills = [FillingBuffer("a", 0.5, 0, slope=10.0, left=100.0), FillingBuffer("b", 0.5, 0, slope=5.0, left=10.0)]
    assert compute_distance(100.0, fills, 0.0) == pytest.approx(100 / 15)
    assert compute_distance(150.0 + 300.0, fills, 0.0) == pytest.approx(10 + 30)
    assert compute_distance(150.0 + 900.0 + 1.0, fills, 0.0) == math.inf
    assert compute_distance(150.0 + 900.0 + 100.0 + 40.0, fills, 1.0) == pytest.approx(140.0)
    assert compute_distance(-1.0, fills, 0.0) == 0.0


def test_a_history_is_thinned_and_keeps_its_first_reading() -> None:
    history = ReadingHistory(max_readings=100)
    for number in range(5000):
        history.add(make_reading(number, [make_libraries()]))
    assert len(history.readings) <= 100
    assert history.readings[0].step == 0
    assert history.newest.step == 4999 * STEPS
    steps = [one.step or 0 for one in history.readings]
    assert steps == sorted(steps)
