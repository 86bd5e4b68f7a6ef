"""The report of a memory: its figures, as text and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import FieldReport, MemoryReport, ReplayMemory
from holdall.memory_registry import MEMORIES
from holdall.store.tuning import Tuning
from holdall.testing import LeafPlan, Mishaps, Stream
from holdall.testing.strategies import box

IMAGE = FieldReport("obs.image", slice_bytes=700, log_bytes=40, row_bytes=0, plain_bytes=8000, finding="a window")
ACTION = FieldReport("action", slice_bytes=0, log_bytes=0, row_bytes=160, plain_bytes=160, finding="flat rows")
TINY = Tuning(max_segment_ticks=16, min_segment_ticks=8)
"""A few ticks fill a segment."""


def make_report(*fields: FieldReport, transitions: int = 20) -> MemoryReport:
    return MemoryReport(transitions=transitions, fields=fields, staging_bytes=64, segments=3)


def make_camera_memory(ticks: int, capacity: int = 1000) -> ReplayMemory:
    stream = Stream(
        spaces.Dict(image=box((4, 36, 36), "u1"), state=box((5,), "f4")),
        box((2,), "f4"),
        2,
        plans=[LeafPlan(axis=0)],
        mishaps=Mishaps(ends=0.0),
        extras={"log_prob": box((), "f4")},
    )
    memory = ReplayMemory(stream.observation_space, stream.action_space, capacity, 2, extras=stream.extras)
    for _ in range(ticks):
        memory.add(**stream.tick().arguments())
    return memory


def test_totals_are_sums_over_fields_and_kinds() -> None:
    """Every total is the sum of the parts that the report shows."""
    report = make_report(IMAGE, ACTION)
    assert IMAGE.total_bytes == 740
    assert report.total_bytes == 900
    assert report.plain_bytes == 8160
    assert report.bytes_per_transition == 45
    assert report.ratio == pytest.approx(8160 / 900)


def test_the_ratio_counts_bytes_on_disk() -> None:
    report = make_report(replace(IMAGE, disk_bytes=1140), ACTION)
    assert report.total_bytes == 900
    assert report.disk_bytes == 1140
    assert report.ratio == pytest.approx(4.0)
    assert report.as_dict()["ratio"] == pytest.approx(4.0)
    assert str(report).endswith("20 transitions, 4.0 times smaller with 1.1 KiB more on disk")


def test_loading_a_checkpoint_does_not_change_the_ratio(tmp_path: Path) -> None:
    """Blocks that are still in the checkpoint's files count like blocks in memory."""
    memory = make_camera_memory(400)
    memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as loaded:
        before = loaded.report()
        assert before.disk_bytes > before.total_bytes
        assert before.ratio == pytest.approx(before.plain_bytes / (before.total_bytes + before.disk_bytes))
        loaded.gather(np.arange(loaded.first_id, loaded.next_id))
        after = loaded.report()
    assert after.ratio == pytest.approx(before.ratio, rel=0.02)


def test_an_empty_memory_has_no_ratio() -> None:
    """The ratio of no bytes to no bytes is not defined."""
    report = make_report(transitions=0)
    assert math.isnan(report.ratio)
    assert math.isnan(report.bytes_per_transition)
    assert report.as_dict()["ratio"] is None
    assert report.as_dict()["bytes_per_transition"] is None


@pytest.mark.parametrize("report", [make_report(IMAGE, ACTION), make_report(transitions=0)], ids=["full", "empty"])
def test_a_report_is_json(report: MemoryReport) -> None:
    """The dictionary has numbers and strings only, and strict JSON writes and reads it."""
    read_back = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert read_back["transitions"] == report.transitions
    assert read_back["total_bytes"] == report.total_bytes
    assert [field["name"] for field in read_back["fields"]] == [field.name for field in report.fields]


def test_the_text_has_a_line_for_each_field_and_one_for_the_total() -> None:
    """A line has the field's bytes, its bytes in a plain buffer, and the finding."""
    *lines, total = str(make_report(IMAGE, ACTION)).splitlines()
    assert lines[0].split() == ["obs.image", "740", "B", "of", "7.8", "KiB", "plain", "a", "window"]
    assert lines[1].startswith("action ")
    assert total.startswith("total ")
    assert "20 transitions, 9.1 times smaller" in total


def test_the_text_of_an_empty_memory_can_be_read() -> None:
    """Printing a report never fails."""
    text = str(make_report(transitions=0))
    assert "0 transitions" in text
    assert "nan" not in text


def test_every_field_of_a_transition_is_accounted_for() -> None:
    """Every field occurs once."""
    names = [field.name for field in make_camera_memory(40).report().fields]
    assert names == ["obs.image", "obs.state", "action", "reward", "extras.log_prob", "flags"]


def test_plain_bytes_count_obs_and_next_obs_in_full() -> None:
    """They are the bytes of a plain buffer with the same transitions."""
    fields = {field.name: field for field in make_camera_memory(40).report().fields}
    assert fields["obs.image"].plain_bytes == 80 * 2 * 4 * 36 * 36
    assert fields["obs.state"].plain_bytes == 80 * 2 * 5 * 4
    assert fields["action"].plain_bytes == 80 * 2 * 4
    assert fields["flags"].plain_bytes == 80 * 2


def test_the_finding_names_the_window_and_how_much_of_it_is_shared() -> None:
    """It has the window's length and axis, and the number of slices that are shared with the step before."""
    finding = make_camera_memory(400).report().fields[0].finding
    assert finding.startswith("window of 4 along axis 0; ")
    assert "shared with the step before" in finding
    shared = float(finding.split("; ")[1].split(" of ")[0])
    assert 2.8 <= shared <= 3.0


def test_a_frame_stack_is_reported_as_about_one_frame() -> None:
    """Of the eight frames in obs and next_obs, one is new."""
    image = make_camera_memory(400).report().fields[0]
    frames = image.slice_bytes / (36 * 36) / 800
    assert 1.0 <= frames < 1.25
    assert image.log_bytes > 0
    assert image.row_bytes == 0


def test_figures_count_only_transitions_that_are_held() -> None:
    """A full memory does not grow in its report, however much is added."""
    memory = make_camera_memory(100, capacity=80)
    before = memory.report()
    assert before.transitions == 80
    assert before.plain_bytes == before.transitions * (2 * (4 * 36 * 36 + 20) + 8 + 4 + 4 + 2)
    longer = make_camera_memory(500, capacity=80).report()
    assert longer.total_bytes < 2 * before.total_bytes
    assert longer.segments <= before.segments + 1


def test_staging_is_reported() -> None:
    """Staging is memory that is kept for the next batches."""
    memory = make_camera_memory(100)
    assert memory.report().staging_bytes == 0
    memory.sample(100)
    batch_bytes = 2 * 100 * 4 * 36 * 36
    assert batch_bytes <= memory.report().staging_bytes < 1.05 * batch_bytes


def test_invalid_entries_are_not_counted_but_their_bytes_are() -> None:
    """`transitions` counts what can be sampled. Flags say which entries are transitions."""
    memory = ReplayMemory(box((3,), "f4"), spaces.Discrete(2), 10, 2)
    stream = Stream(box((3,), "f4"), spaces.Discrete(2), 2)
    memory.add(**stream.tick().arguments(), valid=np.array([True, False]))
    report = memory.report()
    assert report.transitions == 1
    assert report.fields[-1].name == "flags"
    assert report.fields[-1].row_bytes > 0


def test_reports_of_several_memories_add_up_field_by_field() -> None:
    one = make_report(IMAGE, ACTION)
    other = make_report(ACTION, IMAGE, transitions=5)
    both = MemoryReport.added_up([one, other], 7)
    assert (both.transitions, both.segments, both.staging_bytes) == (25, 6, 64 + 64 + 7)
    assert both.total_bytes == one.total_bytes + other.total_bytes
    assert [field.name for field in both.fields] == ["obs.image", "action"]
    assert both.fields[0].slice_bytes == 2 * IMAGE.slice_bytes
    assert both.fields[0].finding == IMAGE.finding
    assert MemoryReport.added_up([]).fields == ()


def test_a_pressure_check_is_called_by_open_memories_after_others_were_closed() -> None:
    memories = [ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), 4000, _tuning=TINY) for _ in range(2)]
    memories[0].close()
    grown: list[int] = []

    def record(nbytes: int) -> bool:
        grown.append(nbytes)
        return False

    MEMORIES.set_pressure_check(record)
    try:
        zeros = np.zeros(1, np.int64)
        for _ in range(100):
            memories[1].add(zeros, zeros, np.zeros(1), zeros, np.zeros(1, np.bool_), np.zeros(1, np.bool_))
        assert grown
    finally:
        MEMORIES.clear_pressure_check(record)
        memories[1].close()
