"""Codecs that the writers of a memory share: the first of them that has seen enough of a field chooses one.

In:  slices of segments that are about to be closed.  Out: codecs, as far as they were chosen.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import ray

from holdall import storage
from holdall.schema import Bytes
from holdall.threads import end_before_python

_ENOUGH = 512
"""Slices that a choice is made on."""
_HARDLY_MORE = 1.03
_QUICK_LEVEL = 7
"""Zstandard's last level that is quick: those above take far longer for frames of a game, and hardly less room."""


_Key = tuple[int, storage.Window]
"""A field, and how it is cut."""


class SharedCodecs:
    """The codecs that one writer uses: those that the memory's first writer chose for the same fields.

    Args:
        prefer: How much slower sampling may get, see `holdall.ReplayMemory`.
    """

    def __init__(self, roster: Any, coder: storage.Coder, encoder: storage.Encoder, lanes: int, prefer: str) -> None:
        self._roster, self._coder, self._encoder, self._lanes = roster, coder, encoder, lanes
        self._cap = storage.COST_CAPS[prefer]
        self._codecs: dict[_Key, storage.Codec | None] = {}  # None: it is being chosen
        self._samples: dict[_Key, list[Bytes]] = {}

    def of_fields(self) -> dict[int, storage.Codec]:
        """Return the codecs of the fields of a segment that is about to be closed, as far as they were chosen."""
        chosen = {}
        for number, field in enumerate(self._encoder.fields):
            self._look((number, field.window), field.raw)
            if (codec := self._codecs.get((number, field.window))) is not None:
                chosen[number] = codec
        return chosen

    def _look(self, key: _Key, slices: Bytes) -> None:
        """Keep some slices of a field that has no codec yet, until there are enough to choose one."""
        if key in self._codecs:
            return
        kept = self._samples.setdefault(key, [])
        held = sum(map(len, kept))
        if held < _ENOUGH:
            kept.append(slices[: _ENOUGH - held].copy())
            return
        self._codecs[key] = None
        work = (key, np.concatenate(self._samples.pop(key)))
        thread = threading.Thread(target=self._choose, args=work, name="holdall-codec", daemon=True)
        end_before_python(thread)
        thread.start()

    def _choose(self, key: _Key, slices: Bytes) -> None:
        """Ask for the codec of a field, and choose one if there is none; if that fails, it is tried again later."""
        (field, window), asked = key, json.dumps([key[0], key[1].words()])
        try:
            words = ray.get(self._roster.codec.remote(asked))
            if words is None:
                # A segment stands for itself: a dictionary would have to follow it wherever it goes.
                leaf = self._encoder.leaves[field]
                chosen = storage.choose(
                    self._coder, leaf, window, slices, self._cap, 1, self._lanes, has_dictionary=False
                )
                words = storage.codec_words(_quicker(self._coder, chosen, slices))
                words = ray.get(self._roster.codec.remote(asked, words))
            self._codecs[key] = storage.codec_of(words, {})
        except ray.exceptions.RayError:
            del self._codecs[key]


def _quicker(coder: storage.Coder, codec: storage.Codec, slices: Bytes) -> storage.Codec:
    """Return the codec at a lower level if that takes hardly more bytes: steps of an environment wait for it."""
    sealed = coder.seal(slices, codec)
    if sealed is None:
        return codec
    for quick in (codec.hurried(), replace(codec, level=min(codec.level, _QUICK_LEVEL))):
        found = coder.seal(slices, quick)
        if found is not None and found.coded.data.nbytes <= _HARDLY_MORE * sealed.coded.data.nbytes:
            return quick
    return codec
