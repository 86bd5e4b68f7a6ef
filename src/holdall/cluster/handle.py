"""A handle of a memory over shards: what learners and feeders call, in whatever process they are.

In:  the name of a memory.  Out: batches, drawn with a generator of this handle's own; transitions, sent to the shards.
Invariant: a handle has no right over the memory's life. What it added and updated before is in what it draws.
"""

from __future__ import annotations

import functools
import secrets
import threading
from typing import Any

import numpy as np
import ray

from holdall.batch import Batch, as_ids
from holdall.cluster.answer import Deliverer
from holdall.cluster.learner import BatchesAhead, Drawing, together
from holdall.cluster.protocol import Cluster, ShardCounters, ShardStatus, asked
from holdall.cluster.roster import NAMESPACE, MemoryTerms, roster_of, wait_for_grant
from holdall.cluster.writer import Writer
from holdall.delivery import Loader
from holdall.errors import ArgumentError
from holdall.native import chosen_kernels
from holdall.ray_access import join_cluster, require_safe_cluster
from holdall.ray_metrics import Gauges
from holdall.report import MemoryReport
from holdall.sampling import ComposedSampler, Hindsight, Sampler, checked_priorities, generator_of
from holdall.schema import require_count, schema_of
from holdall.storage import sliced_leaves

_ROSTER_S, _LOCK_S = 120.0, 0.01
_MOST_AT_ONCE = 8
_WAITING_BYTES = 64 * 2**20
"""What batches may take that `sample` has drawn with another, and that wait: fewer are then drawn at once."""


class MemoryHandle(Writer):
    """A memory over shards that another process made, see `holdall.ray.attach`: a writer that draws, too.

    It has the calls of `holdall.ray.ReplayMemory`, but for those that begin, save or end shards. All methods may be
    called from any thread.

    Args:
        generator: Draws which shard a row comes from.
        seeds: Whether it seeds the draws of shards, too; else each draws with a generator of its own.
    """

    _what = "memory"

    def __init__(
        self, terms: MemoryTerms, sampler: Sampler, generator: np.random.Generator, device: str | None,
        *, seeds: bool,
    ) -> None:  # fmt: skip
        self.num_envs, self.name, self.sampler = schema_of(terms.words).num_envs, terms.name, sampler
        super().__init__(terms, self.num_envs)
        self._deliverer = Deliverer(self.schema, chosen_kernels(), device, sliced_leaves(self.schema))
        self._device = device
        self._asked: tuple[int, BatchesAhead] | None = None  # by `sample`: rows of a batch, and what draws them
        self._asking = threading.Lock()
        self._cluster = Cluster(roster_of(terms.name), terms.patience_s)
        self._drawing = Drawing(
            self._cluster, self._deliverer, self.sampler, generator, terms.on_shard_loss, seeds=seeds
        )
        Gauges("learner", memory=self.name).follow(self._figures)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name: a copy is a handle of its own, in whatever process it is."""
        return functools.partial(attach, device=self._device), (self.name,)

    def writer(self, num_envs: int | None = None, spread: int | None = None) -> Writer:
        """Return a handle that feeds the memory from any process; it can be pickled.

        Args:
            num_envs: Its lanes, if not as many as the memory's.
            spread: Shards that it sends to; None: all. With many actors, 2 keep connections few.
        """
        self._require_open()
        lanes = self.num_envs if num_envs is None else num_envs
        require_count("num_envs", lanes, 1)
        if spread is not None:
            require_count("spread", spread, 1)
        return Writer(self._terms, lanes, spread)

    def add_as_is(self, *_: Any) -> bool:
        """Say that there is no short way to add; for adapters."""
        return False

    add_at_once = add_as_is

    def flush(self) -> None:
        """Return when the shards have acknowledged all that `add` was given."""
        with self._lock:
            self._require_open()
            super().flush()
            self._note_streams()

    def _flush_granted(self) -> None:
        """Flush what the limiter grants now. What it does not may wait for the draws of this very thread."""
        while not self._lock.acquire(timeout=_LOCK_S):
            if any(group.is_waiting for group in self._groups):  # in another thread, which has the lock
                return
        try:
            self._require_open()
            for group in self._groups:
                group.flush(waits=False)
            self._note_streams()
        finally:
            self._lock.release()

    def _note_streams(self) -> None:
        for stream in self._streams:
            if stream.counters is not None:
                self._cluster.note(stream.number, stream.counters)

    def sample(self, batch_size: int) -> Batch:
        """Draw `batch_size` transitions; what this process added before is among those that can be drawn.

        From four shards on, all on this machine, some batches are drawn at once while the memory does not change, so
        that fewer calls are made. One that waits is handed out only if no shard has changed since.
        """
        if type(batch_size) is not int or batch_size < 1:
            batch_size = require_count("batch_size", batch_size, 1)
        self._require_open()
        with self._asking:
            if self._asked is None or self._asked[0] != batch_size:
                self._asked = batch_size, self._ahead(batch_size, 0)
            ahead = self._asked[1]
        return self._drawing.finish(ahead.next())

    def loader(self, batch_size: int, prefetch: int = 2) -> Loader:
        """Return an endless iterator over batches asked for ahead of time, see `holdall.ReplayMemory.loader`.

        From four shards on some batches are drawn at once, so that fewer calls are made: each is then drawn at most,
        and no longer exactly, `prefetch` batches before it is handed out, or the memory has not changed since. With a
        limiter, and with a sampler that follows episodes, each is drawn alone.
        """
        require_count("batch_size", batch_size, 1)
        require_count("prefetch", prefetch, 0)
        self._require_open()
        ahead = self._ahead(batch_size, prefetch)
        return Loader(ahead, max(0, prefetch - ahead.batches + 1))

    def _ahead(self, count: int, prefetch: int) -> BatchesAhead:
        """Return what draws batches, several at once where that may be; those that follow episodes may be large."""
        batches = most = 1
        if self._terms.limit is None and not isinstance(self.sampler, ComposedSampler):
            waiting = _WAITING_BYTES // max(1, 2 * count * sum(leaf.nbytes for leaf in self.schema.observation.leaves))
            batches = together(prefetch, self.num_shards)
            most = min(_MOST_AT_ONCE, 1 + waiting) if together(_MOST_AT_ONCE, self.num_shards) > 1 else 1
        self._deliverer.keep(most + prefetch + 2)
        draw = functools.partial(self._drawing.start, count)
        return BatchesAhead(self._drawing, draw, batches, most, functools.partial(self._settle, count))

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""
        wanted = as_ids(ids)
        self._flush_granted()
        return self._drawing.gather(wanted)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set how much it would pay to see transitions again, see `holdall.ReplayMemory.update_priorities`.

        It does not wait for the shards, which have it before they draw again. What a shard refuses is raised by a later
        call.
        """
        self._require_open()
        drawn, found = checked_priorities(self.sampler, ids, priorities)
        sampler: Any = self.sampler  # one with priorities
        wanted = sampler.require(drawn, found)
        self._flush_granted()
        self._drawing.prioritize(wanted, found)

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Refuse: shards hold what writers sent, and a restarted one reads that from its journal again."""
        raise ArgumentError(
            f"update of {sorted(columns)}: a memory over shards does not rewrite extras; keep them in a "
            "holdall.ReplayMemory, or have the actors compute them"
        )

    def __len__(self) -> int:
        """Count the transitions that can be sampled, over the shards that answer."""
        self._flush_granted()
        self._drawing.hear(all_of_them=True)  # so that the shards say what they weigh with them
        return sum(counters.transitions for counters in self._cluster.refresh().values())

    @property
    def capacity(self) -> int:
        """Most transitions that are held, over all shards."""
        return self._terms.shard_rows * len(self._cluster.numbers)

    @property
    def num_shards(self) -> int:
        """Shards, those that do not answer now among them."""
        return len(self._cluster.numbers)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held; of a memory of one shard."""
        return self._only_counters().first_row

    @property
    def next_id(self) -> int:
        """Id of the next transition; of a memory of one shard."""
        return self._only_counters().next_row

    def shards(self) -> list[ShardStatus]:
        """Say of every shard where it runs and what it holds; `holdall watch PID` there shows more of one."""
        self._require_open()
        numbers = self._cluster.numbers
        found = self._cluster.ask_all(numbers, "process")
        return [ShardStatus(number, number in found, **found.get(number, {})) for number in numbers]

    def report(self) -> MemoryReport:
        """Account for the bytes that all shards hold, field by field."""
        self._flush_granted()
        found = self._cluster.ask_all(self._cluster.refresh(), "report")
        return MemoryReport.added_up(found.values(), self._deliverer.nbytes)

    def _only_counters(self) -> ShardCounters:
        self._flush_granted()
        known = self._cluster.refresh()
        if list(known) != [0]:
            raise ArgumentError(
                "first_id and next_id are asked of a memory of several shards, each of which counts for itself; use "
                "the ids of a batch"
            )
        return known[0]

    def _settle(self, count: int) -> None:
        """Return when what this process added and updated has reached the shards, and the limiter grants a draw."""
        self._flush_granted()
        self._drawing.hear()
        self._drawing.level()
        if (limit := self._terms.limit) is not None:
            wait_for_grant(limit, "sample", count, self._cluster.ask_roster)

    def _figures(self) -> dict[str, float]:
        return {
            "coverage": 1 - len(self._cluster.lost) / max(1, self.num_shards),
            "losses": self._cluster.losses,
            "unacknowledged_bytes": self.unacknowledged_bytes,
            "credit_wait_seconds": self.waited_s,
        }


def attach(
    name: str, *, rank: int | None = None, seed: int | None = None, device: str | None = None,
    sampler: Sampler | None = None, address: str | None = None,
) -> MemoryHandle:  # fmt: skip
    """Return a handle of a memory that another process of the cluster made.

    Args:
        name: See `holdall.ray.ReplayMemory`; `memory.name` has it.
        rank: Which of several learners this is. Each draws with generators of its own, also if all have one `seed`;
            None: one that no other has.
        seed: Seeds these generators; None: they are different every time.
        device: As for `holdall.ReplayMemory`.
        sampler: Of a memory whose sampler is a `Hindsight`: the same one, as functions of rewards stay where they are.
        address: Host and port of Ray's head, if this process has not joined a cluster; None: that of this machine.
    """
    if ray.is_initialized():
        require_safe_cluster()
    else:
        join_cluster(address, NAMESPACE)
    roster = roster_of(name)
    terms: MemoryTerms = asked(roster, "terms", patience_s=_ROSTER_S, timeout_s=None)
    known = terms.sampler
    chosen = known if sampler is None and not isinstance(known, Hindsight) else sampler
    if chosen is None or type(chosen) is not type(known):
        raise ArgumentError(
            f"sampler ({type(chosen).__name__}) is not of the kind that the memory was made with; pass "
            f"{type(known).__name__}(...) with the same settings"
        )
    if rank is None:
        rank = secrets.randbits(32)
        if seed is not None:
            rank = asked(roster, "enroll", patience_s=_ROSTER_S, timeout_s=None)
    entropy = secrets.randbits(63) if seed is None else seed
    require_count("rank", rank, 0)
    handle = MemoryHandle(terms, chosen, generator_of([entropy, rank]), device, seeds=True)
    handle._cluster.refresh()  # so that the first batch is drawn from all shards
    return handle
