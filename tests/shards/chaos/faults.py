"""Random faults under load: `python -m tests.shards.chaos.faults --faults 200 --seed 0`.

Processes play a cluster of three machines. A driver makes a memory whose journals are on a small disk. Writers and a
learner run in processes of their own. Each fault is chosen at random: a shard, a writer, the learner, the roster, the
driver or a machine is killed, a shard is frozen, the disk is full, saves overlap, or a shard is killed while it saves.

The program prints one JSON line with the number of faults of each kind. It fails if an acknowledged transition is
missing, if a transition is held twice, if a bit differs, or if a complete checkpoint lacks a transition.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..nodes import Nodes, make_environment
from .machine_loss import ROOT

KINDS = {
    "kill shard": 5,
    "kill writer": 3,
    "kill learner": 2,
    "kill driver": 1,
    "kill machine": 1,
    "freeze shard": 3,
    "full disk": 2,
    "overlapping saves": 2,
    "kill while saving": 3,
    "kill roster": 2,
}
"""Weights with which faults are chosen."""
_DISK_BYTES = 256 * 2**20
_PATIENCE_S = 300.0


class Driver:
    """The process that made the memory, see faulty_driver.py. It executes one command per line."""

    def __init__(self, address: str, folder: Path, life: int) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.shards.chaos.faulty_driver", address, str(folder)]
        self._errors = (folder / "driver.log").open("ab")
        self._process = subprocess.Popen(
            [*command, str(life)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd=ROOT
        )
        self.ask("begin")  # It checks the files of earlier drivers.

    def ask(self, what: str) -> dict[str, Any]:
        """Send a command, and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the driver ended while it was asked to {what}: see its log"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def end(self) -> dict[str, Any]:
        """Wait until writers and saves are done, check everything, and return the counts."""
        counts = self.ask("end")
        self._process.wait(_PATIENCE_S)
        return counts


class Disk:
    """A small disk for journals, which can be filled. An ordinary folder if this user may not mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
        can_mount = os.geteuid() == 0 and shutil.which("mount") is not None
        self.is_small = can_mount and subprocess.run(mount, check=False, capture_output=True).returncode == 0

    def fill(self, seconds: float) -> None:
        """Fill the disk for `seconds`."""
        filler = self.folder / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20 if shutil.disk_usage(self.folder).free > 2**20 else 4096))
        time.sleep(seconds)
        filler.unlink()

    def end(self) -> None:
        """Unmount the disk."""
        if self.is_small:
            subprocess.run(["umount", "-l", str(self.folder)], check=False)


class FaultInjector:
    """Chooses faults and injects them."""

    def __init__(self, nodes: Nodes, folder: Path, seed: int) -> None:
        self._nodes = nodes
        self._folder = folder
        self._generator = np.random.default_rng(seed)
        self._disk = Disk(folder / "journals")
        for name in ("ledger", "drawn", "errors", "saved"):
            (folder / name).mkdir()
        self._lives = 0
        self.done: Counter[str] = Counter()
        self._driver = self._new_driver()

    def _new_driver(self) -> Driver:
        self._lives += 1
        return Driver(self._nodes.address, self._folder, self._lives)

    def fault(self) -> None:
        """Wait for a while, and inject one fault."""
        time.sleep(float(self._generator.uniform(0.2, 1.5)))
        kinds = [kind for kind in KINDS if kind != "full disk" or self._disk.is_small]
        weights = np.array([KINDS[kind] for kind in kinds], float)
        kind = str(self._generator.choice(kinds, p=weights / weights.sum()))
        getattr(self, f"_{kind.replace(' ', '_')}")()
        self.done[kind] += 1
        assert not list((self._folder / "errors").iterdir()), "see the folder errors"

    def _choose_victim(self, kind: str) -> psutil.Process | None:
        pids = self._driver.ask("processes")[kind]
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(int(self._generator.choice(pids))) if pids else None
        return None

    def _kill(self, kind: str) -> None:
        victim = self._choose_victim(kind)
        if victim is not None:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        self._driver.ask("replace")

    def _kill_shard(self) -> None:
        self._kill("shards")

    def _kill_writer(self) -> None:
        self._kill("writers")

    def _kill_learner(self) -> None:
        self._kill("learners")

    def _kill_roster(self) -> None:
        self._kill("rosters")

    def _kill_driver(self) -> None:
        self._driver.kill()
        self._driver = self._new_driver()

    def _kill_machine(self) -> None:
        worker = self._nodes.workers.pop(int(self._generator.integers(len(self._nodes.workers))))
        worker.kill()
        self._nodes.join()
        self._driver.ask("replace")

    def _freeze_shard(self) -> None:
        victim = self._choose_victim("shards")
        if victim is not None:
            with suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGSTOP)
                time.sleep(float(self._generator.uniform(0.5, 5.0)))
                victim.send_signal(signal.SIGCONT)

    def _full_disk(self) -> None:
        self._disk.fill(float(self._generator.uniform(0.5, 3.0)))

    def _overlapping_saves(self) -> None:
        self._driver.ask("save")
        self._driver.ask("save")

    def _kill_while_saving(self) -> None:
        self._driver.ask("save")
        time.sleep(float(self._generator.uniform(0.0, 0.2)))
        self._kill("shards")

    def end(self) -> dict[str, Any]:
        """End all processes, check everything, and return the counts."""
        counts = self._driver.end()
        assert not list((self._folder / "errors").iterdir()), "see the folder errors"
        return {"faults": sum(self.done.values()), "lives": self._lives, **counts, "kinds": dict(self.done)}

    def close(self) -> None:
        """End the driver and the disk."""
        self._driver.kill()
        self._disk.end()


def _inner(faults: int, seed: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="holdall-faults-"))
    with Nodes(2, apart=False) as nodes:
        injector = FaultInjector(nodes, folder, seed)
        try:
            for number in range(faults):
                injector.fault()
                sys.stderr.write(f"\r{number + 1} faults: {dict(injector.done)}")
            sys.stdout.write(json.dumps(injector.end()) + "\n")
        except BaseException:
            sys.stderr.write(f"\nafter {sum(injector.done.values())} faults of seed {seed}; see {folder}\n")
            raise
        finally:
            injector.close()
    shutil.rmtree(folder, ignore_errors=True)


def inject_faults(faults: int, seed: int) -> dict[str, Any]:
    """Inject faults in a new process, because Ray reads its environment when it is imported. Return the counts.

    Raise RuntimeError if a check failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", "tests.shards.chaos.faults", "--inner"]
    with tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as folder:  # Paths of sockets must be short.
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        ended = subprocess.run(
            [*command, "--faults", str(faults), "--seed", str(seed)],
            cwd=ROOT,
            env=os.environ | make_environment(Path(folder)) | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            check=False,
        )
    if ended.returncode:
        raise RuntimeError(f"{faults} faults of seed {seed}: see above")
    counts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return counts


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inner:
        _inner(arguments.faults, arguments.seed)
    else:
        sys.stdout.write(json.dumps(inject_faults(arguments.faults, arguments.seed)) + "\n")


if __name__ == "__main__":
    main()
