"""What the rules about buffers count in a buffer of a run."""

import numpy as np
import pytest

from holdall.tools.lint.finding import Place
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rules.buffers import ObservationsStoredTwice
from holdall.tools.lint.subjects import StoredField, TrainedBuffer

FRAME_BYTES = 84 * 84


def make_buffer(*names: str, stack: int) -> TrainedBuffer:
    """Return a buffer of CleanRL for a million steps."""
    fields = tuple(StoredField(name, (stack, 84, 84), np.dtype(np.uint8)) for name in names)
    nbytes = 1_000_000 * len(fields) * stack * FRAME_BYTES
    place = Place("rb", 0, 0, 0, 0)
    return TrainedBuffer("rb", place, "replay", "cleanrl", 1_000_000, nbytes, fields=fields, frame_stack=stack)


@pytest.mark.parametrize(
    ("names", "stack", "words", "copies"),
    [
        (("observations", "next_observations"), 4, "each frame is stored 8 times", 7),
        (("observations",), 4, "each frame is stored 4 times", 3),  # as with optimize_memory_usage
        (("observations", "next_observations"), 1, "each observation is stored twice", 1),
    ],
)
def test_copies_are_counted_in_every_layout(names: tuple[str, ...], stack: int, words: str, copies: int) -> None:
    machine = Machine(cores=2, ram_bytes=2**34, limit_bytes=2**34, limit_name="RAM")
    (match,) = ObservationsStoredTwice().check_buffer(make_buffer(*names, stack=stack), machine)
    assert match.message.startswith(words)
    assert match.numbers["repeated_bytes"] == 1_000_000 * copies * FRAME_BYTES


def test_an_observation_that_is_stored_once_is_no_finding() -> None:
    machine = Machine(cores=2, ram_bytes=2**34, limit_bytes=2**34, limit_name="RAM")
    assert not list(ObservationsStoredTwice().check_buffer(make_buffer("observations", stack=1), machine))
