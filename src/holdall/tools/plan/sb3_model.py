"""The model of Stable-Baselines3 that a spec describes: build it, run real updates, trace an update without memory.

In:  a spec.  Out: the algorithm's own object, on environments that may only have spaces; peaks by phase of a few
real updates; bytes of weights, of what stays after an update, and of the peak during one.
Invariant: the code that is traced is Stable-Baselines3's own `train`; values are made up, shapes never.
Importing this module imports torch and Stable-Baselines3.
"""

from __future__ import annotations

import gc
import importlib
import subprocess
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
import psutil
import torch
from gymnasium import spaces
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holdall.errors import ArgumentError, MissingPackageError
from holdall.machine import available_bytes, begin_peak, held_bytes, peak_bytes
from holdall.tools.malloc import map_blocks_from, return_free_heap
from holdall.tools.plan.environments import make_single_env
from holdall.tools.plan.phases import MAPPED_FROM, TrainingProbe, UpdateBytes
from holdall.tools.plan.spec import Spec

EPISODE_STEPS = 200
_UPDATES = 40
_BATCHES = 3  # batches in a shortened rollout
_ROLLOUTS = 3
_GROWTH_S = 1.5  # of this thread's own time: a busy machine makes as many updates
_FEW_UPDATES = 6
_GROWTH_UPDATES = 60  # the heap is stretched a little further by every update
_LEAST_GROWTH_UPDATES, _MOST_GROWTH_S = 3, 4.0  # fewer where one takes seconds, as with TRPO's whole rollouts
_TORCH_CLASSES = {"activation_fn": (torch.nn, torch.nn.Module), "optimizer_class": (torch.optim, torch.optim.Optimizer)}
_TINY_IMAGE = (36, 36, 1)
_TINY_BATCH = 4
_REAL_BYTES = 48 * 2**20  # of activations in real updates; more take too long
_MOST_REAL_BYTES = 2**29  # of weights, gradients and optimizer
_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class SpaceEnv(gym.Env[Any, Any]):
    """Observations of the right shape and dtype, always the same ones, and episodes that are truncated."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space = observation
        self.action_space = with_finite_bounds(action)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return _zero_observation(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Pass a step; nothing happens in it."""
        self._steps += 1
        return _zero_observation(self.observation_space), 0.0, False, self._steps >= EPISODE_STEPS, {}


def build_model(spec: Spec, *, capacity: int | None = None, env: VecEnv | None = None, **settings: Any) -> Any:
    """Construct the algorithm; `capacity` replaces the spec's where only the networks are of interest."""
    algorithm = spec.algorithm
    try:
        cls = getattr(importlib.import_module(algorithm.package), algorithm.name)
    except ImportError as error:
        raise MissingPackageError(
            f"algo ({spec.algo}) is in {algorithm.package}, which is not installed; pip install {algorithm.package}, "
            "or leave networks out with --no-networks"
        ) from error
    if spec.on_policy:
        settings |= {"n_steps": spec.rollout_steps} | ({"n_epochs": 1} if spec.algo == "ppo" else {})
    else:
        kwargs = {"handle_timeout_termination": spec.handle_timeout_termination}
        settings |= {"optimize_memory_usage": spec.optimize_memory_usage, "replay_buffer_kwargs": kwargs}
        settings["buffer_size"] = spec.capacity if capacity is None else capacity
    if algorithm.batch_size is not None:
        settings["batch_size"] = spec.batch
    policy_kwargs = {name: _torch_class_or_value(name, value) for name, value in spec.policy_kwargs.items()}
    model = cls(spec.policy_name, env or make_env(spec), policy_kwargs=policy_kwargs, device=spec.device, **settings)
    model.set_logger(configure(None, []))
    return model


def make_env(spec: Spec, *, real: bool = False) -> VecEnv:
    """Make the vector environment of the spec: the real one, or one that only has its spaces."""
    is_real, make = real and bool(spec.env_id), partial(SpaceEnv, spec.observation, spec.action)
    makers: list[Any] = [partial(make_single_env, spec.env_id, spec.wrapper) if is_real else make] * spec.num_envs
    envs = SubprocVecEnv(makers, spec.method) if spec.vec_env != "dummy" else DummyVecEnv(makers)
    return VecFrameStack(envs, spec.frame_stack) if is_real and spec.frame_stack > 1 else envs


def fill_without_writing(model: Any) -> None:
    """Let a buffer count as filled; its arrays stay as they were allocated."""
    buffer = getattr(model, "replay_buffer", None) or model.rollout_buffer
    buffer.full = True
    buffer.pos = 0


def with_finite_bounds(action: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return an action space with finite bounds, which some algorithms demand."""
    if isinstance(action, spaces.Box) and not action.is_bounded():
        return spaces.Box(-1, 1, action.shape, np.dtype(action.dtype).type)
    return action


def _zero_observation(space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _zero_observation(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    return np.zeros(space.shape or (), space.dtype)


def _torch_class_or_value(name: str, value: Any) -> Any:
    """Turn the names of torch's activations and optimizers into the classes; everything else is data."""
    if name not in _TORCH_CLASSES or not isinstance(value, str):
        return value
    module, base = _TORCH_CLASSES[name]
    found = getattr(module, value.rpartition(".")[2], None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ArgumentError(f"policy_kwargs[{name!r}] ({value!r}) names no {base.__name__} of {module.__name__}")
    return found


def measure_baseline(spec: Spec, networks: bool, traces: bool = True) -> dict[str, Any]:
    """Read what is imported by now, make a tiny update, and trace the real one, unless nobody asks for that."""
    imported = held_bytes()
    found: dict[str, Any] = {"imported": imported.resident, "imported_anonymous": imported.anonymous}
    if not networks:
        return found
    free_before = _free_vram() if spec.device.startswith("cuda") else None
    tiny = build_model(_tiny_spec(spec), capacity=2 * _TINY_BATCH)
    begin_peak()
    fill_without_writing(tiny)
    for _ in range(2):
        tiny.train(**({} if spec.on_policy else {"gradient_steps": 1, "batch_size": _TINY_BATCH}))
    tiny.learn(2 * _TINY_BATCH)  # some things are loaded by the first step
    del tiny  # a network of many quantiles is not so tiny
    give_back_free_memory()
    found["updated"] = held_bytes().resident
    if free_before is not None:
        found["vram"] = _context_bytes(free_before)
    if not traces:
        return found
    # Everything that an update holds grows with the batch in a straight line, so two batches give the line.
    twice = spec.but(batch_size=2 * spec.batch, n_steps=2 * spec.rollout_steps if spec.on_policy else spec.n_steps)
    once, twice_ = trace_update(spec), trace_update(twice)
    found["traced"] = {"batch": spec.batch, "once": list(once), "twice": list(twice_)}
    batch = _real_batch(spec.batch, once)
    if batch and spec.device == "cpu":
        real, traced, found["fixed"] = spec, once, 0
        if batch != spec.batch:
            real, mapped_from = _with_batch(spec, batch), _mapped_from(batch / spec.batch)
            traced, least = trace_update(real, mapped_from), _with_batch(spec, _TINY_BATCH)
            # What updates take however small the batch is does not grow with it.
            found["fixed"] = measure_growth(least, _FEW_UPDATES)[0] - trace_update(least, mapped_from).peak
        grown, found["kept"] = measure_growth(real)
        found["growth"] = [batch, grown, list(traced)]
    return found


def _with_batch(spec: Spec, batch: int) -> Spec:
    """Return the same run with another batch; a rollout is one batch then."""
    return spec.but(batch_size=batch, **({"n_steps": batch, "num_envs": 1} if spec.on_policy else {}))


def _mapped_from(share: float) -> int:
    """Let the C library map blocks on their own that are larger than this share of its threshold, and return that.

    The heap of a smaller batch is then made of the blocks that the heap of the real one is made of, each smaller by
    the same share.
    """
    nbytes = int(share * MAPPED_FROM)
    return nbytes if map_blocks_from(nbytes) else MAPPED_FROM


def _real_batch(batch: int, traced: UpdateBytes) -> int:
    """Return how large a batch real updates are made with: no larger than needed, quick, and small; 0: none."""
    if traced.settled > min(_MOST_REAL_BYTES, available_bytes() // 4):
        return 0
    share = _REAL_BYTES / max(traced.live - traced.settled, 1)
    return max(int(batch * min(share, 1)), _TINY_BATCH)


def _tiny_spec(spec: Spec) -> Spec:
    """Return a run of the same algorithm whose networks are next to nothing."""
    image, vector = spaces.Box(0, 255, _TINY_IMAGE, np.uint8), spaces.Box(-1, 1, (3,), np.float32)
    steps, seen = _TINY_BATCH if spec.on_policy else 0, vector if spec.policy_name == "MlpPolicy" else image
    return Spec(spec.algo, seen, spec.action, batch_size=_TINY_BATCH, device=spec.device, n_steps=steps)


def _free_vram() -> int | None:
    """Read what is free on the first GPU before this process uses it."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return int(done.stdout.split()[0]) * 2**20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _context_bytes(free_before: int) -> dict[str, int]:
    """Read what the GPU has, and what this process takes of it beside torch's own pool."""
    free, total = torch.cuda.mem_get_info()
    context = free_before - free - torch.cuda.memory_reserved()
    return {"free": free_before, "total": total, "context": max(context, 0)}


def measure_updates(spec: Spec, steps: int) -> TrainingProbe:
    """Collect, train, and read the peaks."""
    short = with_short_rollouts(spec)
    env = make_env(short, real=True)
    begin_peak()
    model = build_model(short, env=env)
    constructed_bytes = peak_bytes()
    rows, kept_bytes = (_on_policy if spec.on_policy else _off_policy)(model, short, steps)
    probe = TrainingProbe(
        constructed_bytes=constructed_bytes,
        trained_bytes=peak_bytes(),
        kept_bytes=kept_bytes,
        buffer_bytes=short.layout().resident_bytes(rows),
        copied_bytes=short.layout().flatten_bytes,
        env_process_bytes=_env_process_bytes(),
    )
    env.close()
    return probe


def with_short_rollouts(spec: Spec) -> Spec:
    """Return the same run with rollouts of a few batches: an update sees one batch at a time."""
    if not spec.on_policy or spec.algorithm.batch_size is None or spec.algo == "trpo":
        return spec
    steps = -(-_BATCHES * spec.batch // spec.num_envs)
    return spec.but(n_steps=min(spec.rollout_steps, steps))


def _rows_of_an_update(spec: Spec) -> int:
    """Return how many rows an update sees at once: TRPO's policy sees the whole rollout, whatever the batch."""
    return spec.rollout_steps * spec.num_envs if spec.algo == "trpo" else spec.batch


def _on_policy(model: Any, spec: Spec, steps: int) -> tuple[int, int]:
    """Return the transitions in the buffer, and the most that was resident after an update."""
    rollout = spec.rollout_steps * spec.num_envs
    kept = []
    for _ in range(_ROLLOUTS):
        model.learn(rollout, reset_num_timesteps=False)
        kept.append(held_bytes().resident)
    return rollout, max(kept)


def _off_policy(model: Any, spec: Spec, steps: int) -> tuple[int, int]:
    warm = max(steps, spec.num_envs)
    model.learning_starts = warm + 1
    model.learn(warm)
    model.learning_starts = 0
    model.learn(_UPDATES * spec.num_envs, reset_num_timesteps=False)
    return warm + _UPDATES * spec.num_envs, held_bytes().resident


def measure_growth(spec: Spec, most_updates: int = _GROWTH_UPDATES) -> tuple[int, int]:
    """Make real updates, and return by how much they stretch this process at most, while they run and after them.

    The heap keeps more than lives in it: blocks are aligned, what is cut off around them is used for small objects, and
    a freed block then does not fit the next one of its size. How much more only real updates show.
    """
    rows = _rows_of_an_update(spec)
    small = spec.but(num_envs=1, vec_env="dummy", n_steps=rows if spec.on_policy else spec.n_steps)
    give_back_free_memory()
    before, kept, began = held_bytes().resident, 0, time.thread_time()
    begin_peak()
    model = build_model(small, capacity=spec.batch)
    fill_without_writing(model)
    model.learning_starts = 0
    for update in range(most_updates):  # with the steps in between, whose small blocks lie among the large ones
        model.learn(rows if spec.on_policy else 1, reset_num_timesteps=False)
        if spec.on_policy:  # the heap shrinks after some updates, and after others not
            kept = max(kept, held_bytes().resident)
        spent = time.thread_time() - began
        if spent > (_GROWTH_S if update >= _LEAST_GROWTH_UPDATES else _MOST_GROWTH_S):
            break
    before += small.layout().resident_bytes() if spec.on_policy else 0  # counted as the buffer that it is
    return peak_bytes() - before, kept - before


def give_back_free_memory() -> None:
    """Return the pages of free blocks to the system, so that using them again counts, where the C library can."""
    gc.collect()
    return_free_heap()


def _env_process_bytes() -> list[int]:
    """Return the unique bytes of each process of the vector environment, the fork server among them."""
    return [held_bytes(child.pid).unique for child in psutil.Process().children(recursive=True)]


def trace_update(spec: Spec, mapped_from: int = MAPPED_FROM) -> UpdateBytes:
    """Trace two updates: the second one has the optimizer's state beside it.

    Args:
        mapped_from: Bytes from which on the C library maps a block on its own.
    """
    live = LiveTensorBytes(mapped_from)
    # One environment and one batch: what an update holds does not depend on how the batch was collected. Tensors
    # without memory are of the same size on every device.
    steps = _rows_of_an_update(spec) if spec.on_policy else spec.n_steps
    small = spec.but(num_envs=1, vec_env="dummy", n_steps=steps, device="cpu")
    with _modules_not_moved(), FakeTensorMode(allow_non_fake_inputs=True), live, PlaceholderValues():
        model = build_model(small, capacity=spec.batch)
        fill_without_writing(model)
        weights = live.now
        update_with = {} if spec.on_policy else {"gradient_steps": 1, "batch_size": spec.batch}
        model.train(**update_with)
        settled = live.now
        live.peak = live.highest = live.now
        model.train(**update_with)
    stays, mapped = max(settled, live.now), live.peak - live.highest_heap
    return UpdateBytes(weights, stays, live.heap, mapped, live.highest_heap, live.highest)


class LiveTensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Counts the bytes of the storages that are alive, and the most there ever were.

    The C library gives large blocks back to the system at once; the heap that smaller ones came from stays as large
    as it ever was.
    """

    def __init__(self, mapped_from: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._mapped_from = mapped_from
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
        copies = _convolution_copies(args, out) if func in _CONVOLUTIONS else []
        large = sum(size for size in copies if size >= self._mapped_from)
        self.highest_heap = max(self.highest_heap, self.heap + sum(copies) - large)
        mapped = self.mapped + large
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
        if size >= self._mapped_from:
            self.mapped += sign * size
        else:
            self.heap += sign * size


def _convolution_copies(args: tuple[Any, ...], out: Any) -> list[int]:
    """Bytes of the copies that a convolution on a CPU works on: channels in blocks of sixteen."""
    tensors = [value for value in [*tree_leaves(args), *tree_leaves(out)] if isinstance(value, torch.Tensor)]
    images = [(one.nbytes // one.shape[1], one.shape[1]) for one in tensors if one.dim() == 4]
    return [each * (channels if channels <= 4 else -(-channels // 16) * 16) for each, channels in images]


class PlaceholderValues(TorchFunctionMode):
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
def _modules_not_moved() -> Iterator[None]:
    """Let `module.to(device)` do nothing: torch cannot swap parameters that have no memory."""
    real = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: self  # type: ignore[method-assign]  # for as long as the trace lasts
    try:
        yield
    finally:
        torch.nn.Module.to = real  # type: ignore[method-assign]
