"""The settings of a memory over shards: `load` accepts those of the constructor, and wrong ones are refused."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

from holdall import ArgumentError
from holdall.cluster.config import ClusterSettings
from holdall.ray import ReplayMemory

SPACE = spaces.Box(-1, 1, (3,))
ACTION = spaces.Discrete(2)


@pytest.mark.parametrize(("method", "url"), [(ReplayMemory.__init__, "url"), (ReplayMemory.load, "journal_url")])
def test_the_constructor_and_load_accept_every_setting(method: Callable[..., Any], url: str) -> None:
    names = {"url": url, "tuning": "_tuning"}
    accepted = inspect.signature(method).parameters
    assert {names.get(field.name, field.name) for field in dataclasses.fields(ClusterSettings)} <= set(accepted)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("durability", {"durability": "disk"}),
    ("on_shard_loss", {"on_shard_loss": "ignore"}),
    ("prefer", {"prefer": "size"}),
    ("placement", {"placement": "far"}),
    ("patience_s", {"patience_s": 0.0}),
    ("patience_s", {"patience_s": "long"}),
    ("url", {"durability": "segment"}),
]


@pytest.mark.parametrize(("named", "wrong"), WRONG, ids=str)
def test_a_wrong_setting_is_refused_before_anything_is_started(named: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{named} "):
        ReplayMemory(SPACE, ACTION, 100, shards=1, **wrong)


@pytest.mark.parametrize(("named", "wrong"), WRONG, ids=str)
def test_load_refuses_a_wrong_setting_before_anything_is_read(
    named: str, wrong: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=f"^{named} "):
        ReplayMemory.load(tmp_path / "missing", **wrong)


def test_journals_without_durability_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no url for 'memory'"):
        ReplayMemory(SPACE, ACTION, 100, shards=1, url=tmp_path)
