"""A checkpoint can be loaded while another thread saves often and removes old checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory

from .nursery import LANES, SPACE, TUNING, add, require_right

SAVE_S = 0.08


class SavingThread:
    """A memory that grows and is saved every 80 ms. Only two checkpoints are kept."""

    def __init__(self, place: Path) -> None:
        self.saves = 0
        self.errors: list[BaseException] = []
        self._place = place
        self._stopped = threading.Event()
        self._memory = ReplayMemory(SPACE, spaces.Discrete(5), 400 * LANES, LANES, budget=None, seed=1, _tuning=TUNING)
        self._save()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._memory.close()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(SAVE_S):
                self._save()
        except BaseException as error:
            self.errors.append(error)

    def _save(self) -> None:
        for _ in range(30):
            add(self._memory, self._memory.next_id // LANES)
        number = str(self._memory.next_id).encode()
        self._memory.save(self._place, keep=2, attach={"next_id": number}).result()
        self.saves += 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.nightly)])
def test_every_load_succeeds_while_another_thread_saves(tmp_path: Path, seconds: int) -> None:
    """Rows and attached files are right, also if they are read after their checkpoint was removed."""
    saver = SavingThread(tmp_path / "run")
    loads = 0
    newest = 0
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or not loads:
            with ReplayMemory.load(tmp_path / "run", budget=None) as memory:
                assert memory.next_id >= newest, "a load returned an older checkpoint than the previous load"
                newest = memory.next_id
                ids = np.random.default_rng(loads).integers(memory.first_id, memory.next_id, 64)
                if loads % 5 == 0:
                    saves = saver.saves
                    while saver.saves < saves + 4 and not saver.errors:
                        time.sleep(SAVE_S)
                require_right(memory, ids)
                assert memory.attached["next_id"] == str(newest).encode()
            loads += 1
    finally:
        saver.stop()
    assert not saver.errors, saver.errors
    print(f"{loads} loads beside {saver.saves} saves")  # noqa: T201
