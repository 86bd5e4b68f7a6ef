"""The copies of a frame that rule M07 counts in a buffer."""

import pytest

from holdall.tools.lint.machine import Machine
from holdall.tools.lint.rule import Match
from holdall.tools.lint.rules.buffers import ObservationsStoredTwice
from holdall.tools.probe.snapshot import FoundArray, FoundBuffer, FoundEnvironment, Snapshot

FRAME_BYTES = 84 * 84
ROWS = 1_000_000


def find_copies(*names: str, stack: int) -> list[Match]:
    """Return the matches for a buffer of CleanRL for a million steps."""
    shape = (ROWS, 1, stack, 84, 84)
    arrays = tuple(FoundArray(name, shape, "uint8", ROWS * stack * FRAME_BYTES) for name in names)
    nbytes = sum(array.nbytes for array in arrays)
    buffer = FoundBuffer("rb", "cleanrl_utils.buffers.ReplayBuffer", "replay", nbytes, ROWS, 1, nbytes, 0, arrays)
    environment = FoundEnvironment((), "", 1, None, None, {"stack_size": stack})
    run = Snapshot("", "add", buffers=(buffer,), environments=(environment,))
    machine = Machine(cores=2, ram_bytes=2**34, limit_bytes=2**34, limit_name="RAM")
    return list(ObservationsStoredTwice().check_run(run, machine))


@pytest.mark.parametrize(
    ("names", "stack", "words", "copies"),
    [
        (("observations", "next_observations"), 4, "each frame is stored 8 times", 7),
        (("observations",), 4, "each frame is stored 4 times", 3),  # as with optimize_memory_usage
        (("observations", "next_observations"), 1, "each observation is stored twice", 1),
    ],
)
def test_copies_are_counted_in_every_layout(names: tuple[str, ...], stack: int, words: str, copies: int) -> None:
    (match,) = find_copies(*names, stack=stack)
    assert match.message.startswith(words)
    assert match.numbers["repeated_bytes"] == ROWS * copies * FRAME_BYTES


def test_an_observation_that_is_stored_once_is_not_a_finding() -> None:
    assert not find_copies("observations", stack=1)
