"""The parts of holdall that are written in C."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

class Handle:
    """A context or a dictionary of Zstandard or LZ4, which is freed with this object."""

    @property
    def address(self) -> int:
        """The address of the context or dictionary, for structs that C reads."""

def new_decompressor() -> Handle:
    """Return a context of Zstandard that decompresses. Only one thread at a time may use it."""

def new_decompression_dictionary(content: bytes, /) -> Handle:
    """Return a dictionary to decompress with. Raise ValueError if `content` is no dictionary of Zstandard."""

def new_compressor(level: int, shortest_match: int, table_log: int, dictionary: bytes | None, /) -> Handle:
    """Return a context of Zstandard that compresses. Only one thread at a time may use it.

    Args:
        shortest_match: Bytes of the shortest match that is looked for. 0: the default of the level.
        table_log: Binary logarithm of the entries of the tables that matches are found with. 0: the default.
        dictionary: Content of a dictionary, or None.
    """

def new_lz4_stream() -> Handle:
    """Return a state of LZ4 that compresses against other bytes. Only one thread at a time may use it."""

# ---------------------------------------------------------------- the engine
#
# Every method that changes something is atomic: it checks all arguments first, then runs to its end without releasing
# the GIL and without running Python code. A signal handler or another thread sees the change completely or not at all.
# What is held is described by an immutable `Catalog`; a change publishes a new one. Errors are raised here, with the
# argument's name and value. Lengths that come from files or the network are checked here, before use.

ROLE_OBSERVATION: int  # An observation and the next one.
ROLE_ROW: int  # An action, the reward or an extra.
ROLE_FLAGS: int  # terminated, truncated and valid, one byte per transition.

WRITTEN: int  # `Writer.append`: the tick was written.
FULL: int  # The open segment has no room for this tick: call `Writer.roll`, then try again.
UNCHECKED: int  # An argument is not an array of the expected dtype and shape: let `Schema.check` convert or refuse it.

Layout = tuple[str] | tuple[str, int, int, int, int]
"""How an observation column is stored: ("shared",), ("paired",), or ("sliced", count, outer, run_bytes, shift)."""

Group = tuple[int, tuple[str, ...] | None]
"""Leaves that are passed together as one argument."""

class Raw:
    """Uncompressed slices, one after another."""

    nbytes: int

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
    ) -> Coded:
        """Make compressed slices of the attributes of another object.

        Args:
            data: A buffer, which is copied, or (descriptor, start, nbytes) of a file. `checks` are then required.
            places: uint16 for up to 65536 slices, uint32 for more.
            file: Object that is kept alive, so that the descriptor stays open.

        Raises:
            ValueError: A length, an offset, a place or the codec does not fit. The message names it.
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

    slice_bytes: int
    slice_count: int
    is_open: bool  # Whether slices may still be added.
    form: Raw | Coded

    def __init__(self, slice_bytes: int, slice_count: int, form: Any) -> None:
        """Make a closed block. A buffer becomes a Raw form that is copied from it."""
    def read(self, first: int, count: int) -> NDArray[np.uint8]:
        """Return a copy of raw slices, (count, slice_bytes). Raise ValueError if the form is not Raw."""

class PackedPlan(Protocol):
    """How the bytes of a row are divided among groups, see `holdall.store.packed_columns.Plan`."""

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
            rows: A contiguous buffer for each leaf. Row `tick * lanes + lane` is an observation.
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

    kind: str  # "rows", "shared", "paired", "sliced" or "packed"
    nbytes: int  # Bytes in memory, without the block.
    block: Block | None
    slice_count: int  # Slices of the block that this part may name.
    layout: Layout | None  # Of an observation column that is not packed.
    exceptions: int  # Next observations of a shared part that are stored apart.
    broken: int  # Transitions of a sliced part whose next observation did not overlap as the window says.

    packed: tuple[PackedRun, int] | None  # The run of a packed part, and the number of the leaf in the run.

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return copies of the arrays: rows, exception_rows and exceptions, or cursors and log.

        A packed part has run and leaf instead of rows. `run` is the content of `PackedRun.to_bytes`.
        """
    @staticmethod
    def pack(run: PackedRun, leaf: int, shared: Part, /) -> Part:
        """Return a packed part that stands for a shared part of a closed segment.

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
        """Make a part of arrays that `arrays` returned. Raise ValueError unless every length and number fits.

        `arrays["run"]` of a packed part may also be a PackedRun, which several parts then share.
        """

class Segment:
    """A run of consecutive ticks, with one part per column. Immutable once closed."""

    first_tick: int
    ticks: int
    lanes: int
    invalid_count: int  # Entries that were added with valid=False.
    parts: tuple[Part, ...]

    def __init__(self, first_tick: int, ticks: int, lanes: int, parts: Sequence[Part]) -> None: ...

class Catalog:
    """The ticks `first_tick` to `next_tick` - 1, in segments without gaps between them."""

    first_tick: int
    next_tick: int
    lanes: int
    segments: tuple[Segment, ...]
    invalid_count: int  # Held entries that are not transitions.

class Writer:
    """Owner of everything that `add` changes: the open segment and the catalog."""

    catalog: Catalog  # What is held right now. Its last segment is open and grows with every tick.
    next_tick: int
    first_tick: int

    def __init__(
        self,
        columns: tuple[tuple[int, int, tuple[int, ...]], ...],
        groups: tuple[Group, Group, Group],
        lanes: int,
        capacity_ticks: int,
        segment_ticks: int,
        block_bytes: int,
        layouts: tuple[Layout | None, ...],
        first_tick: int = 0,
    ) -> None:
        """Make an empty writer.

        Args:
            columns: Role, type number (-1: not known yet) and shape of every column, in the order observation leaves,
                action leaves, reward, extras, flags.
            groups: The leaves of observations, actions and extras: their number, and their keys in leaf order if the
                argument may be a dict of the leaves.
            segment_ticks: Ticks of a segment at most.
            block_bytes: Bytes of a block at most, unless one tick needs more.
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
        /,
    ) -> int:
        """Write one tick, or nothing. Return WRITTEN, FULL or UNCHECKED.

        obs, action, next_obs and extras are an array, a dict of arrays, or a tuple of arrays in leaf order.
        """
    def extend(self, steps: tuple[Any, ...], first: int, /) -> int:
        """Write steps from number `first` on until the open segment is full; return how many were written.

        `steps` are the arguments of `append`, checked, with a leading time axis.
        """
    def roll(self, layouts: Sequence[Layout | None] | None = None) -> Segment | None:
        """Close the open segment and start the next one, with other layouts if given.

        Return the closed segment, or None if it had no ticks. Segments without a tick that is held are dropped.
        """
    def evict(self, before_tick: int) -> None:
        """Publish a catalog without older ticks."""
    def replace(self, segment: Segment, parts: dict[int, Part]) -> bool:
        """Publish a catalog in which `segment` has other parts. Return False if it is no longer held."""
    def adopt(self, segment: Segment) -> int:
        """Append a closed segment that was built elsewhere. Return its first tick."""
    def rewrite(self, ids: NDArray[np.int64], column: int, rows: NDArray[Any]) -> None:
        """Overwrite rows of a column that is not an observation. Raise if an id is not held."""
    def snapshot(self) -> Catalog:
        """Return a catalog that never changes."""
    def set_type(self, column: int, type_number: int) -> None:
        """Set the dtype of a column whose type was not known. Raise if ticks were written already."""

class Reader:
    """Copies rows out of a catalog. Threads that call `help` share the work."""

    def __init__(self, max_kept_bytes: int = 0) -> None:
        """Make a reader that keeps up to `max_kept_bytes` of freed arrays, to use their memory again."""
    def gather(self, catalog: Catalog, ids: NDArray[np.int64], outputs: tuple[int, ...]) -> tuple[NDArray[Any], ...]:
        """Return one array per output, whose rows are in the order of `ids`.

        Output 2 * column is the row, the observation, or terminated; 2 * column + 1 is the next observation, or
        truncated. Raise IndexError before anything is returned if an id is not held.

        Rows are copied and slices are located with the GIL held. Slices are then copied and decoded without the GIL.
        """
    def help(self) -> None:
        """Work on the gathers of other threads until `dismiss` is called. Releases the GIL."""
    def dismiss(self) -> None:
        """Make all calls of `help` return."""
