"""The events that stop a probed command.

To add a trigger, append one line to `TRIGGERS`. If no class here describes the event, add a subclass of `Trigger`: its
`install` changes a module right after the command imported that module, so that the event calls `hook.reach`.

This module runs in the command's process and imports only the standard library.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class Stopper(Protocol):
    """The methods of the hook that triggers call."""

    max_buffer_size: int

    def reach(self, trigger: str, words: str, **context: Any) -> None:
        """Stop the command if `trigger` ends this probe. `context` has the objects of the event."""

    def record(self, method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record the arguments of a call that added experience."""

    def step(self, step: Callable[..., Any], env: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `step` of an environment, and count it. Stop the command after enough steps."""


@dataclass(frozen=True)
class Trigger:
    """An event in one module."""

    module: str
    """Module that is changed right after the command imported it."""

    def install(self, module: Any, hook: Stopper) -> None:
        """Change `module` so that the event calls `hook`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Learn(Trigger):
    """Stable-Baselines3 and sb3-contrib are about to learn: every algorithm calls `_setup_learn` first."""

    def install(self, module: Any, hook: Stopper) -> None:
        """Wrap `BaseAlgorithm._setup_learn`."""
        method = module.BaseAlgorithm._setup_learn

        @functools.wraps(method)
        def setup_learn(model: Any, total_timesteps: int, callback: Any = None, *args: Any, **kwargs: Any) -> Any:
            hook.reach(
                "learn",
                "Stable-Baselines3 is about to learn",
                model=model,
                total_timesteps=total_timesteps,
                callback=callback,
            )
            return method(model, total_timesteps, callback, *args, **kwargs)

        module.BaseAlgorithm._setup_learn = setup_learn


@dataclass(frozen=True)
class FirstAdd(Trigger):
    """A buffer of a library receives its first experience.

    The first call runs before the command is stopped, because many buffers allocate their memory in it.
    """

    classes: tuple[str, ...]
    methods: tuple[str, ...] = ("add", "extend")
    words: str = ""
    """The event as users know it; empty: the first call of the method."""

    def install(self, module: Any, hook: Stopper) -> None:
        """Wrap the methods that add, in each class that defines them."""
        for class_name in self.classes:
            cls = getattr(module, class_name, None)
            for name in self.methods:
                method = vars(cls).get(name) if isinstance(cls, type) else None
                if callable(method):
                    words = self.words or f"the first call of {class_name}.{name}"
                    setattr(cls, name, _wrap_add(method, words, hook))


def _wrap_add(method: Callable[..., Any], words: str, hook: Stopper) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(buffer, *args, **kwargs)
        hook.record(method, (buffer, *args), kwargs)
        hook.reach("add", words, buffer=buffer)
        return result

    return call


@dataclass(frozen=True)
class OptimizerStep(Trigger):
    """An optimizer of torch takes its first step. In a probe that measures, the step is completed."""

    def install(self, module: Any, hook: Stopper) -> None:
        """Register hooks that torch calls for every optimizer."""
        module.register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: hook.reach("optimizer", "the first step of a torch optimizer")
        )
        module.register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: hook.reach("optimized", "the first step of a torch optimizer")
        )


@dataclass(frozen=True)
class EnvironmentSteps(Trigger):
    """Environments have made many steps, in a loop that no other trigger recognises."""

    base_class: str

    def install(self, module: Any, hook: Stopper) -> None:
        """Wrap `step` of every class that derives from the base class from now on, except wrappers."""
        base = getattr(module, self.base_class)
        wrapper = getattr(module, "Wrapper", None) or getattr(module, "VectorWrapper", None)

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(base, cls).__init_subclass__(**kwargs)
            is_wrapper = wrapper is not None and issubclass(cls, wrapper)
            if callable(vars(cls).get("step")) and not is_wrapper:
                cls.step = _wrap_step(cls.step, hook)

        base.__init_subclass__ = classmethod(init_subclass)


@dataclass(frozen=True)
class SmallerBuffer(Trigger):
    """Not an event: limits the `buffer_size` of models, because the command's own could not be allocated."""

    def install(self, module: Any, hook: Stopper) -> None:
        """Wrap the constructor that all off-policy algorithms call."""
        if not hook.max_buffer_size:
            return
        construct = module.OffPolicyAlgorithm.__init__
        signature = inspect.signature(construct)

        @functools.wraps(construct)
        def construct_smaller(model: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(model, *args, **kwargs)
            bound.apply_defaults()
            bound.arguments["buffer_size"] = min(bound.arguments["buffer_size"], hook.max_buffer_size)
            construct(*bound.args, **bound.kwargs)

        module.OffPolicyAlgorithm.__init__ = construct_smaller


def _wrap_step(step: Callable[..., Any], hook: Stopper) -> Callable[..., Any]:
    """Return `step` wrapped so that each call is counted.

    Classes of the user's script are pickled by value, and the returned function with them. It therefore refers only to
    `step` and `hook`, which can be pickled.
    """

    @functools.wraps(step)
    def call(env: Any, *args: Any, **kwargs: Any) -> Any:
        return hook.step(step, env, args, kwargs)

    return call


_FIRST_STEP = "the first step that holdall's memory received"
_SB3_BUFFERS = ("ReplayBuffer", "DictReplayBuffer", "RolloutBuffer", "DictRolloutBuffer")

TRIGGERS: tuple[Trigger, ...] = (
    Learn("stable_baselines3.common.base_class"),
    OptimizerStep("torch.optim.optimizer"),
    FirstAdd("stable_baselines3.common.buffers", _SB3_BUFFERS),
    FirstAdd("cleanrl_utils.buffers", _SB3_BUFFERS),
    FirstAdd("torchrl.data.replay_buffers.replay_buffers", ("ReplayBuffer", "TensorDictReplayBuffer")),
    FirstAdd("tianshou.data.buffer.base", ("ReplayBuffer",)),
    FirstAdd("tianshou.data.buffer.buffer_base", ("ReplayBuffer",)),
    FirstAdd("tianshou.data.buffer.manager", ("ReplayBufferManager",)),
    FirstAdd("pfrl.replay_buffers.replay_buffer", ("ReplayBuffer",), ("append",)),
    FirstAdd("elegantrl.train.replay_buffer", ("ReplayBuffer",), ("update",)),
    FirstAdd("holdall.store.store", ("Store",), ("append", "extend"), _FIRST_STEP),
    FirstAdd("holdall.device.store", ("DeviceStore",), ("append", "extend"), _FIRST_STEP),
    FirstAdd("holdall.cleanrl", ("ReplayBuffer",)),
    FirstAdd("holdall.rollout", ("RolloutMemory",)),
    EnvironmentSteps("gymnasium.core", "Env"),
    EnvironmentSteps("gymnasium.vector.vector_env", "VectorEnv"),
    EnvironmentSteps("gym.core", "Env"),
    SmallerBuffer("stable_baselines3.common.off_policy_algorithm"),
)
