"""A memory is not started in a cluster that strangers can use."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import ray
from gymnasium import spaces

from holdall import ShardError
from holdall.cluster.access import protect_token_file, require_token
from holdall.ray import ReplayMemory


@pytest.mark.parametrize("address", ["10.0.0.3", "192.0.2.2", "2001:db8::1", "worker-3.internal"])
def test_a_cluster_of_several_machines_needs_a_token(address: str) -> None:
    for environment in ({}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "a" * 40}):
        with pytest.raises(ShardError, match="RAY_AUTH_MODE=token"):
            require_token(["127.0.0.1", address], environment)
    require_token([address], {"RAY_AUTH_MODE": "token"})


def test_a_cluster_on_this_machine_needs_no_token() -> None:
    require_token(["127.0.0.1", "::1", "localhost"], {})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_token_that_other_users_can_read_becomes_private(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "auth_token"
    token.write_text("a" * 40)
    token.chmod(mode)
    with caplog.at_level(logging.WARNING, "holdall"):
        protect_token_file({"RAY_AUTH_TOKEN_PATH": str(token)})
    assert token.stat().st_mode & 0o777 == 0o600
    assert "0600" in caplog.text
    protect_token_file({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


@pytest.mark.usefixtures("cluster")
def test_a_memory_checks_the_cluster_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeManagerAddress": "10.0.0.3", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ShardError, match=r"10\.0\.0\.3"):
        ReplayMemory(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), 100, shards=1)
