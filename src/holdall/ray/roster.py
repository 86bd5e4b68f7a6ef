"""The roster: which shards there are, and what their writers and learners have to agree on.

In:  shards that come and go; questions.  Out: the list of shards with a version; lives of shards; the codec of a field.
Invariant: it is off the path of the data. A number is given to one shard only, a life of a shard begins once, and a
field's codec is chosen by one writer, whatever many ask at the same time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

_CHOOSING_S = 60.0
"""How long a writer may take to choose a codec before another is asked to."""


class Roster:
    """What is agreed on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._shards: dict[int, tuple[Any, bool]] = {}  # handle, and whether it takes new blocks
        self._lives: dict[int, int] = {}
        self._codecs: dict[str, bytes] = {}
        self._choosing: dict[str, float] = {}

    def begin_life(self, shard: int, first: int) -> int:
        """Count a shard's lives, from `first` on."""
        with self._lock:
            life = self._lives[shard] = max(first, self._lives.get(shard, -1) + 1)
            return life

    def admit(self, shard: int, handle: list[Any]) -> int:
        """Add a shard; its handle comes in a list, or Ray would wait for it."""
        with self._lock:
            self._shards[shard] = (handle[0], True)
            self._version += 1
            return self._version

    def retire(self, shard: int) -> int:
        """Have no new blocks sent to a shard."""
        with self._lock:
            handle, _ = self._shards[shard]
            self._shards[shard] = (handle, False)
            self._version += 1
            return self._version

    def dismiss(self, shard: int) -> int:
        """Take a shard off the list."""
        with self._lock:
            self._shards.pop(shard, None)
            self._version += 1
            return self._version

    def shards(self, known: int) -> tuple[int, dict[int, tuple[Any, bool]] | None]:
        """Return the list and its version; no list if the version is known."""
        with self._lock:
            return self._version, None if known == self._version else dict(self._shards)

    def codec(self, key: str) -> tuple[str, bytes]:
        """Say which codec a field's slices get: "chosen" and the codec, "choose" it, or "wait"."""
        with self._lock:
            if key in self._codecs:
                return "chosen", self._codecs[key]
            now = time.monotonic()
            if now < self._choosing.get(key, 0.0):
                return "wait", b""
            self._choosing[key] = now + _CHOOSING_S
            return "choose", b""

    def chose(self, key: str, codec: bytes) -> tuple[str, bytes]:
        """Take over a choice, unless another was quicker; return the one that stands."""
        with self._lock:
            return "chosen", self._codecs.setdefault(key, codec)
