"""One update of the installed Stable-Baselines3, on tensors without memory, at the real batch size.

In:  a spec.  Out: bytes of weights, of what stays after an update, and of the most that lives during one.
Invariant: the code that is traced is Stable-Baselines3's own `train`; only values are made up, never shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdall.plan.algorithm import build_model, fill_without_writing
from holdall.plan.spec import Spec

_MAPPED_FROM = 32 * 2**20
"""The C library's largest threshold: blocks from here on are always mapped on their own."""
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Traced(NamedTuple):
    """Bytes of an update."""

    weights: int
    settled: int  # weights, gradients and the optimizer's state: what stays between updates
    settled_heap: int  # the part of it in smaller blocks
    mapped: int  # at the peak, in blocks of their own
    heap: int  # at the peak, in smaller blocks
    live: int  # the most tensors that were alive at once, without what a CPU's convolutions copy: a GPU's need


def traced_bytes(spec: Spec) -> Traced:
    """Trace two updates: the second one has the optimizer's state beside it."""
    live = LiveBytes()
    # One environment and one batch: what an update holds does not depend on how the batch was collected. Tensors
    # without memory are of the same size on every device.
    steps = spec.batch if spec.on_policy else spec.n_steps
    small = spec.but(num_envs=1, vec_env="dummy", n_steps=steps, device="cpu")
    with _modules_stay(), FakeTensorMode(allow_non_fake_inputs=True), live, MadeUpValues():
        model = build_model(small, capacity=spec.batch)
        fill_without_writing(model)
        weights = live.now
        updates = _update(model, spec)
        updates()
        settled = live.now
        live.peak = live.highest = live.now
        updates()
    return Traced(
        weights, max(settled, live.now), live.heap, live.peak - live.highest_heap, live.highest_heap, live.highest
    )


def _update(model: Any, spec: Spec) -> Callable[[], None]:
    if spec.on_policy:
        return model.train  # type: ignore[no-any-return]  # Stable-Baselines3's algorithms are Any here
    return lambda: model.train(gradient_steps=1, batch_size=spec.batch)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Counts the bytes of the storages that are alive, and the most there ever were.

    The C library gives large blocks back to the system at once; the heap that smaller ones came from stays as large
    as it ever was.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.mapped = 0
        self.heap = 0
        self.highest_heap = 0
        self.peak = 0
        self.highest = 0
        self._known: dict[int, int] = {}

    @property
    def now(self) -> int:
        """Bytes of all storages that are alive."""
        return self.mapped + self.heap

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        copies = _copies(args, out) if func in _CONVOLUTIONS else []
        self.highest_heap = max(self.highest_heap, self.heap + sum(size for size in copies if size < _MAPPED_FROM))
        mapped = self.mapped + sum(size for size in copies if size >= _MAPPED_FROM)
        self.peak = max(self.peak, mapped + self.highest_heap)
        self.highest = max(self.highest, self.now)
        return out

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._change(storage.nbytes(), 1)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._change(self._known.pop(key, 0), -1)

    def _change(self, size: int, sign: int) -> None:
        if size >= _MAPPED_FROM:
            self.mapped += sign * size
        else:
            self.heap += sign * size


def _copies(args: tuple[Any, ...], out: Any) -> list[int]:
    """Bytes of the copies that a convolution on a CPU works on: channels in blocks of sixteen."""
    maps = [value for value in [*tree_leaves(args), *tree_leaves(out)] if _is_map(value)]
    return [m.numel() // m.shape[1] * _blocked(m.shape[1]) * m.element_size() for m in maps]


def _blocked(channels: int) -> int:
    return channels if channels <= 4 else -(-channels // 16) * 16


def _is_map(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4


class MadeUpValues(TorchFunctionMode):
    """Answers for the values that tensors without memory do not have."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what asks for values; let everything else through."""
        if func in {torch.Tensor.item, torch.Tensor.__float__}:
            return 1.0
        if func is torch.Tensor.__bool__:
            return True
        if func is torch.Tensor.numpy:
            return np.zeros(args[0].shape, np.float32)
        return func(*args, **(kwargs or {}))


@contextmanager
def _modules_stay() -> Iterator[None]:
    """Let `module.to(device)` do nothing: torch cannot swap parameters that have no memory."""
    real = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # for as long as the trace lasts
    try:
        yield
    finally:
        torch.nn.Module.to = real  # type: ignore[method-assign]
