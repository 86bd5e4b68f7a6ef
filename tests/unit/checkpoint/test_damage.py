"""Reading damaged checkpoints: which errors are losses, and how many transitions the log says are lost."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import CheckpointError, DamageError, FencedError, ReplayMemory
from holdall.checkpoint import open_reader
from holdall.checkpoint.manifest import Ref
from holdall.checkpoint.reader import Loss, try_read
from holdall.errors import BlobMissingError, NewerFormatError
from holdall.store.tuning import Tuning

TICKS = 120
SPACE = spaces.Box(0, 255, (5, 40, 40), np.uint8)
"""Large enough to be stored in blocks."""


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (DamageError("a record is damaged"), True),
        (CheckpointError("a file is missing"), True),
        (BlobMissingError(errno.ENOENT, "a file was removed"), True),
        (CheckpointError(errno.EACCES, "no permission"), False),
        (CheckpointError(errno.EMFILE, "too many open files"), False),
        (NewerFormatError("a newer holdall wrote it"), False),
        (FencedError("another writer has the lock"), False),
        (ValueError("a mistake in the program"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_damaged_and_missing_data_is_lost(error: Exception, is_loss: bool) -> None:
    """All other errors are raised, because the data could be read in another way."""

    def read() -> None:
        raise error

    if is_loss:
        loss = try_read(read)
        assert isinstance(loss, Loss)
        assert loss.error is error
    else:
        with pytest.raises(type(error)):
            try_read(read)


def test_data_that_can_be_read_is_returned() -> None:
    assert try_read(lambda: 5) == 5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint in which every other entry was added with `valid=False`."""
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (TICKS + 1, *SPACE.shape), np.uint8)
    tuning = Tuning(block_bytes=200_000, max_segment_ticks=40)
    with ReplayMemory(SPACE, spaces.Discrete(2), TICKS, budget=None, _tuning=tuning) as memory:
        for tick in range(TICKS):
            memory.add(frames[tick], 0, 1.0, frames[tick + 1], False, False, valid=np.array([tick % 2 == 0]))
        memory.save(tmp_path).result()
    assert open_reader(tmp_path).manifest(1).transitions == TICKS // 2
    return tmp_path


def flip_byte(run: Path, ref: Ref, position: int) -> None:
    """Change a byte of a record."""
    path = run / "segments" / ref.file
    raw = bytearray(path.read_bytes())
    raw[ref.start + position] ^= 1
    path.write_bytes(raw)


def count_lost(run: Path) -> int:
    """Load the readable part of a checkpoint. Return how many transitions it lacks."""
    with ReplayMemory.load(run, recover=True) as memory:
        return TICKS // 2 - len(memory)


def test_entries_that_are_not_transitions_do_not_count_as_lost(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    block = open_reader(run).manifest(1).blocks[0]
    # A frame from the middle of the block is the observation of a tick and the next observation of the tick before. One
    # of the two is not a transition.
    flip_byte(run, block.ref, (block.index_bytes + block.ref.nbytes) // 2)
    lost = count_lost(run)
    assert lost > 0
    assert f": {lost} transitions of ticks " in caplog.text


def test_the_log_says_that_it_does_not_know_how_many_entries_of_an_unreadable_segment_were_transitions(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = open_reader(run).manifest(1).segments[0]
    flip_byte(run, segment.ref, 0)
    assert count_lost(run) == segment.ticks // 2
    assert f": at most {segment.ticks} transitions of ticks 0 to {segment.ticks - 1} are lost" in caplog.text
