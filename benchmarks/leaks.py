"""Call every method of every native type a million times, and show what the process holds afterwards.

    python benchmarks/leaks.py [--calls 1e6] [--max-s 60] [--only TEXT] [--json FILE]

A case makes its objects once and then calls one method again and again, with arguments that are accepted and, if the
method checks them, with arguments that are refused. Four figures are compared before and after the calls: references
to the arguments, blocks of Python's allocator, bytes of the C library's allocator, and the USS of the process. Every
method and attribute of every type needs a case, and so does every function.

The exit status is 1 if a case leaks, or if a method has no case.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from results import Figure, describe_run, store

from holdall import _native
from holdall._native import (
    FULL,
    ROLE_FLAGS,
    ROLE_OBSERVATION,
    ROLE_ROW,
    ArrayPool,
    Block,
    Catalog,
    Coded,
    Dictionary,
    ObservationLog,
    PackedRun,
    Part,
    Reader,
    Segment,
    SumTree,
    Writer,
)
from holdall.codec.codec import Codec, Method, Transform

LANES = 2
TICKS = 8
"""Ticks of a segment, and of a rollout."""
SLICE_BYTES = 96
STACK = ("sliced", 4, 1, 16, 1)
LAYOUTS = (("shared",), ("paired",), STACK, None, None, None, None)
COLUMNS = (
    (ROLE_OBSERVATION, np.dtype("f4").num, (3,)),
    (ROLE_OBSERVATION, np.dtype("f4").num, (3,)),
    (ROLE_OBSERVATION, np.dtype("u1").num, (4, 16)),
    (ROLE_ROW, np.dtype("i8").num, ()),
    (ROLE_ROW, np.dtype("f8").num, ()),
    (ROLE_ROW, np.dtype("f4").num, (2,)),
    (ROLE_FLAGS, np.dtype("u1").num, ()),
)
GROUPS = ((3, ("few", "pairs", "stack")), (1, None), (1, ("extra",)))
EXTRA = 5
OUTPUTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 14, 15)

REPETITIONS = 2
"""Times that a case which seems to leak is measured again."""
CALLS_PER_CLOCK = 100
"""Calls between two looks at the clock."""
MAX_LEAKED_BLOCKS = 100
"""Blocks by which Python's allocator may grow: caches of free objects, and a segment more or less."""
MAX_LEAKED_BYTES = 32 * 1024
"""Bytes by which the C library's allocator may grow, likewise."""
MAX_USS_BYTES = 2 * 2**20
"""Bytes by which the process may grow. Fragments of freed memory count, too."""


@dataclass(frozen=True)
class Case:
    """A call that is repeated.

    Attributes:
        names: Methods, attributes and functions that the call uses, such as "Writer.append".
        call: Makes the call.
        arguments: Objects whose references are counted.
    """

    names: tuple[str, ...]
    call: Callable[[], object]
    arguments: tuple[object, ...] = ()


def refused(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function that makes a call and expects that its arguments are refused."""

    def refuse() -> None:
        try:
            call()
        except (TypeError, ValueError, IndexError, OSError):
            return
        raise AssertionError("The call was not refused.")

    return refuse


def attributes(instance: object) -> Case:
    """Return the case that reads every attribute of an object."""
    kind = type(instance)
    names = [name for name, value in vars(kind).items() if type(value).__name__ == "getset_descriptor"]

    def read() -> None:
        for name in names:
            getattr(instance, name)

    return Case(tuple(f"{kind.__name__}.{name}" for name in names), read, (instance,))


# ---------------------------------------------------------------- a writer


def tick(number: int) -> tuple[Any, ...]:
    """Return the arguments of `append`. Stacks shift by one from tick to tick."""
    rng = np.random.default_rng(number)

    def seen(at: int) -> dict[str, Any]:
        few = np.full((LANES, 3), at % 5, np.float32)
        stamps = (at + np.arange(4)) % 200
        stack = np.broadcast_to(stamps[None, :, None], (LANES, 4, 16)).astype(np.uint8, order="C")
        return {"few": few, "pairs": few + rng.standard_normal((LANES, 3)).astype(np.float32), "stack": stack}

    flags = np.zeros(LANES, np.bool_)
    extra = {"extra": np.full((LANES, 2), number, np.float32)}
    action = np.full(LANES, number)
    return seen(number), action, action * 0.5, seen(number + 1), flags, flags, extra, np.array([True, number % 3 > 0])


def make_writer(capacity: int = 6 * TICKS) -> Writer:
    """Return a writer without ticks."""
    return Writer(COLUMNS, GROUPS, LANES, capacity, TICKS, 8192, LAYOUTS)


def filled_writer() -> Writer:
    """Return a writer with five closed segments and an open one."""
    writer = make_writer()
    for number in range(5 * TICKS + 3):
        if writer.append(*tick(number)) == FULL:
            writer.roll()
            writer.append(*tick(number))
    return writer


def steps(count: int) -> tuple[Any, ...]:
    """Return the first argument of `extend`."""
    ticks = [tick(number) for number in range(count)]

    def stacked(leaves: list[Any]) -> tuple[Any, ...]:
        return tuple(np.stack([leaf[key] for leaf in leaves]) for key in leaves[0])

    obs, action, reward, next_obs, terminated, truncated, extras, valid = zip(*ticks, strict=True)
    rows = [np.stack(each) for each in (reward, terminated, truncated, valid)]
    return (
        stacked(list(obs)),
        (np.stack(action),),
        rows[0],
        stacked(list(next_obs)),
        *rows[1:3],
        stacked(list(extras)),
        rows[3],
    )


def writer_cases() -> Iterator[Case]:
    """Yield the cases of Writer, Catalog, Segment and Part."""
    ticks = [tick(number) for number in range(64)]
    writer = filled_writer()
    number = 0

    def append() -> None:
        nonlocal number
        number += 1
        step = ticks[number % 64]
        if writer.append(*step) == FULL:
            writer.roll()
            writer.append(*step)

    yield Case(("Writer.append", "Writer.roll"), append, (ticks[0], writer))
    step = list(ticks[0])
    sheared = {key: np.asfortranarray(leaf) for key, leaf in step[0].items()}
    infos = [{"TimeLimit.truncated": False}, {}]
    append_any: Any = writer.append

    def append_others() -> None:
        given = (sheared, *step[1:8])
        if writer.append(*given) == FULL:
            writer.roll()
        writer.append({}, *step[1:])
        append_any(*step[:7], [True, False])
        append_any(*step[:8], infos)
        writer.append(*step[:6])

    yield Case(("Writer.append",), append_others, (sheared, infos, *step))
    yield Case(("Writer.append",), refused(lambda: writer.append(*step[:3])), (step[0],))

    several = steps(3)
    progress = np.zeros(1, np.int64)

    def extend() -> None:
        progress[0] = 0
        while writer.extend(several, progress) < 3 and progress[0] < 3:
            writer.roll(LAYOUTS)

    yield Case(("Writer.extend", "Writer.roll"), extend, (several, progress, LAYOUTS))
    wrong_steps = (*several[:4], np.zeros(3), *several[5:])
    yield Case(("Writer.extend",), refused(lambda: writer.extend(wrong_steps, progress)), (wrong_steps,))
    wrong_layouts = (("sliced", 4, 1, 17, 1), *LAYOUTS[1:])
    yield Case(("Writer.roll",), refused(lambda: writer.roll(wrong_layouts)), (wrong_layouts,))

    def evict() -> None:
        append()
        writer.evict(writer.next_tick - 2 * TICKS)

    yield Case(("Writer.evict",), evict, (writer,))

    kept = filled_writer()
    ids = np.arange(kept.first_tick * LANES, kept.next_tick * LANES, 3)
    extra = np.zeros((len(ids), 2), np.float32)
    flags = np.zeros(len(ids), np.uint8)

    def rewrite() -> None:
        kept.snapshot()
        kept.rewrite(ids, (EXTRA, EXTRA + 1), (extra, flags))

    yield Case(("Writer.snapshot", "Writer.rewrite"), rewrite, (ids, extra, flags, kept))
    yield Case(("Writer.rewrite",), refused(lambda: kept.rewrite(ids + 1000, (EXTRA,), (extra,))), (ids, extra))

    def replace() -> None:
        segment = kept.catalog.segments[1]
        kept.replace(segment, {0: segment.parts[0]})

    yield Case(("Writer.replace",), replace, (kept,))
    segment = kept.catalog.segments[1]
    yield Case(("Writer.replace",), refused(lambda: kept.replace(segment, {9: segment.parts[0]})), (segment,))
    adopting = make_writer()
    yield Case(("Writer.adopt",), lambda: adopting.adopt(segment), (segment, adopting))
    yield Case(("Writer.adopt",), refused(lambda: kept.adopt(segment)), (segment, kept))

    untyped = (*COLUMNS[:4], (ROLE_ROW, -1, ()), *COLUMNS[5:])

    def set_type() -> None:
        made = Writer(untyped, GROUPS, LANES, 100, TICKS, 8192, LAYOUTS)
        made.set_type(4, np.dtype("f8").num)

    yield Case(("Writer.__new__", "Writer.set_type"), set_type, (untyped, GROUPS, LAYOUTS))
    yield Case(
        ("Writer.__new__",), refused(lambda: Writer(COLUMNS[:5], GROUPS, 2, 100, 8, 10, LAYOUTS[:5])), (COLUMNS,)
    )
    yield Case(("Writer.set_type",), refused(lambda: kept.set_type(3, 1)), (kept,))
    yield attributes(kept)

    yield Case(("Catalog.closed_segments",), lambda: kept.catalog.closed_segments(0), (kept,))
    yield attributes(kept.catalog)
    yield Case(("Segment.__new__",), lambda: Segment(3, TICKS, LANES, segment.parts), (segment,))
    yield Case(("Segment.__new__",), refused(lambda: Segment(3, TICKS + 1, LANES, segment.parts)), (segment,))
    yield attributes(segment)

    for part in segment.parts[:4]:
        yield from part_cases(part)
    shared = segment.parts[0]
    run = make_run(shared)
    packed = Part.pack(run, 0, shared)
    yield Case(("Part.pack",), lambda: Part.pack(run, 0, shared), (run, shared))
    yield Case(("Part.pack",), refused(lambda: Part.pack(run, 1, shared)), (run, shared))
    yield from part_cases(packed)


def part_cases(part: Part) -> Iterator[Case]:
    """Yield the cases of one part."""
    yield attributes(part)
    yield Case(("Part.arrays",), part.arrays, (part,))
    arrays = part.arrays()
    block = part.block
    if block is not None:
        block = Block(block.slice_bytes, part.slice_count, block.read(0, part.slice_count))

    def restore(row_bytes: int) -> Part:
        return Part.restore(part.kind, TICKS, LANES, row_bytes, arrays, part.layout, block)

    yield Case(("Part.restore",), lambda: restore(part.row_bytes), (part, arrays, block))
    yield Case(("Part.restore",), refused(lambda: restore(part.row_bytes + 1)), (part, arrays, block))


# ---------------------------------------------------------------- packed runs and blocks


def make_run(shared: Part) -> PackedRun:
    """Return a packed run of the rows of a shared part of three floats."""
    plan = SimpleNamespace(leaf_bytes=(12,), groups=((12, 1, False),), pieces=(((0, 0, 12, 1, 0, 0, False),),))
    run = PackedRun.pack(plan, [shared.arrays()["rows"]], TICKS + 1, LANES, max_share=10.0)
    assert run is not None
    return run


def packed_cases() -> Iterator[Case]:
    """Yield the cases of PackedRun."""
    shared = filled_writer().catalog.segments[1].parts[0]
    run = make_run(shared)
    rows = shared.arrays()["rows"]
    content = run.to_bytes()
    wanted = np.arange(TICKS)
    plan = SimpleNamespace(leaf_bytes=(12,), groups=((12, 1, False),), pieces=(((0, 0, 12, 1, 0, 0, False),),))
    wrong = SimpleNamespace(leaf_bytes=(12,), groups=((12, 1, False),), pieces=(((1, 0, 12, 1, 0, 0, False),),))
    yield Case(
        ("PackedRun.pack",), lambda: PackedRun.pack(plan, [rows], TICKS + 1, LANES, max_share=10.0), (rows, plan)
    )
    yield Case(
        ("PackedRun.pack",), lambda: PackedRun.pack(plan, [rows], TICKS + 1, LANES, max_share=0.01), (rows, plan)
    )
    yield Case(("PackedRun.pack",), refused(lambda: PackedRun.pack(wrong, [rows], TICKS + 1, LANES)), (rows, wrong))
    yield Case(("PackedRun.to_bytes",), run.to_bytes, (run,))
    yield Case(("PackedRun.from_bytes",), lambda: PackedRun.from_bytes(content), (content,))
    yield Case(("PackedRun.from_bytes",), refused(lambda: PackedRun.from_bytes(content[:-1])), (content,))
    yield Case(("PackedRun.read",), lambda: run.read(0, wanted), (run, wanted))
    yield Case(("PackedRun.read",), refused(lambda: run.read(1, wanted)), (run, wanted))
    yield attributes(run)


def codecs() -> Iterator[Codec]:
    """Yield one codec for each path through the native coder."""
    image: dict[str, Any] = {"planes": 3, "rows": 4, "columns": 8}
    common = Dictionary(bytes(range(64)))
    yield Codec(SLICE_BYTES)
    yield Codec(SLICE_BYTES, Method.LZ4)
    yield Codec(SLICE_BYTES, Method.LZ4, 9, group=2)
    yield Codec(SLICE_BYTES, Method.LZ4, dictionary=common)
    yield Codec(SLICE_BYTES, Method.LZ4, word_bytes=4)
    yield Codec(SLICE_BYTES, Method.LZ4, shuffle_bytes=4)
    yield Codec(SLICE_BYTES, Method.LZ4, transform=Transform.LEFT, subtracts_green=True, **image)
    yield Codec(SLICE_BYTES, Method.LZ4, transform=Transform.PIXELS, **image)
    yield Codec(SLICE_BYTES, Method.LZ4, transform=Transform.COLOURS, **image)
    yield Codec(SLICE_BYTES, Method.LZ4, transform=Transform.COLOUR_COLUMNS, is_interleaved=True, **image)
    yield Codec(SLICE_BYTES, Method.LZ4, group=4, transform=Transform.CHANGES)
    yield Codec(SLICE_BYTES, Method.ZSTANDARD, 1, group=3)
    yield Codec(SLICE_BYTES, Method.ZSTANDARD, 1, dictionary=common)


def block_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of Raw, Block, Coded and Dictionary, and of the functions of codecs."""
    slices = (np.arange(6 * SLICE_BYTES) // 40 % 7).astype(np.uint8).reshape(6, SLICE_BYTES)
    order = np.arange(6, dtype=np.uint32)[::-1].copy()
    raw = Block(SLICE_BYTES, 6, slices)
    written = filled_writer().catalog.segments[0].parts[2].block
    assert written is not None
    yield Case(("Block.__new__",), lambda: Block(SLICE_BYTES, 6, slices), (slices,))
    yield Case(("Block.__new__", "Block.share"), lambda: Block(SLICE_BYTES, 6, slices, True).share(), (slices,))
    yield Case(("Block.__new__",), refused(lambda: Block(SLICE_BYTES, 7, slices)), (slices,))
    yield Case(("Block.read",), lambda: raw.read(1, 3), (raw,))
    yield Case(("Block.read",), refused(lambda: raw.read(1, 30)), (raw,))
    yield Case(("Block.lane_order",), written.lane_order, (written,))
    yield attributes(raw)
    yield attributes(raw.form)

    plain = encode(slices, Codec(SLICE_BYTES, Method.LZ4))

    def change_form() -> None:
        block = Block(SLICE_BYTES, 6, slices)
        block.form = plain

    yield Case(("Block.form",), change_form, (slices, plain))
    yield Case(("Block.form",), refused(lambda: setattr(raw, "form", None)), (raw,))
    yield Case(("encode",), lambda: encode(raw, Codec(SLICE_BYTES, Method.LZ4), order), (raw, order))
    yield Case(("encode",), refused(lambda: encode(slices, Codec(SLICE_BYTES + 1, Method.LZ4))), (slices,))
    for codec in codecs():
        coded = encode(slices, codec)
        yield Case(("encode",), partial(encode, slices, codec), (slices, codec, codec.dictionary))
        yield Case(("decode",), partial(_native.decode, coded, 1, 4), (coded, codec))
    grouped = encode(slices, Codec(SLICE_BYTES, Method.ZSTANDARD, 1, group=3))
    yield Case(("decode",), refused(lambda: _native.decode(grouped, 3, 9)), (grouped,))
    yield Case(("checksums",), lambda: _native.checksums(grouped), (grouped,))

    make: Any = Coded

    def parts_of(coded: Coded) -> tuple[Any, ...]:
        return coded.codec, coded.slice_count, coded.offsets, coded.palette

    ordered = encode(raw, Codec(SLICE_BYTES, Method.LZ4), order)
    colours = encode(slices, Codec(SLICE_BYTES, Method.LZ4, word_bytes=4))
    data = bytes(plain.data)  # type: ignore[arg-type]
    yield Case(("Coded.__new__",), lambda: make(*parts_of(plain), data), (plain, data))
    yield Case(("Coded.__new__",), lambda: make(*parts_of(plain), data, is_shared=True), (plain, data))
    yield Case(("Coded.__new__",), lambda: make(*parts_of(ordered), bytes(ordered.data), ordered.places), (ordered,))  # type: ignore[arg-type]
    yield Case(("Coded.__new__",), refused(lambda: make(*parts_of(plain), data[:-1])), (plain, data))
    for coded in (plain, ordered, colours):
        yield attributes(coded)
        yield Case(("Coded.__reduce__",), coded.__reduce__, (coded,))
    file = (folder / "units").open("w+b")
    file.write(bytes(grouped.data))  # type: ignore[arg-type]
    file.flush()
    filed = grouped.in_file(file.fileno(), 0, file)
    yield Case(("Coded.in_file",), lambda: grouped.in_file(file.fileno(), 0, file), (grouped, file))
    yield Case(("Coded.in_memory",), filed.in_memory, (filed, file))
    damaged = grouped.in_file(file.fileno(), 1, file)
    yield Case(("Coded.in_memory",), refused(damaged.in_memory), (damaged, file))
    yield Case(("decode",), lambda: _native.decode(filed, 0, 6), (filed, file))
    yield Case(("decode",), refused(lambda: _native.decode(damaged, 0, 6)), (damaged, file))
    yield attributes(filed)
    yield from dictionary_cases()


def encode(source: Any, codec: Codec, order: Any = None) -> Coded:
    """Encode slices that the codec can represent."""
    coded = _native.encode(source, codec, order)
    assert coded is not None
    return coded


def dictionary_cases() -> Iterator[Case]:
    """Yield the cases of Dictionary."""
    content = bytes(range(200))
    palette = bytes(1024)
    one = Dictionary(content, palette)
    other = Dictionary(content)
    number: Any = 3
    yield Case(("Dictionary.__new__",), lambda: Dictionary(content, palette), (content, palette))
    yield Case(("Dictionary.__new__",), refused(lambda: Dictionary(content, palette[:5])), (content, palette))
    yield Case(("Dictionary.__hash__",), lambda: hash(one), (one,))
    yield Case(
        ("Dictionary.__eq__", "Dictionary.__ne__"), lambda: (one == other, one != other, one == number), (one, other)
    )
    comparisons = tuple(f"Dictionary.__{name}__" for name in ("lt", "le", "gt", "ge"))
    yield Case(comparisons, refused(lambda: one < other), (one, other))  # type: ignore[operator]
    yield Case(("Dictionary.__reduce__",), one.__reduce__, (one, content))
    yield attributes(one)


# ---------------------------------------------------------------- reading


def reader_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of Reader, for blocks of all forms."""
    file = (folder / "blocks").open("w+b")
    for form in ("raw", "coded", "filed"):
        writer = filled_writer()
        writer.roll()
        writer.replace(writer.catalog.segments[1], {0: packed_part(writer.catalog.segments[1])})
        blocks = {segment.parts[2].block for segment in writer.catalog.segments}
        for block in blocks - {None, writer.catalog.last_segment.parts[2].block}:
            change_form(block, form, file)
        yield from gather_cases(writer)
    reader = Reader()
    reader.dismiss()
    yield Case(("Reader.help", "Reader.dismiss"), lambda: [call() for call in (reader.help, reader.dismiss)], (reader,))
    yield Case(("Reader.__new__",), lambda: Reader(100, 1000))
    yield Case(("Reader.__new__",), refused(lambda: Reader(-1)))
    yield attributes(reader)


def packed_part(segment: Segment) -> Part:
    """Return the first part of a segment without the values that repeat."""
    return Part.pack(make_run(segment.parts[0]), 0, segment.parts[0])


def change_form(block: Any, form: str, file: Any) -> None:
    """Give a block another form."""
    if form == "raw":
        return
    coded = encode(block, Codec(block.slice_bytes, Method.LZ4, group=2))
    if form == "filed":
        start = file.seek(0, 2)
        file.write(bytes(coded.data))  # type: ignore[arg-type]
        file.flush()
        coded = coded.in_file(file.fileno(), start, file)
    block.form = coded


def gather_cases(writer: Writer) -> Iterator[Case]:
    """Yield the calls that read from one writer's catalog."""
    catalog: Catalog = writer.catalog
    ids = np.random.default_rng(0).integers(catalog.first_tick * LANES, catalog.next_tick * LANES, 8)
    reader = Reader(1 << 20)
    into = aligned(1 << 14)
    first_tick = catalog.first_tick
    yield Case(("Reader.gather",), lambda: reader.gather(catalog, ids, OUTPUTS), (catalog, ids, reader))
    yield Case(
        ("Reader.gather",), lambda: reader.gather(catalog, ids, OUTPUTS, first_tick, into), (catalog, ids, into, reader)
    )
    wrong_calls = (
        lambda: reader.gather(catalog, ids + 1000, OUTPUTS),
        lambda: reader.gather(catalog, ids, (99,)),
        lambda: reader.gather(catalog, ids, (0, 0)),
        lambda: reader.gather(catalog, ids, OUTPUTS, first_tick, into[:10]),
    )
    for call in wrong_calls:
        yield Case(("Reader.gather",), refused(call), (catalog, ids, into, reader))
    for with_whole in (False, True):
        yield Case(
            ("Reader.gather_windows",),
            partial(reader.gather_windows, catalog, ids, 2, first_tick, into, with_whole),
            (catalog, ids, into),
        )
    yield Case(
        ("Reader.gather_windows",),
        refused(lambda: reader.gather_windows(catalog, ids + 1000, 2, first_tick, into, False)),
        (catalog, ids, into),
    )


def aligned(nbytes: int) -> Any:
    """Return bytes that begin at a multiple of 64."""
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


# ---------------------------------------------------------------- sampling and rollouts


def other_cases() -> Iterator[Case]:
    """Yield the cases of SumTree, ObservationLog and ArrayPool, and of the other functions."""
    yield from tree_cases()
    yield from log_cases()
    pool = ArrayPool(1 << 16)

    def empty_and_clear() -> None:
        pool.empty((5, 7), np.float32)
        pool.clear()

    yield Case(("ArrayPool.__new__",), lambda: ArrayPool(100))
    yield Case(("ArrayPool.__new__",), refused(lambda: ArrayPool(-1)))
    yield Case(("ArrayPool.empty", "ArrayPool.clear"), empty_and_clear, (pool,))
    yield Case(("ArrayPool.empty",), refused(lambda: pool.empty((5, -7), np.float32)), (pool,))
    yield Case(("ArrayPool.empty",), refused(lambda: pool.empty((5,), object)), (pool,))
    yield attributes(pool)

    bits = np.random.MT19937(0)
    yield Case(("draw_slots",), lambda: _native.draw_slots(bits, 8, 100, 100, 250, LANES), (bits,))
    yield Case(("draw_slots",), refused(lambda: _native.draw_slots(bits, 8, 0, 100, 250, LANES)), (bits,))
    rows = [np.zeros((TICKS, LANES), np.float32) for _ in range(5)]
    last = np.zeros(LANES, np.float32)

    def estimate(last_values: Any) -> None:
        advantages, returns = rows[3:]
        _native.estimate_advantages(rows[0], rows[1], rows[2], last_values, 0.99, 0.95, advantages, returns)

    yield Case(("estimate_advantages",), lambda: estimate(last), (*rows, last))
    yield Case(("estimate_advantages",), refused(lambda: estimate(last[:1])), (*rows, last))
    yield Case(("get_heap_bytes",), _native.get_heap_bytes)


def tree_cases() -> Iterator[Case]:
    """Yield the cases of SumTree."""
    tree = SumTree(64)

    def put() -> None:
        tree.put(slots, values)
        tree.put(slots, 3.0)

    slots = np.arange(10)
    values = np.arange(10.0) + 1
    points = np.linspace(0, 0.9, 9)
    out = np.zeros(20)
    yield Case(("SumTree.__new__",), lambda: SumTree(10, 2.0))
    yield Case(("SumTree.__new__",), refused(lambda: SumTree(-1)))
    yield Case(("SumTree.put",), put, (tree, slots, values))
    yield Case(("SumTree.put",), refused(lambda: tree.put(slots + 60, values)), (tree, slots, values))
    yield Case(("SumTree.update",), lambda: tree.update(slots, values, 2, 50, 1e9), (tree, slots, values))
    yield Case(("SumTree.update",), refused(lambda: tree.update(slots, -values, 0, 50, 1e9)), (tree, slots, values))
    yield Case(("SumTree.find",), lambda: tree.find(points), (tree, points))
    yield Case(("SumTree.find",), refused(lambda: tree.find(points.reshape(3, 3))), (tree, points))
    yield Case(("SumTree.values",), lambda: tree.values(slots), (tree, slots))
    yield Case(("SumTree.values",), refused(lambda: tree.values(slots + 60)), (tree, slots))
    yield Case(("SumTree.copy_to",), lambda: tree.copy_to(out), (tree, out))
    yield Case(("SumTree.raise_highest",), lambda: tree.raise_highest(3.0), (tree,))
    yield Case(("SumTree.__reduce__", "SumTree.__setstate__"), lambda: pickle.loads(pickle.dumps(tree)), (tree,))
    yield attributes(tree)


def log_cases() -> Iterator[Case]:
    """Yield the cases of ObservationLog."""
    log = ObservationLog(STACK, TICKS, LANES, 64)
    stacks = [tick(number)[0]["stack"] for number in range(TICKS)]
    places = np.arange(-1, TICKS)
    out = np.zeros((TICKS + 1, 64), np.uint8)

    def write() -> None:
        log.clear()
        for number in range(TICKS):
            log.write(number, stacks[number])

    write()
    yield Case(("ObservationLog.__new__",), lambda: ObservationLog(STACK, TICKS, LANES, 64), (STACK,))
    yield Case(("ObservationLog.__new__",), refused(lambda: ObservationLog(STACK, 0, LANES, 64)), (STACK,))
    yield Case(("ObservationLog.write", "ObservationLog.clear"), write, (log, stacks[0]))
    yield Case(("ObservationLog.write",), refused(lambda: log.write(0, stacks[0][:1])), (log, stacks[0]))
    yield Case(("ObservationLog.gather",), lambda: log.gather(places, out), (log, places, out))
    yield Case(("ObservationLog.gather",), refused(lambda: log.gather(places + 100, out)), (log, places, out))
    yield attributes(log)


# ---------------------------------------------------------------- measuring


def all_cases(folder: Path) -> Iterator[Case]:
    """Yield all cases."""
    yield from writer_cases()
    yield from packed_cases()
    yield from block_cases(folder)
    yield from reader_cases(folder)
    yield from other_cases()


def public_names() -> set[str]:
    """Return every function of the native module, and every method and attribute of its types."""
    names = set()
    for name, value in vars(_native).items():
        if isinstance(value, type):
            names |= {f"{name}.{member}" for member in vars(value) if member not in ("__doc__", "__module__")}
        elif callable(value):
            names.add(name)
    return names - {"Raw.__new__"}


@dataclass(frozen=True)
class Reading:
    """What the process holds."""

    references: tuple[int, ...]
    blocks: int
    heap_bytes: int
    uss_bytes: int


def take_reading(arguments: tuple[object, ...]) -> Reading:
    """Measure what the process holds, after a collection of garbage."""
    gc.collect()
    references = tuple(sys.getrefcount(argument) for argument in arguments if argument is not None)
    heap = psutil.heap_info()
    uss_bytes = psutil.Process().memory_full_info().uss
    return Reading(references, sys.getallocatedblocks(), heap.heap_used + heap.mmap_used, uss_bytes)


def repeat(case: Case, calls: int, max_s: float) -> int:
    """Make `calls` calls, or as many as take `max_s` seconds of the processor. Return their number."""
    until = time.process_time() + max_s
    done = 0
    while done < calls and time.process_time() < until:
        some = min(CALLS_PER_CLOCK, calls - done)
        for _ in range(some):
            case.call()
        done += some
    return done


def measure(case: Case, calls: int, max_s: float) -> dict[str, Any]:
    """Make the calls of a case, and return what grew.

    Growth is measured again, since a leak grows every time, but a cache that Python fills late grows once.
    """
    repeat(case, min(max(calls // 10, 200), 20_000), max_s / 10)
    figures = measure_growth(case, calls, max_s)
    for _ in range(REPETITIONS):
        if not leaks(figures):
            break
        figures = measure_growth(case, calls, max_s)
    return figures


def measure_growth(case: Case, calls: int, max_s: float) -> dict[str, Any]:
    """Make the calls of a case once, and return what grew."""
    before = take_reading(case.arguments)
    began = time.process_time()
    calls = repeat(case, calls, max_s)
    seconds = time.process_time() - began
    after = take_reading(case.arguments)
    return {
        "names": list(case.names),
        "calls": calls,
        "microseconds": round(1e6 * seconds / calls, 2),
        "references": sum(after.references) - sum(before.references),
        "blocks": after.blocks - before.blocks,
        "heap_bytes": after.heap_bytes - before.heap_bytes,
        "uss_bytes": after.uss_bytes - before.uss_bytes,
    }


def leaks(figures: dict[str, Any]) -> bool:
    """Return whether the figures of a case show a leak."""
    return bool(
        figures["references"] != 0
        or figures["blocks"] > MAX_LEAKED_BLOCKS
        or figures["heap_bytes"] > MAX_LEAKED_BYTES
        or figures["uss_bytes"] > MAX_USS_BYTES
    )


def summarize(cases: list[dict[str, Any]], names_with_case: set[str]) -> dict[str, Any]:
    """Return the figures of all cases together."""
    calls_by_name: Counter[str] = Counter()
    for figures in cases:
        calls_by_name.update(dict.fromkeys(figures["names"], figures["calls"]))
    return {
        "cases": len(cases),
        "calls": sum(figures["calls"] for figures in cases),
        "methods": len(public_names()),
        "fewest_calls_of_a_method": min(calls_by_name[name] for name in names_with_case),
        "leaking": [figures for figures in cases if leaks(figures)],
        "without_case": sorted(public_names() - names_with_case),
        "largest_uss_growth_bytes": max((figures["uss_bytes"] for figures in cases), default=0),
        "largest_block_growth": max((figures["blocks"] for figures in cases), default=0),
    }


def figures_of(case: str, figures: dict[str, Any]) -> list[Figure]:
    """Return the number of calls of a case, and by how much the process grew."""
    return [
        Figure(case, "calls", "", figures["calls"]),
        Figure(case, "references", "", figures["references"], "0"),
        Figure(case, "blocks of Python's allocator", "", figures["blocks"], f"at most {MAX_LEAKED_BLOCKS}"),
        Figure(case, "bytes of the C library's allocator", "B", figures["heap_bytes"], f"at most {MAX_LEAKED_BYTES}"),
        Figure(case, "USS", "B", figures["uss_bytes"], f"at most {MAX_USS_BYTES}"),
    ]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=float, default=1e6, help="calls of each case (%(default)g)")
    parser.add_argument("--max-s", type=float, default=60, help="CPU seconds after which a case ends (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    arguments = parser.parse_args()
    run = describe_run({"calls": int(arguments.calls), "max_s": arguments.max_s})
    results: list[dict[str, Any]] = []
    measured: list[Figure] = []
    names_with_case: set[str] = set()
    cases_by_label: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="holdall-leaks-") as folder:
        for case in all_cases(Path(folder)):
            names_with_case.update(case.names)
            label = ", ".join(case.names)
            cases_by_label[label] += 1
            if arguments.only not in " ".join(case.names):
                continue
            figures = measure(case, int(arguments.calls), arguments.max_s)
            results.append(figures)
            print(json.dumps(figures), flush=True)
            measured += figures_of(f"{label} ({cases_by_label[label]})", figures)
    summary = summarize(results, names_with_case)
    print(json.dumps(summary))
    if arguments.json is not None:
        store(arguments.json, measured, run)
    return int(bool(summary["leaking"] or summary["without_case"]))


if __name__ == "__main__":
    sys.exit(main())
