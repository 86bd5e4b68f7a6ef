"""Whether the data came back right: every row of a buffer against the oracle, a list too simple to be wrong.

In:  a buffer, and the steps that it was given, played once more.  Out: how many rows differ, and in what.
Invariant: memory is that of a few hundred rows, whatever the buffer holds. Where a buffer returns another dtype, values
are compared, and the change is noted; where it returns the same, bits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.bench.buffers.ways import Buffer
from holdall.bench.trace import Step
from holdall.testing.oracle import OracleMemory, as_array

_AT_ONCE_BYTES = 32 * 2**20


@dataclass(slots=True)
class Rightness:
    """What was compared."""

    compared: int = 0
    wrong: int = 0
    fields: set[str] = field(default_factory=set)  # in which rows differ
    dtypes: set[str] = field(default_factory=set)  # fields that came back as another dtype

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "compared": self.compared,
            "wrong": self.wrong,
            "fields": sorted(self.fields),
            "dtypes": sorted(self.dtypes),
        }


def compare(buffer: Buffer, steps: Iterator[Step], count: int) -> Rightness:
    """Compare the first `count` transitions, all of them."""
    found = Rightness()
    rows = None
    while found.compared < count:
        few = list(islice(steps, min(rows or 1, count - found.compared)))
        if rows is None:
            rows = max(1, _AT_ONCE_BYTES // (2 * _nbytes(few[0].obs)))
        oracle = OracleMemory(capacity=len(few))
        for step in few:
            oracle.add(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)
        ids = np.arange(len(few))
        _compare(buffer.rows(found.compared + ids), oracle.gather(ids), len(few), found)
        found.compared += len(few)
    return found


def _compare(rows: dict[str, Any], expected: Any, count: int, found: Rightness) -> None:
    wrong = np.zeros(count, np.bool_)
    for name, value in rows.items():
        wanted = expected.terminated | expected.truncated if name == "done" else getattr(expected, name)
        pairs = {f"{name}.{key}": (value[key], wanted[key]) for key in wanted} if isinstance(wanted, dict) else None
        for path, (got, want) in (pairs or {name: (value, wanted)}).items():
            differs = _differing(as_array(got), as_array(want), path, found)
            if differs.any():
                found.fields.add(path)
                wrong |= differs
    found.wrong += int(np.count_nonzero(wrong))


def _differing(got: NDArray[Any], want: NDArray[Any], path: str, found: Rightness) -> NDArray[np.bool_]:
    count = len(want)
    if got.size != want.size:
        return np.ones(count, np.bool_)
    got, want = got.reshape(count, -1), want.reshape(count, -1)
    if got.dtype == want.dtype:
        got, want = (np.ascontiguousarray(rows).view(np.uint8) for rows in (got, want))
        return np.asarray((got != want).any(axis=1))
    found.dtypes.add(f"{path} as {got.dtype}")
    return np.asarray((got != want).any(axis=1))


def _nbytes(observation: Any) -> int:
    if isinstance(observation, dict):
        return sum(_nbytes(part) for part in observation.values())
    return max(int(np.asarray(observation).nbytes), 1)
