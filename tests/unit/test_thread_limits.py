"""threads.limit: inside the block, pools of threads are limited. After it, everything is as before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from holdall import machine, threads
from holdall.errors import ArgumentError

COUNT = """
import threading, torch
from pathlib import Path
from holdall import threads

layer = torch.nn.Linear(600, 600)

def count_threads():
    at_once = threading.Barrier(4)
    def work():
        layer(torch.ones(600, 600)).sum().backward()
        at_once.wait()
        at_once.wait()
    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    at_once.wait()
    count = len(list(Path("/proc/self/task").iterdir()))
    at_once.wait()
    for worker in workers:
        worker.join()
    return count

torch.set_num_threads(4)
with threads.limit(1):
    print(count_threads())
print(count_threads())
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_workers_inside_the_limit_do_not_multiply_torchs_threads() -> None:
    """Three workers train. With the limit, each has one thread. Without it, each has a pool of four."""
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    limited, free = map(int, done.stdout.split())
    assert free >= 4 * 3
    assert limited <= free - 3 * 3


def test_the_limit_ends_with_its_block_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = dict(os.environ)
    torch_before = torch.get_num_threads()
    with threads.limit(1) as number:
        assert number == 1
        assert torch.get_num_threads() == 1
        assert {os.environ[name] for name in threads.VARIABLES} == {"1"}
    assert dict(os.environ) == before
    with pytest.raises(KeyError), threads.limit(1):
        raise KeyError
    assert dict(os.environ) == before
    assert torch.get_num_threads() == torch_before


def test_a_pool_that_runs_already_is_limited() -> None:
    """NumPy's BLAS library read the environment when it was loaded, before the limit."""
    product = np.ones((200, 200)) @ np.ones((200, 200))
    assert product[0, 0] == 200

    def count_blas_threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    if not count_blas_threads():
        pytest.skip("threadpoolctl does not know NumPy's BLAS library")
    with threadpool_limits(3, user_api="blas"):
        before = count_blas_threads()
        with threads.limit(1):
            assert set(count_blas_threads()) == {1}
        assert count_blas_threads() == before


def test_processes_started_inside_inherit_the_limit() -> None:
    program = "import os; print(os.environ['OMP_NUM_THREADS'])"
    with threads.limit(1):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_the_cores_are_divided_among_workers_and_two_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDALL_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 20)
    assert threads.environment(workers=3)["OMP_NUM_THREADS"] == "4"
    assert threads.environment(workers=50)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("HOLDALL_THREADS", "6")
    assert threads.environment(workers=3)["OMP_NUM_THREADS"] == "6"
    assert threads.environment(2)["HOLDALL_THREADS"] == "2"


@pytest.mark.parametrize(
    ("content", "cores"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("nonsense", 64)]
)
def test_a_containers_share_of_cores_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, cores: int
) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    assert machine.usable_cores(tmp_path) == cores


def test_usable_cores_are_at_least_one_and_at_most_those_of_the_machine() -> None:
    assert 1 <= threads.usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"threads": True}, {"threads": 1.5}, {"workers": -1}], ids=str)
def test_a_wrong_number_of_threads_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(arguments))), threads.limit(**arguments):
        pass


def test_a_bad_default_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDALL_THREADS", "many")
    with pytest.raises(ArgumentError, match="HOLDALL_THREADS"), threads.limit():
        pass
