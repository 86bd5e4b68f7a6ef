"""The example with actors and shards, at toy size, in a cluster that is there already.

By night it has a cluster of its own (tests/integration/test_examples.py), and continues after kill -9 (chaos/).
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

APE_X = Path(__file__).parents[2] / "examples" / "ape_x.py"


@pytest.mark.nightly  # in make test, actors and shards are tested by themselves
@pytest.mark.timeout(900)  # on a busy machine, the actors take their time to start
def test_actors_and_shards_train_an_agent(
    cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    runpy.run_path(str(APE_X))["main"](20, tmp_path)
    assert "times smaller" in capsys.readouterr().out
    assert "could not add" not in caplog.text
