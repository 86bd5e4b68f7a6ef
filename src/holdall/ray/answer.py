"""Answers: drawn rows on their way from a shard to a learner, still compressed.

In:  what a shelf found.  Out: one checked record of bytes; and back, ready for the loops that decode.
Invariant: every compressed unit is in an answer once, however many rows need it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.checkpoint.plain import dtype_name, dtype_of
from holdall.checkpoint.records import window_of, window_words
from holdall.errors import DamageError
from holdall.experience.disk.record import Buffer, Record, pack
from holdall.experience.disk.slice_record import codec_words
from holdall.experience.part import NEXT_IS_WHOLE
from holdall.experience.sealing.codec import Dictionary
from holdall.ray.block import MOST_ROWS, array_of, as_buffer, coded_of, open_record, read_part, whole
from holdall.ray.layout import Layout
from holdall.ray.shelf import Form, Found, Stretch
from holdall.ray.standing import Standing

ANSWER = "answer"

Ids = NDArray[np.int64]
Learn = Callable[[str], Dictionary]
"""Returns the dictionary of a name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of one shard, and what is known of each."""

    standing: Standing
    rows: Ids  # row numbers of the shard
    scaled: NDArray[np.float64]  # what each was drawn in proportion to
    found: Found


def pack_answer(answer: Answer) -> bytes:
    """Return an answer as a record."""
    parts: dict[str, Buffer] = {
        "standing": answer.standing.packed(),
        "rows": as_buffer(answer.rows),
        "scaled": as_buffer(answer.scaled),
    }
    parts |= {f"column/{name}": as_buffer(column) for name, column in answer.found.columns.items()}
    fields = []
    for i, stretches in enumerate(answer.found.fields):
        told = []
        for j, stretch in enumerate(stretches):
            name = f"{i}.{j}"
            log = stretch.log.astype("<u2") if stretch.coded.count <= 1 << 16 else stretch.log
            parts |= {
                f"where/{name}": as_buffer(stretch.rows.astype(np.uint32)),
                f"cursors/{name}": as_buffer(stretch.cursors),
                f"log/{name}": as_buffer(log),
                f"palette/{name}": as_buffer(stretch.coded.palette),
                f"offsets/{name}": as_buffer(stretch.coded.offsets),
                f"units/{name}": as_buffer(np.asarray(stretch.coded.data)),
            }
            told.append(
                {
                    "window": window_words(stretch.form.window),
                    "codec": codec_words(stretch.form.codec),
                    "count": stretch.coded.count,
                    "log": dtype_name(log.dtype),
                    "rows": len(stretch.rows),
                }
            )
        fields.append(told)
    reward = answer.found.columns["reward"].dtype
    head = {"rows": len(answer.rows), "reward": dtype_name(reward), "fields": fields}
    return b"".join(pack(ANSWER, head, parts, frozenset()))


def unpack_answer(payload: bytes, layout: Layout, learn: Learn) -> Answer:
    """Read an answer that was received; DamageError if anything in it does not make sense."""
    record = open_record(payload, ANSWER)
    head = record.head
    try:
        count = whole(head["rows"], MOST_ROWS)
        like = layout.with_reward(dtype_of(head["reward"]))
        columns = {
            name: array_of(record, payload, f"column/{name}", dtype, (count, *shape))
            for name, (shape, dtype) in like.items()
            if name != "valid"
        }
        if len(head["fields"]) != len(layout.sliced):
            raise DamageError(f"an answer has {len(head['fields'])} sliced fields, not {len(layout.sliced)}")
        fields = tuple(
            tuple(
                _stretch_of(record, payload, f"{i}.{j}", words, layout.leaves[i], learn) for j, words in enumerate(told)
            )
            for i, told in enumerate(head["fields"])
        )
        for stretches in fields:
            covered = np.sort(np.concatenate([stretch.rows for stretch in stretches] or [np.empty(0, np.int64)]))
            if not np.array_equal(covered, np.arange(count)):
                raise DamageError("an answer does not show each of its rows once; nothing of it is used")
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"an answer makes no sense ({type(error).__name__}: {error})") from error
    return Answer(
        Standing.of(read_part(record, payload, "standing")),
        array_of(record, payload, "rows", np.dtype(np.int64), (count,)),
        array_of(record, payload, "scaled", np.dtype(np.float64), (count,)),
        Found(columns, fields),
    )


def _stretch_of(record: Record, payload: bytes, name: str, words: Any, leaf: Any, learn: Learn) -> Stretch:
    rows = whole(words["rows"], MOST_ROWS)
    window = window_of(words["window"], leaf)
    named = words["codec"]["dictionary"]
    coded = coded_of(record, payload, name, words, {} if named is None else {named: learn(named)})
    where = array_of(record, payload, f"where/{name}", np.dtype(np.uint32), (rows,)).astype(np.int64)
    cursors = array_of(record, payload, f"cursors/{name}", np.dtype(np.uint32), (rows,))
    dtype = dtype_of(words["log"])
    raw = read_part(record, payload, f"log/{name}")
    log = np.frombuffer(raw, dtype).astype(np.uint32)
    end = (cursors & ~NEXT_IS_WHOLE).astype(np.int64) + window.count
    end += np.where(cursors & NEXT_IS_WHOLE, window.count, window.shift)
    if end.max(initial=0) > log.size or int(log.max(initial=0)) >= max(coded.count, 1):
        raise DamageError("an answer points outside itself; nothing of it is used")
    if coded.codec.transform.slice_bytes != window.slice_bytes:
        raise DamageError("an answer has slices that do not fit their window; nothing of it is used")
    return Stretch(Form(window, coded.codec, np.asarray(coded.palette)), where, cursors, log, coded)
