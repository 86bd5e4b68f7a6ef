"""Batches: rows of all fields, brought together for the caller.

In:  places of observations and rows of small fields.  Out: arrays, or tensors on a device.
Invariant: a batch belongs to the caller. Its memory is used again only after the caller let
go of every array and tensor that looks into it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch, Draw, Goals
from holdall.errors import ArgumentError, DamageError, MissingPackageError
from holdall.schema import Array, Bytes, Leaf, Schema
from holdall.storage.blocks import address
from holdall.storage.remote_file import bring_places
from holdall.storage.slices import Kernels, Places
from holdall.storage.store import Rows, Store
from holdall.threads import ThreadPool

if TYPE_CHECKING:
    import torch

    from holdall.delivery.device_store import DeviceMirror, Mirrored, Pinned, PinnedArenas


ALIGNMENT_BYTES = 64
"""Where torch's own tensors begin. Matrix products of floats that begin elsewhere add up in another
order, so that the last bits differ."""
_POOLED_BYTES = 1 << 16
"""Arrays below this are cheap to allocate; above, fresh pages cost more than the copy."""
_POOLED_ARRAYS = 4
"""Arrays of one size that are kept: one in use, one being filled, two for stragglers."""
_POOLED_SIZES = 16
"""Sizes that are kept: a batch has one per large field, and batches of ever new sizes must not pile up."""


class Staging:
    """Memory for batches that is used again when nothing refers to it any more."""

    def __init__(self, most_bytes: int = 1 << 62) -> None:
        self.most = _POOLED_ARRAYS
        self._most_bytes = most_bytes
        self._blocks_by_size: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Bytes:
        """Return `nbytes` bytes that nobody else can see, from an aligned address on."""
        if nbytes < _POOLED_BYTES:
            return _aligned(np.empty(nbytes + ALIGNMENT_BYTES, np.uint8), nbytes)
        with self._lock:
            blocks = self._blocks_by_size[nbytes] = self._blocks_by_size.pop(nbytes, [])
            if len(self._blocks_by_size) > _POOLED_SIZES:
                del self._blocks_by_size[next(iter(self._blocks_by_size))]  # the size not asked for the longest
            for position in range(len(blocks)):
                # One reference by the list, one by the call: no view and no tensor is left.
                if sys.getrefcount(blocks[position]) <= 2:
                    return _aligned(blocks[position], nbytes)
            block = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
            kept = sum(size * len(pooled) for size, pooled in self._blocks_by_size.items())
            if len(blocks) < self.most and kept + nbytes <= self._most_bytes:
                blocks.append(block)
            return _aligned(block, nbytes)

    def arrays(self) -> list[Bytes]:
        """Return the arrays kept for the next batches."""
        with self._lock:
            return [block for blocks in self._blocks_by_size.values() for block in blocks]

    @property
    def nbytes(self) -> int:
        """Bytes kept for the next batches."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._blocks_by_size.items())


class ObservationAssembler:
    """Copies windows of slices into staging: observations and next observations of a batch."""

    def __init__(self, kernels: Kernels, pool: ThreadPool, most_staged_bytes: int) -> None:
        self.staging = Staging(most_staged_bytes)
        self.pool = pool
        self._kernels = kernels

    def assemble(
        self, places: Places, field: int, leaf: Leaf, wanted: tuple[bool, bool] = (True, True)
    ) -> tuple[Array, Array]:
        """Build observation and next observation of one field for every place; those not wanted stay empty."""
        rows = len(places.segment)
        nbytes = rows * leaf.nbytes
        second = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if all(wanted) else 0
        both = self.staging.take(second + nbytes)
        ends = (both[:nbytes], both[second:])
        obs, next_obs = (
            end.reshape(rows, leaf.nbytes) if want else None for end, want in zip(ends, wanted, strict=True)
        )
        if rows:
            self._kernels.gather(places, field, obs, next_obs, self.pool)
        shape = (rows, *leaf.shape)
        return ends[0].view(leaf.dtype).reshape(shape), ends[1].view(leaf.dtype).reshape(shape)


def _aligned(block: Bytes, nbytes: int) -> Bytes:
    """View `nbytes` bytes of a block from its first aligned address on."""
    start = -address(block) % ALIGNMENT_BYTES
    return block[start : start + nbytes]


class Delivery:
    """Hands arrays over as they are, or as tensors on a device."""

    def __init__(self, device: str | None, leaves: list[Leaf]) -> None:
        self._torch_device: torch.device | None = None
        self._torch: Any = None
        if device is None:
            return
        self._torch = _import_torch()
        try:
            self._torch_device = self._torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"device ({device}) is none that torch knows ({error}); use 'cpu' or 'cuda', or None for NumPy arrays"
            ) from error
        if self._torch_device.type == "cuda" and not self._torch.cuda.is_available():
            raise ArgumentError(
                f"device ({device}): torch finds no CUDA device here; use 'cpu', or None for NumPy arrays"
            )
        for leaf in leaves:
            self.require(leaf)

    @classmethod
    def of(cls, device: str | None, store_device: str | None, leaves: list[Leaf]) -> Delivery:
        """Deliver to the device that the store is on, unless none was named for it."""
        if store_device is not None and device not in {None, store_device}:
            raise ArgumentError(
                f"store_device ({store_device}) and device ({device}) differ; batches are made where the store is, so "
                "leave device out"
            )
        return cls(device if store_device is None else store_device, leaves)

    @property
    def module(self) -> Any:
        """Torch itself, if tensors are asked for."""
        return self._torch

    @property
    def torch_device(self) -> torch.device | None:
        """Where tensors are asked for; None for arrays."""
        return self._torch_device

    def hand_over(self, array: Array) -> Any:
        """Return the array, or a tensor that shares its memory or is its copy on the device."""
        if self._torch_device is None:
            return array
        return self._torch.from_numpy(array).to(self._torch_device)

    def require(self, leaf: Leaf) -> None:
        """Refuse a leaf that cannot be handed over."""
        if self._torch_device is None:
            return
        try:
            self._torch.from_numpy(np.empty(0, leaf.dtype))
        except (TypeError, ValueError) as error:
            raise ArgumentError(
                f"device ({self._torch_device}): torch has no dtype for {leaf.name or 'the space'} "
                f"({leaf.dtype}); use device=None for NumPy arrays"
            ) from error


def _import_torch() -> Any:
    try:
        import torch  # noqa: PLC0415  heavy, and only for those who ask for tensors
    except ImportError as error:
        raise MissingPackageError(
            "device is given, but torch is not installed; run \"pip install 'holdall[torch]'\" "
            "or use device=None for NumPy arrays"
        ) from error
    return torch


class DrawnRows(NamedTuple):
    """All that a draw needs of the store, found in one go."""

    rows: Rows  # of the ids
    last: Rows | None  # of the last ids, if they are others
    outcomes: Rows | None  # of the transitions that become goals
    mirrored: Mirrored | None = None  # where the slices are on a device
    pinned: Pinned | None = None  # where a device may read them on the host

    def bring(self) -> None:
        """Fetch what is to be read of files that lie elsewhere."""
        for rows in (self.rows, self.last, self.outcomes):
            if rows is not None and rows.places is not None:
                bring_places(rows.places)

    @classmethod
    def of(
        cls, draw: Draw, store: Store, mirror: DeviceMirror | None = None, arenas: PinnedArenas | None = None
    ) -> DrawnRows:
        """Read the rows of a draw, all of whose ids are held."""
        return cls(
            store.read(draw.ids.reshape(-1)),
            None if draw.last_ids is None else store.read(draw.last_ids.reshape(-1)),
            None if draw.goals is None else store.read(draw.goals.ids),
            None if mirror is None else mirror.brought_up_to_date(store),
            None if arenas is None else arenas.brought_up_to_date(store),
        )


class BatchJob(Protocol):
    """A batch that was drawn, looked up, and is still to be put together."""

    is_quick: bool
    """Whether `work` only asks a device for something, which takes less time than to wake a thread for it."""

    def work(self) -> None:
        """Do what takes long, in any thread."""

    def receive(self) -> Batch:
        """Return the batch to the thread that will use it."""


class Builder(Protocol):
    """Makes batches of one memory's transitions, on one device."""

    def start(self, draw: Draw, reading: DrawnRows) -> BatchJob:
        """Begin a batch; called by the thread that will use it."""


class _HostBatchJob:
    """A batch in arrays, or in tensors that share their memory."""

    is_quick = False

    def __init__(self, builder: BatchBuilder, draw: Draw, reading: DrawnRows) -> None:
        self._arguments = (builder, draw, reading)
        self._batch: Batch | None = None

    def work(self) -> None:
        """See `Job`."""
        builder, draw, reading = self._arguments
        reading.bring()
        self._batch = builder.build(draw, reading)

    def receive(self) -> Batch:
        """See `Job`."""
        if self._batch is None:
            self.work()
        batch, self._batch = self._batch, None
        if batch is None:
            raise DamageError("a batch was received before it was made; report this")
        return batch


class BatchBuilder:
    """Makes batches in arrays, and hands them over as they are or as tensors."""

    def __init__(self, schema: Schema, assembler: ObservationAssembler, delivery: Delivery) -> None:
        self._schema = schema
        self._assembler = assembler
        self._delivery = delivery

    def start(self, draw: Draw, reading: DrawnRows) -> BatchJob:
        """See `Builder`."""
        return _HostBatchJob(self, draw, reading)

    def build(self, draw: Draw, reading: DrawnRows) -> Batch:
        """Copy the large fields, which takes no lock, and make the batch."""
        schema, rows = self._schema, reading.rows
        last = reading.last or rows
        pairs = [self.observation_pair(reading, leaf) for leaf in range(len(schema.observation.leaves))]
        obs, next_obs = dict(enumerate(pair[0] for pair in pairs)), dict(enumerate(pair[1] for pair in pairs))
        reward = rows.reward if draw.reward is None else draw.reward
        if draw.goals is not None and reading.outcomes is not None and draw.goals.rows.size:
            self.tell_anew(draw.goals, reading.outcomes, obs, next_obs, reward, rows.extras)

        def deliver(array: Array) -> Any:
            return self._delivery.hand_over(array.reshape(*draw.ids.shape, *array.shape[1:]))

        hand_over = self._delivery.hand_over
        return Batch(
            obs=schema.observation.build([deliver(array) for array in obs.values()]),
            action=schema.action.build([deliver(array) for array in rows.action]),
            reward=deliver(reward),
            next_obs=schema.observation.build([deliver(array) for array in next_obs.values()]),
            terminated=deliver(last.terminated),
            truncated=deliver(last.truncated),
            extras=schema.extras.build([deliver(array) for array in rows.extras]),
            ids=draw.ids,
            weights=hand_over(draw.weights),
            discount=None if draw.discount is None else hand_over(draw.discount),
            mask=None if draw.mask is None else hand_over(draw.mask),
        )

    def observation_pair(self, reading: DrawnRows, leaf: int) -> tuple[Array, Array]:
        """Return observations and next observations of one leaf."""
        if reading.last is None:
            return self._pair(reading.rows, leaf, wanted=(True, True))
        first = self._pair(reading.rows, leaf, wanted=(True, False))[0]
        return first, self._pair(reading.last, leaf, wanted=(False, True))[1]

    def _pair(self, rows: Rows, leaf: int, wanted: tuple[bool, bool]) -> tuple[Array, Array]:
        """Return observation and next observation of one leaf; one that is not wanted may be empty."""
        if leaf in rows.small or rows.places is None:
            return rows.small[leaf]
        field = rows.large.index(leaf)
        return self._assembler.assemble(rows.places, field, self._schema.observation.leaves[leaf], wanted)

    def goals_are_among(self, goals: Goals, leaves: Collection[int]) -> bool:
        """Whether goals lie in one of some leaves."""
        return any(self._leaf(key) in leaves for key in (goals.achieved_key, goals.desired_key))

    def tell_anew(
        self,
        goals: Goals,
        outcomes: Rows,
        obs: dict[int, Array],
        next_obs: dict[int, Array],
        reward: Array,
        extras: list[Array],
    ) -> None:
        """Put other goals, and the rewards they deserve, into rows of a batch that is not handed over yet."""
        achieved, desired = (self._leaf(key) for key in (goals.achieved_key, goals.desired_key))
        goal = self._pair(outcomes, achieved, wanted=(False, True))[1]
        for observed in (obs, next_obs):
            observed[desired][goals.rows] = goal
        info = self._schema.extras.build([array[goals.rows] for array in extras])
        told = np.asarray(goals.reward_fn(next_obs[achieved][goals.rows], goal.copy(), info))
        if told.shape != goals.rows.shape:
            raise ArgumentError(
                f"reward_fn returned an array of shape {told.shape} for {len(goals.rows)} rows; return one reward a row"
            )
        reward[goals.rows] = told

    def _leaf(self, key: str) -> int:
        keys = self._schema.observation.keys or ()
        if key not in keys:
            raise ArgumentError(
                f"sampler: hindsight needs the key {key!r}, but the observation space has {list(keys)}; name the keys "
                "with achieved_key and desired_key"
            )
        return keys.index(key)


def of_ids(ids: NDArray[np.int64]) -> Draw:
    """Return the recipe of a plain batch of given transitions."""
    return Draw(ids, np.ones(len(ids), np.float32))
