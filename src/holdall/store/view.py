"""View: the transitions that a store holds at one moment.

A draw, and the batch that is made from the draw, use one view. Other threads may add transitions meanwhile, and the
store may compress, move or evict some. All transitions of the view stay readable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall._native import FLAG_INVALID, FLAG_TERMINATED, FLAG_TRUNCATED, Catalog, Coded, Reader
from holdall.batch import Flags, Ids
from holdall.errors import DamageError, HoldallError, TransitionIdError
from holdall.schema import Array
from holdall.store.columns import Columns
from holdall.store.spill import SpillFile

_ENDED = FLAG_TERMINATED | FLAG_TRUNCATED

ALIGNMENT_BYTES = 64
"""Every array in the memory that a caller gives to `View.read` begins at a multiple of this number."""

BeforeRead = Callable[[Catalog, Ids], None]
"""Function of a catalog and ids that fetches the blocks of these ids, if they are not on this machine yet."""


def align(nbytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class WindowSlices(NamedTuple):
    """Slices of observations and next observations, which `View.read_windows` has written to memory.

    A slice that an observation shares with its next observation, or with the row before it, is written once.
    """

    slice_count: int
    # (2, rows): number of the first slice of each observation and next observation. -1: it is stored in another form.
    starts: NDArray[np.int32]
    window_count: int  # Slices of an observation.
    outer: int  # Stretches of an observation, see `holdall.store.windows.Window`.
    run_bytes: int  # Contiguous bytes of one slice in one stretch.

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return self.slice_count * self.outer * self.run_bytes


class View:
    """The transitions from `first_id` to `next_id` - 1.

    A view keeps the memory of its transitions alive, so it should be dropped when the batch is made.

    Attributes:
        columns: Numbers of the columns and of their outputs.
        flags_changed: Number of calls of `Store.set_flags` before the view was made.
    """

    __slots__ = (
        "_before_read",
        "_catalog",
        "_reader",
        "columns",
        "first_id",
        "first_tick",
        "flags_changed",
        "next_id",
    )

    def __init__(
        self,
        catalog: Catalog,
        reader: Reader,
        columns: Columns,
        before_read: BeforeRead | None = None,
    ) -> None:
        self.columns = columns
        lanes = catalog.lanes
        first_tick = catalog.first_tick
        self.first_tick = first_tick
        self.first_id = first_tick * lanes
        self.next_id = catalog.next_tick * lanes
        self.flags_changed = catalog.flags_changed  # Read before any flag, so that no later change is missed.
        self._catalog = catalog
        self._reader = reader
        self._before_read = before_read

    def read(self, ids: Ids, outputs: tuple[int, ...], into: NDArray[np.uint8] | None = None) -> tuple[Array, ...]:
        """Return the rows of `ids`, one array per output of `Columns`. Raise TransitionIdError if an id is not held.

        If `into` is given, the arrays share its memory: each begins at the next multiple of `ALIGNMENT_BYTES`.
        """
        if self._before_read is not None:
            self._before_read(self._catalog, ids)
        try:
            return self._reader.gather(self._catalog, ids, outputs, self.first_tick, into)
        except (IndexError, ValueError, OSError) as error:
            raise explain_read_error(error, self._catalog, ids) from error

    def read_windows(
        self, ids: Ids, leaf: int, into: NDArray[np.uint8], with_whole: bool = False
    ) -> WindowSlices | None:
        """Write the slices of an observation leaf to `into`, which has room for two whole observations per id.

        Return None if no observation is stored as slices of a window. `with_whole` says whether an observation that is
        one slice counts as a window of one slice.
        """
        if self._before_read is not None:
            self._before_read(self._catalog, ids)
        try:
            slices = self._reader.gather_windows(self._catalog, ids, leaf, self.first_tick, into, with_whole)
        except (IndexError, ValueError, OSError) as error:
            raise explain_read_error(error, self._catalog, ids) from error
        return None if slices is None else WindowSlices(*slices)

    def __len__(self) -> int:
        """Return the number of transitions. Entries added with `valid=False` are not transitions."""
        return self.next_id - self.first_id - self._catalog.invalid_count

    def observation_pairs(self, ids: Ids) -> list[tuple[Array, Array]]:
        """Return the observations and the next observations of `ids`, leaf by leaf."""
        columns = self.columns
        arrays = self.read(np.ascontiguousarray(ids), (*columns.obs_outputs, *columns.next_obs_outputs))
        leaf_count = len(columns.obs_outputs)
        return list(zip(arrays[:leaf_count], arrays[leaf_count:], strict=True))

    # ---------------------------------------------------------------- small fields, by ids of any shape

    @property
    def all_valid(self) -> bool:
        """Whether every entry is a transition."""
        return self._catalog.invalid_count == 0

    def are_valid(self, ids: Ids) -> Flags:
        """Return which ids are transitions. Entries added with `valid=False` are not."""
        valid: Flags = (self._read_flags(ids) & FLAG_INVALID) == 0
        return valid

    def are_ends(self, ids: Ids) -> Flags:
        """Return which ids are the last steps of their episodes: terminated or truncated."""
        ends: Flags = (self._read_flags(ids) & _ENDED) != 0
        return ends

    def rewards(self, ids: Ids) -> NDArray[Any]:
        """Return the rewards, in their own dtype."""
        return self._read_any_shape(ids, (self.columns.reward_output,))[0]

    def outcomes(self, ids: Ids) -> tuple[NDArray[Any], Flags, Flags]:
        """Return rewards, terminated and truncated."""
        columns = self.columns
        outputs = (columns.reward_output, columns.terminated_output, columns.truncated_output)
        reward, terminated, truncated = self._read_any_shape(ids, outputs)
        return reward, terminated, truncated

    def extra(self, number: int, ids: Ids) -> Array:
        """Return rows of extra number `number`."""
        return self._read_any_shape(ids, (self.columns.extra_outputs[number],))[0]

    def _read_flags(self, ids: Ids) -> NDArray[np.uint8]:
        return self._read_any_shape(ids, (self.columns.flags_output,))[0]

    def _read_any_shape(self, ids: Ids, outputs: tuple[int, ...]) -> list[Array]:
        wanted = np.ascontiguousarray(ids, np.int64)
        rows = self.read(wanted.reshape(-1), outputs)
        return [array.reshape(*wanted.shape, *array.shape[1:]) for array in rows]


def explain_read_error(error: Exception, catalog: Catalog, ids: Ids) -> HoldallError:
    """Return the error to raise if the native reader could not find or decode a transition."""
    if isinstance(error, IndexError):
        return TransitionIdError(f"Transition {error}.")
    return DamageError(f"A transition cannot be read. {find_damage(catalog, ids) or error}")


def find_damage(catalog: Catalog, ids: Ids) -> str:
    """Return which file with blocks of `ids` cannot be read, and why, as sentences. Empty if all can be read now."""
    ticks = np.unique(ids // catalog.lanes)
    for segment in catalog.segments:
        if not np.any((ticks >= segment.first_tick) & (ticks < segment.first_tick + segment.ticks)):
            continue
        for part in segment.parts:
            form = None if part.block is None else part.block.form
            if not isinstance(form, Coded) or form.location is None:
                continue
            try:
                form.in_memory()
            except (ValueError, OSError) as error:
                path = getattr(form.file, "path", "a checkpoint")
                reason = str(error).removesuffix(".")
                remedy = "To load a checkpoint without the transitions that need damaged bytes, pass recover=True."
                if isinstance(form.file, SpillFile):
                    remedy = "Check the disk of spill_dir."
                return (
                    f"A block of ticks {segment.first_tick} and later in file '{path}' is damaged: {reason}. {remedy}"
                )
    return ""
