"""The example that saves to an object store, against a real server."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoint_to_s3.py"


def test_the_example_loads_its_checkpoint_and_draws_the_same_batch(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [EXAMPLE.name, url, "400"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "loaded 400 transitions; the next batch is the same" in capsys.readouterr().out
