"""The buffers that `ray_replay.py` compares, behind one interface.

`HoldallSide` is a memory over shards, `ActorSide` a local memory in a plain Ray actor, `TorchRLSide` a RayReplayBuffer.
`arrange` makes the arguments of inserts before time is measured.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from gymnasium import spaces

from holdall import ReplayMemory as LocalReplayMemory
from holdall.cluster.answer import read_answer
from holdall.machine import held_bytes
from holdall.ray import ReplayMemory, Writer
from holdall.report import MemoryReport

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.streams import Step, Stream

BATCH = 256
PREFETCH = 3
FIELDS = ("action", "reward", "terminated", "truncated")


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded steps, with their spaces."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    steps: list[Step]

    @property
    def batch_bytes(self) -> int:
        """Bytes of a decoded batch's observations."""
        return BATCH * 2 * sum(int(leaf.nbytes) for leaf in _leaves(self.steps[0].obs).values())


def record(source: Stream, count: int) -> Recording:
    """Record `count` steps."""
    return Recording(source.observation_space, source.action_space, list(itertools.islice(source.steps, count)))


@contextmanager
def own_ray(**settings: Any) -> Iterator[None]:
    """Start Ray on this machine, with a token of its own, and shut it down at the end."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "auth_token"
        token.touch(0o600)
        token.write_text(os.urandom(24).hex(), encoding="ascii")
        os.environ |= {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"}
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ["PYTHONPATH"] = path
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # so that a restarted shard finds compiled modules
        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=512 * 2**20,
            _node_ip_address="127.0.0.1",
            **settings,
        )
        try:
            yield
        finally:
            ray.shutdown()


class HoldallSide:
    """A memory over shards. This process adds and draws. Every shard has its own process."""

    name = "holdall"

    def __init__(self, recording: Recording, capacity: int, shards: int = 1, **settings: Any) -> None:
        self.memory = ReplayMemory(
            recording.observation_space,
            recording.action_space,
            capacity * shards,  # so that no shard evicts, however segments are spread
            shards=shards,
            device="cpu",
            seed=0,
            **settings,
        )
        self.writer: Writer = self.memory.writer()
        self.processes = [process_of(self.memory._members.handle(number)) for number in self.memory._members.numbers]

    def arrange(self, steps: Sequence[Step], block: int) -> list[tuple[Any, ...]]:
        """Return the arguments of inserts: single steps, or blocks of `block` steps."""
        return stacked(steps, block)

    def insert(self, arranged: list[tuple[Any, ...]], block: int) -> None:
        """Insert, and return when everything is acknowledged."""
        act = self.writer.add if block == 1 else self.writer.extend
        for arguments in arranged:
            act(*arguments)
        self.writer.flush()

    def sample(self) -> Any:
        """Draw a batch."""
        return self.memory.sample(BATCH)

    def sent_elsewhere(self) -> dict[str, float]:
        """Return the bytes of a batch for a learner on another machine, and the CPU time of shards and learner."""
        members = self.memory._members
        share = BATCH // len(self.memory._members.numbers)
        sent = shard_s = learner_s = 0.0
        for shard in members.numbers:
            call = members.handle(shard).__ray_call__.remote(_answer_for_another_machine, share)
            answer, taken = ray.get(call)
            sent += len(answer)
            start = time.process_time()
            found = read_answer(answer)
            weights = np.ones(share, np.float32)
            self.memory._delivery.receive(self.memory._maker.prepare([found], [np.arange(share)], [shard], weights))
            learner_s = learner_s + time.process_time() - start
            shard_s = shard_s + taken
        return {"bytes": sent, "shard_us": 1e6 * shard_s, "learner_us": 1e6 * learner_s}

    def encoded_bytes_per_transition(self) -> float:
        """Return the bytes of a compressed transition, without the uncompressed copies of the newest blocks."""
        members = self.memory._members
        calls = [members.handle(shard).__ray_call__.remote(_report_compressed) for shard in members.numbers]
        reports = [ray.get(call) for call in calls]
        return float(sum(report.total_bytes for report in reports) / sum(report.transitions for report in reports))

    def rows(self, numbers: Any) -> dict[str, Any]:
        """Return rows by the order in which they were added. Only for one shard."""
        batch = self.memory.gather(numbers)
        told = {name: getattr(batch, name) for name in FIELDS}
        return told | _named("obs", batch.obs) | _named("next_obs", batch.next_obs)

    def close(self) -> None:
        """End the shards."""
        self.memory.close()


def _answer_for_another_machine(shard: Any, count: int) -> tuple[Any, float]:
    data = shard._data
    start = time.process_time()
    answer = data.read(data.draw(count, 0, None, is_near=False), shard.counters(), is_near=False)
    return answer, time.process_time() - start


def _report_compressed(shard: Any) -> MemoryReport:
    """Return the report of a shard that keeps no uncompressed blocks."""
    store = shard._data.store
    coded_forms = store.coded_forms()
    blocks = [part.block for segment in store.list_segments() for part in segment.parts if part.block is not None]
    kept = [(block, block.form) for block in blocks if block.serial in coded_forms]
    try:
        for block, _ in kept:
            block.form = coded_forms[block.serial]
        report: MemoryReport = shard.report()
        return report
    finally:
        for block, raw in kept:
            block.form = raw


class _LocalMemory:
    """A local memory in an actor."""

    def __init__(self, *arguments: Any) -> None:
        self._memory = LocalReplayMemory(*arguments)

    def extend(self, *steps: Any) -> None:
        self._memory.extend(*steps)

    def sample(self, batch_size: int) -> Any:
        return self._memory.sample(batch_size)


class ActorSide:
    """A local memory of holdall in one Ray actor. `sample_ahead` requests batches ahead, as a loader does."""

    name = "plain actor"

    def __init__(self, recording: Recording, capacity: int) -> None:
        remote: Any = ray.remote
        self._actor = remote(num_cpus=0)(_LocalMemory).remote(
            recording.observation_space, recording.action_space, capacity
        )
        self.processes = [process_of(self._actor)]
        self._ahead: deque[Any] = deque()

    def arrange(self, steps: Sequence[Step], block: int) -> list[tuple[Any, ...]]:
        """Return the arguments of inserts: blocks of `block` steps."""
        return stacked(steps, block)

    def insert(self, arranged: list[tuple[Any, ...]], _block: int) -> None:
        """Insert. Every call returns when it is acknowledged."""
        for arguments in arranged:
            ray.get(self._actor.extend.remote(*arguments))

    def sample(self) -> Any:
        """Draw a batch, as tensors."""
        return _as_tensors(ray.get(self._actor.sample.remote(BATCH)))

    def sample_ahead(self) -> Any:
        """Return a batch that was requested earlier."""
        while len(self._ahead) <= PREFETCH:
            self._ahead.append(self._actor.sample.remote(BATCH))
        return _as_tensors(ray.get(self._ahead.popleft()))

    def close(self) -> None:
        """End the actor."""
        ray.kill(self._actor)


class TorchRLSide:
    """TorchRL's buffer in one Ray actor."""

    name = "torchrl"

    def __init__(self, capacity: int, prefetch: int | None = None) -> None:
        data = importlib.import_module("torchrl.data")
        self._tensordict = importlib.import_module("tensordict").TensorDict
        self.buffer = data.RayReplayBuffer(
            storage=partial(data.LazyTensorStorage, capacity),
            batch_size=BATCH,
            prefetch=prefetch,
            remote_config={"num_cpus": 0},
        )
        self.processes = [process_of(self.buffer._rb)]
        self._added = 0

    def arrange(self, steps: Sequence[Step], block: int) -> list[Any]:
        """Return the arguments of inserts: single steps, or blocks of `block` steps."""
        rows = []
        for number, step in enumerate(steps, self._added):
            told = {name: getattr(step, name) for name in FIELDS}
            told |= _named("obs", step.obs) | _named("next_obs", step.next_obs)
            rows.append(
                {name: torch.as_tensor(np.ascontiguousarray(part[0])) for name, part in told.items()}
                | {"number": torch.tensor(number)}
            )
        self._added += len(steps)
        if block == 1:
            return [self._tensordict(row, batch_size=[]) for row in rows]
        return [
            self._tensordict(
                {name: torch.stack([row[name] for row in some]) for name in some[0]}, batch_size=[len(some)]
            )
            for some in (rows[i : i + block] for i in range(0, len(rows), block))
        ]

    def insert(self, arranged: list[Any], block: int) -> None:
        """Insert. Every call returns when it is acknowledged."""
        act = self.buffer.add if block == 1 else self.buffer.extend
        for row in arranged:
            act(row)

    def sample(self) -> Any:
        """Draw a batch."""
        return self.buffer.sample()

    def close(self) -> None:
        """End the actor."""
        self.buffer.close()


def differing_rows(theirs: Any, ours: HoldallSide) -> int:
    """Count rows of a delivered TorchRL batch that differ in any bit from holdall's."""
    expected = ours.rows(theirs["number"].numpy())
    differs = np.zeros(BATCH, np.bool_)
    for name, mine in expected.items():
        pair = [np.ascontiguousarray(each.numpy()).reshape(BATCH, -1).view(np.uint8) for each in (mine, theirs[name])]
        differs |= (pair[0] != pair[1]).any(axis=1)
    return int(np.count_nonzero(differs))


def process_of(actor: Any) -> psutil.Process:
    """Return the process of an actor on this machine."""
    return psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


def unique_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the memory that only these processes use."""
    return sum(held_bytes(process.pid).unique for process in processes)


def cpu_seconds(processes: Sequence[psutil.Process] | None = None) -> float:
    """Return the CPU time that processes have used. None: this process."""
    used = 0.0
    for process in [psutil.Process()] if processes is None else processes:
        times = process.cpu_times()
        used += times.user + times.system
    return used


def servants() -> list[psutil.Process]:
    """Return Ray's own processes on this machine."""
    return [p for p in psutil.Process().children(recursive=True) if p.name() in {"raylet", "gcs_server"}]


def stacked(steps: Sequence[Step], block: int) -> list[tuple[Any, ...]]:
    """Return the arguments of `add`, or those of `extend` for blocks of `block` steps."""
    told = [(s.obs, s.action, s.reward, s.next_obs, s.terminated, s.truncated) for s in steps]
    if block == 1:
        return told
    return [tuple(_stack(part) for part in zip(*told[i : i + block], strict=True)) for i in range(0, len(told), block)]


def _as_tensors(batch: Any) -> Any:
    """Return a batch as tensors that share the memory of its arrays."""
    if isinstance(batch, dict):
        return {name: _as_tensors(part) for name, part in batch.items()}
    if isinstance(batch, np.ndarray):
        return torch.from_numpy(batch)
    return [_as_tensors(getattr(batch, name)) for name in (*FIELDS, "obs", "next_obs")]


def _leaves(observation: Any) -> dict[str, Any]:
    return observation if isinstance(observation, dict) else {"": observation}


def _named(prefix: str, observation: Any) -> dict[str, Any]:
    return {f"{prefix}.{name}" if name else prefix: leaf for name, leaf in _leaves(observation).items()}


def _stack(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {key: np.stack([part[key] for part in parts]) for key in parts[0]}
    return np.stack(parts)
