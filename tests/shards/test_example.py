"""The example with actors and shards, with few updates, in the cluster of the tests.

tests/integration/test_examples.py runs it with a cluster of its own. chaos/test_examples_after_kills.py kills it.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

APE_X = Path(__file__).parents[2] / "examples" / "ape_x.py"


@pytest.mark.nightly  # In make test, other tests cover actors and shards.
@pytest.mark.timeout(900)  # On a busy machine, actors start slowly.
def test_actors_and_shards_train_an_agent(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    runpy.run_path(str(APE_X))["main"](20, tmp_path)
    assert "times smaller" in capsys.readouterr().out
    assert "could not add" not in caplog.text
