"""A recording of another stream, played again and again: as much experience as is wanted, at no cost.

One slice is kept once per block of 16 MiB, and a lap is longer than that, so a second lap takes as much memory as the
first. What a lap holds is in memory before anything is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from streams import Step, Stream


def looped(stream: Stream, lap: int) -> Stream:
    """Record `lap` steps of a stream and play them for ever."""
    recorded = list(itertools.islice(stream.steps, lap))
    return Stream(stream.observation_space, stream.action_space, stream.lanes, _play(recorded))


def _play(recorded: list[Step]) -> Iterator[Step]:
    while True:
        yield from recorded
