"""Ticks: one `add` on its way in, checked; and the contracts of the loops that write and read them.

In:  a user's arguments.  Out: ticks whose arrays fit; steps of an `extend`, several at once.
Invariant: what does not fit is refused before anything is written. Storage knows loops only as `Kernels`, `TickWriter`
and `FastTick`, which native/ implements: compiled, and in NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.errors import ArgumentError
from holdall.schema import Array, Bytes, Schema, as_array, fit_flags, fit_reward

if TYPE_CHECKING:
    import ctypes

    from holdall.native import SliceNamer
    from holdall.storage.batch_source import BatchReader, Places
    from holdall.storage.blocks import Codec, Coded, SealedSlices, SliceBlock
    from holdall.storage.coded_units import Order
    from holdall.storage.repair import Repair
    from holdall.storage.rings import Rings
    from holdall.storage.segment import SegmentIndex, Segments
    from holdall.storage.slices import Cursors, OpenPart, Window
    from holdall.storage.snapshot import KeptApart
    from holdall.storage.store import Store


class Tick(NamedTuple):
    """One vectorised step, leaf by leaf; every array has a leading lane axis. Several have a time axis before it."""

    obs: list[Array]
    action: list[Array]
    reward: Array
    next_obs: list[Array]
    terminated: Array
    truncated: Array
    extras: list[Array]
    valid: Array | None

    @classmethod
    def fitted(
        cls, schema: Schema, leading: tuple[int, ...], reward_dtype: np.dtype[Any] | None,
        obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any,
        extras: Mapping[str, Any] | None, valid: Any,
    ) -> Tick:  # fmt: skip
        """Check every argument of an `add`, or of an `extend` with one more leading axis."""
        return cls(
            reward=fit_reward(reward, leading, reward_dtype, schema.reward_shape),
            obs=schema.observation.flatten(obs, leading, "obs"),
            action=schema.action.flatten(action, leading, "action"),
            next_obs=schema.observation.flatten(next_obs, leading, "next_obs"),
            terminated=fit_flags(terminated, leading, "terminated"),
            truncated=fit_flags(truncated, leading, "truncated"),
            extras=schema.extras.flatten({} if extras is None else extras, leading, "extras"),
            valid=None if valid is None else fit_flags(valid, leading, "valid"),
        )

    def cut(self, where: int | slice | tuple[slice, slice]) -> Tick:
        """Return one tick of several, or some of them, or some lanes of all; nothing is copied."""
        return Tick(
            obs=[array[where] for array in self.obs],
            action=[array[where] for array in self.action],
            reward=self.reward[where],
            next_obs=[array[where] for array in self.next_obs],
            terminated=self.terminated[where],
            truncated=self.truncated[where],
            extras=[array[where] for array in self.extras],
            valid=None if self.valid is None else self.valid[where],
        )

    def digest(self) -> bytes:
        """Return a digest of all bytes and shapes: other ticks have another one."""
        flags = [self.terminated, self.truncated, *([] if self.valid is None else [self.valid])]
        digest = xxhash.xxh3_128()
        for array in (*self.obs, *self.action, self.reward, *self.next_obs, *flags, *self.extras):
            digest.update(str(array.shape).encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.digest()


_MOST_PACKED = 4096
"""Steps that are packed at once."""


def packed_rows(rows: Sequence[Array]) -> Bytes:
    """Return the rows of some steps, field by field, as bytes: of every step one field after another."""
    return np.concatenate([np.ascontiguousarray(row).reshape(len(row), -1).view(np.uint8) for row in rows], axis=1)


def steps_in(reward: Any) -> int:
    """Count the steps of trajectories, by their rewards."""
    shape = reward.shape if hasattr(reward, "shape") else as_array(reward, "reward").shape
    if not shape:
        raise ArgumentError("reward is a scalar; extend takes arrays with a leading time axis")
    return int(shape[0])


class StepsLeft:
    """The steps that an `extend` was given, and how many of them are written.

    Several are written in one call where nothing has to be done in between; the fields in rings are packed once for all
    calls.
    """

    def __init__(self, steps: Tick) -> None:
        self.steps, self._count, self._written = steps, len(steps.reward), 0
        self._packed: tuple[TickWriter | None, int, Bytes] = None, 0, np.empty((0, 0), np.uint8)

    def __bool__(self) -> bool:
        return self._written < self._count

    def write(self, store: Store) -> None:
        """Write steps until none is left or blocks pile up; called under the lock. An interrupt waits for that."""
        before = store.next_tick - self._written
        try:
            self._write_until_crowded(store, before)
        except BaseException:
            store.repair.run()
            self._write_until_crowded(store, before)
            raise

    def _write_until_crowded(self, store: Store, before: int) -> None:
        """Go on behind the last tick that the store counts: all since `before` are these steps."""
        while (done := store.next_tick - before) < self._count:
            store.write_steps(self, done)
            if store.is_crowded:
                break
        self._written = store.next_tick - before

    def write_run(
        self, first: int, writer: TickWriter, rings: Rings, segments: Segments, large: list[int], most: int
    ) -> tuple[int, SlicedTick | None]:
        """Write steps from `first` on in one call; return how many, `most` of large fields, and what was sliced."""
        if not rings.takes_runs(writer):
            return 0, None
        packed = self._packed_from(first, writer, rings)
        if not large:
            return writer.write_run(packed, None), None
        now = writer.next_tick
        some = slice(first, first + min(len(packed), segments.reserve_ticks(now), most))
        obs, next_obs = ([arrays[i][some] for i in large] for arrays in (self.steps.obs, self.steps.next_obs))
        sliced = segments.prepare_tick(now, obs, next_obs)
        return writer.write_run(packed[: some.stop - first], sliced), sliced

    def _packed_from(self, first: int, writer: TickWriter, rings: Rings) -> Bytes:
        """Return the fields in rings of some steps from `first` on, one tick after another."""
        packed_for, packed_first, packed = self._packed
        if packed_for is not writer or first >= packed_first + len(packed):
            rows = rings.rows_of_steps(self.steps.cut(slice(first, first + _MOST_PACKED)))
            packed_first, packed = first, packed_rows(rows)
            self._packed = writer, packed_first, packed
        return packed[first - packed_first :]


# ---------------------------------------------------------------- writing


class FlatField(NamedTuple):
    """A field that lies in a flat ring of (ring ticks, lanes, ...)."""

    rows: Array
    following: Array | None  # the ring of next observations, if they have one of their own
    is_observation: bool
    apart: KeptApart | None = None  # if they have none: what no ring shows


class SlicedTick(NamedTuple):
    """The fields of a tick that are cut into slices: where they go, and what they are."""

    parts: list[OpenPart]
    cursors: list[Cursors]  # (ring ticks, lanes)
    obs: list[Array]
    next_obs: list[Array]


NOT_CONTINUED, NO_ROOM = 0, -1


class TickWriter(ABC):
    """Writes all fields of a tick in one step, and counts the ticks: the count alone says what is held."""

    flat: tuple[FlatField, ...]  # the fields in rings, in the order in which a tick brings them
    first_tick: int  # number of the first one ever: it continues nothing
    next_tick: int  # number of the one that is written next
    pause_tick: int  # before this tick is written, there is more to do than a short way does ...
    blocks_pause_tick = 0  # ... and before this one, if fields are cut into slices

    def limit(self, ahead: int, sealed: ctypes.c_int64 | None = None) -> None:  # noqa: B027  there may be no short way
        """Write no tick a short way once new slices of the open segment take more than a limit.

        Args:
            ahead: The limit, less what is ...
            sealed: ... sealed so far, which another thread counts on; None: nothing is.
        """

    @abstractmethod
    def write(self, rows: Sequence[Array], sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """Write a tick and return how many were written in all.

        If that is not above 0, nothing was written: NOT_CONTINUED if next observations of the tick before would be
        lost, and the caller did not say that they are kept; NO_ROOM if the tick might not fit into a part.

        Args:
            rows: Of the fields in rings; next observations follow on their observations.
        """

    def keep_apart(self, is_changed: bytearray) -> None:  # noqa: B027  not all do
        """From now on save next observations by itself that would be lost, where `KeptApart` has room for them.

        Args:
            is_changed: Its first byte is set to 1 when that was done.
        """

    def write_packed(self, packed: bytes, sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """Write a tick whose fields in rings lie one after another, see `write`; where a `FastTick` packs them."""
        raise NotImplementedError

    def write_run(self, packed: Bytes, sliced: SlicedTick | None) -> int:
        """Write ticks in one call, up to the first that `write` has more to do for; return how many.

        Args:
            packed: Of every tick the rows that `write` takes, one after another, as bytes.
            sliced: As for `write`; observations have a leading time axis.
        """
        return 0

    def writes(self, flat: Sequence[FlatField]) -> bool:
        """Whether the fields in rings are these."""
        return len(flat) == len(self.flat) and all(
            ours.rows is theirs.rows and ours.following is theirs.following
            for ours, theirs in zip(self.flat, flat, strict=True)
        )


Form = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape, lanes first, and the dtype that an array must have."""


class Arguments(NamedTuple):
    """What the arguments of an `add` must be to be written as they are."""

    rest: list[Form]  # action, reward, terminated, truncated
    small: dict[str, Form]  # observations in rings, by key; "" is the key of one that is no Dict
    large: dict[str, Form]
    is_dict: bool

    @classmethod
    def of(cls, schema: Schema, small: Iterable[int], large: Iterable[int], rest: Sequence[Array]) -> Arguments | None:
        """Describe arguments by their observation leaves and the rings of all else; None if C cannot write them all."""
        tree = schema.observation
        is_dict = not isinstance(tree.structure, int)
        keys = tree.keys if is_dict else ("",)
        if keys is None or len(schema.action.leaves) != 1 or schema.extras.leaves:
            return None
        forms = {keys[i]: ((rest[0].shape[1], *leaf.shape), leaf.dtype) for i, leaf in enumerate(tree.leaves)}
        return cls(
            rest=[(ring.shape[1:], ring.dtype) for ring in rest],
            small={keys[i]: forms[keys[i]] for i in small},
            large={keys[i]: forms[keys[i]] for i in large},
            is_dict=is_dict,
        )


class FastTick:
    """Writes ticks whose arguments are arrays of exactly the right shapes and dtypes; this one never does.

    `add(obs, action, reward, next_obs, terminated, truncated, infos=None)` writes a tick in one step, and returns how
    many were written in all. Lanes whose infos say that a time limit cut their episode are truncated, and not
    terminated if they ended. It returns 0 and leaves all as it was if an argument is not as it must be, the tick needs
    more than this step, or somebody has the memory's lock. `pack`, with the same arguments, returns the fields in rings
    one after another, or 0.
    """

    is_open = False  # whether ticks may be written this way now
    fills_blocks = False
    add: Callable[..., int] = staticmethod(lambda *_: 0)
    pack: Callable[..., Any] = add
    is_dict = False  # whether observations are dicts
    small_keys: Sequence[str] = ()  # of observations in rings, see `Arguments`
    large_keys: Sequence[str] = ()  # of those that are cut into slices

    def offer(self, _writer: TickWriter, _describe: Callable[[], Arguments | None]) -> None:
        """Write ticks this way, with the caller's writer, from now on, if there is such a way."""

    def end(self) -> None:
        """Write no more ticks this way, until it is offered again: it does not see what changes now."""

    def close(self) -> None:
        """Write no more ticks, and let go of the rings."""


Watch = Callable[[int], None]


WATCHED_BYTES = 2**19
"""Of slices that are sealed before a `Watch` is called, if so few can be."""


class Coder(Protocol):
    """Seals blocks of slices and reads them."""

    def adopt(self, coded: Coded) -> SealedSlices:
        """Make slices readable that were sealed elsewhere, or moved to a file."""

    def seal(
        self, slices: Bytes, codec: Codec, order: Order | None = None, *, threads: int = 1, watch: Watch | None = None
    ) -> SealedSlices | None:
        """Code all rows of `slices`; None if a palette does not hold their words, or one of them has too many colours.

        Args:
            order: Which row comes first, second, ... in the units; each once, lane after lane, and of a lane one after
                another, in at most 256 lanes. Their numbers stay as they are.
            threads: Threads that may share the work; the bytes are the same.
            watch: Called after every piece of the work with how many slices are done; what it raises ends the work.
        """

    def count_work(self, sealed: SealedSlices, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count what decoding has to do for some units, so that no clock decides which codec is chosen.

        Returns:
            Three numbers for each: sequences, literals of Huffman's code, and tables of that code.
        """

    def keeping(self) -> Coder:
        """Return a coder for many small blocks, of one thread; it keeps its compressors, which are slow to make."""

    def checksums(self, data: Bytes, offsets: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Sum every unit of sealed slices up, for when it is read from a file."""

    def decode(self, sealed: SealedSlices, numbers: NDArray[np.int64], out: Bytes) -> None:
        """Decode slices into the rows of `out`."""


class Kernels(Protocol):
    """Batches in, batches out; the caller never handles a row alone."""

    coder: Coder
    packs_columns: bool  # whether short observations can be packed, and pages of their rings given back

    def pack_columns(
        self,
        run: NDArray[np.int64],
        rings: NDArray[np.int64],
        ring_ticks: int,
        lanes: int,
        out: Bytes,
        scratch: tuple[NDArray[np.uint32], Bytes],
        /,
    ) -> int:
        """Pack the ticks that `run` names, see `RUN_FIELDS`, and describe it there; return the bytes used, or -1.

        Args:
            rings: Addresses, by leaf of the plan.
            scratch: Memory for two numbers a row and one more for every group, and for a row.
        """

    def release(self, first: int, nbytes: int, /) -> None:
        """Give the whole pages of a range of addresses back to the system."""

    def new_block(self, slice_bytes: int, arena: Bytes) -> SliceBlock:
        """Make an empty block of unique slices in `arena`."""

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""

    def append_next(self, part: OpenPart, ticks: Array, obs: Array, cursors: Cursors, /) -> None:
        """Write a tick to a part in which every tick is the next one of the tick before, and the cursors to it.

        Args:
            ticks: Room for two ticks, in C order: the last one stands there, and this one is copied beside it.
            obs: Of any layout. It is read once, so it may change while this runs.
        """

    def new_writer(
        self, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int], repair: Repair, /
    ) -> TickWriter:
        """Make a writer that has written the ticks from `ticks[0]` up to `ticks[1]`."""

    def new_fast_tick(self, lock: Any, repair: Repair, /) -> FastTick:
        """Make a short way to write ticks, for a memory with this lock."""

    def new_batch_reader(
        self, lock: Any, repair: Repair, index: SegmentIndex, most_kept_bytes: int, threads: int, /
    ) -> BatchReader:
        """Make a short way to draw batches of the segments in an index, for a memory with this lock."""

    def read_rows(
        self,
        columns: NDArray[np.int64],
        ids: NDArray[np.int64],
        held: tuple[int, int],
        ring_rows: int,
        blocks: tuple[Bytes, Bytes],
        /,
    ) -> bool:
        """Copy the rows of `ids` from rings into two blocks, one column after another, each from a multiple of 64 on.

        Args:
            columns: A table, see `COLUMN_FIELDS`; what it points into is alive.
            ids: Contiguous, and writable.
            held: The first id that may be asked for, and the one behind the last. If one id is another, nothing is
                copied, and False is returned.
            ring_rows: Rows of every ring; a transition stands at its id modulo that.
        """

    def gather(
        self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None, pool: Any = None, /
    ) -> None:
        """Fill `obs` and `next_obs`, rows of bytes, with one field of the places; None for one not wanted.

        Args:
            pool: From `new_pool`; without it the calling thread works alone.
        """

    def find(
        self, first_ticks: NDArray[np.int64], ids: NDArray[np.int64], lanes: int, /
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the segment and the lane of every id, given where segments begin."""

    def new_pool(self, threads: int | None = None) -> Any:
        """Make threads that help with `gather`, the caller's among them; None where it uses none; see `ThreadPool`."""

    def namer(self) -> SliceNamer:
        """Return what names the slices of a batch, each once."""
