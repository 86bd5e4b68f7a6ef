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

from holdall.batch import Batch
from holdall.cluster.block import MOST_BYTES, MOST_ROWS, open_record, read_part, whole
from holdall.cluster.protocol import ShardCounters, TravelLayout
from holdall.cluster.shelf import FoundField, FoundRows, SliceForm
from holdall.delivery.batches import Delivery, ObservationAssembler
from holdall.errors import DamageError
from holdall.json_state import dtype_name, dtype_of
from holdall.schema import Array
from holdall.storage.blocks import Coded, KeptBlock
from holdall.storage.codec import Codec, Dictionary
from holdall.storage.layout import Window
from holdall.storage.records import Buffer, codec_of, pack, window_of
from holdall.storage.slices import RECORD_FIELDS, ClosedPart, Kernels, Places
from holdall.threads import ThreadPool

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

    standing: ShardCounters
    rows: Ids  # row numbers of the shard
    scaled: NDArray[np.float64]  # what each was drawn in proportion to
    found: FoundRows

    def part(self, first: int, end: int) -> Answer:
        """Return some of the rows; they refer to the units of all."""
        if (first, end) == (0, len(self.rows)):
            return self
        rows, found = slice(first, end), self.found
        columns = {name: column[rows] for name, column in found.columns.items()}
        fields = tuple(replace(field, form=field.form[rows], cursors=field.cursors[rows]) for field in found.fields)
        return Answer(self.standing, self.rows[rows], self.scaled[rows], FoundRows(columns, fields))


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

    def __init__(self, layout: TravelLayout) -> None:
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
            standing = ShardCounters.of(body.take(_U1, ShardCounters.NBYTES).tobytes())
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
        return Answer(standing, rows, scaled, FoundRows(columns, fields))

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
            forms.append((SliceForm(window, codec, palette, text), Coded(codec, slices, begins, palette, data)))
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


class Deliverer:
    """Decodes and assembles."""

    def __init__(self, layout: TravelLayout, kernels: Kernels, device: str | None) -> None:
        self._layout = layout
        self._kernels = kernels
        self._pool = ThreadPool()
        self._assembler = ObservationAssembler(kernels, self._pool, 1 << 62)
        self._delivery = Delivery(device, layout.schema.leaves)

    @property
    def staging_bytes(self) -> int:
        """Bytes kept for the next batches."""
        return self._assembler.staging.nbytes

    def keep(self, batches: int) -> None:
        """See to it that so many batches can be in use without new memory for each."""
        self._assembler.staging.most = max(self._assembler.staging.most, batches + 1)

    def batch(self, answers: Sequence[Answer], where: Sequence[Ids], ids: Ids, weights: NDArray[np.float32]) -> Batch:
        """Make a batch.

        Args:
            where: For every answer, the positions of its rows in the batch.
        """
        schema, hand_over = self._layout.schema, self._delivery.hand_over
        count = len(ids)

        def column(name: str) -> Array:
            if len(answers) == 1:
                return _own(answers[0].found.columns[name])
            first = answers[0].found.columns[name]
            merged = np.empty((count, *first.shape[1:]), first.dtype)
            for answer, rows in zip(answers, where, strict=True):
                merged[rows] = answer.found.columns[name]
            return merged

        pairs = [self._pair(i, answers, where, count, column) for i in range(len(schema.observation.leaves))]
        actions = [column(f"action.{i}") for i in range(len(schema.action.leaves))]
        extras = [column(f"extras.{i}") for i in range(len(schema.extras.leaves))]
        return Batch(
            obs=schema.observation.build([hand_over(pair[0]) for pair in pairs]),
            action=schema.action.build([hand_over(array) for array in actions]),
            reward=hand_over(column("reward")),
            next_obs=schema.observation.build([hand_over(pair[1]) for pair in pairs]),
            terminated=hand_over(column("terminated")),
            truncated=hand_over(column("truncated")),
            extras=schema.extras.build([hand_over(array) for array in extras]),
            ids=ids,
            weights=hand_over(_own(weights)),
        )

    def dismiss(self) -> None:
        """End the threads."""
        self._pool.dismiss()

    def _pair(
        self, leaf: int, answers: Sequence[Answer], where: Sequence[Ids], count: int, column: Any
    ) -> tuple[Array, Array]:
        if leaf not in self._layout.sliced:
            return column(f"obs.{leaf}"), column(f"next.{leaf}")
        field = self._layout.sliced.index(leaf)
        found = [answer.found.fields[field] for answer in answers]
        return self._assembler.assemble(self._places(found, where, count), 0, self._layout.leaves[field])

    def _places(self, found: Sequence[FoundField], where: Sequence[Ids], count: int) -> Places:
        """Describe where the slices lie, to the loops that decode them."""
        segment, cursors = np.zeros(count, np.int32), np.zeros(count, np.uint32)
        parts: list[ClosedPart] = []
        for field, rows in zip(found, where, strict=True):
            segment[rows], cursors[rows] = field.form + np.int32(len(parts)), field.cursors
            log = field.log.reshape(-1, 1)
            for form, coded in field.forms:
                block = KeptBlock(form.window.slice_bytes, coded.count, self._kernels.coder.adopt(coded))
                parts.append(ClosedPart(form.window, log, len(log), block, coded.count, len(rows), coded.count))
        records = np.array([part.record() for part in parts], np.int64).reshape(len(parts), len(RECORD_FIELDS))
        return Places(
            records=[records],
            segment=segment,
            cursors=[cursors],
            lane=np.zeros(count, np.int32),
            lanes=1,
            held=(tuple(part.held for part in parts),),
        )


def _own(array: Array) -> Array:
    """Return an array that may be written to: a batch belongs to the caller."""
    return array if array.flags.writeable and array.flags.owndata else array.copy()
