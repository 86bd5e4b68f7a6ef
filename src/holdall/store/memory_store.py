"""The protocol of a memory's store: `Store` on the host, or `DeviceStore` on a torch device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Flags, Ids
from holdall.memory_registry import PressureCheck
from holdall.report import FieldReport
from holdall.schema import Array, Leaf
from holdall.store.columns import Columns
from holdall.store.snapshot import StoreState

if TYPE_CHECKING:
    from holdall.store.store import Store


class MemoryBudget(Protocol):
    """How many bytes a store may use."""

    @property
    def max_bytes(self) -> int | None:
        """The hard limit. None without one."""


class StoreView(Protocol):
    """The transitions of a store, for reading. Methods that take ids of any shape return arrays of that shape.

    A view of a store on the host keeps the transitions that were held when the view was made. A store on a device is
    its own view, and reads its newest state.
    """

    @property
    def first_id(self) -> int:
        """The oldest transition id that is held."""

    @property
    def next_id(self) -> int:
        """The id of the transition that is written next."""

    @property
    def all_valid(self) -> bool:
        """Whether every entry is a transition."""

    @property
    def flags_changed(self) -> int:
        """A number that changes whenever `terminated` and `truncated` of held transitions are overwritten."""

    def __len__(self) -> int:
        """Return the number of transitions. Entries added with `valid=False` are not transitions."""
        ...

    def read(self, ids: Ids, outputs: tuple[int, ...], into: NDArray[np.uint8] | None = None, /) -> tuple[Array, ...]:
        """Return the rows of `ids`, one array per output of `Columns`. Raise TransitionIdError if one is not held."""
        ...

    def are_valid(self, ids: Ids, /) -> Flags:
        """Return which ids, of any shape, are transitions."""

    def are_ends(self, ids: Ids, /) -> Flags:
        """Return which ids, of any shape, are the last steps of episodes."""

    def rewards(self, ids: Ids, /) -> NDArray[Any]:
        """Return the rewards of ids of any shape, in their own dtype."""

    def outcomes(self, ids: Ids, /) -> tuple[NDArray[Any], Flags, Flags]:
        """Return rewards, terminated and truncated of ids of any shape."""
        ...

    def extra(self, number: int, ids: Ids, /) -> Array:
        """Return rows of extra number `number`, of ids of any shape."""


class MemoryStore(Protocol):
    """Every field of every transition of one memory. All methods may be called from any thread.

    Adapters use it as `memory.store`. Arguments are checked by the store, but `rewrite` and `set_flags` expect ids that
    are transitions.
    """

    @property
    def columns(self) -> Columns:
        """Numbers of the columns and of their outputs."""

    @property
    def budget(self) -> MemoryBudget:
        """How many bytes the store may use."""

    # ---------------------------------------------------------------- writing

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
    ) -> None:
        """Write one tick, or raise ArgumentError and write nothing."""

    def extend(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        extras: Any = None,
        valid: Any = None,
    ) -> None:
        """Write whole trajectories: the arguments of `append` with a leading time axis."""

    def fit_rows(self, leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Any:
        """Return new rows of an extra as `rewrite` takes them, or raise ArgumentError."""

    def rewrite(self, ids: Ids, rows: Mapping[int, Any], /) -> None:
        """Overwrite rows of extras. `rows` maps the number of an extra to its rows.

        If an id occurs twice, its last row counts.
        """

    def set_flags(self, ids: Ids, terminated: Flags, truncated: Flags) -> None:
        """Overwrite `terminated` and `truncated`. If an id occurs twice, its last flags count."""

    # ---------------------------------------------------------------- reading

    @property
    def first_id(self) -> int:
        """The oldest transition id that is held."""

    @property
    def next_id(self) -> int:
        """The id of the transition that is written next."""

    @property
    def held_count(self) -> int:
        """Number of entries that are held, also those that are not transitions."""
        ...

    def __len__(self) -> int:
        """Return the number of transitions."""
        ...

    def view(self) -> StoreView:
        """Return a view of the transitions that are held now."""

    # ---------------------------------------------------------------- checkpoints

    @property
    def block_source(self) -> Store | None:
        """The store from which a save gets codecs, and to which it offers compressed blocks. None: there is none."""

    def snapshot(self) -> StoreState:
        """Return everything that is held. The state never changes."""

    def restore(self, state: StoreState) -> None:
        """Load the transitions of `state` under their ids. Only for a store without ticks."""

    # ---------------------------------------------------------------- accounting

    @property
    def segments(self) -> int:
        """Number of segments on the host."""
        ...

    @property
    def staging_bytes(self) -> int:
        """Memory on the host that is kept for batches."""
        ...

    @property
    def backlog(self) -> int:
        """Number of blocks that are to be compressed or moved to disk."""
        ...

    @property
    def failure(self) -> str:
        """Why a block could not be compressed or moved to disk. Empty if all could."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of the disk tier."""
        ...

    @property
    def dropped_early(self) -> int:
        """Number of transitions that were evicted before the capacity was reached."""
        ...

    @property
    def drop_reason(self) -> str:
        """Why transitions were evicted early, and what to do. Empty if none were."""

    @property
    def capacity_that_fits(self) -> int | None:
        """Transitions that the limit holds, if that is known and less than the capacity."""

    def report(self) -> list[FieldReport]:
        """Return the bytes of every field."""

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Replace the function that is called each time the store has grown by a segment. None: no function."""

    def relieve(self, nbytes: int) -> None:
        """Reduce the bytes in RAM by up to `nbytes`, without evicting transitions."""

    def wait_idle(self) -> None:
        """Wait until the work in the background is done."""

    def close(self) -> None:
        """Free everything. Batches that were returned stay valid."""
