"""Rows of any dtype as rows of words, which are integers of 1, 2, 4 or 8 bytes.

torch cannot index, compare or copy every dtype on every device, but words always work. Comparing words compares bits:
NaN equals itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_MAX_TYPED_BYTES = 256
"""Rows up to this size are stored with their own dtype."""
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes that torch cannot index or copy in groups, and the dtypes that replace them."""


def choose_word(nbytes: int) -> torch.dtype:
    """Return the widest integer that divides `nbytes`."""
    return next(word for size, word in _WORDS if nbytes % size == 0)


def choose_stored_dtype(dtype: torch.dtype, nbytes: int) -> torch.dtype:
    """Return the dtype in which rows of `nbytes` bytes are stored, if they are never compared.

    Long rows are stored as words, which are copied faster. Short rows keep their dtype, so that reading them needs no
    conversion.
    """
    if nbytes > _MAX_TYPED_BYTES:
        return choose_word(nbytes)
    return _SIGNED.get(dtype, dtype)


def as_words(tensor: torch.Tensor, rows: int, word: torch.dtype) -> torch.Tensor:
    """Return a tensor as (rows, words of a row). The result shares the memory of a contiguous tensor if possible."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return tensor.new_empty((rows, 0), dtype=word)
    flat = tensor.contiguous().reshape(rows, -1)
    if flat.dtype == word:
        return flat
    if flat.storage_offset() * flat.itemsize % word.itemsize:
        flat = flat.clone()
    return flat.view(word)


def from_words(words: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return contiguous `words` as a tensor of `shape` and `dtype`. The result shares the memory of `words`."""
    if words.numel() == 0:
        return words.new_empty(shape, dtype=dtype)
    if words.dtype != dtype:
        words = words.view(dtype)
    return words if words.shape == shape else words.view(shape)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy every source to its target. One operation copies all tensors of the same dtypes."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.dtype in _SIGNED:
            target.copy_(source)
            continue
        group = groups.setdefault((target.dtype, source.dtype), ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)
