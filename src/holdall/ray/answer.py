"""Answers: drawn rows on their way from a shard to a learner, still compressed.

In:  what a shelf found.  Out: one checked record of bytes; and back, ready for the loops that decode.
Invariant: every compressed unit is in an answer once, however many rows need it. An answer costs little beside its
rows, since a batch takes one from every shard: its arrays stand in one part, in the order of the layout, and whatever
is the same in every answer is read once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.checkpoint.plain import dtype_name, dtype_of
from holdall.checkpoint.records import window_of
from holdall.errors import DamageError
from holdall.experience.disk.record import Buffer, pack
from holdall.experience.disk.slice_record import codec_of
from holdall.experience.sealing.codec import Codec, Dictionary
from holdall.experience.sealing.sealed import Coded
from holdall.experience.window import Window
from holdall.ray.block import MOST_BYTES, MOST_ROWS, open_record, read_part, whole
from holdall.ray.layout import Layout
from holdall.ray.shelf import Form, Found, FoundField
from holdall.ray.standing import Standing
from holdall.schema import Array

ANSWER = "answer"
_ALIGNMENT = 8
_MOST_KNOWN_FORMS = 256
_IS_LITTLE = sys.byteorder == "little"
_PADDING = [bytes(-n % _ALIGNMENT) for n in range(_ALIGNMENT)]
_U1, _U4, _I4 = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.int32)
_I8, _F8 = np.dtype(np.int64), np.dtype(np.float64)
_BY_WIDTH: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: _U4}

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

    def part(self, first: int, end: int) -> Answer:
        """Return some of the rows; they refer to the units of all."""
        if (first, end) == (0, len(self.rows)):
            return self
        rows, found = slice(first, end), self.found
        columns = {name: column[rows] for name, column in found.columns.items()}
        fields = tuple(replace(field, form=field.form[rows], cursors=field.cursors[rows]) for field in found.fields)
        return Answer(self.standing, self.rows[rows], self.scaled[rows], Found(columns, fields))


def pack_answer(answer: Answer) -> bytes:
    """Return an answer as a record."""
    arrays = [answer.rows, answer.scaled, *answer.found.columns.values()]
    fields = []
    for field in answer.found.fields:
        arrays += [field.form, field.cursors, field.log]
        told = []
        for form, coded in field.forms:
            data = np.asarray(coded.data)
            arrays += [coded.palette, coded.offsets, data]
            told.append([form.words, len(coded.offsets), coded.palette.size, data.size])
        fields.append({"log": [field.log.itemsize, field.log.size], "forms": told})
    reward = answer.found.columns["reward"].dtype
    head = {"rows": len(answer.rows), "reward": dtype_name(reward), "fields": fields}
    body = b"".join([answer.standing.packed(), *_aligned(arrays)])
    return b"".join(pack(ANSWER, head, {"body": body}, frozenset()))


class AnswerReader:
    """Reads the answers of all shards of a memory."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._leaves = layout.leaves
        self._known: dict[tuple[int, str], tuple[Window, Codec]] = {}

    def read(self, payload: bytes, learn: Learn) -> Answer:
        """Read an answer that was received; DamageError if anything in it does not make sense.

        Where its rows point to is not looked at here: the loops that decode hold every place against its bounds.
        """
        record = open_record(payload, ANSWER)
        head, body = record.head, _Body(read_part(record, payload, "body"))
        try:
            count = whole(head["rows"], MOST_ROWS)
            standing = Standing.of(body.take(_U1, Standing.NBYTES).tobytes())
            rows, scaled = body.take(_I8, count), body.take(_F8, count)
            columns = {
                name: body.take(dtype, count, shape)
                for name, (shape, dtype) in self._layout.with_reward(dtype_of(head["reward"])).items()
                if name != "valid"
            }
            if len(head["fields"]) != len(self._leaves):
                raise DamageError(f"an answer has {len(head['fields'])} sliced fields, not {len(self._leaves)}")
            fields = tuple(self._field(i, words, count, body, learn) for i, words in enumerate(head["fields"]))
            body.require_end()
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"an answer makes no sense ({type(error).__name__}: {error})") from error
        return Answer(standing, rows, scaled, Found(columns, fields))

    def _field(self, i: int, words: Any, count: int, body: _Body, learn: Learn) -> FoundField:
        form, cursors = body.take(_I4, count), body.take(_U4, count)
        width, entries = words["log"]
        log = body.take(_BY_WIDTH[width], whole(entries, MOST_BYTES))
        forms = []
        for text, offsets, palette_bytes, data_bytes in words["forms"]:
            window, codec = self._form(i, text, learn)
            palette = body.take(_U1, whole(palette_bytes, MOST_BYTES))
            begins = body.take(_U4, whole(offsets, MOST_BYTES))
            data = body.take(_U1, whole(data_bytes, MOST_BYTES))
            slices = (len(begins) - 1) * codec.group
            forms.append((Form(window, codec, palette, text), Coded(codec, slices, begins, palette, data)))
        if count and not 0 <= int(form.min()) <= int(form.max()) < len(forms):
            raise DamageError("an answer has rows of no form; nothing of it is used")
        return FoundField(form, cursors, log, tuple(forms))

    def _form(self, i: int, text: str, learn: Learn) -> tuple[Window, Codec]:
        """Return how slices are cut and coded; answers say it in the same words over and over."""
        known = self._known.get((i, text))
        if known is None:
            words = json.loads(text)
            window, named = window_of(words["window"], self._leaves[i]), words["codec"]["dictionary"]
            codec = codec_of(words["codec"], {} if named is None else {named: learn(named)})
            if codec.transform.slice_bytes != window.slice_bytes:
                raise DamageError("an answer has slices that do not fit their window; nothing of it is used")
            if len(self._known) >= _MOST_KNOWN_FORMS:
                self._known.clear()
            known = self._known[i, text] = window, codec
        return known


class _Body:
    """Arrays one after another, each where a machine likes to read it."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0

    def take(self, dtype: np.dtype[Any], count: int, shape: tuple[int, ...] = ()) -> Array:
        """Look at the next array, of so many rows."""
        rows = count
        for length in shape:
            rows *= length
        end = self._place + rows * dtype.itemsize
        if end > len(self._content):
            raise ValueError("it ends within an array")
        array: Array = np.ndarray((count, *shape), dtype.newbyteorder("<"), self._content, self._place)
        self._place = -(-end // _ALIGNMENT) * _ALIGNMENT
        return array if _IS_LITTLE else array.astype(dtype)

    def require_end(self) -> None:
        """Refuse what is longer than its arrays."""
        if self._place != len(self._content):
            raise ValueError("it is longer than its arrays")


def _aligned(arrays: Sequence[Array]) -> list[Buffer]:
    """Return arrays as the bytes that travel, little-endian, each filled up to where the next may begin."""
    buffers: list[Buffer] = []
    for array in arrays:
        little = array if _IS_LITTLE else array.astype(array.dtype.newbyteorder("<"))
        buffers.append(little.data if little.flags.c_contiguous else little.tobytes())
        if little.nbytes % _ALIGNMENT:
            buffers.append(_PADDING[little.nbytes % _ALIGNMENT])
    return buffers
