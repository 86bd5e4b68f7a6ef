"""Delivery: answers of several shards become one batch.

In:  answers, and which of their rows goes where.  Out: a batch in arrays or tensors.
Invariant: every observation is decoded straight to where the batch has it, by the loops that local memories use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.experience.crew import Crew
from holdall.experience.delivery.assemble import Delivery, ObservationAssembler
from holdall.experience.part import RECORD_FIELDS, ClosedPart, Kernels, Places
from holdall.experience.slices import KeptBlock
from holdall.ray.answer import Answer
from holdall.ray.layout import Layout
from holdall.ray.shelf import FoundField
from holdall.schema import Array

Ids = NDArray[np.int64]


class Deliverer:
    """Decodes and assembles."""

    def __init__(self, layout: Layout, kernels: Kernels, device: str | None) -> None:
        self._layout = layout
        self._kernels = kernels
        self._crew = Crew()
        self._assembler = ObservationAssembler(kernels, self._crew, 1 << 62)
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
        self._crew.dismiss()

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
