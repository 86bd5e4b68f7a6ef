"""The driver of faults.py: it makes the memory, writers and a learner, and executes the commands on its standard input.

A driver that replaces a killed one starts with the journals of its predecessors, and compares them with the ledger.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

import holdall
import holdall.ray
from holdall import ArgumentError, CheckpointError, FencedError, ShardError
from holdall.ray import ReplayMemory

from .ledger import (
    ACTION,
    EXTRAS,
    NUMBERS_PER_FEEDER,
    OBSERVATION,
    check_batch,
    check_ledger,
    make_step,
    read_counts,
    read_held,
    read_journal,
)

SHARDS = 3
WRITERS = 2
CAPACITY = 3_000_000
_PATIENCE_S = 240.0
_AWAY = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ShardError)


class WriterProcess:
    """Adds transitions. After every flush, it appends the count of acknowledged transitions to its file."""

    def __init__(self, memory: str, feeder: int, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory, feeder), daemon=True)
        self._thread.start()

    def _run(self, memory: str, feeder: int) -> None:
        try:
            handle = holdall.ray.attach(memory)
            with handle.writer() as writer, (self._folder / "ledger" / str(feeder)).open("a") as page:
                self._feed(writer, feeder, page)
        except FencedError:  # The driver was killed, and the next one started before this process ended.
            pass
        except BaseException as error:
            if not (self._over.is_set() or _is_ending(error)):
                (self._folder / "errors" / f"writer {feeder}").write_text(traceback.format_exc())

    def _feed(self, writer: Any, feeder: int, page: Any) -> None:
        generator = np.random.default_rng(feeder)
        added = 0
        while not self._over.is_set():
            for _ in range(int(generator.integers(1, 200))):
                _repeat_until_accepted(partial(writer.add, *make_step(feeder * NUMBERS_PER_FEEDER + added)))
                added += 1
            _repeat_until_accepted(writer.flush)
            page.write(f"{added}\n")
            page.flush()
            time.sleep(0.05)

    def process(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def end(self) -> None:
        """Wait until all rows are acknowledged."""
        self._over.set()
        self._thread.join()


class LearnerProcess:
    """Draws and checks batches. After every batch, it appends the count of drawn rows to its file."""

    def __init__(self, memory: str, number: int, folder: Path) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory, number, folder), daemon=True)
        self._thread.start()

    def _run(self, memory: str, number: int, folder: Path) -> None:
        drawn = 0
        try:
            handle = holdall.ray.attach(memory)
            with (folder / "drawn" / str(number)).open("a") as page:
                while not self._over.is_set():
                    try:
                        drawn += len(check_batch(handle.sample(64)))
                    except (ArgumentError, ShardError):  # Nothing is held yet, or no shard answers.
                        time.sleep(0.1)
                    page.write(f"{drawn}\n")
                    page.flush()
        except FencedError:  # As in `WriterProcess`.
            pass
        except BaseException as error:
            if not _is_ending(error):
                (folder / "errors" / f"learner {number}").write_text(traceback.format_exc())

    def process(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def end(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()


def _is_ending(error: BaseException) -> bool:
    """Return whether Ray is ending this process, because its machine or the driver was killed."""
    return isinstance(error, SystemExit) or not ray.is_initialized()


def _repeat_until_accepted(act: Any) -> None:
    """Repeat a call until it raises no ShardError. A call that raised has added nothing."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            act()
        except ShardError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
        else:
            return


class Life:
    """One driver, from its start until it ends or is killed."""

    def __init__(self, folder: Path, life: int) -> None:
        self._folder = folder
        self._life = life
        self._started = 0
        self._name = f"faults-{life}"
        settings: dict[str, Any] = {"durability": "segment", "url": folder / "journals", "extras": EXTRAS}
        self._memory = ReplayMemory(
            OBSERVATION, ACTION, CAPACITY, shards=SHARDS, name=self._name, patience_s=60.0, **settings
        )
        self._check_held()
        self._writers: list[Any] = []
        self._learners: list[Any] = []
        self._saves: list[threading.Thread] = []
        self.replace()

    def _check_held(self) -> dict[int, Any]:
        self._wait_for_shards()
        found = read_held(self._memory)
        check_ledger(found, read_counts(self._folder / "ledger"))
        return found

    def _wait_for_shards(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        while len(self._memory._members.refresh()) < SHARDS:
            assert time.monotonic() < until, "a shard has not come back"

    def replace(self) -> dict[str, Any]:
        """Start writers and learners in place of those that were killed."""
        for actors, kind, count in ((self._writers, WriterProcess, WRITERS), (self._learners, LearnerProcess, 1)):
            actors[:] = [actor for actor in actors if _pid(actor)]
            while len(actors) < count:
                number = 1_000 * self._life + self._started
                self._started += 1
                remote: Any = ray.remote
                made = remote(num_cpus=0, max_restarts=0, max_concurrency=3)(kind)
                actors.append(made.remote(self._name, number, self._folder))
        return {}

    def processes(self) -> dict[str, Any]:
        """Return the processes that may be killed."""
        shards = [self._memory._members.handle(number) for number in self._memory._members.numbers]
        rosters = [self._memory._fleet.roster]
        actors_by_kind = {"shards": shards, "rosters": rosters, "writers": self._writers, "learners": self._learners}
        return {kind: [pid for pid in map(_pid, actors) if pid] for kind, actors in actors_by_kind.items()}

    def save(self) -> dict[str, Any]:
        """Begin a save. A complete checkpoint must have all transitions that were acknowledged before."""
        acknowledged = read_counts(self._folder / "ledger")
        try:
            handle = self._memory.save(self._folder / "saved")
        except (CheckpointError, *_AWAY):
            return {"begun": False}
        self._saves.append(threading.Thread(target=self._end_save, args=(handle, acknowledged), daemon=True))
        self._saves[-1].start()
        return {"begun": True}

    def _end_save(self, handle: Any, acknowledged: dict[int, int]) -> None:
        try:
            handle.result()
        except (CheckpointError, *_AWAY):
            return
        page = self._folder / f"{threading.get_ident()}.tmp"  # Several saves may end at the same time.
        page.write_text(json.dumps(acknowledged))
        page.replace(self._folder / f"complete {time.time_ns()}")

    def end(self) -> dict[str, Any]:
        """End writers and learners, and check what the shards, the journals and the checkpoint have."""
        for thread in self._saves:
            thread.join()
        ray.get([actor.end.remote() for actor in self._writers + self._learners], timeout=_PATIENCE_S)
        found = self._check_held()
        _repeat_until_accepted(lambda: self._memory.save(self._folder / "saved").result())
        self._memory.close()
        for shard, numbers in found.items():
            assert np.array_equal(read_journal(self._folder / "journals", shard), numbers)
        complete = sorted(self._folder.glob("complete *"))
        last = read_counts(self._folder / "ledger")
        with holdall.ReplayMemory.load(self._folder / "saved") as loaded:
            rows = [loaded.gather(ids) for ids in np.array_split(_valid_ids(loaded), 200)]
            check_saved_numbers(np.concatenate([check_batch(batch, is_whole=False) for batch in rows]), last)
        everything = np.concatenate(list(found.values()))
        return {
            "transitions": len(everything),
            "acknowledged": sum(last.values()),
            "saves": len(complete),
            "drawn": sum(read_counts(self._folder / "drawn").values()),
        }


def _valid_ids(memory: holdall.ReplayMemory) -> Any:
    ids = np.arange(memory.first_id, memory.next_id)
    return ids[memory.are_valid(ids)]


def check_saved_numbers(numbers: Any, acknowledged: dict[int, int]) -> None:
    """Check that a checkpoint has all acknowledged transitions once."""
    assert len(np.unique(numbers)) == len(numbers), "a checkpoint has transitions twice"
    for feeder, count in acknowledged.items():
        own = numbers[numbers // NUMBERS_PER_FEEDER == int(feeder)] % NUMBERS_PER_FEEDER
        assert not np.setdiff1d(np.arange(count), own).size, f"a checkpoint lacks transitions of feeder {feeder}"


def _pid(actor: Any) -> int:
    """Return the process of an actor, or 0 if it does not answer."""
    try:
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=5.0))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return 0


def _check_saved(folder: Path) -> None:
    """Load the newest complete checkpoint. Check that it has what was acknowledged before it was begun."""
    complete = sorted(folder.glob("complete *"))
    if complete:
        acknowledged = {int(feeder): count for feeder, count in json.loads(complete[-1].read_text()).items()}
        with holdall.ReplayMemory.load(folder / "saved") as loaded:
            batches = [loaded.gather(ids) for ids in np.array_split(_valid_ids(loaded), 50)]
            check_saved_numbers(np.concatenate([check_batch(batch, is_whole=False) for batch in batches]), acknowledged)


def main() -> None:
    """Execute one command per line."""
    address = sys.argv[1]
    folder = Path(sys.argv[2])
    life = int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of Ray is not an answer.
    ray.init(address, _node_ip_address=address.partition(":")[0], log_to_driver=False, configure_logging=False)
    now: Life | None = None
    for line in sys.stdin:
        command = line.strip()
        answer: dict[str, Any] = {}
        if now is None:
            _check_saved(folder)
            now = Life(folder, life)
        else:
            answer = getattr(now, command)()
        out.write(json.dumps(answer) + "\n")
        out.flush()
        if command == "end":
            break
    ray.shutdown()


if __name__ == "__main__":
    main()
