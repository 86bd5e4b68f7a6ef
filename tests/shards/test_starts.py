"""The start of a shard: when it loads the checkpoint that its memory was loaded from."""

from __future__ import annotations

import pytest

from holdall import CheckpointError
from holdall.cluster.shard import must_load_beside_journal, must_load_in_life


@pytest.mark.parametrize(
    ("life", "is_restarted", "must_load"),
    [
        (0, False, True),
        (0, True, True),  # The process ended before it had begun a life.
        (5, False, True),  # A restarted roster begins with a random life.
        (5, True, False),
    ],
)
def test_a_shard_without_a_journal_does_not_go_back_to_its_checkpoint(
    life: int, is_restarted: bool, must_load: bool
) -> None:
    assert must_load_in_life(life, is_restarted=is_restarted) == must_load


@pytest.mark.parametrize(
    ("checkpoint", "loading", "has_rows", "must_load"),
    [
        ("", "", False, False),
        ("", "", True, False),
        ("run:1", "", False, True),
        ("run:1", "", True, False),  # The journal has the checkpoint already, or takes precedence over it.
        ("run:1", "run:1", False, True),
        ("run:1", "run:1", True, True),  # A part of the checkpoint is missing.
    ],
)
def test_a_shard_with_a_journal_loads_the_part_of_its_checkpoint_that_the_journal_lacks(
    checkpoint: str, loading: str, has_rows: bool, must_load: bool
) -> None:
    assert must_load_beside_journal(checkpoint, loading, "journals", has_rows=has_rows) == must_load


@pytest.mark.parametrize("checkpoint", ["", "run:2"])
@pytest.mark.parametrize("has_rows", [False, True])
def test_a_journal_with_a_part_of_another_checkpoint_is_refused(checkpoint: str, has_rows: bool) -> None:
    with pytest.raises(CheckpointError, match="the load of run:1 was interrupted"):
        must_load_beside_journal(checkpoint, "run:1", "journals", has_rows=has_rows)
