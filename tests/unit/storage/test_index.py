"""The index follows segments as they open, close, move and leave; tables that were handed out never change."""

from __future__ import annotations

import numpy as np
import pytest

from holdall.native import chosen_kernels
from holdall.schema import Leaf
from holdall.storage.blocks import Codec, Method, Transform, reserve
from holdall.storage.segment import SegmentIndex
from holdall.storage.slices import AnyPart, ClosedPart, OpenPart, Window

FIELDS = [Leaf("a", (40,), np.dtype("u1")), Leaf("b", (50,), np.dtype("u1"))]
KERNELS = chosen_kernels()


def opened(ticks: int = 5) -> list[OpenPart]:
    parts = []
    for leaf in FIELDS:
        window = Window.whole(leaf)
        part = KERNELS.new_part(window, 1, KERNELS.new_block(leaf.nbytes, reserve(10_000)), 10_000)
        for tick in range(ticks):
            row = np.full((1, leaf.nbytes), tick, np.uint8)
            part.append(row, row + 1, np.zeros(1, np.uint32))
        parts.append(part)
    return parts


def closed(parts: list[OpenPart]) -> list[ClosedPart]:
    return [part.closed() for part in parts]


class Followed:
    """An index that is changed step by step, beside the list of what it should know."""

    def __init__(self) -> None:
        self.index = SegmentIndex()
        self.first_ticks = [0]
        self.segments: list[list[AnyPart]] = [list(opened())]
        self.index.rebuild([0], [[part] for part in self.segments[0]])

    def roll(self) -> None:
        old, new = closed(self.segments[-1]), opened()  # type: ignore[arg-type]  # the last is open
        self.first_ticks.append(self.first_ticks[-1] + 5)
        self.segments[-1:] = [list(old), list(new)]
        self.index.open_next(self.first_ticks[-1], old, new)

    def check(self) -> None:
        again = SegmentIndex()
        again.rebuild(self.first_ticks, [[segment[field] for segment in self.segments] for field in range(2)])
        assert self.index.first_ticks.tolist() == again.first_ticks.tolist() == self.first_ticks
        for field in range(2):
            assert self.index.records[field].tolist() == again.records[field].tolist()
            for one, other in zip(self.index.held[field], again.held[field], strict=True):
                assert [id(content) for content in one] == [id(content) for content in other]


def test_what_is_changed_step_by_step_is_what_is_built_anew() -> None:
    """Rolling, dropping, sealing: the same tables as from scratch."""
    followed = Followed()
    for _ in range(6):
        followed.roll()
        followed.check()
    followed.index.prepare_drop(2)()
    del followed.first_ticks[:2], followed.segments[:2]
    followed.check()
    part = followed.segments[1][1]
    assert isinstance(part, ClosedPart)
    sealed = KERNELS.coder.seal(part.block.raw, Codec(Method.LZ4, 0, Transform(50)))
    assert sealed is not None
    part.block.replace_by(sealed)
    followed.index.update(1, 1, part)
    followed.check()
    followed.index.prepare_drop(len(followed.segments) - 1)()
    del followed.first_ticks[:-1], followed.segments[:-1]
    followed.check()


@pytest.mark.parametrize("act", ["roll", "drop", "update"])
def test_tables_that_were_handed_out_never_change(act: str) -> None:
    """Readers look at them without a lock, while the memory goes on."""
    followed = Followed()
    for _ in range(3):
        followed.roll()
    index = followed.index
    tables = (index.first_ticks, *index.records)
    before = [table.tobytes() for table in tables]
    held = [list(content) for content in index.held]
    kept = list(index.held)
    if act == "roll":
        followed.roll()
    elif act == "drop":
        index.prepare_drop(2)()
    else:
        part = followed.segments[0][0]
        part.block.replace_by(KERNELS.coder.seal(part.block.raw, Codec(Method.LZ4, 0, Transform(40))))  # type: ignore[union-attr,arg-type]
        index.update(0, 0, part)
    assert [table.tobytes() for table in tables] == before
    assert kept == held


def test_a_segment_that_is_put_behind_others_is_what_is_built_anew() -> None:
    """As often as it is put there, after some were dropped and others rolled; what grows is not copied each time."""
    followed = Followed()
    shared = 0
    for number in range(40):
        if number == 25:
            followed.roll()
        if number in (7, 20, 33):
            followed.index.prepare_drop(3)()
            del followed.first_ticks[:3], followed.segments[:3]
        put, last = closed(opened()), followed.segments[-1]
        followed.first_ticks.append(followed.first_ticks[-1] + 5)
        followed.segments[-1:] = [list(put), last]
        before = [(table, table[:-1].tobytes()) for table in (followed.index.first_ticks, *followed.index.records)]
        for _ in range(2):  # as after an interrupt
            followed.index.append_segment(len(followed.segments) - 2, followed.first_ticks[-1], put, last)  # type: ignore[arg-type]
            followed.check()
        assert all(table[:-1].tobytes() == content for table, content in before)
        shared += all(map(np.shares_memory, followed.index.records, [table for table, _ in before[1:]]))
    assert shared > 30
