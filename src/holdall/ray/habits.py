"""Habits: the codec that a field's slices get, the same for all writers of a memory.

In:  slices of a writer's first blocks.  Out: codecs by field.
Invariant: a choice only moves bytes and time. It is made once for a memory, on a field's own slices, in the background
of one writer; until then slices go out as `plain_codec` says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from holdall.checkpoint.records import window_words
from holdall.experience.arena import Bytes
from holdall.experience.disk.record import Buffer, pack
from holdall.experience.disk.slice_record import codec_of, codec_words
from holdall.experience.sealing.choice import COST_CAPS, choose
from holdall.experience.sealing.codec import Codec, Dictionary
from holdall.experience.sealing.sealed import Coder
from holdall.experience.window import Window
from holdall.ray.block import open_record, read_part
from holdall.schema import Leaf

CODEC = "codec"
_ENOUGH = 512
"""Slices that a choice is made on."""
_HARDLY_MORE = 1.03
_ASK_AGAIN = 16
"""Blocks between two questions to the roster."""


class Habits:
    """The codecs that one writer uses.

    Args:
        prefer: How dear sampling may be, see `holdall.ReplayMemory`.
    """

    def __init__(self, roster: Any, coder: Coder, leaves: Sequence[Leaf], lanes: int, prefer: str) -> None:
        self._roster = roster
        self._coder = coder
        self._leaves = leaves
        self._lanes = lanes
        self._cap = COST_CAPS[prefer]
        self._codecs: dict[int, tuple[Window, Codec]] = {}
        self._samples: dict[int, list[Bytes]] = {}
        self._asked: dict[int, int] = {}
        self._questions: dict[int, tuple[Window, Any]] = {}
        self._choosing: set[int] = set()

    def codecs(self, windows: Sequence[Window]) -> dict[int, Codec]:
        """Return the codecs of fields that are cut by these windows, as far as they were chosen."""
        return {field: codec for field, (window, codec) in self._codecs.items() if window == windows[field]}

    def look(self, field: int, window: Window, slices: Bytes) -> None:
        """Look at the slices of a block that is about to be closed, if there is something to choose."""
        known = self._codecs.get(field)
        if field in self._choosing or (known is not None and known[0] == window):
            return
        if field in self._questions:
            self._hear(field)
            return
        kept = self._samples.setdefault(field, [])
        if kept and kept[0].shape[1] != slices.shape[1]:
            kept.clear()
        held = sum(map(len, kept))
        if held < _ENOUGH:
            kept.append(slices[: _ENOUGH - held].copy())
            return
        if self._asked.get(field, 0) > 0:
            self._asked[field] -= 1
            return
        self._questions[field] = window, self._roster.codec.remote(_key(field, window))

    def _hear(self, field: int) -> None:
        """Look whether the roster answered."""
        window, question = self._questions[field]
        ready, _ = ray.wait([question], timeout=0)
        if not ready:
            return
        del self._questions[field]
        try:
            answer, told = ray.get(question)
        except ray.exceptions.RayError:  # blocks go on as they are
            self._asked[field] = _ASK_AGAIN
            return
        if answer == "chosen":
            self._codecs[field] = window, unpack_codec(told)
            self._samples.pop(field, None)
        elif answer == "choose":
            slices = np.concatenate(self._samples[field])
            self._choosing.add(field)
            work = (field, window, slices)
            threading.Thread(target=self._choose, args=work, name="holdall-codec", daemon=True).start()
        else:
            self._asked[field] = _ASK_AGAIN

    def _choose(self, field: int, window: Window, slices: Bytes) -> None:
        try:
            chosen = choose(self._coder, self._leaves[field], window, slices, self._cap, 1, self._lanes)
            codec = _quicker(self._coder, chosen, slices)
            self._questions[field] = window, self._roster.chose.remote(_key(field, window), pack_codec(codec))
        finally:
            self._choosing.discard(field)


def _quicker(coder: Coder, codec: Codec, slices: Bytes) -> Codec:
    """Return the codec at a lower level if that takes hardly more bytes: steps of an environment wait for it."""
    hurried = codec.hurried()
    sealed, quick = (coder.seal(slices, each) for each in (codec, hurried))
    if sealed is None or quick is None:
        return codec
    return hurried if quick.coded.data.nbytes <= _HARDLY_MORE * sealed.coded.data.nbytes else codec


def pack_codec(codec: Codec) -> bytes:
    """Return a codec, with its dictionary, as a record."""
    parts: dict[str, Buffer] = {} if codec.dictionary is None else {"dictionary": codec.dictionary.content}
    return b"".join(pack(CODEC, {"codec": codec_words(codec)}, parts, frozenset()))


def unpack_codec(payload: bytes) -> Codec:
    """Read a codec that was received."""
    record = open_record(payload, CODEC)
    words = record.head["codec"]
    named = words["dictionary"]
    known = {} if named is None else {named: Dictionary(read_part(record, payload, "dictionary"))}
    return codec_of(words, known)


def _key(field: int, window: Window) -> str:
    return json.dumps([field, window_words(window)])
