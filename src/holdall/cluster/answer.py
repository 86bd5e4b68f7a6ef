"""Answers: drawn rows on their way from a shard to a learner, and how a learner merges the answers of several shards.

An answer to a learner on the same machine consists of arrays. Large observations are written directly to shared memory.
An answer to another machine is compressed as a whole, so that bytes that its rows have in common are sent once. It has
a checksum. A damaged answer raises DamageError, and no part of it is used.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.cluster.ids import Ids, make_ids
from holdall.cluster.messages import ShardCounters
from holdall.cluster.shared_block import BatchBlock, BatchBlocks
from holdall.cluster.tuning import ClusterTuning
from holdall.delivery import Delivery
from holdall.delivery.drawn_rows import DrawnRows
from holdall.errors import DamageError
from holdall.sampling import Hindsight, Sampler
from holdall.schema import Array, Schema

_DIGEST_BYTES = 8
_NUMBER_BYTES = 8
_WINDOW_LOG = 25
"""Base-2 logarithm of the bytes in which Zstandard looks for repetitions."""
_LEVEL = 3


class Answer(NamedTuple):
    """Rows that a shard drew for a batch."""

    counters: ShardCounters
    ids: Ids  # Row numbers in the shard, (rows,) or (rows, time).
    scaled: NDArray[np.float64]  # Mass of each row: 1, or its scaled priority. See `Likelihood`.
    rows: DrawnRows  # Without observations if they were written to a shared block.
    discount: NDArray[np.float32] | None = None
    mask: NDArray[np.bool_] | None = None
    goal: Array | None = None  # New goals of the first rows.
    order: Ids | None = None  # For each row, its position in the request. None: rows are in the order of the request.


def pack_answer(answer: Answer) -> bytes:
    """Return an answer as bytes for another machine."""
    buffers: list[pickle.PickleBuffer] = []
    record = pickle.dumps(answer, 5, buffer_callback=buffers.append)
    parts = [memoryview(record), *[buffer.raw() for buffer in buffers]]
    sizes = [part.nbytes for part in parts]
    settings = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj(sum(sizes))
    frame = b"".join([*[stream.compress(part) for part in parts], stream.flush()])
    body = np.array([len(sizes), *sizes], "<i8").tobytes() + frame
    return xxhash.xxh3_64_digest(body) + body


def read_answer(payload: Answer | bytes) -> Answer:
    """Return the answer that a shard sent. Raise DamageError if its bytes changed on the way."""
    if isinstance(payload, Answer):
        return payload
    body = memoryview(payload)[_DIGEST_BYTES:]
    if xxhash.xxh3_64_digest(body) != payload[:_DIGEST_BYTES]:
        raise DamageError("An answer of a shard was damaged on its way. No part of it is used.")
    count = int.from_bytes(body[:_NUMBER_BYTES], "little")
    sizes = np.frombuffer(body, "<i8", count, _NUMBER_BYTES).tolist()
    frame = body[_NUMBER_BYTES * (count + 1) :]
    plain = memoryview(zstandard.ZstdDecompressor(max_window_size=2**_WINDOW_LOG).decompress(frame))
    record, *buffers = [plain[first:end] for first, end in pairwise([0, *accumulate(sizes)])]
    # The processes of a Ray cluster trust each other's pickles. The checksum detects damage, not forgery.
    answer: Answer = pickle.loads(record, buffers=buffers)
    return answer


class BatchMaker:
    """Merges the answers of several shards, and prepares a batch of them. Thread-safe.

    Args:
        delivery: Prepares batches for the learner's device.

    Attributes:
        blocks: Shared memory that shards on this machine write observations to.
    """

    def __init__(self, schema: Schema, delivery: Delivery, tuning: ClusterTuning) -> None:
        self.blocks = BatchBlocks(schema.observation.leaves, tuning.min_shared_bytes)
        self._schema = schema
        self._delivery = delivery

    def prepare(
        self,
        answers: Sequence[Answer],
        positions: Sequence[Ids],
        shards: Sequence[int],
        weights: NDArray[np.float32],
        sampler: Sampler | None = None,
        block: BatchBlock | None = None,
    ) -> Any:
        """Return a batch for `Delivery.receive`.

        Args:
            positions: For every answer, the positions of its rows in the batch.
            shards: For every answer, its shard.
            sampler: The memory's sampler. A `Hindsight` computes rewards for other goals.
            block: Shared memory with the observations that are not in the answers.
        """
        ids = merge_rows([make_ids(shard, each.ids) for shard, each in zip(shards, answers, strict=True)], positions)
        steps = list(positions)
        if ids.ndim == 2:
            length = ids.shape[1]
            steps = [(rows[:, None] * length + np.arange(length)).reshape(-1) for rows in positions]
        rows = self._merge_answers(answers, steps, block)
        draw = Draw(
            ids,
            weights,
            discount=_merge_optional([each.discount for each in answers], positions),
            mask=_merge_optional([each.mask for each in answers], positions),
        )
        if isinstance(sampler, Hindsight):
            self._relabel(rows, answers, positions, sampler)
        return self._delivery.prepare_drawn(draw, rows)

    def _merge_answers(self, answers: Sequence[Answer], steps: Sequence[Ids], block: BatchBlock | None) -> DrawnRows:
        """Return the rows of all answers. `steps` has the position of every row in the result.

        A row of a batch of sequences consists of several rows here, one per step.
        """
        drawn = [answer.rows for answer in answers]
        count = sum(map(len, steps))
        leaves = self._schema.observation.leaves
        if block is None:
            obs = [np.empty((count, *leaf.shape), leaf.dtype) for leaf in leaves]
            next_obs = [np.empty((count, *leaf.shape), leaf.dtype) for leaf in leaves]
        else:
            obs, next_obs = block.arrays()
            self.blocks.release(block)
        for rows, where in zip(drawn, steps, strict=True):
            if not rows.obs and block is not None:  # The shard wrote them to the block.
                continue
            for merged, part in zip((*obs, *next_obs), _require_leaves(rows, len(leaves)), strict=True):
                merged[where] = part
        return DrawnRows(
            obs=obs,
            next_obs=next_obs,
            action=_merge_leaves([rows.action for rows in drawn], steps),
            extras=_merge_leaves([rows.extras for rows in drawn], steps),
            reward=merge_rows([rows.reward for rows in drawn], steps),
            terminated=merge_rows([rows.terminated for rows in drawn], steps),
            truncated=merge_rows([rows.truncated for rows in drawn], steps),
        )

    def _relabel(
        self, rows: DrawnRows, answers: Sequence[Answer], positions: Sequence[Ids], sampler: Hindsight
    ) -> None:
        """Give the first rows of the batch the goals that the answers contain."""
        goals = [answer.goal for answer in answers if answer.goal is not None]
        first = [where[: len(goal)] for where, goal in zip(positions, goals, strict=True)]
        if sum(map(len, first)):
            goal = merge_rows(goals, first)
            rows.relabel(self._schema, sampler.make_goals(np.arange(len(goal))), goal)


def _require_leaves(rows: DrawnRows, count: int) -> list[Array]:
    """Return the observations and next observations of an answer. Raise DamageError if some are missing."""
    if len(rows.obs) != count or len(rows.next_obs) != count:
        raise DamageError("An answer of a shard lacks observations. No part of it is used.")
    return [*rows.obs, *rows.next_obs]


def merge_rows(parts: Sequence[NDArray[Any]], positions: Sequence[Ids]) -> NDArray[Any]:
    """Return the rows of several arrays in one new array, each at its position."""
    merged = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for part, where in zip(parts, positions, strict=True):
        merged[where] = part
    return merged


def _merge_leaves(parts: Sequence[Sequence[Array]], positions: Sequence[Ids]) -> list[Array]:
    return [merge_rows(leaves, positions) for leaves in zip(*parts, strict=True)]


def _merge_optional(parts: Sequence[NDArray[Any] | None], positions: Sequence[Ids]) -> NDArray[Any] | None:
    present = [part for part in parts if part is not None]
    return merge_rows(present, positions) if present else None
