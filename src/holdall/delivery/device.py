"""Batches of torch tensors on a device whose memory is not the host's.

The rows are read on the host, by any thread, and cross the bus through pinned memory on a stream of their own. The
stream that uses the batch waits for that copy; no thread does. Observations that are stored as slices of a window are
sent as slices, each of them once, and put together on the device: a stack of four frames and its next stack are five
frames on the bus.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.delivery import Delivery, Nesting, Rows
from holdall.delivery.host import DrawnRows, read_goal
from holdall.delivery.staging import Staging, align, is_asynchronous, split_block, torch_dtype
from holdall.delivery.words import choose_word
from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Schema
from holdall.store.columns import Columns

_MAX_REWARD_BYTES = 8
"""Bytes of one number of a reward, at most."""
_PIECES = 4
"""Pieces in which a large batch is sent, unless they are too small or too large."""
_MIN_PIECE_BYTES = 16 * 2**20
_MAX_PIECE_BYTES = 24 * 2**20
_START_BYTES = 4
"""Bytes of the number of a slice."""
_MIN_LARGE_BYTES = 1024
"""Rows from this size on are sent in pieces."""


class _Sent(NamedTuple):
    """A batch whose copies are under way."""

    batch: Batch
    blocks: list[torch.Tensor]  # One tensor of every block of memory that the batch uses.
    event: Any  # Recorded after the copies. None if they are complete.


class DeviceDelivery(Delivery):
    """Makes batches on one device.

    Args:
        device: Name of a torch device.
        is_jax: Return arrays of JAX in place of tensors.
    """

    def __init__(self, schema: Schema, device: str, *, is_jax: bool = False) -> None:
        self._schema = schema
        self._columns = Columns(schema)
        self._observation = Nesting(schema.observation)
        self._action = Nesting(schema.action)
        self._extras = Nesting(schema.extras)
        self._device = find_device(device)
        self._is_jax = is_jax
        self._staging = Staging(self._device)
        self._stream: Any = None
        if is_asynchronous(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for leaf in schema.leaves:
            require_torch_dtype(leaf, device)
        self._row_bytes = _measure_rows(schema, self._columns)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory on the host."""
        return self._staging.nbytes

    def prepare(self, draw: Draw, rows: Rows) -> _Sent:
        """Read the rows, and start to copy them."""
        if draw.goals is not None and draw.goals.rows.size:
            drawn = DrawnRows.read(self._columns, draw, rows)
            drawn.relabel(self._schema, draw.goals, read_goal(self._schema, self._columns, draw.goals, rows))
            return self._send(draw, drawn)
        columns = self._columns
        others = _list_others(draw)
        with self._use_stream():
            transfer = _Transfer(self._staging, self._row_bytes, rows, self._stream)
            if draw.last_ids is None:
                found = self._read_plain(transfer, draw.ids.reshape(-1), others)
            else:
                found = transfer.read(draw.ids.reshape(-1), columns.first_step_outputs, [])
                found += transfer.read(draw.last_ids.reshape(-1), columns.last_step_outputs, others)
            count = len(columns.batch_outputs)
            return self._finish(draw, DrawnRows.split(columns, found[:count]), found[count:], transfer.blocks)

    def _read_plain(self, transfer: _Transfer, ids: NDArray[np.int64], others: list[Array]) -> list[torch.Tensor]:
        """Return the rows of `ids`, and copies of `others`. Slices that observations share are sent once."""
        columns = self._columns
        by_output: dict[int, torch.Tensor] = {}
        for i, leaf in enumerate(self._schema.observation.leaves):
            if leaf.nbytes < _MIN_LARGE_BYTES:
                continue
            outputs = (columns.obs_outputs[i], columns.next_obs_outputs[i])
            pair = transfer.read_windows(ids, i, leaf, outputs)
            if pair is not None:
                by_output |= zip(outputs, pair, strict=True)
        rest = tuple(output for output in columns.batch_outputs if output not in by_output)
        found = transfer.read(ids, rest, others)
        by_output |= zip(rest, found, strict=False)
        return [by_output[output] for output in columns.batch_outputs] + found[len(rest) :]

    def build(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """Make the batch of rows that were read, which may come from other machines."""
        return self.receive(self._send(draw, drawn))

    def _send(self, draw: Draw, drawn: DrawnRows) -> _Sent:
        """Start to copy rows to the device."""
        arrays = drawn.list_arrays()
        with self._use_stream():
            tensors = self._staging.send([*arrays, *_list_others(draw)])
            parts = iter(tensors)
            drawn.convert(lambda _: next(parts))
            return self._finish(draw, drawn, tensors[len(arrays) :], tensors[:1])

    def _finish(self, draw: Draw, drawn: DrawnRows, others: list[torch.Tensor], blocks: list[torch.Tensor]) -> _Sent:
        """Make the batch of tensors whose copies were started on the current stream."""
        event = None if self._stream is None else self._stream.record_event()
        parts = iter(others)
        weights = next(parts)
        reward = drawn.reward if draw.reward is None else next(parts)
        if draw.ids.ndim > 1:
            drawn.reward = reward
            drawn.reshape(draw.ids.shape)
            reward = drawn.reward
        batch = Batch(
            obs=self._observation.build(drawn.obs),
            action=self._action.build(drawn.action),
            reward=reward,
            next_obs=self._observation.build(drawn.next_obs),
            terminated=drawn.terminated,
            truncated=drawn.truncated,
            extras=self._extras.build(drawn.extras),
            ids=draw.ids,
            weights=weights,
            discount=None if draw.discount is None else next(parts),
            mask=None if draw.mask is None else next(parts),
        )
        return _Sent(batch, blocks, event)

    def receive(self, prepared: _Sent) -> Batch:
        """Return the batch. The current stream waits for its copies."""
        if prepared.event is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(prepared.event)
            for block in prepared.blocks:
                block.record_stream(stream)
        return prepared.batch.jax() if self._is_jax else prepared.batch

    def _use_stream(self) -> Any:
        """Return a context in which copies run on the stream of this delivery."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)


class _Transfer:
    """Reads rows of one batch into pinned memory and starts to copy them on `stream`, which is the current one.

    Attributes:
        blocks: One tensor of every block of memory on the device.
    """

    def __init__(self, staging: Staging, row_bytes: dict[int, int], rows: Rows, stream: Any) -> None:
        self.blocks: list[torch.Tensor] = []
        self._staging = staging
        self._row_bytes = row_bytes
        self._rows = rows
        self._stream = stream

    def read(self, ids: NDArray[np.int64], outputs: tuple[int, ...], others: list[Array]) -> list[torch.Tensor]:
        """Return the rows of `ids`, one tensor per output, and then copies of `others`."""
        total = self._count_bytes(len(ids), outputs)
        if total <= _MIN_PIECE_BYTES:
            return self._read_together(ids, outputs, others)
        large = tuple(output for output in outputs if self._row_bytes[output] >= _MIN_LARGE_BYTES)
        small = tuple(output for output in outputs if output not in large)
        tensors = self._read_together(ids, small, others)
        by_output = dict(zip(small, tensors, strict=False))
        piece_bytes = min(max(total // _PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        by_output |= zip(large, self._read_in_pieces(ids, large, piece_bytes), strict=True)
        return [by_output[output] for output in outputs] + tensors[len(small) :]

    def read_windows(
        self, ids: NDArray[np.int64], leaf: int, form: Leaf, outputs: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return observations and next observations of one leaf. None if they are not stored as slices of a window."""
        rows = max(1, _MAX_PIECE_BYTES // (2 * form.nbytes))
        parts = []
        missing = []
        for first in range(0, len(ids), rows):
            part = self._read_window_piece(ids[first : first + rows], leaf, form)
            if part is None:
                return None
            both, positions = part
            parts.append(both)
            missing.append(first + positions)
        if not parts:
            return None
        tensors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        self._fill_missing(tensors, ids, np.concatenate(missing), outputs)
        tensors = tensors.view(torch_dtype(form.dtype)).view(2, len(ids), *form.shape)
        self.blocks.append(tensors)
        return tensors[0], tensors[1]

    def _read_window_piece(
        self, ids: NDArray[np.int64], leaf: int, form: Leaf
    ) -> tuple[torch.Tensor, NDArray[np.int64]] | None:
        """Send the slices of some rows, and put observations together on the device.

        Return bytes of shape (2, rows, bytes), and the rows that are not stored as slices of the window.
        """
        device = self._staging.device
        starts_bytes = 2 * len(ids) * _START_BYTES
        with self._staging.use_slot(align(2 * len(ids) * form.nbytes) + starts_bytes, self._stream) as slot:
            found = self._rows.read_windows(ids, leaf, slot.array)
            if found is None:
                return None
            begin = align(found.nbytes)
            slot.array[begin : begin + starts_bytes] = np.maximum(found.starts, 0).reshape(-1).view(np.uint8)
            block = torch.empty(align(begin + starts_bytes), dtype=torch.uint8, device=device)
            block[: begin + starts_bytes].copy_(slot.memory[: begin + starts_bytes], non_blocking=True)
        word = choose_word(found.run_bytes)
        slices = block[: found.nbytes].view(word).view(found.slice_count, -1)
        starts = block[begin : begin + starts_bytes].view(torch.int32)
        numbers = starts.unsqueeze(1) + torch.arange(found.window_count, dtype=torch.int32, device=device)
        rows = slices.index_select(0, numbers.view(-1))
        if found.outer > 1:
            stretches = rows.view(2 * len(ids), found.window_count, found.outer, -1).transpose(1, 2)
            rows = stretches.reshape(2 * len(ids), -1)
        # Pieces may have different windows, so they are joined as bytes.
        return rows.view(2, len(ids), -1).view(torch.uint8), np.flatnonzero(found.starts[0] < 0)

    def _fill_missing(
        self, both: torch.Tensor, ids: NDArray[np.int64], missing: NDArray[np.int64], outputs: tuple[int, int]
    ) -> None:
        """Read rows that are stored in another form, and write them over what stands in their places."""
        if not missing.size:
            return
        obs, next_obs, positions = self.read(ids[missing], outputs, [missing])
        both[0].index_copy_(0, positions, obs.reshape(len(missing), -1).view(both.dtype))
        both[1].index_copy_(0, positions, next_obs.reshape(len(missing), -1).view(both.dtype))

    def _read_together(
        self, ids: NDArray[np.int64], outputs: tuple[int, ...], others: list[Array]
    ) -> list[torch.Tensor]:
        """Read all outputs, and send them and other arrays in one copy."""
        nbytes = self._count_bytes(len(ids), outputs) + sum(align(array.nbytes) for array in others)
        with self._staging.use_slot(nbytes, self._stream) as slot:
            arrays = [*self._rows.read(ids, outputs, slot.array), *others]
            starts = _find_starts(arrays)
            for start, array in zip(starts[len(outputs) :], others, strict=False):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                slot.array[start : start + array.nbytes] = flat
            block = torch.empty(starts[-1], dtype=torch.uint8, device=self._staging.device)
            block.copy_(slot.memory[: starts[-1]], non_blocking=True)
        self.blocks.append(block)
        return split_block(block, starts, arrays)

    def _read_in_pieces(self, ids: NDArray[np.int64], outputs: tuple[int, ...], piece_bytes: int) -> list[torch.Tensor]:
        """Read some rows at a time. While they cross the bus, the next ones are read."""
        if not outputs:
            return []
        rows = max(1, piece_bytes // sum(self._row_bytes[output] for output in outputs))
        tensors: list[torch.Tensor] = []
        for first in range(0, len(ids), rows):
            part = ids[first : first + rows]
            with self._staging.use_slot(self._count_bytes(len(part), outputs), self._stream) as slot:
                arrays = self._rows.read(part, outputs, slot.array)
                if not tensors:
                    tensors = [self._allocate(len(ids), array) for array in arrays]
                pieces = split_block(slot.memory, _find_starts(arrays), arrays)
                for tensor, piece in zip(tensors, pieces, strict=True):
                    tensor[first : first + len(part)].copy_(piece, non_blocking=True)
        self.blocks += tensors
        return tensors

    def _allocate(self, rows: int, array: Array) -> torch.Tensor:
        shape = (rows, *array.shape[1:])
        return torch.empty(shape, dtype=torch_dtype(array.dtype), device=self._staging.device)

    def _count_bytes(self, rows: int, outputs: tuple[int, ...]) -> int:
        """Return the bytes of all outputs at most."""
        return sum(align(rows * self._row_bytes[output]) for output in outputs)


def _list_others(draw: Draw) -> list[Array]:
    """Return the arrays of a draw that become part of the batch."""
    given = (draw.weights, draw.reward, draw.discount, draw.mask)
    return [array for array in given if array is not None]


def _find_starts(arrays: Sequence[Array]) -> list[int]:
    """Return where each of some arrays begins that follow each other in memory, and where the last one ends."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + align(array.nbytes))
    return starts


def _measure_rows(schema: Schema, columns: Columns) -> dict[int, int]:
    """Return the most bytes that one row of every output takes."""
    sizes = {columns.reward_output: _MAX_REWARD_BYTES * prod(schema.reward_shape)}
    for leaf, output, next_output in zip(
        schema.observation.leaves, columns.obs_outputs, columns.next_obs_outputs, strict=True
    ):
        sizes[output] = leaf.nbytes
        sizes[next_output] = leaf.nbytes
    for leaf, output in zip(schema.action.leaves, columns.action_outputs, strict=True):
        sizes[output] = leaf.nbytes
    for leaf, output in zip(schema.extras.leaves, columns.extra_outputs, strict=True):
        sizes[output] = leaf.nbytes
    return sizes | {columns.terminated_output: 1, columns.truncated_output: 1}


def find_device(name: str) -> torch.device:
    """Return the torch device of that name, with the number of the current device if the name has none."""
    device = torch.device(name)
    index: int | None = device.index
    if device.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def require_torch_dtype(leaf: Leaf, device: str) -> None:
    """Raise ArgumentError if torch has no dtype for a leaf."""
    try:
        torch_dtype(leaf.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"device ({device}): torch has no dtype for {leaf.name or 'the space'} ({leaf.dtype}). Use device=None for "
            "NumPy arrays."
        ) from error
