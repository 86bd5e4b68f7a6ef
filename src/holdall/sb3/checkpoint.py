"""Checkpoints of a whole training: model, optimizer, VecNormalize, random generators and memory, as one unit.

Guarantee: a checkpoint has the state of one moment between two steps. A checkpoint is complete or absent.

The model is stored as Stable-Baselines3's own file, which contains pickles: resume only from places that you trust. All
other files contain numbers and text. Algorithms are looked up by name only in Stable-Baselines3, sb3-contrib and
holdall.sb3.
"""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import pickle
import random
from collections.abc import Callable
from types import EllipsisType
from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecEnvWrapper, VecFrameStack, VecNormalize

from holdall import ReplayMemory
from holdall.checkpoint import SaveHandle, attached_files
from holdall.checks import require_count
from holdall.errors import ArgumentError, CheckpointError, DamageError
from holdall.sampling import Prioritized, get_generator_state, restore_generator
from holdall.sb3.her import HerReplayBuffer
from holdall.sb3.prioritized import PrioritizedReplayBuffer
from holdall.sb3.replay import ReplayBuffer
from holdall.store.states import decode_state, encode_state

EnvState = tuple[Callable[[Any], bytes], Callable[[Any, bytes], None]] | Literal["pickle"]
"""Two functions: the first returns the state of a VecEnv as bytes, the second restores it. "pickle" stands for
`get_pickled` and `put_pickled`."""

_Functions = tuple[Callable[[Any], bytes], Callable[[Any, bytes], None]]

_MODEL = "sb3/model.zip"
_TRAINING = "sb3/training.json"
_NUMBERS = "sb3/numbers.npz"
_ENV = "sb3/environment"
_AVERAGES = ("obs_rms", "ret_rms")

_LOG = logging.getLogger("holdall")
_PACKAGES = ("stable_baselines3", "sb3_contrib", "holdall.sb3.prioritized", "holdall.sb3.contrib")


class CheckpointCallback(BaseCallback):
    """Callback that saves everything that training needs to continue, every `save_freq` calls, between two steps.

    Args:
        save_freq: Calls of `env.step()` between two checkpoints, as in Stable-Baselines3's own callback.
        path: Place of the checkpoints: anything that `ReplayMemory.save` accepts.
        keep: Number of checkpoints to keep.
        env_state: How environments save their state, so that a resumed training continues in the middle of its
            episodes. "pickle": for a DummyVecEnv of environments that can be pickled, with any wrappers.
            `(get, put)`: `get(env)` returns the state as bytes, and `put(env, state)` restores it. `env` is the model's
            VecEnv with all of its wrappers.

    Examples:
        >>> from stable_baselines3 import DQN
        >>> from holdall.sb3 import CheckpointCallback, ReplayBuffer, resume
        >>> model = DQN("MlpPolicy", env, replay_buffer_class=ReplayBuffer)
        >>> _ = model.learn(40, callback=CheckpointCallback(20, "runs/cart", env_state="pickle"))
        >>> resume("runs/cart", gym.make("CartPole-v1"), env_state="pickle").num_timesteps
        40
    """

    def __init__(
        self,
        save_freq: int,
        path: str | os.PathLike[str],
        keep: int = 3,
        env_state: EnvState | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        self.save_freq = require_count("save_freq", save_freq, 1)
        self.path = path
        self.keep = keep
        self.env_state = _find_functions(env_state)
        self._is_due = False
        self._handle: SaveHandle | None = None
        self._empty_memory: ReplayMemory | None = None

    def save(self) -> SaveHandle:
        """Save now. Call this between two steps."""
        self._is_due = False
        files = training_files(self.model, self.env_state)
        self._handle = self._find_memory().save(self.path, attach=files, keep=self.keep)
        if self.verbose >= 2:
            _LOG.info("Saving a checkpoint of step %d to %s.", self.num_timesteps, self.path)
        return self._handle

    def _on_step(self) -> bool:
        # The environments have made this step, but the memory does not have it yet.
        self._is_due |= self.n_calls % self.save_freq == 0
        return True

    def _on_rollout_start(self) -> None:
        if self._is_due:
            self._wait_for_last_save()
            self.save()

    def _on_training_end(self) -> None:
        if self._is_due:
            self.save()
        self._wait_for_last_save()

    def _wait_for_last_save(self) -> None:
        """Wait for the last save as long as it makes progress. If it fails, log the error: training continues."""
        handle = self._handle
        self._handle = None
        if handle is None:
            return
        try:
            handle.finish()
        except OSError as error:
            _LOG.warning("A checkpoint could not be saved: %s Training continues.", error)

    def _find_memory(self) -> ReplayMemory:
        """Return the memory to save. On-policy algorithms have none, so their checkpoints have an empty memory."""
        buffer = getattr(self.model, "replay_buffer", None)
        if buffer is None:
            if self._empty_memory is None:
                self._empty_memory = ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), capacity=1)
            return self._empty_memory
        memory: ReplayMemory = _require_holdall(buffer).memory
        return memory


def resume(
    path: str | os.PathLike[str],
    env: GymEnv | None,
    *,
    algorithm: type[BaseAlgorithm] | None = None,
    device: str = "auto",
    env_state: EnvState | None = None,
    budget: str | int | EllipsisType | None = ...,
    prefer: str | EllipsisType = ...,
    spill_dir: str | os.PathLike[str] | EllipsisType | None = ...,
) -> Any:
    """Return the model of the newest checkpoint, ready for `learn(..., reset_num_timesteps=False)`.

    Args:
        path: The path of `CheckpointCallback`. The model's own file contains pickles, which can run code: resume only
            from places that you trust.
        env: The environments, with the same wrappers as before: anything that the `load` of Stable-Baselines3 accepts.
            The averages of VecNormalize are restored.
        algorithm: The model's class. By default, it is found by name in Stable-Baselines3, sb3-contrib and holdall.
        env_state: As in `CheckpointCallback`. Without it, the environments are reset when training continues.
        budget: See `holdall.ReplayMemory`. By default, the saved setting.
        prefer: See `holdall.ReplayMemory`. By default, the saved setting.
        spill_dir: See `holdall.ReplayMemory`. By default, the saved setting.
    """
    functions = _find_functions(env_state)
    given = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
    changed_tiers = {name: value for name, value in given.items() if value is not ...}
    files = attached_files(path)
    if _TRAINING not in files:
        raise CheckpointError(
            f"{path} is the checkpoint of a memory, without a model. Load it with holdall.ReplayMemory.load. To "
            "save a whole training, use holdall.sb3.CheckpointCallback."
        )
    training = _parse_training(files[_TRAINING], str(path))
    sampler = Prioritized(*training["priorities"]) if training["priorities"] is not None else None
    tiers: dict[str, Any] = training.get("tiers", {}) | changed_tiers
    memory = ReplayMemory.load(path, sampler=sampler, **tiers)
    try:
        model = _restore_training(memory, env, algorithm, device, functions, changed_tiers)
    except BaseException:
        memory.close()
        raise
    buffer = getattr(model, "replay_buffer", None)
    if buffer is not None:
        buffer.tiers.update(tiers)
    return model


def get_pickled(env: VecEnv) -> bytes:
    """Return the environments of a DummyVecEnv, and the frames that its wrappers stack, as a pickle."""
    return pickle.dumps((_require_dummy(env).envs, [wrapper.stacked_obs for wrapper in _list_stacks(env)]))


def put_pickled(env: VecEnv, state: bytes) -> None:
    """Restore the result of `get_pickled`. Pickles run code: use this function only with checkpoints that you trust."""
    envs, frames = pickle.loads(state)
    inner = _require_dummy(env)
    stacks = _list_stacks(env)
    if len(envs) != len(inner.envs) or len(frames) != len(stacks):
        raise ArgumentError(
            f"env has {len(inner.envs)} environments and {len(stacks)} wrappers VecFrameStack, but the checkpoint was "
            f"saved with {len(envs)} and {len(frames)}. Wrap env as it was."
        )
    inner.envs[:] = envs
    for wrapper, stacked in zip(stacks, frames, strict=True):
        wrapper.stacked_obs = stacked


def _require_dummy(env: VecEnv) -> DummyVecEnv:
    inner = env.unwrapped
    if not isinstance(inner, DummyVecEnv):
        raise ArgumentError(
            f"env_state is 'pickle', but env is a {type(inner).__name__}. Use a DummyVecEnv, or pass two functions as "
            "env_state."
        )
    return inner


def _list_stacks(env: VecEnv) -> list[VecFrameStack]:
    """Return the wrappers that stack frames, outermost first."""
    stacks = []
    while isinstance(env, VecEnvWrapper):
        if isinstance(env, VecFrameStack):
            stacks.append(env)
        env = env.venv
    return stacks


def _find_functions(env_state: Any) -> _Functions | None:
    """Return the two functions of `env_state`, or None. Raise ArgumentError for any other value."""
    if env_state is None:
        return None
    if isinstance(env_state, str) and env_state == "pickle":
        return get_pickled, put_pickled
    if isinstance(env_state, tuple) and len(env_state) == 2 and all(map(callable, env_state)):
        return env_state
    raise ArgumentError(f"env_state ({env_state!r}) must be 'pickle', two functions (get, put), or None.")


def training_files(model: BaseAlgorithm, env_state: _Functions | None) -> dict[str, bytes]:
    """Return the files of a checkpoint of `model`, except for the memory."""
    file = io.BytesIO()
    model.save(file)
    buffer: Any = getattr(model, "replay_buffer", None)
    is_prioritized = isinstance(buffer, PrioritizedReplayBuffer)
    numbers: dict[str, Any] = {}
    training: dict[str, Any] = {
        "algorithm": algorithm_name(type(model)),
        "buffer": None if buffer is None else type(_require_holdall(buffer)).__name__,
        "tiers": {} if buffer is None else _describe_tiers(buffer),
        "priorities": [buffer.sampler.alpha, buffer.sampler.beta] if is_prioritized else None,
        "has_env_state": env_state is not None,
        "generators": rng_states(model, numbers),
    }
    numbers |= _get_vecnormalize_state(model.get_vec_normalize_env())
    numbers |= buffer.episode_state() if isinstance(buffer, HerReplayBuffer) else {}
    arrays = io.BytesIO()
    np.savez(arrays, allow_pickle=False, **numbers)
    files = {_MODEL: file.getvalue(), _TRAINING: json.dumps(training).encode(), _NUMBERS: arrays.getvalue()}
    if env_state is not None:
        files[_ENV] = bytes(env_state[0](model.get_env()))
    return files


def _restore_training(
    memory: ReplayMemory,
    env: GymEnv | None,
    algorithm: type[BaseAlgorithm] | None,
    device: str,
    env_state: _Functions | None,
    changed_tiers: dict[str, Any],
) -> Any:
    """Return the model of the checkpoint that `memory` was loaded from. The model's buffer adopts `memory`."""
    files = memory.attached
    training = _parse_training(files[_TRAINING], "the checkpoint")
    numbers = np.load(io.BytesIO(files[_NUMBERS]), allow_pickle=False)
    if env_state is not None and not training["has_env_state"]:
        raise ArgumentError(
            "env_state was given, but the checkpoint was saved without it. Leave it out, or pass it to both."
        )
    if env is None:
        lanes = memory.num_envs
    elif isinstance(env, VecEnv):
        lanes = env.num_envs
    else:
        lanes = 1
    if training["buffer"] is not None and lanes != memory.num_envs:
        raise ArgumentError(
            f"env has {lanes} environments, but the training was saved with {memory.num_envs}. Pass as many, or load "
            f"only its memory with ReplayMemory.load(path, num_envs={lanes})."
        )
    kind = algorithm or find_algorithm(training["algorithm"])
    settings: dict[str, Any] = {"env": env, "device": device, "force_reset": env_state is None}
    if changed_tiers and training["buffer"] is not None:
        data, _, _ = load_from_zip_file(io.BytesIO(files[_MODEL]), device=device)
        settings["replay_buffer_kwargs"] = ((data or {}).get("replay_buffer_kwargs") or {}) | changed_tiers
    model = kind.load(io.BytesIO(files[_MODEL]), **settings)
    buffer = getattr(model, "replay_buffer", None)
    if training["buffer"] is None:
        memory.close()
    else:
        _require_holdall(buffer).adopt(memory)
        if isinstance(buffer, HerReplayBuffer):
            buffer.restore_episodes(numbers)
    if env_state is not None:
        env_state[1](model.get_env(), files[_ENV])
        _skip_noise_reset(getattr(model, "action_noise", None))
    # Loading the model may have reset the environments, which draws random numbers and changes averages.
    _restore_vecnormalize(model.get_vec_normalize_env(), numbers, is_mid_episode=env_state is not None)
    restore_rng_states(model, training["generators"], numbers)
    return model


def _skip_noise_reset(noise: Any) -> None:
    """Skip the next reset of the action noise: `learn` begins with one, but training continues within an episode."""

    def skip_once() -> None:
        del noise.__dict__["reset"]

    if noise is not None:
        noise.reset = skip_once


def _parse_training(raw: bytes, where: str) -> Any:
    """Return the content of `_TRAINING`. Raise DamageError if it is malformed."""
    try:
        training = json.loads(raw)
        required = {
            name: training[name] for name in ("algorithm", "buffer", "priorities", "has_env_state", "generators")
        }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(
            f"The training saved in {where} cannot be read ({error}). Load another checkpoint."
        ) from error
    priorities = required["priorities"]
    if priorities is not None and len(priorities) != 2:
        raise DamageError(
            f"The training saved in {where} cannot be read (its priorities are {priorities}). Load another checkpoint."
        )
    return training


def _describe_tiers(buffer: ReplayBuffer) -> dict[str, Any]:
    spill_dir = buffer.tiers["spill_dir"]
    return buffer.tiers | {"spill_dir": None if spill_dir is None else os.fspath(spill_dir)}


def _require_holdall(buffer: Any) -> ReplayBuffer:
    if not isinstance(buffer, ReplayBuffer):
        raise CheckpointError(
            f"The model's replay buffer is a {type(buffer).__name__}. Make the model with "
            "replay_buffer_class=holdall.sb3.ReplayBuffer. If that buffer was loaded from a file, write "
            "model.replay_buffer = holdall.sb3.ReplayBuffer.copy_of(model.replay_buffer)."
        )
    return buffer


def _get_vecnormalize_state(env: VecNormalize | None) -> dict[str, Any]:
    """Return the averages and returns of VecNormalize."""
    if env is None:
        return {}
    numbers: dict[str, Any] = {"vecnormalize/returns": env.returns}
    for name in _AVERAGES:
        average = getattr(env, name, None)
        if average is None:
            continue
        by_key = average if isinstance(average, dict) else {"": average}
        for key, one in by_key.items():
            prefix = f"vecnormalize/{name}/{key}"
            numbers |= {f"{prefix}/mean": one.mean, f"{prefix}/var": one.var, f"{prefix}/count": one.count}
    return numbers


def _restore_vecnormalize(env: VecNormalize | None, numbers: Any, *, is_mid_episode: bool) -> None:
    saved = [name for name in numbers if name.startswith("vecnormalize/")]
    if env is None:
        if saved:
            raise ArgumentError(
                "The checkpoint was saved with VecNormalize, but env is not wrapped in it. Wrap env in VecNormalize."
            )
        return
    if not saved:
        raise ArgumentError(
            "The checkpoint was saved without VecNormalize, but env is wrapped in it. Pass env without VecNormalize."
        )
    for name in saved:
        _, kind, *rest = name.split("/")
        if kind == "returns":
            if is_mid_episode:
                env.returns = numbers[name]
            continue
        key, what = rest
        average = getattr(env, kind)
        one = average[key] if isinstance(average, dict) else average
        setattr(one, what, float(numbers[name]) if what == "count" else numbers[name])


def rng_states(model: BaseAlgorithm, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the states of all generators as JSON. Add their arrays to `numbers`."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  Stable-Baselines3's
    version, state, next_gauss = random.getstate()
    numbers["generators/numpy"] = np.asarray(keys)
    numbers["generators/python"] = np.asarray(state, np.uint32)
    numbers["generators/torch"] = th.get_rng_state().numpy()
    if th.cuda.is_available():
        for device, cuda in enumerate(th.cuda.get_rng_state_all()):
            numbers[f"generators/cuda/{device}"] = cuda.numpy()
    return {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss).hex()],
        "python": [version, None if next_gauss is None else float(next_gauss).hex()],
        "action_space": _encode_rng(model.action_space.np_random),
        "environments": _list_environment_rngs(model),
    }


def restore_rng_states(model: BaseAlgorithm, states: Any, numbers: Any) -> None:
    """Restore the states that `rng_states` returned."""
    kind, position, has_gauss, gauss = states["numpy"]
    keys = numbers["generators/numpy"]
    np.random.set_state((kind, keys, position, has_gauss, float.fromhex(gauss)))  # noqa: NPY002  Stable-Baselines3's
    version, next_gauss = states["python"]
    state = tuple(numbers["generators/python"].tolist())
    random.setstate((version, state, None if next_gauss is None else float.fromhex(next_gauss)))
    th.set_rng_state(th.from_numpy(numbers["generators/torch"]))
    for device in range(th.cuda.device_count()):
        if f"generators/cuda/{device}" in numbers:
            th.cuda.set_rng_state(th.from_numpy(numbers[f"generators/cuda/{device}"]), device)
    if states["action_space"] is not None:
        model.action_space._np_random = _decode_rng(states["action_space"])
    env = model.get_env()
    for number, state in enumerate(states["environments"] or ()):
        if env is not None and state is not None:
            env.set_attr("np_random", _decode_rng(state), indices=number)


def _list_environment_rngs(model: BaseAlgorithm) -> list[Any] | None:
    """Return the states of the environments' generators, or None if the environments have no `np_random`."""
    env = model.get_env()
    try:
        generators = [] if env is None else env.get_attr("np_random")
    except (AttributeError, NotImplementedError):
        return None
    return [_encode_rng(one) if isinstance(one, np.random.Generator) else None for one in generators]


def _encode_rng(generator: np.random.Generator) -> Any:
    """Return the state of a generator as JSON, or None if holdall cannot save generators of this kind."""
    arrays: list[Any] = []
    try:
        state = get_generator_state(generator)
    except CheckpointError:
        return None
    encoded = encode_state(state, arrays, "a generator")
    return {"state": encoded, "arrays": [array.tobytes().hex() for array in arrays]}


def _decode_rng(saved: Any) -> np.random.Generator:
    arrays = {number: bytes.fromhex(text) for number, text in enumerate(saved["arrays"])}
    return restore_generator(decode_state(saved["state"], arrays))


def algorithm_name(kind: type[BaseAlgorithm]) -> str:
    """Return the name of an algorithm with its package, or only the class name of a user's own algorithm."""
    package = next((name for name in _PACKAGES if f"{kind.__module__}.".startswith(f"{name}.")), None)
    return kind.__name__ if package is None else f"{package}.{kind.__name__}"


def find_algorithm(full_name: Any) -> type[BaseAlgorithm]:
    """Return the algorithm that `algorithm_name` named. Raise ArgumentError if it is not in `_PACKAGES`."""
    package, _, name = str(full_name).rpartition(".")
    found = None
    if package in _PACKAGES:
        try:
            found = getattr(importlib.import_module(package), name, None)
        except ImportError as error:
            raise ArgumentError(
                f"algorithm: the checkpoint is of a {full_name}. Run 'pip install sb3-contrib'."
            ) from error
    if not (isinstance(found, type) and issubclass(found, BaseAlgorithm)):
        raise ArgumentError(
            f"algorithm was not given, and the checkpoint is of a {full_name}. Pass algorithm={full_name}."
        )
    return found
