"""WriteGraph: all operations that write one tick, captured in a CUDA graph.

Writing a tick takes a few dozen small operations. Starting them one by one takes the host longer than the device needs
to run them. A graph starts all of them at once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from holdall.device.tensors import Tensors, TensorStep


class WriteGraph:
    """Writes single ticks, without an axis of time, all of whose entries are transitions.

    The constructor raises RuntimeError if the capture fails. Nothing is written then.

    Attributes:
        tensors: The tensors that are written to. The graph is of no use for any others.
    """

    def __init__(self, tensors: Tensors, step: TensorStep) -> None:
        self.tensors = tensors
        self._inputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in _flatten(step)]
        parts = iter(self._inputs)
        inputs = TensorStep(
            tuple(next(parts) for _ in step.obs),
            tuple(next(parts) for _ in step.action),
            next(parts),
            tuple(next(parts) for _ in step.next_obs),
            next(parts),
            next(parts),
            tuple(next(parts) for _ in step.extras),
            None,
        )
        # Tensors of one dtype are copied by one operation.
        dtypes = [tensor.dtype for tensor in self._inputs]
        self._groups = [[i for i, other in enumerate(dtypes) if other == dtype] for dtype in dict.fromkeys(dtypes)]
        self._graph = torch.cuda.CUDAGraph()
        device = step.reward.device
        with (
            torch.cuda.device(device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
            _pause_garbage_collection(),
        ):
            tensors.write(inputs.add_time_axis(), has_previous=True)

    def write(self, step: TensorStep) -> None:
        """Write one tick."""
        given = _flatten(step)
        for group in self._groups:
            torch._foreach_copy_([self._inputs[i] for i in group], [given[i] for i in group])
        self._graph.replay()


@contextlib.contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Return a context in which no garbage is collected: freeing memory of the device would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _flatten(step: TensorStep) -> list[torch.Tensor]:
    return [*step.obs, *step.action, step.reward, *step.next_obs, step.terminated, step.truncated, *step.extras]
