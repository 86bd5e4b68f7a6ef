"""PlaceGraph: the operations that find places for the observations of one tick, captured in a CUDA graph.

The host would need longer to start these few dozen small operations one by one than the device needs to run them. A
graph starts all of them at once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from holdall.delivery.words import copy_all
from holdall.device.tensors import Tensors, TensorStep


class PlaceGraph:
    """CUDA graph that finds places for single ticks, without an axis of time. See `Tensors.place`.

    The constructor captures the graph, and writes nothing. It raises RuntimeError if the capture fails.

    Attributes:
        tensors: The tensors that the graph reads and writes. It cannot be used for other tensors.
    """

    def __init__(self, tensors: Tensors, step: TensorStep) -> None:
        self.tensors = tensors
        self._inputs = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in self._list_inputs(step)
        ]
        parts = iter(self._inputs)
        obs = tuple(next(parts) for _ in step.obs)
        next_obs = tuple(
            next(parts) if field.uses_next else given
            for field, given in zip(tensors.fields, step.next_obs, strict=True)
        )
        inputs = step._replace(obs=obs, next_obs=next_obs).add_time_axis()
        self._graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(step.reward.device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            _pause_garbage_collection(),
        ):
            places = tensors.place(inputs, 1, has_previous=True)
            # The axis of time is removed.
            self._places = [place.squeeze(-2) for place in places]

    def _list_inputs(self, step: TensorStep) -> list[torch.Tensor]:
        """Return the tensors of a step that the graph reads."""
        fields = self.tensors.fields
        return [*step.obs, *[rows for field, rows in zip(fields, step.next_obs, strict=True) if field.uses_next]]

    def place(self, step: TensorStep) -> list[torch.Tensor]:
        """Find places for the observations of the next tick. The next call overwrites the returned tensors."""
        copy_all(self._inputs, self._list_inputs(step))
        self._graph.replay()
        return self._places


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection within the context. Freeing memory of the device would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
