"""A recording of another stream, played again and again: any amount of experience in no time.

A slice is stored once in each block of 16 MiB. A lap is longer than a block, so a second lap takes as much memory as
the first one. The recording is in memory before anything is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shared.streams import Step, Stream


def looped(stream: Stream, lap: int) -> Stream:
    """Record `lap` steps of a stream and play them for ever."""
    recorded = list(itertools.islice(stream.steps, lap))
    return Stream(stream.observation_space, stream.action_space, stream.lanes, _play(recorded))


def _play(recorded: list[Step]) -> Iterator[Step]:
    while True:
        yield from recorded
