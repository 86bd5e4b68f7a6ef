"""The `sitecustomize` module of the scripts of `probe_scripts.py`. It records when training begins.

The sign is the first step of a torch optimizer, or the first experience that a buffer of a library receives. The module
shares no code with holdall's probe.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

FOLDER = os.environ.get("BLOCKS_FOLDER")
METHODS = ("add", "extend", "append", "update")


def note_sign(*ignored: Any) -> None:
    """Write the time to the file `sign`, once."""
    path = os.path.join(str(FOLDER), "sign")  # noqa: PTH118  The command's own imports stay as few as they are.
    if not os.path.exists(path):  # noqa: PTH110  likewise
        with open(path + ".part", "w", encoding="ascii") as file:  # noqa: PTH123  likewise
            file.write(str(time.monotonic()))
        os.replace(path + ".part", path)  # noqa: PTH105  likewise
        note_networks()


def note_networks() -> None:
    """Write the bytes of all weights to the file `networks`. Gradients and moments have the same sizes."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    weights = [one for one in gc.get_objects() if isinstance(one, torch.nn.Parameter)]
    with open(os.path.join(str(FOLDER), "networks"), "a", encoding="ascii") as file:  # noqa: PTH118, PTH123  likewise
        file.writelines(f"{weight.numel() * weight.element_size()}\n" for weight in weights)


def watch_optimizers(module: ModuleType) -> None:
    """Note the first step of any optimizer of torch."""
    module.register_optimizer_step_post_hook(note_sign)


def watch_classes(*names: str) -> Callable[[ModuleType], None]:
    """Return a function that makes classes of a module note the first call of a method that adds experience."""

    def install(module: ModuleType) -> None:
        for cls in (getattr(module, name, None) for name in names):
            for method_name in METHODS:
                method = vars(cls).get(method_name) if isinstance(cls, type) else None
                if method is not None:
                    setattr(cls, method_name, note_after(method))

    return install


def note_after(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that also notes the sign."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        note_sign()
        return result

    return call


MODULES: dict[str, Callable[[ModuleType], None]] = {
    "torch.optim.optimizer": watch_optimizers,
    "stable_baselines3.common.buffers": watch_classes(
        "ReplayBuffer", "DictReplayBuffer", "RolloutBuffer", "DictRolloutBuffer"
    ),
    "cleanrl_utils.buffers": watch_classes("ReplayBuffer", "DictReplayBuffer"),
    "torchrl.data.replay_buffers.replay_buffers": watch_classes("ReplayBuffer", "TensorDictReplayBuffer"),
    "tianshou.data.buffer.buffer_base": watch_classes("ReplayBuffer"),
    "tianshou.data.buffer.base": watch_classes("ReplayBuffer"),
    "tianshou.data.buffer.manager": watch_classes("ReplayBufferManager"),
    "pfrl.replay_buffers.replay_buffer": watch_classes("ReplayBuffer"),
}


class Finder(importlib.abc.MetaPathFinder):
    """Changes a module right after it was imported."""

    def __init__(self) -> None:
        self._is_searching = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        """Find the module with the other finders, and wrap its loader."""
        if name not in MODULES or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        if spec is None or spec.loader is None:
            return None
        run_module = spec.loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run_module(module)
            MODULES[name](module)

        spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


if FOLDER:
    sys.meta_path.insert(0, Finder())
