"""A draw becomes a batch: rows of all fields, brought together for the caller.

In:  draws.  Out: batches of arrays, or of tensors that share their memory.
The flow: `look_up` finds the rows under the memory's lock; `start`, `work` and `receive` make the batch without it.
Invariant: a batch belongs to the caller. Its memory is used again only when no array and no tensor of it is left.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.background import fork_safe, left
from holdall.batch import Batch, Draw, Goals, device_of_jax, import_torch
from holdall.errors import ArgumentError, DamageError
from holdall.native import OwnCall
from holdall.schema import Array, Bytes, Leaf, Schema, Tree
from holdall.storage import ALIGNMENT_BYTES, Kernels, Places, Rows, Store, bring_places, fresh_bytes

if TYPE_CHECKING:
    import torch

    from holdall.delivery.device_assembly import SlotDraw


_POOLED_BYTES = 1 << 16
"""Arrays below this are cheap to allocate; above it, fresh pages cost more than the copy."""
_POOLED_BLOCKS = 4
"""Blocks of one size that are kept: one in use, one being filled, two for latecomers."""
_POOLED_SIZES = 16
"""Sizes that are kept: a batch has one per large field, and batches of ever new sizes must not pile up."""


# ---------------------------------------------------------------- memory of batches


class BlockPool:
    """Memory for batches on the host: a block is handed out again when no array of it is left.

    Args:
        most_bytes: Most bytes that are kept.
    """

    def __init__(self, most_bytes: int = 1 << 62) -> None:
        self.most = _POOLED_BLOCKS
        self._most_bytes = most_bytes
        self._blocks_by_size: dict[int, list[_PooledBlock]] = {}
        self._lock: Any = fork_safe(threading.RLock())
        self._call = OwnCall()

    def take(self, nbytes: int) -> Bytes:
        """Return `nbytes` bytes, from an aligned address on, that nobody else can see."""
        if nbytes < _POOLED_BYTES:
            return fresh_bytes(nbytes)
        if self._lock._is_owned():
            if self._call.is_under_way:
                return fresh_bytes(nbytes)
            left(self._lock)  # this thread was interrupted in it
        call = self._call.begin()
        with self._lock:
            blocks = self._blocks_by_size[nbytes] = self._blocks_by_size.pop(nbytes, [])
            if len(self._blocks_by_size) > _POOLED_SIZES:
                del self._blocks_by_size[next(iter(self._blocks_by_size))]  # the size that was not used for longest
            for block in blocks:
                if block.user() is None:
                    break
            else:
                block = _PooledBlock(fresh_bytes(nbytes).data)
                if len(blocks) < self.most and self._kept_bytes() + nbytes <= self._most_bytes:
                    blocks.append(block)
            array = np.frombuffer(block.memory, np.uint8)  # every view of it refers to the array, not to the block
            block.user = weakref.ref(array)
        del call
        return array

    def arrays(self) -> list[Bytes]:
        """Return what is kept for the next batches."""
        with left(self._lock):
            return [np.asarray(block.memory) for blocks in self._blocks_by_size.values() for block in blocks]

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next batches."""
        with left(self._lock):
            return self._kept_bytes()

    def _kept_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._blocks_by_size.items())


class _PooledBlock:
    """A block, and a weak reference to the array that shows it."""

    __slots__ = ("memory", "user")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.user: Callable[[], Any] = lambda: None


class ObservationAssembler:
    """Copies windows of slices into pooled memory: observations and next observations of a batch."""

    def __init__(self, kernels: Kernels, most_staged_bytes: int, threads: int | None = None) -> None:
        self.staging = BlockPool(most_staged_bytes)
        self._threads = kernels.new_pool(threads)
        self._kernels = kernels

    def assemble(
        self, places: Places, field: int, leaf: Leaf, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Array, Array]:
        """Build observation and next observation of one field for every place; one that is not wanted stays empty."""
        rows = len(places.segment)
        nbytes = rows * leaf.nbytes
        second = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if all(wanted) else 0
        both = self.staging.take(second + nbytes)
        ends = (both[:nbytes], both[second:])
        obs, next_obs = (
            end.reshape(rows, leaf.nbytes) if want else None for end, want in zip(ends, wanted, strict=True)
        )
        self.fill(places, field, obs, next_obs)
        shape = (rows, *leaf.shape)
        return ends[0].view(leaf.dtype).reshape(shape), ends[1].view(leaf.dtype).reshape(shape)

    def fill(self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None) -> None:
        """Write observation and next observation of one field, as rows of bytes; what is None is not wanted."""
        if len(places.segment):
            self._kernels.gather(places, field, obs, next_obs, self._threads)

    def complete(self, rows: Rows, leaves: Sequence[Leaf]) -> Rows:
        """Return rows with the observations of all leaves, large ones too."""
        places = rows.places
        if places is None:
            return rows
        if places.awaits_files:
            bring_places(places)
        large = {leaf: self.assemble(places, field, leaves[leaf]) for field, leaf in enumerate(rows.large)}
        return rows._replace(small=rows.small | large, large=(), places=None)

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.dismiss()


# ---------------------------------------------------------------- where batches go


class Delivery:
    """Returns arrays as they are, or as tensors on a device."""

    def __init__(self, device: str | None, leaves: list[Leaf]) -> None:
        self.torch_device: torch.device | None = None  # None for arrays
        self.torch: Any = None  # the module, if tensors are asked for
        self.is_jax = device == "jax"
        if self.is_jax:
            device = device_of_jax()
        if device is None:
            return
        self.torch = import_torch()
        try:
            self.torch_device = self.torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"device ({device}) is none that torch knows ({error}); use 'cpu' or 'cuda', or None for NumPy arrays"
            ) from error
        if self.torch_device.type == "cuda" and not self.torch.cuda.is_available():
            raise ArgumentError(
                f"device ({device}): torch finds no CUDA device here; use 'cpu', or None for NumPy arrays"
            )
        for leaf in leaves:
            self.require(leaf)

    @classmethod
    def of(cls, device: str | None, store_device: str | None, leaves: list[Leaf]) -> Delivery:
        """Deliver to the device that the store is on, unless none was named for it."""
        if store_device is not None and device is not None and device != store_device:
            raise ArgumentError(
                f"store_device ({store_device}) and device ({device}) differ; batches are made where the store is, so "
                "leave device out"
            )
        return cls(device if store_device is None else store_device, leaves)

    @property
    def is_remote(self) -> bool:
        """Whether the device has memory of its own, so that batches have to be sent there."""
        return self.torch_device is not None and self.torch_device.type == "cuda"

    def hand_over(self, array: Array) -> Any:
        """Return the array, or a tensor that shares its memory or is its copy on the device."""
        if self.torch_device is None:
            return array
        tensor = self.torch.from_numpy(array)
        return tensor if self.torch_device.type == "cpu" else tensor.to(self.torch_device)

    def require(self, leaf: Leaf) -> None:
        """Refuse a leaf that cannot be handed over."""
        if self.torch_device is None:
            return
        try:
            self.torch.from_numpy(np.empty(0, leaf.dtype))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"device ({self.torch_device}): torch has no dtype for {leaf.name or 'the space'} "
                f"({leaf.dtype}); use device=None for NumPy arrays"
            ) from error


# ---------------------------------------------------------------- batches


class MadeBatch(NamedTuple):
    """A batch that a device was asked to put together, and the event behind which it is there.

    The event is None if the consumer's own stream does it.
    """

    batch: Batch
    ready: Any


class DrawnRows(NamedTuple):
    """All that a draw needs of the store, found in one go."""

    rows: Rows  # of the ids
    last: Rows | None  # of the last ids, if they are others
    outcomes: Rows | None  # of the transitions that become goals
    made: MadeBatch | None = None  # the batch itself, but for its goals, if a device puts it together already

    @classmethod
    def of(cls, draw: Draw, store: Store, take: Callable[[int], Bytes]) -> DrawnRows:
        """Read the rows of a draw into memory that `take` returns; raise if one id is not held."""
        return cls(
            store.read(draw.ids.reshape(-1), take),
            None if draw.last_ids is None else store.read(draw.last_ids.reshape(-1), take),
            None if draw.goals is None else store.read(draw.goals.ids, take),
        )

    @classmethod
    def of_made(cls, batch: Batch, ready: Any = None) -> DrawnRows:
        """Return nothing but a batch: no row is needed any more."""
        return cls(None, None, None, MadeBatch(batch, ready))  # type: ignore[arg-type]  # see above

    def fetch(self) -> None:
        """Fetch what will be read of files that are still on their way here."""
        if self.rows.places is None:
            return
        for rows in (self.rows, self.last, self.outcomes):
            if rows is not None and rows.places is not None and rows.places.awaits_files:
                bring_places(rows.places)


class BatchJob:
    """A batch that was drawn and looked up, and is not put together yet."""

    is_quick = False
    """Whether `work` only asks a device for something, which takes less time than to wake a thread for it."""

    def __init__(self, make: Callable[[], Batch]) -> None:
        self._make = make
        self._batch: Batch | None = None

    def work(self) -> None:
        """Do what takes long, in any thread."""
        self._batch = self._make()

    def receive(self) -> Batch:
        """Return the batch to the thread that will use it."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise DamageError("a batch was received before it was made; report this")
        return batch


class ReadyJob(BatchJob):
    """A batch whose rows are on their way already: it is made when it is received."""

    is_quick = True

    def work(self) -> None:
        """See `BatchJob`."""

    def receive(self) -> Batch:
        """See `BatchJob`."""
        return self._make()


class Batches(ABC):
    """Makes batches of one memory's transitions."""

    def draw(self, sampler: Any, count: int, generator: np.random.Generator, store: Store) -> Batch | None:
        """Draw and make a batch in one step, where that can be done; under the memory's lock."""
        return None

    takes_arrays = False
    """Whether `of_arrays` makes batches."""

    def of_arrays(self, draw: Draw, arrays: tuple[Array, ...]) -> Batch:
        """Make a batch of what `BatchReader.gather` returned for the ids of a draw, which says nothing else of rows."""
        raise NotImplementedError

    def draw_slots(self, rows: SlotDraw, count: int, store: Store, *, ahead: bool) -> BatchJob | None:
        """The same for rows that an adapter draws, see `DeviceBatches`."""
        return None

    @abstractmethod
    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """Find all that a draw needs; under the memory's lock.

        Args:
            ahead: Whether the batch is made before it is asked for, so that a device does so beside its other work.
        """

    @abstractmethod
    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """Begin a batch; without the lock, in the thread that will use it."""

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """Make a batch at once."""
        (job := self.start(draw, drawn)).work()
        return job.receive()

    def rewritten(self, ids: NDArray[np.int64]) -> None:  # noqa: B027  most read the store itself
        """Take note that extras of some transitions were written again; under the memory's lock."""

    @abstractmethod
    def keep(self, batches: int) -> None:
        """Keep memory for so many batches in use, so that none of them needs new memory."""

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory on the host."""
        return 0

    def close(self) -> None:  # noqa: B027  most have nothing of their own
        """End the threads, and release what is pinned."""


class BatchForm:
    """Puts arrays or tensors, one a leaf, into the nesting of a schema's spaces."""

    def __init__(self, schema: Schema) -> None:
        self._obs, self._action, self._extras = map(_nesting, (schema.observation, schema.action, schema.extras))

    def batch(self, leaves: Sequence[list[Any]], reward: Any, *rest: Any, kind: type[Batch] = Batch) -> Batch:
        """Make a batch.

        Args:
            leaves: Of observations, actions, next observations and extras.
            rest: How transitions ended (terminated, truncated), ids, weights, and what else there is, see `Batch`.
        """
        obs, action, next_obs, extras = leaves
        terminated, truncated, *others = rest
        observed = self._obs(obs), self._action(action), reward, self._obs(next_obs)
        return kind(*observed, terminated, truncated, self._extras(extras), *others)


def _nesting(tree: Tree) -> Callable[[list[Any]], Any]:
    """Return what puts one array a leaf into a space's nesting; quicker than the general way, where there is one."""
    if isinstance(tree.structure, int):
        return itemgetter(tree.structure)
    keys = tree.keys
    return tree.build if keys is None else lambda found: dict(zip(keys, found, strict=True))


def goal_leaves(schema: Schema, goals: Goals) -> tuple[int, int]:
    """Return which leaves of an observation show what was achieved, and the goal."""
    keys = schema.observation.keys or ()
    for key in (goals.achieved_key, goals.desired_key):
        if key not in keys:
            raise ArgumentError(
                f"sampler: hindsight needs the key {key!r}, but the observation space has {list(keys)}; name the keys "
                "with achieved_key and desired_key"
            )
    return keys.index(goals.achieved_key), keys.index(goals.desired_key)


def rewards_for(schema: Schema, goals: Goals, achieved: Array, goal: Array, extras: list[Array]) -> Array:
    """Ask the caller's function for the rewards of rows with other goals."""
    rewards = np.asarray(goals.reward_fn(achieved, goal.copy(), schema.extras.build(extras)))
    if rewards.shape != goals.rows.shape:
        raise ArgumentError(
            f"reward_fn returned an array of shape {rewards.shape} for {len(goals.rows)} rows; return one reward a row"
        )
    return rewards


_ByLeaf = dict[int, Array] | list[Array]


class HostBatches(Batches):
    """Makes batches in arrays, and hands them over as they are or as tensors."""

    def __init__(self, schema: Schema, assembler: ObservationAssembler, delivery: Delivery) -> None:
        self._schema, self._form = schema, BatchForm(schema)
        self._assembler = assembler
        self._delivery = delivery

    takes_arrays = True

    def of_arrays(self, draw: Draw, arrays: tuple[Array, ...]) -> Batch:
        """See `Batches`."""
        given = [self._delivery.hand_over(array) for array in (*arrays, draw.weights)]
        reward = len(self._schema.action.leaves)
        observed = reward + 3 + len(self._schema.extras.leaves)
        return self._form.batch(
            (given[observed:-1:2], given[:reward], given[observed + 1 : -1 : 2], given[reward + 3 : observed]),
            *given[reward : reward + 3], draw.ids, given[-1],
        )  # fmt: skip

    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """See `Batches`."""
        return DrawnRows.of(draw, store, self._assembler.staging.take)

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`."""
        return BatchJob(partial(self.make, draw, drawn))

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """Copy the large fields, which takes no lock, and make the batch."""
        drawn.fetch()
        rows, last = drawn.rows, drawn.last or drawn.rows
        pairs = [self.observation_pair(drawn, leaf) for leaf in range(len(self._schema.observation.leaves))]
        obs, next_obs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        reward = self.relabel_goals(draw, drawn, obs, next_obs)
        hand_over = self._delivery.hand_over
        deliver = hand_over if draw.ids.ndim == 1 else self._in_shape(draw.ids.shape)
        leaves = [[deliver(array) for array in arrays] for arrays in (obs, rows.action, next_obs, rows.extras)]
        numbers = [deliver(array) for array in (reward, last.terminated, last.truncated)]
        of_draw = [None if array is None else hand_over(array) for array in (draw.weights, draw.discount, draw.mask)]
        return self._form.batch(leaves, *numbers, draw.ids, *of_draw)

    def _in_shape(self, leading: tuple[int, ...]) -> Callable[[Array], Any]:
        """Return what hands rows over as sequences."""
        return lambda array: self._delivery.hand_over(array.reshape(*leading, *array.shape[1:]))

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        staging = self._assembler.staging
        staging.most = max(staging.most, batches + 1)

    def observation_pair(self, drawn: DrawnRows, leaf: int) -> tuple[Array, Array]:
        """Return observations and next observations of one leaf."""
        if drawn.last is None:
            return self._pair(drawn.rows, leaf, wanted=(True, True))
        first = self._pair(drawn.rows, leaf, wanted=(True, False))[0]
        return first, self._pair(drawn.last, leaf, wanted=(False, True))[1]

    def _pair(self, rows: Rows, leaf: int, wanted: tuple[bool, bool]) -> tuple[Array, Array]:
        """Return observation and next observation of one leaf; one that is not wanted may be empty."""
        if leaf in rows.small or rows.places is None:
            return rows.small[leaf]
        field = rows.large.index(leaf)
        return self._assembler.assemble(rows.places, field, self._schema.observation.leaves[leaf], wanted)

    def relabel_goals(self, draw: Draw, drawn: DrawnRows, obs: _ByLeaf, next_obs: _ByLeaf) -> Array:
        """Return the rewards of a draw; put its other goals, if it has any, into rows that are not handed over yet."""
        reward = drawn.rows.reward if draw.reward is None else draw.reward
        goals = draw.goals
        if goals is None or drawn.outcomes is None or not goals.rows.size:
            return reward
        achieved, desired = goal_leaves(self._schema, goals)
        goal = self._pair(drawn.outcomes, achieved, wanted=(False, True))[1]
        for observed in (obs, next_obs):
            observed[desired][goals.rows] = goal
        extras = [array[goals.rows] for array in drawn.rows.extras]
        reward[goals.rows] = rewards_for(self._schema, goals, next_obs[achieved][goals.rows], goal, extras)
        return reward
