"""The parts of holdall that are written in C."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

# ---------------------------------------------------------------- the engine
#
# Every method that changes something is atomic: it checks all arguments first, then runs to its end without releasing
# the GIL and without running Python code. A signal handler or another thread sees the change completely or not at all.
# An immutable `Catalog` lists the segments that are held, and a change publishes a new one. Errors are raised in C and
# name the argument and its value. Lengths that come out of files or the network are checked in C, before use.

ROLE_OBSERVATION: int  # An observation and the next one.
ROLE_ROW: int  # An action, the reward or an extra.
ROLE_FLAGS: int  # terminated, truncated and valid, one byte per transition.

FLAG_TERMINATED: int  # The bits of the flags of a transition.
FLAG_TRUNCATED: int
FLAG_INVALID: int  # The entry was added with valid=False, so it is not a transition.

MAX_COLUMNS: int  # The most columns of a writer.
MAX_NDIM: int  # The most axes of one lane's row of a column.

WRITTEN: int  # `Writer.append`: the tick was written.
FULL: int  # The open segment has no room for this tick: call `Writer.roll`, then try again.
UNCHECKED: int  # An argument is not an array of the expected dtype and shape: `check_step` converts or refuses it.

Layout = tuple[str] | tuple[str, int, int, int, int]
"""How an observation column is stored: ("shared",), ("paired",), or ("sliced", count, outer, run_bytes, shift).

`holdall.store.windows.Window` explains the numbers.
"""

Group = tuple[int, tuple[str, ...] | None]
"""The number of leaves that are passed as one argument, and their keys if the argument may be a dict."""

class Raw:
    """Uncompressed slices, one after another."""

    nbytes: int  # Bytes of slices that fit.

class Dictionary:
    """Bytes that the slices of a field have in common. Immutable, compared by content."""

    content: bytes  # What the compressor knows before it reads a slice.
    palette: bytes  # 256 colours of four bytes that `content` numbers, or no bytes.

    def __init__(self, content: bytes, palette: bytes = b"") -> None:
        """Raise ValueError if `content` looks like a dictionary of Zstandard and is damaged."""

class Coded:
    """Compressed slices, in memory or in a file. Immutable. Can be pickled, with its data.

    The slices are compressed in units of `codec.group` neighbours. A codec is any object with the attributes
    `parameters` and `dictionary`, see `holdall.codec.Codec`.
    """

    codec: Any
    slice_bytes: int
    slice_count: int
    nbytes: int  # Bytes in memory, without the dictionary.
    disk_bytes: int  # Bytes in a file, or 0.
    location: tuple[int, int, int] | None  # Descriptor, start and length of data in a file.
    file: object  # Owner of the descriptor, or None.
    data: NDArray[np.uint8] | None  # Units, one after another; None if they are in a file.
    offsets: NDArray[np.uint32]  # Start of every unit, and the end of the last one.
    checks: NDArray[np.uint32] | None  # Checksum of every unit; None if the data is in memory.
    palette: NDArray[np.uint8]  # 256 words or colours, or no bytes.
    places: NDArray[np.uint16] | NDArray[np.uint32] | None  # Place of every slice; None: in order.

    def __new__(
        cls,
        codec: Any,
        slice_count: int,
        offsets: Any,
        palette: Any,
        data: Any,
        places: Any = None,
        checks: Any = None,
        file: object = None,
        is_shared: bool = False,
    ) -> Coded:
        """Make compressed slices from the attributes of another object.

        Args:
            data: A buffer, which is copied, or (descriptor, start, nbytes) of a file. `checks` are then required.
            places: uint16 for up to 65536 slices, uint32 for more.
            file: Object that is kept alive, so that the descriptor stays open.
            is_shared: Keep the buffer `data`, whose content must never change, instead of copying it.

        Raises:
            ValueError: A length, an offset, a place or the codec does not fit. The message names the argument.
        """
    def in_file(self, descriptor: int, start: int, owner: object, /) -> Coded:
        """Return a copy whose data is read from byte `start` of a file, and which keeps `owner` alive."""
    def in_memory(self) -> Coded:
        """Return the same slices with their data in memory. Raise ValueError if the bytes in the file are damaged."""

def encode(source: Any, codec: Any, order: NDArray[np.uint32] | None = None) -> Coded | None:
    """Compress all slices of a Block, or of a contiguous buffer. Releases the GIL.

    Args:
        order: Slice number by place. Slices in neighbouring places are compressed together.

    Returns:
        None if the codec cannot represent the slices: they have more than 256 words, or too many colours.
    """

def decode(coded: Coded, first: int, count: int, /) -> NDArray[np.uint8]:
    """Return slices as (count, slice_bytes). Releases the GIL. Raise ValueError if one of them is damaged."""

def checksums(coded: Coded, /) -> NDArray[np.uint32]:
    """Return the checksum of every unit, which files store: the low half of XXH64."""

class Block:
    """The unique slices of one field.

    `form` is the only thing about a closed block that changes. Assigning it is atomic: readers that started with the
    old form keep it alive until they finish.
    """

    serial: int  # A number that no other block has, even after this one is gone.
    slice_bytes: int
    slice_count: int
    is_open: bool  # Whether slices may still be added.
    form: Raw | Coded

    def __new__(cls, slice_bytes: int, slice_count: int, form: Any, is_shared: bool = False, /) -> Block:
        """Make a closed block. A buffer becomes a Raw form that is copied from it.

        With `is_shared`, the Raw form keeps the buffer instead, whose content must never change.
        """
    def share(self) -> NDArray[np.uint8]:
        """Return all raw slices, (slice_count, slice_bytes), as a read-only array that shares their memory.

        Raise ValueError if the form is not Raw.
        """
    def read(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return a copy of raw slices, (count, slice_bytes). Raise ValueError if the form is not Raw."""
    def lane_order(self) -> NDArray[np.uint32] | None:
        """Return the slice numbers sorted by the lane that stored the slice first, as `order` of `encode` takes them.

        None if all slices come from one lane, if their lanes are not known, or if the block is compressed.
        """

class PackedPlan(Protocol):
    """How the bytes of a row are divided among groups, see `holdall.store.packed_columns.PackingPlan`."""

    @property
    def leaf_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each leaf."""
    @property
    def groups(self) -> tuple[tuple[int, int, bool], ...]:
        """(frame_bytes, window, is_dense) of each group."""
    @property
    def pieces(self) -> tuple[tuple[tuple[int, int, int, int, int, int, bool], ...], ...]:
        """(group, offset, bytes, count, at, step, is_copy) of each piece of each leaf."""

class PackedRun:
    """The small observations of one segment, without the values that repeat. Immutable."""

    nbytes: int  # Bytes in memory.
    ticks: int  # Observations per lane: one more than the segment has ticks.
    lanes: int
    exceptions: int  # Rows that are stored whole, because they do not follow the plan.
    leaf_bytes: tuple[int, ...]  # Bytes of a row of each leaf.
    leaf_nbytes: tuple[int, ...]  # Each leaf's share of `nbytes`, rounded down.

    @staticmethod
    def pack(
        plan: PackedPlan, rows: Sequence[Any], ticks: int, lanes: int, *, max_share: float = 0.875
    ) -> PackedRun | None:
        """Pack the rows of all leaves. Every row is read back and compared. Releases the GIL.

        Args:
            rows: A contiguous buffer for each leaf. Row `tick * lanes + lane` is the observation of that tick and lane.
            max_share: Largest share of the plain rows that the run may take.

        Returns:
            None if the run would take more, or if more than one in eight rows does not follow the plan.

        Raises:
            ValueError: The plan is inconsistent, or a buffer has another size.
        """
    @staticmethod
    def from_bytes(data: Any, /) -> PackedRun:
        """Return the run whose `to_bytes` returned `data`. Raise ValueError if `data` is damaged."""
    def to_bytes(self) -> bytes:
        """Return the run as bytes, in the byte order of this machine."""
    def read(self, leaf: int, rows: Any, /) -> NDArray[np.uint8]:
        """Return rows of one leaf, (rows, leaf bytes). Raise IndexError if a row or the leaf does not exist."""

class Part:
    """What one segment stores of one column. Immutable, except in the open segment and for `Writer.rewrite`."""

    serial: int  # A number that no other part has, even after this one is gone.
    kind: str  # "rows", "shared", "paired", "sliced", "packed", "halves" or "bits"
    row_bytes: int  # Bytes of one lane's row, or observation.
    nbytes: int  # Bytes in memory, without the block.
    block: Block | None  # The block that has the slices of a sliced part.
    slice_count: int  # Slices of the block that the log may name.
    layout: Layout | None  # Layout of a part that is shared, paired or sliced.
    exceptions: int  # Next observations of a shared part that are stored apart.
    broken: int  # Transitions of a sliced part whose next observation did not overlap as the window says.

    packed: tuple[PackedRun, int] | None  # Run of a packed part, and number of the leaf in the run.

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of the arrays: rows, exception_rows and exceptions, or cursors and log.

        A packed part has run and leaf instead of rows. `run` is the content of `PackedRun.to_bytes`.
        """
    @staticmethod
    def pack(run: PackedRun, leaf: int, shared: Part, /) -> Part:
        """Return a packed part that replaces a shared part of a closed segment.

        The rows are those of one leaf of `run`. The exceptions are copied from `shared`. The caller packed the rows of
        `shared`, and this function does not compare them.

        Raises:
            ValueError: `shared` is not a shared part, or the leaf has another number or size of rows.
        """
    @staticmethod
    def restore(
        kind: str,
        ticks: int,
        lanes: int,
        row_bytes: int,
        arrays: dict[str, Any],
        layout: Layout | None,
        block: Block | None,
    ) -> Part:
        """Make a part from arrays that `arrays` returned. Raise ValueError unless every length and number fits.

        `arrays["run"]` of a packed part may also be a PackedRun, which several parts then share.
        """

class Segment:
    """A run of consecutive ticks, with one part per column. Immutable once closed."""

    first_tick: int
    ticks: int
    lanes: int
    invalid_count: int  # Entries that were added with valid=False.
    parts: tuple[Part, ...]

    def __new__(cls, first_tick: int, ticks: int, lanes: int, parts: Sequence[Part]) -> Segment: ...

class Catalog:
    """The ticks `first_tick` to `next_tick` - 1, in segments without gaps between them."""

    first_tick: int
    next_tick: int
    lanes: int
    segments: tuple[Segment, ...]
    last_segment: Segment  # The newest one, which a writer's catalog always has. It is open there.
    invalid_count: int  # Held entries that are not transitions.
    flags_changed: int  # Number of calls of `Writer.rewrite` that overwrote flags. Counted in the same call.

    def closed_segments(self, first_tick: int, /) -> tuple[Segment, ...]:
        """Return all segments but the last one that begin with `first_tick` or later."""

def get_heap_bytes() -> int:
    """Return the bytes of stored data in the heap of the C library: areas below 256 KiB, and packed runs."""

class Writer:
    """Owner of everything that `add` changes: the open segment and the catalog."""

    catalog: Catalog  # The segments that are held right now. The last one is open and grows with every tick.
    next_tick: int
    first_tick: int
    dropped_early: int  # Transitions that all calls of `evict` with `is_early` dropped.

    def __new__(
        cls,
        columns: tuple[tuple[int, int, tuple[int, ...]], ...],
        groups: tuple[Group, Group, Group],
        lanes: int,
        capacity_ticks: int,
        segment_ticks: int,
        block_bytes: int,
        layouts: tuple[Layout | None, ...],
        first_tick: int = 0,
    ) -> Writer:
        """Make an empty writer.

        Args:
            columns: Role, type number (-1: not known yet) and shape of every column, in the order observation leaves,
                action leaves, reward, extras, flags.
            groups: The leaves of observations, of actions and of extras. Keys are in leaf order.
            segment_ticks: The most ticks of a segment.
            block_bytes: The most bytes of a block, unless two ticks need more.
            layouts: How each column is stored in the first segment; None for columns that are not observations.
        """
    def append(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
        infos: Any = None,
        /,
    ) -> int:
        """Write one tick, or nothing. Return WRITTEN, FULL or UNCHECKED.

        obs, action, next_obs and extras are an array, a dict of arrays, or a tuple of arrays in leaf order.

        Args:
            infos: A list or tuple with one info dict per lane, whose key "TimeLimit.truncated" is True if a time limit
                ended the step. `terminated` is then the `done` of Stable-Baselines3, and `truncated` is ignored.
        """
    def extend(self, steps: tuple[Any, ...], progress: NDArray[np.int64], /) -> int:
        """Write steps until the open segment is full. Return how many were written.

        Args:
            steps: The first eight arguments of `append` as `check_step` returns them, with a leading time axis.
            progress: An array with one number, the steps that are written already. It is increased in the same call,
                so it is right even if an interrupt is raised before the result is used.
        """
    def roll(self, layouts: Sequence[Layout | None] | None = None) -> Segment | None:
        """Close the open segment and start the next one, with other layouts if given.

        Return the closed segment, or None if none of its ticks is held. Segments without held ticks are dropped.
        """
    def evict(self, before_tick: int, is_early: bool = False, /) -> None:
        """Publish a catalog without older ticks.

        With `is_early`, the same call adds the transitions of these ticks to `dropped_early`.
        """
    def replace(self, segment: Segment, parts: dict[int, Part]) -> bool:
        """Publish a catalog in which `segment` has other parts. Return False if it is no longer held."""
    def adopt(self, segment: Segment) -> int:
        """Append a closed segment that was built elsewhere. Return its first tick."""
    def rewrite(self, ids: NDArray[np.int64], columns: tuple[int, ...], rows: tuple[NDArray[Any], ...]) -> bool:
        """Overwrite rows of columns that are not observations. If an id occurs twice, its last row counts.

        Return whether a part was replaced by a wider one, because it could not represent a value. Raise IndexError if
        an id is not held. Rows of the column of flags keep their bit FLAG_INVALID.
        """
    def snapshot(self) -> Catalog:
        """Return a catalog that never changes."""
    def set_type(self, column: int, type_number: int) -> None:
        """Set the dtype of a column whose dtype was not known.

        Raise ValueError if the column has another dtype, or if ticks were written.
        """

class Reader:
    """Copies rows out of a catalog. Threads that call `help` share the work."""

    kept_bytes: int  # Memory of freed arrays that is kept for the next ones.
    wanted_helpers: int  # The most helpers that a gather could have used so far.

    def __new__(cls, max_kept_bytes: int = 0, bytes_per_thread: int = 524_288) -> Reader:
        """Make a reader.

        Args:
            max_kept_bytes: Memory of freed arrays that is kept for the next ones.
            bytes_per_thread: Bytes of a batch for which another thread that called `help` is woken.
        """
    def gather(
        self,
        catalog: Catalog,
        ids: NDArray[np.int64],
        outputs: tuple[int, ...],
        first_tick: int = ...,
        into: NDArray[np.uint8] | None = None,
        /,
    ) -> tuple[NDArray[Any], ...]:
        """Return one array per output, whose rows are in the order of `ids`.

        Output 2 * column is the row, the observation, or terminated; 2 * column + 1 is the next observation, or
        truncated. After the outputs of all columns follow the flags as they are stored, uint8, and
        `terminated and not truncated` as float32 of shape (rows, 1). Every array begins at a multiple of 64 bytes.
        Raise IndexError before anything is returned if an id is not held.

        Args:
            first_tick: Oldest tick that may be read; by default the oldest one that is held. What was held when this
                catalog was taken can be read for as long as the catalog is referred to, also after its eviction.
            into: Memory of the arrays, at a multiple of 64 bytes. The arrays have the order of `outputs` there.

        Rows are copied and slices are located with the GIL held. Slices are then copied and decoded without the GIL.
        """
    def gather_windows(
        self,
        catalog: Catalog,
        ids: NDArray[np.int64],
        column: int,
        first_tick: int,
        into: NDArray[np.uint8],
        with_whole: bool,
        /,
    ) -> tuple[int, NDArray[np.int32], int, int, int] | None:
        """Write the slices of observations and next observations to `into`, one after another. Releases the GIL.

        A slice is written once if an observation and its next observation share it, or a transition and the one
        before it in `ids`.

        Args:
            column: Number of an observation column.
            into: Memory for 2 * len(ids) whole observations.
            with_whole: Whether observations of one slice count as windows of one slice.

        Returns:
            The number of slices; the number of the first slice of every observation and of every next observation, as
            an array of shape (2, len(ids)); and count, outer and run_bytes of the window. Transitions that are stored
            in another form have -1 in place of a number. None if all of them are.
        """
    def help(self) -> None:
        """Work on the gathers of other threads until `dismiss` is called. Releases the GIL."""
    def dismiss(self) -> None:
        """Make all calls of `help` return."""

# ---------------------------------------------------------------- sampling and rollouts

class SumTree:
    """Numbers of at least 0 in slots, and a binary tree of their sums. Every method is atomic. Can be pickled.

    The sums depend on the numbers in the slots only, to the last bit, and not on the order in which they were set.
    """

    slots: int  # Number of slots.
    total: float  # Sum of all slots.
    highest: float  # Largest number that `update` or `raise_highest` was given.

    def __new__(cls, slots: int, highest: float = 0.0) -> SumTree:
        """Make a tree whose slots are all 0."""
    def put(self, slots: NDArray[np.int64], values: NDArray[np.float64] | float, /) -> None:
        """Set the numbers in some slots. If a slot is given twice, the last number counts.

        Raises:
            IndexError: A slot does not exist.
            ValueError: A number is negative or not finite.
        """
    def update(
        self, ids: NDArray[np.int64], values: NDArray[np.float64], first_id: int, next_id: int, max_value: float, /
    ) -> None:
        """Set the numbers of ids, and raise `highest`. Id `i` is stored in slot `i % slots`.

        Ids below `first_id` are ignored. If an id is given twice, the last number counts.

        Raises:
            IndexError: An id is not below `next_id`.
            ValueError: A number is not above 0 and at most `max_value`.
        """
    def find(self, points: NDArray[np.float64], /) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the slots that points of [0, 1), multiplied by `total`, fall on. `total` must be above 0.

        Slots that are 0 are never found. The second array has, for each slot found, the lowest number of all slots
        found, divided by the number of this slot.
        """
    def values(self, slots: NDArray[np.int64], /) -> NDArray[np.float64]:
        """Return the numbers in some slots. Raise IndexError if a slot does not exist."""
    def copy_to(self, out: NDArray[np.float64], /) -> None:
        """Copy the numbers of the first slots to `out`, as many as it has entries."""
    def raise_highest(self, value: float, /) -> None:
        """Set `highest` to `value` if that is larger."""

def draw_slots(
    bit_generator: np.random.BitGenerator, count: int, filled: int, slots: int, newest: int, lanes: int, /
) -> NDArray[np.int64]:
    """Draw ids as Stable-Baselines3 does: `randint(0, filled, count)`, then `randint(0, lanes, count)`.

    The generator continues as if `RandomState.randint` had been called. Tick `t` is stored in slot `t % slots`.

    Args:
        filled: Slots that are drawn from: those below `filled`.
        newest: The newest tick. Slots after its slot hold ticks of the round before. If there was no such round, their
            ids are below 0.
    """

def estimate_advantages(
    rewards: NDArray[np.float32],
    values: NDArray[np.float32],
    ends: NDArray[np.float32],
    last_values: NDArray[np.float32],
    gamma: float,
    gae_lambda: float,
    advantages: NDArray[np.float32],
    returns: NDArray[np.float32],
    /,
) -> None:
    """Estimate advantages and returns as Stable-Baselines3 does, to the last bit. Releases the GIL.

    All arrays are C-contiguous and of shape (steps, lanes), except for `last_values`.

    Args:
        ends: 1 where the episode ended with the step, else 0.
        last_values: Values of the observations after the last step, one per lane.
        advantages: Receives the advantages. May be `rewards` itself.
        returns: Receives the returns, which are advantages plus values.
    """

class ObservationLog:
    """The observations of one field of a rollout, tick by tick. Observations that overlap share memory.

    The memory for observations that do not overlap is reserved once. It takes RAM only as it is written to.
    """

    ticks: int  # Ticks that were written.
    slice_bytes: int  # Bytes of the slices of all lanes.
    cursor_bytes: int  # Bytes of the cursors, four for each observation.
    broken: int  # Observations that do not overlap the one before. The first of each lane is not counted.

    def __new__(cls, layout: Layout, ticks: int, lanes: int, row_bytes: int) -> ObservationLog:
        """Make a log for up to `ticks` ticks. `layout` must be a sliced one."""
    def write(self, tick: int, obs: NDArray[Any], /) -> None:
        """Write the observations of one tick, and forget later ticks.

        Atomic. Ticks are written in order, but a tick may be written again.

        Raises:
            IndexError: An earlier tick was not written, or the log has no room for `tick`.
            ValueError: `obs` does not have one row of `row_bytes` bytes per lane.
        """
    def gather(self, places: NDArray[np.int64], out: NDArray[Any], /) -> None:
        """Copy observations to the rows of `out`. Releases the GIL.

        Args:
            places: `tick * lanes + lane` of each observation. A negative number gives a row of zeros.

        Raises:
            IndexError: The observation of a place was not written.
        """
    def clear(self) -> None:
        """Forget all ticks, and keep the memory."""

class ArrayPool:
    """Makes arrays, and uses the memory of freed ones again. Fresh memory costs more time than filling it.

    Arrays begin at multiples of 64 bytes.
    """

    kept_bytes: int  # Memory of freed arrays that is kept for the next ones.

    def __new__(cls, max_kept_bytes: int) -> ArrayPool:
        """Make a pool that keeps up to `max_kept_bytes`, and frees the oldest memory beyond that."""
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike, /) -> NDArray[Any]:
        """Return an array whose contents are arbitrary. Its memory is kept when no array refers to it any more."""
    def clear(self) -> None:
        """Free the memory that is kept."""
