"""Batches of torch tensors on a device whose memory is not the host's.

The rows are read on the host, by any thread, and copied through pinned memory on a separate stream. The stream that
uses the batch waits for the copy, but no thread waits. Observations that are stored as slices of a window are sent as
slices, and assembled on the device: for a stack of four frames and the next stack, five frames are sent. Steps of a
sequence share slices, and each slice of the sequence is sent once. In large batches of sequences, observations that are
stored whole, such as camera images, are sent once, too.

A batch that fits into one piece is read by `prepare` and sent by `start`. So the thread that prepares batches calls no
torch operation for such a batch. Larger batches, and slices of windows, are sent by `prepare` while it reads.
"""

from __future__ import annotations

import contextlib
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.batch import Batch, Draw
from holdall.delivery.batch_builder import BatchBuilder
from holdall.delivery.delivery import Delivery, Rows
from holdall.delivery.drawn_rows import DrawnRows, read_goal
from holdall.delivery.staging import (
    Layout,
    Slot,
    Staging,
    describe_lack_of_memory,
    find_layout,
    is_asynchronous,
    split_block,
    torch_dtype,
)
from holdall.delivery.words import choose_word
from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Schema
from holdall.store.columns import Columns
from holdall.store.view import ALIGNMENT_BYTES, align

_MAX_REWARD_BYTES = 8
"""Maximum number of bytes of one number of a reward."""
_PIECES = 4
"""Number of pieces of a large batch, unless these would be too small or too large."""
_MIN_PIECE_BYTES = 16 * 2**20
_MAX_PIECE_BYTES = 24 * 2**20
_START_BYTES = 4
"""Bytes of the number of a slice, which is an int32."""
_MIN_LARGE_BYTES = 1024
"""In large batches, rows from this size on are sent in pieces. Observations from this size on are sent as slices."""


Key = int | str
"""An output of `Columns`, or the name of an array of a draw."""
_REPLACED_REWARD = "reward"
"""Name of a draw's own rewards, which replace the stored rewards."""


class _Packed(NamedTuple):
    """Arrays in one block of memory on the device."""

    keys: tuple[Key, ...]
    block: torch.Tensor
    layout: Layout


class _Unsent(NamedTuple):
    """Arrays in pinned memory that have not been sent yet."""

    keys: tuple[Key, ...]
    slot: Slot
    layout: Layout


class _Prepared(NamedTuple):
    """A batch whose rows were read."""

    draw: Draw
    transfer: _Transfer


class DeviceDelivery(Delivery):
    """Delivery to one device.

    Args:
        device: Name of a torch device.
        is_jax: Return arrays of JAX instead of tensors.
    """

    def __init__(self, schema: Schema, device: str, *, is_jax: bool = False) -> None:
        self._schema = schema
        self._columns = Columns(schema)
        self._builder = BatchBuilder(schema)
        self._device = find_device(device)
        self._is_jax = is_jax
        self._staging = Staging(self._device)
        self._stream: Any = None
        if is_asynchronous(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for leaf in schema.leaves:
            require_torch_dtype(leaf, device)
        self._row_bytes = _measure_rows(schema, self._columns)
        # Leaves that are worth sending as slices of a window, by number.
        self._large_leaves = [
            (i, leaf) for i, leaf in enumerate(schema.observation.leaves) if leaf.nbytes >= _MIN_LARGE_BYTES
        ]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory on the host."""
        return self._staging.nbytes

    def prepare(self, draw: Draw, rows: Rows) -> _Prepared:
        """Read the rows. Send rows of a large batch while further rows are read."""
        try:
            return self._prepare(draw, rows)
        except torch.OutOfMemoryError as error:
            raise self._explain(draw, error) from error

    def _prepare(self, draw: Draw, rows: Rows) -> _Prepared:
        if draw.goals is not None and draw.goals.rows.size:
            drawn = DrawnRows.read(self._columns, draw, rows)
            drawn.relabel(self._schema, draw.goals, read_goal(self._schema, self._columns, draw.goals, rows))
            return self._send(draw, drawn)
        transfer = _Transfer(self._staging, self._row_bytes, rows, self._stream)
        if draw.last_ids is None:
            self._read_plain(transfer, draw)
        else:
            transfer.read(draw.ids.reshape(-1), self._columns.first_step_outputs, {})
            transfer.read(draw.last_ids.reshape(-1), self._columns.last_step_outputs, _list_others(draw))
        if transfer.has_sent:
            # If the rest were sent later, its copy would follow copies of the next batch.
            transfer.start()
        return _Prepared(draw, transfer)

    def _read_plain(self, transfer: _Transfer, draw: Draw) -> None:
        """Read all rows of a draw. Slices that observations share are sent once."""
        columns = self._columns
        ids = draw.ids.reshape(-1)
        outputs = columns.batch_outputs
        for i, leaf in self._large_leaves:
            pair = (columns.obs_outputs[i], columns.next_obs_outputs[i])
            # Steps of sequences share whole observations, too. Small batches ignore this, so that one copy is enough.
            with_whole = draw.ids.ndim > 1 and 2 * len(ids) * leaf.nbytes > _MIN_PIECE_BYTES
            if transfer.read_windows(ids, i, leaf, pair, with_whole=with_whole):
                outputs = tuple([output for output in outputs if output not in pair])
        transfer.read(ids, outputs, _list_others(draw))

    def prepare_drawn(self, draw: Draw, drawn: DrawnRows) -> _Prepared:
        """Begin to send `drawn`. Its arrays may be changed after this call."""
        try:
            return self._send(draw, drawn)
        except torch.OutOfMemoryError as error:
            raise self._explain(draw, error) from error

    def _send(self, draw: Draw, drawn: DrawnRows) -> _Prepared:
        """Begin to send rows to the device."""
        arrays: dict[Key, Array] = dict(zip(self._columns.batch_outputs, drawn.join(), strict=True))
        arrays |= _list_others(draw)
        transfer = _Transfer(self._staging, self._row_bytes, None, self._stream)
        transfer.send(arrays)
        return _Prepared(draw, transfer)

    def start(self, prepared: _Prepared) -> None:
        """Begin to send the rows that `prepare` read and did not send."""
        try:
            prepared.transfer.start()
        except torch.OutOfMemoryError as error:
            raise self._explain(prepared.draw, error) from error

    def _explain(self, draw: Draw, error: torch.OutOfMemoryError) -> ArgumentError:
        """Return the error to raise if the device has no memory for a batch."""
        return ArgumentError(describe_lack_of_memory(len(draw.ids), self._device, error))

    def receive(self, prepared: _Prepared) -> Batch:
        """Return the batch. The current stream waits for copies that run on another stream."""
        draw, transfer = prepared
        try:
            if self._stream is None:
                transfer.start()
            else:
                self._wait_for_copies(transfer)
        except torch.OutOfMemoryError as error:
            raise self._explain(draw, error) from error
        batch = self._make_batch(draw, transfer.split())
        return batch.jax() if self._is_jax else batch

    def _wait_for_copies(self, transfer: _Transfer) -> None:
        """Make the current stream wait for all copies of a transfer."""
        stream = torch.cuda.current_stream(self._device)
        if transfer.event is None:
            # Nothing was sent yet. If the current stream copies, it does not have to wait for another stream.
            transfer.start_on(stream)
            return
        transfer.start()
        stream.wait_event(transfer.event)
        for block in transfer.list_blocks():
            block.record_stream(stream)

    def _make_batch(self, draw: Draw, tensors: dict[Key, torch.Tensor]) -> Batch:
        """Return the batch from the tensors of all outputs and of the arrays of a draw."""
        columns = self._columns
        rows = DrawnRows.split(columns, [tensors[output] for output in columns.batch_outputs])
        if draw.ids.ndim > 1:
            rows = rows.reshape(draw.ids.shape)
        if draw.reward is not None:
            rows = rows._replace(reward=tensors[_REPLACED_REWARD])
        return self._builder.build(rows, draw.ids, tensors["weights"], tensors.get("discount"), tensors.get("mask"))


class _Transfer:
    """The rows of one batch on their way to the device, through pinned memory. Not thread-safe.

    Args:
        row_bytes: Maximum size of a row of every output.
        rows: Where rows are read. None if they were read elsewhere.
        stream: Stream of the copies. None on devices without streams.

    Attributes:
        event: Recorded after the last copy was started. None if nothing was sent, or if copies do not run in streams.
    """

    def __init__(self, staging: Staging, row_bytes: dict[int, int], rows: Rows | None, stream: Any) -> None:
        self._staging = staging
        self._row_bytes = row_bytes
        self._rows: Any = rows
        self._stream = stream
        self._tensors: dict[Key, torch.Tensor] = {}  # Outputs that are not part of a block.
        self._packed: list[_Packed] = []
        self._unsent: list[_Unsent] = []
        self.event: Any = None

    def start(self) -> None:
        """Begin to send all arrays that have not been sent yet. An interrupted call may be repeated."""
        if self._unsent:
            with self._use_stream():
                self.start_on(self._stream)

    def start_on(self, stream: Any) -> None:
        """Begin to send these arrays on `stream`, which must be the current stream."""
        while self._unsent:
            keys, slot, layout = self._unsent[0]
            block = torch.empty(layout.nbytes, dtype=torch.uint8, device=self._staging.device)
            block.copy_(slot.memory[: layout.nbytes], non_blocking=True)
            if stream is not None:
                self.event = stream.record_event()
            self._packed.append(_Packed(keys, block, layout))
            del self._unsent[0]
            self._staging.return_slot(slot, self.event)

    @property
    def has_sent(self) -> bool:
        """Whether a part of the batch was sent."""
        return bool(self._tensors or self._packed)

    def _record(self) -> None:
        """Record that copies were started."""
        if self._stream is not None:
            self.event = self._stream.record_event()

    def _use_stream(self) -> Any:
        """Return a context in which torch operations run on the stream of the copies."""
        if self._stream is None:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def list_blocks(self) -> list[torch.Tensor]:
        """Return one tensor of every block of memory on the device."""
        return [*self._tensors.values(), *[packed.block for packed in self._packed]]

    def split(self) -> dict[Key, torch.Tensor]:
        """Return all arrays that were sent, as tensors. They may be used when the copies are complete."""
        tensors = self._tensors.copy()
        for keys, block, layout in self._packed:
            tensors |= zip(keys, split_block(block, layout), strict=True)
        return tensors

    def read(self, ids: NDArray[np.int64], outputs: tuple[int, ...], others: dict[Key, Array]) -> None:
        """Read the rows of `ids`. They are sent with the arrays `others`, at once or by `start`."""
        total = self._count_bytes(len(ids), outputs)
        if total <= _MIN_PIECE_BYTES:
            self._read_together(ids, outputs, others)
            return
        large = tuple(output for output in outputs if self._row_bytes[output] >= _MIN_LARGE_BYTES)
        small = tuple(output for output in outputs if output not in large)
        self._read_together(ids, small, others)
        # Pieces use all slots in turn, so no slot may keep unsent arrays.
        self.start()
        piece_bytes = min(max(total // _PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        self._read_in_pieces(ids, large, piece_bytes)

    def send(self, arrays: dict[Key, Array]) -> None:
        """Begin to send arrays, all in one block."""
        with self._use_stream():
            block, layout = self._staging.send_block(list(arrays.values()))
        self._record()
        self._packed.append(_Packed(tuple(arrays), block, layout))

    def read_windows(
        self, ids: NDArray[np.int64], leaf: int, form: Leaf, outputs: tuple[int, int], *, with_whole: bool
    ) -> bool:
        """Send observations and next observations of one leaf as slices of a window.

        Return False, and change nothing, if rows are not stored as slices. `with_whole` says whether an observation
        that is stored whole counts as one slice.
        """
        # Most leaves have no window. Reading one row shows this before pinned memory is taken.
        into = np.empty(2 * form.nbytes, np.uint8)
        if self._rows.read_windows(ids[:1], leaf, into, with_whole) is None:
            return False
        rows = max(1, _MAX_PIECE_BYTES // (2 * form.nbytes))
        parts = []
        missing = []
        with self._use_stream():
            for first in range(0, len(ids), rows):
                part = self._read_window_piece(ids[first : first + rows], leaf, form, with_whole)
                if part is None:
                    return False
                both, positions = part
                parts.append(both)
                missing.append(first + positions)
            tensors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            self._fill_missing(tensors, ids, np.concatenate(missing), outputs)
            tensors = tensors.view(torch_dtype(form.dtype)).view(2, len(ids), *form.shape)
        self._record()
        self._tensors |= zip(outputs, tensors.unbind(0), strict=True)
        return True

    def _read_window_piece(
        self, ids: NDArray[np.int64], leaf: int, form: Leaf, with_whole: bool
    ) -> tuple[torch.Tensor, NDArray[np.int64]] | None:
        """Send the slices of some rows, and assemble observations from them on the device.

        Return observations and next observations as bytes of shape (2, rows, bytes), and the positions of the rows that
        are not stored as slices of the window. Return None if no row is stored as slices.
        """
        device = self._staging.device
        starts_bytes = 2 * len(ids) * _START_BYTES
        with self._staging.use_slot(align(2 * len(ids) * form.nbytes) + starts_bytes, self._stream) as slot:
            found = self._rows.read_windows(ids, leaf, slot.array, with_whole)
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
        """Read the rows at the positions `missing`, which are stored in another form, and write them to `both`."""
        if not missing.size:
            return
        transfer = _Transfer(self._staging, self._row_bytes, self._rows, self._stream)
        transfer.read(ids[missing], outputs, {"positions": missing})
        transfer.start()
        found = transfer.split()
        obs = found[outputs[0]]
        next_obs = found[outputs[1]]
        positions = found["positions"]
        both[0].index_copy_(0, positions, obs.reshape(len(missing), -1).view(both.dtype))
        both[1].index_copy_(0, positions, next_obs.reshape(len(missing), -1).view(both.dtype))

    def _read_together(self, ids: NDArray[np.int64], outputs: tuple[int, ...], others: dict[Key, Array]) -> None:
        """Read all outputs. `start` sends them and the arrays `others` in one copy."""
        nbytes = self._count_bytes(len(ids), outputs) + sum([align(array.nbytes) for array in others.values()])
        slot = self._staging.take_slot(nbytes)
        arrays = [*self._rows.read(ids, outputs, slot.array), *others.values()]
        layout = find_layout(arrays)
        for part, array in zip(layout.parts[len(outputs) :], others.values(), strict=True):
            slot.array[part.start : part.start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        self._unsent.append(_Unsent((*outputs, *others), slot, layout))

    def _read_in_pieces(self, ids: NDArray[np.int64], outputs: tuple[int, ...], piece_bytes: int) -> None:
        """Read and send some rows at a time. While a piece is sent, the next piece is read."""
        if not outputs:
            return
        rows = max(1, piece_bytes // sum(self._row_bytes[output] for output in outputs))
        tensors: list[torch.Tensor] = []
        with self._use_stream():
            for first in range(0, len(ids), rows):
                part = ids[first : first + rows]
                with self._staging.use_slot(self._count_bytes(len(part), outputs), self._stream) as slot:
                    arrays = self._rows.read(part, outputs, slot.array)
                    if not tensors:
                        tensors = [self._allocate(len(ids), array) for array in arrays]
                    pieces = split_block(slot.memory, find_layout(arrays))
                    for tensor, piece in zip(tensors, pieces, strict=True):
                        tensor[first : first + len(part)].copy_(piece, non_blocking=True)
        self._record()
        self._tensors |= zip(outputs, tensors, strict=True)

    def _allocate(self, rows: int, array: Array) -> torch.Tensor:
        shape = (rows, *array.shape[1:])
        return torch.empty(shape, dtype=torch_dtype(array.dtype), device=self._staging.device)

    def _count_bytes(self, rows: int, outputs: tuple[int, ...]) -> int:
        """Return the maximum size of the rows of all outputs."""
        row_bytes = sum([self._row_bytes[output] for output in outputs])
        return rows * row_bytes + ALIGNMENT_BYTES * len(outputs)


def _list_others(draw: Draw) -> dict[Key, Array]:
    """Return the arrays of a draw that become part of the batch."""
    others: dict[Key, Array] = {"weights": draw.weights}
    if draw.reward is not None:
        others[_REPLACED_REWARD] = draw.reward
    if draw.discount is not None:
        others["discount"] = draw.discount
    if draw.mask is not None:
        others["mask"] = draw.mask
    return others


def _measure_rows(schema: Schema, columns: Columns) -> dict[int, int]:
    """Return the maximum size of a row of every output, in bytes."""
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
    """Return the torch device `name`. If the name has no number, add the number that tensors on the device have."""
    return torch.empty(0, device=name).device


def require_torch_dtype(leaf: Leaf, device: str) -> None:
    """Raise ArgumentError if torch has no dtype for a leaf."""
    try:
        torch_dtype(leaf.dtype)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"device ({device}): torch has no dtype for {leaf.name or 'the space'} ({leaf.dtype}). Use device=None for "
            "NumPy arrays."
        ) from error
