"""MemoryHandle: adds to a memory over shards, and draws from it, in any process of the cluster.

A handle cannot end the memory. A draw includes everything that the handle added before, except rows that the limiter
does not grant yet.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from holdall.batch import Batch, check_ids
from holdall.checks import require_count
from holdall.cluster.access import join_cluster, require_safe_cluster
from holdall.cluster.answer import BatchMaker
from holdall.cluster.calls import ask
from holdall.cluster.config import NAMESPACE, MemoryConfig
from holdall.cluster.learner import BatchRequest, Learner
from holdall.cluster.messages import ShardCounters, ShardStatus
from holdall.cluster.metrics import Gauges
from holdall.cluster.roster import find_roster
from holdall.cluster.writer import Writer
from holdall.delivery import Delivery, Loader, new_delivery
from holdall.errors import ArgumentError, ShardError
from holdall.report import MemoryReport
from holdall.sampling import Hindsight, Sampler, check_priorities, new_generator
from holdall.schema_json import schema_from_json

_ROSTER_S = 120.0
"""Seconds that `attach` waits for a roster that Ray restarts."""
_LOCK_S = 0.01
"""Seconds between checks whether the thread that holds the lock is waiting for the limiter."""


class MemoryHandle(Writer):
    """Adds to a memory over shards that another process made, and draws from it. See `holdall.ray.attach`.

    It has the methods of `holdall.ray.ReplayMemory`, except those that start, save or end shards. All methods may be
    called from any thread.

    Args:
        generator: Draws the shard of every row.
        device: Device that unpickled copies of this handle use.
        delivery: Makes the batches of this handle.
        seeds: Whether the generator also seeds the draws of shards. Otherwise each shard has its own generator.
    """

    _kind = "memory"

    def __init__(
        self,
        config: MemoryConfig,
        sampler: Sampler,
        generator: np.random.Generator,
        device: str | None,
        delivery: Delivery,
        *,
        seeds: bool,
    ) -> None:
        self.name = config.name
        self.sampler = sampler
        self.num_envs = int(config.schema_json["num_envs"])
        super().__init__(config, self.num_envs)
        self._device = device
        self._delivery = delivery
        settings = config.settings
        self._maker = BatchMaker(self.schema, delivery, settings.tuning)
        self._learner = Learner(
            self._members, self._maker, sampler, generator, settings.on_shard_loss, settings.tuning, seeds=seeds
        )
        Gauges("learner", memory=self.name).follow(self._measure)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name and the device. Unpickling attaches a new handle."""
        return functools.partial(attach, device=self._device), (self.name,)

    # ---------------------------------------------------------------- adding

    def writer(self, num_envs: int | None = None, spread: int | None = None) -> Writer:
        """Return a handle that adds transitions from any process. It can be pickled.

        Args:
            num_envs: Lanes of the writer. None: as many as the memory has.
            spread: Number of shards that the writer sends to. None: all. With many actors, pass 2 to limit the number
                of connections.
        """
        self._require_open()
        lanes = self.num_envs if num_envs is None else num_envs
        require_count("num_envs", lanes, 1)
        if spread is not None:
            require_count("spread", spread, 1)
        return Writer(self._config, lanes, spread)

    def flush(self) -> None:
        """Send all added transitions, and return when the shards have acknowledged them."""
        with self._lock:
            self._require_open()
            super().flush()

    def _flush_granted(self) -> None:
        """Flush the rows that the limiter grants now. It may grant the other rows only after this thread has drawn."""
        while not self._lock.acquire(timeout=_LOCK_S):
            if self._is_waiting:  # The thread that holds the lock is waiting for the limiter.
                return
        try:
            self._require_open()
            self._send(waits=False)
            self._streams.flush()
        finally:
            self._lock.release()

    # ---------------------------------------------------------------- drawing

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions, also from those that this process added before."""
        if type(batch_size) is not int or batch_size < 1:
            batch_size = require_count("batch_size", batch_size, 1)
        self._require_open()
        return self._delivery.receive(self._learner.finish(self._request_batch(batch_size)))

    def loader(self, batch_size: int, prefetch: int = 2) -> Loader:
        """Return an endless iterator over batches that are made ahead, see `holdall.ReplayMemory.loader`."""
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        self._require_open()
        self._maker.blocks.max_spare = max(self._maker.blocks.max_spare, prefetch + 3)

        def draw() -> Callable[[], Any]:
            return functools.partial(self._learner.finish, self._request_batch(batch_size))

        return Loader(draw, self._delivery.receive, prefetch, self._delivery.start)

    def _request_batch(self, batch_size: int) -> BatchRequest:
        """Send everything that the limiter grants, then request a batch."""
        self._flush_granted()
        self._learner.read_confirmations()
        self._learner.spread_highest()
        if self._limiter is not None:
            self._limiter.wait_for_samples(batch_size)
        return self._learner.start(batch_size)

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        wanted = check_ids(ids)
        self._flush_granted()
        return self._delivery.receive(self._learner.gather(wanted))

    # ---------------------------------------------------------------- updates

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set the priorities of transitions, see `holdall.ReplayMemory.update_priorities`.

        The shards have the priorities before they draw again. This call waits for them only if a priority is the
        highest so far, or if many updates are unconfirmed. If a shard refuses them, a later call raises the error.
        """
        self._require_open()
        checked_ids, values = check_priorities(self.sampler, ids, priorities)
        sampler: Any = self.sampler
        first_ids = sampler.check_update(checked_ids, values)
        self._flush_granted()
        self._learner.update_priorities(first_ids, values)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Raise ArgumentError. A restarted shard reads extras from its journal, as writers sent them."""
        raise ArgumentError(
            f"update of {sorted(columns)}: a memory over shards cannot rewrite extras. Use a holdall.ReplayMemory, or "
            "let the actors compute them."
        )

    # ---------------------------------------------------------------- size and accounting

    def __len__(self) -> int:
        """Return the number of transitions that can be sampled, over the shards that answer."""
        self._flush_granted()
        self._learner.read_confirmations(wait=True)
        return sum(counters.transitions for counters in self._members.refresh().values())

    @property
    def capacity(self) -> int:
        """Largest number of transitions that all shards together hold."""
        return self._config.shard_rows * len(self._members.numbers)

    @property
    def num_shards(self) -> int:
        """Number of shards, including those that do not answer."""
        return len(self._members.numbers)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is held. Only for a memory of one shard."""
        return self._require_one_shard().first_row

    @property
    def next_id(self) -> int:
        """Id of the next transition. Only for a memory of one shard."""
        return self._require_one_shard().next_row

    def shards(self) -> list[ShardStatus]:
        """Return the machine, the process and the size of every shard."""
        self._require_open()
        numbers = self._members.numbers
        statuses: dict[int, ShardStatus] = self._members.ask_all(numbers, lambda shard: shard.status.remote())
        return [statuses.get(number, ShardStatus(number, answers=False)) for number in numbers]

    def report(self) -> MemoryReport:
        """Return the bytes that all shards hold, field by field."""
        self._flush_granted()
        reports = self._members.ask_all(self._members.refresh(), lambda shard: shard.report.remote())
        return MemoryReport.added_up(reports.values(), self._maker.blocks.nbytes)

    def _require_one_shard(self) -> ShardCounters:
        """Return the counters of the only shard. Raise ArgumentError if there are several."""
        self._flush_granted()
        counters_by_shard = self._members.refresh()
        if self._members.numbers != [0]:
            raise ArgumentError(
                "first_id and next_id exist only for a memory of one shard, because every shard counts for itself. Use "
                "the ids of a batch."
            )
        if 0 not in counters_by_shard:
            raise ShardError("The only shard of the memory does not answer. Ray may be restarting it. Try again.")
        return counters_by_shard[0]

    def _measure(self) -> dict[str, float]:
        return {
            "coverage": 1 - len(self._members.lost) / max(1, self.num_shards),
            "losses": self._members.losses,
            "unacknowledged_bytes": self.unacknowledged_bytes,
            "credit_wait_seconds": self.waited_s,
        }


def attach(
    name: str,
    *,
    rank: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    sampler: Sampler | None = None,
    address: str | None = None,
) -> MemoryHandle:
    """Return a handle of a memory that another process of the cluster made.

    Args:
        name: Name of the memory, see `holdall.ray.ReplayMemory`.
        rank: Number of this learner among several. Each rank draws different rows, also if all use one `seed`. None: a
            number that no other learner has.
        seed: Seed of the draws. None: a different one every time.
        device: As for `holdall.ReplayMemory`.
        sampler: Needed if the memory has a `Hindsight`: the same one, because functions are not sent.
        address: Host and port of Ray's head, if this process has not joined a cluster. None: this machine's cluster.
    """
    if ray.is_initialized():
        require_safe_cluster()
    else:
        join_cluster(address, NAMESPACE)
    roster = find_roster(name)
    who = "The memory's roster"
    config: MemoryConfig = ask(roster.config.remote, who, _ROSTER_S)
    if sampler is None and not isinstance(config.sampler, Hindsight):
        sampler = config.sampler
    if sampler is None or type(sampler) is not type(config.sampler):
        kind = type(config.sampler).__name__
        raise ArgumentError(
            f"sampler ({type(sampler).__name__}) is not of the kind that the memory was made with. Pass {kind}(...) "
            "with the same settings."
        )
    if rank is None:
        rank = secrets.randbits(32) if seed is None else ask(roster.enroll.remote, who, _ROSTER_S)
    entropy = secrets.randbits(63) if seed is None else seed
    require_count("rank", rank, 0)
    delivery = new_delivery(schema_from_json(config.schema_json), device)
    handle = MemoryHandle(config, sampler, new_generator([entropy, rank]), device, delivery, seeds=True)
    handle._members.refresh()  # So that the first batch is drawn from all shards.
    return handle
