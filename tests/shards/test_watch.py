"""`holdall watch --ray`: run as a user runs it, beside a real Ray and a memory whose shards freeze and die."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from gymnasium import spaces
from rich.console import Console

from holdall import ArgumentError, ShardError
from holdall.cli.watch_ray import cluster_view
from holdall.cluster.protocol import ShardCounters, ShardStatus
from holdall.ray import RateLimit, ReplayMemory
from holdall.ray.watch import ClusterPass, SeenMemory, SeenShard, ShardForecast, State
from holdall.ray_access import require_head, use_token
from holdall.tools.report import read_report
from holdall.tools.watch.reading import MemoryReading, ReadingHistory

from .processes import kill, process_of

HOLDALL = [sys.executable, "-m", "holdall"]
PATIENCE_S = 60.0
MIB = 2**20


def add(memory: ReplayMemory, count: int) -> None:
    row, no = np.zeros((1, 3), np.float32), np.zeros(1, np.bool_)
    for _ in range(count):
        memory.add(row, np.zeros(1, np.int64), np.zeros(1, np.float32), row, no, no)
    memory.flush()


def shards_of(line: dict[str, Any], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in lines if one["kind"] == "shard" and one["time"] == line["time"]]


class Watched:
    """A watch that prints JSON lines."""

    def __init__(self, process: subprocess.Popen[str], memory: str) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._memory = memory

    def until(self, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read on until a line of this memory is as wished."""
        assert self.process.stdout is not None
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            line: dict[str, Any] = json.loads(self.process.stdout.readline())
            self.lines.append(line)
            of = line.get("memory", line.get("evidence", {}).get("of", self._memory))
            if of == self._memory and is_so(line):
                return line
        raise TimeoutError(f"it never came to be so; last: {self.lines[-3:]}")


@pytest.mark.usefixtures("cluster")
def test_a_cluster_is_watched_while_shards_freeze_die_and_come_back(tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path / "journals"}
    settings |= {"shards": 2, "limit": RateLimit(1.0, 1, 4_000)}
    with ReplayMemory(spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2), 8_000, **settings) as memory:
        add(memory, 1_000)
        record = tmp_path / "run.jsonl"
        command = [*HOLDALL, "watch", "--ray", "--json", "--interval", "0.2", "--record", str(record), address]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        # What is started in the background of a shell ignores interrupts, and so does what that starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with subprocess.Popen(command, **pipes) as process:
            signal.signal(signal.SIGINT, before)
            watched = Watched(process, memory.name)
            shards: list[dict[str, Any]] = []
            while [one["state"] for one in shards] != ["answers", "answers"]:
                first = watched.until(lambda line: line["kind"] == "shard" and line["shard"] == 1)
                shards = [one for one in shards_of(first, watched.lines) if one["memory"] == memory.name]
            statuses = memory.shards()
            assert [one["pid"] for one in shards] == [status.pid for status in statuses]
            assert [one["node"] for one in shards] == [status.node for status in statuses]
            assert sum(one["transitions"] for one in shards) == 1_000
            assert all(one["capacity"] == 4_000 and one["is_durable"] and one["backlog"] == 0 for one in shards)
            for one, status in zip(shards, statuses, strict=True):
                assert one["held_bytes"] == status.held_bytes >= 500
                assert abs(one["uss_bytes"] - status.uss_bytes) < 16 * MIB
                assert one["uss_bytes"] <= one["pss_bytes"] < one["limit_bytes"]
                assert 0 < one["limit_free_bytes"] < one["limit_bytes"] <= psutil.virtual_memory().total
            frozen = psutil.Process(process_of(memory._cluster.handle(1)))
            frozen.suspend()
            silent = watched.until(lambda line: line["kind"] == "shard" and line["state"] == "silent")
            assert (silent["shard"], silent["transitions"]) == (1, shards[1]["transitions"])
            told = watched.until(lambda line: line["kind"] == "verdict" and line["name"] == "silent")
            assert told["severity"] == "error"
            assert told["evidence"]["seconds"] >= 5
            frozen.resume()
            watched.until(lambda line: line["kind"] == "shard" and line["shard"] == 1 and line["state"] == "answers")
            kill(frozen.pid)
            watched.until(lambda line: line["kind"] == "shard" and line["state"] in {"restarts", "silent"})
            back = watched.until(lambda line: line["kind"] == "shard" and line["shard"] == 1 and line["restarts"] == 1)
            assert (back["state"], back["transitions"]) == ("answers", shards[1]["transitions"])
            assert back["pid"] != frozen.pid
            restarted = watched.until(lambda line: line["kind"] == "verdict" and line["name"] == "restarted")
            assert "journals" in restarted["text"]
            watched.until(lambda line: line["kind"] == "reading")  # what was printed before is recorded by now
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        once = [*HOLDALL, "watch", "--ray", "--once", address]
        seen, narrow = "", os.environ | {"COLUMNS": "80"}
        until = time.monotonic() + PATIENCE_S
        while "2 of 2 shards answer, durable" not in seen and time.monotonic() < until:
            seen = subprocess.run(once, env=narrow, capture_output=True, text=True, check=True).stdout
        assert memory.name in seen
        assert "2 of 2 shards answer, durable" in seen
        assert "1,000 of 8,000 transitions (12 %)" in seen
        assert "limiter: 0.00 samples an insert, error 1,000 within -3,999 and 4,001" in seen
        assert max(map(len, seen.splitlines())) <= 80
    summary = read_report(record).summary()
    assert summary["readings"] > 3
    assert {verdict["name"] for verdict in summary["verdicts"]} >= {"silent", "restarted"}


def test_mistakes_are_told_at_once_and_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("47068", "ray://127.0.0.1:10001", ":6379", "127.0.0.1:x"):
        with pytest.raises(ArgumentError, match="host and port"):
            require_head(address)
    with pytest.raises(ShardError, match="nobody answers"):
        require_head("127.0.0.1:1")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ShardError, match="RAY_AUTH_MODE=token"):
        require_head("10.0.0.3:6379")
    monkeypatch.setenv("HOME", str(tmp_path))  # a token there that others can read would be one more line
    done = subprocess.run([*HOLDALL, "watch", "--ray", "127.0.0.1:1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert subprocess.run([*HOLDALL, "watch"], capture_output=True, check=False).returncode == 2


def test_the_users_token_is_used_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "token").touch()
    for settings, mode in (
        ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}, "token"),
        ({"RAY_AUTH_TOKEN": "a" * 40}, "token"),
        ({"RAY_AUTH_TOKEN": "a" * 40, "RAY_AUTH_MODE": "disabled"}, "disabled"),
        ({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, None),
    ):
        environment = dict(settings)
        use_token(environment)
        assert environment.get("RAY_AUTH_MODE") == mode


def shard(number: int, rows: int, uss: int, *, state: State = "answers", backlog: int = 0, **more: Any) -> SeenShard:
    counters = ShardCounters(3, 0, rows, rows, rows, 1, backlog, float(rows))
    told: dict[str, Any] = {"node": "10.0.0.3", "limit": "control group", "limit_bytes": 4 * 2**30, "capacity": 100_000}
    told |= {"held_bytes": rows * 1_000, "plain_bytes": rows * 50_000, "limit_free_bytes": 64 * MIB, "is_durable": True}
    status = ShardStatus(number, True, pid=40_000 + number, uss_bytes=uss, pss_bytes=uss, counters=counters, **told)
    return SeenShard(number, state, status=status, **more)


def memory_of(*shards: SeenShard) -> list[SeenMemory]:
    return [SeenMemory("holdall-0123456789abcdef", True, shards)]


def test_a_machine_that_runs_out_before_its_shards_are_full_is_told_with_when() -> None:
    outlook = ShardForecast()
    # 1,000 bytes a transition as they are held: 40 MB to come on each of two, of 64 MiB that both have.
    (one,) = outlook.verdicts(memory_of(shard(0, 60_000, 60_000_000), shard(1, 60_000, 60_000_000)), 1_000.0)
    assert (one.name, one.severity, one.evidence["of"]) == ("running out", "error", "10.0.0.3")
    assert one.evidence["to_come"] == 80_000_000
    assert one.evidence["fill_then"] == pytest.approx(0.6 + 0.4 * 64 * MIB / 80_000_000)
    # Its process shows that it takes twice that; 10,000 transitions took 100 s.
    (two,) = outlook.verdicts(memory_of(shard(0, 65_000, 70_000_000), shard(1, 65_000, 70_000_000)), 1_100.0)
    assert two.evidence["to_come"] == 2 * 35_000 * 2_000
    left = 64 * MIB / 140_000_000 * 70_000
    assert two.evidence["seconds"] == pytest.approx(left / 100)
    assert outlook.rate(memory_of(shard(0, 65_000, 1), shard(1, 65_000, 1))[0], 1_100.0) == 100
    assert not ShardForecast().verdicts(memory_of(shard(0, 90_000, 90_000_000)), 0.0)  # 10 MB to come
    assert not ShardForecast().verdicts(
        memory_of(shard(0, 100_000, 100_000_000), shard(1, 0, MIB)), 0.0
    )  # full, and empty


def test_shards_that_are_away_restarted_or_slow_are_told() -> None:
    full: dict[str, Any] = {"rows": 100_000, "uss": MIB}
    seen = [
        shard(0, **full, backlog=9 * MIB),
        shard(1, **full, state="silent", silent_s=12.0),
        shard(2, **full, state="silent", silent_s=4.0),  # not for long
        shard(3, **full, state="lost", silent_s=1.0),
        SeenShard(4, "starts", 30.0),
        shard(5, **full, restarts=2),
    ]
    found = {one.name: one for one in ShardForecast().verdicts(memory_of(*seen), 0.0)}
    assert set(found) == {"slow journal", "silent", "lost", "starts", "restarted"}
    assert found["silent"].evidence["shards"] == [1]
    assert "12 s" in found["silent"].text
    assert [one.severity for one in found.values()] == ["error", "error", "warning", "warning", "info"]
    (roster,) = ShardForecast().verdicts([SeenMemory("holdall-0", False, (shard(0, **full),))], 0.0)
    assert roster.name == "roster"


def test_a_turn_fits_into_eighty_columns_and_has_more_to_say_in_a_hundred_and_twenty() -> None:
    seen = memory_of(shard(0, 99_999, 1023 * MIB, backlog=1023 * MIB), SeenShard(117, "restarts", 9.0))
    reading = MemoryReading(0.0, 10**9, 10**9, ())
    history = ReadingHistory()
    history.add(reading)
    turn = ClusterPass(reading, [], [], address="192.168.100.100:63790", nodes=12, memories=tuple(seen), rates=(1e4,))
    shown = {}
    for width in (80, 120):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(cluster_view(turn, history, width))
        shown[width] = console.export_text()
        assert max(map(len, shown[width].splitlines())) <= width
    for word in ("99,999", "1023.0 MiB", "25.0 %", "restarts", "10,000/s", "10.0.0.3"):
        assert word in shown[80]
    assert "PSS" not in shown[80]
    assert "PSS" in shown[120]
    assert "100 %" in shown[120]
