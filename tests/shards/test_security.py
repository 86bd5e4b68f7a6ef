"""A memory is not started where strangers could reach it."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray
from gymnasium import spaces

from holdall import ShardError
from holdall.ray import ReplayMemory
from holdall.ray_access import answers_strangers, close_token_file, require_closed


@pytest.mark.parametrize("address", ["10.0.0.3", "192.0.2.2", "2001:db8::1", "worker-3.internal"])
def test_beyond_this_machine_a_token_is_needed(address: str) -> None:
    for environment in ({}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "a" * 40}):
        with pytest.raises(ShardError, match="RAY_AUTH_MODE=token"):
            require_closed(["127.0.0.1", address], "127.0.0.1:1", environment)
    require_closed([address], "127.0.0.1:1", {"RAY_AUTH_MODE": "token"})


def test_on_this_machine_alone_none_is_needed() -> None:
    require_closed(["127.0.0.1", "::1", "localhost"], "127.0.0.1:1", {})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_token_that_others_can_read_is_closed_to_them(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "auth_token"
    token.write_text("a" * 40)
    token.chmod(mode)
    with caplog.at_level(logging.WARNING, "holdall"):
        close_token_file({"RAY_AUTH_TOKEN_PATH": str(token)})
    assert token.stat().st_mode & 0o777 == 0o600
    assert "0600" in caplog.text
    close_token_file({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})


@pytest.mark.usefixtures("cluster")
def test_a_memory_asks_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeManagerAddress": "10.0.0.3", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ShardError, match=r"10\.0\.0\.3"):
        ReplayMemory(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), 100, shards=1)


@contextmanager
def head_that_says(*frames: bytes) -> Iterator[str]:
    """Listen as a head of Ray's does, and answer whoever asks with these frames; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                for frame in frames:
                    connection.sendall(frame)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def framed(kind: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, 4]) + stream.to_bytes(4, "big") + body


SETTINGS = framed(4, 0, b"\0\3\0\0\0\x64")
REFUSES = framed(1, 1, b"\x88\0\x0bgrpc-status\x0216\0\x0cgrpc-message\x07refused")
ANSWERS = framed(1, 1, b"\x88@\x0ccontent-type\x10application/grpc")


@pytest.mark.parametrize(
    ("frames", "is_open"),
    [
        ((SETTINGS, ANSWERS), True),
        ((SETTINGS + ANSWERS[:7], ANSWERS[7:] + framed(0, 1, b"\0\0\0\0\0")), True),
        ((SETTINGS, REFUSES), False),
        ((SETTINGS + REFUSES[:20], REFUSES[20:]), False),
        ((), False),  # it hangs up, as one behind TLS does
    ],
)
def test_a_head_is_asked_as_a_stranger_would(frames: tuple[bytes, ...], is_open: bool) -> None:
    with head_that_says(*frames) as address:
        assert answers_strangers(address) == is_open
    assert not answers_strangers("127.0.0.1:1")


def test_an_open_head_is_refused_whatever_token_this_process_has() -> None:
    with head_that_says(SETTINGS, ANSWERS) as address, pytest.raises(ShardError, match="answers without a token"):
        require_closed(["10.0.0.3"], address, {"RAY_AUTH_MODE": "token"})


@pytest.mark.usefixtures("cluster")
def test_the_head_of_a_cluster_with_tokens_refuses_strangers() -> None:
    assert not answers_strangers(ray.get_runtime_context().gcs_address)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["token", "disabled"])
def test_whether_a_real_head_is_open_is_found_out(mode: str, tmp_path: Path) -> None:
    """One that was started without a token is refused, though whoever asks has made one up."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("a" * 40)
    program = (
        "import ray, sys\nfrom holdall.ray_access import answers_strangers\n"
        "ray.init(include_dashboard=False, num_cpus=1)\n"
        "print(answers_strangers(ray.get_runtime_context().gcs_address))"
    )
    settings = {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
    source = str(Path(__file__).parents[2] / "src")
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | settings | {"PYTHONPATH": source}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.split() == [str(mode == "disabled")]
