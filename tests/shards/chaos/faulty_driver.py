"""The driver of faults.py: a memory, writers and a learner, and a line of text for everything that is asked of it.

One life of it begins with what the journals hold of earlier ones, and checks that against the ledger.
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

from .ledger import ACTION, EXTRAS, MOST_OF_ONE, OBSERVATION, checked, held, read_counts, settle, step, written

SHARDS = 3
WRITERS = 2
CAPACITY = 3_000_000
_PATIENCE_S = 240.0
_AWAY = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError, ShardError)


class WriterProcess:
    """Adds transitions, and writes down after every flush how many were acknowledged. Adds again what raised."""

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
        except FencedError:  # the driver was killed, and the next one was quicker than the end of this process
            pass
        except BaseException as error:
            if not (self._over.is_set() or _is_ending(error)):
                (self._folder / "errors" / f"writer {feeder}").write_text(traceback.format_exc())

    def _feed(self, writer: Any, feeder: int, page: Any) -> None:
        generator = np.random.default_rng(feeder)
        added = 0
        while not self._over.is_set():
            for _ in range(int(generator.integers(1, 200))):
                _until_done(partial(writer.add, *step(feeder * MOST_OF_ONE + added)))
                added += 1
            _until_done(writer.flush)
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
    """Draws, checks every bit, and writes down after every batch how many rows it has drawn."""

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
                        drawn += len(checked(handle.sample(64)))
                    except (ArgumentError, ShardError):  # Nothing is held yet, or no shard answers.
                        time.sleep(0.1)
                    page.write(f"{drawn}\n")
                    page.flush()
        except FencedError:  # Likewise.
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


def _until_done(act: Any) -> None:
    """Do what may raise while a shard is away until it does not: what raised is not held."""
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
    """What one driver does until it ends or is killed."""

    def __init__(self, folder: Path, life: int) -> None:
        self._folder = folder
        self._life = life
        self._started = 0
        self._name = f"faults-{life}"
        settings: dict[str, Any] = {"durability": "segment", "url": folder / "journals", "extras": EXTRAS}
        self._memory = ReplayMemory(
            OBSERVATION, ACTION, CAPACITY, shards=SHARDS, name=self._name, patience_s=60.0, **settings
        )
        self._settle()
        self._writers: list[Any] = []
        self._learners: list[Any] = []
        self._saves: list[threading.Thread] = []
        self.replace()

    def _settle(self) -> dict[int, Any]:
        self._wait_for_shards()
        found = held(self._memory)
        settle(found, read_counts(self._folder / "ledger"))
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
        asked = {"shards": shards, "rosters": rosters, "writers": self._writers, "learners": self._learners}
        return {kind: [pid for pid in map(_pid, actors) if pid] for kind, actors in asked.items()}

    def save(self) -> dict[str, Any]:
        """Begin a save. What was acknowledged before is in it, if it is reported as complete."""
        promised = read_counts(self._folder / "ledger")
        try:
            handle = self._memory.save(self._folder / "saved")
        except (CheckpointError, *_AWAY):
            return {"begun": False}
        self._saves.append(threading.Thread(target=self._end_save, args=(handle, promised), daemon=True))
        self._saves[-1].start()
        return {"begun": True}

    def _end_save(self, handle: Any, promised: dict[int, int]) -> None:
        try:
            handle.result()
        except (CheckpointError, *_AWAY):
            return
        page = self._folder / f"{threading.get_ident()}.tmp"  # saves end at the same time
        page.write_text(json.dumps(promised))
        page.replace(self._folder / f"complete {time.time_ns()}")

    def end(self) -> dict[str, Any]:
        """End everything, and settle."""
        for thread in self._saves:
            thread.join()
        ray.get([actor.end.remote() for actor in self._writers + self._learners], timeout=_PATIENCE_S)
        found = self._settle()
        _until_done(lambda: self._memory.save(self._folder / "saved").result())
        self._memory.close()
        for shard, numbers in found.items():
            assert np.array_equal(written(self._folder / "journals", shard), numbers)
        complete = sorted(self._folder.glob("complete *"))
        last = read_counts(self._folder / "ledger")
        with holdall.ReplayMemory.load(self._folder / "saved") as loaded:
            rows = [loaded.gather(ids) for ids in np.array_split(_valid_ids(loaded), 200)]
            settle_saved(np.concatenate([checked(batch, is_whole=False) for batch in rows]), last)
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


def settle_saved(numbers: Any, promised: dict[int, int]) -> None:
    """Check that a checkpoint has all that was promised, and nothing twice."""
    assert len(np.unique(numbers)) == len(numbers), "a checkpoint holds transitions twice"
    for feeder, count in promised.items():
        own = numbers[numbers // MOST_OF_ONE == int(feeder)] % MOST_OF_ONE
        assert not np.setdiff1d(np.arange(count), own).size, f"a checkpoint lacks transitions of feeder {feeder}"


def _pid(actor: Any) -> int:
    """Return the process of an actor, or 0 if it does not answer."""
    try:
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=5.0))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return 0


def _check_saved(folder: Path) -> None:
    """Load the newest checkpoint that an earlier life left, and hold it against what was promised then."""
    complete = sorted(folder.glob("complete *"))
    if complete:
        promised = {int(feeder): count for feeder, count in json.loads(complete[-1].read_text()).items()}
        with holdall.ReplayMemory.load(folder / "saved") as loaded:
            batches = [loaded.gather(ids) for ids in np.array_split(_valid_ids(loaded), 50)]
            settle_saved(np.concatenate([checked(batch, is_whole=False) for batch in batches]), promised)


def main() -> None:
    """Do what is asked, line by line."""
    address = sys.argv[1]
    folder = Path(sys.argv[2])
    life = int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of Ray is not an answer.
    ray.init(address, _node_ip_address=address.partition(":")[0], log_to_driver=False, configure_logging=False)
    now: Life | None = None
    for line in sys.stdin:
        what = line.strip()
        said: dict[str, Any] = {}
        if now is None:
            _check_saved(folder)
            now = Life(folder, life)
        else:
            said = getattr(now, what)()
        out.write(json.dumps(said) + "\n")
        out.flush()
        if what == "end":
            break
    ray.shutdown()


if __name__ == "__main__":
    main()
