"""A draw becomes a batch: rows of all fields, brought together for the caller.

In:  draws.  Out: batches of arrays, or of tensors that share their memory.
The flow: `look_up` finds the rows under the memory's lock; `start`, `work` and `receive` make the batch without it.
Invariant: a batch belongs to the caller. Its memory is used again only when no array and no tensor of it is left.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.background import fork_safe, left
from holdall.batch import Batch, Draw, Goals, device_of_jax, import_torch
from holdall.errors import ArgumentError, DamageError
from holdall.schema import Array, Bytes, Leaf, Schema
from holdall.storage import ALIGNMENT_BYTES, Kernels, Places, Rows, Store, bring_places, fresh_bytes

if TYPE_CHECKING:
    import torch

    from holdall.delivery.device_assembly import MadeBatch, SlotDraw
    from holdall.delivery.device_store import DeviceSnapshot, PinnedSnapshot


_POOLED_BYTES = 1 << 16
"""Arrays below this are cheap to allocate; above it, fresh pages cost more than the copy."""
_POOLED_BLOCKS = 4
"""Blocks of one size that are kept: one in use, one being filled, two for latecomers."""
_POOLED_SIZES = 16
"""Sizes that are kept: a batch has one per large field, and batches of ever new sizes must not pile up."""


# ---------------------------------------------------------------- memory of batches


class BlockPool:
    """Memory for batches: a block is handed out again when nothing refers to it any more.

    Args:
        allocate: Returns a block of so many bytes.
        own: Returns an object that lives as long as any part of a block is used.
        see: Returns what a caller sees of a block, given that object.
        least_bytes: Smaller blocks are not kept, and are arrays on the host.
        most_bytes: Most bytes that are kept.
    """

    def __init__(
        self,
        allocate: Callable[[int], Any],
        own: Callable[[Any], Any],
        see: Callable[[Any], Any],
        least_bytes: int = 0,
        most_bytes: int = 1 << 62,
    ) -> None:
        self.most = _POOLED_BLOCKS
        self._allocate = allocate
        self._own = own
        self.see = see
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._blocks_by_size: dict[int, list[_PooledBlock]] = {}
        self._lock: Any = fork_safe(threading.RLock())

    def take(self, nbytes: int) -> Any:
        """Return `nbytes` bytes, from an aligned address on, that nobody else can see."""
        return fresh_bytes(nbytes) if nbytes < self._least_bytes else self.see(self.claim(nbytes))

    def claim(self, nbytes: int) -> Any:
        """Return the user of `nbytes` bytes: `see` shows them, as long as the user is referred to."""
        if self._lock._is_owned():  # this thread was interrupted in it
            left(self._lock)
        with self._lock:
            blocks = self._blocks_by_size[nbytes] = self._blocks_by_size.pop(nbytes, [])
            if len(self._blocks_by_size) > _POOLED_SIZES:
                del self._blocks_by_size[next(iter(self._blocks_by_size))]  # the size that was not used for longest
            for block in blocks:
                if block.user() is None:
                    user = self._own(block.memory)
                    block.user = weakref.ref(user)
                    return user
            memory = self._allocate(nbytes)
            user = self._own(memory)
            kept = sum(size * len(pooled) for size, pooled in self._blocks_by_size.items())
            if len(blocks) < self.most and kept + nbytes <= self._most_bytes:
                blocks.append(_PooledBlock(memory, weakref.ref(user)))
            return user

    def arrays(self) -> list[Bytes]:
        """Return what a pool on the host keeps for the next batches."""
        with left(self._lock):
            return [np.asarray(block.memory) for blocks in self._blocks_by_size.values() for block in blocks]

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next batches."""
        with left(self._lock):
            return sum(size * len(blocks) for size, blocks in self._blocks_by_size.items())


class _PooledBlock:
    """A block, and a weak reference to what keeps it in use."""

    __slots__ = ("memory", "user")

    def __init__(self, memory: Any, user: weakref.ref[Any]) -> None:
        self.memory = memory
        self.user = user


def host_pool(most_bytes: int = 1 << 62) -> BlockPool:
    """Make a pool of arrays on the host."""
    return BlockPool(aligned_block, view_array, view_itself, _POOLED_BYTES, most_bytes)


def aligned_block(nbytes: int) -> memoryview:
    """Allocate bytes on the host from an aligned address on."""
    return fresh_bytes(nbytes).data


def view_array(block: memoryview) -> Bytes:
    """Return a block as a new array: every view of the array refers to the array itself, not to the block."""
    return np.frombuffer(block, np.uint8)


def view_itself(array: Bytes) -> Bytes:
    """Return what keeps a block in use: an array shows it, too."""
    return array


class ObservationAssembler:
    """Copies windows of slices into pooled memory: observations and next observations of a batch."""

    def __init__(self, kernels: Kernels, most_staged_bytes: int, threads: int | None = None) -> None:
        self.staging = host_pool(most_staged_bytes)
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


class DrawnRows(NamedTuple):
    """All that a draw needs of the store, found in one go."""

    rows: Rows  # of the ids
    last: Rows | None  # of the last ids, if they are others
    outcomes: Rows | None  # of the transitions that become goals
    on_device: DeviceSnapshot | None = None  # where the slices are on a device
    pinned: PinnedSnapshot | None = None  # where a device may read them on the host
    made: MadeBatch | None = None  # the batch itself, if the device was told to put it together already

    @classmethod
    def of(cls, draw: Draw, store: Store, take: Callable[[int], Bytes]) -> DrawnRows:
        """Read the rows of a draw into memory that `take` returns; raise if one id is not held."""
        return cls(
            store.read(draw.ids.reshape(-1), take),
            None if draw.last_ids is None else store.read(draw.last_ids.reshape(-1), take),
            None if draw.goals is None else store.read(draw.goals.ids, take),
        )

    def fetch(self) -> None:
        """Fetch what will be read of files that are still on their way here."""
        if self.rows.places is None:
            return
        for rows in (self.rows, self.last, self.outcomes):
            if rows is not None and rows.places is not None and rows.places.awaits_files:
                bring_places(rows.places)


class BatchJob(Protocol):
    """A batch that was drawn and looked up, and is not put together yet."""

    is_quick: bool
    """Whether `work` only asks a device for something, which takes less time than to wake a thread for it."""

    def work(self) -> None:
        """Do what takes long, in any thread."""

    def receive(self) -> Batch:
        """Return the batch to the thread that will use it."""


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

    @abstractmethod
    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """Make a batch at once."""

    def rewritten(self, ids: NDArray[np.int64]) -> None:  # noqa: B027  most read the store itself
        """Take note that extras of some transitions were written again; under the memory's lock."""

    @abstractmethod
    def keep(self, batches: int) -> None:
        """Keep memory for so many batches in use, so that none of them needs new memory."""

    @property
    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory on the host."""

    @abstractmethod
    def close(self) -> None:
        """End the threads, and release what is pinned."""


_ByLeaf = dict[int, Array] | list[Array]


class HostBatches(Batches):
    """Makes batches in arrays, and hands them over as they are or as tensors."""

    def __init__(self, schema: Schema, assembler: ObservationAssembler, delivery: Delivery) -> None:
        self._schema = schema
        self._assembler = assembler
        self._delivery = delivery

    takes_arrays = True

    def of_arrays(self, draw: Draw, arrays: tuple[Array, ...]) -> Batch:
        """See `Batches`."""
        schema, hand_over = self._schema, self._delivery.hand_over
        given = [hand_over(array) for array in arrays]
        reward = len(schema.action.leaves)
        observed = reward + 3 + len(schema.extras.leaves)
        return Batch(
            schema.observation.build(given[observed::2]), schema.action.build(given[:reward]), given[reward],
            schema.observation.build(given[observed + 1 :: 2]), given[reward + 1], given[reward + 2],
            schema.extras.build(given[reward + 3 : observed]), draw.ids, hand_over(draw.weights),
        )  # fmt: skip

    def look_up(self, draw: Draw, store: Store, *, ahead: bool = False) -> DrawnRows:
        """See `Batches`."""
        return DrawnRows.of(draw, store, self._assembler.staging.take)

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`."""
        return HostBatchJob(partial(self.make, draw, drawn))

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """Copy the large fields, which takes no lock, and make the batch."""
        drawn.fetch()
        schema, rows = self._schema, drawn.rows
        last = drawn.last or rows
        pairs = [self.observation_pair(drawn, leaf) for leaf in range(len(schema.observation.leaves))]
        obs, next_obs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        reward = self.relabel_goals(draw, drawn, obs, next_obs)
        hand_over = self._delivery.hand_over
        deliver = hand_over if draw.ids.ndim == 1 else self._in_shape(draw.ids.shape)
        return Batch(
            obs=schema.observation.build([deliver(array) for array in obs]),
            action=schema.action.build([deliver(array) for array in rows.action]),
            reward=deliver(reward),
            next_obs=schema.observation.build([deliver(array) for array in next_obs]),
            terminated=deliver(last.terminated),
            truncated=deliver(last.truncated),
            extras=schema.extras.build([deliver(array) for array in rows.extras]),
            ids=draw.ids,
            weights=hand_over(draw.weights),
            discount=None if draw.discount is None else hand_over(draw.discount),
            mask=None if draw.mask is None else hand_over(draw.mask),
        )

    def _in_shape(self, leading: tuple[int, ...]) -> Callable[[Array], Any]:
        """Return what hands rows over as sequences."""
        return lambda array: self._delivery.hand_over(array.reshape(*leading, *array.shape[1:]))

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        staging = self._assembler.staging
        staging.most = max(staging.most, batches + 1)

    @property
    def pinned_bytes(self) -> int:
        """See `Batches`."""
        return 0

    def close(self) -> None:
        """Do nothing: threads and memory are the assembler's."""

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

    def has_goals_among(self, draw: Draw, leaves: Collection[int]) -> bool:
        """Whether a draw puts other goals into one of some leaves."""
        goals = draw.goals
        return goals is not None and any(self._leaf(k) in leaves for k in (goals.achieved_key, goals.desired_key))

    def relabel_goals(self, draw: Draw, drawn: DrawnRows, obs: _ByLeaf, next_obs: _ByLeaf) -> Array:
        """Return the rewards of a draw; put its other goals, if it has any, into rows that are not handed over yet."""
        reward = drawn.rows.reward if draw.reward is None else draw.reward
        goals = draw.goals
        if goals is None or drawn.outcomes is None or not goals.rows.size:
            return reward
        achieved, desired = self._leaf(goals.achieved_key), self._leaf(goals.desired_key)
        goal = self._pair(drawn.outcomes, achieved, wanted=(False, True))[1]
        for observed in (obs, next_obs):
            observed[desired][goals.rows] = goal
        reward[goals.rows] = self._rewards_for(goals, next_obs[achieved][goals.rows], goal, drawn.rows.extras)
        return reward

    def _rewards_for(self, goals: Goals, achieved: Array, goal: Array, extras: list[Array]) -> Array:
        info = self._schema.extras.build([array[goals.rows] for array in extras])
        rewards = np.asarray(goals.reward_fn(achieved, goal.copy(), info))
        if rewards.shape != goals.rows.shape:
            raise ArgumentError(
                f"reward_fn returned an array of shape {rewards.shape} for {len(goals.rows)} rows; return one reward a "
                "row"
            )
        return rewards

    def _leaf(self, key: str) -> int:
        keys = self._schema.observation.keys or ()
        if key not in keys:
            raise ArgumentError(
                f"sampler: hindsight needs the key {key!r}, but the observation space has {list(keys)}; name the keys "
                "with achieved_key and desired_key"
            )
        return keys.index(key)


class HostBatchJob:
    """A batch in arrays, or in tensors that share their memory."""

    is_quick = False

    def __init__(self, make: Callable[[], Batch]) -> None:
        self._make = make
        self._batch: Batch | None = None

    def work(self) -> None:
        """See `BatchJob`."""
        self._batch = self._make()

    def receive(self) -> Batch:
        """See `BatchJob`."""
        batch, self._batch = self._batch, None
        if batch is None:
            raise DamageError("a batch was received before it was made; report this")
        return batch
