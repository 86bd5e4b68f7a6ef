"""The search for windows: which fields are looked at, and when again.

In:  ticks as they come.  Out: for every field whose search is over, how its observations overlap, if they do.
"""

from __future__ import annotations

from typing import Any

from holdall.experience.arena import as_bytes
from holdall.experience.window import Window, WindowScout
from holdall.schema import Array, Leaf


class WindowSearches:
    """One search a field at a time; ever more seldom in vain."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._scouts: dict[int, WindowScout] = {}
        self._in_vain: dict[int, int] = {}
        self._rest: dict[int, int] = {}  # segments to pass before the next search

    def state(self) -> dict[str, Any]:
        """Return how far the searches are, as plain numbers."""
        return {
            "scouts": {str(field): scout.state() for field, scout in self._scouts.items()},
            "in_vain": {str(field): count for field, count in self._in_vain.items()},
            "rest": {str(field): count for field, count in self._rest.items()},
        }

    def restore(self, state: dict[str, Any], leaves: list[Leaf]) -> None:
        """Go on where `state` was returned elsewhere."""
        self._scouts = {}
        for field, leaf in enumerate(leaves):
            if str(field) in state["scouts"]:
                self.begin(field, leaf)
                self._scouts[field].restore(state["scouts"][str(field)])
        self._in_vain = {int(field): int(count) for field, count in state["in_vain"].items()}
        self._rest = {int(field): int(count) for field, count in state["rest"].items()}

    def begin(self, field: int, leaf: Leaf) -> None:
        """Look at a field from the next tick on."""
        self._scouts[field] = WindowScout(leaf)

    def consider(self, field: int, leaf: Leaf) -> None:
        """Begin a search in a field whose segment closed without a window that fits."""
        if field in self._scouts:
            return
        self._rest[field] = self._rest.get(field, 0) - 1
        if self._rest[field] <= 0:
            self.begin(field, leaf)

    @property
    def under_way(self) -> bool:
        """Whether any field is looked at."""
        return bool(self._scouts)

    def look(self, obs: list[Array], next_obs: list[Array]) -> list[int]:
        """Show a tick to the scouts; return the fields whose search is over."""
        for field, scout in self._scouts.items():
            scout.look(as_bytes(obs[field], self._lanes), as_bytes(next_obs[field], self._lanes))
        return [field for field, scout in self._scouts.items() if scout.done]

    def end(self, field: int) -> Window | None:
        """Close a search and return what it found."""
        finding = self._scouts.pop(field).finding
        self._in_vain[field] = 0 if finding else self._in_vain.get(field, 0) + 1
        self._rest[field] = 1 << min(self._in_vain[field], 16)
        return finding
