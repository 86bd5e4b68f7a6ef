"""Checkpoints of a whole training: model, optimizer, VecNormalize, generators and memory, as one unit.

In:  a model that learns.  Out: checkpoints, and from one of them a model that goes on.
Invariant: everything in a checkpoint is of one moment between two steps; it is there as a whole or not at all.

The model is kept as Stable-Baselines3's own file, which holds pickles: resume only from places that you trust. All the
rest is numbers and text.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from holdall.checkpoint.background import SaveHandle
from holdall.checkpoint.source import attached_files
from holdall.errors import ArgumentError, CheckpointError, DamageError
from holdall.replay import ReplayMemory
from holdall.sampling.draw import require_count
from holdall.sampling.prioritized import Prioritized
from holdall.sb3.algorithms import algorithm_named, algorithm_words
from holdall.sb3.generators import all_generators, restore_generators
from holdall.sb3.her import HerReplayBuffer
from holdall.sb3.prioritized import PrioritizedReplayBuffer
from holdall.sb3.replay import ReplayBuffer

EnvState = tuple[Callable[[Any], bytes], Callable[[Any, bytes], None]]
"""How a VecEnv says where it is, as bytes, and how it is put there again."""

_MODEL, _WORDS, _NUMBERS, _ENV = "sb3/model.zip", "sb3/training.json", "sb3/numbers.npz", "sb3/environment"
_AVERAGES = ("obs_rms", "ret_rms")

_LOG = logging.getLogger("holdall")


class CheckpointCallback(BaseCallback):
    """Saves everything that training needs to go on, every `save_freq` calls, between two steps.

    `model.learn(100_000, callback=CheckpointCallback(10_000, "runs/dog", keep=3))`

    Args:
        save_freq: Calls of `env.step()` between two checkpoints, as in Stable-Baselines3's own callback.
        path: Where they go: anything that `ReplayMemory.save` takes.
        keep: How many of them stay.
        env_state: `(get, set)` for environments that can say where they are, so that a resumed training goes on in the
            middle of its episodes: `get(env)` returns bytes, `set(env, bytes)` takes them back.
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
        self.env_state = env_state
        self._is_due = False
        self._handle: SaveHandle | None = None
        self._carrier: ReplayMemory | None = None

    def save(self) -> SaveHandle:
        """Save now; to be called between two steps."""
        self._is_due = False
        files = training_files(self.model, self.env_state)
        self._handle = self._memory().save(self.path, attach=files, keep=self.keep)
        if self.verbose >= 2:
            _LOG.info("saving a checkpoint of step %d to %s", self.num_timesteps, self.path)
        return self._handle

    def _on_step(self) -> bool:
        # Here the step was taken, but is not yet in the memory.
        self._is_due |= self.n_calls % self.save_freq == 0
        return True

    def _on_rollout_start(self) -> None:
        if self._is_due:
            self._told_last()
            self.save()

    def _on_training_end(self) -> None:
        if self._is_due:
            self.save()
        self._told_last()

    def _told_last(self) -> None:
        """Wait for the last save; one that failed is told, and training goes on."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        try:
            handle.result()
        except OSError as error:
            _LOG.warning("a checkpoint could not be saved (%s); training goes on", error)

    def _memory(self) -> ReplayMemory:
        """Return the memory that carries the rest; on-policy algorithms have none worth keeping."""
        buffer = getattr(self.model, "replay_buffer", None)
        if buffer is None:
            if self._carrier is None:
                self._carrier = ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), capacity=1)
            return self._carrier
        memory: ReplayMemory = _own(buffer).memory
        return memory


def resume(
    path: str | os.PathLike[str],
    env: VecEnv,
    *,
    algorithm: type[BaseAlgorithm] | None = None,
    device: str = "auto",
    env_state: EnvState | None = None,
    budget: str | int | None = "auto",
    prefer: str = "balanced",
) -> Any:
    """Return the model of the newest checkpoint, ready for `learn(..., reset_num_timesteps=False)`.

    Args:
        path: Where `CheckpointCallback` saved it. The model's own file holds pickles, which can run code: resume only
            from places that you trust.
        env: The environments, wrapped as they were; with VecNormalize, its averages are set.
        algorithm: The model's class, where it is none of Stable-Baselines3's or sb3-contrib's.
        env_state: As in `CheckpointCallback`; without it, the environments are reset when training goes on.
        budget: See `holdall.ReplayMemory`.
        prefer: The same.
    """
    words = _words_of(attached_files(path)[_WORDS], str(path))
    sampler = Prioritized(*words["priorities"]) if words["priorities"] is not None else None
    memory = ReplayMemory.load(path, budget=budget, prefer=prefer, sampler=sampler)
    try:
        return _resumed(memory, env, algorithm, device, env_state)
    except BaseException:
        memory.close()
        raise


def training_files(model: BaseAlgorithm, env_state: EnvState | None) -> dict[str, bytes]:
    """Return all of a training but its memory, as files."""
    file = io.BytesIO()
    model.save(file)
    buffer = getattr(model, "replay_buffer", None)
    words: dict[str, Any] = {
        "algorithm": algorithm_words(type(model)),
        "buffer": None if buffer is None else type(_own(buffer)).__name__,
        "priorities": [buffer._alpha, buffer._beta] if isinstance(buffer, PrioritizedReplayBuffer) else None,
        "has_env_state": env_state is not None,
    }
    numbers: dict[str, Any] = {}
    words["generators"] = all_generators(model, numbers)
    numbers |= _averages(model.get_vec_normalize_env()) | _episodes(buffer)
    files = {_MODEL: file.getvalue(), _WORDS: json.dumps(words).encode(), _NUMBERS: _packed(numbers)}
    if env_state is not None:
        files[_ENV] = bytes(env_state[0](model.get_env()))
    return files


def _resumed(
    memory: ReplayMemory,
    env: VecEnv,
    algorithm: type[BaseAlgorithm] | None,
    device: str,
    env_state: EnvState | None,
) -> Any:
    files = memory.attached
    words = _words_of(files[_WORDS], "the checkpoint")
    numbers = np.load(io.BytesIO(files[_NUMBERS]), allow_pickle=False)
    if env_state is not None and not words["has_env_state"]:
        raise ArgumentError(
            "env_state was given, but the checkpoint was saved without; leave it out, or pass it to both"
        )
    if words["buffer"] is not None and env.num_envs != memory.num_envs:
        raise ArgumentError(
            f"env has {env.num_envs} environments, and the training was saved with {memory.num_envs}; pass as many, or "
            f"load its memory alone with ReplayMemory.load(path, num_envs={env.num_envs})"
        )
    kind = algorithm or algorithm_named(words["algorithm"])
    model = kind.load(io.BytesIO(files[_MODEL]), env=env, device=device, force_reset=env_state is None)
    buffer = getattr(model, "replay_buffer", None)
    if words["buffer"] is None:
        memory.close()
    else:
        _own(buffer).adopt(memory)
        _set_episodes(buffer, numbers)
    if env_state is not None:
        env_state[1](model.get_env(), files[_ENV])
        _keep_noise(getattr(model, "action_noise", None))
    # What follows undoes what setting the environments may have done: a reset draws, and is averaged.
    _set_averages(model.get_vec_normalize_env(), numbers, is_mid_episode=env_state is not None)
    restore_generators(model, words["generators"], numbers)
    return model


def _keep_noise(noise: Any) -> None:
    """Pass over the next reset of action noise: `learn` begins with one, which would be in the middle of an episode."""

    def keep() -> None:
        del noise.__dict__["reset"]

    if noise is not None:
        noise.reset = keep


def _words_of(raw: bytes, where: str) -> Any:
    try:
        words = json.loads(raw)
        names = [words[name] for name in ("algorithm", "buffer", "priorities", "has_env_state", "generators")]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(f"{where}: what was saved of the training makes no sense ({error})") from error
    if words["priorities"] is not None and len(words["priorities"]) != 2:
        raise DamageError(f"{where}: what was saved of the training makes no sense ({names})")
    return words


def _own(buffer: Any) -> ReplayBuffer:
    if not isinstance(buffer, ReplayBuffer):
        raise CheckpointError(
            f"the model's replay buffer is a {type(buffer).__name__}; make the model with "
            "replay_buffer_class=holdall.sb3.ReplayBuffer"
        )
    return buffer


def _averages(env: VecNormalize | None) -> dict[str, Any]:
    """Return what VecNormalize has learnt of the environments."""
    if env is None:
        return {}
    found: dict[str, Any] = {"vecnormalize/returns": env.returns}
    for name in _AVERAGES:
        average = getattr(env, name, None)
        named = average if isinstance(average, dict) else {} if average is None else {"": average}
        for key, one in named.items():
            start = f"vecnormalize/{name}/{key}"
            found |= {f"{start}/mean": one.mean, f"{start}/var": one.var, f"{start}/count": one.count}
    return found


def _set_averages(env: VecNormalize | None, numbers: Any, *, is_mid_episode: bool) -> None:
    saved = [name for name in numbers if name.startswith("vecnormalize/")]
    if (env is None) != (not saved):
        raise ArgumentError(
            f"env is {'not ' if env is None else ''}wrapped in VecNormalize, and when it was saved it was "
            f"{'' if env is None else 'not'}; wrap it as it was".replace("  ", " ")
        )
    if env is None:
        return
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


def _episodes(buffer: Any) -> dict[str, Any]:
    """Return what a hindsight buffer knows of episodes."""
    if not isinstance(buffer, HerReplayBuffer):
        return {}
    kept, lengths = buffer.infos.state()
    return {
        "her/infos": kept,
        "her/info_lengths": lengths,
        "her/start": buffer.ep_start,
        "her/length": buffer.ep_length,
        "her/current": buffer._current_ep_start,
    }


def _set_episodes(buffer: Any, numbers: Any) -> None:
    if isinstance(buffer, HerReplayBuffer):
        buffer.ep_start[:] = numbers["her/start"]
        buffer.ep_length[:] = numbers["her/length"]
        buffer._current_ep_start[:] = numbers["her/current"]
        buffer.infos.restore(numbers["her/infos"], numbers["her/info_lengths"])
        # Episodes that lost steps were forgotten before the checkpoint; their slots hold others by now.
        buffer._held_from = buffer.memory.first_id // buffer.n_envs
        buffer._drawable = None


def _packed(numbers: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **numbers)
    return file.getvalue()
